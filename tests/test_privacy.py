"""Epsilon and sigma: golden numbers, never overspent, and every refusal."""

import itertools
import json
import logging
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.errors import PrivacyError, SpecError
from noisegate.flips import cost_of_sign, flip_probability, sigma_of
from noisegate.privacy import calibrate, default_delta, epsilon, guarantee, paper_delta, worst_sigma
from noisegate.privacy import signs as pricing_of_signs
from noisegate.sampling import FixedSize, Poisson

PAPER = {
    "examples": 3000,
    "rounds": 1500,
    "sampling": Poisson(16),
    "delta": "paper",
}  # MNIST and Fashion: 20 workers, 8 epochs
BARE = {key: value for key, value in PAPER.items() if key != "delta"}


@pytest.mark.parametrize(
    ("accountant", "budget", "sigma"),
    [
        ("rdp", 2, 0.792),
        ("rdp", 1, 1.034),
        ("rdp", 0.5, 1.519),
        ("rdp", 0.25, 2.57),
        ("rdp", 0.125, 4.61),
        ("pld", 2, 0.7287),
        ("pld", 0.125, 4.0637),
    ],
)
def test_golden_sigmas(accountant, budget, sigma):
    found = calibrate(budget, accountant=accountant, **PAPER)
    assert found == pytest.approx(sigma, rel=0.005)
    assert 0.99 * budget <= epsilon(found, accountant=accountant, **PAPER) <= budget


def check(budget, setting):
    sigma = calibrate(budget, **setting)
    spent = epsilon(sigma, **setting)
    assert spent <= budget
    if spent < 0.99 * budget:  # then epsilon jumps here, and less noise would overspend
        assert epsilon(sigma * (1 - 1e-6), **setting) > budget


@settings(max_examples=12, deadline=None)
@given(
    examples=st.integers(50, 5000),
    batch=st.integers(1, 50),
    rounds=st.integers(1, 2000),
    budget=st.floats(0.05, 8),
)
def test_calibration_never_overspends_and_wastes_at_most_1_percent_rdp(examples, batch, rounds, budget):
    setting = {"examples": examples, "rounds": rounds, "sampling": Poisson(batch), "accountant": "rdp"}
    check(budget, setting)


@settings(max_examples=4, deadline=None)
@given(examples=st.integers(200, 5000), rounds=st.integers(10, 1500), budget=st.floats(0.02, 3))
def test_calibration_never_overspends_and_wastes_at_most_1_percent_pld(examples, rounds, budget):
    setting = {"examples": examples, "rounds": rounds, "sampling": Poisson(16)}
    check(budget, setting)


@pytest.mark.parametrize("budget", [0.02, 0.05, 0.1, 0.125, 1.0])
def test_pld_is_what_a_fine_grid_says_within_1_percent_and_never_below_it(budget):
    sigma = calibrate(budget, **PAPER)
    fine = pld.PLDAccountant(value_discretization_interval=min(5e-5, budget * 1e-4))
    fine.compose(dp_accounting.SelfComposedDpEvent(Poisson(16).event(3000, sigma), 1500))
    spent = fine.get_epsilon(paper_delta(3000))
    assert 0.98 * budget <= spent <= budget
    assert spent <= epsilon(sigma, **PAPER) <= 1.01 * spent


def test_above_0_1_anyone_gets_our_number_from_dp_accounting():
    theirs = pld.PLDAccountant(value_discretization_interval=1e-4)
    theirs.compose(dp_accounting.SelfComposedDpEvent(Poisson(16).event(3000, 2.0), 1500))
    assert epsilon(2.0, **PAPER) == theirs.get_epsilon(paper_delta(3000))


def test_fixed_is_charged_with_replace_one_and_sensitivity_2():
    by_hand = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(3000, 16, dp_accounting.GaussianDpEvent(4.0 / 2))
    by_hand.compose(dp_accounting.SelfComposedDpEvent(sampled, 1500))
    charged = epsilon(4.0, examples=3000, rounds=1500, sampling=FixedSize(16), delta=1e-5, accountant="rdp")
    assert charged == by_hand.get_epsilon(1e-5)
    assert charged > 4 * epsilon(4.0, delta=1e-5, accountant="rdp", **BARE)


def test_no_rounds_cost_nothing():
    for accountant in ("rdp", "pld"):
        assert epsilon(1.0, examples=3000, rounds=0, sampling=Poisson(16), accountant=accountant) == 0


@pytest.mark.parametrize(("accountant", "sigma"), [("rdp", 1.5), ("pld", 1.5), ("pld", 8.0)])
def test_more_rounds_never_cost_less_and_more_noise_never_more(accountant, sigma):
    setting = {"examples": 1000, "sampling": Poisson(8), "accountant": accountant}
    by_rounds = [epsilon(sigma, rounds=rounds, **setting) for rounds in (0, 1, 2, 10, 100, 101, 1000)]
    assert by_rounds == sorted(by_rounds)
    by_noise = [epsilon(sigma * more, rounds=100, **setting) for more in (1, 1.01, 1.5, 3)]
    assert by_noise == sorted(by_noise, reverse=True)


