"""The two tests of stage one: as scipy computes them, and as the paper prints them."""

import math
import tracemalloc
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch.utils._python_dispatch import TorchDispatchMode

from noisegate.aggregators import ks_test
from noisegate.aggregators.first_floats import first_floats
from noisegate.aggregators.ks_test import count_every_value, count_where_in_doubt, ks_rejects, ks_threshold
from noisegate.aggregators.upload_lengths import norm_interval
from noisegate.streams import stream
from oracles import chi_square_interval, ks_p_value, ks_statistic

CPU = torch.device("cpu")
LARGEST = np.finfo(np.float32).max
MEMORY = 2**28

WAYS = pytest.mark.parametrize("decide", [count_every_value, count_where_in_doubt])
"""What `ks_rejects` does on CUDA, and what it does on a CPU; both run here."""

SIGNIFICANCE = 0.05
DIMENSIONS = (64, 1000, 25450)


def noise(rows: int, d: int, std: float = 1.0, seed: int = 1) -> torch.Tensor:
    return std * torch.randn(rows, d, generator=stream(seed, "noise"))


def rows_of_every_kind(d: int, s: float) -> torch.Tensor:
    """Pure noise, and what an attacker may send instead."""
    pure = noise(60 if d > 5000 else 150, d, s)
    few = pure[:12]
    ramp = torch.linspace(-3, 3, d)[None]
    steps = torch.arange(1, 21)[:, None] / 20
    odd = torch.stack(
        [
            torch.zeros(d),
            -torch.zeros(d),
            torch.full((d,), s),
            torch.full((d,), 1e30),
            torch.full((d,), -1e30),
            torch.full((d,), 6 * s),
            torch.full((d,), -6 * s),
            torch.full((d,), 1e-30),
            s * torch.randn(d, generator=stream(2, "half")).abs(),
            s * torch.randn(d, generator=stream(3, "sign")).sign(),
            torch.cat([torch.full((1,), 1e38), pure[0, 1:]]),
        ]
    )
    # Shifted and scaled a little at a time, so that some rows fall on either side of the threshold.
    return torch.cat([pure, few[:1] + 4 * s / d**0.5 * steps, few[1:2] * (1 + 6 / d**0.5 * steps), s * ramp, odd])


def by_sorting(rows: torch.Tensor, s: float, significance: float) -> torch.Tensor:
    """The decision as it is defined: scipy's statistic, which sorts in float64, against the threshold."""
    threshold = ks_threshold(rows.shape[1], significance)
    with np.errstate(over="ignore"):
        return torch.tensor([ks_statistic(row, s) > threshold for row in rows], dtype=torch.bool)


@lru_cache
def decided_by_sorting(d: int, s: float, significance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, d) rows of every kind, and (n,) their decisions, for all ways to be held against."""
    rows = rows_of_every_kind(d, s)[:: 1 if d < 5000 else 3]
    return rows, by_sorting(rows, s, significance)


def first_look(rows: torch.Tensor, s: float, significance: float) -> tuple[np.ndarray, np.ndarray]:
    """(n,), (n,) whether a row's counts in bins of equal width allow, and whether they imply, its rejection."""
    grid = ks_test._grid(rows.shape[1], s, significance)
    below = ks_test._counts_up_to(rows, grid, ks_test._Buffers.of(len(rows), rows.shape[1], grid))
    allowed = ks_test._somewhere_outside(below, grid.least[1:], grid.most[:-1])
    implied = ks_test._somewhere_outside(below, grid.least[:-1], grid.most[1:])
    return allowed, implied


def edges_of(d: int, s: float, significance: float) -> tuple[np.ndarray, np.ndarray]:
    """(d,) the edge for k = 1 .. d below which k coordinates are too many, and (d,) for k = 0 .. d - 1 too few."""
    edges = ks_test._edges(d, s, significance, CPU)
    at, least, most = edges.at.numpy(), edges.least.numpy()[:-1], edges.most.numpy()[:-1]
    assert sorted(most[least == 0]) == list(range(d))
    assert sorted(least[most == d]) == list(range(1, d + 1))
    return at[least == 0], at[most == d]


