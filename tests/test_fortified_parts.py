"""The parts of `fortified` that judge one upload or one worker, by slow oracles: lengths, distributions, evidence, and
what the server's examples make expected."""

import ast
import math
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional

from noisegate.aggregators.fortified import evidence
from noisegate.aggregators.fortified.expectation import Interval, along_gradient, along_history
from noisegate.aggregators.fortified.moments import STANDARD_ERRORS, ExampleMoments, agreement_of_examples
from noisegate.aggregators.fortified.state import PROBES
from noisegate.aggregators.ks_test import (
    count_every_value,
    count_where_in_doubt,
    ks_rejects,
    ks_threshold,
    room_for_signal,
)
from noisegate.aggregators.upload_lengths import honest_lengths
from noisegate.streams import stream
from oracles import ks_statistic
from test_noise_tests import quantiles

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)

SURE = 4.0
"""Standard errors that a Monte Carlo estimate may be off: one in 30,000, and seeds are fixed."""


def at_most(found: int, draws: int, chance: float) -> bool:
    """Whether so many hits in so many draws are no sign of a chance above this one."""
    return found <= draws * chance + SURE * math.sqrt(draws * chance)


def normal(*shape: int, seed: int = 1, name: str = "normal") -> torch.Tensor:
    return torch.randn(*shape, generator=stream(seed, name))


# --- lengths -------------------------------------------------------------------------------------------------------

NODES = np.linspace(-9, 9, 301)
"""Of the integral over a standard normal variable, by the trapezoidal aggregator, which is exact to 1e-9 for it."""


def shares_outside(low: float, high: float, d: int, s: float, signal: float) -> tuple[float, float]:
    """The chances that a signal of this length and noise in d coordinates are shorter than `low`, longer than `high`.

    The noise along the signal is integrated over, and the rest of it is chi-square: nothing noncentral.
    """
    if d == 1:
        inside = stats.norm.cdf([low / s, high / s], signal / s) - stats.norm.cdf([-low / s, -high / s], signal / s)
        return float(inside[0]), float(1 - inside[1])
    rest = [(bound / s) ** 2 - (NODES + signal / s) ** 2 for bound in (low, high)]
    weights = stats.norm.pdf(NODES) / stats.norm.pdf(NODES).sum()
    return float(weights @ stats.chi2.cdf(rest[0], d - 1)), float(weights @ stats.chi2.sf(rest[1], d - 1))


LENGTHS = [(1, 0.3, 16, 1.0), (40, 0.3, 1, 1.0), (40, 0.05, 16, 1.0), (2410, 0.15, 16, 3.0)]
LENGTHS += [(25450, 0.05, 16, 1.0), (25450, 0.01, 64, 1.0), (10**7, 0.05, 16, 1.0)]


@pytest.mark.parametrize(("d", "s", "batch", "largest"), LENGTHS)
@pytest.mark.parametrize("chance", [0.05, 2.5e-4])
def test_lengths_refuse_at_most_the_chance_and_in_the_worst_case_just_that(d, s, batch, largest, chance):
    low, high = honest_lengths(d, s, batch, largest, chance)
    sizes = np.arange(batch + 9 * math.isqrt(batch) + 15)
    weights = stats.poisson.pmf(sizes, batch)
    sides = {}
    for share in (0.0, 0.3, 0.8, 1.0):  # of the longest signal that so many examples allow
        found = np.array([shares_outside(low, high, d, s, share * size * largest / batch) for size in sizes])
        below, above = weights @ found
        assert below <= chance / 2 * (1 + 1e-4)
        assert above <= chance / 2 * (1 + 1e-4)
        sides[share] = below, above
    assert sides[0.0][0] == pytest.approx(chance / 2, rel=1e-4), "without a signal the lower bound is exact"
    assert sides[1.0][1] == pytest.approx(chance / 2, rel=1e-3), "with the longest the upper one is"


def test_lengths_by_simulation():
    d, s, batch, chance, draws = 40, 0.3, 4, 0.1, 100_000
    low, high = honest_lengths(d, s, batch, 1.0, chance)
    rng = np.random.default_rng(1)
    uploads = s * rng.standard_normal((draws, d))
    without = np.linalg.norm(uploads, axis=1)
    uploads[:, 0] += rng.poisson(batch, draws) / batch
    longest = np.linalg.norm(uploads, axis=1)
    margin = SURE * math.sqrt(draws * chance / 2)
    assert abs((without < low).sum() - draws * chance / 2) <= margin
    assert abs((longest > high).sum() - draws * chance / 2) <= margin
    assert at_most(int(((longest < low) | (longest > high)).sum()), draws, chance)


