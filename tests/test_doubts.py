"""Doubt about workers who lie off the server's examples, by loops, and what it makes of noise."""

import itertools
import math
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from noisegate.aggregators.fortified.doubt import (
    FAR,
    MOST_DOUBT,
    NEIGHBORS,
    OFFSET_SPEED,
    WIDTH,
    doubt_along,
    remaining_doubt,
)
from noisegate.aggregators.fortified.moments import ExampleMoments
from noisegate.aggregators.fortified.state import COMMON, PROBES
from noisegate.streams import stream
from test_fortified_parts import error_by_loops

__all__ = ["doubt_by_loops", "error_by_loops"]

SURE = 4.0
"""Standard errors that a Monte Carlo estimate may be off: one in 30,000, and seeds are fixed."""


def normal(*shape: int, seed: int = 1, name: str = "normal") -> torch.Tensor:
    return torch.randn(*shape, generator=stream(seed, name))


# --- doubt ---------------------------------------------------------------------------------------------------------


def doubt_by_loops(offsets, error, noise, passed, ties) -> list[float]:
    """As the docstrings say, in float64: of each direction beyond the least doubted there, and the largest of them."""
    n, K = offsets.shape
    y, error, noise = (torch.as_tensor(each).double().tolist() for each in (offsets, error, noise))
    near = ties.tolist()[:NEIGHBORS] if n > NEIGHBORS else range(n)
    near = [j for j in near if passed[j]]
    found = [0.0] * n
    for k in range(K):
        alone = [y[i][k] ** 2 / (2 * (error[i][k] + noise[i][k])) for i in range(n)]
        least = []
        for i in range(n):
            by_chance = 2 * 2.0**2 * noise[i][k]
            least.append(min([alone[i], *(alone[j] + (y[i][k] - y[j][k]) ** 2 / by_chance for j in near)]))
        best = min((least[i] for i in range(n) if passed[i]), default=math.inf)
        found = [max(most, each - best) for most, each in zip(found, least, strict=True)]
    return [min(4.0, each) for each in found]


