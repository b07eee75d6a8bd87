"""Doubt about workers who lie off the server's examples, by loops, and what it makes of noise."""

import itertools
import math
from statistics import mean

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
    remaining_doubt,
)
from noisegate.aggregators.fortified.moments import variance_of_mean
from noisegate.streams import stream

SURE = 4.0
"""Standard errors that a Monte Carlo estimate may be offsets: one in 30,000, and seeds are fixed."""


def normal(*shape: int, seed: int = 1, name: str = "normal") -> torch.Tensor:
    return torch.randn(*shape, generator=stream(seed, name))


# --- the standard error --------------------------------------------------------------------------------------------


def error_by_loops(own: torch.Tensor, strata: int) -> list[float]:
    """The variance of the mean over classes of class means, from the variance within each class."""
    found = []
    for column in own.double().T.tolist():
        each = len(column) // strata
        classes = [column[c * each : (c + 1) * each] for c in range(strata)] if each > 1 else [column]
        total = 0.0
        for values in classes:
            center = sum(values) / len(values)
            spread = sum((value - center) ** 2 for value in values) / (len(values) - 1)
            total += spread / len(values)
        found.append(total / len(classes) ** 2)
    return found


def test_the_variance_of_a_mean_by_loops():
    own = 0.4 + normal(12, 3) * torch.tensor([1.0, 0.1, 7.0])
    for strata in (1, 2, 4, 6):
        assert variance_of_mean(own, strata).tolist() == pytest.approx(error_by_loops(own, strata), rel=1e-5)


def test_one_example_of_each_class_has_the_plain_error():
    own = 0.4 + normal(12, 3)
    assert torch.equal(variance_of_mean(own, 12), variance_of_mean(own, 1))
    assert variance_of_mean(own, 12).tolist() == pytest.approx([float(each.var() / 12) for each in own.T], rel=1e-5)


def test_classes_add_nothing_to_the_error_where_there_are_as_many_of_each():
    """Examples drawn anew: their means vary by just that, and the plain error is far too large."""
    classes, each, trials = 5, 4, 4000
    centers = 3 * torch.arange(float(classes)).repeat_interleave(each)
    widths = torch.linspace(0.5, 2.0, classes).repeat_interleave(each)
    own = centers[:, None] + widths[:, None] * normal(classes * each, trials)
    vary = float(own.mean(0).var())
    assert float(variance_of_mean(own, classes).mean()) == pytest.approx(vary, rel=SURE * math.sqrt(2 / trials))
    assert float(variance_of_mean(own, 1).min()) > 2 * vary


# --- doubt ---------------------------------------------------------------------------------------------------------


def doubt_by_loops(offsets, error, spread, noise, passed, ties) -> list[float]:
    """As the docstrings say, in float64."""
    n, K = offsets.shape
    y = offsets.double().tolist()
    near = ties.tolist()[:NEIGHBORS] if n > NEIGHBORS else range(n)
    near = [j for j in near if passed[j]]
    found = [0.0] * n
    for k in range(K):
        width = 2 * (float(error[k]) + (0.1 * float(spread[k])) ** 2 + float(noise[k]))
        by_chance = 2 * 2.0**2 * float(noise[k])
        for i in range(n):
            least = y[i][k] ** 2 / width
            for j in near:
                least = min(least, y[j][k] ** 2 / width + (y[i][k] - y[j][k]) ** 2 / by_chance)
            found[i] = max(found[i], least)
    best = min((found[i] for i in range(n) if passed[i]), default=math.inf)
    return [min(4.0, max(0.0, each - best)) for each in found]


def case(n: int, K: int, seed: int, scale: float = 2.0):
    """(offsets, error, spread, noise, passed, ties) of n workers and K directions, a few of whom did not pass."""
    rng = stream(seed, "doubts")
    error, spread, noise = (torch.rand(K, generator=rng) + 0.05 for _ in range(3))
    offsets = scale * torch.randn(n, K, generator=rng)
    passed = torch.rand(n, generator=rng) < 0.7
    return offsets, error, spread, noise, passed, torch.randperm(n, generator=rng)


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
    rest, given = (torch.full((1,), 0.01), torch.zeros(1), torch.ones(1)), torch.ones(n, dtype=torch.bool)
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
    rest = torch.tensor([0.1]), torch.zeros(1), torch.tensor([0.4])
    found = remaining_doubt(offsets, *rest, everyone, torch.arange(3))
    assert found.tolist() == pytest.approx([0.0, 1 / 3.2, 1.21 / 3.2], rel=1e-5), "by chance from where the first is"
    found = remaining_doubt(offsets, *rest, torch.tensor([False, True, True]), torch.arange(3))
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.01 / 3.2], rel=1e-4)


