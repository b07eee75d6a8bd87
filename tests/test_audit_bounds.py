"""The tests and intervals that an audit decides by, each against an obvious or exact way."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from noisegate import Spec
from noisegate.audit import bounds
from noisegate.audit.canary import Canary, Last, Seen
from noisegate.audit.check import WHOLE_LEVEL
from noisegate.audit.claim import Claim
from noisegate.audit.clones import attack, company_of
from noisegate.audit.whole import judge_trials
from noisegate.compute import Compute
from noisegate.runs.setup import prepare
from noisegate.sampling import Poisson
from noisegate.workers import Normalized


def gaussian(mu: float, examples: int = 10) -> Claim:
    """One round of everyone's examples: exactly the Gaussian mechanism."""
    return Claim(1.0, 1e-3, 1 / mu, 1, examples, Poisson(examples), "pld")


def test_the_claimed_curve_of_one_round_is_the_gaussian_one():
    claim = gaussian(1.0)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        exact = stats.norm.cdf(-epsilon + 0.5) - math.exp(epsilon) * stats.norm.cdf(-epsilon - 0.5)
        assert claim.delta_at(epsilon) == pytest.approx(exact, abs=2e-4)
        assert claim.delta_at(epsilon) >= exact - 1e-9
    false = np.linspace(0.01, 0.99, 50)
    exact = stats.norm.cdf(stats.norm.ppf(false) + 1.0)
    assert (claim.most_hits(false) >= exact - 1e-9).all()
    assert (claim.most_hits(false) <= exact + 0.01).all()
    area = stats.norm.cdf(1 / math.sqrt(2))
    assert area <= claim.area <= area + 0.004


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
@pytest.mark.parametrize("q", [0.02, 0.2])
def test_a_claim_that_just_holds_is_refuted_no_more_often_than_the_level(epsilon, q):
    """Exactly, over all counts: the chance that `violates` says yes at the edge of the claim."""
    n, delta, level = 60, 0.05, 0.05
    p = math.exp(epsilon) * q + delta
    chance = 0.0
    for false in range(n + 1):
        weight = stats.binom.pmf(false, n, q)
        if weight < 1e-9:
            continue
        # More hits refute more, so there is a least number of them.
        low, high = 0, n + 1
        while low < high:
            middle = (low + high) // 2
            refuted = bounds.violates(middle, n, false, n, epsilon, delta, level)
            low, high = (low, middle) if refuted else (middle + 1, high)
        chance += weight * stats.binom.sf(low - 1, n, p)
    assert chance <= level
    assert q < 0.1 or chance > 0.2 * level  # rare events come in few numbers, so that it may be far below


def test_a_lower_bound_is_close_to_the_truth_and_below_it():
    n, q, epsilon = 10**6, 0.01, 2.0
    p = math.exp(epsilon) * q + 0.001
    found = bounds.epsilon_above(round(p * n), n, round(q * n), n, 0.001, 0.05)
    assert 1.95 < found < 2.0
    assert bounds.epsilon_above(10, 100, 10, 100, 0.0, 0.05) == 0.0


def test_intervals_are_clopper_and_pearsons():
    low, high = bounds.above(7, 50, 0.025), bounds.below(7, 50, 0.025)
    found = stats.binomtest(7, 50).proportion_ci(0.95, "exact")
    assert (low, high) == pytest.approx((found.low, found.high))
    assert (bounds.above(0, 9, 0.05), bounds.below(9, 9, 0.05)) == (0.0, 1.0)


def test_one_run_without_delta_is_a_binomial_test_and_delta_costs():
    p = bounds.one_run_p(100, 50, 40, 1.0, 0.0)
    assert p == pytest.approx(stats.binomtest(40, 50, 1 / (1 + math.exp(-1)), "greater").pvalue)
    assert bounds.one_run_p(100, 50, 40, 1.0, 1e-3) > p
    assert bounds.one_run_above(100, 50, 50, 0.0, 0.05) == pytest.approx(
        -math.log(0.05 ** (-1 / 50) - 1), abs=2e-3
    )  # all 50 right: the rate whose 50th power is the level


def test_the_area_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    held, other = rng.integers(0, 9, 40).astype(float), rng.integers(0, 7, 30).astype(float)
    pairs = (held[:, None] > other).mean() + 0.5 * (held[:, None] == other).mean()
    area, error = bounds.area(held, other)
    assert area == pytest.approx(pairs)
    again = [bounds.area(rng.choice(held, 40), rng.choice(other, 30))[0] for _ in range(400)]
    assert error == pytest.approx(np.std(again), rel=0.2)


