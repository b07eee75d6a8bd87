"""What one example can do to an upload: never more than the docstrings of `Normalized` and `Clipped` promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noisegate.errors import SpecError
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import (
    Clipped,
    Direct,
    Normalized,
    closed_form,
    contributions,
    contributions_of,
    per_example_gradients,
    rounded_sensitivity,
)
from noisegate.workers.closed_form import ClosedForm
from oracles import clipped, gradient_of_one, normalized
from oracles import sums as oracle_sums

FLOAT32 = 1e-5
"""Relative to the number of examples added: some hundred roundings of 6e-8, far below any wrong term."""

SHORTEST = 1 - 1e-3
"""A contribution is 2^-14 short of 1 by design and rounding moves it by less; 1e-3 leaves capacity for neither bug."""

WAYS = ("closed-form", "direct")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


def sums_of(way: str, model: FlatModel):
    if way == "closed-form":
        return ClosedForm.of(model)
    return lambda worker, *rest: Direct(model)(worker, *rest)


def small_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return {
            "plain": (nn.Sequential(nn.Linear(6, 5), nn.ELU(), nn.Linear(5, 3)), (6,)),
            "no bias": (nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)), (6,)),
            "sequence": (nn.Sequential(nn.Linear(3, 4), nn.ELU(), nn.Flatten(), nn.Linear(8, 3)), (2, 3)),
            "image": (
                nn.Sequential(
                    nn.Conv2d(1, 4, 2), nn.ELU(), nn.GroupNorm(2, 4, affine=False), nn.Flatten(), nn.Linear(36, 3)
                ),
                (1, 4, 4),
            ),
        }


MODULES = small_models()
MODELS = {name: (FlatModel(module), shape) for name, (module, shape) in MODULES.items()}


# Direct sums against the loop.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_direct_sums_are_those_of_the_loop(name, momentum, chunk):
    model, shape = MODELS[name]
    rng = stream(2, "direct")
    params = model.initial()
    x, y = torch.randn(6, *shape, generator=rng), torch.randint(0, 3, (6,), generator=rng)
    owner, last = torch.tensor([0, 0, 2, 2, 2, 3]), torch.randn(4, model.d, generator=rng) / model.d**0.5
    for worker, scale in ((Normalized(momentum), normalized), (Clipped(0.4, momentum), clipped(0.4))):
        found = Direct(model, chunk)(worker, params, x, y, owner, last)
        wanted = oracle_sums(scale, momentum, MODULES[name][0], params, x, y, owner, last)
        assert torch.linalg.vector_norm(found - wanted) <= FLOAT32 * 6
        assert not found[1].any()


# What the server expects of its own examples in a worker's hands.


def own_examples(name: str, count: int = 5):
    """(module, model, params, x, y)"""
    (model, shape), rng = MODELS[name], stream(6, "own")
    x, y = torch.randn(count, *shape, generator=rng), torch.randint(0, 3, (count,), generator=rng)
    return MODULES[name][0], model, model.initial(), x, y


@pytest.mark.parametrize("way", [ClosedForm.of, Direct], ids=WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9])
def test_contributions_of_own_examples_are_those_of_the_loop(way, name, momentum):
    """With noise at right angles to the gradient as the last upload, and without the part of it."""
    module, model, params, x, y = own_examples(name)
    s = 0.3
    for worker, scale in ((Normalized(momentum), normalized), (Clipped(0.4, momentum), clipped(0.4))):
        found = contributions_of(way(model), params, x, y, worker, s)
        assert found.shape == (5, model.d)
        for j in range(5):
            mix = torch.zeros(model.d + 1, dtype=torch.float64)  # one more dimension, for what is at right angles
            mix[:-1] = (1 - momentum) * gradient_of_one(module, params, x[j], y[j])
            mix[-1] = momentum * s * math.sqrt(model.d)
            assert torch.linalg.vector_norm(found[j] - scale(mix)[:-1]) <= FLOAT32


@pytest.mark.parametrize("worker", [Normalized(0.3), Clipped(0.4, 0.3)], ids=str)
def test_contributions_of_own_examples_are_what_they_add_on_average(worker):
    """4,000 last uploads of noise. Their mean is off by at most 1 / sqrt(4000) (twice that is allowed for), and since
    their length and their part along the gradient vary, by one in d more.
    """
    _, model, params, x, y = own_examples("image", 1)
    s, draws = 0.1, 4000
    last = s * torch.randn(draws, model.d, generator=stream(7, "last"))
    g = per_example_gradients(model, params, x, y)
    added = contributions(worker, g.expand(draws, -1), last)
    found = contributions_of(Direct(model), params, x, y, worker, s)[0]
    off = torch.linalg.vector_norm(added.mean(0) - found)
    assert off <= worker.sensitivity * (2 / draws**0.5 + 1 / model.d)
    assert off < 0.1 * torch.linalg.vector_norm(found)


def test_an_own_example_without_a_finite_gradient_contributes_nothing():
    _, model, params, x, y = own_examples("plain")
    x[2] = math.nan
    for way in (ClosedForm.of(model), Direct(model)):
        found = contributions_of(way, params, x, y, Normalized(), 0.1)
        assert not found[2].any()
        assert found[[0, 1, 3, 4]].any(1).all()


# The tables in the docstrings, row by row.


def one_contribution(worker, gradient: list[float], last: list[float]) -> torch.Tensor:
    return contributions(worker, torch.tensor([gradient]), torch.tensor([last]))[0]


def test_a_mix_of_zero_contributes_the_zero_vector():
    assert not one_contribution(Normalized(0.5), [0.0, 0.0], [0.0, 0.0]).any()
    assert not one_contribution(Normalized(0.5), [3.0, -4.0], [-3.0, 4.0]).any()
    assert not one_contribution(Clipped(), [0.0, 0.0], [5.0, 5.0]).any()


@pytest.mark.parametrize("worker", [Normalized(0.5), Clipped(2.0, 0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mix_with_nan_or_inf_contributes_the_zero_vector(worker, bad):
    assert not one_contribution(worker, [bad, 1.0], [0.0, 0.0]).any()
    assert not one_contribution(worker, [1.0, 1.0], [0.0, bad]).any()


@pytest.mark.parametrize("worker", [Normalized(0.0), Clipped(1.0)], ids=str)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 2.5e-31])
def test_a_mix_shorter_than_the_shortest_contributes_the_zero_vector(worker, scale):
    assert not one_contribution(worker, [3 * scale, -2 * scale], [0.0, 0.0]).any()


@pytest.mark.parametrize("scale", [3e-31, 1e-30, 1e-20, 1.0, 1e20, 1e38])
def test_any_other_mix_contributes_its_direction_at_unit_length(scale):
    found = one_contribution(Normalized(0.0), [3 * scale, -2 * scale], [0.0, 0.0]).double()
    phi = torch.tensor([3 * scale, -2 * scale]).double()  # as float32 holds it
    torch.testing.assert_close(found, phi / phi.norm() * (1 - 2**-14), rtol=1e-6, atol=0)
    assert SHORTEST <= found.norm() <= 1


def test_the_mix_is_the_one_of_algorithm_1():
    found = one_contribution(Normalized(0.25), [4.0, 0.0], [0.0, 4.0]).double()
    torch.testing.assert_close(found, (1 - 2**-14) * torch.tensor([3.0, 1.0]).double() / 10**0.5, rtol=1e-6, atol=0)


def test_clipping_shortens_what_is_longer_and_leaves_what_is_shorter():
    assert torch.equal(one_contribution(Clipped(10.0), [3.0, -4.0], [9.0, 9.0]), torch.tensor([3.0, -4.0]))
    found = one_contribution(Clipped(0.5), [3.0, -4.0], [9.0, 9.0]).double()
    torch.testing.assert_close(found, (1 - 2**-14) * torch.tensor([0.3, -0.4]).double(), rtol=1e-6, atol=0)
    mixed = one_contribution(Clipped(10.0, momentum=0.5), [3.0, 0.0], [0.0, 1.0])
    assert torch.equal(mixed, torch.tensor([1.5, 0.5]))


def test_workers_state_their_sensitivity_and_refuse_nonsense():
    assert Normalized().sensitivity == 1.0
    assert Normalized().momentum == 0.1
    assert Clipped(3.0).sensitivity == 3.0
    assert Clipped().momentum == 0.0
    for bad in (-0.1, 1.0, math.nan):
        with pytest.raises(SpecError, match="momentum"):
            Normalized(bad)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SpecError, match="threshold"):
            Clipped(bad)


# Sensitivity, for any data, model and last upload.

SCALES = (0.0, 1e-30, 1e-22, 1e-20, 1e-6, 1.0, 1e6, 1e8, 1e12, 1e20)
LAST = ("zero", "random", "long", "huge", "nan", "inf", "opposite")


@st.composite
def situations(draw, *kinds):
    """(model, params, x, y, last upload) of one worker."""
    name = draw(st.sampled_from(sorted(MODELS)))
    model, shape = MODELS[name]
    rng = stream(draw(st.integers(0, 10**6)), "situation")
    params = model.initial() * draw(st.sampled_from((0.0, 1e-3, 1.0, 1.0, 1.0, 30.0)))
    examples = draw(st.integers(1, 6))
    scales = torch.tensor([draw(st.sampled_from(SCALES)) for _ in range(examples)])
    x = torch.randn(examples, *shape, generator=rng) * scales.view(-1, *[1] * len(shape))
    for bad in draw(st.lists(st.sampled_from((math.nan, math.inf, -math.inf)), max_size=2)):
        x[draw(st.integers(0, examples - 1))].view(-1)[draw(st.integers(0, 3))] = bad
    if draw(st.booleans()):
        y = torch.randint(0, 3, (examples,), generator=rng)
    else:  # everybody is right already: vanishing gradients
        y = model.outputs(params, x).nan_to_num().argmax(1)
    momentum = draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.999)))
    last = torch.randn(model.d, generator=rng) / model.d**0.5
    kind = draw(st.sampled_from(kinds or LAST))
    if kind == "opposite":
        target = per_example_gradients(model, params, x, y)[draw(st.integers(0, examples - 1))]
        off = draw(st.sampled_from((0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2)))
        noise = off * target.abs() * torch.randn(model.d, generator=rng)
        last = -(1 - momentum) / max(momentum, 0.1) * (target + noise)
    else:
        last = {"zero": 0 * last, "random": last, "long": 50 * last, "huge": 1e37 * last}.get(kind, last)
        if kind in ("nan", "inf"):
            last[draw(st.integers(0, model.d - 1))] = float(kind)
    return model, params, x, y, momentum, last[None]


def one_owner(y):
    return torch.zeros(len(y), dtype=torch.long)


def assert_bounded(way, worker, model, params, x, y, last, exactly_one: bool):
    """Every example alone, and every removal, in float64 from the float32 sums.

    An example is removed by giving it to a worker of its own with the same last upload, and those behind it to a third,
    so that every example keeps its place in the batch. In another place, or in a batch of another size, kernels may
    round the other examples' gradients differently, and where a last upload cancels a gradient to the last digit, the
    direction of what is left is rounding alone: the bound is one for given gradients.
    """
    sums, trio = sums_of(way, model), last.repeat(3, 1)
    everyone = sums(worker, params, x, y, one_owner(y), trio)
    assert everyone.isfinite().all()
    place = torch.arange(len(y))
    for j in range(len(y)):
        before, it, behind = sums(worker, params, x, y, (place >= j).long() + (place > j), trio).double()
        assert torch.linalg.vector_norm(everyone[0].double() - (before + behind)) <= worker.sensitivity
        for alone in (it, sums(worker, params, x[[j]], y[[j]], one_owner([j]), last)[0].double()):
            length = torch.linalg.vector_norm(alone)
            assert length <= worker.sensitivity
            assert not exactly_one or length == 0 or length >= SHORTEST


@pytest.mark.parametrize("way", WAYS)
@PROPERTY
@given(situations())
def test_removing_an_example_moves_a_normalized_sum_by_at_most_1(way, situation):
    model, params, x, y, momentum, last = situation
    assert_bounded(way, Normalized(momentum), model, params, x, y, last, exactly_one=True)


@pytest.mark.parametrize("way", WAYS)
@PROPERTY
@given(situations(), st.sampled_from((1e-4, 0.1, 1.0, 3.0, 1e4)))
def test_removing_an_example_moves_a_clipped_sum_by_at_most_the_threshold(way, situation, threshold):
    model, params, x, y, momentum, last = situation
    assert_bounded(way, Clipped(threshold, momentum), model, params, x, y, last, exactly_one=False)


@pytest.mark.parametrize("way", WAYS)
@PROPERTY
@given(situations("zero", "random", "long", "huge", "nan", "inf"))
def test_a_batch_of_one_example_less_moves_a_normalized_sum_by_at_most_1(way, situation):
    model, params, x, y, momentum, last = situation
    sums, worker = sums_of(way, model), Normalized(momentum)
    everyone = sums(worker, params, x, y, one_owner(y), last)
    for j in range(len(y)) if len(y) > 1 else ():
        rest = [i for i in range(len(y)) if i != j]
        without = sums(worker, params, x[rest], y[rest], one_owner(rest), last)
        assert torch.linalg.vector_norm(everyone.double() - without.double()) <= 1


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(situations(), st.integers(0, 10**6))
def test_one_workers_garbage_does_not_reach_another(way, situation, seed):
    model, params, x, y, momentum, last = situation
    rng = stream(seed, "neighbor")
    own_x, own_y = torch.randn(2, *x.shape[1:], generator=rng), torch.tensor([0, 2])
    own_last = torch.randn(1, model.d, generator=rng)
    owner = torch.tensor([0] * len(y) + [1, 1])
    both = sums_of(way, model)(
        Normalized(momentum), params, torch.cat([x, own_x]), torch.cat([y, own_y]), owner, torch.cat([last, own_last])
    )
    alone = sums_of(way, model)(Normalized(momentum), params, own_x, own_y, one_owner(own_y), own_last)
    assert torch.linalg.vector_norm(both[1].double() - alone[0].double()) <= FLOAT32 * 2


# The guards of the closed form: each is needed.


def opposite(off: float, momentum: float = 0.5):
    """One example, and a last upload that all but cancels its gradient."""
    model, shape = MODELS["plain"]
    rng = stream(4, "opposite")
    params, x, y = model.initial(), torch.randn(1, *shape, generator=rng), torch.tensor([1])
    g = per_example_gradients(model, params, x, y)
    last = -(1 - momentum) / momentum * (g + off * g.abs() * torch.randn(g.shape, generator=rng))
    return model, params, x, y, last


OFFS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


def longest(momentum: float = 0.5) -> float:
    lengths = []
    for off in OFFS:
        model, params, x, y, last = opposite(off, momentum)
        found = ClosedForm.of(model)(Normalized(momentum), params, x, y, one_owner(y), last)
        lengths.append(float(torch.linalg.vector_norm(found.double())))
    return max(lengths)


def test_cancellation_is_recomputed_and_without_that_the_bound_would_break(monkeypatch):
    assert SHORTEST <= longest() <= 1
    monkeypatch.setattr(closed_form, "CANCELLATION", 0)
    assert longest() > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1e12, 1e18, 1e20, 1e30])
def test_a_gradient_whose_square_leaves_the_range_of_floats_still_contributes_its_direction(way, scale):
    model = FlatModel(nn.Linear(2, 3, bias=False))
    x, y = torch.tensor([[0.6 * scale, -0.8 * scale]]), torch.tensor([1])
    found = sums_of(way, model)(Normalized(0.1), torch.zeros(6), x, y, one_owner(y), torch.zeros(1, 6))
    assert SHORTEST <= torch.linalg.vector_norm(found.double()) <= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("momentum", [0.0, 0.1])
@pytest.mark.parametrize("large", [1e11, 1e14, 1e20, 1e28])
@pytest.mark.parametrize("tiny", [0.0, 1e-39])
def test_a_weight_that_leaves_the_range_of_floats_with_one_factor_makes_nothing_longer(way, momentum, large, tiny):
    """Without a bias a gradient is a delta', and its weight times delta alone is 1 / |a|."""
    model = FlatModel(nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False)))
    params = model.initial()
    for name, values in model.tensors(params).items():
        values.mul_(large if name.startswith("1") else 1.0)
    x, y = torch.full((1, 4), tiny), torch.tensor([1])
    found = sums_of(way, model)(Normalized(momentum), params, x, y, one_owner(y), torch.zeros(1, model.d))
    length = torch.linalg.vector_norm(found.double())
    assert length == 0 if tiny == 0 else SHORTEST <= length <= 1


