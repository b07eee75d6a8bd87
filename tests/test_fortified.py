"""The fortified filter: what it promises honest workers, what it leaves to liars, and its parts by slow oracles."""

import io
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from noisegate import Compute, Spec, SpecError, StoreError, reference, run
from noisegate.aggregators import Fortified, evidence, fortified, independence, judged, probed
from noisegate.aggregators.known import PROBES, Known
from noisegate.aggregators.ks_test import (
    count_every_value,
    count_where_in_doubt,
    ks_rejects,
    ks_threshold,
    room_for_signal,
)
from noisegate.aggregators.probes import CERTAINTY, Expected, Seen, along_gradient, along_history, hoped_agreement
from noisegate.aggregators.upload_lengths import honest_lengths
from noisegate.runs.setup import prepare
from noisegate.simulate import accuracy, first_state, play
from noisegate.streams import stream
from noisegate.views import TESTS, Reason, ServerView, Verdict, receive
from noisegate.workers import contributions_of
from oracles import ks_statistic
from test_doubts import doubts_by_loops, error_by_loops
from test_noise_tests import quantiles
from test_resume import contents, stop_after

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
    wanted = np.zeros((6, 4, len(evidence.SIZES)))
    for outside, counted in zip(rounds, counts, strict=True):
        found = evidence.gathered(found, outside, counted)
        for i, j, m in np.ndindex(wanted.shape):
            k = evidence.SIZES[m]
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
            for each in range(len(evidence.SIZES)):
                assert at_most(int((found[:, 0, each] > h).sum()), workers, math.exp(-h))
    assert int((found[:, 0, 1] > 1.0).sum()) > workers * math.exp(-1.0) / 4, "and that is no empty bound"


def test_evidence_that_depends_on_the_past_passes_h_in_t_rounds_with_a_chance_of_at_most_t_exp_minus_h():
    """The worst that rounds of expectation 1 can do: bet until it is won, then hold on to it."""
    workers, rounds, h, k = 20_000, 20, 5.0, evidence.SIZES[2]
    found, rng = None, stream(1, "bets")
    for _ in range(rounds):
        won = torch.zeros(workers, dtype=torch.bool) if found is None else found[:, 0, 2] > h
        wins = torch.rand(workers, generator=rng) < math.exp(-h - 0.01)
        bet = torch.where(wins, (h + 0.01) / k + k / 2, -evidence.FARTHEST)
        outside = torch.where(won, torch.full_like(bet, k / 2), bet)  # E exp(k x - k^2 / 2) = 1 either way
        found = evidence.gathered(found, outside[:, None], torch.ones(workers, dtype=torch.bool))
    passed = int((found[:, 0, 2] > h).sum())
    assert at_most(passed, workers, rounds * math.exp(-h))
    assert not at_most(passed, workers, math.exp(-h)), "for which one round's bound would be too low"


@PROPERTY
@given(st.lists(st.floats(-40, 40), min_size=1, max_size=40))
def test_an_accepted_worker_went_no_further_than_its_evidence_allows(distances):
    found = after(torch.tensor(distances, dtype=torch.float64)[:, None, None])[0, 0].tolist()
    counted = [min(x, evidence.FARTHEST) for x in distances]
    for k, h in zip(evidence.SIZES, found, strict=True):
        for m in range(1, len(counted) + 1):
            assert sum(counted[-m:]) <= h / k + m * k / 2 + 1e-9


def test_over_many_rounds_an_accepted_worker_goes_about_as_far_as_noise_would():
    """The best steady distance that stays below h for m rounds, for m within the range of sizes."""
    h = 12.0
    for m in (2, 5, 20, 80, 300):
        farthest = min(h / k + m * k / 2 for k in evidence.SIZES)
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
    steps = torch.tensor([evidence.FARTHEST * k - k * k / 2 for k in evidence.SIZES])
    torch.testing.assert_close(found[0], before[0] + steps)
    assert not found[1, 0].any()
    torch.testing.assert_close(found[1, 1], before[1, 1] + steps)


def test_the_mean_likelihood_ratio_is_finite_whatever_the_evidence():
    found = torch.zeros(4, 2 * PROBES, len(evidence.SIZES))
    found[1], found[2, 3, 1], found[3] = 1e30, 1e30, 3.4e38
    every = found[0].numel()
    wanted = [0.0, evidence.PLENTY, evidence.PLENTY - math.log(every), evidence.PLENTY]
    assert evidence.together(found).tolist() == pytest.approx(wanted, rel=1e-5)


def test_who_was_as_far_off_as_counts_is_refused_for_some_thirty_rounds():
    """If it lies at the bound from then on; further inside, for fewer."""
    limit = math.log(2 * PROBES * len(evidence.SIZES) / 2.5e-4)
    one = torch.ones(1, dtype=torch.bool)
    found, rounds = evidence.gathered(None, torch.tensor([[1e9]]), one), 0
    while float(evidence.largest(found)) > limit:
        found, rounds = evidence.gathered(found, torch.zeros(1, 1), one), rounds + 1
    assert 25 <= rounds <= 40


# --- independence --------------------------------------------------------------------------------------------------


def vectors(edges: dict[tuple[int, int], float], n: int) -> torch.Tensor:
    """Uploads whose inner products are the weights of these edges, and 0 otherwise: two share a coordinate of it."""
    rows = torch.zeros(n, len(edges) + n)
    for at, ((i, j), weight) in enumerate(edges.items()):
        rows[i, at], rows[j, at] = 1.0, weight
    return rows


def divided(uploads: torch.Tensor, limit: float, longest: float, among=None, trust=None, ties=None):
    """(who is left out, what others have in common with each)"""
    n = len(uploads)
    among = torch.ones(n, dtype=torch.bool) if among is None else among
    trust = torch.zeros(n) if trust is None else trust
    ties = torch.arange(n) if ties is None else ties
    handed = uploads, among, torch.tensor(limit), trust, ties
    before = [each.clone() for each in handed]
    copies, others = independence.shared(uploads, among, handed[2], longest, trust, ties)
    assert all(torch.equal(*pair) for pair in zip(handed, before, strict=True))
    assert (copies.dtype, copies.shape, others.dtype, others.shape) == (torch.bool, (n,), uploads.dtype, (n,))
    return set(copies.nonzero().flatten().tolist()), others


def left_out(uploads: torch.Tensor, beyond: float, among=None, trust=None, ties=None) -> set[int]:
    """Of uploads of which those count as copies whose inner product is beyond this."""
    return divided(uploads, 0.0, math.sqrt(beyond / independence.ALIKE), among, trust, ties)[0]


def conflicts_of(uploads: torch.Tensor, beyond: float, among) -> dict[int, dict[int, float]]:
    """For each worker, whom it conflicts with, and their inner product."""
    n, gram = len(uploads), (uploads.double() @ uploads.double().T).tolist()
    return {
        i: {j: gram[i][j] for j in range(n) if j != i and among[i] and among[j] and gram[i][j] > beyond}
        for i in range(n)
    }


def in_order(rivals: dict[int, dict[int, float]], trust, ties) -> list[int]:
    """Who comes first: the more trusted, then who conflicts with fewest, is leaned on most, is first by lot."""
    place = ties.tolist()
    return sorted(
        rivals,
        key=lambda i: (
            -round(float(trust[i]) / independence.STEP),
            len(rivals[i]),
            -sum(rivals[i].values()),
            place.index(i),
        ),
    )


def one_by_one(rivals: dict[int, dict[int, float]], order: list[int]) -> set[int]:
    """Who is left out if they come in their order, and whoever conflicts with one that stayed goes."""
    stay: set[int] = set()
    for i in order:
        if not stay & set(rivals[i]):
            stay.add(i)
    return set(rivals) - stay


def in_turns(rivals: dict[int, dict[int, float]], order: list[int], turns: int) -> set[int]:
    """Who is left out if in every turn the rivals of all those go that come before all their rivals; and then the rest.

    The rest are those who are in a conflict still.
    """
    left = {i: set(mine) for i, mine in rivals.items()}
    out: set[int] = set()
    for _ in range(turns):
        first = [i for i in left if left[i] and all(order.index(i) < order.index(j) for j in left[i])]
        out |= {j for i in first for j in left[i]}
        left = {i: set() if i in out else left[i] - out for i in left}
    return out | {i for i in left if left[i]}


@st.composite
def entangled(draw, most: int):
    """(uploads, among, trust, ties) of up to so many workers."""
    n = draw(st.integers(1, most))
    pairs = [(i, j) for i in range(n) for j in range(i)]
    edges = {pair: draw(st.sampled_from((0.0, 0.0, 1.0, 2.0, 4.0, -2.0))) for pair in pairs}
    among = torch.tensor([draw(st.integers(0, 4)) > 0 for _ in range(n)])
    trust = torch.tensor([draw(st.sampled_from((0.0, 0.3, -0.3, 4.0, -7.0, -80.0))) for _ in range(n)])
    return vectors(edges, n), among, trust, torch.tensor(draw(st.permutations(range(n))))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(entangled(5))
def test_conflicts_are_settled_as_one_by_one(case):
    """Up to five workers: each turn settles two at least, and one alone is in no conflict."""
    uploads, among, trust, ties = case
    rivals = conflicts_of(uploads, 0.5, among)
    assert left_out(uploads, 0.5, among, trust, ties) == one_by_one(rivals, in_order(rivals, trust, ties))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(entangled(8))
