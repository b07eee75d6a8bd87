"""The parts of `fortified` that judge one upload or one worker, by slow oracles: lengths, distributions, evidence, and
what the server's examples make expected."""

import ast
import math
import re
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional

from noisegate.aggregators.fortified import evidence
from noisegate.aggregators.fortified.expectation import Interval, expected
from noisegate.aggregators.fortified.mixture import ClassMeans, Mixture
from noisegate.aggregators.fortified.moments import MIX_ERROR, STANDARD_ERRORS, ExampleMoments
from noisegate.aggregators.fortified.state import COMMON, OWN_SPEED, PROBES, UPDATE_SPEEDS
from noisegate.aggregators.fortified.trust import agreement_of, promised_by
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


# --- moments -------------------------------------------------------------------------------------------------------

MIXES = {"equal": [0.25] * 4, "one class": [0.0, 0.0, 1.0, 0.0], "uneven": [0.1, 0.2, 0.3, 0.4], "large": [1.0] * 4}
"""Of four classes; what they add up to is the expected batch over the public one."""


def moments(values: list[float]) -> tuple[float, float, float]:
    """(mean, standard deviation with A - 1, mean of squares)"""
    center = sum(values) / len(values)
    spread = math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))
    return center, spread, sum(value**2 for value in values) / len(values)


def by_class(values: list[float], classes: int) -> list[tuple[float, float, float]]:
    """For each class (mean, variance of that mean, mean of squares)."""
    each = len(values) // classes
    groups = [values[c * each : (c + 1) * each] for c in range(classes)]
    if each == 1:
        within = [moments(values)[1] ** 2] * classes
    else:
        within = [moments(group)[1] ** 2 for group in groups]
        within = [max(own, sum(within) / classes) for own in within]
    squares = [sum(value**2 for value in group) / each for group in groups]
    return [(sum(group) / each, w / each, square) for group, w, square in zip(groups, within, squares, strict=True)]


def moments_by_loops(
    values: list[float], mix: list[float], noise: float, batch: int, unknown: float = 0.0
) -> dict[str, float]:
    """Of the examples along one direction, for one worker. unknown: the variance of all shares of its mix together."""
    classes, equal = len(mix), sum(mix) / len(mix)
    found = by_class(values, classes)
    middle = sum(each[0] for each in found) / classes
    between = sum((each[0] - middle) ** 2 for each in found) / classes
    uneven = sum((MIX_ERROR * (share - equal)) ** 2 for share in mix) + unknown
    error = sum(share**2 * each[1] for share, each in zip(mix, found, strict=True)) + uneven * between
    second = sum(share * each[2] for share, each in zip(mix, found, strict=True))
    return {
        "mean": sum(share * each[0] for share, each in zip(mix, found, strict=True)),
        "error": error,
        "shared_error": min(error, equal**2 * sum(each[1] for each in found)),
        "spread": moments(values)[1] * math.sqrt(classes * sum(share**2 for share in mix)),
        "variance": second / batch + noise,
    }


def error_by_loops(own: torch.Tensor, strata: int) -> list[float]:
    """(K,) the variance of the mean over classes of class means, from the variance within each class."""
    equal = [1 / strata] * strata
    return [moments_by_loops(column, equal, 0.0, 1)["error"] for column in own.double().T.tolist()]


def moments_of(along: torch.Tensor, mix: list[list[float]], noise: float = 0.0, batch: int = 16) -> ExampleMoments:
    """Along (A, K) shared directions; the own averages of all workers are the first of them."""
    rows = torch.tensor(mix, dtype=along.dtype)
    own = along[:, :1].expand(-1, len(mix))
    return ExampleMoments.of(along, own, rows, torch.zeros(len(mix)), torch.tensor(2.0), torch.tensor(noise), batch)


