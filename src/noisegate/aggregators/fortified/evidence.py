"""Evidence against a worker that adds up over the rounds: one-sided CUSUM statistics as likelihood ratios (Page, 1954).

Let x_t be how far a worker's upload lies outside of what is expected of an honest one, in standard deviations. For an
honest worker x_t is at most a standard normal variable, whatever happened before. Then for every shift k > 0

    W_t = max(0, W_{t-1} + k x_t - k^2 / 2)

is the logarithm of the largest likelihood ratio, over all rounds at which a shift by k may have begun, of "shifted
since then" against "honest". It is never below zero: good behavior earns no credit that could be spent later.

Honest workers. exp(k x - k^2 / 2) has expectation at most 1. If the x_t are independent, W_t is distributed like the
maximum of a random walk whose exponential is a supermartingale, so P(W_t > h) <= exp(-h) in every round (Ville's
inequality, for the walk in reverse order). If they are not, the Shiryaev-Roberts sum, of which W_t is the largest term,
still gives P(W_t > h) <= t exp(-h).

Byzantine workers. W_t <= h means that over the last m rounds, for every m, the x add up to at most h / k + m k / 2.
With shifts k over a wide range that is about sqrt(2 h m): an accepted worker goes no further along a direction than
noise would carry it.
"""

import functools

import torch
from torch import Tensor

SHIFTS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The shifts k that are looked for, in standard deviations. One in between is found nearly as fast."""

LARGEST_DISTANCE = 30.0
"""Distances count up to this many standard deviations.

One such distance is enough to be refused for some thirty rounds."""

MOST_EVIDENCE = 80.0
"""Log-likelihood ratios above this count as this much in a mean of likelihood ratios, so that it is finite."""


def gathered(before: Tensor | None, outside: Tensor, counts: Tensor) -> Tensor:
    """(n, K, SHIFTS) the statistics after a round, from those before it.

    outside: (n, K) how far each worker lies outside of K bounds, in standard deviations; negative if inside.
    counts: (n,) whose upload counts. The statistics of the others stay as they were.
    """
    shifts, halves = shifts_on(outside.dtype, outside.device)
    outside = outside.nan_to_num(LARGEST_DISTANCE).clamp_(-LARGEST_DISTANCE, LARGEST_DISTANCE)
    steps = torch.addcmul(halves, outside[..., None], shifts)
    before = torch.zeros_like(steps) if before is None else before
    return torch.where(counts[:, None, None], (before + steps).clamp(min=0.0), before)


def largest(evidence: Tensor) -> Tensor:
    """(n,) the largest statistic of each worker."""
    return evidence.flatten(1).amax(1)


def together(evidence: Tensor) -> Tensor:
    """(n,) the logarithm of the mean likelihood ratio of each worker's statistics, from 0 to MOST_EVIDENCE."""
    return evidence.flatten(1).clamp(max=MOST_EVIDENCE).exp().mean(1).log()  # no statistic is below 0, nor is this


@functools.lru_cache(maxsize=8)
def shifts_on(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """k and -k^2 / 2"""
    shifts = torch.tensor(SHIFTS, dtype=dtype, device=device)
    return shifts, shifts.square() / -2
