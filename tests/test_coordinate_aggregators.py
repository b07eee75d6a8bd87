"""Median, trimmed mean, Bulyan and the vote on signs, beside loops that anybody can check."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.aggregators import ranks, sorting_network
from noisegate.aggregators.bulyan import Bulyan, chosen_in_turn
from noisegate.aggregators.distances import distances_of
from noisegate.aggregators.median import Median
from noisegate.aggregators.ranks import (
    everyone_ascending,
    marked_ascending,
    mean_near_median,
    mean_of_ranks,
    nearest_by_mask,
    nearest_by_number,
)
from noisegate.aggregators.sign_vote import SignVote
from noisegate.aggregators.sorting_network import comparisons, mean_by_network, plan_of
from noisegate.aggregators.trimmed_mean import TrimmedMean
from noisegate.errors import SpecError
from noisegate.protocol.intake import receive
from noisegate.streams import stream
from noisegate.views import Reason, ServerView

LARGEST = float(np.finfo(np.float32).max)
SCRATCH = 2**28

# A mean of up to 40 float32 values: a few units in the last place of the largest of them.
ROUNDING = 2e-6

MOST = pytest.mark.parametrize(
    ("aggregator", "most"),
    [
        (Median, lambda n: (n - 1) // 2),
        (TrimmedMean, lambda n: (n - 1) // 2),
        (SignVote, lambda n: (n - 1) // 2),
        (Bulyan, lambda n: (n - 3) // 4),
    ],
)


def normal(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=stream(seed, "uploads"))


def view_of(uploads, believed: int | None = None, seed: int = 0, scratch: int = SCRATCH) -> ServerView:
    n, d = uploads.shape
    rows, norms, present, _ = receive(uploads, n, d, uploads)
    ties = torch.randperm(n, generator=stream(seed, "ties"))
    nothing = torch.zeros(d)
    return ServerView(rows, norms, present, 1.0, believed or n, lambda normalized: nothing, ties, scratch)


def close(ours: torch.Tensor, oracle: np.ndarray, scale: float = 1.0) -> None:
    """Equal up to the rounding of a mean of values of this size."""
    assert ours.dtype == torch.float32
    assert bool(ours.isfinite().all())
    np.testing.assert_allclose(ours.double().numpy() / scale, oracle / scale, atol=ROUNDING, rtol=ROUNDING)


# Few different numbers have many ties, and their distances are exact; the others reach both ends of float32.
FEW = st.integers(-4, 4).map(float)
ANY = st.one_of(FEW, st.floats(-LARGEST, LARGEST, width=32), st.sampled_from([LARGEST, -LARGEST, 0.0, -0.0, 1e-45]))


@st.composite
def marked_uploads(draw, values=ANY):
    """(n, d) values, and who of the n counts."""
    n, d = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    flat = draw(st.lists(values, min_size=n * d, max_size=n * d))
    rows = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(flat).view(n, d), torch.tensor(rows)


# --- ranks -----------------------------------------------------------------------------------------------------------


def slow_mean_of_ranks(uploads: torch.Tensor, rows: torch.Tensor, low: int, high: int) -> np.ndarray:
    means = []
    for column in uploads[rows].double().numpy().T:
        chosen = sorted(column)[max(0, low) : high]
        means.append(sum(value / len(chosen) for value in chosen))
    return np.array(means)


def slow_mean_near_median(uploads: torch.Tensor, rows: torch.Tensor, keep: int) -> np.ndarray:
    means = []
    for column in uploads[rows].double().numpy().T:
        median = np.median(column) if len(column) else 0.0
        nearest = sorted(column, key=lambda value, median=median: (abs(value - median), value))[:keep]
        means.append(sum(value / len(nearest) for value in nearest))
    return np.array(means)


def scale_of(uploads: torch.Tensor) -> float:
    return max(1.0, float(uploads.abs().max()))


@pytest.mark.parametrize("sort", [marked_ascending, everyone_ascending])
@given(marked_uploads(), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
@settings(deadline=None)
def test_mean_of_ranks_is_that_of_a_sorted_list(sort, given_rows, low, high, size) -> None:
    """As it is done for many rows, or with ranks that are tensors, as on a device."""
    uploads, rows = given_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ascending_columns", lambda uploads, rows, scratch: sort(uploads, rows, size))
        ours = mean_of_ranks(uploads, rows, torch.tensor(low), torch.tensor(high), SCRATCH)
    close(ours, slow_mean_of_ranks(uploads, rows, low, high), scale_of(uploads))


@given(marked_uploads(), st.integers(-1, 9), st.integers(0, 10), st.integers(1, 6))
@settings(deadline=None)
def test_mean_of_ranks_of_few_rows_is_that_of_a_sorted_list(given_rows, low, high, size) -> None:
    uploads, rows = given_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting_network, "COLUMNS", size)
        ours = mean_of_ranks(uploads, rows, low, high, SCRATCH)
    close(ours, slow_mean_of_ranks(uploads, rows, low, high), scale_of(uploads))


@pytest.mark.parametrize("n", range(1, 13))
def test_a_network_finds_all_ranks_of_all_zeros_and_ones(n) -> None:
    """Lower and higher commute with every threshold, so what is right for zeros and ones is right for all values."""
    uploads = ((torch.arange(2**n) >> torch.arange(n)[:, None]) & 1).float()
    everyone = torch.ones(n, dtype=torch.bool)
    ascending = np.sort(uploads.double().numpy(), axis=0)
    for low in range(n):
        for high in range(low + 1, n + 1):
            ours = torch.cat([*mean_by_network(uploads, everyone, low, high, SCRATCH)])
            close(ours, ascending[low:high].mean(0))


@pytest.mark.parametrize("n", [13, 31, 32, 33, 50, 63, 64, 65, 66])
def test_networks_of_many_rows(n) -> None:
    """The last two are sorted column by column, unless the network is asked."""
    uploads, everyone = normal(n, 500), torch.ones(n, dtype=torch.bool)
    ascending = np.sort(uploads.double().numpy(), axis=0)
    for low, high in ((0, n), ((n - 1) // 2, n // 2 + 1), (n // 5, n - n // 5), (0, 1), (n - 1, n), (3, 5)):
        close(mean_of_ranks(uploads, everyone, low, high, SCRATCH), ascending[low:high].mean(0))
        close(torch.cat([*mean_by_network(uploads, everyone, low, high, SCRATCH)]), ascending[low:high].mean(0))


def test_a_network_that_wants_less_compares_less() -> None:
    whole = len(comparisons(50))
    assert plan_of(50, 0, 50).steps == tuple((True, i, i, 50 + i) for i in range(50))  # copies: their sum is theirs
    for low, high in ((24, 26), (10, 40)):
        plan = plan_of(50, low, high)
        assert len(plan.steps) < 0.85 * 2 * whole
        assert plan.buffers <= 51


@pytest.mark.parametrize("sort", [marked_ascending, everyone_ascending])
@given(marked_uploads(FEW), st.sampled_from([1.0, 2.0**-100, LARGEST / 4]), st.integers(1, 6), st.data())
@settings(deadline=None)
def test_mean_near_the_median_is_that_of_a_list_sorted_by_distance(sort, given_rows, unit, size, data) -> None:
    """By numbers on a CPU, by masks on a CUDA device."""
    uploads, rows = given_rows[0] * unit, given_rows[1]
    count = int(rows.sum())
    keep = data.draw(st.integers(min(1, count), count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ascending_columns", lambda uploads, rows, scratch: sort(uploads, rows, size))
        number = keep if sort is marked_ascending else torch.tensor(keep)
        close(mean_near_median(uploads, rows, number, SCRATCH), slow_mean_near_median(uploads, rows, keep), unit)


def test_the_nearest_are_not_always_in_the_middle() -> None:
    """The median is 3: the nearest three are the upper ones, though two lie below it."""
    columns = torch.tensor([[0.0, 1.0, 3.0, 3.5, 4.0], [2.0, 2.5, 3.0, 5.0, 6.0]])
    for ours in (nearest_by_number(columns, 3), nearest_by_mask(columns, torch.tensor(5), torch.tensor(3))):
        close(ours, np.array([3.5, 2.5]))


def test_of_two_equally_close_the_lower_is_kept() -> None:
    columns = torch.tensor([[-1.0, 0.0, 1.0]])
    for ours in (nearest_by_number(columns, 2), nearest_by_mask(columns, torch.tensor(3), torch.tensor(2))):
        close(ours, np.array([-0.5]))


@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 700), (50, 600), (401, 300)])
def test_more_columns_than_fit_at_once(n, d) -> None:
    """As many as the cache takes, as little scratch as one column, and all in between."""
    uploads = normal(n, d)
    rows = torch.rand(n, generator=stream(1, "rows")) < 0.8
    rows[0] = True
    count = int(rows.sum())
    low, high = count // 5, count - count // 5
    assert ranks.columns_at_once(uploads, 1, 1) == 1
    for scratch in (1, 5000 * n, SCRATCH):
        ours = mean_of_ranks(uploads, rows, low, high, scratch)
        close(ours, np.sort(uploads[rows].double().numpy(), axis=0)[low:high].mean(0))


def test_scratch_stays_near_the_cache() -> None:
    """tracemalloc sees numpy's copies, of rows that are not all marked; torch's scratch is as large as one of them."""
    uploads, rows = normal(80, 100_000), torch.arange(80) > 0
    for scratch in (SCRATCH, 12 * 2**18):
        tracemalloc.start()
        mean_of_ranks(uploads, rows, 3, 60, scratch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.5 * min(scratch // ranks.COPIES, ranks.NEAR)


# --- aggregators ----------------------------------------------------------------------------------------------------


def slow_median(rows: np.ndarray, f: int) -> np.ndarray:
    return np.median(rows, axis=0)


def slow_trimmed_mean(rows: np.ndarray, f: int) -> np.ndarray:
    return np.array([np.mean(sorted(column)[f : len(column) - f]) for column in rows.T])


def slow_sign_vote(rows: np.ndarray, f: int) -> np.ndarray:
    votes = [sum(1 for v in column if v > 0) - sum(1 for v in column if v < 0) for column in rows.T]
    return np.sign(votes) / math.sqrt(rows.shape[1])


def slow_bulyan_choice(rows: np.ndarray, f: int, ties: list[int]) -> list[int]:
    """Who is chosen, in turn. ties: the numbers of the rows in the order that equal scores are ranked by."""
    n, chosen = len(rows), []
    for _ in range(n - 2 * f):
        left = [i for i in ties if i not in chosen]
        neighbors = max(1, len(left) - f - 2)
        scores = [sum(sorted(((rows[i] - rows[j]) ** 2).sum() for j in left if j != i)[:neighbors]) for i in left]
        chosen.append(left[scores.index(min(scores))])
    return chosen


def slow_bulyan(rows: np.ndarray, f: int, ties: list[int]) -> np.ndarray:
    chosen = torch.zeros(len(rows), dtype=torch.bool)
    chosen[slow_bulyan_choice(rows, f, ties)] = True
    return slow_mean_near_median(torch.from_numpy(rows), chosen, len(rows) - 4 * f)


SLOW = {Median: slow_median, TrimmedMean: slow_trimmed_mean, SignVote: slow_sign_vote}


@pytest.mark.parametrize("aggregator", SLOW)
@given(marked_uploads(), st.integers(0, 4))
@settings(deadline=None)
def test_aggregators_are_their_loops(aggregator, given_rows, f) -> None:
    """With malformed uploads among them, which do not count, and values of any size."""
    uploads, rows = given_rows
    view = view_of(torch.where(rows[:, None], uploads, torch.nan))
    n = int(view.present.sum())  # the length of a row may overflow too
    verdict = aggregator(min(f, aggregator().most(len(rows))))(view, {})
    assert torch.equal(verdict.kept, view.present)
    assert bool(verdict.update.isfinite().all())
    if n == 0:
        assert not bool(verdict.update.any())
        return
    admitted = max(0, min(f, (n - 1) // 2))
    counted = view.uploads[view.present].double().numpy()
    close(verdict.update, SLOW[aggregator](counted, admitted), scale_of(view.uploads))


def exact_distances(view: ServerView) -> bool:
    """Whether no distance between uploads is rounded, nor taken for rounding."""
    rows = view.uploads[view.present].double()
    return torch.equal(distances_of(view)[view.present][:, view.present], (rows[:, None] - rows).square().sum(2))


@given(
    st.integers(1, 14),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([2, 32]),
    st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_bulyan_is_its_loop(n, d, f, absent, scale, seed) -> None:
    """Whole numbers, few with many ties or many: rounding would rank uploads otherwise than the loop does."""
    uploads = (scale * normal(n, d, seed)).round()
    uploads[:absent] = torch.nan
    view = view_of(uploads, seed=seed)
    assert exact_distances(view)
    n, f = int(view.present.sum()), min(f, max(0, Bulyan().most(n)))
    verdict = Bulyan(f)(view, {})
    f = max(0, min(f, (n - 3) // 4))
    present = view.present.nonzero().flatten().tolist()
    ties = [present.index(i) for i in view.ties.tolist() if i in present]
    counted = view.uploads[view.present].double().numpy()
    chosen = sorted(present[i] for i in slow_bulyan_choice(counted, f, ties))
    assert verdict.kept.nonzero().flatten().tolist() == chosen
    assert len(chosen) == n - 2 * f
    close(verdict.update, slow_bulyan(counted, f, ties) if n else np.zeros(d), scale)


@given(st.integers(1, 14), st.integers(0, 2), st.integers(0, 99))
@settings(deadline=None)
def test_bulyan_chooses_the_same_on_a_device(n, absent, seed) -> None:
    """On a CUDA device n and f are tensors."""
    uploads = (2 * normal(n, 3, seed)).round()
    uploads[:absent] = torch.nan
    view = view_of(uploads, seed=seed)
    apart, n = distances_of(view), int(view.present.sum())
    for f in range(max(0, (n - 3) // 4) + 1):
        ours, on_device = chosen_in_turn(apart, view, n, f), chosen_in_turn(apart, view, *torch.tensor([n, f]))
        assert torch.equal(ours, on_device)
        assert int(ours.sum()) == n - 2 * f


def test_bulyan_ranks_by_krum_and_says_whom_it_left_out() -> None:
    uploads = normal(11, 40)
    uploads[0] += 30.0
    uploads[1] -= 30.0
    verdict = Bulyan(2)(view_of(uploads), {})
    assert not bool(verdict.kept[:2].any())
    assert verdict.reason[:2].tolist() == [Reason.SCORE] * 2
    slow = [
        sum(sorted(float(((uploads[i] - uploads[j]) ** 2).sum()) for j in range(11) if j != i)[:7]) for i in range(11)
    ]
    np.testing.assert_allclose(verdict.score.numpy(), slow, rtol=1e-5)


def test_far_values_leave_no_trace() -> None:
    """What f Byzantine workers send beyond all others moves no coordinate outside what the honest sent."""
    honest = normal(9, 300)
    for value in (1e3, 1e15, 1e37):
        for aggregator in (Median(2), TrimmedMean(2), Bulyan(2)):
            far = torch.full((2, 300), value)
            far[1] *= -1
            update = aggregator(view_of(torch.cat([honest, far])), {}).update
            assert bool((update >= honest.min(0).values).all()), aggregator
            assert bool((update <= honest.max(0).values).all()), aggregator


@pytest.mark.parametrize("aggregator", [Median, TrimmedMean, Bulyan])
@pytest.mark.parametrize("absent", [0, 1, 4, 12, 13])
def test_numbers_in_tensors_give_the_same_verdict(aggregator, absent, monkeypatch) -> None:
    """The lines that a CUDA device runs, with (n, f) in tensors."""
    uploads = normal(13, 50)
    uploads[:absent] = torch.nan
    view = view_of(uploads, believed=11)
    ours = aggregator()(view, {})
    n, f = aggregator().counts(view)
    monkeypatch.setattr(aggregator, "counts", lambda self, view: (torch.tensor(n), torch.tensor(f)))
    monkeypatch.setattr(ranks, "ascending_columns", lambda uploads, rows, scratch: everyone_ascending(uploads, rows, 7))
    on_device = aggregator()(view, {})
    close(on_device.update, ours.update.double().numpy())
    assert torch.equal(on_device.kept, ours.kept)
    assert torch.equal(on_device.score, ours.score)


@pytest.mark.parametrize("aggregator", [Median, TrimmedMean, Bulyan, SignVote])
def test_sums_of_the_largest_numbers_do_not_overflow(aggregator) -> None:
    """Rows whose length would overflow never come this far on a CPU; the aggregators do not rely on that."""
    for n in range(1, 40):
        for value in (LARGEST, -LARGEST):
            view = view_of(torch.ones(n, 2), believed=n - n // 5)
            view = replace(view, uploads=view.uploads * value, norms=view.norms * LARGEST / 2)
            update = aggregator()(view, {}).update
            expected = np.sign(value) / math.sqrt(2) if aggregator is SignVote else value
            np.testing.assert_allclose(update.double().numpy(), expected, rtol=1e-6)


def test_equal_byzantine_uploads_may_be_chosen_last_and_do_no_harm() -> None:
    """With 2f + 1 left Krum counts f - 1 neighbors, as many as a Byzantine worker has among the others."""
    uploads = normal(11, 40)
    uploads[:2] = 30.0
    verdict = Bulyan(2)(view_of(uploads), {})
    assert bool(verdict.kept[:2].any())
    assert bool((verdict.update <= uploads[2:].max(0).values).all())


# --- the vote --------------------------------------------------------------------------------------------------------


def test_the_vote_has_the_asked_length_and_one_sign_per_coordinate() -> None:
    uploads = normal(7, 2500)
    update = SignVote(length=2.5)(view_of(uploads), {}).update
    assert math.isclose(float(update.norm()), 2.5, rel_tol=1e-5)
    assert torch.equal(update.sign(), uploads.sign().sum(0).sign())
    assert len(update.abs().unique()) == 1


def test_zeros_do_not_vote_and_ties_stay() -> None:
    uploads = torch.tensor([[1.0, 0.0, 1.0, -0.0], [0.0, 0.0, -1e-30, 0.0], [-0.0, 0.0, 0.0, -3.0]])
    update = SignVote()(view_of(uploads), {}).update
    assert update.tolist() == [0.5, 0.0, 0.0, -0.5]


def test_a_vote_has_no_weight() -> None:
    """One upload of any length is outvoted by two."""
    uploads = torch.tensor([[1e30], [-1.0], [-1e-30]])
    assert SignVote()(view_of(uploads), {}).update.tolist() == [-1.0]


def test_blocks_do_not_change_a_vote() -> None:
    view = view_of(normal(9, 1000))
    for scratch in (1, 1000, 40_000):
        assert torch.equal(SignVote()(replace(view, scratch=scratch), {}).update, SignVote()(view, {}).update)


@pytest.mark.parametrize("length", [0.0, -1.0, math.inf, "long"])
def test_a_length_that_is_none_is_refused(length) -> None:
    with pytest.raises(SpecError, match="length"):
        SignVote(length=length)


# --- settings --------------------------------------------------------------------------------------------------------


@MOST
def test_how_many_byzantine_workers_are_admitted(aggregator, most) -> None:
    for n in range(3, 30):
        assert aggregator().most(n) == most(n)
        aggregator(most(n)).check(n)
        with pytest.raises(SpecError, match="at most"):
            aggregator(most(n) + 1).check(n)


def test_bulyan_needs_three_workers() -> None:
    with pytest.raises(SpecError, match="raise workers"):
        Bulyan().check(2)