@pytest.mark.parametrize(("batch", "chance"), [(1, 0.05), (16, 2.5e-4), (16, 0.05), (400, 1e-3)])
def test_without_noise_a_length_is_that_of_the_signal(batch, chance):
    low, high = honest_lengths(1000, 0.0, batch, 3.0, chance)
    size = round(high * batch / 3.0)
    assert (low, high) == (0.0, pytest.approx(size * 3.0 / batch))
    assert stats.poisson.sf(size, batch) <= chance / 2 < stats.poisson.sf(size - 1, batch)


# --- the distribution of coordinates -------------------------------------------------------------------------------

TILT = 0.1


def signals_of(d: int, length: float) -> dict[str, torch.Tensor]:
    """(d,) each of this length, with a mean coordinate of at most the share TILT of length / sqrt(d)."""
    even = torch.ones(d) / d**0.5
    signs = torch.ones(d)
    signs[::2] = -1
    gradual = torch.linspace(-1, 1, d)
    spike = functional.one_hot(torch.tensor(d // 2), d).float()
    spike[d // 3] = -1
    kinds = {"signs": signs, "gradual": gradual, "spikes": spike}
    across = {name: functional.normalize(kind - kind.mean(), dim=0) for name, kind in kinds.items()}
    tilted = {f"tilted {name}": TILT * even + (1 - TILT**2) ** 0.5 * kind for name, kind in across.items()}
    return {name: length * signal for name, signal in (across | tilted).items()}


@pytest.mark.parametrize(("d", "s"), [(500, 0.15), (1600, 0.15)])
def test_the_distribution_test_refuses_noise_with_a_signal_at_most_at_the_chance(d, s):
    chance, rows, refused = 0.05, 2000, {}
    room = room_for_signal(d, s, 1.0, TILT)
    noise = s * normal(rows, d)
    for name, signal in signals_of(d, 1.0).items():
        assert float(signal.norm()) == pytest.approx(1.0, rel=1e-5)
        assert float(signal.mean()) <= TILT / d**0.5 * (1 + 1e-5)
        found = int(ks_rejects(noise + signal, s, chance, room=room).sum())
        assert at_most(found, rows, chance), name
        refused[name] = int(ks_rejects(noise + signal, s, chance).sum())
    assert max(refused.values()) > rows * chance + SURE * math.sqrt(rows * chance), "the room it leaves is needed"


def test_the_room_for_a_signal_covers_what_it_moves():
    """The expected share of coordinates below each point, in float64, against that of noise alone."""
    points = np.linspace(-5, 5, 201)
    for d, s in ((500, 0.15), (1600, 0.05)):
        room = room_for_signal(d, s, 1.0, TILT)
        moved = []
        for signal in signals_of(d, 1.0).values():
            below = stats.norm.cdf(points[:, None] - signal.double().numpy()[None] / s).mean(1)
            moved.append(np.abs(below - stats.norm.cdf(points)).max())
        assert room / 3 <= max(moved) <= room


@pytest.mark.parametrize("decide", [count_every_value, count_where_in_doubt])
@pytest.mark.parametrize(("d", "s"), [(40, 0.3), (2410, 0.15), (2410, 0.02), (25450, 0.05), (25450, 0.02)])
def test_with_room_the_statistic_may_be_larger_by_just_that(decide, d, s):
    """Also where it could be by so much that noise has a p-value of 1e-90. Rows on either side of the sum."""
    chance, room = 2.5e-4, room_for_signal(d, s, 1.0, TILT)
    threshold = ks_threshold(d, chance) + room
    offs = [sign * off for off in (1e-2, 1e-3, 1e-4, 1e-5) for sign in (-1, 1)]
    rows = torch.stack([quantiles(d, side * (threshold - 0.5 / d + off), s) for off in offs for side in (-1, 1)])
    assert [ks_statistic(row, s) > threshold for row in rows] == [off > 0 for off in offs for _ in range(2)]
    found = decide(rows, s, chance, 2**28, room)
    assert found.tolist() == [off > 0 for off in offs for _ in range(2)]


@pytest.mark.parametrize("decide", [count_every_value, count_where_in_doubt])
def test_with_more_room_than_a_statistic_can_be_large_nothing_is_refused(decide):
    room = room_for_signal(40, 0.01, 1.0)
    assert room > 1
    rows = torch.cat([0.01 * normal(3, 40), torch.full((1, 40), 1e30), torch.zeros(1, 40)])
    assert not decide(rows, 0.01, 2.5e-4, 2**28, room).any()


# --- evidence ------------------------------------------------------------------------------------------------------


def after(rounds: torch.Tensor) -> torch.Tensor:
    """The statistics after (T, n, K) rounds that all count."""
    found, everyone = None, torch.ones(rounds.shape[1], dtype=torch.bool)
    for outside in rounds:
        found = evidence.gathered(found, outside, everyone)
    return found


def test_evidence_is_what_a_loop_gathers():
    rounds, counts = 3 * normal(20, 6, 4), torch.rand(20, 6, generator=stream(1, "counts")) < 0.7
    found = None
    wanted = np.zeros((6, 4, len(evidence.SHIFTS)))
    for outside, counted in zip(rounds, counts, strict=True):
        found = evidence.gathered(found, outside, counted)
        for i, j, m in np.ndindex(wanted.shape):
            k = evidence.SHIFTS[m]
            if counted[i]:
                wanted[i, j, m] = max(0.0, wanted[i, j, m] + k * float(outside[i, j]) - k * k / 2)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-4)
    assert (found >= 0).all()
    for i in range(6):
        every = wanted[i].flatten()
        assert float(evidence.largest(found)[i]) == pytest.approx(every.max(), abs=1e-4)
        ratio = sum(math.exp(each) for each in every) / len(every)
        assert float(evidence.together(found)[i]) == pytest.approx(max(0.0, math.log(ratio)), abs=1e-4)


def test_honest_evidence_passes_h_with_a_chance_of_at_most_exp_minus_h():
    """In every round; rounds 1, 5 and 50 are looked at."""
    workers = 20_000
    for rounds in (1, 5, 50):
        found = after(normal(rounds, workers, 1, name=f"evidence {rounds}"))
        for h in (1.0, 2.0, 4.0):
            for each in range(len(evidence.SHIFTS)):
                assert at_most(int((found[:, 0, each] > h).sum()), workers, math.exp(-h))
    assert int((found[:, 0, 1] > 1.0).sum()) > workers * math.exp(-1.0) / 4, "and that is no empty bound"


def test_evidence_that_depends_on_the_past_passes_h_in_t_rounds_with_a_chance_of_at_most_t_exp_minus_h():
    """The worst that rounds of expectation 1 can do: bet until it is won, then hold on to it."""
    workers, rounds, h, k = 20_000, 20, 5.0, evidence.SHIFTS[2]
    found, rng = None, stream(1, "bets")
    for _ in range(rounds):
        won = torch.zeros(workers, dtype=torch.bool) if found is None else found[:, 0, 2] > h
        wins = torch.rand(workers, generator=rng) < math.exp(-h - 0.01)
        bet = torch.where(wins, (h + 0.01) / k + k / 2, -evidence.LARGEST_DISTANCE)
        outside = torch.where(won, torch.full_like(bet, k / 2), bet)  # E exp(k x - k^2 / 2) = 1 either way
        found = evidence.gathered(found, outside[:, None], torch.ones(workers, dtype=torch.bool))
    passed = int((found[:, 0, 2] > h).sum())
    assert at_most(passed, workers, rounds * math.exp(-h))
    assert not at_most(passed, workers, math.exp(-h)), "for which one round's bound would be too low"


@PROPERTY
@given(st.lists(st.floats(-40, 40), min_size=1, max_size=40))
def test_an_accepted_worker_went_no_further_than_its_evidence_allows(distances):
    found = after(torch.tensor(distances, dtype=torch.float64)[:, None, None])[0, 0].tolist()
    counted = [min(x, evidence.LARGEST_DISTANCE) for x in distances]
    for k, h in zip(evidence.SHIFTS, found, strict=True):
        for m in range(1, len(counted) + 1):
            assert sum(counted[-m:]) <= h / k + m * k / 2 + 1e-9


def test_over_many_rounds_an_accepted_worker_goes_about_as_far_as_noise_would():
    """The best steady distance that stays below h for m rounds, for m within the range of sizes."""
    h = 12.0
    for m in (2, 5, 20, 80, 300):
        farthest = min(h / k + m * k / 2 for k in evidence.SHIFTS)
        assert math.sqrt(2 * h * m) <= farthest + 1e-9
        assert farthest <= 1.26 * math.sqrt(2 * h * m)  # sizes a factor of 2 apart: (sqrt 2 + 1 / sqrt 2) / 2, and ends


def test_who_does_not_count_stays_and_what_is_not_finite_is_far():
    before = after(normal(3, 4, 2))
    kept = before.clone()
    odd = torch.tensor([[math.nan, math.inf], [-math.inf, 1e38], [math.nan, 0.0], [-1e38, 2.0]])
    counts = torch.tensor([True, True, False, False])
    found = evidence.gathered(before, odd, counts)
    assert torch.equal(before, kept)
    assert torch.equal(found[~counts], before[~counts])
    assert found.isfinite().all()
    steps = torch.tensor([evidence.LARGEST_DISTANCE * k - k * k / 2 for k in evidence.SHIFTS])
    torch.testing.assert_close(found[0], before[0] + steps)
    assert not found[1, 0].any()
    torch.testing.assert_close(found[1, 1], before[1, 1] + steps)


def test_the_mean_likelihood_ratio_is_finite_whatever_the_evidence():
    found = torch.zeros(4, 2 * PROBES, len(evidence.SHIFTS))
    found[1], found[2, 3, 1], found[3] = 1e30, 1e30, 3.4e38
    every = found[0].numel()
    wanted = [0.0, evidence.MOST_EVIDENCE, evidence.MOST_EVIDENCE - math.log(every), evidence.MOST_EVIDENCE]
    assert evidence.together(found).tolist() == pytest.approx(wanted, rel=1e-5)


def test_who_was_as_far_off_as_counts_is_refused_for_some_thirty_rounds():
    """If it lies at the bound from then on; further inside, for fewer."""
    limit = math.log(2 * PROBES * len(evidence.SHIFTS) / 2.5e-4)
    one = torch.ones(1, dtype=torch.bool)
    found, rounds = evidence.gathered(None, torch.tensor([[1e9]]), one), 0
    while float(evidence.largest(found)) > limit:
        found, rounds = evidence.gathered(found, torch.zeros(1, 1), one), rounds + 1
    assert 25 <= rounds <= 40


# --- expectation -----------------------------------------------------------------------------------------------------


def moments(values: list[float]) -> tuple[float, float, float]:
    """(mean, standard deviation with A - 1, mean of squares)"""
    center = sum(values) / len(values)
    spread = math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))
    return center, spread, sum(value**2 for value in values) / len(values)