def test_conflicts_are_settled_in_two_turns_and_what_is_left_then_is_left_out(case):
    uploads, among, trust, ties = case
    out = left_out(uploads, 0.5, among, trust, ties)
    rivals = conflicts_of(uploads, 0.5, among)
    assert out == in_turns(rivals, in_order(rivals, trust, ties), 2)
    rest = [i for i in range(len(among)) if among[i] and i not in out]
    assert all(j not in rivals[i] for i in rest for j in rest), "no two of the rest conflict"
    assert all(rivals[i] for i in out), "nobody without a conflict is left out"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(9, 60), st.floats(0.02, 0.9))
def test_of_many_conflicts_nobody_is_left(seed, n, density):
    """However entangled: what two turns do not settle is left out."""
    rng = stream(seed, "graph")
    linked = torch.rand(n, n, generator=rng) < density
    edges = {(i, j): 1.0 for i in range(n) for j in range(i) if linked[i, j]}
    uploads = vectors(edges, n)
    out = left_out(uploads, 0.5, ties=torch.randperm(n, generator=rng))
    assert not [(i, j) for i, j in edges if i not in out and j not in out]
    assert all(any(i in edge for edge in edges) for i in out)


def test_a_chain_too_long_to_be_settled_in_two_turns_is_cut():
    """Each is more trusted than the next, so that each turn settles two; who is not settled then is left out."""
    n = 20
    uploads = vectors({(i, i + 1): 1.0 for i in range(n - 1)}, n)
    trust = -2 * independence.STEP * torch.arange(float(n))
    assert left_out(uploads, 0.5, trust=trust) == {1, 3, *range(4, n)}


def test_nearly_always_the_first_turn_settles_all():
    """Copies of several uploads, of each another number: one of each stays, and none has to wait for another."""
    families = torch.arange(6).repeat_interleave(torch.tensor([1, 1, 2, 3, 5, 8]))
    for seed in range(20):
        rng = stream(seed, "families")
        uploads = normal(6, 500, seed=seed)[families] + 0.3 * torch.randn(20, 500, generator=rng)
        ties = torch.randperm(20, generator=rng)
        rivals = conflicts_of(uploads, 300.0, torch.ones(20, dtype=torch.bool))
        stay = sorted(set(range(20)) - in_turns(rivals, in_order(rivals, torch.zeros(20), ties), 1))
        assert families[stay].tolist() == list(range(6))
        stay = sorted(set(range(20)) - left_out(uploads, 300.0, ties=ties))
        assert families[stay].tolist() == list(range(6))


def test_the_order_of_conflicts_is_exact():
    """One number stands for trust, conflicts, leaning and lot, as far as each of them goes."""
    highest = (independence.GROUP * 44 + independence.GROUP) * 128 + 100  # a score is above -88, and steps are of 2
    assert highest * independence.MOST_WORKERS < 2**53
    n, most = independence.GROUP, independence.MOST_WORKERS
    products = torch.full((n, n), 2.0).fill_diagonal_(0.0)  # all conflict with all: the most conflicts there can be
    trust, rank = torch.full((n,), -87.0), torch.arange(most - n, most)
    stays = independence._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [0], "of equals the first by lot, though numbers differ by 1 in 5e13"
    products[5, 7] = products[7, 5] = 2.0 + 2.0 * n * 0.02  # which are leaned on more
    stays = independence._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [5]
    trust[500] = -84.9
    stays = independence._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [500]


@pytest.mark.parametrize(("n", "d"), [(2, 600), (7, 33), (12, 2410), (25, 2410), (63, 999), (200, 300)])
def test_of_equal_uploads_the_ties_keep_one(n, d):
    uploads = normal(1, d).repeat(n, 1)
    for seed in range(5):
        ties = torch.randperm(n, generator=stream(seed, "ties"))
        out, others = divided(uploads, 0.1 * d, float(uploads[0].norm()), ties=ties)
        assert out == set(range(n)) - {int(ties[0])}
        assert not others.any(), "what is left is said once"


def partial_copies(copies: int, d: int, share: float, seed: int) -> torch.Tensor:
    """(1 + copies, d) an upload of length sqrt(d), and mixes of it with noise."""
    rows = normal(1 + copies, d, seed=seed)
    rows[1:] = share * rows[:1] + (1 - share**2) ** 0.5 * rows[1:]
    return rows


def longest_of(uploads: torch.Tensor) -> float:
    return float(uploads.norm(dim=1).max())


def test_of_partial_copies_the_one_stays_that_they_imitate():
    for seed in range(20):
        uploads = torch.cat([partial_copies(6, 2000, 0.85, seed), normal(5, 2000, seed=seed, name="others")])
        places = torch.randperm(12, generator=stream(seed, "places"))
        ties = torch.randperm(12, generator=stream(seed, "ties"))
        imitators = {int(torch.argsort(places)[i]) for i in range(1, 7)}
        longest = longest_of(uploads)
        assert divided(uploads[places], 350.0, longest, ties=ties)[0] == imitators  # they share 0.72, and 0.85 with it


def test_one_upload_made_of_others_goes_and_they_stay():
    for seed in range(20):
        for many in (2, 3):
            others = normal(many, 2000, seed=seed)
            uploads = torch.cat([others, others.sum(0, keepdim=True) / many**0.5])
            ties = torch.randperm(many + 1, generator=stream(seed, "ties"))
            assert divided(uploads, 350.0, longest_of(uploads), ties=ties)[0] == {many}


def test_one_upload_made_of_so_many_that_it_is_no_copy_of_any_shares_its_weight():
    others = normal(10, 2000)
    uploads = torch.cat([others, others.sum(0, keepdim=True) / 10**0.5])
    longest = longest_of(uploads)
    out, found = divided(uploads, 350.0, longest)
    assert not out
    products = uploads[:10].double() @ uploads[10].double()
    assert float(found[10]) == pytest.approx(float(products.sum()) / longest**2, rel=1e-4)
    assert float(found[10]) > 2.5
    assert found[:10].tolist() == pytest.approx((products / longest**2).tolist(), rel=1e-4)


def test_the_more_trusted_of_two_stays_however_many_rivals_it_has():
    uploads = vectors({(0, 1): 1.0, (0, 2): 1.0}, 4)
    assert left_out(uploads, 0.5) == {0}
    assert left_out(uploads, 0.5, trust=torch.tensor([2.2, 0.0, 0.0, -7.0])) == {1, 2}
    assert left_out(uploads, 0.5, trust=torch.tensor([0.9, 0.0, 0.0, 0.0])) == {0}, "a small difference is none"


def others_by_loops(uploads: torch.Tensor, limit: float, longest: float, stay: list[int]) -> list[float]:
    """How many further uploads each of those who stay is as good as repeated by; 0 for the others."""
    found, rows = [0.0] * len(uploads), uploads.double()
    for i in stay:
        for j in stay:
            product = float(rows[i] @ rows[j])
            if i != j and product > limit:
                found[i] += product / longest**2
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(0.0, 1.0), st.floats(0.0, 0.7))
def test_what_is_shared_by_loops(seed, n, common, limit):
    """Copies are beyond half of the longest's square and beyond the limit; what stays is counted beyond the limit."""
    rng = stream(seed, "shared")
    uploads = torch.randn(n, 12, generator=rng) + 2 * common * torch.randn(12, generator=rng)
    among = torch.rand(n, generator=rng) < 0.8
    trust, ties = 3 * torch.randn(n, generator=rng), torch.randperm(n, generator=rng)
    longest = longest_of(uploads)
    out, found = divided(uploads, limit * longest**2, longest, among, trust, ties)
    rivals = conflicts_of(uploads, max(limit, 0.5) * longest**2, among)
    assert out == in_turns(rivals, in_order(rivals, trust, ties), 2)
    stay = [i for i in range(n) if among[i] and i not in out]
    assert found.tolist() == pytest.approx(others_by_loops(uploads, limit * longest**2, longest, stay), rel=1e-4)


def test_what_those_say_who_are_not_among_them_does_not_matter():
    """Not even what overflows."""
    uploads = partial_copies(8, 600, 0.6, 1)
    among = torch.arange(9) < 6
    longest = longest_of(uploads)
    plain = divided(uploads, 100.0, longest, among)
    for huge in (torch.zeros(600), uploads[0], torch.full((600,), 3e38), -torch.full((600,), 3e38)):
        uploads[6:] = huge
        out, others = divided(uploads, 100.0, longest, among)
        assert out == plain[0]
        assert torch.equal(others, plain[1])
    assert plain[1][:6].any()
    assert not plain[1][6:].any()


@st.composite
def any_uploads(draw):
    """(n, d) in float64: independent ones, ones with much in common, copies, opposites, of different lengths."""
    n, d, seed = draw(st.integers(1, 25)), draw(st.integers(1, 30)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    uploads = rng.standard_normal((n, d)) + draw(st.floats(0, 3)) * rng.standard_normal(d)
    uploads[rng.random(n) < draw(st.floats(0, 1))] = uploads[0]
    uploads *= 1 - draw(st.floats(0, 1)) * rng.random((n, 1))
    uploads *= np.where(rng.random((n, 1)) < draw(st.floats(0, 0.5)), -1, 1)
    return uploads, rng.random(n) ** draw(st.sampled_from((0, 1, 5)))


@PROPERTY
@given(any_uploads())
def test_what_several_say_together_is_no_longer_than_what_so_many_would_say_alone(case):
    """The theorem of the module: every positive product counts, and |sum w u|^2 <= L^2 sum w."""
    uploads, odds = case
    longest = max(float(np.linalg.norm(row)) for row in uploads)
    weights = []
    for i in range(len(uploads)):
        others = sum(max(0.0, float(uploads[i] @ uploads[j])) for j in range(len(uploads)) if j != i)
        weights.append(odds[i] / (1 + others / longest**2))
    total = sum(weight * row for weight, row in zip(weights, uploads, strict=True))
    assert float(total @ total) <= longest**2 * sum(weights) * (1 + 1e-9)


@PROPERTY
@given(any_uploads(), st.floats(0.0, 0.6))
def test_with_the_weights_of_the_aggregator_only_what_honest_uploads_may_share_adds_to_that(case, share):
    """Products up to the limit are not counted: they add limit (sum w)^2 at most, less what each has with itself."""
    uploads, odds = torch.tensor(case[0]), torch.tensor(case[1])
    longest, n = longest_of(uploads), len(uploads)
    limit = share * longest**2
    copies, others = independence.shared(
        uploads, odds >= 0, torch.tensor(limit), longest, torch.zeros(n), torch.arange(n)
    )
    weights = odds * ~copies / (1 + others)
    total, said = float((weights @ uploads).square().sum()), float(weights.sum())
    assert total <= (longest**2 * said + limit * (said**2 - float(weights.square().sum()))) * (1 + 1e-6)
    assert total <= (longest**2 + (n - 1) * limit) * said * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5])
