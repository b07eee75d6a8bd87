"""The rate of a batch is a declared constant. Had it followed the data, the claim would be false: an exact computation.

A worker sums vectors of length at most 1 and adds noise. The data that tell most are on a line: one example adds 1, the
others add -a each. Nothing here uses dp-accounting but the claim itself.
"""

import numpy as np
import pytest
from scipy.stats import binom

from losses import Round, normal, worse_of_both
from noisegate.privacy import calibrate, epsilon
from noisegate.sampling import Poisson

EXAMPLES, BATCH, ROUNDS = 141, 16, 267  # the digits of ten workers, as they were before delta was chosen anew
DELTA = EXAMPLES**-1.1
CLAIM = {"examples": EXAMPLES, "rounds": ROUNDS, "sampling": Poisson(BATCH), "delta": DELTA}
POINTS = 40_001


def with_and_without(rate: float, rate_without: float, others: int, a: float, sigma: float) -> Round:
    """The sum that a worker sends with the example at `rate`, against the sum without it at `rate_without`."""
    drawn = np.arange(others + 1)
    here, there = binom.pmf(drawn, others, rate), binom.pmf(drawn, others, rate_without)
    likely = drawn[(here > 1e-20) | (there > 1e-20)]
    ends = -a * likely[[0, -1]]
    x = np.linspace(min(ends) - 13 * sigma, 1 + max(ends) + 13 * sigma, POINTS)
    p, q = np.zeros_like(x), np.zeros_like(x)
    for k in likely:
        alone = normal(x, -a * k, sigma)
        p += here[k] * ((1 - rate) * alone + rate * normal(x, 1 - a * k, sigma))
        q += there[k] * alone
    return Round(x, p, q)


@pytest.mark.parametrize(("budget", "at_least"), [(2.0, 2.395), (1.0, 1.574), (0.125, 0.305)])
def test_a_rate_that_follows_the_data_costs_more_than_is_claimed(budget, at_least):
    """Without the example everyone else is drawn a little more often: b / (n - 1) in place of b / n."""
    sigma = calibrate(budget, **CLAIM)
    a = min(1.0, sigma**2 / BATCH)  # where the shift is largest beside the spread of the others
    one = with_and_without(BATCH / EXAMPLES, BATCH / (EXAMPLES - 1), EXAMPLES - 1, a, sigma)
    low, high = worse_of_both([(one, ROUNDS)], DELTA, budget)
    assert at_least <= low <= high <= 1.05 * at_least
    assert low > 1.15 * epsilon(sigma, **CLAIM)


@pytest.mark.parametrize("budget", [2.0, 0.125])
@pytest.mark.parametrize(
    ("held", "a"),
    [(EXAMPLES, 0.0), (2 * EXAMPLES, 0.37), (17, 1.0), (2 * EXAMPLES, 1.0), (EXAMPLES, -1.0), (6 * EXAMPLES, 0.2)],
)
def test_a_declared_rate_costs_what_is_claimed_whatever_a_worker_holds(budget, held, a):
    """Literally: the example is there or it is not, and the others are drawn as before. True sizes stay private."""
    sigma, rate = calibrate(budget, **CLAIM), BATCH / EXAMPLES
    claimed = epsilon(sigma, **CLAIM)
    low, high = worse_of_both([(with_and_without(rate, rate, held - 1, a, sigma), ROUNDS)], DELTA, budget)
    assert low <= claimed
    assert high <= 1.005 * claimed, "no more than what our own computation is unsure of"
    if a == 0:  # nothing hides the example: the claim is tight
        assert high >= claimed
