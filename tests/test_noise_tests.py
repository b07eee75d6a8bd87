"""The two tests of stage one: as scipy computes them, and as the paper prints them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noisegate.aggregators import noise_tests
from noisegate.aggregators.noise_tests import ks_bounds, ks_rejects, ks_statistic, ks_threshold, norm_interval
from noisegate.streams import stream
from oracles import chi_square_interval, ks_p_value
from oracles import ks_statistic as oracle_statistic

STATISTIC = 1e-12
"""Both are float64; what differs is the rounding of x / s and of scipy's own (x - 0) / s."""

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


def quantiles(d: int, shift: float, s: float) -> torch.Tensor:
    """Values with KS statistic 1 / (2 d) + shift: normal quantiles of (i + 1/2) / d + shift."""
    levels = ((torch.arange(d, dtype=torch.float64) + 0.5) / d + shift).clamp(1e-12, 1 - 1e-12)
    return (s * torch.special.ndtri(levels)).float()


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("s", [1.0, 0.2371, 3e-5])
def test_the_statistic_is_scipys(d, s):
    for row in rows_of_every_kind(d, s)[:: 1 if d < 5000 else 7]:
        assert ks_statistic(row, s) == pytest.approx(oracle_statistic(row, s), abs=STATISTIC)


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
def test_the_bounds_enclose_the_statistic(seed, d, s, shift, scale, kind):
    rng = stream(seed, "bounds")
    row = shift + scale * torch.randn(1, d, generator=rng)
    if kind == "bins":  # on, or a rounding off, the edges of the histogram
        bins, reach = math.ceil(noise_tests.FINENESS * math.sqrt(d)), noise_tests.REACH
        edges = torch.randint(-2, bins + 3, (1, d), generator=rng)
        row = (edges.double() * (2 * reach / bins) - reach).float()
        row = row + row.abs() * 1.2e-7 * torch.randint(-1, 2, (1, d), generator=rng)
    elif kind == "few":
        row = row.round()
    elif kind == "heavy":
        row = row / torch.rand(1, d, generator=rng)
    low, high = ks_bounds(s * row, s)
    assert low.item() <= ks_statistic((s * row)[0], s) <= high.item()


def test_the_bounds_are_tight_enough_to_spare_the_sorting():
    rows = noise(50, 25450)
    low, high = ks_bounds(rows, 1.0)
    # A bin holds at most 12 / 7817 x 0.4 = 6e-4 of the mass, and as much again in the sample.
    assert (high - low).max() < 2e-3
    threshold = ks_threshold(25450, SIGNIFICANCE)
    assert ((low <= threshold) & (high > threshold)).float().mean() < 0.25


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