def test_uploads_that_all_share_as_much_weigh_together_just_what_so_many_independent_ones_do(share):
    many, longest = 20, 3.0
    gram = longest**2 * (share + (1 - share) * torch.eye(many, dtype=torch.float64))
    uploads = torch.linalg.cholesky(gram)
    out, others = divided(uploads, 0.05 * longest**2, longest)
    assert not out
    weights = 1 / (1 + others)
    assert float(weights.sum()) == pytest.approx(many / (1 + (many - 1) * share))
    assert float((weights @ uploads).norm() ** 2) == pytest.approx(longest**2 * float(weights.sum()))


def honest_round(n: int, d: int, s: float, chance: float = 2.5e-4) -> tuple[torch.Tensor, float, float]:
    """(uploads with a signal in common, what two may share, how long one may be)"""
    signal = 0.5 * functional.normalize(normal(d, name="signal"), dim=0)
    _, longest = honest_lengths(d, s, 16, 1.0, chance)
    uploads = signal + s * normal(n, d)
    limit = float(independence.largest_product(s, longest, torch.tensor(0.81), chance, n + 30 - 1))
    return uploads, limit, longest


def test_who_leans_on_honest_uploads_gets_none_of_them_left_out():
    """30 liars, each with a tenth of all 20 honest uploads, for or against, and as long as these."""
    honest, liars, d, share = 20, 30, 25450, 0.1
    uploads, limit, longest = honest_round(honest, d, 0.05)
    length = float(uploads.norm(dim=1).mean())
    for seed in range(3):
        rng = stream(seed, "signs")
        signs = 2.0 * torch.randint(2, (liars, honest), generator=rng) - 1
        fresh = length / d**0.5 * torch.randn(liars, d, generator=rng)
        leaning = (1 - honest * share**2) ** 0.5 * fresh + share * signs @ uploads
        assert float((leaning.norm(dim=1) / length - 1).abs().max()) < 0.05
        every = torch.cat([uploads, leaning])
        assert float((every[:honest] @ every[honest:].T).amax()) > limit, "it is seen that they lean"
        ties = torch.randperm(honest + liars, generator=rng)
        out, others = divided(every, limit, longest, trust=torch.zeros(honest + liars), ties=ties)
        assert not out
        weights = 1 / (1 + others)
        assert float(weights[:honest].min()) > 0.3
        assert float(weights[:honest].sum() / honest) > 0.9 * float(weights[honest:].sum() / liars)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 20), st.floats(0.0, 0.4))
def test_whoever_displaces_an_upload_carries_half_of_it(seed, honest, liars, limit):
    """Liars made of honest uploads in any way, as trusted as they like, and none longer than may be."""
    rng = stream(seed, "displaced")
    uploads = torch.randn(honest, 300, generator=rng)
    mixed = torch.randn(liars, honest, generator=rng) ** 3 @ uploads + 3 * torch.randn(liars, 300, generator=rng)
    uploads = functional.normalize(torch.cat([uploads, mixed]), dim=1).double()
    n, trust = honest + liars, torch.cat([torch.zeros(honest), 7 * torch.rand(liars, generator=rng)])
    out, _ = divided(uploads, limit, 1.0, trust=trust, ties=torch.randperm(n, generator=rng))
    for i in out:
        carried = [float(uploads[i] @ uploads[j]) for j in range(n) if j != i]
        assert max(carried) > 0.5
    kept = [i for i in range(honest) if all(float(uploads[i] @ uploads[j]) <= 0.5 for j in range(n) if j != i)]
    assert not out & set(kept)


def test_opposite_uploads_share_nothing_that_counts():
    row = normal(1, 500)
    out, others = divided(torch.cat([row, -row, -0.9 * row]), 10.0, float(row.norm()))
    assert out == {2}, "of the two that are alike"
    assert not others.any()


def test_more_workers_than_a_group_are_compared_in_groups_and_never_all_at_once():
    n, d = 2 * independence.GROUP + 100, 40
    uploads = normal(n, d)
    uploads[1::2] = uploads[::2]  # pairs of equal ones
    ties = torch.randperm(n, generator=stream(1, "ties"))
    longest = float(uploads.norm(dim=1).min()) * 1.3
    limit, largest = 0.45 * longest**2, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            largest = max(largest, found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

    with Sizes():
        out, others = divided(uploads, limit, longest, ties=ties)
    assert largest <= max(independence.GROUP**2, n * d)
    group = {int(i): at // independence.GROUP for at, i in enumerate(ties)}
    for i in range(0, n, 2):
        if group[i] == group[i + 1]:
            assert len({i, i + 1} & out) >= 1, "equal ones in a group"
    assert out, "some pairs meet"
    assert others.any(), "and some share less"
    for members in ties.split(independence.GROUP):
        alone, common = divided(uploads[members], limit, longest)
        assert {int(i) for i in members} & out == {int(members[i]) for i in alone}
        stay = [i for i in range(len(members)) if i not in alone]
        wanted = others_by_loops(uploads[members], limit, longest, stay)
        assert common.tolist() == pytest.approx(wanted, rel=1e-4)
        scale = (n - 1) / (len(members) - 1)
        assert others[members].tolist() == pytest.approx([scale * each for each in wanted], rel=1e-4)


def test_groups_stand_for_everybody_where_many_share_the_same():
    """Of 600 that share a third each weighs about what it would if all were compared."""
    n, share = independence.GROUP + 200, 0.35
    uploads = share**0.5 * normal(1, 4000) + (1 - share) ** 0.5 * normal(n, 4000, name="apart")
    ties = torch.randperm(n, generator=stream(1, "ties"))
    out, others = divided(uploads, 0.2 * 4000, longest_of(uploads), ties=ties)
    assert not out
    gram = uploads.double() @ uploads.double().T
    wanted = (gram.sum(1) - gram.diagonal()) / longest_of(uploads) ** 2
    assert others.tolist() == pytest.approx(wanted.tolist(), rel=0.05)


def test_honest_uploads_conflict_at_most_at_the_chance():
    """Everybody has the same signal, as long as it can be, which is the worst case."""
    s, d, n, rounds, chance = 0.3, 60, 10, 3000, 0.2
    signal = 0.9 * functional.normalize(normal(d, name="signal"), dim=0)
    uploads = signal + s * normal(rounds, n, d)
    _, high = honest_lengths(d, s, 16, 0.9, 1e-3)
    limit = float(independence.largest_product(s, high, signal.square().sum(), chance, n - 1))
    products = (uploads @ uploads.mT) * (1 - torch.eye(n))
    in_conflict = (products > limit).any(2)
    assert at_most(int(in_conflict.sum()) // 2, rounds * n // 2, chance), "two are in every conflict"
    lower = float(signal.square().sum()) + (limit - float(signal.square().sum())) / 3
    assert int((products > lower).any(2).sum()) > rounds * n * chance, "a third of the width would not do"


def test_the_largest_product_as_a_formula():
    found = independence.largest_product(0.2, 7.0, torch.tensor(0.25), 1e-3, 24)
    width = 0.2 * stats.norm.isf(1e-3 / 96)
    assert float(found) == pytest.approx(0.25 + width * (7.0 + 0.5), rel=1e-6)
    alone = independence.largest_product(0.2, 7.0, torch.tensor(0.25), 1e-3, 0)
    assert float(alone) == pytest.approx(0.25 + 0.2 * stats.norm.isf(1e-3 / 4) * 7.5, rel=1e-6)


# --- probes --------------------------------------------------------------------------------------------------------


def moments(values: list[float]) -> tuple[float, float, float]:
    """(mean, standard deviation with A - 1, mean of squares)"""
    center = sum(values) / len(values)
    spread = math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))
    return center, spread, sum(value**2 for value in values) / len(values)


def test_what_the_servers_examples_show_by_a_loop():
    own, s, batch = normal(20, 3) + 0.5, 0.4, 16
    own[:, 2] = 0.0
    found = Seen.of(own, torch.tensor(s * s), batch)
    assert all(part.shape == (3,) for part in found)
    for j in range(3):
        center, spread, square = moments(own[:, j].tolist())
        assert float(found.mean[j]) == pytest.approx(center, rel=1e-5)
        assert float(found.spread[j]) == pytest.approx(spread, rel=1e-5)
        assert float(found.variance[j]) == pytest.approx(square / batch + s * s, rel=1e-5)
        assert float(found.error(20)[j]) == pytest.approx(3 * spread / math.sqrt(20), rel=1e-5)
    nothing = Seen.of(torch.zeros(20, 3), torch.tensor(0.0), batch)
    assert (nothing.variance > 0).all(), "so that it can be divided by"


def test_what_is_expected_along_the_past_by_a_loop():
    own, leans, s = normal(20, 3) + 0.5, torch.tensor([0.0, 0.2, 1.0]), 0.4
    low, high = along_history(Seen.of(own, torch.tensor(s * s), 16), 20, s, leans)
    assert low.shape == high.shape == (3,)
    for j in range(3):
        center, spread, _ = moments(own[:, j].tolist())
        error = 3 * spread / math.sqrt(20) + 0.1 * s
        assert float(low[j]) == pytest.approx(center - error, rel=1e-5)
        assert float(high[j]) == pytest.approx(center + error + float(leans[j]), rel=1e-5)


def test_what_is_expected_along_the_gradient_by_a_loop():
    """Whose length is the mean of the examples along it."""
    rows, s = normal(20, 8) / 8**0.5 + 0.5, 0.4
    length = float(rows.mean(0).norm())
    own = rows @ functional.normalize(rows.mean(0), dim=0)[:, None]
    low, high = along_gradient(Seen.of(own, torch.tensor(s * s), 16), 20, s)
    _, spread, _ = moments(own[:, 0].tolist())
    error, slack = 3 * spread / math.sqrt(20), 0.1 * s + 0.15 * spread
    assert float(low) == pytest.approx(-(error**2) / 4 / length - slack, rel=1e-5)
    assert float(high) == pytest.approx(length + error + slack, rel=1e-5)
    nothing = along_gradient(Seen.of(torch.zeros(20, 1), torch.tensor(0.0), 16), 20, 0.0)
    assert all(part.isfinite().all() for part in nothing)


def test_outside_counts_deviations_beyond_either_end():
    expected = Expected(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 4.0]]))
    found = expected.outside(torch.tensor([[2.0, 4.0], [-2.0, 0.0]]), torch.tensor([[0.25, 4.0]]))
    assert found.tolist() == [[2.0, 0.0, -6.0, -2.0], [-6.0, -2.0, 2.0, 0.0]]