@pytest.mark.parametrize("each", [1, 2, 5])
def test_what_the_servers_examples_show_by_a_loop_over_workers_and_directions(each):
    mix, s, batch, reach = list(MIXES.values()), 0.4, 16, 1.2
    along, own = normal(4 * each, 3) + 0.5, normal(4 * each, len(mix), name="own") - 0.2
    along[:, 1] *= torch.arange(4.0).repeat_interleave(each)  # classes that differ, and one that is always the same
    unknown = 0.1 * torch.arange(float(len(mix)))
    given = along, own, torch.tensor(mix), unknown, torch.tensor(reach), torch.tensor(s * s)
    before = [part.clone() for part in given]
    found = ExampleMoments.of(*given, batch)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    for i, shares in enumerate(mix):
        for k in range(4):
            values = (along[:, k] if k < 3 else own[:, i]).tolist()
            wanted = moments_by_loops(values, shares, s * s, batch, float(unknown[i]))
            for name, value in wanted.items():
                assert float(getattr(found, name)[i, k]) == pytest.approx(value, rel=1e-4), (name, i, k)
            assert float(found.allowance()[i, k]) == pytest.approx(3 * math.sqrt(wanted["error"]), rel=1e-4)
        furthest = sum(shares) * reach - wanted["mean"]  # the last is the worker's own
        assert float(found.own_reach[i]) == pytest.approx(max(0.0, furthest), rel=1e-4)


def test_own_reach_is_never_less_than_nothing():
    own = torch.full((8, 2), 0.9)
    equal, given = torch.tensor(2 * [MIXES["equal"]]), (torch.tensor(0.5), torch.tensor(0.1))
    found = ExampleMoments.of(own, own, equal, torch.zeros(2), *given, 16)
    assert found.own_reach.tolist() == [0.0, 0.0]


def test_examples_that_are_all_zero_leave_moments_that_can_be_divided_by():
    for mix in MIXES.values():
        nothing = moments_of(torch.zeros(20, 3), [mix])
        assert all(part.isfinite().all() for part in nothing)
        assert (nothing.variance > 0).all()


def test_equal_shares_have_the_error_of_their_classes_alone():
    """Examples drawn anew: their means vary by about that, and an error that knows no classes is far too large."""
    classes, each, trials = 4, 5, 4000
    centers = 3 * torch.arange(float(classes)).repeat_interleave(each)
    own = centers[:, None] + normal(classes * each, trials)
    vary = float(own.mean(0).var())
    error = moments_of(own, [[1 / classes] * classes]).error
    # The larger of a class's variance and their mean is used: of four values with four degrees of freedom, 1.3 of it.
    assert vary * (1 - SURE * math.sqrt(2 / trials)) <= float(error.mean()) <= 1.4 * vary
    assert float(moments_of(own, [[1.0]]).error.min()) > 2 * vary


def test_what_is_shared_of_an_error_is_no_more_than_that_of_equal_shares():
    own = normal(20, 50) + torch.arange(4.0).repeat_interleave(5)[:, None]
    found = moments_of(own, list(MIXES.values()))
    equal, one = found.error[0], found.error[1]
    torch.testing.assert_close(found.shared_error[0], equal)
    torch.testing.assert_close(found.shared_error[1], equal)
    assert (one > 2 * equal).all(), "the rest of it is the worker's own"


# --- expectation -----------------------------------------------------------------------------------------------------


def interval(
    along, own, mix, s=0.0, apart=None, lengths=None, own_lengths=None, echo=0.0, weight=0.0, reach=0.0, main=0.0
):
    """What is expected where the (A, COMMON) examples lie so along the directions, and (A, n) along the own ones."""
    n = len(mix)
    given = along.new_zeros(n), torch.tensor(reach, dtype=along.dtype), torch.tensor(s * s, dtype=along.dtype)
    projections = SimpleNamespace(
        moments=ExampleMoments.of(along, own, mix, *given, 16),
        along_gradient=along.new_zeros(n) if apart is None else apart,
        lengths=along.new_ones(COMMON) if lengths is None else lengths,
        own_lengths=along.new_ones(n) if own_lengths is None else own_lengths,
        momentum=SimpleNamespace(echo=torch.full((n,), echo)),
        along_main=along.new_full((n,), main),
    )
    averages = along.new_zeros(len(UPDATE_SPEEDS), 1)
    state = SimpleNamespace(largest_weights=torch.tensor([weight / 2, weight]), update_averages=averages)
    return expected(SimpleNamespace(noise_std=s, expected=None, norms=along.new_ones(n)), state, projections)


