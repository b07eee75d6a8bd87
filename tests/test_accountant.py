"""The accountant against a computation of our own (losses.py), and what several runs and several examples cost."""

import math
import time

import numpy as np
import pytest

from losses import poisson_gaussian, worse_of_both
from noisegate.errors import PrivacyError, SpecError
from noisegate.privacy import Cost, ask_of, epsilon, group_epsilon, guarantee, statement, together
from noisegate.privacy.statement import LEAST_DELTA, gaussian_delta
from noisegate.sampling import FixedSize, Poisson

TIGHT = 1.005
"""The accountant may be this much above what our own computation says at most."""

DIGITS = {"declared": 141, "batch": 16, "sampling": "poisson", "sigma": 2.438, "rounds": 267}
DIGITS_DELTA = 141**-1.1

SETTINGS = [  # examples, batch, sigma, rounds, delta
    (3000, 16, 0.729, 1500, 3000**-1.1),
    (3000, 16, 0.7975, 1500, 1e-5),
    (3000, 16, 4.6, 1500, 1e-5),
    (141, 16, 2.438, 267, 141**-1.1),
    (141, 16, 3.85, 267, 1e-5),
    (727, 16, 1.0, 455, 1e-5),
    (100, 100, 1.0, 1, 1e-5),
    (1000, 8, 0.6, 1, 1e-5),
    (200, 150, 9.0, 40, 1e-6),
    (50, 25, 4.0, 30, 1e-4),
]


@pytest.mark.parametrize(("examples", "batch", "sigma", "rounds", "delta"), SETTINGS)
def test_epsilon_is_what_our_own_fft_says_and_never_below_it(examples, batch, sigma, rounds, delta):
    found = epsilon(sigma, examples=examples, rounds=rounds, sampling=Poisson(batch), delta=delta)
    low, high = worse_of_both([(poisson_gaussian(batch / examples, sigma), rounds)], delta, found)
    assert high < 1.005 * low, "our own computation is too coarse to tell"
    assert low <= found <= TIGHT * high


def test_our_own_fft_would_tell_a_wrong_price():
    found = epsilon(2.438, examples=141, rounds=267, sampling=Poisson(16), delta=DIGITS_DELTA)
    for rate, sigma, rounds in ((16 / 141, 2.40, 267), (16.2 / 141, 2.438, 267), (16 / 141, 2.438, 275)):
        low, _ = worse_of_both([(poisson_gaussian(rate, sigma), rounds)], DIGITS_DELTA, found)
        assert low > found


def test_unequal_runs_cost_together_what_our_own_fft_says():
    costs = [
        Cost(141, 16, "poisson", 2.438, 267),
        Cost(141, 16, "poisson", 5.0, 400, times=2),
        Cost(300, 30, "poisson", 3.0, 100),
    ]
    found = together(costs, 1e-5)
    own = [(poisson_gaussian(c.batch / c.declared, c.sigma), c.rounds * c.times) for c in costs]
    low, high = worse_of_both(own, 1e-5, found)
    assert low <= found <= TIGHT * high
    for cost in costs:
        assert together([cost], 1e-5) < found
    with pytest.raises(AssertionError):  # and it would tell if one had been forgotten
        assert together(costs[:2], 1e-5) >= low


def test_equal_runs_cost_what_as_many_rounds_cost():
    alone = epsilon(2.438, examples=141, rounds=267, sampling=Poisson(16), delta=DIGITS_DELTA)
    for runs, known in ((1, 1.999), (3, 4.029), (5, 5.643)):
        found = together([Cost(**DIGITS)] * runs, DIGITS_DELTA)
        assert found == pytest.approx(known, abs=0.001)
        assert found == together([Cost(**DIGITS, times=runs)], DIGITS_DELTA)
        longer = epsilon(2.438, examples=141, rounds=runs * 267, sampling=Poisson(16), delta=DIGITS_DELTA)
        assert found == pytest.approx(longer, rel=1e-3)
        assert found >= alone or found == pytest.approx(alone, rel=1e-3)


def test_flipped_signs_and_noise_are_added_up():
    noise = Cost(3000, 16, "poisson", 2.0, 300)
    flips = Cost(3000, 16, "poisson", 2.0, 300, signs=10_000)  # as many signs come close to the Gaussian
    assert together([noise, flips], 1e-5) == pytest.approx(together([noise, noise], 1e-5), rel=0.003)
    few = Cost(3000, 16, "poisson", 0.01, 10, signs=1)
    priced = epsilon(0.01, examples=3000, rounds=20, sampling=Poisson(16), delta=1e-5, signs=1)
    assert together([few, few], 1e-5) <= 1.001 * priced


def test_fixed_batches_are_added_up_by_rdp():
    fixed = Cost(3000, 16, "fixed", 4.0, 500)
    asked = {"examples": 3000, "sampling": FixedSize(16), "accountant": "rdp", "delta": 1e-5}
    assert together([fixed] * 3, 1e-5) == pytest.approx(epsilon(4.0, rounds=1500, **asked), rel=1e-9)
    with pytest.raises(PrivacyError, match=r"sampling fixed and poisson: .* no common price; look at the runs of each"):
        together([fixed, Cost(**DIGITS)], 1e-5)


def test_no_run_costs_nothing_and_no_noise_everything():
    assert together([], 1e-5) == 0
    assert together([Cost(141, 16, "poisson", 1.0, 0)], 1e-5) == 0
    assert together([Cost(**DIGITS), Cost(141, 16, "poisson", 0.0, 5)], 1e-5) == math.inf
    for bad in (0, 1, math.nan):
        with pytest.raises(SpecError, match=r"delta = .*: must be above 0 and below 1"):
            together([Cost(**DIGITS)], bad)