def test_what_the_servers_examples_show_by_a_loop():
    own, s, batch = normal(20, 3) + 0.5, 0.4, 16
    own[:, 2] = 0.0
    found = ExampleMoments.of(own, torch.tensor(s * s), batch)
    assert all(part.shape == (3,) for part in found)
    for j in range(3):
        center, spread, square = moments(own[:, j].tolist())
        assert float(found.mean[j]) == pytest.approx(center, rel=1e-5)
        assert float(found.spread[j]) == pytest.approx(spread, rel=1e-5)
        assert float(found.variance[j]) == pytest.approx(square / batch + s * s, rel=1e-5)
        assert float(found.error(20)[j]) == pytest.approx(3 * spread / math.sqrt(20), rel=1e-5)
    nothing = ExampleMoments.of(torch.zeros(20, 3), torch.tensor(0.0), batch)
    assert (nothing.variance > 0).all(), "so that it can be divided by"


def test_what_is_expected_along_the_past_by_a_loop():
    own, echoes, s = normal(20, 3) + 0.5, torch.tensor([0.0, 0.2, 1.0]), 0.4
    low, high = along_history(ExampleMoments.of(own, torch.tensor(s * s), 16), 20, s, echoes)
    assert low.shape == high.shape == (3,)
    for j in range(3):
        center, spread, _ = moments(own[:, j].tolist())
        error = 3 * spread / math.sqrt(20) + 0.1 * s
        assert float(low[j]) == pytest.approx(center - error, rel=1e-5)
        assert float(high[j]) == pytest.approx(center + error + float(echoes[j]), rel=1e-5)