@pytest.mark.parametrize("promised", [-0.5, 0.0, 5.0])
def test_what_is_expected_by_a_loop_over_workers_and_directions(promised):
    """With less promised where no example meets itself than where all cancel, with about as much, and with more."""
    mix, s, echo, weight, reach = list(MIXES.values()), 0.4, 0.6, 0.3, 2.5
    along, own = normal(20, COMMON) + 0.5, normal(20, len(mix), name="own")
    lengths, own_lengths = torch.linspace(0.02, 0.4, COMMON), torch.tensor([1e-3, 0.01, 0.1, 1.0])
    apart = promised + torch.linspace(0.0, 0.3, len(mix))
    low, high = interval(along, own, torch.tensor(mix), s, apart, lengths, own_lengths, echo, weight, reach)
    assert low.shape == high.shape == (len(mix), PROBES)
    capped = 0
    for i, shares in enumerate(mix):
        for k in range(PROBES):
            values = (along[:, k] if k < COMMON else own[:, i]).tolist()
            seen = moments_by_loops(values, shares, s * s, 16)
            error, slack = 3 * math.sqrt(seen["error"]), 0.15 * seen["spread"] + 0.1 * s
            least, most = seen["mean"] - error, seen["mean"] + error
            if k == 0:
                least = min(-(error**2) / 4 / float(lengths[0]), float(apart[i]) - error)
            elif k <= len(UPDATE_SPEEDS):
                most += min(1.0, weight * echo * UPDATE_SPEEDS[k - 1] / float(lengths[k]))
            elif k == COMMON:
                further = OWN_SPEED * echo / float(own_lengths[i])
                capped += further > 1
                most += min(1.0, further) + max(0.0, sum(shares) * reach - seen["mean"])
            assert float(low[i, k]) == pytest.approx(least - slack, rel=1e-4, abs=1e-5), (i, k)
            assert float(high[i, k]) == pytest.approx(most + slack, rel=1e-4, abs=1e-5), (i, k)
    assert capped == 1


def test_what_is_expected_is_finite_where_there_is_nothing():
    nothing = torch.zeros(20, COMMON)
    for mix in MIXES.values():
        found = interval(nothing, nothing[:, :1], torch.tensor([mix]), lengths=torch.zeros(COMMON))
        assert all(part.isfinite().all() for part in found)


def test_outside_counts_deviations_beyond_either_end():
    expected = Interval(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 4.0]]))
    found = expected.outside(torch.tensor([[2.0, 4.0], [-2.0, 0.0]]), torch.tensor([[0.25, 4.0]]))
    assert found.tolist() == [[2.0, 0.0, -6.0, -2.0], [-6.0, -2.0, 2.0, 0.0]]


@pytest.mark.parametrize("count", [20, 100])
def test_the_workers_mean_lies_outside_what_their_like_tell_as_rarely_as_stated(count):
    """Without the room for uneven data. The spread is estimated too: Student's distribution, two-sided."""
    directions = 20_000
    seen = moments_of(0.3 + normal(count, directions), [[1.0]])
    outside = int(((seen.mean - 0.3).abs() > seen.allowance())[:, :-1].sum())
    stated = 2 * stats.t.sf(STANDARD_ERRORS, count - 1)
    assert at_most(outside, directions, stated)
    assert outside >= directions * stated - SURE * math.sqrt(directions * stated), "and as often"


@pytest.mark.parametrize("name", ["equal", "one class", "uneven"])
@pytest.mark.parametrize("each", [2, 5])
def test_the_mean_of_a_worker_whose_mix_is_known_lies_outside_as_rarely_as_stated(name, each):
    """The classes' variances are pooled at least: Student's distribution with one degree less for each class."""
    directions, classes = 20_000, 4
    centers = torch.tensor([0.3, -0.2, 0.5, 0.0])
    mix = torch.tensor(MIXES[name])
    seen = moments_of(centers.repeat_interleave(each)[:, None] + normal(classes * each, directions), [MIXES[name]])
    off = (seen.mean - float(mix @ centers)).abs()[0, :-1]
    stated = 2 * stats.t.sf(STANDARD_ERRORS, classes * (each - 1))
    assert at_most(int((off > seen.allowance()[0, :-1]).sum()), directions, stated)
    narrow = int((off > seen.allowance()[0, :-1] / 4).sum())
    assert not at_most(narrow, directions, stated), "a fourth of the room would not do"


