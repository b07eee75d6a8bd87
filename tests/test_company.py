"""Models and losses that mix examples, or have no finite loss, are stopped; all others are left alone."""

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from noisegate import Compute, Dataset, PrivacyError, Spec, SpecError, run
from noisegate.models import MODELS, build_model
from noisegate.runs.setup import prepare
from noisegate.simulate import Training, start
from noisegate.simulate import recheck as looks
from noisegate.simulate.recheck import check_finite, recheck
from noisegate.streams import stream
from noisegate.vectors import FlatModel, cross_entropy
from noisegate.workers import Company, Direct, Normalized, choose_sums, company, sight
from noisegate.workers.closed_form import ClosedForm

CPU = Compute(device="cpu")
CLASSES, FEATURES = 3, 6
SPEC = Spec(
    workers=8,
    byzantine=0.0,
    aggregator="mean",
    rounds=4,
    batch=16,
    rate=0.2,
    sigma=4.0,
    sigma_base=4.0,
    accountant="rdp",
)
MIXES = "mixes the examples of a batch"
ALONE = "batch of one"


def data(each: int = 100) -> Dataset:
    """Sorted by class, so that the first examples are all of one."""
    rng = stream(1, "sorted")
    y = torch.arange(CLASSES).repeat_interleave(each)
    x = torch.randn(len(y), FEATURES, generator=rng) + functional.one_hot(y, FEATURES)
    return Dataset("sorted", x, y, x[::7].clone(), y[::7].clone(), CLASSES)


def network(*, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 8, bias=bias), nn.ELU(), nn.Linear(8, CLASSES, bias=bias))


# Losses that mix.


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Supervised contrastive (Khosla et al., 2020); 0 for an example without a partner."""
    z = functional.normalize(outputs, dim=1)
    others = ~torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / 0.5).masked_fill(~others, -1e9)
    same = (targets[:, None] == targets[None]) & others
    logp = logits - logits.logsumexp(1, keepdim=True)
    return -(logp * same).sum(1) / same.sum(1).clamp(min=1)


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy weighted by how rare a label is in the batch."""
    rarity = len(targets) / (targets[:, None] == targets[None]).sum(1)
    return rarity / CLASSES * cross_entropy(outputs, targets)


