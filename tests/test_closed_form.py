"""The fast way of the workers' sums agrees with the obvious one, and gives way to it where it does not apply."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from noisegate.errors import SpecError
from noisegate.models import build_model
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import Clipped, Direct, Normalized, choose_sums, example_gradients
from noisegate.workers.closed_form import ClosedForm
from oracles import clipped, normalized
from oracles import sums as oracle_sums

FLOAT32 = 1e-5
"""Relative to the number of examples added: some hundred roundings of 6e-8, far below any wrong term."""

FLOAT64 = 1e-10
"""The same in float64, where hardly anything but a wrong formula can reach 1e-10."""

MOMENTA = (0.0, 0.1, 0.9)
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def owners(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def problem(model: FlatModel, shape: tuple[int, ...], classes: int, counts: list[int], seed: int = 1):
    """(params, x, y, owner, last uploads) at random, the last as long as the gradients are."""
    rng = stream(seed, "problem")
    like = model.initial()
    params = like + 0.1 * torch.randn(model.d, generator=rng, dtype=like.dtype)
    x = torch.randn(sum(counts), *shape, generator=rng, dtype=like.dtype)
    y = torch.randint(0, classes, (sum(counts),), generator=rng)
    last = torch.randn(len(counts), model.d, generator=rng, dtype=like.dtype) / model.d**0.5
    return params, x, y, owners(counts), last


def is_closed(chosen) -> bool:
    """Whether `choose_sums` took the closed form."""
    return isinstance(chosen, ClosedForm)


def assert_close(found, wanted, examples: int, tolerance: float):
    assert found.shape == wanted.shape
    assert torch.linalg.vector_norm(found.double() - wanted.double(), dim=1).max() <= tolerance * max(1, examples)


PAPER = {
    "fashion": ("mlp", (1, 28, 28), 10, [3, 0, 5, 1]),
    "mnist": ("cnn", (1, 28, 28), 10, [2, 0, 3]),
    "colorectal": ("residual", (3, 64, 64), 8, [1, 1]),
    "digits": ("mlp", (1, 8, 8), 10, [4, 0, 16, 1]),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_closed_form_agrees_on_the_models_of_the_paper(name):
    kind, shape, classes, counts = PAPER[name]
    model = FlatModel(build_model(kind, shape, classes, stream(1, "weights")))
    params, x, y, owner, last = problem(model, shape, classes, counts)
    # `choose_sums` takes seconds on images of this size; test_company.py has it choose on smaller ones.
    chosen = ClosedForm.of(model) if kind == "residual" else choose_sums(model, params, x, y)
    assert is_closed(chosen)
    for worker in (Normalized(0.0), Normalized(0.1), Normalized(0.9), Clipped(0.5), Clipped(50.0, momentum=0.1)):
        fast = chosen(worker, params, x, y, owner, last)
        slow = Direct(model)(worker, params, x, y, owner, last)
        assert_close(fast, slow, sum(counts) * worker.sensitivity, FLOAT32)


def test_the_digits_model_agrees_with_the_loop_over_autograd():
    module = build_model("mlp", (1, 8, 8), 10, stream(1, "weights"))
    model = FlatModel(module)
    params, x, y, owner, last = problem(model, (1, 8, 8), 10, [2, 0, 3, 1])
    for momentum in MOMENTA:
        wanted = oracle_sums(normalized, momentum, module, params, x, y, owner, last)
        for way in ("closed-form", "direct"):
            found = choose_sums(model, params, x, y, way)(Normalized(momentum), params, x, y, owner, last)
            assert_close(found, wanted, 6, FLOAT32)
    wanted = oracle_sums(clipped(0.7), 0.1, module, params, x, y, owner, last)
    assert_close(ClosedForm.of(model)(Clipped(0.7, 0.1), params, x, y, owner, last), wanted, 6, FLOAT32)


def random_images(dice: random.Random) -> tuple[nn.Module, tuple[int, ...], int]:
    """Convolutions of every kind that has a closed form, activations, normalization, pooling, then Linear layers."""
    shape, classes = (dice.choice((1, 2, 3)), dice.randint(7, 10), dice.randint(7, 10)), dice.randint(2, 4)
    parts: list[nn.Module] = []
    channels, probe = shape[0], torch.zeros(1, *shape)
    for _ in range(dice.randint(1, 3)):
        out = dice.choice((2, 4))
        conv = nn.Conv2d(
            channels,
            out,
            kernel_size=(dice.randint(1, 3), dice.randint(1, 3)),
            stride=(dice.randint(1, 2), dice.randint(1, 2)),
            padding=(dice.randint(0, 2), dice.randint(0, 2)),
            dilation=(dice.randint(1, 2), dice.randint(1, 2)),
            bias=dice.random() < 0.5,
        )
        extras = [nn.ELU(), nn.GroupNorm(2, out, affine=False), nn.Tanh(), nn.AvgPool2d(2, 1), nn.MaxPool2d(2, 1)]
        block = nn.Sequential(conv, *dice.sample(extras, dice.randint(0, 3)))
        try:
            after = block(probe)
        except RuntimeError:  # smaller than the kernel or the pool
            continue
        if isinstance(block[-1], nn.GroupNorm) and after[0, 0].numel() < 2:
            continue
        parts, channels, probe = [*parts, block], out, after.detach()
    parts.append(nn.Flatten())
    features = probe.flatten(1).shape[1]
    if dice.random() < 0.5:
        parts += [nn.Linear(features, 5, bias=dice.random() < 0.5), nn.ELU()]
        features = 5
    return nn.Sequential(*parts, nn.Linear(features, classes, bias=dice.random() < 0.5)), shape, classes


def random_sequences(dice: random.Random) -> tuple[nn.Module, tuple[int, ...], int]:
    """Linear layers over sequences (3-D input), or grids of them (4-D), then over their average or all of them."""
    grid, width, classes = (dice.choice(((3,), (1,), (4,), (2, 3))), dice.randint(1, 4), dice.randint(2, 4))
    parts: list[nn.Module] = []
    features = width
    for _ in range(dice.randint(1, 2)):
        out = dice.randint(2, 5)
        parts += [nn.Linear(features, out, bias=dice.random() < 0.5), dice.choice((nn.ELU(), nn.Tanh(), nn.Identity()))]
        features = out
    parts += [nn.Flatten(), nn.Linear(features * torch.Size(grid).numel(), classes, bias=dice.random() < 0.5)]
    return nn.Sequential(*parts), (*grid, width), classes


@PROPERTY
@given(
    st.randoms(use_true_random=False),
    st.sampled_from((random_images, random_sequences)),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from(MOMENTA),
    st.sampled_from((None, 0.3)),
)
def test_the_closed_form_agrees_on_random_models_and_batches(dice, make, counts, momentum, threshold):
    with torch.random.fork_rng():
        torch.manual_seed(dice.randint(0, 2**31))
        module, shape, classes = make(dice)
    model = FlatModel(module.double())
    worker = Normalized(momentum) if threshold is None else Clipped(threshold, momentum)
    params, x, y, owner, last = problem(model, shape, classes, counts, seed=dice.randint(0, 99))
    closed = ClosedForm.of(model)
    assert closed is not None
    assert sum(counts) == 0 or closed.trace(params, x, y) is not None
    fast = closed(worker, params, x, y, owner, last)
    if sum(counts):
        assert_close(fast, Direct(model)(worker, params, x, y, owner, last), sum(counts), FLOAT64)
    assert not fast[[i for i, count in enumerate(counts) if count == 0]].any()


@PROPERTY
@given(st.randoms(use_true_random=False))
def test_both_ways_to_the_gradients_of_a_convolution_agree_with_autograd(dice):
    kernel = dice.randint(1, 3), dice.randint(1, 3)
    conv = nn.Conv2d(
        dice.randint(1, 3),
        dice.randint(1, 4),
        kernel,
        stride=(dice.randint(1, 3), dice.randint(1, 3)),
        padding=(dice.randint(0, 2), dice.randint(0, 2)),
        dilation=(dice.randint(1, 2), dice.randint(1, 2)),
    ).double()
    rng = stream(dice.randint(0, 99), "convolution")
    a = torch.randn(3, conv.in_channels, dice.randint(5, 9), dice.randint(5, 9), generator=rng, dtype=torch.float64)
    delta = torch.randn(conv(a).shape, generator=rng, dtype=torch.float64)
    for by_convolution in (True, False):
        weight, bias = example_gradients._gradients(conv, a, delta, by_convolution)
        for j in range(3):
            wanted = torch.autograd.grad((conv(a[j : j + 1]) * delta[j]).sum(), [conv.weight, conv.bias])
            torch.testing.assert_close(weight[j], wanted[0].flatten(), rtol=FLOAT64, atol=FLOAT64)
            torch.testing.assert_close(bias[j], wanted[1], rtol=FLOAT64, atol=FLOAT64)


def test_blocks_of_examples_change_nothing(monkeypatch):
    model = FlatModel(build_model("cnn", (1, 16, 16), 4, stream(1, "weights")))
    params, x, y, owner, last = problem(model, (1, 16, 16), 4, [3, 0, 4])
    whole = ClosedForm.of(model)(Normalized(), params, x, y, owner, last)
    monkeypatch.setitem(example_gradients.BLOCK, "cpu", 8000)  # two or fewer examples at a time
    assert_close(ClosedForm.of(model)(Normalized(), params, x, y, owner, last), whole, 7, FLOAT32)


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_no_examples_at_all_give_zeros(name):
    model = FlatModel(build_model(name, (1, 16, 16), 3, stream(1, "weights")))
    params, x, y, owner, last = problem(model, (1, 16, 16), 3, [0, 0])
    for way in (ClosedForm.of(model), lambda worker, *rest: Direct(model)(worker, *rest)):
        assert torch.equal(way(Normalized(), params, x, y, owner, last), torch.zeros(2, model.d))


# Models that have no closed form.


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


class Functional(nn.Module):
    """A weight that is used without calling its layer; `also` calls the layer besides."""

    def __init__(self, also: bool):
        super().__init__()
        self.also, self.layer, self.last = also, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.tanh(functional.linear(x, self.layer.weight, self.layer.bias))
        return self.last(self.layer(hidden) if self.also else hidden)


class Mixing(nn.Module):
    """Examples see each other: the batch mean is taken off."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.tanh(hidden - 0.5 * hidden.mean(0, keepdim=True)))