def alike(n: int, error: list[float], noise: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, K) each: for all workers the same."""
    return torch.tensor([error]).expand(n, -1), torch.tensor([noise]).expand(n, -1)


def case(n: int, K: int, seed: int, scale: float = 2.0):
    """(offsets, error, noise, passed, ties) of n workers and K directions, a few of whom did not pass."""
    rng = stream(seed, "doubts")
    error, noise = (torch.rand(n, K, generator=rng) + 0.05 for _ in range(2))
    offsets = scale * torch.randn(n, K, generator=rng)
    passed = torch.rand(n, generator=rng) < 0.7
    return offsets, error, noise, passed, torch.randperm(n, generator=rng)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from((0.1, 1.0, 3.0)))
def test_doubt_by_loops(n, K, seed, scale):
    given = case(n, K, seed, scale)
    before = [each.clone() for each in given]
    found = remaining_doubt(*given)
    assert (found.shape, found.dtype) == ((n,), torch.float32)
    np.testing.assert_allclose(found.numpy(), doubt_by_loops(*given), atol=1e-4)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


def test_of_many_only_some_drawn_at_random_are_compared_with_everyone():
    for n in (NEIGHBORS, NEIGHBORS + 1, 2 * NEIGHBORS + 70):
        given = case(n, 2, n)
        np.testing.assert_allclose(remaining_doubt(*given).numpy(), doubt_by_loops(*given), atol=1e-4)


def test_who_is_drawn_decides_and_space_stays_linear():
    """The least doubted lies next to everybody, which helps them if it is drawn; else they have more doubt."""
    n, largest = 4 * NEIGHBORS, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            largest = max(largest, found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

    offsets = 0.9 + 0.3 * normal(n, 1)
    offsets[7] = 0.0  # the one whose doubt is least
    rest, given = alike(n, [0.01], [1.0]), torch.ones(n, dtype=torch.bool)
    others = torch.arange(n)[torch.arange(n) != 7]
    first, last = torch.cat([torch.tensor([7]), others]), torch.cat([others, torch.tensor([7])])
    with Sizes():
        drawn = remaining_doubt(offsets, *rest, given, first)
    missed = remaining_doubt(offsets, *rest, given, last)
    assert largest <= max(NEIGHBORS**2, n)
    assert float(drawn[7]) == float(missed[7]) == 0.0
    assert (drawn <= missed).all()
    assert (drawn < missed).any()


def test_who_did_not_pass_is_nobody_to_lie_next_to():
    """Nor is it the least doubted: what it lacks itself is nothing then."""
    offsets, everyone = torch.tensor([[0.0], [1.0], [1.1]]), torch.ones(3, dtype=torch.bool)
    rest = alike(3, [0.1], [0.4])
    found = remaining_doubt(offsets, *rest, everyone, torch.arange(3))
    assert found.tolist() == pytest.approx([0.0, 1 / 3.2, 1.21 / 3.2], rel=1e-5), "by chance from where the first is"
    found = remaining_doubt(offsets, *rest, torch.tensor([False, True, True]), torch.arange(3))
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.01 / 3.2], rel=1e-4)


def test_where_nobody_passed_there_is_no_doubt():
    offsets, error, noise, passed, ties = case(9, 3, 1)
    assert not remaining_doubt(offsets, error, noise, torch.zeros_like(passed), ties).any()


def test_doubt_is_the_likelihood_that_is_lacking():
    """Of positions too far apart for chance: that of a normal variable, of the standard error's and the noise's."""
    e, v = 3.0, 0.05
    offsets = torch.tensor([[0.0], [-2.0], [4.0], [6.5]])
    given = *alike(4, [e * e], [v * v]), torch.ones(4, dtype=torch.bool)
    found = remaining_doubt(offsets, *given, torch.arange(4)).tolist()
    width = math.sqrt(e * e + v * v)
    wanted = [stats.norm.logpdf(0.0, 0.0, width) - stats.norm.logpdf(float(y), 0.0, width) for y in offsets]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert 0 < wanted[1] < wanted[2] < wanted[3] < MOST_DOUBT


def test_of_several_directions_the_one_with_most_doubt_counts():
    offsets, error, noise, _, ties = case(12, 4, 3)
    offsets[0] = 0.0  # so that the least doubt is 0 in every direction
    everyone = torch.ones(12, dtype=torch.bool)
    alone = []
    for k in range(4):
        one = (offsets[:, k, None], error[:, k, None], noise[:, k, None])
        alone.append(remaining_doubt(*one, everyone, ties))
    found = remaining_doubt(offsets, error, noise, everyone, ties)
    torch.testing.assert_close(found, torch.stack(alone).amax(0))


def test_doubt_is_a_matter_of_weights_by_up_to_a_factor_of_55():
    everyone = torch.ones(2, dtype=torch.bool)
    found = remaining_doubt(torch.tensor([[0.0], [1e4]]), *alike(2, [1.0], [1.0]), everyone, torch.arange(2))
    assert found.tolist() == [0.0, MOST_DOUBT]
    assert math.exp(MOST_DOUBT) == pytest.approx(55, abs=0.5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.permutations(range(9)), st.integers(0, 10**6))
def test_who_is_where_does_not_matter(places, seed):
    offsets, error, noise, passed, ties = case(9, 3, seed)
    for each in (offsets, error, noise):
        each[4] = each[2]
    order = torch.tensor(places)
    found = remaining_doubt(offsets, error, noise, passed, ties)
    again = remaining_doubt(offsets[order], error[order], noise[order], passed[order], ties)
    assert torch.equal(again, found[order])
    assert float(found[4]) == float(found[2])


def test_without_noise_or_error_it_is_finite():
    none = torch.zeros(9, 3)
    for scale, nothing in itertools.product((0.0, 1e-3, 1.0, 100.0), (1e-32, 1e-20)):
        offsets, _, _, passed, ties = case(9, 3, 1, scale)
        found = remaining_doubt(offsets, none, torch.full((9, 3), nothing), passed, ties)
        assert found.isfinite().all()
        assert (found >= 0).all()
    assert torch.finfo(torch.float32).max > (2 * FAR) ** 2


def test_along_the_common_directions_what_workers_share_of_an_error_stands_apart():
    """The rest of it is a worker's own, like the noise. The server's gradient and the own average are left out."""
    n, v = 6, OFFSET_SPEED / (2 - OFFSET_SPEED)
    own = normal(20, COMMON) + torch.arange(4.0).repeat_interleave(5)[:, None]
    mix = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.1, 0.9], [0.5] * 4, [0.1] * 4])
    given = torch.zeros(n), torch.tensor(1.0), torch.tensor(0.04)
    seen = ExampleMoments.of(own, normal(20, n, name="own"), mix, *given, 16)
    offsets, ties = 0.1 * normal(n, COMMON - 1, name="offsets"), torch.arange(n)
    error, noise = np.zeros((n, COMMON - 1)), np.zeros((n, COMMON - 1))
    for i, k in np.ndindex(error.shape):
        shared, total = float(seen.shared_error[i, k + 1]), float(seen.error[i, k + 1])
        error[i, k] = shared + (0.1 * float(seen.spread[i, k + 1])) ** 2
        noise[i, k] = v * float(seen.variance[i, k + 1]) + total - shared
    assert seen.mean.shape == (n, PROBES)
    passed = torch.tensor([True] * 5 + [False])
    found = doubt_along(SimpleNamespace(moments=seen), offsets, passed, ties)
    np.testing.assert_allclose(found.numpy(), doubt_by_loops(offsets, error, noise, passed, ties), atol=1e-4)
    assert 0 < float(found.max()) < MOST_DOUBT


# --- noise ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 25), st.integers(1, 4), st.integers(0, 10**6), st.floats(0.0, 20.0))
def test_whatever_all_share_no_two_differ_by_more_than_chance_costs(n, K, seed, shared):
    """In doubt: no worker lies further from the least doubted than it takes to be where it is by chance."""
    offsets, error, noise, _, ties = case(n, K, seed)
    offsets = noise.sqrt() * offsets / 2 + shared
    found = remaining_doubt(offsets, error, noise, torch.ones(n, dtype=torch.bool), ties)
    nearest = (offsets.square() / (error + noise)).argmin(0)
    for i in range(n):
        costs = []
        for k in range(K):
            best = float(offsets[nearest[k], k])
            costs.append((float(offsets[i, k]) - best) ** 2 / (2 * WIDTH**2 * float(noise[i, k])))
        assert float(found[i]) <= max(costs) * (1 + 1e-4) + 1e-3


def effective(weights: torch.Tensor) -> float:
    """How many equal weights would average noise as well, as a share of all."""
    return float(weights.sum().square() / weights.square().sum() / len(weights))


def test_noise_hardly_tells_honest_workers_apart():
    """Measured: they average noise as well as 0.88 to 1.00 of them with equal weights would.

    e: the standard error, in v. shift: what the server's examples may well be off, in e.
    """
    trials, K = 30, 4
    for n, e, shift in itertools.product((10, 20, 100), (0.3, 1.0, 3.0, 10.0), (0.0, 1.0, 2.0)):
        rest = *alike(n, K * [e * e], K * [1.0]), torch.ones(n, dtype=torch.bool), torch.arange(n)
        found = [remaining_doubt(shift * e + normal(n, K, seed=seed), *rest) for seed in range(trials)]
        assert mean(effective((-each).exp()) for each in found) > 0.85, (n, e, shift)


def test_a_group_that_lies_further_off_is_doubted_more():
    """By 12 v, which are four standard errors: with its weights it says less than a tenth of what the others do.

    Measured over these seeds: 2 to 4 %.
    """
    n, K, e, trials = 20, 4, 3.0, 30
    rest = alike(2 * n, K * [e * e], K * [1.0])
    told = []
    for shift, seed in itertools.product((0.0, 1.0, 2.0), range(trials)):
        offsets = shift * e + normal(2 * n, K, seed=seed)
        offsets[n:, 1] += 12.0
        weights = (-remaining_doubt(offsets, *rest, torch.ones(2 * n, dtype=torch.bool), torch.arange(2 * n))).exp()
        told.append(float(weights[n:].mean() / weights[:n].mean()))
    assert max(told) < 0.1


def test_a_group_within_the_error_of_the_examples_is_hardly_doubted():
    """What the server cannot tell from its own error it does not hold against anybody: half a standard error."""
    n, K, e = 20, 4, 30.0
    rest = alike(2 * n, K * [e * e], K * [1.0])
    offsets = normal(2 * n, K)
    offsets[n:, 1] += e / 2
    found = remaining_doubt(offsets, *rest, torch.ones(2 * n, dtype=torch.bool), torch.arange(2 * n))
    assert float(found.max()) < 0.2


def test_what_averages_over_rounds_leave_of_noise():
    """v^2 is OFFSET_SPEED / (2 - OFFSET_SPEED) of a round's variance; positions differ by 1.4 v in root mean square."""
    workers, rounds = 4000, 400
    offsets = torch.zeros(workers)
    rng = stream(1, "rounds")
    for _ in range(rounds):
        offsets.lerp_(torch.randn(workers, generator=rng), OFFSET_SPEED)
    v = math.sqrt(OFFSET_SPEED / (2 - OFFSET_SPEED))
    assert float(offsets.std()) == pytest.approx(v, rel=SURE / math.sqrt(2 * workers))
    apart = (offsets[::2] - offsets[1::2]).square().mean().sqrt()
    assert float(apart) == pytest.approx(1.41 * v, rel=SURE / math.sqrt(workers))
    assert float(apart) < WIDTH * v