def moved(values: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
    """The float32 so many floats further on, as long as it is finite."""
    for step in range(1, int(np.max(np.abs(steps))) + 1):
        onward = np.where(np.asarray(steps) > 0, LARGEST, -LARGEST)
        values = np.where(np.abs(steps) >= step, np.nextafter(values, onward), values)
    return values.clip(-LARGEST, LARGEST)


def quantiles(d: int, shift: float, s: float) -> torch.Tensor:
    """Values with KS statistic 1 / (2 d) + shift: normal quantiles of (i + 1/2) / d + shift."""
    levels = ((torch.arange(d, dtype=torch.float64) + 0.5) / d + shift).clamp(1e-12, 1 - 1e-12)
    return (s * torch.special.ndtri(levels)).float()


@WAYS
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("s", [1.0, 0.2371, 3e-5])
def test_both_ways_decide_as_scipys_statistic_does(decide, d, s):
    for significance in (SIGNIFICANCE, 0.5) if d < 5000 else (SIGNIFICANCE,):
        rows, wanted = decided_by_sorting(d, s, significance)
        assert torch.equal(decide(rows, s, significance, MEMORY), wanted)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("s", [1.0, 0.2371])
def test_rejection_is_a_p_value_below_the_significance(d, s):
    rows = rows_of_every_kind(d, s)
    wanted = torch.tensor([ks_p_value(row, s) < SIGNIFICANCE for row in rows])
    assert torch.equal(ks_rejects(rows, s, SIGNIFICANCE), wanted)
    assert wanted.any()
    assert not wanted.all()


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("significance", [0.05, 0.01, 0.5])
def test_rows_just_on_either_side_of_the_threshold(d, significance):
    s, threshold = 0.7, ks_threshold(d, significance)
    offs = [sign * 10.0**-k for k in range(3, 7) for sign in (-1, 1)]  # float32 resolves a level to about 1e-7
    rows = torch.stack([quantiles(d, side * (threshold - 0.5 / d + off), s) for off in offs for side in (-1, 1)])
    wanted = torch.tensor([ks_p_value(row, s) < significance for row in rows])
    assert torch.equal(ks_rejects(rows, s, significance), wanted)
    assert wanted.tolist() == [off > 0 for off in offs for _ in range(2)]


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_threshold_has_the_significance_as_its_p_value(d):
    assert stats.kstwo.sf(ks_threshold(d, SIGNIFICANCE), d) == pytest.approx(SIGNIFICANCE, rel=1e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from((1, 2, 64, 700)),
    st.sampled_from((1e-4, 0.1, 1.0, 7.3)),
    st.floats(-8, 8),
    st.floats(1e-3, 10),
    st.sampled_from(("normal", "bins", "few", "heavy")),
)
def test_the_first_look_never_contradicts_the_statistic(seed, d, s, shift, scale, kind):
    rng = stream(seed, "bounds")
    row = s * (shift + scale * torch.randn(1, d, generator=rng))
    if kind == "bins":  # on, or a rounding off, the edges of the bins
        grid = ks_test._grid(d, s, SIGNIFICANCE)
        row = torch.randint(-grid.half - 2, grid.half + 3, (1, d), generator=rng).double().div(grid.scale).float()
        row = row + row.abs() * 1.2e-7 * torch.randint(-1, 2, (1, d), generator=rng)
    elif kind == "few":
        row = (row / s).round() * s
    elif kind == "heavy":
        row = row / torch.rand(1, d, generator=rng)
    statistic = ks_statistic(row[0], s)
    for significance in (0.9, 0.3, SIGNIFICANCE, 1e-4):
        allowed, implied = first_look(row, s, significance)
        rejected = statistic > ks_threshold(d, significance)
        assert implied[0] <= rejected <= allowed[0]
        for decide in (count_every_value, count_where_in_doubt):
            assert decide(row, s, significance, MEMORY).item() == rejected


def test_the_first_look_decides_nearly_all():
    allowed, implied = first_look(noise(500, 25450), 1.0, SIGNIFICANCE)
    assert (allowed & ~implied).mean() < 0.08
    assert 0.01 < implied.mean() < 0.1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.sampled_from((1.0, 0.3, 2e-3, 40.0)),
    st.sampled_from((0.999, 0.5, 0.2, SIGNIFICANCE, 0.01, 1e-6)),
    st.integers(1, 6),
    st.booleans(),
)
def test_both_ways_are_exact_for_ties_and_on_the_edges(seed, d, s, significance, distinct, on_edges):
    rng = np.random.default_rng(seed)
    ends, starts = edges_of(d, s, significance)
    if on_edges:  # the lowest and the highest values that pass, but for a few moved by a float
        limits = np.stack([ends, moved(starts, -1)])
        rows = moved(limits, rng.integers(-1, 2, (2, d)) * (rng.random((2, d)) < 1 / d))
    else:
        palette = np.concatenate([s * rng.standard_normal(distinct), rng.choice(ends, 2), rng.choice(starts, 2)])
        rows = rng.choice(palette.astype(np.float32).clip(-LARGEST, LARGEST), (4, d))
    rows = torch.from_numpy(rng.permuted(rows, axis=1))
    expected = by_sorting(rows, s, significance)
    assert torch.equal(count_every_value(rows, s, significance, MEMORY), expected)
    assert torch.equal(count_where_in_doubt(rows, s, significance, MEMORY), expected)