@pytest.mark.parametrize("count", [20, 100])
def test_the_workers_mean_lies_outside_what_their_like_tell_as_rarely_as_stated(count):
    """Without noise, so that no room is left for it. The spread is estimated too: Student's distribution, two-sided."""
    directions = 20_000
    seen = Seen.of(0.3 + normal(count, directions), torch.tensor(0.0), 16)
    low, high = along_history(seen, count, 0.0, torch.zeros(directions))
    outside = int(((low > 0.3) | (high < 0.3)).sum())
    stated = 2 * stats.t.sf(CERTAINTY, count - 1)
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
        low, high = along_gradient(Seen.of(own @ unit[:, None], torch.tensor(0.0), 16), count, 0.0)
        outside += not float(low) <= signal * float(unit[0]) <= float(high)
    assert at_most(outside, trials, 2 * stats.t.sf(CERTAINTY, count - 1))


def test_the_deviation_is_that_of_poisson_batches_and_noise():
    batch, s, draws = 4, 0.2, 40_000
    examples = np.random.default_rng(1).normal(0.4, 0.7, 50)
    rng = np.random.default_rng(2)
    drawn = rng.random((draws, 50)) < batch / 50
    poisson = rng.poisson(batch / 50, (draws, 50))
    deviation = Seen.of(torch.tensor(examples)[:, None], torch.tensor(s * s), batch).variance.sqrt()
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


def hoped(own: torch.Tensor, strata: int) -> float:
    """With the length of the mean and the spread along it by a loop."""
    rows = own.double()
    length = float(rows.mean(0).norm())
    spread = moments([float(row @ rows.mean(0)) / max(length, 1e-30) for row in rows])[1]
    return float(hoped_agreement(own, torch.tensor(length), torch.tensor(spread), strata))


@pytest.mark.parametrize("strata", [1, 2, 4])
def test_hoped_agreement_by_loops_over_pairs(strata):
    """What is not above its standard error is 0: of the weaker and weaker signals here, some are."""
    classes = torch.arange(12) // (12 // strata)
    above = []
    noise = 0.5 * normal(12, 40) / 40**0.5
    for signal in (0.2, 0.1, 0.05, 0.02, 0.01, 0.003):
        own = noise - noise.mean(0) + signal * (1 + normal(4, 40, name="classes")[classes] / 3)
        fresh, error = agreement_by_loops(own, None if strata == 1 else classes.tolist())
        above.append(fresh > error)
        assert hoped(own, strata) == pytest.approx(fresh if above[-1] else 0.0, rel=1e-4)
    assert above[0]
    assert not above[-1]


def test_nothing_is_hoped_for_where_examples_do_not_agree():
    signs = torch.ones(20, 1)
    signs[::2] = -1
    assert hoped(signs * normal(1, 50), 1) == 0.0
    assert hoped(torch.zeros(20, 50), 10) == 0.0


def test_one_example_of_each_class_says_nothing_of_what_a_class_shares():
    """It counts as nothing, which is on the safe side: fresh examples of a class agree with it more than others do."""
    own = 0.5 * normal(12, 40) / 40**0.5 + 0.05
    fresh, error = agreement_by_loops(own, None)
    assert fresh * 11 / 12 > error
    assert hoped(own, 12) == pytest.approx(fresh * 11 / 12, rel=1e-4)


def test_agreement_hoped_for_is_what_fresh_examples_have():
    """Classes with means of their own, two server examples of each: taken for mixed ones, too little."""
    classes, each, d, trials = 10, 2, 60, 400
    centers = 0.1 + 0.5 * normal(classes, d, name="centers") / d**0.5
    labels = torch.arange(classes).repeat_interleave(each)
    told, untold, had = [], [], []
    for seed in range(trials):
        own = centers[labels] + 0.5 * normal(len(labels), d, seed=seed) / d**0.5
        unit = functional.normalize(own.mean(0), dim=0)
        told.append(hoped(own, classes))
        untold.append(hoped(own, 1))
        had.append(float(centers.mean(0) @ unit))  # of any fresh example, in the mean
    off = [one - other for one, other in zip(told, had, strict=True)]
    margin = SURE * np.std(off) / math.sqrt(trials)
    assert min(told) > 0
    assert abs(mean(off)) <= margin
    assert mean(untold) < mean(had) - margin


# --- the aggregator -------------------------------------------------------------------------------------------------

N, D, S, BATCH, AUXILIARY = 10, 700, 0.15, 16, 20


@dataclass
class World:
    """Workers whose examples all come from one distribution, in its own gradient's units; no momentum."""

    seed: int = 1
    signal: float = 0.4

    def __post_init__(self):
        self.rng = stream(self.seed, "world")
        self.direction = functional.normalize(torch.randn(D, generator=self.rng), dim=0)
        self.last = torch.zeros(N, D)

    def examples(self, count: int) -> torch.Tensor:
        """(count, D) of length 0.9, with this much of the signal in them."""
        across = functional.normalize(torch.randn(count, D, generator=self.rng), dim=1)
        return 0.9 * (self.signal * self.direction + (1 - self.signal**2) ** 0.5 * across)

    def uploads(self) -> torch.Tensor:
        sizes = torch.poisson(torch.full((N,), float(BATCH)), generator=self.rng).int().tolist()
        sums = torch.stack([self.examples(size).sum(0) / BATCH for size in sizes])
        return sums + S * torch.randn(N, D, generator=self.rng)

    def view(self, uploads=None, believed: int = 5) -> ServerView:
        """A round; what was sent in it is `last` in the next."""
        rows, norms, present = receive(self.uploads() if uploads is None else uploads, N, D, torch.zeros(D))
        own, last, self.last = self.examples(AUXILIARY), self.last, rows
        ties = torch.randperm(N, generator=self.rng)
        known = {"batch": BATCH, "largest": 1.0, "contributions": lambda: own, "last": last}
        return ServerView(rows, norms, present, S, believed, lambda normalized: own.mean(0), ties, **known)


def played(world: World, rounds: int, aggregator: Fortified | None = None) -> tuple[list[ServerView], list[Verdict]]:
    aggregator, state, views, verdicts = aggregator or Fortified(), {}, [], []
    for _ in range(rounds):
        views.append(world.view())
        verdicts.append(aggregator(views[-1], state))
        state = verdicts[-1].state
    return views, verdicts


def test_what_it_remembers_of_updates_and_uploads_by_loops():
    rounds = 60
    views, verdicts = played(World(), rounds)
    ways = np.zeros((3, D))
    past = np.zeros((N, D))
    limit = math.log(2 * PROBES * len(evidence.SIZES) / 2.5e-4)
    for t in range(rounds):
        state = verdicts[t].state
        if t >= 1:  # the update before this one, and what was sent with it if it passed the first tests
            for i, speed in enumerate((0.3, 0.05, 0.01)):
                ways[i] += speed * (verdicts[t - 1].update.double().numpy() - ways[i])
            counted = verdicts[t - 1].state["counted"]
            for i in range(N):
                if counted[i]:
                    past[i] += 0.02 * (views[t - 1].uploads[i].double().numpy() / UNIT - past[i])
        np.testing.assert_allclose(state["ways"].numpy(), ways, atol=1e-6)
        # Half precision rounds by 2^-12 of a value at most, and of each rounding 0.98 is left a round later.
        assert np.abs(state["past"].double().numpy() - past).max() <= 2**-12 * max(1e-3, np.abs(past).max()) / 0.02
        assert torch.equal(state["step"], verdicts[t].update)
        passed = ~torch.isin(verdicts[t].reason, torch.tensor([Reason.NORM, Reason.DISTRIBUTION, Reason.MALFORMED]))
        assert torch.equal(state["counted"], passed)
        assert state["clear"].tolist() == [each <= limit for each in state["evidence"].flatten(1).amax(1).tolist()]
        weights = [float(verdict.state["heaviest"][0]) for verdict in verdicts[max(0, t - 1) : t + 1]]
        assert state["heaviest"].tolist() == ([weights[0], 0.0] if t == 0 else weights[::-1])
    assert state["past"].dtype == torch.float16
    assert np.abs(past).max() > 0.3, "uploads add up to something"


