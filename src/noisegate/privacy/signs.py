"""What signs that are flipped at random cost an example (randomized response: Warner, 1965), over all rounds.

* One round: one example can turn all d signs, so the pair of d kept signs against d flipped ones dominates. All that
  tells these two apart is how many signs k came out one way: k is Binomial(d, p) in P and Binomial(d, 1 - p) in Q, and
  the privacy loss is (2 k - d) r. Anything that is done before the signs are flipped (bounding, quantizing) at most
  mixes such pairs, which tells less.
* Poisson sampling at rate q: (1 - q) Q + q P against Q if the example is removed, Q against it if it is added
  (Zhu, Dong and Wang, 2022). The larger epsilon of the two counts.
* T rounds: privacy loss distributions, composed by dp-accounting.

What a paper states for one sign in one round, r, bounds none of this.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisegate.flips import cost_of_sign, flip_probability
from noisegate.sampling import accounting

TAIL = 1e-21
"""Probability of extreme losses in a round that is counted as an infinite loss, or at the lowest loss kept."""

Array = NDArray[np.float64]


def signs_of_one_round(sigma: float, signs: int, rate: float, interval: float) -> Any:
    """dp-accounting's distribution of the loss of one round at this rate, on a grid of losses."""
    accounting()  # says what to do where it is missing
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    removed, added = (_on_grid(*pair, interval) for pair in losses(sigma, signs, rate))
    return PrivacyLossDistribution.create_from_rounded_probability(
        removed[0], removed[1], interval, True, added[0], added[1], symmetric=False
    )


def losses(sigma: float, signs: int, rate: float) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(loss, probability) of one round, for an example that is removed and for one that is added. Losses ascend.

    Outcomes of less than `TAIL` together may be missing at both ends.
    """
    from scipy.stats import binom

    flip = flip_probability(sigma, signs)
    # By Hoeffding's inequality k is less than this with probability TAIL at most, and symmetrically for P.
    least = max(0, math.floor(signs * flip - math.sqrt(signs * -math.log(TAIL) / 2)))
    k = np.arange(least, signs - least + 1, dtype=np.float64)
    flipped: Array = np.exp(binom.logpmf(k, signs, flip))
    flipped /= flipped.sum()  # logpmf is off by some 1e-12 of itself
    kept = flipped[::-1]
    alone = (2 * k - signs) * cost_of_sign(sigma, signs)
    sampled = _sampled(alone, rate)
    return (sampled, (1 - rate) * flipped + rate * kept), (-sampled[::-1], kept)


def largest_loss(sigma: float, signs: int, rate: float) -> float:
    """Of one round, for an example that is removed or added: that of d signs which all came out one way."""
    all_signs = signs * cost_of_sign(sigma, signs)
    removed, added = _sampled(np.array([all_signs, -all_signs]), rate)
    return float(max(removed, -added))


def _sampled(alone: Array, rate: float) -> Array:
    """log((1 - q) + q e^x), however large x is."""
    never = math.log1p(-rate) if rate < 1 else -math.inf
    sampled: Array = np.logaddexp(never, math.log(rate) + alone)
    return sampled


def _on_grid(loss: Array, mass: Array, interval: float) -> tuple[dict[int, float], float]:
    """(probability of each multiple of `interval`, of an infinite loss): a pair that is at least as easy to tell apart.

    An outcome between two multiples becomes two outcomes there, whose probabilities add up to its own in both
    distributions: to see only the old outcome is to process the new ones, and processing hides. (Doroshenko, Ghazi,
    Kamath, Kumar and Manurangsi, 2022, connect the dots this way.) Rounding up would add a half interval a round.
    """
    rare = np.cumsum(mass[::-1])[::-1] <= TAIL  # the largest losses count as infinite, with those that are missing
    infinite = TAIL + float(mass[rare].sum())
    loss, mass = loss[~rare], mass[~rare]
    loss = np.maximum(loss, loss[np.searchsorted(np.cumsum(mass), TAIL)])  # and the smallest are raised
    below = np.floor(loss / interval)
    upper = np.clip(np.expm1(below * interval - loss) / np.expm1(-interval), 0.0, 1.0)
    first = int(below[0])
    place = below.astype(np.int64) - first
    size = int(place[-1]) + 2
    grid = np.bincount(place, mass * (1 - upper), size) + np.bincount(place + 1, mass * upper, size)
    return {first + int(at): float(grid[at]) for at in np.flatnonzero(grid)}, infinite