def test_the_default_delta_is_small_and_the_papers_on_request():
    for examples in (1, 2, 141, 3000, 10_000, 10_001, 10**6):
        assert default_delta(examples) == min(1e-5, 1 / (10 * examples))
        assert guarantee(
            sigma=3.0, examples=max(examples, 16), rounds=1, sampling=Poisson(16), accountant="rdp"
        ).delta == (default_delta(max(examples, 16)))
    assert default_delta(10**6) == 1e-7
    assert paper_delta(3000) == 3000**-1.1
    assert guarantee(sigma=1.0, accountant="rdp", **PAPER).delta == 3000**-1.1
    with pytest.raises(SpecError, match=r"examples = 1: the paper's delta .* promises nothing; give delta"):
        paper_delta(1)
    with pytest.raises(SpecError, match="promises nothing"):
        epsilon(1.0, examples=1, rounds=1, sampling=Poisson(1), delta="paper")
    with pytest.raises(SpecError, match="delta = 'papers': must be above 0 and below 1, or 'paper'"):
        epsilon(1.0, delta="papers", **BARE)


def test_a_guarantee_says_everything_needed_to_check_it():
    promise = guarantee(epsilon=2, accountant="rdp", **PAPER)
    assert promise.sigma == calibrate(2, accountant="rdp", **PAPER)
    assert promise.epsilon == epsilon(promise.sigma, accountant="rdp", **PAPER) <= 2
    assert promise == guarantee(sigma=promise.sigma, accountant="rdp", **PAPER)
    assert json.loads(json.dumps(promise.as_dict())) == {
        "epsilon": promise.epsilon,
        "delta": 3000**-1.1,
        "epsilon_at_1e_5": promise.epsilon_at_1e_5,
        "mu": promise.mu,
        "sigma": promise.sigma,
        "accountant": "rdp",
        "relation": "add-or-remove",
        "sampling": "poisson",
        "examples": 3000,
        "batch": 16,
        "rate": 16 / 3000,
        "rounds": 1500,
        "signs": 0,
    }
    for both in ({}, {"sigma": 1.0, "epsilon": 1.0}):
        with pytest.raises(SpecError, match="give exactly one of them"):
            guarantee(**both, **PAPER)


def test_the_largest_need_serves_unequal_workers():
    shared = {"rounds": 300, "sampling": Poisson(16), "accountant": "rdp"}
    sigma, own = worst_sigma(2, [3000, 500, 1000, 3000], **shared)
    assert sigma == calibrate(2, examples=500, **shared)
    assert own == {size: epsilon(sigma, examples=size, **shared) for size in (500, 1000, 3000)}
    assert own[3000] < own[1000] < own[500] <= 2


def test_the_largest_need_is_not_always_the_smallest_workers():
    """One round: the rate hardly matters, and the larger worker's smaller delta asks for more noise."""
    shared = {"rounds": 1, "sampling": Poisson(1), "accountant": "rdp", "delta": "paper"}
    sigma, own = worst_sigma(1, [16, 1000], **shared)
    assert sigma == calibrate(1, examples=1000, **shared) > calibrate(1, examples=16, **shared)
    assert own[16] < 0.99
    assert 0.99 <= own[1000] <= 1


def test_one_delta_for_all_when_given():
    shared = {"rounds": 50, "sampling": Poisson(16), "accountant": "rdp", "delta": 1e-6}
    sigma, own = worst_sigma(1, [400, 800], **shared)
    assert own[800] == epsilon(sigma, examples=800, **shared)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, True, "2"])
def test_a_senseless_budget_is_refused(bad):
    with pytest.raises(SpecError, match=r"epsilon = .*: must be a finite number above 0"):
        calibrate(bad, **PAPER)
    with pytest.raises(SpecError, match="must be a finite number above 0"):
        worst_sigma(bad, [3000], rounds=10, sampling=Poisson(16))
    with pytest.raises(SpecError, match=r"sigma = .*: must be a finite number above 0"):
        epsilon(bad, **PAPER)


@pytest.mark.parametrize("bad", [0, 1, -0.1, 2.0, math.nan, math.inf, True])
def test_a_senseless_delta_is_refused(bad):
    with pytest.raises(SpecError, match=r"delta = .*: must be above 0 and below 1"):
        calibrate(1, delta=bad, **BARE)