def in_batch_negatives(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each example against all others of the batch."""
    return cross_entropy(cross_entropy(outputs, targets)[None] - outputs @ outputs.T, torch.arange(len(outputs)))


def by_positives(outputs: Tensor, targets: Tensor) -> Tensor:
    """As detectors do: divided by the number of positives."""
    return cross_entropy(outputs, targets) / (targets > 0).sum().clamp(min=1)


def ranking(outputs: Tensor, targets: Tensor) -> Tensor:
    """An example of a higher label should score higher than any of a lower one."""
    score = outputs[:, 0]
    wrong = functional.softplus(score[None] - score[:, None]) * (targets[:, None] > targets[None])
    return wrong.sum(1) + score**2


def with_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Everyone's loss is partly the mean."""
    losses = cross_entropy(outputs, targets)
    return 0.9 * losses + 0.1 * losses.mean()


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Online hard example mining: the better half counts nothing."""
    losses = cross_entropy(outputs, targets)
    return losses * (losses >= losses.median())


LOSSES = [contrastive, balanced, in_batch_negatives, by_positives, ranking, with_mean, hardest]


# Modules that mix.


class Mixing(nn.Module):
    """Moves every example toward the batch's mean, in batches larger than `above`."""

    def __init__(self, above: int = 1, closed: bool = True) -> None:
        super().__init__()
        self.above, self.inner, self.norm = above, network(), nn.Identity() if closed else nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner[1](self.inner[0](self.norm(x)))
        return self.inner[2](hidden - hidden.mean(0) if len(x) > self.above else hidden)


class Mixup(nn.Module):
    """Each example with some of its neighbor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(0.9 * x + 0.1 * x.roll(1, 0))


class Standardized(nn.Module):
    """BatchNorm in other words: NaN for one example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        off = out - out.mean(0)
        return off / (off.square().sum(0) / (len(x) - 1)).sqrt()


class Attentive(nn.Module):
    """Attention over the batch in place of positions: a wrong batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(FEATURES, 2), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, None]  # (batch, 1, features), read as (positions, batch, features)
        return self.last(self.attention(steps, steps, steps, need_weights=True)[0][:, 0])


MODULES = {
    "mean": Mixing,
    "above four": lambda: Mixing(above=4),
    "above a hundred": lambda: Mixing(above=100),
    "without closed form": lambda: Mixing(closed=False),
    "mixup": Mixup,
    "standardized": Standardized,
    "attention over the batch": Attentive,
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("way", ["closed form", "direct"])
def test_a_loss_that_mixes_is_refused(loss, way):
    module = network() if way == "closed form" else nn.Sequential(nn.LayerNorm(FEATURES), network())
    with pytest.raises(SpecError, match=MIXES):
        run(SPEC, dataset=data(), model=module, loss=loss, compute=CPU)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_mixes_is_refused(name):
    with pytest.raises(SpecError, match=MIXES):
        run(SPEC, dataset=data(), model=MODULES[name](), compute=CPU)


# What mixes beside an extreme example only, which nobody has.


def scaled(values: Tensor) -> Tensor:
    """Into a range, by the largest number of the whole batch."""
    return values / (values.abs().max() / 50).clamp(min=1)


def of_scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scaled(outputs), targets)


class Scaled(nn.Module):
    def __init__(self, closed: bool = True) -> None:
        super().__init__()
        self.inner, self.norm = network(), nn.Identity() if closed else nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(scaled(x)))


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["loss", "module", "module without closed form"])
def test_what_mixes_beside_extreme_examples_is_refused_though_there_are_none(kind, seed):
    pool = data()
    module = network() if kind == "loss" else Scaled(closed=kind == "module")
    assert float(pool.x.abs().max()) < 10
    with pytest.raises(SpecError, match=MIXES):
        prepare(replace(SPEC, seed=seed), CPU, pool, module, of_scaled if kind == "loss" else cross_entropy)


def most_moved(model: FlatModel) -> float:
    """How far the last example moves the closed form's sum, without the check. The bound is 1."""
    pool, params, worker = data(), model.initial(), Normalized(0.0)
    closed, last = ClosedForm.of(model), params.new_zeros(1, model.d)
    moved = []
    for seed in range(10):
        for factor in (1.0, 1e2, 1e4, 1e6):
            numbers = torch.randint(0, len(pool.y), (16,), generator=stream(seed, "sixteen"))
            x, y = pool.x[numbers].clone(), pool.y[numbers]
            x[-1] *= factor
            with_it, without = (
                closed(worker, params, x[:size], y[:size], torch.zeros(size, dtype=torch.int64), last)
                for size in (16, 15)
            )
            moved.append(float((with_it - without).norm()))
    return max(moved)


@pytest.mark.parametrize("loss", [*LOSSES, of_scaled], ids=lambda loss: loss.__name__)
def test_a_loss_that_mixes_moves_a_sum_by_no_more_than_the_bound(loss):
    """In the closed form too every loss is of one example's output, even if nobody had refused it."""
    assert most_moved(FlatModel(network(), loss)) <= 1


@pytest.mark.parametrize("module", [Mixing, Scaled])
def test_how_far_one_example_moves_a_sum_in_a_module_that_mixes(module):
    """Why it is refused."""
    assert most_moved(FlatModel(module())) > 2


@pytest.mark.parametrize("name", ["smoothed", "weighted", "focal", "hinge", "squares", "large"])
def test_losses_of_single_rows_are_those_of_all_at_once(name):
    model, pool = FlatModel(network(), HARMLESS_LOSSES[name]), data()
    said = model.outputs(model.initial(), pool.x).requires_grad_()
    alone, together = model.own_losses(said, pool.y), model.loss(said, pool.y)
    torch.testing.assert_close(alone, together)
    torch.testing.assert_close(*(torch.autograd.grad(losses.sum(), said)[0] for losses in (alone, together)))


class Exploding(nn.Module):
    """Leaves float32 for inputs of some hundreds, and float64 for some thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.exp())


class Steep(nn.Module):
    """Divides one number that overflows by another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 1e-3 * x**9 / (1 + x**8))


@pytest.mark.parametrize("module", [Exploding, Steep])
def test_extreme_company_that_overflows_is_held_against_nobody(module):
    for seed in range(4):
        found = prepare(replace(SPEC, seed=seed), CPU, data(), module()).federation.mechanism.sums
        assert isinstance(found, ClosedForm)


