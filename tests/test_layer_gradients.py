"""Per-example gradients of GroupNorm, LayerNorm and Embedding: the closed form against autograd, example by example."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import Clipped, Direct, Normalized, choose_sums, example_gradients
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.layers import Groups, Layer, Spread
from noisegate.workers.lookups import Lookup, tables
from oracles import clipped, normalized
from oracles import sums as oracle_sums

FLOAT64 = 1e-10
"""Relative: hardly anything but a wrong formula can reach it in float64."""

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def alone(module: nn.Module, a: torch.Tensor, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """(E, ...) by name: the gradient of every example's <output, delta>, by plain autograd, one after the other."""
    named = dict(module.named_parameters())
    found = {name: [] for name in named}
    for one, sent in zip(a, delta, strict=True):
        total = (module(one[None]) * sent[None]).sum()
        for name, gradient in zip(named, torch.autograd.grad(total, list(named.values())), strict=True):
            found[name].append(gradient.flatten())
    return {name: torch.stack(each) for name, each in found.items()}


def a_layer(module: nn.Module) -> Layer:
    size = module.weight.numel()
    bias = None if getattr(module, "bias", None) is None else slice(size, size + module.bias.numel())
    return Layer(module, slice(0, size), bias)


def shuffled(module: nn.Module, rng: torch.Generator) -> nn.Module:
    """In float64, with weights that are nowhere 0 or 1."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
    return module


def a_normalization(dice: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    eps = dice.choice((1e-5, 1e-2, 1.0))
    positions = dice.choice(((), (1,), (5,), (2, 3), (2, 1, 3)))
    if dice.random() < 0.5:
        groups, each = dice.randint(1, 3), dice.randint(2, 3)
        return nn.GroupNorm(groups, groups * each, eps), (groups * each, *positions)
    shape = dice.choice(((4,), (3, 2), (2, 2, 2)))
    return nn.LayerNorm(shape, eps, bias=dice.random() < 0.5), (*positions, *shape)


@PROPERTY
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_normalization_layers_agree_with_autograd(dice, count):
    rng = stream(dice.randint(0, 999), "layer")
    module, shape = a_normalization(dice)
    module = shuffled(module, rng)
    a = 3 * torch.randn(count, *shape, generator=rng, dtype=torch.float64) + 1
    delta = torch.randn(a.shape, generator=rng, dtype=torch.float64)
    weight, bias = example_gradients.gradients(a_layer(module), a, delta)
    wanted = alone(module, a, delta)
    torch.testing.assert_close(weight, wanted["weight"], rtol=FLOAT64, atol=FLOAT64)
    if "bias" in wanted:
        torch.testing.assert_close(bias, wanted["bias"], rtol=FLOAT64, atol=FLOAT64)


@PROPERTY
@given(
    st.randoms(use_true_random=False),
    st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(sum),
    st.sampled_from(((), (1,), (7,), (2, 3))),
    st.sampled_from((None, 0, 2)),
)
def test_embeddings_agree_with_autograd(dice, counts, positions, padding):
    """Lengths, inner products, sums and whole tables; with few rows, so that most positions repeat an index."""
    rng = stream(dice.randint(0, 999), "layer")
    module = shuffled(nn.Embedding(3, 2, padding_idx=padding), rng)
    layer = a_layer(module)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    a = torch.randint(0, 3, (len(owner), *positions), generator=rng)
    delta = torch.randn(*a.shape, 2, generator=rng, dtype=torch.float64)
    wanted = alone(module, a, delta)["weight"]
    torch.testing.assert_close(tables(layer, a, delta), wanted)

    groups = Groups.of(owner, len(counts))
    vectors = torch.randn(len(counts), 6, generator=rng, dtype=torch.float64)
    weights = torch.randn(len(owner), generator=rng, dtype=torch.float64)
    keep = torch.rand(len(owner), generator=rng) < 0.7
    for part in (Lookup.of(layer, a, delta, groups), Spread(layer, wanted, wanted[:, :0], groups)):
        torch.testing.assert_close(part.squares(), wanted.square().sum(1))
        torch.testing.assert_close(part.inner(vectors), (wanted * vectors[owner]).sum(1))
        into, kept = vectors.clone(), vectors.clone()
        part.add(weights, into)
        torch.testing.assert_close(into - vectors, groups.totals(weights[:, None] * wanted))
        part.without(keep).add(weights, kept)
        torch.testing.assert_close(kept - vectors, groups.totals((keep * weights)[:, None] * wanted))


def test_a_row_that_is_looked_up_twice_is_as_long_as_what_is_added():
    """Two positions that all but cancel: a length from their products would be rounding."""
    module = nn.Embedding(3, 2)
    delta = torch.tensor([[[1e4, 1.0], [-1e4, 1e-3]]])
    part = Lookup.of(a_layer(module), torch.tensor([[1, 1]]), delta, Groups.of(torch.tensor([0]), 1))
    into = torch.zeros(1, 6)
    part.add(torch.ones(1), into)
    assert float(part.squares().sqrt()) == pytest.approx(float(into.norm()), rel=1e-6)
    assert float(into.norm()) == pytest.approx(1.001, rel=1e-3)


class Tokens(nn.Module):
    """Embedding, LayerNorm, Linear over positions, and a mean: what a small model of text is."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=padding)
        self.norm, self.body, self.head = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.norm(self.table(x.long())))).mean(1))