@WAYS
@pytest.mark.parametrize("d", [40, 1000])
def test_one_float_makes_the_difference(decide, d):
    ends, starts = edges_of(d, 0.7, SIGNIFICANCE)
    for limit, outward in ((ends, -1), (moved(starts, -1), 1)):
        assert not decide(torch.from_numpy(limit)[None], 0.7, SIGNIFICANCE, MEMORY).item()
        inner = (np.abs(limit) < 0.7 * 5).nonzero()[0]
        rows = np.repeat(limit[None], len(inner), 0)
        rows[np.arange(len(inner)), inner] = moved(limit[inner], outward)
        assert decide(torch.from_numpy(rows), 0.7, SIGNIFICANCE, MEMORY).all()


@pytest.mark.parametrize(("d", "s"), [(1, 1.0), (7, 1.0), (999, 0.2371), (25450, 1.0), (25450, 3e-5), (300, 1e-42)])
@pytest.mark.parametrize("significance", [SIGNIFICANCE, 0.6])
def test_edges_tell_floats_apart_as_float64_does(d, s, significance):
    threshold, ranks = ks_threshold(d, significance), np.arange(d + 1) / d
    ends, starts = edges_of(d, s, significance)
    for steps in range(-3, 4):
        low, high = (moved(edges, steps) for edges in (ends, starts))
        with np.errstate(over="ignore"):
            below = [special.ndtr(values.astype(np.float64) / s) for values in (low, high)]
        assert np.array_equal(low < ends, ranks[1:] - below[0] > threshold)
        assert np.array_equal(high >= starts, below[1] - ranks[:-1] > threshold)


@WAYS
@pytest.mark.parametrize("s", [1e-320, 1e-42, 1e-38, 1e-30, 1e30, 1e38, 1e45, 1e300])
def test_noise_of_any_size(decide, s):
    of_its_size = (s * torch.randn(6, 50, generator=stream(1, "size"), dtype=torch.float64)).clamp(-LARGEST, LARGEST)
    fixed = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, LARGEST, -LARGEST])
    rows = torch.cat([of_its_size.float(), fixed[:, None].expand(-1, 50), fixed.repeat(7)[None, :50]])
    expected = by_sorting(rows, s, SIGNIFICANCE)
    for times in (1, 20):  # so many that the numbers of their bins need more than 16 bits
        assert torch.equal(decide(rows.repeat(times, 1), s, SIGNIFICANCE, MEMORY), expected.repeat(times))