def test_the_size_of_the_company_is_that_of_a_round():
    """A module that mixes in larger batches than there ever are mixes nothing."""
    largest = Company(batch=16, workers=8).sizes(ClosedForm.of(FlatModel(network())), data().x, data().y)[-1]
    assert largest == 8 * 16 + 4 * math.isqrt(8 * 16)
    prepare(SPEC, CPU, data(), Mixing(above=largest))
    with pytest.raises(SpecError, match=MIXES):
        prepare(SPEC, CPU, data(), Mixing(above=largest - 1))


class Counting(nn.Module):
    """Says more each time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


def test_a_module_that_keeps_state_is_refused():
    with pytest.raises(SpecError, match="called again"):
        run(SPEC, dataset=data(), model=Counting(), compute=CPU)


class Remembering(nn.Module):
    """Keeps an example in a buffer, which says nothing in its outputs. patience: calls that it lets pass first."""

    def __init__(self, *, persistent: bool = True, patience: int = 0) -> None:
        super().__init__()
        self.inner, self.patience = network(), patience
        self.register_buffer("seen", torch.zeros(FEATURES), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.patience -= 1
        if self.patience < 0:
            self.seen = x.detach()[-1]
        return self.inner(x)


class Overwriting(Remembering):
    """The same, in the memory that the buffer has."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):  # torch.func forbids it while gradients are taken
            self.seen.data.copy_(x.detach()[-1])
        return self.inner(x)


@pytest.mark.parametrize("module", [Remembering(), Overwriting()])
def test_a_module_that_remembers_an_example_is_refused(module):
    # A buffer is in the trained model, and would be published with it.
    with pytest.raises(PrivacyError, match="changes 'seen' when it is called"):
        run(SPEC, dataset=data(), model=module, compute=CPU)


def test_a_module_that_remembers_an_example_later_leaves_no_model():
    model = prepare(SPEC, CPU, data(), Remembering(patience=10**9)).federation.mechanism.model
    assert torch.equal(model.kept()["seen"], torch.zeros(FEATURES))
    model.module.patience = 0
    model.outputs(model.initial(), data().x[:1])
    for hands_out in (model.kept, lambda: model.state(model.initial())):
        with pytest.raises(PrivacyError, match="without noise"):
            hands_out()


def test_a_mere_cache_is_no_part_of_the_model_and_welcome():
    found = run(SPEC, dataset=data(), model=Remembering(persistent=False), compute=CPU)
    assert found.frozen == 0


class Squeezed(nn.Module):
    """Loses the batch's dimension if there is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).squeeze()


class Lonely(nn.Module):
    """Another network for one example, as a squeeze that broadcasts would give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if len(x) == 1 else 1.0)


@pytest.mark.parametrize("module", [Squeezed, Lonely])
def test_a_module_that_treats_one_example_otherwise_is_told_so(module):
    with pytest.raises(SpecError, match=ALONE):
        run(SPEC, dataset=data(), model=module(), compute=CPU)


class Writing(nn.Module):
    """Centers its inputs where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sub_(0.5))


def test_a_module_that_writes_to_the_data_is_refused_and_has_not():
    pool = data()
    with pytest.raises(SpecError, match="writes to its inputs"):
        run(SPEC, dataset=pool, model=Writing(), compute=CPU)
    assert torch.equal(pool.x, data().x)


class Smoothed(nn.Module):
    """A loss in units of its own moving average: the examples of one call change the next."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs, targets)
        self.average = 0.99 * self.average + 0.01 * losses.detach().mean()
        return losses / self.average


def test_a_loss_that_keeps_a_moving_average_is_refused():
    with pytest.raises(SpecError, match="called again"):
        run(SPEC, dataset=data(), model=network(), loss=Smoothed(), compute=CPU)