def test_what_is_expected_along_the_gradient_by_a_loop():
    """Whose length is the mean of the examples along it."""
    rows, s = normal(20, 8) / 8**0.5 + 0.5, 0.4
    length = float(rows.mean(0).norm())
    own = rows @ functional.normalize(rows.mean(0), dim=0)[:, None]
    low, high = along_gradient(ExampleMoments.of(own, torch.tensor(s * s), 16), 20, s)
    _, spread, _ = moments(own[:, 0].tolist())
    error, slack = 3 * spread / math.sqrt(20), 0.1 * s + 0.15 * spread
    assert float(low) == pytest.approx(-(error**2) / 4 / length - slack, rel=1e-5)
    assert float(high) == pytest.approx(length + error + slack, rel=1e-5)
    nothing = along_gradient(ExampleMoments.of(torch.zeros(20, 1), torch.tensor(0.0), 16), 20, 0.0)
    assert all(part.isfinite().all() for part in nothing)


def test_outside_counts_deviations_beyond_either_end():
    expected = Interval(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 4.0]]))
    found = expected.outside(torch.tensor([[2.0, 4.0], [-2.0, 0.0]]), torch.tensor([[0.25, 4.0]]))
    assert found.tolist() == [[2.0, 0.0, -6.0, -2.0], [-6.0, -2.0, 2.0, 0.0]]