def test_where_nobody_passed_there_is_no_doubt():
    offsets, error, spread, noise, passed, ties = case(9, 3, 1)
    assert not remaining_doubt(offsets, error, spread, noise, torch.zeros_like(passed), ties).any()


def test_doubt_is_the_likelihood_that_is_lacking():
    """Of positions too far apart for chance: that of a normal variable, of the standard error's and the noise's."""
    e, v, r = 3.0, 0.05, 2.0
    offsets = torch.tensor([[0.0], [-2.0], [4.0], [6.5]])
    given = torch.tensor([e * e]), torch.tensor([r]), torch.tensor([v * v]), torch.ones(4, dtype=torch.bool)
    found = remaining_doubt(offsets, *given, torch.arange(4)).tolist()
    width = math.sqrt(e * e + (0.1 * r) ** 2 + v * v)
    wanted = [stats.norm.logpdf(0.0, 0.0, width) - stats.norm.logpdf(float(y), 0.0, width) for y in offsets]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert 0 < wanted[1] < wanted[2] < wanted[3] < MOST_DOUBT


def test_of_several_directions_the_one_with_most_doubt_counts():
    offsets, error, spread, noise, _, ties = case(12, 4, 3)
    offsets[0] = 0.0  # so that the least doubt is 0 in every direction
    everyone = torch.ones(12, dtype=torch.bool)
    alone = []
    for k in range(4):
        one = (offsets[:, k, None], error[k, None], spread[k, None], noise[k, None])
        alone.append(remaining_doubt(*one, everyone, ties))
    found = remaining_doubt(offsets, error, spread, noise, everyone, ties)
    torch.testing.assert_close(found, torch.stack(alone).amax(0))


def test_doubt_is_a_matter_of_weights_by_up_to_a_factor_of_55():
    one = torch.ones(1)
    everyone = torch.ones(2, dtype=torch.bool)
    found = remaining_doubt(torch.tensor([[0.0], [1e4]]), one, one, one, everyone, torch.arange(2))
    assert found.tolist() == [0.0, MOST_DOUBT]
    assert math.exp(MOST_DOUBT) == pytest.approx(55, abs=0.5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.permutations(range(9)), st.integers(0, 10**6))
def test_who_is_where_does_not_matter(places, seed):
    offsets, *rest, passed, ties = case(9, 3, seed)
    offsets[4] = offsets[2]
    order = torch.tensor(places)
    found = remaining_doubt(offsets, *rest, passed, ties)
    assert torch.equal(remaining_doubt(offsets[order], *rest, passed[order], ties), found[order])
    assert float(found[4]) == float(found[2])


def test_without_noise_or_error_it_is_finite():
    none = torch.zeros(3)
    for scale, nothing in itertools.product((0.0, 1e-3, 1.0, 100.0), (1e-32, 1e-20)):
        offsets, _, _, _, passed, ties = case(9, 3, 1, scale)
        found = remaining_doubt(offsets, none, none, torch.full((3,), nothing), passed, ties)
        assert found.isfinite().all()
        assert (found >= 0).all()
    assert torch.finfo(torch.float32).max > (2 * FAR) ** 2


# --- noise ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 25), st.integers(1, 4), st.integers(0, 10**6), st.floats(0.0, 20.0))
def test_whatever_all_share_no_two_differ_by_more_than_chance_costs(n, K, seed, shared):
    """In doubt: no worker lies further from the least doubted than it takes to be where it is by chance."""
    offsets, error, spread, noise, _, ties = case(n, K, seed)
    offsets = noise.sqrt() * offsets / 2 + shared
    found = remaining_doubt(offsets, error, spread, noise, torch.ones(n, dtype=torch.bool), ties)
    for i in range(n):
        costs = []
        for k in range(K):
            best = min(offsets[:, k].tolist(), key=abs)
            costs.append((float(offsets[i, k]) - best) ** 2 / (2 * WIDTH**2 * float(noise[k])))
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
        rest = torch.full((K,), e * e), torch.zeros(K), torch.ones(K), torch.ones(n, dtype=torch.bool), torch.arange(n)
        found = [remaining_doubt(shift * e + normal(n, K, seed=seed), *rest) for seed in range(trials)]
        assert mean(effective((-each).exp()) for each in found) > 0.85, (n, e, shift)


def test_a_group_that_lies_further_off_is_doubted_more():
    """By 12 v, which are four standard errors: with its weights it says less than a tenth of what the others do.

    Measured over these seeds: 2 to 4 %.
    """
    n, K, e, trials = 20, 4, 3.0, 30
    rest = torch.full((K,), e * e), torch.zeros(K), torch.ones(K)
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
    rest = torch.full((K,), e * e), torch.zeros(K), torch.ones(K)
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