def test_senseless_settings_are_refused():
    with pytest.raises(SpecError, match="rounds = 0: must be a whole number, 1 or more"):
        calibrate(1, examples=3000, rounds=0, sampling=Poisson(16))
    with pytest.raises(SpecError, match="rounds = -1: must be a whole number"):
        epsilon(1, examples=3000, rounds=-1, sampling=Poisson(16))
    with pytest.raises(SpecError, match="batch = 16: a worker has only 10 examples; lower batch to 10 or less"):
        calibrate(1, examples=10, rounds=10, sampling=Poisson(16))
    with pytest.raises(SpecError, match=r"accountant = 'prv': unknown.*choose from pld, rdp"):
        calibrate(1, accountant="prv", **PAPER)
    with pytest.raises(SpecError, match=r"sizes = \[\]: must name the number of examples"):
        worst_sigma(1, [], rounds=10, sampling=Poisson(16))


def test_pld_refuses_what_it_cannot_price():
    refusal = "accountant = 'pld' cannot price sampling = 'fixed'.*replace-one: use accountant = \"rdp\", or"
    for ask in (calibrate, epsilon):
        with pytest.raises(PrivacyError, match=refusal):
            ask(1.0, examples=3000, rounds=1500, sampling=FixedSize(16))


def test_a_budget_that_cannot_be_met_is_never_capped():
    with pytest.raises(PrivacyError, match=r"epsilon = 0.5 cannot be met: .* Allow a larger epsilon or delta"):
        calibrate(0.5, delta=1e-300, accountant="rdp", **BARE)
    with pytest.raises(PrivacyError, match=r"epsilon = 1e\+09 asks for no privacy: .* smaller epsilon"):
        calibrate(1e9, accountant="rdp", **PAPER)
    with pytest.raises(PrivacyError, match=r"sigma = 0.001 is too little noise to be priced"):
        epsilon(0.001, **PAPER)


def test_where_rdp_jumps_calibration_stays_on_the_safe_side():
    setting = {"examples": 50, "rounds": 1, "sampling": Poisson(1), "accountant": "rdp", "delta": "paper"}
    sigma = calibrate(0.0625, **setting)
    assert epsilon(sigma, **setting) == 0
    assert epsilon(sigma * (1 - 1e-6), **setting) > 0.0625


def test_pricing_leaves_the_logger_of_dp_accounting_as_it_was(caplog):
    logger = logging.getLogger("absl")
    before = logger.level
    epsilon(0.6, examples=20, rounds=1, sampling=Poisson(1), accountant="rdp")  # leaves out orders, and says so
    assert logger.level == before
    assert not caplog.records


def by_enumeration(sigma: float, signs: int, rate: float, rounds: int):
    """Two distributions over everything a worker can send: with the example, which turns all signs, and without it."""
    flip = flip_probability(sigma, signs)
    outcomes = list(itertools.product((1, -1), repeat=signs))
    chance = {sent: math.prod(1 - flip if sign > 0 else flip for sign in sent) for sent in outcomes}
    without = np.array([chance[sent] for sent in outcomes])
    turned = np.array([chance[tuple(-sign for sign in sent)] for sent in outcomes])
    present = (1 - rate) * without + rate * turned
    everything = itertools.product(range(len(outcomes)), repeat=rounds)
    paths = np.array(list(everything))
    return present[paths].prod(1), without[paths].prod(1)