@pytest.mark.parametrize("name", [None, "equal", "one class"])
@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_the_workers_mean_lies_outside_what_the_gradient_tells_as_rarely_as_stated(signal, name):
    """Where classes are not known, for equal mixes, and for a worker of one class that is known.

    The room for uneven data is needed no further than to cover what the estimates lack.
    """
    trials, each, classes, d = 600, 5, 4, 30
    mix = torch.tensor([[1.0] if name is None else MIXES[name]])
    examples = functional.normalize(normal(trials, classes * each, d, name=f"examples {signal}"), dim=2)
    centers = torch.zeros(classes, d)
    centers[:, 0] = signal
    if name is not None:
        centers[torch.arange(classes), 1 + torch.arange(classes)] = 0.5
    truth = mix[0] @ centers if name else centers[0]
    outside = 0
    for own in examples + centers.repeat_interleave(each, 0):
        length = own.mean(0).norm()
        unit = own.mean(0) / length
        along = torch.zeros(len(own), COMMON)
        along[:, 0] = own @ unit
        apart = mix @ ClassMeans.of(own, mix.shape[1]).gram.mean(1) / length
        low, high = interval(along, along[:, :1], mix, apart=apart, lengths=length.expand(COMMON))
        outside += not float(low[0, 0]) <= float(truth @ unit) <= float(high[0, 0])
    assert at_most(outside, trials, 2 * stats.t.sf(STANDARD_ERRORS, classes * (each - 1)))


@pytest.mark.parametrize("size", [1.0, 2.5])
def test_the_deviation_is_that_of_poisson_batches_and_noise(size):
    """size: the expected batch over the public one."""
    batch, s, draws = 4, 0.2, 40_000
    examples = np.random.default_rng(1).normal(0.4, 0.7, 50)
    rng = np.random.default_rng(2)
    drawn = rng.random((draws, 50)) < size * batch / 50
    poisson = rng.poisson(size * batch / 50, (draws, 50))
    found = moments_of(torch.tensor(examples)[:, None], [[size]], s * s, batch)
    deviation = float(found.variance[0, 0].sqrt())
    noise = s * rng.standard_normal(draws)
    by_poisson, by_coins = (np.std(counts @ examples / batch + noise) for counts in (poisson, drawn))
    assert deviation == pytest.approx(by_poisson, rel=SURE / math.sqrt(2 * draws))
    assert by_coins <= deviation * (1 + SURE / math.sqrt(2 * draws)), "drawn without repetition, it is less"
    mean_batch = (poisson @ examples / batch).mean()
    assert float(found.mean[0, 0]) == pytest.approx(mean_batch, abs=SURE * deviation / math.sqrt(draws))


# --- agreement -------------------------------------------------------------------------------------------------------


def mixture_of(own: torch.Tensor, mix: torch.Tensor, uploads: torch.Tensor | None = None) -> Mixture:
    """What agreement needs of a mixture, and nothing else."""
    classes = ClassMeans.of(own, mix.shape[1])
    along = None if uploads is None else uploads @ classes.means.T
    return Mixture(mix, torch.zeros(len(mix)), classes, along, mix.sum(1), None, None, None, None)


def fresh_by_loops(own: torch.Tensor, mix: list[float]) -> float:
    """The square of the length of the mixed mean, from the inner products of pairs of different examples."""
    rows, strata = own.double(), len(mix)
    each = len(rows) // strata
    total = 0.0
    for c, b in np.ndindex(strata, strata):
        pairs = [
            float(rows[i] @ rows[j])
            for i in range(c * each, (c + 1) * each)
            for j in range(b * each, (b + 1) * each)
            if i != j
        ]
        # An example alone meets only itself, and counts by half.
        total += mix[c] * mix[b] * (mean(pairs) if pairs else float(rows[c].square().sum()) / 2)
    return total


def along_mix(own: torch.Tensor, mix: list[float]) -> torch.Tensor:
    """(d,) the mixed mean."""
    each = len(own) // len(mix)
    return sum(share * own[c * each : (c + 1) * each].double().mean(0) for c, share in enumerate(mix))


def expected_agreement(own: torch.Tensor, strata: int) -> float:
    """() how far along the server's gradient a worker with equal shares should lie, by loops over pairs."""
    center = along_mix(own, [1 / strata] * strata)
    length = max(float(center.norm()), 1e-15)
    error = error_by_loops((own.double() @ center / length)[:, None], strata)[0]
    fresh = fresh_by_loops(own, [1 / strata] * strata) / length
    return fresh if fresh > math.sqrt(error) else 0.0


def promised(own: torch.Tensor, strata: int) -> float:
    """() what the code says of it."""
    unit = functional.normalize(own.mean(0), dim=0)
    mix = torch.full((1, strata), 1 / strata)
    error = moments_of((own @ unit)[:, None], mix.tolist()).error[:, 0]
    return float(promised_by(mixture_of(own, mix), error))