class Spare(nn.Module):
    """A layer that is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.spare = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.first(x)


class Own(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.factor * self.layer(x)


class Folded(nn.Module):
    """Positions are folded into the batch, so that a Linear sees more rows than there are examples."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x.reshape(-1, 3))).reshape(len(x), 8))


class TimeFirst(nn.Module):
    """Positions come before examples."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x):
        steps = x.reshape(-1, 2, 3).transpose(0, 1)
        return self.last(torch.tanh(self.inner(steps)).transpose(0, 1).flatten(1))


class Keyword(nn.Module):
    """A layer that is called with its input as a keyword."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(input=x)


def instance():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(6, 3))


def grouped():
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(12, 3))


def circular():
    conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), conv, nn.Flatten(), nn.Linear(12, 3))


def same():
    conv = nn.Conv2d(2, 4, 3, padding="same")
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), conv, nn.Flatten(), nn.Linear(12, 3))


WITHOUT = {
    "prelu": lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 3)),
    "instance": instance,
    "tied": Tied,
    "twice": Twice,
    "functional": lambda: Functional(also=False),
    "functional and called": lambda: Functional(also=True),
    "in place": lambda: nn.Sequential(nn.Linear(6, 4), nn.ELU(inplace=True), nn.Linear(4, 3)),
    "in place, later": lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 3)),
    "spare": Spare,
    "own": Own,
    "grouped": grouped,
    "circular": circular,
    "same": same,
    "folded": Folded,
    "time first": TimeFirst,
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_a_closed_form_goes_the_direct_way_and_is_right(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = WITHOUT[name]()
    model = FlatModel(module)
    params, x, y, owner, last = problem(model, (6,), 3, [2, 0, 3])
    chosen = choose_sums(model, params, x, y)
    assert not is_closed(chosen)
    wanted = oracle_sums(normalized, 0.1, module, params, x, y, owner, last)
    assert_close(chosen(Normalized(0.1), params, x, y, owner, last), wanted, 5, FLOAT32)
    with pytest.raises(SpecError, match="closed-form"):
        choose_sums(model, params, x, y, "closed-form")


@pytest.mark.parametrize("way", ["auto", "closed-form", "direct"])
def test_a_model_that_mixes_examples_is_refused_whichever_way(way):
    model = FlatModel(Mixing())
    params, x, y, _, _ = problem(model, (6,), 3, [2, 0, 3])
    with pytest.raises(SpecError, match="mixes the examples of a batch"):
        choose_sums(model, params, x, y, way)


def test_a_layer_called_by_keyword_is_right_either_way():
    module = Keyword()
    model = FlatModel(module)
    params, x, y, owner, last = problem(model, (6,), 3, [2, 0, 3])
    found = choose_sums(model, params, x, y)(Normalized(0.1), params, x, y, owner, last)
    assert_close(found, oracle_sums(normalized, 0.1, module, params, x, y, owner, last), 5, FLOAT32)


def test_direct_can_be_asked_for_and_nonsense_cannot():
    model = FlatModel(nn.Linear(6, 3))
    params, x, y, _, _ = problem(model, (6,), 3, [2, 3])
    assert not is_closed(choose_sums(model, params, x, y, "direct"))
    assert is_closed(choose_sums(model, params, x, y, "closed-form"))
    with pytest.raises(SpecError, match="closed-from"):
        choose_sums(model, params, x, y, "closed-from")


class Moody(nn.Module):
    """Calls its layer twice once its mood has changed."""

    def __init__(self):
        super().__init__()
        self.changed = False
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.layer(x)
        return self.last(self.layer(hidden) if self.changed else hidden)


def test_a_model_that_changes_its_calls_after_the_probe_goes_the_direct_way():
    model = FlatModel(Moody())
    params, x, y, owner, last = problem(model, (6,), 3, [2, 3])
    chosen = choose_sums(model, params, x, y)
    assert is_closed(chosen)
    model.module.changed = True
    found = chosen(Normalized(), params, x, y, owner, last)
    assert torch.equal(found, Direct(model)(Normalized(), params, x, y, owner, last))


def test_the_callers_module_and_arguments_are_left_alone():
    module = build_model("mlp", (1, 8, 8), 10, stream(1, "weights"))
    before = [parameter.clone() for parameter in module.parameters()]
    model = FlatModel(module)
    given_values = problem(model, (1, 8, 8), 10, [2, 0, 3])
    copies = [value.clone() for value in given_values]
    for way in ("closed-form", "direct"):
        found = choose_sums(model, *given_values[:3], way)(Normalized(), *given_values)
        assert not found.requires_grad
    assert all(torch.equal(one, other) for one, other in zip(given_values, copies, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), before, strict=True))
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not any(layer._forward_hooks for layer in model.module.modules())


@pytest.mark.parametrize("probe", ["equal examples", "gradients of zero"])
def test_a_probe_that_shows_nothing_does_not_let_mixing_through(probe):
    model = FlatModel(Mixing())
    params = model.initial()
    x, y = torch.randn(4, 6, generator=stream(2, "probe-test")), torch.zeros(4, dtype=torch.long)
    if probe == "equal examples":
        x = x[:1].repeat(4, 1)
    else:
        params[-3:] = torch.tensor([200.0, 0.0, 0.0])  # so sure of the label that nothing is left to learn
    with pytest.raises(SpecError, match="examples may not mix"):
        choose_sums(model, params, x, y, way="closed-form")
