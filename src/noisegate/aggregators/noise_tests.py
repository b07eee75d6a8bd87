"""Does an upload look like the privacy noise? The two tests of the paper's first stage (Algorithm 2).

If noise of standard deviation s dominates an honest upload g of d coordinates, then ||g||^2 / s^2 is chi-square with
d degrees of freedom, and the coordinates are a sample of N(0, s^2).
"""

import functools
import math

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

REACH = 6.0
"""The histogram covers [-REACH, REACH] standard deviations; one bin more on either side takes the rest."""

FINENESS = 49.0
"""Bins per square root of d. The threshold shrinks like 1/sqrt(d), so a bin's mass stays about a 14th of it."""

EDGE_SLACK = 1e-6
"""How far rounding in float32 can move the mass at a bin's edge: B bins, at most 2 B 2^-24 of a bin, and at most 4.8/B
of mass in a bin."""


def norm_interval(d: int, noise_std: float, width: float) -> tuple[float, float]:
    """The lengths within `width` standard deviations of the normal approximation of ||g||^2, as the paper prints them.

    >>> low, high = norm_interval(25450, 1.0, 3.0)
    >>> round(low, 2), round(high, 2)
    (157.39, 161.64)
    """
    center, spread = noise_std**2 * d, noise_std**2 * math.sqrt(2 * d)
    return math.sqrt(max(0.0, center - width * spread)), math.sqrt(center + width * spread)


@functools.lru_cache(maxsize=64)
def ks_threshold(d: int, significance: float) -> float:
    """The Kolmogorov-Smirnov statistic of d samples whose p-value is `significance` (exact distribution)."""
    return float(stats.kstwo.isf(significance, d))


def ks_statistic(upload: Tensor, noise_std: float) -> float:
    """sup |empirical CDF - CDF of N(0, noise_std^2)| of one upload, by sorting, in float64."""
    # numpy sorts floats several times faster than torch on a CPU.
    values = np.sort(upload.detach().cpu().numpy())
    below = special.ndtr(values.astype(np.float64) / noise_std)
    ranks = np.arange(len(values) + 1) / len(values)
    return float(max((ranks[1:] - below).max(), (below - ranks[:-1]).max()))


def ks_rejects(uploads: Tensor, noise_std: float, significance: float) -> Tensor:
    """(n,) whether each row's KS test against N(0, noise_std^2) has a p-value below `significance`.

    Exact without sorting every row: a histogram with equal bins bounds each statistic from both sides, and only rows
    whose bounds lie on either side of the threshold are sorted.
    """
    d = uploads.shape[1]
    threshold = ks_threshold(d, significance)
    low, high = ks_bounds(uploads, noise_std)
    rejected = low > threshold
    for row in (~rejected & (high > threshold)).nonzero().flatten().tolist():
        rejected[row] = ks_statistic(uploads[row], noise_std) > threshold
    return rejected


def ks_bounds(uploads: Tensor, noise_std: float) -> tuple[Tensor, Tensor]:
    """(n,), (n,): no more than and no less than each row's KS statistic."""
    d = uploads.shape[1]
    bins = math.ceil(FINENESS * math.sqrt(d))
    cumulative = _histogram(uploads, noise_std, bins).cumsum(1).double() / d  # at the right edge of each bin
    left = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    right_mass, left_mass = _edge_masses(bins, uploads.device)
    at_edges = (cumulative - right_mass).abs().amax(1)
    inside = torch.maximum((cumulative - left_mass).amax(1), (right_mass - left).amax(1))
    return at_edges - EDGE_SLACK, inside + EDGE_SLACK


def _histogram(uploads: Tensor, noise_std: float, bins: int) -> Tensor:
    """(n, bins + 2) counts. Rounding is monotone, so bins never change the order of two values."""
    n = len(uploads)
    places = (uploads * (bins / (2 * REACH * noise_std))).add_(bins / 2 + 1).clamp_(0, bins + 1).to(torch.int32)
    places += torch.arange(n, dtype=torch.int32, device=uploads.device)[:, None] * (bins + 2)
    return torch.bincount(places.flatten(), minlength=n * (bins + 2)).view(n, bins + 2)


@functools.lru_cache(maxsize=8)
def _edge_masses(bins: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The normal mass below the right and below the left edge of every bin."""
    inner = special.ndtr(np.linspace(-REACH, REACH, bins + 1))
    right = torch.from_numpy(np.concatenate([inner, [1.0]])).to(device)
    left = torch.from_numpy(np.concatenate([[0.0], inner])).to(device)
    return right, left