@pytest.mark.parametrize("s", [1e-320, 1e-42, 1.0, 1e45, 1e300])
def test_bins_keep_the_order_of_the_edges(s):
    first = ks_test._grid(50, s, SIGNIFICANCE).first
    assert (np.diff(first) >= 0).all()
    assert ks_test._edges(50, s, SIGNIFICANCE, CPU).at[-1].isinf()
    assert first[-2] < first[-1] == 2 * 50  # the infinite edges are in the last bin


@WAYS
def test_a_statistic_at_the_threshold_is_not_above_it(decide):
    assert ks_threshold(1, 1.0) == 0.5
    rows = torch.tensor([[0.0], [-0.0], [1e-6], [-1e-6]])
    assert decide(rows, 1.0, 1.0, MEMORY).tolist() == [False, False, True, True]


@pytest.mark.parametrize("guess", [-np.inf, -3.0, -0.0, 0.0, 1e-45, 0.75, 1e38, np.inf])
def test_the_first_float_is_found_from_any_guess(guess):
    firsts = np.array([-LARGEST, -2.5, -1e-45, 0.0, 1e-45, 1e-30, 0.75, LARGEST, np.inf], dtype=np.float32)
    found = first_floats(lambda values, i: values >= firsts[i], np.full(len(firsts), guess))
    assert np.array_equal(found, firsts)


@WAYS
@pytest.mark.parametrize("scratch", [1, 40_000, 200_000, 1_000_000])
def test_blocks_of_rows_change_nothing(decide, scratch):
    rows = rows_of_every_kind(1000, 1.0)
    assert torch.equal(decide(rows, 1.0, SIGNIFICANCE, scratch), decide(rows, 1.0, SIGNIFICANCE, MEMORY))
    assert torch.equal(ks_rejects(rows, 1.0, SIGNIFICANCE, scratch=scratch), ks_rejects(rows, 1.0, SIGNIFICANCE))


@WAYS
def test_blocks_take_no_more_than_the_memory(decide, monkeypatch):
    d, scratch, seen = 1000, 500_000, []

    def spied(real):
        return lambda values, *rest: seen.append(len(values)) or real(values, *rest)

    for name in ("_any_outside", "_counts_up_to"):
        monkeypatch.setattr(ks_test, name, spied(getattr(ks_test, name)))
    decide(noise(100, d), 1.0, SIGNIFICANCE, scratch)
    per_row = 34 * d + 13 if decide is count_every_value else 8 * d + 18 * ks_test._grid(d, 1.0, SIGNIFICANCE).bins
    assert sum(seen) == 100
    assert max(seen) == scratch // per_row