@pytest.mark.parametrize("count", [20, 100])
def test_the_workers_mean_lies_outside_what_their_like_tell_as_rarely_as_stated(count):
    """Without noise, so that no room is left for it. The spread is estimated too: Student's distribution, two-sided."""
    directions = 20_000
    seen = ExampleMoments.of(0.3 + normal(count, directions), torch.tensor(0.0), 16)
    low, high = along_history(seen, count, 0.0, torch.zeros(directions))
    outside = int(((low > 0.3) | (high < 0.3)).sum())
    stated = 2 * stats.t.sf(STANDARD_ERRORS, count - 1)
    assert at_most(outside, directions, stated)
    assert outside >= directions * stated - SURE * math.sqrt(directions * stated), "and as often"


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_the_workers_mean_lies_outside_what_the_gradient_tells_as_rarely_as_stated(signal):
    """Not even the room for noise and for uneven data is needed, except that it covers what the estimates lack."""
    trials, count, d = 1000, 20, 30
    examples = functional.normalize(normal(trials, count, d, name=f"examples {signal}"), dim=2)
    examples[:, :, 0] += signal
    outside = 0
    for own in examples:
        gradient = own.mean(0)
        unit = gradient / gradient.norm()
        low, high = along_gradient(ExampleMoments.of(own @ unit[:, None], torch.tensor(0.0), 16), count, 0.0)
        outside += not float(low) <= signal * float(unit[0]) <= float(high)
    assert at_most(outside, trials, 2 * stats.t.sf(STANDARD_ERRORS, count - 1))


def test_the_deviation_is_that_of_poisson_batches_and_noise():
    batch, s, draws = 4, 0.2, 40_000
    examples = np.random.default_rng(1).normal(0.4, 0.7, 50)
    rng = np.random.default_rng(2)
    drawn = rng.random((draws, 50)) < batch / 50
    poisson = rng.poisson(batch / 50, (draws, 50))
    deviation = ExampleMoments.of(torch.tensor(examples)[:, None], torch.tensor(s * s), batch).variance.sqrt()
    noise = s * rng.standard_normal(draws)
    by_poisson, by_coins = (np.std(counts @ examples / batch + noise) for counts in (poisson, drawn))
    assert float(deviation) == pytest.approx(by_poisson, rel=SURE / math.sqrt(2 * draws))
    assert by_coins <= float(deviation) * (1 + SURE / math.sqrt(2 * draws)), "drawn without repetition, it is less"


def agreement_by_loops(own: torch.Tensor, labels: list[int] | None) -> tuple[float, float]:
    """(how far along the mean a fresh example is expected, its standard error)"""
    rows = own.double()
    center = rows.mean(0)
    length = float(center.norm())
    within, between = [], []
    for i in range(len(rows)):
        for j in range(len(rows)):
            if i != j:
                alike = labels is not None and labels[i] == labels[j]
                (within if alike else between).append(float(rows[i] @ rows[j]))
    fresh = mean(between)
    if labels is not None:
        fresh += (mean(within) - fresh) / len(set(labels))
    error = moments([float(row @ center) / length for row in rows])[1] / math.sqrt(len(rows))
    return fresh / length, error