SQUARES_THAT_VANISH = math.log(2.6e-23)
"""Nine probabilities of 2.6e-23: their squares, 6.8e-46, are below half of the smallest float32 and round to zero."""


@pytest.mark.parametrize("way", WAYS)
def test_squares_below_the_smallest_float_do_not_make_a_contribution_longer(way):
    """A saturated softmax and large inputs: the gradient (1e12 x 1e-22) is fine, the square of a factor of it is not.

    A length is ||a|| ||delta||, and the square of the latter is subnormal in float32 here: one that squares in
    float32 takes the gradient for 2.1 times shorter than it is, and RANGE, which sees the product only, trusts it.
    """
    model = FlatModel(nn.Linear(4, 10))
    params = torch.zeros(model.d)
    bias = model.tensors(params)["bias"]
    bias.fill_(SQUARES_THAT_VANISH)
    bias[0], bias[1] = 0.0, math.log(2.75e-23)
    x, y = torch.tensor([[1e12, 0, 0, 0]]), torch.tensor([0])
    found = sums_of(way, model)(Normalized(), params, x, y, one_owner(y), torch.zeros(1, model.d))
    assert SHORTEST <= torch.linalg.vector_norm(found.double()) <= 1


@pytest.mark.parametrize("examples", [16, 64, 256, 1024])
@pytest.mark.parametrize("way", WAYS)
def test_rounding_of_a_large_sum_stays_within_the_margin_or_is_paid_for(way, examples):
    """Many equal examples whose gradient the last upload cancels by three quarters: large terms, a small sum."""
    model = FlatModel(nn.Linear(1, 2))
    for seed in range(6):
        rng = stream(seed, "large")
        params = torch.randn(model.d, generator=rng)
        x, y = torch.rand(1, 1, generator=rng).repeat(examples, 1), torch.zeros(examples, dtype=torch.long)
        g = per_example_gradients(model, params, x[:1], y[:1])
        for momentum in (0.1, 0.9):
            last = -0.75 * (1 - momentum) / momentum * g
            sums = sums_of(way, model)
            everyone = sums(Normalized(momentum), params, x, y, one_owner(y), last)
            without = sums(Normalized(momentum), params, x[1:], y[1:], one_owner(y[1:]), last)
            moved = torch.linalg.vector_norm(everyone.double() - without.double())
            assert moved <= (1 if examples <= 64 else rounded_sensitivity(Normalized(momentum), examples))