UNIT = honest_lengths(D, S, BATCH, 1.0, 2.5e-4)[1] / math.sqrt(D)
"""What pasts are measured in: about the noise."""


def lean_by_loops(own: np.ndarray, s: float, largest: float = 1.0) -> tuple[float, float]:
    """(how far the upload of two rounds ago may echo in one, times its length; the variance across), as series.

    The lean is what lacks to the largest in the mean square. What it repeats of the one before is at most the largest.
    """
    lean = max(0.0, largest**2 - mean(float(row @ row) for row in own))
    d = own.shape[1]
    again = min(largest / (s * math.sqrt(d) + 1e-30), 0.95)
    echo = sum(lean * again**i for i in range(2000))  # on the last but one, the one before that, and so on
    return 1.5 * echo, s * s + sum(lean / d * again ** (2 * i) for i in range(2000))


@pytest.mark.parametrize("largest", [1.0, 3.0])
@pytest.mark.parametrize(("length", "s"), [(0.9, S), (0.0, S), (1.0, S), (0.6, 0.01), (0.6, 0.0)])
def test_what_momentum_does_by_loops(length, s, largest):
    own = largest * length * functional.normalize(normal(AUXILIARY, D), dim=1)
    own[: AUXILIARY // 2] *= 0.5
    view = replace(World().view(), noise_std=s, largest=largest)
    found = probed.Lean.of(view, own)
    echo, noise = lean_by_loops(own.double().numpy(), s, largest)
    assert float(found.echo) == pytest.approx(echo, rel=1e-3, abs=1e-5)
    assert float(found.noise) == pytest.approx(noise, rel=1e-3, abs=1e-7)
    assert float(found.signals) == pytest.approx(mean(float(row @ row) for row in own), rel=1e-4)


def outside_by_loops(view: ServerView, state: dict) -> np.ndarray:
    """(n, 12) in float64: above and below what is expected along each of the six directions, as the docstrings say."""
    own = view.contributions().double().numpy()
    uploads = view.uploads.double().numpy()
    old = {key: value.double().numpy() for key, value in state.items()}

    def bounds(direction: np.ndarray, lean: float) -> tuple[float, float, float]:
        center, spread, square = moments([float(row @ direction) for row in own])
        error = 3 * spread / math.sqrt(len(own)) + 0.1 * S
        return center - error, center + error + lean, math.sqrt(square / BATCH + noise)

    echo, noise = lean_by_loops(own, S)
    gradient = own.mean(0)
    length = float(np.linalg.norm(gradient))
    _, spread, square = moments([float(row @ gradient) / length for row in own])
    error, slack = 3 * spread / math.sqrt(len(own)), 0.1 * S + 0.15 * spread
    across = math.sqrt(square / BATCH + noise)
    found = []
    for i, upload in enumerate(uploads):
        above, below = [], []

        def look(direction, low, high, deviation, upload=upload, above=above, below=below):
            at = float(upload @ direction)
            above.append((at - high) / deviation)
            below.append((low - at) / deviation)

        look(gradient / length, -(error**2) / 4 / length - slack, length + error + slack, across)
        for speed, way in zip((0.3, 0.05, 0.01), old["ways"], strict=True):
            size = float(np.linalg.norm(way))
            unit = way / max(size, 1e-30)
            look(unit, *bounds(unit, min(1.0, speed * old["heaviest"].max() * echo / max(size, 1e-30))))
        look(old["rift"][0], *bounds(old["rift"][0], 0.0))
        size = float(np.linalg.norm(old["past"][i]))
        unit = old["past"][i] / max(size, 1e-30)
        look(unit, *bounds(unit, min(1.0, 0.02 * echo / (UNIT * max(size, 1e-30)))))
        found.append([*above, *below])
    return np.array(found)


def test_evidence_along_all_directions_by_loops():
    world, state, sizes = World(), {}, np.array(evidence.SIZES)
    for t in range(8):
        view = world.view()
        verdict = Fortified()(view, state)
        if t >= 3:  # by then every direction is something
            assert all(state[key].any() for key in ("ways", "rift", "past"))
            steps = outside_by_loops(view, state)[:, :, None] * sizes - sizes**2 / 2
            wanted = np.maximum(0.0, state["evidence"].double().numpy() + steps)
            wanted = np.where(verdict.state["counted"].numpy()[:, None, None], wanted, state["evidence"].numpy())
            np.testing.assert_allclose(verdict.state["evidence"].numpy(), wanted, atol=2e-3)
        state = verdict.state
    assert wanted.max() > 0.1


def test_the_rift_by_a_loop():
    """The covariance of the pasts, of those who are not suspected, times the direction before."""
    world = World()
    state = dict(played(world, 6)[1][-1].state)
    state["clear"] = state["clear"].clone()
    state["clear"][2] = False
    state["counted"] = state["counted"].clone()
    state["counted"][7] = False
    found = Fortified()(world.view(), state).state["rift"].double().numpy()[0]
    clear = [i for i in range(N) if i not in (2, 7)]
    past = state["past"].double().numpy()[clear]
    apart = past - past.mean(0)
    wanted = sum(float(row @ state["rift"].double().numpy()[0]) * row for row in apart)
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-4)