class Crowded(nn.Module):
    """Cannot take many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise RuntimeError("too many\nof them")
        return self.inner(x)


def test_a_module_that_fails_in_a_batch_is_told_so_in_one_line():
    with pytest.raises(SpecError, match=r"fails in a batch of 16 examples \(too many\)"):
        run(SPEC, dataset=data(), model=Crowded(), compute=CPU)


# What must not be refused.


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return (1 - (-losses).exp()) ** 2 * losses


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    own = outputs.gather(1, targets[:, None])
    return (1 + outputs - own).clamp(min=0).sum(1) - 1


HARMLESS_LOSSES = {
    "smoothed": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 20.0, 0.01])),
    "focal": focal,
    "hinge": hinge,
    "squares": lambda outputs, targets: ((outputs - torch.eye(CLASSES)[targets]) ** 2).sum(1),
    "large": lambda outputs, targets: 1e6 * cross_entropy(outputs, targets) + 1e6,
}


@pytest.mark.parametrize("name", HARMLESS_LOSSES)
def test_losses_of_single_examples_are_welcome(name):
    setup = prepare(SPEC, CPU, data(), network(), HARMLESS_LOSSES[name])
    assert isinstance(setup.federation.mechanism.sums, ClosedForm)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(2, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 5)
        for step in x.view(len(x), 3, 2).unbind(1):
            h, c = self.cell(step, (h, c))
        return self.last(h)


class Reading(nn.Module):
    """Attention over the positions of one example."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, CLASSES)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x.long())
        return self.last(self.attention(words, words, words, need_weights=True)[0].mean(1))