def expected_agreement(own: torch.Tensor, strata: int) -> float:
    """With the length of the mean and the spread along it by a loop."""
    rows = own.double()
    length = float(rows.mean(0).norm())
    spread = moments([float(row @ rows.mean(0)) / max(length, 1e-30) for row in rows])[1]
    return float(agreement_of_examples(own, torch.tensor(length), torch.tensor(spread), strata))


@pytest.mark.parametrize("strata", [1, 2, 4])
def test_the_agreement_of_examples_by_loops_over_pairs(strata):
    """What is not above its standard error is 0: of the weaker and weaker signals here, some are."""
    classes = torch.arange(12) // (12 // strata)
    above = []
    noise = 0.5 * normal(12, 40) / 40**0.5
    for signal in (0.2, 0.1, 0.05, 0.02, 0.01, 0.003):
        own = noise - noise.mean(0) + signal * (1 + normal(4, 40, name="classes")[classes] / 3)
        fresh, error = agreement_by_loops(own, None if strata == 1 else classes.tolist())
        above.append(fresh > error)
        assert expected_agreement(own, strata) == pytest.approx(fresh if above[-1] else 0.0, rel=1e-4)
    assert above[0]
    assert not above[-1]


def test_nothing_is_expected_where_examples_do_not_agree():
    signs = torch.ones(20, 1)
    signs[::2] = -1
    assert expected_agreement(signs * normal(1, 50), 1) == 0.0
    assert expected_agreement(torch.zeros(20, 50), 10) == 0.0


def test_one_example_of_each_class_says_nothing_of_what_a_class_shares():
    """It counts as nothing, which is on the safe side: fresh examples of a class agree with it more than others do."""
    own = 0.5 * normal(12, 40) / 40**0.5 + 0.05
    fresh, error = agreement_by_loops(own, None)
    assert fresh * 11 / 12 > error
    assert expected_agreement(own, 12) == pytest.approx(fresh * 11 / 12, rel=1e-4)


def test_the_expected_agreement_is_what_fresh_examples_have():
    """Classes with means of their own, two server examples of each: taken for mixed ones, too little."""
    classes, each, d, trials = 10, 2, 60, 400
    centers = 0.1 + 0.5 * normal(classes, d, name="centers") / d**0.5
    labels = torch.arange(classes).repeat_interleave(each)
    told, untold, had = [], [], []
    for seed in range(trials):
        own = centers[labels] + 0.5 * normal(len(labels), d, seed=seed) / d**0.5
        unit = functional.normalize(own.mean(0), dim=0)
        told.append(expected_agreement(own, classes))
        untold.append(expected_agreement(own, 1))
        had.append(float(centers.mean(0) @ unit))  # of any fresh example, in the mean
    off = [one - other for one, other in zip(told, had, strict=True)]
    margin = SURE * np.std(off) / math.sqrt(trials)
    assert min(told) > 0
    assert abs(mean(off)) <= margin
    assert mean(untold) < mean(had) - margin


# --- the document --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
OF_PYTHON = {"and", "not", "sqrt", "max", "min", "sum", "sigmoid", "exp"}


def names_of_the_code() -> set[str]:
    """Functions, classes, fields and constants of the rule and of what it stands on, and names within them."""
    package = ROOT / "src" / "noisegate"
    files = [*(package / "aggregators" / "fortified").glob("*.py"), package / "views.py"]
    files += [package / "aggregators" / name for name in ("ks_test.py", "upload_lengths.py")]
    found = set()
    for path in files:
        for part in [path] if path.is_file() else path.glob("*.py"):
            for node in ast.walk(ast.parse(part.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.arg):
                    found.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
    return found


def test_every_name_in_the_pseudo_code_of_the_rule_is_one_of_the_code():
    text = (ROOT / "docs" / "fortified.md").read_text()
    block = text.split("```text\n")[1].split("```")[0]
    lines = [line.partition("#")[0] for line in block.splitlines()]
    assert 20 <= sum(bool(line.strip()) for line in lines) <= 30
    used = {name for line in lines for name in re.findall(r"[A-Za-z_]\w+", line)}
    assert len(used) > 50
    assert not used - names_of_the_code() - OF_PYTHON
    assert "hoped" not in names_of_the_code()