def test_two_thousand_runs_are_priced_in_seconds():
    began = time.perf_counter()
    kinds = [Cost(3000, 16, "poisson", sigma, 1500) for sigma in (0.79, 1.03, 1.5, 2.6, 4.6)]
    found = together(kinds * 400, 1e-5)
    assert time.perf_counter() - began < 60  # some 5 s on a slow core
    assert together(kinds * 100, 1e-5) < found < 4 * together(kinds * 100, 1e-5)


# ------------------------------------------------------------------------------------------- in other ways


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (20.0, 100), (0.5, 4)])
def test_mu_of_a_gaussian_without_sampling_is_known(sigma, rounds):
    said = statement(ask_of(100, rounds, Poisson(100), 1e-5, "pld"), sigma)
    exact = math.sqrt(rounds) / sigma
    assert exact <= said.mu <= 1.005 * exact
    assert gaussian_delta(np.array([exact]), np.array([said.epsilon]))[0] == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("examples", "sigma", "rounds"), [(141, 3.85, 267), (3000, 0.8, 1500), (3000, 40.0, 100)])
def test_mu_is_a_bound_at_every_delta_and_hardly_more_at_some(accountant, examples, sigma, rounds):
    asked = {"examples": examples, "rounds": rounds, "sampling": Poisson(16), "accountant": accountant}
    mu = guarantee(sigma=sigma, delta=1e-5, **asked).mu
    deltas = np.exp(np.linspace(math.log(LEAST_DELTA), math.log(0.2), 12))
    spent = np.array([epsilon(sigma, delta=float(delta), **asked) for delta in deltas])
    deltas, spent = deltas[spent > 0], spent[spent > 0]  # where epsilon is 0, a smaller delta has it too
    assert len(deltas) > 4
    assert (gaussian_delta(np.full(len(deltas), mu), spent) >= deltas * (1 - 1e-6)).all()
    if accountant == "pld":  # by RDP deltas near 1 decide, where it says little
        assert (gaussian_delta(np.full(len(deltas), 0.98 * mu), spent) < deltas).any()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_at_a_common_delta(accountant):
    asked = {"examples": 141, "rounds": 267, "sampling": Poisson(16), "accountant": accountant}
    said = guarantee(sigma=2.438, delta="paper", **asked)
    assert said.epsilon == epsilon(2.438, delta="paper", **asked)
    assert said.epsilon_at_1e_5 == pytest.approx(epsilon(2.438, delta=1e-5, **asked), rel=1e-6)
    assert said.epsilon_at_1e_5 > 1.5 * said.epsilon
    assert statement(ask_of(141, 267, Poisson(16), "paper", accountant), 2.438).mu == said.mu


def test_nothing_costs_nothing_in_every_way():
    said = statement(ask_of(141, 0, Poisson(16), None, "pld"), 1.0)
    assert (said.epsilon, said.epsilon_at_1e_5, said.mu) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------- groups

GROUP = {"examples": 141, "rounds": 267, "sampling": Poisson(16)}


def test_a_group_costs_more_than_one_and_less_than_follows_from_one():
    one = epsilon(3.85, delta=1e-5, **GROUP)
    assert group_epsilon(1, 3.85, delta=1e-5, **GROUP) == one
    two, four = (group_epsilon(size, 3.85, delta=1e-5, **GROUP) for size in (2, 4))
    assert one < two < four
    for size in (2, 4):
        generic = 1e-5 * sum(math.exp(i * one) for i in range(size))  # (k epsilon, delta (1 + ... + e^((k-1) epsilon)))
        assert group_epsilon(size, 3.85, delta=generic, **GROUP) <= size * one


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_costs_what_our_own_fft_says(size):
    found = group_epsilon(size, 3.85, delta=1e-5, **GROUP)
    low, high = worse_of_both([(poisson_gaussian(16 / 141, 3.85, size), 267)], 1e-5, found)
    assert low <= found <= TIGHT * high


@pytest.mark.parametrize(("size", "sigma"), [(2, 1.0), (8, 4.0)])
def test_a_group_in_one_round_costs_what_integration_says(size, sigma):
    found = group_epsilon(size, sigma, examples=100, rounds=1, sampling=Poisson(10), delta=1e-4)
    one = poisson_gaussian(0.1, sigma, size)
    width = one.x[1] - one.x[0]

    def delta(epsilon: float) -> float:
        sides = (one.p - math.exp(epsilon) * one.q, one.q - math.exp(epsilon) * one.p)
        return max(float(np.clip(side, 0, None).sum() * width) for side in sides)

    assert delta(found) <= 1e-4 * (1 + 1e-6)
    assert delta(0.995 * found) > 1e-4


def test_groups_that_have_no_price_are_refused():
    fixed = {**GROUP, "sampling": FixedSize(16)}
    for asked in ({"accountant": "rdp", **GROUP}, {"signs": 10, **GROUP}, {"accountant": "rdp", **fixed}):
        with pytest.raises(
            PrivacyError, match=r"group = 2: groups are priced with Gaussian noise, poisson sampling and"
        ):
            group_epsilon(2, 2.0, **asked)
    with pytest.raises(PrivacyError, match="group = 65: at most 64 examples"):
        group_epsilon(65, 2.0, **GROUP)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(SpecError, match=r"group = .*: must be a whole number, 1 or more"):
            group_epsilon(bad, 2.0, **GROUP)