def sum_of_outputs(outputs, y):
    """A loss whose gradients are the inputs themselves, so that all terms of a sum can be made equal."""
    return outputs.flatten(1).sum(1)


EQUAL_TERMS = {
    "narrow": (lambda: nn.Linear(384, 1, bias=False), (384,)),
    "wide": (lambda: nn.Linear(4096, 1, bias=False), (4096,)),
    "matrix": (lambda: nn.Linear(1024, 32, bias=False), (1024,)),
    "positions": (lambda: nn.Linear(36_864, 1, bias=False), (2, 36_864)),
    "many positions": (lambda: nn.Linear(262_144, 1, bias=False), (2, 262_144)),
    "convolution": (lambda: nn.Conv2d(16, 16, 5, bias=False), (16, 8, 8)),
    "wide convolution": (lambda: nn.Conv2d(64, 64, 3, bias=False), (64, 5, 5)),
}


@pytest.mark.parametrize("name", EQUAL_TERMS)
def test_equal_terms_that_nearly_cancel_keep_the_bound(name):
    """Where rounding is worst: all terms alike, so that it goes one way, and lengths just long enough to be trusted."""
    make, shape = EQUAL_TERMS[name]
    model, rng = FlatModel(make(), sum_of_outputs), stream(3, "equal")
    edge = 2 * closed_form.CANCELLATION / (1 + closed_form.CANCELLATION)
    y, params = torch.zeros(1, dtype=torch.long), torch.zeros(model.d)
    for trial in range(60 if model.d < 20_000 else 10):
        share = (edge + 0.001 + 0.004 * float(torch.rand(1, generator=rng)), 0.9, 1.0)[0 if trial > 1 else trial + 1]
        x = torch.full((1, *shape), float(1 + torch.rand(1, generator=rng)))
        last = -9 * (1 - share) * per_example_gradients(model, params, x, y)
        found = ClosedForm.of(model)(Normalized(0.1), params, x, y, one_owner(y), last)
        assert SHORTEST <= torch.linalg.vector_norm(found.double()) <= 1


@pytest.mark.parametrize("against", [0.81, 0.7, 0.59, -1.0], ids=["much", "less", "just trusted", "along"])
@pytest.mark.parametrize("inputs", [784, 3_072, 20_000])
def test_a_wide_layer_keeps_the_bound(inputs, against):
    """Equal inputs make a long sum of products round one way; lengths must not come out too short for it."""
    model = FlatModel(nn.Linear(inputs, 2))
    params = 0.01 * torch.randn(model.d, generator=stream(1, "wide"))
    x, y = torch.full((1, inputs), 0.37), torch.zeros(1, dtype=torch.long)
    g = per_example_gradients(model, params, x, y)
    for momentum in (0.1, 0.5):
        last = -against * (1 - momentum) / momentum * g
        found = ClosedForm.of(model)(Normalized(momentum), params, x, y, one_owner(y), last)
        assert SHORTEST <= torch.linalg.vector_norm(found.double()) <= 1