def hockey_stick(p, q, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


@pytest.mark.parametrize(("signs", "rounds"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (7, 1), (2, 4)])
@pytest.mark.parametrize("batch", [1, 5, 20])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
@pytest.mark.parametrize("delta", [1e-6, 0.01])
def test_flipped_signs_cost_what_enumeration_says(signs, rounds, batch, sigma, delta):
    found = epsilon(sigma, examples=20, rounds=rounds, sampling=Poisson(batch), delta=delta, signs=signs)
    present, without = by_enumeration(sigma, signs, batch / 20, rounds)
    for p, q in ((present, without), (without, present)):  # the example is removed, and it is added
        assert hockey_stick(p, q, found) <= delta * (1 + 1e-9)
    less = 0.998 * found - 1e-9
    if found > 0:
        assert max(hockey_stick(present, without, less), hockey_stick(without, present, less)) > delta


def test_what_is_left_out_of_the_flips_only_tells_less():
    """Signs drawn at random before they are flipped, as one-bit codes are, and examples that turn only some."""
    rng = np.random.default_rng(1)
    flip = flip_probability(0.4, 3)
    worst = by_enumeration(0.4, 3, 1.0, 1)
    outcomes = np.array(list(itertools.product((1, 0), repeat=3)))
    for _ in range(200):
        one, other = (flip + (1 - 2 * flip) * rng.random(3).round(int(rng.integers(0, 3))) for _ in range(2))
        p, q = (np.where(outcomes, chance, 1 - chance).prod(1) for chance in (one, other))
        for level in np.linspace(0, 3 * cost_of_sign(0.4, 3), 12):
            assert hockey_stick(p, q, level) <= hockey_stick(*worst, level) + 1e-12


@pytest.mark.parametrize(("sigma", "rounds"), [(0.7, 1500), (2.0, 100), (4.0, 1500)])
def test_many_flipped_signs_cost_what_the_gaussian_costs(sigma, rounds):
    setting = {"examples": 3000, "rounds": rounds, "sampling": Poisson(16)}
    assert epsilon(sigma, signs=10_000, **setting) == pytest.approx(epsilon(sigma, **setting), rel=0.002)


def test_few_flipped_signs_are_no_gaussian():
    """With little noise their largest loss, that of all signs together, is below what the Gaussian's tail costs."""
    assert epsilon(0.7, signs=10, **PAPER) < 0.8 * epsilon(0.7, **PAPER)


def test_without_sampling_and_delta_the_costs_of_all_signs_add_up():
    for signs in (1, 4, 9):
        sigma = sigma_of(0.8, signs)
        found = epsilon(sigma, examples=20, rounds=1, sampling=Poisson(20), delta=1e-12, signs=signs)
        assert found == pytest.approx(0.8 * signs, rel=1e-4)


def test_more_flips_never_cost_more_and_more_rounds_never_less():
    setting = {"examples": 1000, "sampling": Poisson(8), "signs": 500}
    by_noise = [epsilon(sigma, rounds=100, **setting) for sigma in (0.2, 0.5, 0.51, 1, 3, 10)]
    assert by_noise == sorted(by_noise, reverse=True)
    by_rounds = [epsilon(1.0, rounds=rounds, **setting) for rounds in (0, 1, 2, 10, 100, 101, 1000)]
    assert by_rounds[0] == 0
    assert by_rounds == sorted(by_rounds)


@pytest.mark.parametrize(("signs", "budget"), [(10, 2), (4810, 0.125), (33_736, 2)])
def test_calibrated_flips_never_overspend(signs, budget):
    setting = {"signs": signs, **PAPER}
    found = calibrate(budget, **setting)
    assert 0.99 * budget <= epsilon(found, **setting) <= budget
    promise = guarantee(epsilon=budget, **setting)
    assert (promise.sigma, promise.signs) == (found, signs)
    assert promise.epsilon == epsilon(found, **setting)
    sigma, own = worst_sigma(budget, [3000, 1000], rounds=1500, sampling=Poisson(16), signs=signs)
    assert sigma > found
    assert max(own.values()) <= budget


def test_the_rare_outcomes_that_are_left_out_count_as_lost(monkeypatch):
    """Nothing is forgotten: what is not on the grid is an infinite loss."""
    for tail in (pricing_of_signs.TAIL, 1e-6):
        monkeypatch.setattr(pricing_of_signs, "TAIL", tail)
        for pair in pricing_of_signs.losses(0.7, 10**6, 0.01):
            grid, infinite = pricing_of_signs._on_grid(*pair, 1e-4)
            assert infinite >= tail
            assert sum(grid.values()) + infinite >= 1 + 0.9 * tail - 1e-12


def test_so_many_signs_that_only_some_of_their_counts_are_looked_at():
    """The price is that of the Gaussian, a hair above."""
    setting = {"examples": 3000, "rounds": 10, "sampling": Poisson(16), "delta": 1e-9}
    assert epsilon(1.0, signs=10**7, **setting) == pytest.approx(epsilon(1.0, **setting), rel=1e-4)


@pytest.mark.parametrize(("sigma", "rounds"), [(1e-3, 134), (1e-6, 1)])
def test_few_signs_cost_no_more_than_all_of_them_in_every_round(sigma, rounds):
    """Where the grid is too coarse to tell."""
    rate = 16 / 3000
    most = rounds * math.log(1 - rate + rate * math.exp(cost_of_sign(sigma, 1)))
    found = epsilon(sigma, examples=3000, rounds=rounds, sampling=Poisson(16), signs=1)
    assert found <= most * (1 + 1e-12)


@pytest.mark.parametrize(
    ("accountant", "sampling"), [("rdp", Poisson(16)), ("rdp", FixedSize(16)), ("pld", FixedSize(16))]
)
def test_flipped_signs_are_not_priced_by_what_was_made_for_noise(accountant, sampling):
    with pytest.raises(PrivacyError, match=r'signs = 100: .* accountant = "pld" and sampling = "poisson" only'):
        epsilon(1.0, examples=3000, rounds=10, sampling=sampling, accountant=accountant, signs=100)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "7"])
def test_a_senseless_number_of_signs_is_refused(bad):
    with pytest.raises(SpecError, match=r"signs = .*: must be a whole number, 1 or more"):
        epsilon(1.0, signs=bad, **PAPER)