def test_a_row_in_doubt_everywhere_takes_the_memory_it_is_said_to_take():
    d = 200_000
    rows = quantiles(d, ks_threshold(d, SIGNIFICANCE) - 0.5 / d - 1e-7, 1.0)[None]
    ks_rejects(rows, 1.0, SIGNIFICANCE)
    tracemalloc.start()
    ks_rejects(rows, 1.0, SIGNIFICANCE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 * d < peak < 110 * d - 8 * d  # the 8 d are torch's, which are not traced


@WAYS
@pytest.mark.parametrize("shape", [(0, 5), (0, 1), (3, 1), (1, 2)])
def test_few_rows_and_few_coordinates(decide, shape):
    rows = 3 * torch.randn(shape, generator=stream(1, "few"))
    assert torch.equal(decide(rows, 1.0, SIGNIFICANCE, MEMORY), by_sorting(rows, 1.0, SIGNIFICANCE))


@WAYS
def test_rows_need_not_be_contiguous(decide):
    rows = noise(1000, 200).T
    assert torch.equal(decide(rows, 1.0, SIGNIFICANCE, MEMORY), by_sorting(rows, 1.0, SIGNIFICANCE))


def test_only_float32_is_decided():
    with pytest.raises(TypeError, match=r"uploads are torch\.float64; the edges .* torch\.float32 only"):
        ks_rejects(noise(2, 10).double(), 1.0, SIGNIFICANCE)


class Recorder(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_counting_every_value_never_waits_for_a_number():
    rows = noise(10, 300)
    count_every_value(rows, 1.0, SIGNIFICANCE, MEMORY)  # makes the edges
    views = {"detach", "expand", "view", "split", "_unsafe_view", "alias", "slice", "unfold"}
    with Recorder() as recorder:
        count_every_value(rows, 1.0, SIGNIFICANCE, MEMORY)
    # No _local_scalar_dense, item, nonzero, bincount, masked_select, index: every shape is known beforehand.
    work = [name for name in recorder.names if name not in views]
    assert work == ["bucketize", "repeat", "scatter_add_", "cumsum", "clamp", "ne", "any"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from((64, 1000)), st.floats(0.8, 1.25), st.floats(-0.1, 0.1))
def test_rejection_agrees_with_scipy_near_the_noise(seed, d, scale, shift):
    rows = scale * noise(8, d, seed=seed) + shift
    wanted = torch.tensor([ks_p_value(row, 1.0) < SIGNIFICANCE for row in rows])
    assert torch.equal(ks_rejects(rows, 1.0, SIGNIFICANCE), wanted)


def test_about_one_in_twenty_uploads_of_pure_noise_is_rejected():
    rows = 4000
    rejected = int(ks_rejects(noise(rows, 1000), 1.0, SIGNIFICANCE).sum())
    spread = math.sqrt(rows * SIGNIFICANCE * (1 - SIGNIFICANCE))
    assert abs(rejected - rows * SIGNIFICANCE) < 4 * spread


def test_inputs_are_left_alone():
    rows = noise(3, 100)
    before = rows.clone()
    ks_rejects(rows, 1.0, SIGNIFICANCE)
    assert torch.equal(rows, before)


# The norm test.

DIMENSIONS_OF_MODELS = (2410, 25450)


def skewness(d: int) -> float:
    """How far, relative to s sqrt(d), the printed interval may lie from the exact one: its normal approximation leaves
    out the chi-square's skewness, which moves both ends by 2 (3^2 - 1) / 3 / (2 d) = 2.7 / d (Cornish-Fisher)."""
    return 3 / d


@pytest.mark.parametrize("d", DIMENSIONS_OF_MODELS)
@pytest.mark.parametrize("s", [1.0, 0.031])
def test_the_norm_interval_is_the_printed_one_and_close_to_the_exact_one(d, s):
    low, high = norm_interval(d, s, 3.0)
    assert low == pytest.approx(math.sqrt(s**2 * d - 3 * s**2 * math.sqrt(2 * d)), rel=1e-12)
    assert high == pytest.approx(math.sqrt(s**2 * d + 3 * s**2 * math.sqrt(2 * d)), rel=1e-12)
    exact_low, exact_high = chi_square_interval(d, s, outside=2 * stats.norm.sf(3))
    assert abs(low - exact_low) < skewness(d) * s * math.sqrt(d)
    assert abs(high - exact_high) < skewness(d) * s * math.sqrt(d)
    for wrong in (2.7, 3.3):  # the tolerance tells 3 deviations from a tenth more or less
        assert abs(norm_interval(d, s, wrong)[1] - exact_high) > skewness(d) * s * math.sqrt(d)


@pytest.mark.parametrize("d", DIMENSIONS_OF_MODELS)
def test_pure_noise_falls_outside_the_norm_interval_with_probability_0_0027(d):
    low, high = norm_interval(d, 1.0, 3.0)
    outside = stats.chi2.cdf(low**2, d) + stats.chi2.sf(high**2, d)
    assert outside == pytest.approx(0.0027, rel=0.1)  # the skewness makes it 0.0028 at d = 2,410


def test_few_coordinates_have_no_lower_bound():
    assert norm_interval(10, 1.0, 3.0)[0] == 0.0
    assert norm_interval(18, 1.0, 3.0)[0] == 0.0
    assert norm_interval(19, 1.0, 3.0)[0] > 0.0