class Root(nn.Module):
    """NaN where an input is negative, as only shaken ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sqrt())


class Picky(nn.Module):
    """Knows nine words, given as eighths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words((8 * x).long()).mean(1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


def pooled() -> nn.Module:
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.GroupNorm(2, 4), nn.MaxPool2d((1, 2), 1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers, nn.Linear(4, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(0.0))


HARMLESS_MODULES = {
    "relu": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "normed": normed,
    "pooled": pooled,
    "recurrent": Recurrent,
    "reading": Reading,
    "root": Root,
    "picky": Picky,
    "dropping": dropping,
}
CLOSED = {"relu", "normed", "pooled", "root", "picky", "dropping"}


def harmless_data(name: str) -> Dataset:
    found = data()
    if name in ("reading", "picky"):  # the numbers of words
        words = torch.randint(0, 9, found.x.shape, generator=stream(1, "words")) / (8 if name == "picky" else 1)
        return replace(found, x=words, x_test=words[: len(found.y_test)])
    return replace(found, x=found.x.abs(), x_test=found.x_test.abs()) if name == "root" else found


@pytest.mark.parametrize("name", HARMLESS_MODULES)
def test_modules_that_treat_examples_alone_are_welcome(name):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = HARMLESS_MODULES[name]()
    found = run(SPEC, dataset=harmless_data(name), model=module, compute=CPU)
    assert found.rounds == 4
    sums = prepare(SPEC, CPU, harmless_data(name), module).federation.mechanism.sums
    assert isinstance(sums, ClosedForm if name in CLOSED else Direct)


SHAPES = {
    "mlp": ((1, 8, 8), (5,)),
    "cnn": ((1, 28, 28), (3, 17, 16)),
    "residual": ((3, 9, 9), (1, 16, 16)),
    "linear": ((9, 4, 4), (5,)),
}


@pytest.mark.parametrize(("name", "seed"), [*((name, 1) for name in MODELS), ("mlp", 2), ("mlp", 3), ("cnn", 2)])
def test_the_models_of_the_catalog_keep_their_closed_form(name, seed):
    for shape in SHAPES[name]:
        model = FlatModel(build_model(name, shape, 10, stream(seed, "weights")))
        # Images with large even areas, where maxima are tied.
        x = torch.randn(40, *shape, generator=stream(seed, "images")).clamp(min=0.3)
        y = torch.randint(0, 10, (40,), generator=stream(seed, "labels"))
        many = Company(batch=8, workers=3, seed=seed)
        assert isinstance(choose_sums(model, model.initial(), x, y, company=many), ClosedForm)


def test_zero_weights_and_one_label_do_not_cost_the_closed_form():
    """Gradients of zero at the start say nothing, and nothing is held against them."""
    module = network()
    for value in module.parameters():
        nn.init.zeros_(value)
    model, pool = FlatModel(module), data()
    assert isinstance(choose_sums(model, model.initial(), pool.x[:4], pool.y[:4]), ClosedForm)


class Jagged(nn.Module):
    """As if a maximum turned another way by rounding: wrong in float32, in batches, for few examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out * 1.01 if x.dtype == torch.float32 and len(x) > 1 else out


def test_rounding_is_looked_at_again_in_float64(monkeypatch):
    asked = []
    again = company.look_again
    monkeypatch.setattr(company, "look_again", lambda *given: asked.append(1) or again(*given))
    assert isinstance(prepare(SPEC, CPU, data(), Jagged()).federation.mechanism.sums, ClosedForm)
    assert asked


def only_float32(outputs: Tensor, targets: Tensor) -> Tensor:
    """Knows no float64, and its constant cannot be converted."""
    return cross_entropy(outputs @ torch.eye(CLASSES), targets)


def test_what_knows_float32_only_is_judged_in_it():
    assert isinstance(prepare(SPEC, CPU, data(), network(), only_float32).federation.mechanism.sums, ClosedForm)
    mixed = FlatModel(Mixing(), only_float32)
    with pytest.raises(RuntimeError):
        sight.doubled(mixed).losses(mixed.initial().double(), data().x.double(), data().y)
    with pytest.raises(SpecError, match=MIXES):
        prepare(SPEC, CPU, data(), Mixing(), only_float32)


# During training.


class Later(nn.Module):
    """Mixes, or gives no number, once it has been told to."""

    def __init__(self, closed: bool = True) -> None:
        super().__init__()
        self.inner, self.norm = network(), nn.Identity() if closed else nn.LayerNorm(FEATURES)
        self.mood = "well"

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.norm(scaled(x) if self.mood == "scaling" else x))
        if self.mood == "mixing":
            return out - 0.1 * out.mean(0)
        return (out - 1e9).sqrt() if self.mood == "broken" else out


def training(module: nn.Module, loss=cross_entropy, rounds: int = 20, every: int = 5, **changes) -> Training:
    setup = prepare(replace(SPEC, rounds=rounds, evaluate_every=every, **changes), CPU, data(), module, loss)
    return Training(setup.federation, start(setup.federation), setup.x_test, setup.y_test, setup.evaluate_every)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    ("mood", "error", "says"),
    [("mixing", PrivacyError, "round 20: .*mixes examples"), ("broken", SpecError, "round 20: .*no finite loss")],
)
def test_a_model_that_changes_during_training_stops_the_run(closed, mood, error, says):
    going = training(Later(closed))
    for _ in range(19):
        going.ahead()
    going.federation.mechanism.model.module.mood = mood
    with pytest.raises(error, match=says):
        going.ahead()


@pytest.mark.parametrize("closed", [True, False])
def test_a_model_that_comes_to_mix_beside_extreme_examples_stops_the_run(closed, monkeypatch):
    monkeypatch.setattr(company, "EXTREMES", (1e3,))  # one is taken at random each time, and 10 would not show it
    going = training(Later(closed))
    for _ in range(19):
        going.ahead()
    going.federation.mechanism.model.module.mood = "scaling"
    with pytest.raises(PrivacyError, match=r"round 20: .*mixes examples"):
        going.ahead()


def test_rounding_does_not_stop_a_run(monkeypatch):
    asked = []
    again = looks.sums_still_differ
    monkeypatch.setattr(looks, "sums_still_differ", lambda *given: asked.append(1) or again(*given))
    *_, last = training(Jagged())
    assert last.rounds == 20
    assert asked


@pytest.mark.parametrize("closed", [True, False])
def test_a_model_that_knows_float32_only_is_stopped_too(closed):
    going = training(Later(closed), loss=only_float32)
    for _ in range(19):
        going.ahead()
    going.federation.mechanism.model.module.mood = "mixing"
    with pytest.raises(PrivacyError, match="mixes examples"):
        going.ahead()


def test_it_is_looked_at_every_hundred_rounds_and_in_the_end(monkeypatch):
    looked = []
    monkeypatch.setattr("noisegate.simulate.train.recheck", lambda run, state, t, x: looked.append(t))
    list(training(network(), rounds=330, every=40))
    assert looked == [120, 200, 320, 330]


@pytest.mark.parametrize("module", [network, lambda: Later(closed=False)])
@pytest.mark.parametrize("attack", ["none", "gaussian"])
def test_looking_changes_no_byte(module, attack, monkeypatch):
    def end() -> Tensor:
        going = training(module(), byzantine=0.4, attack=attack, every=1)
        *_, last = going
        return torch.cat([last.state.params, last.state.uploads.flatten()])

    monkeypatch.setattr("noisegate.simulate.train.RECHECKED", 1)
    looked = end()
    monkeypatch.setattr("noisegate.simulate.train.recheck", lambda *_: None)
    assert torch.equal(looked, end())


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_examples_that_are_fitted_to_the_last_digits_are_no_reason_to_stop(scale):
    """Their gradients are rounding, of full length once they are normalized."""
    going = training(network(), worker={"name": "normalized", "momentum": 0.0})
    state = going.settled().state
    state = replace(state, server=replace(state.server, params=scale * state.params))
    own = going.federation.mechanism.model.outputs(state.params, going.federation.workers.x).argmax(1)
    fitted = going.federation.change(y=own)
    for t in range(5):
        recheck(fitted, state, t, data().x_test)
        rng = stream(t, "fitted")
        sample = looks.sample_of(fitted, state, t, rng)
        assert not looks.sums_still_differ(fitted, state.params, sample, rng)
        twin, params = sight.doubled(fitted.mechanism.model), state.params.double()
        left = looks._without_faint(
            fitted, twin, params, replace(sample, examples=replace(sample.examples, x=sample.examples.x.double()))
        )
        assert (len(left.mine) < len(sample.mine)) == (scale > 1)


# Without finite numbers.


def logarithm(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of a negative number."""
    return (-outputs.square().sum(1) - 1).log()


@pytest.mark.parametrize("way", ["closed form", "direct"])
def test_a_loss_that_is_no_number_is_refused(way):
    module = network() if way == "closed form" else nn.Sequential(nn.LayerNorm(FEATURES), network())
    with pytest.raises(SpecError, match="no finite loss and gradient for 100%"):
        run(SPEC, dataset=data(), model=module, loss=logarithm, compute=CPU)


def test_weights_that_are_no_numbers_are_refused():
    module = network()
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan
    with pytest.raises(SpecError, match="no finite loss and gradient for 100%"):
        run(SPEC, dataset=data(), model=module, compute=CPU)


@pytest.mark.parametrize("way", ["closed form", "direct"])
def test_a_few_examples_without_a_loss_contribute_nothing_and_stop_nobody(way):
    pool, module = data(), network() if way == "closed form" else nn.Sequential(nn.LayerNorm(FEATURES), network())
    edge = float(module(pool.x)[:, 0].detach().quantile(0.9))

    def one_in_ten(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) / (outputs[:, 0] < edge)

    assert one_in_ten(module(pool.x), pool.y).isinf().sum() == 30
    assert math.isfinite(run(SPEC, dataset=pool, model=module, loss=one_in_ten, compute=CPU).accuracy)


def test_a_model_that_leaves_float32_by_itself_stops_the_run():
    """No rate that is allowed takes it there in a few rounds, so it is put there."""
    going = training(network(), byzantine=0.0)
    run_ = going.federation
    params = run_.mechanism.model.initial()
    assert check_finite(run_, params, 2)
    params[0] = torch.inf
    with pytest.raises(SpecError, match=r"round 2: the model's parameters are no longer finite.*lower rate"):
        check_finite(run_, params, 2)


@pytest.mark.parametrize("factor", [1e12, 1e20, 1e30])
@pytest.mark.parametrize("rate", [1.0, 1e9])
def test_a_model_that_an_attack_drives_out_of_float32_ends_with_its_accuracy(factor, rate):
    attack = {"name": "large-norm", "factor": factor}
    spec = replace(SPEC, byzantine=0.4, attack=attack, rate=rate, evaluate_every=1)
    assert 0 <= run(spec, dataset=data(), model=network(), compute=CPU).accuracy <= 1


def test_a_loss_that_is_no_number_stops_an_attacked_run_too():
    going = training(Later(), byzantine=0.4, attack="gaussian")
    for _ in range(19):
        going.ahead()
    going.federation.mechanism.model.module.mood = "broken"
    with pytest.raises(SpecError, match=r"round 20: .*no finite loss"):
        going.ahead()


def test_test_examples_without_an_output_stop_the_run():
    pool = data()
    strange = replace(pool, x=pool.x.abs(), x_test=-pool.x_test.abs())
    with pytest.raises(SpecError, match="round 4: model: gives no finite output for 100%"):
        run(SPEC, dataset=strange, model=Root(), compute=CPU)
