"""Which lengths an honest upload has: the first test of the paper's first stage (Algorithm 2), and a sharper one.

If noise of standard deviation s dominates an honest upload g of d coordinates, then ||g||^2 / s^2 is chi-square with
d degrees of freedom.
"""

import functools
import math

import numpy as np
import torch
from scipy import optimize, stats
from torch import Tensor

SIZE_STEP, SIZE_STEPS = 0.5, 13
"""Expected batches, over the public one, are rounded up to a multiple of this. The last step covers what is larger."""


def norm_interval(d: int, noise_std: float, width: float) -> tuple[float, float]:
    """The lengths within `width` standard deviations of the normal approximation of ||g||^2, as the paper prints them.

    >>> low, high = norm_interval(25450, 1.0, 3.0)
    >>> round(low, 2), round(high, 2)
    (157.39, 161.64)
    """
    center, spread = noise_std**2 * d, noise_std**2 * math.sqrt(2 * d)
    return math.sqrt(max(0.0, center - width * spread)), math.sqrt(center + width * spread)


@functools.lru_cache(maxsize=64)
def honest_lengths(
    d: int, noise_std: float, batch: int, largest: float, chance: float, expected: float = 1.0
) -> tuple[float, float]:
    """The lengths that an honest upload has but for this chance, half of it on either side, whatever its signal is.

    A batch of B examples gives a signal of length at most B largest / batch. Given the signal, ||u||^2 / s^2 is
    noncentral chi-square with d degrees of freedom, which grows with the signal: below, no signal is the worst case;
    above, the longest, in the mean over B, which is Poisson with mean `batch` times `expected`.

    >>> low, high = honest_lengths(25450, 0.05, 16, 1.0, 1e-3)
    >>> round(low, 3), round(high, 3)
    (7.86, 8.235)
    """
    drawn = batch * expected
    sizes = np.arange(stats.poisson.isf(max(chance / 1e6, 1e-15), drawn) + 1)
    weights, signals = stats.poisson.pmf(sizes, drawn), sizes * largest / batch
    if not noise_std:
        return 0.0, float(stats.poisson.isf(chance / 2, drawn)) * largest / batch
    shifts = np.maximum((signals / noise_std) ** 2, 1e-9)  # scipy has no noncentral distribution without a shift

    def refused(square: float) -> float:
        return float(weights @ stats.ncx2.sf(square, d, shifts)) - chance / 2

    most = float(stats.ncx2.isf(chance / 4, d, shifts[-1]))
    return (
        noise_std * math.sqrt(float(stats.chi2.ppf(chance / 2, d))),
        noise_std * math.sqrt(float(optimize.brentq(refused, d, most))),
    )


def longest_lengths(expected: Tensor, d: int, noise_std: float, batch: int, largest: float, chance: float) -> Tensor:
    """(n,) the longest length that honest uploads have, by what each is expected to be made of, over `batch`. (n,)"""
    table = _longest_by_size(d, noise_std, batch, largest, chance, expected.device)
    return table[(expected / SIZE_STEP).ceil().long().clamp(1, SIZE_STEPS) - 1]


@functools.lru_cache(maxsize=16)
def _longest_by_size(
    d: int, noise_std: float, batch: int, largest: float, chance: float, device: torch.device
) -> Tensor:
    sizes = [SIZE_STEP * (step + 1) for step in range(SIZE_STEPS)]
    return torch.tensor(
        [honest_lengths(d, noise_std, batch, largest, chance, size)[1] for size in sizes], device=device
    )
