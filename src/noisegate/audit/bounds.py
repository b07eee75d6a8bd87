"""Exact tests and intervals. Every threshold that they are used with is fixed before anything is drawn.

in, out: trials whose worker held the canary, and those whose did not. An event that happens with probability p in the
first and q in the second world refutes (epsilon, delta) if p > e^epsilon q + delta.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

SEARCHED = 50
"""Values of the unknown q at which the largest p-value is looked for."""

SET_ASIDE = 0.02
"""Share of the level spent on where q may lie at all (Berger and Boos, 1994)."""


def too_many(hits: int, trials: int, most: float) -> float:
    """P-value of so many hits or more if each happens with probability at most `most`."""
    return float(stats.binom.sf(hits - 1, trials, min(1.0, most))) if most > 0 else float(hits == 0)


def above(hits: int, trials: int, level: float) -> float:
    """A lower bound on a probability, wrong with probability at most `level` (Clopper and Pearson, 1934)."""
    return float(stats.beta.ppf(level, hits, trials - hits + 1)) if hits else 0.0


def below(hits: int, trials: int, level: float) -> float:
    """An upper bound likewise."""
    return float(stats.beta.isf(level, hits + 1, trials - hits)) if hits < trials else 1.0


def violates(hits: int, of: int, false: int, others: int, epsilon: float, delta: float, level: float) -> bool:
    """Whether `hits` of `of` against `false` of `others` refutes p <= e^epsilon q + delta at this level.

    The statistic is hits / of - e^epsilon false / others. Its p-value is the largest over all q that an interval of
    level SET_ASIDE * level leaves, at the edge p = e^epsilon q + delta, plus twice that level.
    """
    if of == 0 or others == 0:
        return False
    spent, factor = SET_ASIDE * level, math.exp(epsilon)
    seen = hits / of - factor * false / others
    if seen <= delta:
        return False
    low, high = above(false, others, spent / 2), below(false, others, spent / 2)
    q = np.linspace(low, high, SEARCHED)[:, None]
    p = np.minimum(1.0, factor * q + delta)
    least, most = stats.binom.ppf(spent / 2, others, low), stats.binom.isf(spent / 2, others, high)
    counts = np.arange(int(least), int(most) + 1)  # what is left out happens with probability `spent` at most
    needed = np.ceil(of * (seen + factor * counts / others) - 1e-9)
    chance = (stats.binom.pmf(counts, others, q) * stats.binom.sf(needed - 1, of, p)).sum(1)
    return bool(chance.max() + 2 * spent <= level)


def epsilon_above(hits: int, of: int, false: int, others: int, delta: float, level: float) -> float:
    """The largest epsilon that these counts refute at this delta and level; 0 if they refute none."""
    low, high = 0.0, 20.0
    if not violates(hits, of, false, others, low, delta, level):
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        refuted = violates(hits, of, false, others, middle, delta, level)
        low, high = (middle, high) if refuted else (low, middle)
    return low


def one_run_p(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P-value of so many right guesses of independent fair coins (Steinke, Nasr and Jagielski, 2023, theorem 5.2)."""
    rate = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(right - 1, guesses, rate))
    # P(right > X >= right - i) / i, at its largest
    steps = np.arange(1, right + 1)
    sums = np.cumsum(stats.binom.pmf(right - steps, guesses, rate))
    alpha = float((sums / steps).max()) if right else 0.0
    return min(1.0, beta + alpha * delta * 2 * canaries)


def one_run_above(canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """The largest epsilon that the one-run bound refutes at this delta and level; 0 if none."""
    low, high = 0.0, 20.0
    if one_run_p(canaries, guesses, right, low, delta) > level:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        refuted = one_run_p(canaries, guesses, right, middle, delta) <= level
        low, high = (middle, high) if refuted else (low, middle)
    return low


def area(held: Array, not_held: Array) -> tuple[float, float]:
    """(area under the ROC curve, its standard error by DeLong, DeLong and Clarke-Pearson, 1988); ties count half."""
    first, second = len(held), len(not_held)
    ranks = stats.rankdata(np.concatenate([held, not_held]))
    above_others = (ranks[:first] - stats.rankdata(held)) / second
    below_others = 1 - (ranks[first:] - stats.rankdata(not_held)) / first
    error = math.sqrt(np.var(above_others, ddof=1) / first + np.var(below_others, ddof=1) / second)
    return float(above_others.mean()), error


def area_error(area: float, held: int, not_held: int) -> float:
    """The standard error that so many trials with this area have on average (Hanley and McNeil, 1982)."""
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (held - 1) * (one - area**2) + (not_held - 1) * (two - area**2)
    return math.sqrt(variance / (held * not_held))


def mu_of(area: float) -> float:
    """The mu of the Gaussian mechanism whose ROC curve has this area."""
    return max(0.0, math.sqrt(2) * float(stats.norm.ppf(min(area, 1 - 1e-12))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of mu-GDP at this delta (Dong, Roth and Su, 2022, corollary 1)."""

    def missing(epsilon: float) -> float:
        first = stats.norm.cdf(-epsilon / mu + mu / 2)
        return float(first - math.exp(epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2)))

    if mu <= 0 or missing(0.0) <= delta:
        return 0.0
    low, high = 0.0, 50.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) > delta else (low, middle)
    return low