def test_the_error_of_an_area_at_the_edge_of_a_claim():
    rng, mu = np.random.default_rng(2), 1.0
    areas = [bounds.area(rng.standard_normal(120) + mu, rng.standard_normal(100))[0] for _ in range(800)]
    assert bounds.area_error(float(stats.norm.cdf(mu / math.sqrt(2))), 120, 100) == pytest.approx(
        np.std(areas), rel=0.1
    )


@pytest.mark.parametrize("trials", [60, 250])
def test_few_trials_of_a_strong_signal_are_not_refuted_either(trials):
    """Where nearly all are told apart the errors that are estimated vanish, and so must not decide alone."""
    rng, mu = np.random.default_rng(3), 2.5
    claim, refuted = gaussian(mu), 0
    for _ in range(300):
        held = rng.random(trials) < 0.5
        ratios = mu * (rng.standard_normal(trials) + mu * held) - mu**2 / 2
        refuted += any(check.refuted for check in judge_trials(ratios[held], ratios[~held], claim))
    assert refuted <= stats.binom.isf(1e-3, 300, WHOLE_LEVEL)


def test_mu_and_epsilon_of_a_gaussian_mechanism():
    assert bounds.mu_of(float(stats.norm.cdf(0.8 / math.sqrt(2)))) == pytest.approx(0.8)
    epsilon = bounds.gaussian_epsilon(1.0, 1e-3)
    exact = stats.norm.cdf(-epsilon + 0.5) - math.exp(epsilon) * stats.norm.cdf(-epsilon - 0.5)
    assert exact == pytest.approx(1e-3, rel=1e-3)
    assert bounds.gaussian_epsilon(0.0, 1e-3) == 0.0


def test_a_mechanism_that_just_keeps_its_claim_is_rarely_refuted_and_a_worse_one_always():
    """Likelihood ratios of the Gaussian mechanism itself, 300 audits: the level is half a percent."""
    rng, claim = np.random.default_rng(1), gaussian(1.0)
    refuted = {1.0: 0, 1.35: 0}
    for mu in refuted:
        for _ in range(300):
            held = rng.random(1000) < 0.5
            seen = rng.standard_normal(1000) + mu * held
            ratios = mu * seen - mu**2 / 2
            refuted[mu] += any(check.refuted for check in judge_trials(ratios[held], ratios[~held], claim))
    assert refuted[1.0] <= stats.binom.isf(1e-3, 300, WHOLE_LEVEL)
    assert refuted[1.35] > 285


def test_the_likelihood_ratio_is_the_textbook_one():
    """One clone whose company contributes a known number along the direction, without and with momentum."""
    canary = Canary(
        x=torch.zeros(1, 2),
        y=torch.zeros(1, dtype=torch.int64),
        direction=torch.tensor([1.0, 0.0]),
        gradients=torch.tensor([[3.0, 4.0]]),
        planted=Seen(torch.tensor([5.0]).double(), torch.tensor([3.0]).double()),
        company=Seen(torch.tensor([1.0]).double(), torch.tensor([0.5]).double()),
        strength=1.0,
        worker=Normalized(momentum=0.5),
        rate=0.25,
        noise=2.0,
    )
    last, now = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.7, 0.1]])
    found = float(canary.loss(canary.look(now), canary.look(last), batch=8))
    mixed = 0.5 * canary.gradients[0] + 0.5 * last[0]
    margin = 1 - 2**-14
    signal = float(margin * mixed[0] / mixed.norm())
    company = margin * (0.5 * 0.5 + 0.5 * 1.0) / math.hypot(0.5 * 1.0, 0.5 * float(last.norm()))
    seen = 8 * 0.7 - 0.25 * company
    variance = 4.0 + 0.25 * 0.75 * company**2
    with_it = stats.norm.pdf(seen, signal, math.sqrt(variance)) / stats.norm.pdf(seen, 0, math.sqrt(variance))
    assert found == pytest.approx(math.log(0.75 + 0.25 * with_it), rel=1e-5)
    first = canary.first(3)
    assert isinstance(first, Last)
    assert first.cross.shape == (3, 1)


def test_trials_are_the_same_in_groups_and_the_statistic_is_calibrated(monkeypatch):
    """The mean of exp(ratio) is 1 where the canary is absent: the adversary's model of the product is right."""
    from noisegate.audit.canary import choose, claimed_noise
    from noisegate.audit.claim import claim_of

    spec = Spec(rounds=8, sigma=2.0, sigma_base=2.0, byzantine=0.0, attack="none")
    setup = prepare(spec, Compute(device="cpu"))
    claim = claim_of(setup)
    canary = choose(setup, claim, company_of(setup, claim), claimed_noise(setup))
    held, losses = attack(setup, claim, canary, 2000)
    out, inside = losses[~held].exp(), (-losses[held]).exp()
    for ratios in (out, inside):
        assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / math.sqrt(len(ratios))
    assert float(losses[held].mean()) > 0 > float(losses[~held].mean())