@pytest.mark.parametrize("strata", [1, 2, 4, 12])
def test_the_agreement_of_examples_by_loops_over_pairs(strata):
    """What is not above its standard error is 0: of the weaker and weaker signals here, some are."""
    classes = torch.arange(12) // (12 // strata)
    noise = 0.5 * normal(12, 40) / 40**0.5
    found = []
    for signal in (0.2, 0.1, 0.05, 0.02, 0.01, 0.003):
        own = noise - noise.mean(0) + signal * (1 + normal(12, 40, name="classes")[classes] / 3)
        found.append(expected_agreement(own, strata))
        assert promised(own, strata) == pytest.approx(found[-1], rel=1e-3)
    assert found[0] > 0
    assert found[-1] == 0.0


@pytest.mark.parametrize("strata", [1, 4])
def test_where_each_upload_lies_along_what_its_mix_says_by_loops(strata):
    own = 0.3 * normal(12, 40) / 40**0.5 + 0.3 * normal(4, 40, name="centers").repeat_interleave(3, 0) / 40**0.5
    mix = [[1.0]] * 4 if strata == 1 else list(MIXES.values())
    uploads = normal(4, 40, name="uploads")
    found, should = agreement_of(mixture_of(own, torch.tensor(mix), uploads), torch.zeros(4))
    for i, shares in enumerate(mix):
        center = along_mix(own, shares)
        length = float(center.norm())
        assert float(found[i]) == pytest.approx(float(uploads[i].double() @ center) / length, abs=1e-5)
        assert float(should[i]) == pytest.approx(max(0.0, fresh_by_loops(own, shares) / length), abs=1e-5)
    assert float(should.max()) > 0
    error = (should * torch.tensor([0.99, 1.01, 0.99, 1.01])).square()
    kept = agreement_of(mixture_of(own, torch.tensor(mix), uploads), error)[1]
    assert kept.tolist() == [pytest.approx(float(should[i])) if i % 2 == 0 else 0.0 for i in range(4)]


def test_nothing_is_expected_where_examples_do_not_agree():
    signs = torch.ones(20, 1)
    signs[::2] = -1
    assert promised(signs * normal(1, 50), 1) == 0.0
    assert promised(torch.zeros(20, 50), 10) == 0.0
    for strata in (1, 10):
        mix = torch.full((1, strata), 1 / strata)
        parts = agreement_of(mixture_of(torch.zeros(20, 50), mix, normal(1, 50)), torch.zeros(1))
        assert [part.tolist() for part in parts] == [[0.0], [0.0]]


def test_the_expected_agreement_is_what_fresh_examples_have():
    """Classes with means of their own, two server examples of each: taken for mixed ones, too little.

    So it is for a worker of one class along what its mix says.
    """
    classes, each, d, trials = 10, 2, 60, 400
    centers = 0.1 + 0.5 * normal(classes, d, name="centers") / d**0.5
    labels = torch.arange(classes).repeat_interleave(each)
    one = functional.one_hot(torch.tensor([3]), classes).float()
    told, untold, had, of_one, had_by_one = [], [], [], [], []
    for seed in range(trials):
        own = centers[labels] + 0.5 * normal(len(labels), d, seed=seed) / d**0.5
        unit = functional.normalize(own.mean(0), dim=0)
        told.append(promised(own, classes))
        untold.append(promised(own, 1))
        had.append(float(centers.mean(0) @ unit))  # of any fresh example, in the mean
        of_one.append(float(agreement_of(mixture_of(own, one, own[:1]), torch.zeros(1))[1]))
        had_by_one.append(float(centers[3] @ functional.normalize(own[6:8].mean(0), dim=0)))
    for ours, theirs in ((told, had), (of_one, had_by_one)):
        off = [each - other for each, other in zip(ours, theirs, strict=True)]
        assert min(ours) > 0
        assert abs(mean(off)) <= SURE * np.std(off) / math.sqrt(trials)
    margin = SURE * np.std(np.subtract(told, had)) / math.sqrt(trials)
    assert mean(untold) < mean(had) - margin


# --- the document --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
OF_PYTHON = {"or", "and", "not", "sqrt", "max", "min", "sum", "sigmoid", "exp"}


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