class Block(nn.Module):
    """A residual block with GroupNorm before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.last(self.second(x)))
        return self.head(x.mean((2, 3)))


WHOLE = {
    "tokens": (Tokens, (6,)),
    "padded tokens": (lambda: Tokens(padding=0), (6,)),
    "block": (Block, (2, 5, 5)),
    "flat": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)),
        (6,),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9])
def test_whole_models_take_the_fast_way_and_agree_with_the_loop_over_autograd(name, momentum):
    make, shape = WHOLE[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = make()
    model, rng, owner = FlatModel(module), stream(1, "whole"), torch.tensor([0, 0, 0, 2, 2, 3])
    x, y = torch.randn(6, *shape, generator=rng), torch.randint(0, 3, (6,), generator=rng)
    if "tokens" in name:
        x = torch.randint(0, 7, x.shape, generator=rng).float()
    params = model.initial() + 0.1 * torch.randn(model.d, generator=rng)
    last = torch.randn(4, model.d, generator=rng) / model.d**0.5
    chosen = choose_sums(model, params, x, y)
    assert isinstance(chosen, ClosedForm)
    for worker, scale in ((Normalized(momentum), normalized), (Clipped(0.5, momentum), clipped(0.5))):
        wanted = oracle_sums(scale, momentum, module, params, x, y, owner, last)
        for way in (chosen, Direct(model)):
            found = way(worker, params, x, y, owner, last)
            assert torch.linalg.vector_norm(found.double() - wanted, dim=1).max() <= 6e-5
    floats = chosen.floats(x, y)
    assert floats > x[0].numel()


@PROPERTY
@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum))
def test_random_models_with_normalization_agree_with_the_direct_way(dice, counts):
    channels = dice.choice((2, 4))
    parts: list[nn.Module] = [nn.Conv2d(1, channels, 3, bias=dice.random() < 0.5)]
    for _ in range(dice.randint(1, 3)):
        parts.append(
            dice.choice((nn.GroupNorm(2, channels), nn.GroupNorm(1, channels), nn.LayerNorm((4, 4)), nn.ELU()))
        )
        if dice.random() < 0.5:
            parts.append(nn.Conv2d(channels, channels, 3, padding=1))
    parts += [nn.Flatten(), nn.LayerNorm(16 * channels), nn.Linear(16 * channels, 3)]
    rng = stream(dice.randint(0, 999), "model")
    module = shuffled(nn.Sequential(*parts), rng)
    model, owner = FlatModel(module), torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = torch.randn(len(owner), 1, 6, 6, generator=rng, dtype=torch.float64)
    y = torch.randint(0, 3, (len(owner),), generator=rng)
    last = torch.randn(len(counts), model.d, generator=rng, dtype=torch.float64)
    closed, worker = ClosedForm.of(model), Normalized(dice.choice((0.0, 0.1, 0.9)))
    assert closed is not None
    assert closed.trace(model.initial(), x, y) is not None
    fast = closed(worker, model.initial(), x, y, owner, last)
    slow = Direct(model)(worker, model.initial(), x, y, owner, last)
    assert torch.linalg.vector_norm(fast - slow, dim=1).max() <= FLOAT64 * len(owner)


@pytest.mark.parametrize(
    "layer",
    [nn.Embedding(7, 4, max_norm=1.0), nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Embedding(7, 4, sparse=True)],
)
def test_embeddings_that_do_more_than_look_up_have_no_closed_form(layer):
    module = Tokens()
    module.table = layer
    assert ClosedForm.of(FlatModel(module)) is None