def test_the_rift_is_soon_where_liars_and_honest_workers_differ():
    """Half push along a direction of their own, and the others back: the mean shows neither.

    Measured over seeds 1 to 3 in round 28: cosines of 0.74 to 0.76 with that direction; by chance it would be 0.04.
    """
    world = World()
    apart = functional.normalize(normal(D, name="apart"), dim=0)
    sides = torch.where(torch.arange(N) < N // 2, 1.0, -1.0)[:, None]
    state, found = {}, []
    for _ in range(29):
        view = world.view(world.uploads() + 0.3 * sides * apart)
        state = Fortified(refused=0.001)(view, state).state
        found.append(abs(float(state["rift"][0] @ apart)))
    assert found[2] < 0.3
    assert found[-1] > 0.6
    assert float(state["rift"].norm()) == pytest.approx(1.0, abs=1e-5)
    together = functional.normalize(state["past"].float().mean(0), dim=0)
    assert abs(float(together @ apart)) < 0.3


def common_by_loops(view: ServerView, state: dict) -> list[np.ndarray]:
    """The averages of past updates and the rift, as unit vectors: directions that are the same for all."""
    rows = [*state["ways"].double().numpy(), state["rift"].double().numpy()[0]]
    return [row / max(float(np.linalg.norm(row)), 1e-30) for row in rows]


def off_by_loops(view: ServerView, state: dict, counted: list[bool]) -> torch.Tensor:
    """(N, 4) how far everyone lies off the server's examples, on average over the rounds so far."""
    own, off = view.contributions().double().numpy(), state["off"].double().clone()
    for k, way in enumerate(common_by_loops(view, state)):
        center = mean(float(row @ way) for row in own)
        for i in range(N):
            if counted[i]:
                off[i, k] += 0.02 * (float(view.uploads[i].double().numpy() @ way) - center - off[i, k])
    return off


def doubt_in_round(view: ServerView, state: dict, off: torch.Tensor, passed: list[bool]) -> list[float]:
    """Of everyone, from the position that it has now."""
    own = view.contributions().double().numpy()
    along = [[float(row @ way) for row in own] for way in common_by_loops(view, state)]
    error = error_by_loops(torch.tensor(along).T, view.strata)
    spread = [moments(values)[1] for values in along]
    noise = [(moments(values)[2] / BATCH + lean_by_loops(own, S)[1]) * 0.02 / 1.98 for values in along]
    return doubts_by_loops(off, error, spread, noise, passed, view.ties)


@pytest.mark.parametrize("believed", [2, 9])
@pytest.mark.parametrize("strata", [1, 5])
def test_the_update_is_the_mean_by_the_odds(believed, strata):
    """Over the doubt that is left, and what several say counted once: one leans on another."""
    world = World()
    state = {**played(world, 4)[1][-1].state}
    state["trust"] = torch.linspace(-7.0, 5.0, N)  # some too little to be used
    state["off"] = torch.linspace(0.0, 0.25, N).roll(3)[:, None] * torch.tensor([1.0, 0.2, 0.0, -0.5])
    _, high = honest_lengths(D, S, BATCH, 1.0, 2.5e-4)
    left, doubted, leaned = 0, 0.0, 0.0
    for _ in range(3):
        uploads = world.uploads()
        uploads[6] = 0.42 * uploads[8] + (1 - 0.42**2) ** 0.5 * uploads[6]
        before, view = state, replace(world.view(uploads, believed), strata=strata)
        verdict = Fortified()(view, state)
        state, left = verdict.state, left + int((verdict.reason == Reason.SCORE).sum())
        signals = torch.tensor(mean(float(row @ row) for row in view.contributions().double()))
        limit = float(independence.largest_product(S, high, signals, 2.5e-4, N - 1))
        passed = [reason not in TESTS for reason in verdict.reason.tolist()]
        others = others_by_loops(view.uploads, limit, high, [i for i in range(N) if passed[i]])
        off = off_by_loops(view, before, state["counted"].tolist())
        torch.testing.assert_close(state["off"].double(), off, atol=1e-5, rtol=1e-4)
        doubt = doubt_in_round(view, before, off, passed)
        odds = []
        for i in range(N):
            ratios = [math.exp(each) for each in state["evidence"][i].flatten().tolist()]
            score = float(before["trust"][i]) - math.log(sum(ratios) / len(ratios))  # as it was before the round
            assert float(verdict.score[i]) == pytest.approx(score - doubt[i], abs=2e-3)
            ratio = math.exp(score) * (believed / (N + 1)) / (1 - believed / (N + 1))
            odds.append(passed[i] * ratio / (1 + ratio) * math.exp(-doubt[i]) / (1 + others[i]))
        kept = [each >= 0.02 * max(odds) and each > 0 for each in odds]
        assert verdict.kept.tolist() == kept
        total = sum(each for each, used in zip(odds, kept, strict=True) if used)
        wanted = sum(odds[i] / total * view.uploads[i].double() for i in range(N) if kept[i])
        torch.testing.assert_close(verdict.update.double(), wanted, atol=1e-4, rtol=1e-3)
        heaviest = max(odds[i] / total for i in range(N) if kept[i])
        assert float(state["heaviest"][0]) == pytest.approx(heaviest, rel=1e-3)
        doubted, leaned = max(doubted, *doubt), max(leaned, *others)
    assert left > 0
    assert doubted > 1
    assert leaned > 0.3


@pytest.mark.parametrize("refused", [1.0, 100.0])
def test_a_worker_is_refused_just_where_the_evidence_of_all_bounds_and_sizes_has_its_share_of_the_chance(refused):
    """A fourth of it, over 6 directions, either side of each, and 5 sizes."""
    world, limit = World(), math.log(6 * 2 * 5 / (refused / 1000 / 4))
    state = dict(played(world, 5)[1][-1].state)
    view, state["evidence"] = world.view(), torch.zeros_like(state["evidence"])
    state["evidence"][3, 2, 0] = 5.0
    first = Fortified(refused)(view, state).state["evidence"][3, 2, 0]
    for beyond in (-0.01, 0.01):
        state["evidence"][3, 2, 0] = 5.0 + limit + beyond - first
        verdict = Fortified(refused)(view, state)
        assert float(verdict.state["evidence"][3, 2, 0]) == pytest.approx(limit + beyond, abs=1e-3)
        assert (verdict.reason[3] == Reason.EVIDENCE) == (beyond > 0)
        assert bool(verdict.state["clear"][3]) == (beyond < 0)


def test_what_two_honest_uploads_may_share_is_told_by_the_servers_examples(monkeypatch):
    asked = []

    def spy(uploads, among, limit, longest, trust, ties):
        asked.append((float(limit), longest))
        return independence.shared(uploads, among, limit, longest, trust, ties)

    monkeypatch.setattr(fortified, "shared", spy)
    view = World().view()
    own = view.contributions().double() * torch.linspace(0.5, 1.0, AUXILIARY)[:, None]
    Fortified()(replace(view, contributions=lambda: own.float()), {})
    signals = mean(float(row @ row) for row in own)
    _, high = honest_lengths(D, S, BATCH, 1.0, 2.5e-4)
    width = S * stats.norm.isf(2.5e-4 / (4 * (N - 1))) * (high + math.sqrt(signals))
    assert asked == [(pytest.approx(signals + width, rel=1e-5), high)]


def test_the_reason_is_the_first_test_that_an_upload_did_not_pass():
    stages = [Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION, Reason.EVIDENCE, Reason.DEPENDENT, Reason.SCORE]
    passed = torch.rand(6, 500, generator=stream(1, "stages")) < 0.8
    found = fortified._first_failed(list(passed))
    for i in range(500):
        failed = [stage for stage, ok in zip(stages, passed[:, i].tolist(), strict=True) if not ok]
        assert int(found[i]) == (failed[0] if failed else Reason.KEPT)
    assert len(set(found.tolist())) == 7


def test_whoever_is_doubted_most_among_equals_is_left_out_but_not_accused():
    """A factor of 55 is just beyond what is too little to be used."""
    world = World()
    state = dict(played(world, 5)[1][-1].state)
    state["trust"], state["evidence"] = torch.zeros(N), torch.zeros_like(state["evidence"])
    state["off"] = torch.zeros_like(state["off"])
    state["off"][3] = 5.0
    verdict = Fortified()(world.view(), state)
    assert verdict.reason[3] == Reason.SCORE
    assert int(verdict.kept.sum()) == N - 1


def first_rounds(d: int, s: float, signal: float, seed: int, rounds: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """(rounds, n) the reasons and the evidence, of honest workers only; the server's examples stay the same."""
    n, rng = 20, stream(seed, "first rounds")
    direction = functional.normalize(torch.randn(d, generator=rng), dim=0)

    def examples(count: int) -> torch.Tensor:
        across = functional.normalize(torch.randn(count, d, generator=rng), dim=1)
        return 0.9 * (signal * direction + (1 - signal**2) ** 0.5 * across)

    own, state, last, reasons, against = examples(AUXILIARY), {}, torch.zeros(n, d), [], []
    for _ in range(rounds):
        sizes = torch.poisson(torch.full((n,), float(BATCH)), generator=rng).int().tolist()
        sums = torch.stack([examples(size).sum(0) / BATCH for size in sizes])
        sent = receive(sums + s * torch.randn(n, d, generator=rng), n, d, torch.zeros(d))
        known = {"batch": BATCH, "largest": 1.0, "contributions": lambda: own, "last": last}
        view = ServerView(*sent, s, 10, lambda normalized: own.mean(0), torch.arange(n), **known)
        verdict = Fortified()(view, state)
        state, last = verdict.state, sent[0]
        reasons.append(verdict.reason)
        against.append(evidence.largest(state["evidence"]))
    return torch.stack(reasons), torch.stack(against)


@pytest.mark.parametrize(("d", "s", "signal"), [(2410, 0.03, 0.0), (2410, 0.05, 0.1), (700, 0.15, 0.4)])
def test_the_first_rounds_are_no_evidence_against_honest_workers(d, s, signal):
    """Also with little noise, where the server's own examples agree with their mean far better than fresh ones do.

    Evidence beyond h has a chance of exp(-h) along each bound and for each size; for h = 7 that is 1 in 18 at most.
    """
    for seed in range(3):
        reasons, against = first_rounds(d, s, signal, seed)
        assert not (reasons == Reason.EVIDENCE).any()
        assert float((against > 7.0).float().mean()) < 2 * PROBES * len(evidence.SIZES) * math.exp(-7.0)


def test_trust_by_a_loop():
    rng = stream(1, "trust")
    trust = torch.linspace(-7, 7, 15)
    agreement = 3 * torch.randn(15, generator=rng)
    for hoped, deviation in ((0.3, 0.2), (0.0, 0.2), (1.0, 0.1)):
        found = judged._trusted(trust, agreement, torch.tensor(hoped), torch.tensor(deviation**2))
        for i in range(15):
            seen = min(float(agreement[i]), hoped + 2 * deviation)
            honest = stats.norm.logpdf(seen, hoped / 2, deviation)
            gained = honest - stats.norm.logpdf(seen, 0.0, deviation)
            assert float(found[i]) == pytest.approx(min(7.0, max(-7.0, float(trust[i]) + gained)), abs=1e-4)
    assert torch.equal(judged._trusted(trust, agreement, torch.tensor(0.0), torch.tensor(0.04)), trust)


def test_trust_is_earned_slowly_and_only_to_a_limit():
    """A hundred times as far along the server's gradient as an honest worker, it earns no more than a lucky one."""
    hoped, deviation = torch.tensor(0.3), torch.tensor(0.2)
    at_best = judged._trusted(torch.zeros(1), hoped + 2 * deviation, hoped, deviation.square())
    absurd = judged._trusted(torch.zeros(1), torch.tensor([30.0]), hoped, deviation.square())
    assert torch.equal(absurd, at_best)
    assert float(at_best) < judged.MOST_TRUST / 2
    _, verdicts = played(World(signal=0.9), 30)
    trust = torch.stack([verdict.state["trust"] for verdict in verdicts])
    assert float(trust.max()) == judged.MOST_TRUST
    assert (trust[-1] == judged.MOST_TRUST).all()


@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 50, 200])
@pytest.mark.parametrize("believed", [1, 3, 25, 200])
def test_what_the_best_tenth_agrees_is_found_by_sorting(n, believed):
    agreed = normal(n, seed=n)
    clear, counted = (torch.rand(n, generator=stream(n, name)) < 0.8 for name in ("clear", "counted"))
    known = SimpleNamespace(agreed=agreed, clear=clear, counted=counted)
    place = max(1, min(believed, -(-n // 10)))
    those = [float(agreed[i]) if clear[i] and counted[i] else 0.0 for i in range(n)]
    assert float(judged._best(known, believed)) == sorted(those, reverse=True)[place - 1]


class Promising(World):
    """The server's examples agree with one another, and with no worker's."""

    def view(self, uploads=None, believed: int = 10) -> ServerView:
        view = super().view(uploads, believed)
        rng = stream(self.seed, "promise")
        way = functional.normalize(torch.randn(D, generator=rng), dim=0)
        own = 0.9 * functional.normalize(way + 2 * functional.normalize(normal(AUXILIARY, D, seed=3), dim=1), dim=1)
        return replace(view, contributions=lambda: own)


@pytest.mark.parametrize("promising", [False, True])
def test_no_more_agreement_is_looked_for_than_the_best_workers_showed(promising, monkeypatch):
    asked, usual = [], judged._trusted

    def spy(trust, agreement, hoped, variance):
        asked.append((agreement, float(hoped)))
        return usual(trust, agreement, hoped, variance)

    monkeypatch.setattr(judged, "_trusted", spy)
    views, verdicts = played(Promising(signal=0.0) if promising else World(signal=0.9), 80)
    agreed, below, heard = torch.zeros(N).double(), 0, torch.zeros(N, dtype=torch.bool)
    for t, (view, verdict, (agreement, looked_for)) in enumerate(zip(views, verdicts, asked, strict=True)):
        own = view.contributions()
        best = float(torch.where(heard, agreed, 0.0).max())  # of 10 workers the best tenth is one
        shown = max(0.0, best / (1 - 0.99**t)) if t else 0.0
        assert looked_for == pytest.approx(min(hoped(own, 1), shown), abs=1e-5)
        below += shown < hoped(own, 1)
        along = view.uploads.double() @ functional.normalize(own.mean(0), dim=0).double()
        torch.testing.assert_close(agreement.double(), along, atol=1e-5, rtol=1e-4)
        agreed = torch.where(verdict.state["counted"], agreed + 0.01 * (along - agreed), agreed)
        heard = verdict.state["counted"] & verdict.state["clear"]
        torch.testing.assert_close(verdict.state["agreed"].double(), agreed, atol=1e-5, rtol=1e-4)
        assert float(verdict.state["aged"]) == pytest.approx(1 - 0.99 ** (t + 1), rel=1e-4)
    assert below > 60 if promising else below < 20


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_examples_that_promise_too_much_leave_honest_workers_their_weight(seed, monkeypatch):
    heaviest = {}
    for bounded in (True, False):
        if not bounded:  # as it would be if the server's examples were believed
            monkeypatch.setattr(judged, "_best", lambda known, believed: torch.tensor(torch.inf))
        world = Promising(seed=seed, signal=0.0)
        heaviest[bounded] = max(float(verdict.state["heaviest"][0]) for verdict in played(world, 250)[1][100:])
    assert heaviest[True] < 0.25
    assert heaviest[False] > 0.5


class Boasting(Promising):
    """One worker goes far along the server's gradient, for some rounds or all; then it sends nothing that counts."""

    until: int = 1000
    rounds: int = 0

    def view(self, uploads=None, believed: int = 10) -> ServerView:
        uploads, ahead = self.uploads(), functional.normalize(super().view().contributions().mean(0), dim=0)
        uploads[3] = uploads[3] + ahead if self.rounds < self.until else torch.nan
        self.rounds += 1
        return super().view(uploads, believed)


@pytest.mark.parametrize("until", [40, 1000])
def test_who_is_refused_does_not_say_how_far_honest_workers_agree(until):
    world = Boasting(seed=1, signal=0.0)
    world.until = until
    _, verdicts = played(world, 250)
    assert sum(not bool(verdict.kept[3]) for verdict in verdicts) > 240
    assert max(float(verdict.state["heaviest"][0]) for verdict in verdicts[100:]) < 0.35


def test_a_state_of_another_version_is_refused():
    state = dict(played(World(), 2)[1][-1].state)
    del state["agreed"]
    with pytest.raises(StoreError, match="another version"):
        Fortified()(World().view(), state)


@pytest.mark.parametrize("kind", ["evidence", "length", "distribution", "copy"])
def test_trust_never_outweighs_a_test(kind):
    world = World()
    state = dict(played(world, 5)[1][-1].state)
    state["trust"] = torch.full((N,), judged.MOST_TRUST)
    uploads = world.uploads()
    if kind == "evidence":
        state["evidence"] = state["evidence"].clone()
        state["evidence"][3, 0, 0] = 40.0
    elif kind == "length":
        uploads[3] *= 1.4
    elif kind == "distribution":
        uploads[3] = uploads[3].norm() / D**0.5 * uploads[3].sign()
    else:
        uploads[3] = uploads[4]
    verdict = Fortified()(world.view(uploads), state)
    wanted = {
        "evidence": Reason.EVIDENCE,
        "length": Reason.NORM,
        "distribution": Reason.DISTRIBUTION,
        "copy": Reason.DEPENDENT,
    }[kind]
    refused = [3, 4] if kind == "copy" else [3]
    assert wanted in verdict.reason[refused].tolist()
    assert int((verdict.reason == Reason.KEPT).sum()) == N - 1


def poisoned(state: dict, world_seed: int, rows: dict[int, torch.Tensor]) -> tuple[Verdict, Verdict]:
    """This round and an honest one after it, from the same past, if some send these."""
    world = World(world_seed)
    uploads = world.uploads()
    for i, row in rows.items():
        uploads[i] = row
    first = Fortified()(world.view(uploads), state)
    return first, Fortified()(world.view(), first.state)


POISON = {
    "1e30": torch.full((D,), 1e30),
    "-1e30": torch.full((D,), -1e30),
    "nan": torch.full((D,), math.nan),
    "one nan": torch.cat([torch.full((1,), math.nan), S * normal(D - 1, name="poison")]),
    "inf": torch.full((D,), math.inf),
    "1e18": 1e18 * normal(D, name="poison"),
    "long": 3 * S * normal(D, name="poison"),
    "signs": S * normal(D, name="poison").sign(),
}


@pytest.mark.parametrize("name", POISON)
def test_nothing_of_a_refused_upload_is_in_the_update_or_remembered(name):
    state = played(World(), 5)[1][-1].state
    zeros, poison = (poisoned(state, 2, {1: row, 7: row}) for row in (torch.zeros(D), POISON[name]))
    others = torch.ones(N, dtype=torch.bool)
    others[[1, 7]] = False
    for plain, bad in zip(zeros, poison, strict=True):
        assert bad.update.isfinite().all()
        assert torch.equal(bad.update, plain.update)
        assert torch.equal(bad.reason[others], plain.reason[others])
        assert set(bad.state) == set(Known._fields)
        for key in bad.state:
            assert torch.equal(bad.state[key], plain.state[key]), key
    assert not poison[0].kept[[1, 7]].any()
    for key in ("evidence", "trust", "off"):
        assert torch.equal(poison[0].state[key][[1, 7]], state[key][[1, 7]]), "it says nothing, for or against"


def test_what_a_worker_under_suspicion_sends_does_not_matter():
    state = dict(played(World(), 5)[1][-1].state)
    state["evidence"] = state["evidence"].clone()
    state["evidence"][4] = 1000.0
    one, other = (poisoned(state, 2, {4: S * normal(D, seed=seed, name="suspect")})[0] for seed in (1, 2))
    assert one.reason[4] == other.reason[4] == Reason.EVIDENCE
    assert torch.equal(one.update, other.update)
    assert torch.equal(one.state["ways"], other.state["ways"])


def test_it_answers_with_tensors_of_its_own():
    world, state = World(), {}
    for _ in range(3):
        view = world.view()
        handed = [*state.values(), view.uploads, view.norms, view.present, view.ties, view.last, view.contributions()]
        before = [tensor.clone() for tensor in handed]
        verdict = Fortified()(view, state)
        state = dict(verdict.state)
        assert all(torch.equal(*pair) for pair in zip(handed, before, strict=True))
        places = {tensor.untyped_storage().data_ptr() for tensor in handed}
        answered = [*state.values(), verdict.update, verdict.kept, verdict.reason, verdict.score]
        assert not places & {tensor.untyped_storage().data_ptr() for tensor in answered}


def test_state_saved_and_loaded_gives_the_same_bytes():
    world = World()
    state = played(world, 4)[1][-1].state
    assert {value.dtype for value in state.values()} == {torch.float32, torch.float16, torch.bool}
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    loaded, view = torch.load(file, weights_only=True), world.view()
    one, other = Fortified()(view, state), Fortified()(view, loaded)
    assert torch.equal(one.update, other.update)
    assert all(torch.equal(one.state[key], other.state[key]) for key in one.state)


def test_without_noise_and_without_a_last_round_it_still_answers():
    world = World()
    for view in (replace(world.view(), noise_std=0.0), replace(world.view(), last=None)):
        verdict = Fortified()(view, {})
        assert verdict.update.isfinite().all()
        assert verdict.score.isfinite().all()
    examples = world.examples(N)
    rows, norms, present = receive(examples, N, D, torch.zeros(D))
    quiet = replace(view, uploads=rows, norms=norms, present=present, noise_std=0.0)
    assert Fortified()(quiet, {}).update.isfinite().all()


def test_own_examples_without_a_finite_gradient_say_nothing():
    view = World().view()
    own = view.contributions().clone()
    own[3] = 0.0
    odd = own.clone()
    odd[3] = math.nan
    one, other = (Fortified()(replace(view, contributions=lambda rows=rows: rows), {}) for rows in (own, odd))
    assert torch.equal(one.update, other.update)


@pytest.mark.parametrize("refused", [0.0, -1.0, 501.0, math.nan, math.inf])
def test_nonsense_is_refused(refused):
    with pytest.raises(SpecError, match="refused"):
        Fortified(refused=refused)


def test_a_server_without_examples_of_its_own_is_told():
    with pytest.raises(SpecError, match=r"fortified.*contributions"):
        Fortified()(replace(World().view(), contributions=None), {})


def test_one_example_is_too_few():
    view = World().view()
    with pytest.raises(SpecError, match="two examples"):
        Fortified()(replace(view, contributions=lambda: view.contributions()[:1]), {})


@pytest.mark.parametrize("wrapper", ["bucketing", "nnm"])
def test_what_mixes_uploads_cannot_stand_before_it(wrapper, quick):
    with pytest.raises(SpecError, match="follows each worker") as refusal:
        run(quick(aggregator={"name": wrapper, "aggregator": "fortified"}))
    assert "\n" not in str(refusal.value)


def test_uploads_that_are_no_noise_are_refused(quick):
    with pytest.raises(SpecError, match="sends no Gaussian noise"):
        run(quick(aggregator="fortified", worker="sign-gaussian"))
    with pytest.raises(SpecError, match="not fresh in every round"):
        run(quick(aggregator="fortified", worker="clipped-momentum"))


# --- what a round tells it -----------------------------------------------------------------------------------------


def test_a_round_tells_what_everyone_sent_last_and_what_the_servers_examples_would_add(quick):
    seen = []

    def spy(view: ServerView, state) -> Verdict:
        kept = {name: getattr(view, name).clone() for name in ("uploads", "last")}
        seen.append(replace(view, contributions=view.contributions().clone, **kept))
        return Fortified()(view, state)

    setup = prepare(quick(attack="nan", auxiliary=3), CPU)
    federation = replace(setup.federation, aggregator=spy)
    state = first_state(federation)
    for t in range(3):
        wanted = contributions_of(
            federation.sums, state.params, federation.aux_x, federation.aux_y, federation.worker, federation.noise_std
        )
        state, _ = play(federation, state, t)
        assert torch.equal(seen[t].contributions(), wanted)
        assert torch.equal(seen[t].last, seen[t - 1].uploads if t else torch.zeros_like(seen[t].uploads))
        assert (seen[t].batch, seen[t].largest) == (16, 1.0)
        assert seen[t].strata == 10
    assert federation.aux_y.view(10, 3).tolist() == [[label] * 3 for label in federation.aux_y[::3].tolist()]
    assert sorted(federation.aux_y[::3].tolist()) == list(range(10))
    assert seen[2].last.isfinite().all()
    assert seen[2].last.any()


STRATA = {
    (): 1,
    (5,): 1,
    (2, 2, 2): 1,
    (0, 1, 2, 3): 4,
    (3, 3, 0, 0, 7, 7): 3,
    (0, 0, 1): 1,  # not as many of every class
    (0, 1, 0, 1): 1,  # not one after the other
    (0, 0, 1, 1, 0, 0): 1,
    (0, 1, 1, 0): 1,
    (0, 0, 1, 1, 1, 1, 2, 2): 1,
}


@pytest.mark.parametrize(("labels", "strata"), STRATA.items())
def test_strata_are_classes_with_as_many_examples_one_after_the_other(quick, labels, strata):
    federation = prepare(quick(), CPU).federation
    assert federation.strata == 10
    assert replace(federation, aux_y=torch.tensor(labels, dtype=torch.int64)).strata == strata


def test_an_adversary_tries_it_with_examples_of_its_own(quick):
    """What its `judge` knows of the server's examples are surrogates, of no classes, since they may be uneven; and
    the state is that of a first round.
    """
    seen = []

    def spy(view: ServerView, state) -> Verdict:
        seen.append((view.strata, view.contributions(), dict(state)))
        return Fortified()(view, state)

    federation = replace(prepare(quick(attack="a-little-tuned"), CPU).federation, aggregator=spy)
    state = first_state(federation)
    for t in range(2):
        state, _ = play(federation, state, t)
    tried = [strata == 1 for strata, _, _ in seen]
    assert any(tried)
    assert sum(strata == 10 for strata, _, _ in seen) == 2
    assert all(not state for (_, _, state), trial in zip(seen, tried, strict=True) if trial)
    served = next(own for strata, own, _ in seen if strata == 10)
    assert not any(torch.equal(own, served) for (_, own, _), trial in zip(seen, tried, strict=True) if trial)


# --- whole runs ----------------------------------------------------------------------------------------------------

CPU = Compute(device="cpu", threads=1)
SEEDS = (1, 2, 3)
SIGMA = {"sigma": 2.438, "sigma_base": 2.438, "accountant": "rdp", "batch": 16, "rate": 0.2}
"""The noise of epsilon 2 at the paper's delta in 267 rounds of digits, by the accountant that is faster to price it."""

ROUNDS = 200
"""Enough for trust to be earned: the early rounds, when few can be told apart, still cost a little."""


@dataclass(frozen=True)
class Outcome:
    """accuracy: on digits' 360 test images, so that one is 0.003. reasons: (T, n). lying: (n,)."""

    accuracy: float
    reasons: torch.Tensor
    lying: torch.Tensor


def whole(spec: Spec, believed: int | None = None) -> Outcome:
    setup = prepare(spec, CPU)
    federation = replace(setup.federation, believed_honest=believed or setup.federation.believed_honest)
    state, reasons = first_state(federation), []
    for t in range(federation.rounds):
        state, verdict = play(federation, state, t)
        reasons.append(verdict.reason)
    scored = accuracy(federation.model, state.params, setup.x_test, setup.y_test)
    return Outcome(scored, torch.stack(reasons), federation.byzantine)


ATTACKS = {
    "rank-matched": "rank-matched",
    "score-banking": "score-banking",
    "score-banking, valid": {"name": "score-banking", "form": "valid"},
    "trojan": "trojan",
    "on-off": "on-off",
    "label-flip": "label-flip",
    "gaussian": "gaussian",
}


@lru_cache
def attacked(name: str, seed: int) -> Outcome:
    return whole(Spec(seed=seed, attack=ATTACKS[name], aggregator="fortified", rounds=ROUNDS, **SIGMA))


@lru_cache
def unattacked() -> float:
    return mean(whole(reference(Spec(seed=seed, rounds=ROUNDS, **SIGMA))).accuracy for seed in SEEDS)


# One run's difference from the honest one of its seed was measured over these seeds, rounds and attacks: mean 0.01,
# deviation 0.015. A mean of three has 0.009, so 5 points are more than four of its deviations.
COST = 0.05


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_costs_more_than_five_points(name):
    """60 % liars."""
    assert mean(attacked(name, seed).accuracy for seed in SEEDS) >= unattacked() - COST


def test_two_stage_collapses_under_what_fortified_withstands():
    """Measured over the three seeds: 0.10 to 0.14, where ten classes make guessing 0.1. One of them will do."""
    aggregator = {"name": "two-stage", "server_gradient": "normalized"}
    collapsed = whole(Spec(attack="score-banking", aggregator=aggregator, rounds=ROUNDS, **SIGMA)).accuracy
    assert collapsed < 0.25
    assert mean(attacked("score-banking", seed).accuracy for seed in SEEDS) > collapsed + 0.5


@pytest.mark.parametrize("name", ["rank-matched", "score-banking", "trojan"])
def test_what_turns_all_its_noise_into_a_signal_is_hardly_used(name):
    for seed in SEEDS:
        found = attacked(name, seed)
        assert (found.reasons[:, found.lying] == Reason.KEPT).float().mean() < 0.01


def most_refused(uploads: int, refused: float) -> int:
    """Of so many honest uploads, the most that chance explains in 999 of 1,000 tries."""
    return int(stats.poisson.isf(1e-3, uploads * refused / 1000))


def test_honest_uploads_are_refused_at_most_as_often_as_stated_under_attack():
    outcomes = [attacked(name, seed) for name in ATTACKS for seed in SEEDS]
    reasons = torch.cat([outcome.reasons[:, ~outcome.lying].flatten() for outcome in outcomes])
    assert len(reasons) == 7 * 3 * ROUNDS * 10
    found = {reason: int((reasons == reason).sum()) for reason in TESTS}
    assert sum(found.values()) <= most_refused(len(reasons), 1.0)
    assert all(count <= most_refused(len(reasons), 0.25) for count in found.values()), found
    assert (reasons == Reason.SCORE).float().mean() < 0.01, "nor are they left out for want of trust"


def test_honest_uploads_are_refused_more_often_if_that_is_allowed():
    aggregator = {"name": "fortified", "refused": 50.0}
    runs = [whole(Spec(seed=seed, byzantine=0.0, rounds=100, aggregator=aggregator, **SIGMA)) for seed in SEEDS]
    reasons = torch.cat([outcome.reasons.flatten() for outcome in runs])
    found = {reason: int((reasons == reason).sum()) for reason in TESTS}
    assert sum(found.values()) <= most_refused(len(reasons), 50.0)
    assert all(count <= most_refused(len(reasons), 12.5) for count in found.values()), found
    assert found[Reason.NORM] > most_refused(len(reasons), 0.25)


def test_a_wrong_belief_makes_no_difference_in_the_end():
    """Half of all lie; the server believes in 20 % or in 80 % honest ones.

    Measured over seeds 1 to 3: in the first 80 of 160 rounds 8 to 14 % of who is used differ, in the last 40 nobody.
    """
    spec = Spec(byzantine=0.5, rounds=160, aggregator="fortified", **SIGMA)
    few, many = (whole(spec, believed) for believed in (4, 16))
    differ = ((few.reasons == Reason.KEPT) != (many.reasons == Reason.KEPT)).float()
    assert differ[-40:].mean() < 0.02
    assert differ[:80].mean() > 0.04
    for outcome in (few, many):
        used = outcome.reasons[-40:] == Reason.KEPT
        assert used[:, ~outcome.lying].float().mean() > 0.99
        assert used[:, outcome.lying].float().mean() < 0.05


def test_interrupted_and_resumed_is_the_same(quick, tmp_path):
    spec = quick(rounds=12, evaluate_every=4, aggregator="fortified")
    run(spec, out=tmp_path / "whole", compute=CPU)
    for done in (1, 6):
        with pytest.raises(KeyboardInterrupt):
            run(spec, out=tmp_path / "broken", compute=CPU, resume=True, watch=stop_after(done))
    run(spec, out=tmp_path / "broken", compute=CPU, resume=True)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
