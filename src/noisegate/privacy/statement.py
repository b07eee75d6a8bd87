"""One noise, several ways to say what it costs: epsilon at the run's own delta, epsilon at 1e-5, and Gaussian-DP's mu.

mu compares with one look at a sum that an example moves by 1, through Gaussian noise of deviation 1 / mu (Dong, Roth
and Su, 2022). The run is at least as private as that for every delta of `LEAST_DELTA` or more: whichever epsilon the
look has at such a delta, the run has too. Below that delta nothing is said. Being one number for a whole curve, mu is
often a little above what a single (epsilon, delta) asks for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisegate.privacy.losses import composed
from noisegate.privacy.pricing import Ask, legible, on_grid, renyi, rounds_of, spent_by
from noisegate.sampling import BALANCED, EQUAL

COMMON_DELTA = 1e-5
LEAST_DELTA = 1e-10
"""The smallest delta at which mu is a bound."""

POINTS = 200
"""At which a curve of (epsilon, delta) is looked at."""

BETWEEN = 20
"""Points on the chord between two of these."""

LARGEST_MU = 1e6
Array = NDArray[np.float64]

IN_WORDS = {
    "poisson": "one example of one worker added or removed, at a declared rate that does not follow the data",
    EQUAL: "one example of one worker added or removed, taking the rate, which follows its size, for constant",
    BALANCED: "one example of one worker added or removed, at the public rate of its class; the highest is priced",
    "fixed": "one example of one worker replaced by another",
}
"""The relation of each sampling, for people."""


@dataclass(frozen=True)
class Statement:
    """What a noise costs. epsilon: at the delta that was asked for. None: no finite number is known."""

    epsilon: float
    epsilon_at_1e_5: float | None
    mu: float | None


@lru_cache(maxsize=1024)
def statement(ask: Ask, sigma: float) -> Statement:
    """Everything from one accountant. epsilon is what `epsilon(sigma, ...)` says; inf where no bound is known."""
    if ask.rounds == 0:
        return Statement(0.0, 0.0, 0.0)
    with legible(ask, sigma):
        if ask.accountant == "rdp":
            accountant = renyi([(ask, sigma)])
            common, curve = float(accountant.get_epsilon(COMMON_DELTA)), _curve_of_renyi(accountant)
        else:
            parts, interval = (rounds_of(ask, sigma),), on_grid(ask, sigma)[1]
            total = composed(parts, interval)
            common, curve = float(total.get_epsilon_for_delta(COMMON_DELTA)), _curve_of_losses(total)
        return Statement(spent_by(ask, sigma), _known(common), _known(smallest_mu(curve)))


def smallest_mu(curve: Iterator[tuple[float, float]]) -> float:
    """The smallest mu, or a hair more, whose Gaussian curve passes above all of these (epsilon, delta); inf if none."""
    points = np.array(list(curve), dtype=np.float64)
    if not np.isfinite(points).all():
        return math.inf
    epsilon, delta = points.T
    low, high = np.full(len(points), math.log(1e-9)), np.full(len(points), math.log(LARGEST_MU))
    for _ in range(60):  # each halves the logarithm's range of 35
        middle = (low + high) / 2
        over = gaussian_delta(np.exp(middle), epsilon) >= delta
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    found = float(np.exp(high.max()))
    return found if found < LARGEST_MU else math.inf


def gaussian_delta(mu: Array, epsilon: Array) -> Array:
    """The delta of mu-GDP at epsilon: Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2)."""
    from scipy.special import log_ndtr

    first, second = log_ndtr(-epsilon / mu + mu / 2), epsilon + log_ndtr(-epsilon / mu - mu / 2)
    found: Array = np.exp(first) * -np.expm1(np.minimum(second - first, 0.0))
    return found


def _curve_of_losses(total: Any) -> Iterator[tuple[float, float]]:
    """Points above the curve, such that what passes above them passes above all of it, down to LEAST_DELTA.

    delta is convex in e^epsilon, so that between two points it lies below their chord. And it falls: up to the next
    point of the chord it is at most what the chord is here.
    """
    last = float(total.get_epsilon_for_delta(LEAST_DELTA))
    if not math.isfinite(last):
        yield last, LEAST_DELTA
        return
    looked = np.linspace(0.0, max(last, 1e-9), POINTS + 1)
    known = [float(total.get_delta_for_epsilon(float(epsilon))) for epsilon in looked]
    for (left, right), (above, below) in zip(pairwise(looked), pairwise(known), strict=True):
        between = np.linspace(0.0, right - left, BETWEEN + 1)
        way = np.expm1(between) / math.expm1(right - left)
        chord = (1 - way) * above + way * below
        yield from zip((left + between[1:]).tolist(), chord[:-1].tolist(), strict=True)


def _curve_of_renyi(accountant: Any) -> Iterator[tuple[float, float]]:
    """The same from epsilons at deltas: between two of these, epsilon is at most what it is at the smaller delta."""
    for smaller, larger in pairwise(np.exp(np.linspace(math.log(LEAST_DELTA), 0.0, POINTS + 1))):
        epsilon = float(accountant.get_epsilon(float(smaller)))
        yield epsilon, float(larger)
        if epsilon == 0:
            return


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
