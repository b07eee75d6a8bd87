"""A round that may not look at its own numbers is the same round; parts, memory and threads change nothing."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import noisegate
from noisegate import Compute, Dataset, Spec
from noisegate.capacity import Capacity, places
from noisegate.errors import SpecError
from noisegate.examples import Holdings, gather
from noisegate.marks import DRAWN_AT_ONCE
from noisegate.runs.setup import SharedData, prepare
from noisegate.sampling import FixedSize, Poisson
from noisegate.simulate import Federation, Rounds, Training, accuracy, first_state, play, side_by_side, start
from noisegate.streams import stream

CLOSE = 1e-5
"""Of an upload of length 1: sums of some dozen float32 numbers in another order."""

ATTACKS = [
    "label-flip",
    {"name": "label-flip", "to": "random"},
    "gaussian",
    "local-poisoning",
    "none",
    {"name": "dormant", "attack": "inner", "until": 0.5, "asleep": "copy"},
]


def pictures(classes: int = 4, count: int = 600) -> Dataset:
    rng = stream(0, "pictures")
    y = torch.arange(count) % classes
    x = torch.randn(count, 1, 16, 16, generator=rng) + y[:, None, None, None] / 2
    return Dataset("pictures", x, y, x[:90], y[:90], classes)


def federation(memory: int = 1024, **settings) -> Federation:
    asked = {
        "model": "mlp",
        "workers": 5,
        "rounds": 12,
        "sigma": 1.0,
        "sigma_base": 1.0,
        "epsilon": 1e6,
        "delta": 1e-3,
        "accountant": "rdp",
        "batch": 8,
    } | settings
    return prepare(Spec(**asked), Compute(device="cpu", memory=memory), pictures()).federation


def generous(run: Federation, t: int) -> Capacity:
    return run.active(run.phase(t)).capacity()


# Capacity.


def test_places_are_those_of_the_marks_in_order():
    marks = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool)
    assert places(marks, 0, None).tolist() == [1, 3, 4]
    capacity = Capacity(9, 9, 4)
    assert places(marks, 4, capacity).tolist() == [1, 3, 4, 5, 5]  # the last entry is nobody's
    assert bool(capacity.fits())


@pytest.mark.parametrize(("size", "fits"), [(2, False), (3, True), (4, True)])
def test_too_many_marks_do_not_fit(size, fits):
    capacity = Capacity(9, 9, size)
    places(torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool), size, capacity)
    assert bool(capacity.fits()) == fits


def test_every_need_counts():
    capacity = Capacity(1, 1, 1)
    capacity.need(torch.tensor([True, True]))
    capacity.need(torch.tensor(True))
    assert bool(capacity.fits())
    capacity.need(torch.tensor([True, False]))
    assert not bool(capacity.fits())


# Gathering what was drawn.


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("with_capacity", [False, True])
def test_what_is_gathered_is_what_was_drawn(workers, with_capacity):
    sizes = torch.tensor([40, 16, 30, 17, 40, 25, 33])
    drawn = Poisson(9).over(sizes, 30)(stream(4, "batch"))
    drawn[2] = False  # somebody has nothing
    capacity = Capacity(total=7 * 40, per_worker=40, byzantine=0) if with_capacity else None
    longest, wanted = drawn.shape[1], drawn.nonzero().tolist()
    numbers = torch.arange(7 * longest).view(7, longest)  # an example's label is its place
    held = Holdings(torch.zeros(7 * longest, 1), torch.arange(7 * longest), numbers, sizes, at_once=workers)
    batch = gather(held, drawn, capacity)
    real = batch.owner < 7
    assert [
        [o, y - o * longest] for o, y in zip(batch.owner.tolist(), batch.y.tolist(), strict=True) if o < 7
    ] == wanted
    assert bool(real.all()) != with_capacity
    found = []
    for part in batch.portions:
        k = part.workers.stop - part.workers.start
        assert k <= workers
        assert (part.owner.diff() >= 0).all()
        own = part.owner < k
        found += (part.owner[own] + part.workers.start).tolist()
        assert torch.bincount(part.owner[own], minlength=k).max() <= part.most
        assert torch.equal(batch.owner[part.places][own], part.owner[own] + part.workers.start)
        assert not with_capacity or part.owner[-1] == k
    assert found == [worker for worker, _ in wanted]
    if capacity:
        assert bool(capacity.fits())


def test_more_than_there_is_capacity_for_does_not_fit():
    drawn = torch.ones(3, 5, dtype=torch.bool)
    for total, fits in ((14, False), (15, True)):
        capacity = Capacity(total, 5, 0)
        numbers, sizes = torch.zeros(3, 5, dtype=torch.int64), torch.full((3,), 5)
        gather(Holdings(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), numbers, sizes), drawn, capacity)
        assert bool(capacity.fits()) == fits


def test_a_bound_on_the_sum_of_batches_is_a_bound():
    sizes = torch.full((50,), 300)
    draw = Poisson(16).over(sizes, 300)
    sums = torch.stack([draw(stream(5, "batch", t)).sum() for t in range(400)])
    held = 50 * 300
    assert (sums > Poisson(16).largest_sum(50, held, 300, 0.05)).float().mean() <= 0.09  # three deviations above .05
    assert (sums > Poisson(16).largest_sum(50, held, 300, 0.5)).float().mean() > 0.3  # and not a silly one
    assert FixedSize(16).largest_sum(50, held, 300, 0.5) == 800


def test_blocks_of_workers_draw_what_one_draw_would():
    """On a CPU, where a generator gives one number after the other."""
    sizes = torch.full((DRAWN_AT_ONCE + 9,), 20)
    drawn = Poisson(4).over(sizes, 20)(stream(6, "batch"))
    uniform = torch.rand(len(sizes), 20, generator=stream(6, "batch"), dtype=torch.float64)
    assert torch.equal(drawn, uniform < 4 / 20)


# Rounds with capacity.


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_round_with_capacity_is_the_same_round(attack, sampling):
    run = federation(attack=attack, sampling=sampling)
    free, bound = first_state(run), first_state(run)
    for t in range(run.schedule.rounds):
        capacity = generous(run, t)
        free, verdict = play(run, free, t)
        bound, again = play(run, bound, t, capacity)
        assert bool(capacity.fits())
        assert torch.equal(verdict.reason, again.reason)
        assert (free.uploads - bound.uploads).norm(dim=1).max() < CLOSE
        assert (free.params - bound.params).norm() < CLOSE


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_round_in_parts_is_the_same_round(model):
    whole = federation(model=model)
    state = first_state(whole)
    for workers in (1, 2, 5):
        run = federation(model=model)
        for active in (run.active(run.phase(0)),):
            active.__dict__["holdings"] = replace(active.holdings, at_once=workers)
        for capacity in (None, generous(run, 0)):
            one, two = first_state(whole), first_state(run)
            for t in range(2):
                one, verdict = play(whole, one, t)
                two, again = play(run, two, t, capacity and generous(run, t))
                assert torch.equal(verdict.reason, again.reason)
            assert (one.uploads - two.uploads).norm(dim=1).max() < CLOSE
    assert not state.uploads.any()


@pytest.mark.parametrize("attack", ["gaussian", "label-flip"])
def test_a_small_memory_works_on_fewer_workers_and_changes_nothing(attack):
    roomy, tight = federation(attack=attack), federation(memory=1, attack=attack, model="mlp")
    few, many = (len(run.active(run.phase(0)).holdings.portions) for run in (roomy, tight))
    assert few < many
    one, two = first_state(roomy), first_state(tight)
    for t in range(4):
        (one, verdict), (two, again) = play(roomy, one, t), play(tight, two, t)
        assert torch.equal(verdict.reason, again.reason)
    assert (one.uploads - two.uploads).norm(dim=1).max() < CLOSE


def test_memory_is_no_part_of_a_runs_name_and_must_be_a_count():
    assert "memory" not in Spec().canonical()
    with pytest.raises(SpecError, match="memory = 0"):
        Compute(memory=0)


def test_a_width_that_is_too_small_cuts_nobody_off():
    run = federation()
    wide, _ = play(run, first_state(run), 0, generous(run, 0))
    capacity = replace(generous(run, 0), per_worker=1, needs=[])
    narrow, _ = play(run, first_state(run), 0, capacity)
    assert bool(capacity.fits())
    assert torch.equal(wide.uploads, narrow.uploads)


class Keeps(noisegate.Mean):
    """Remembers the first uploads it saw, as they were shown to it."""

    def __call__(self, view, state):
        return replace(super().__call__(view, {}), state={"first": state.get("first", view.uploads[1:])})


def test_what_an_aggregator_remembers_is_not_overwritten():
    run = federation().change(aggregator=Keeps())
    state, _ = play(run, first_state(run), 0)
    first = state.uploads[1:].clone()
    for t in range(1, 5):
        state, _ = play(run, state, t)
        assert torch.equal(state.server.aggregator["first"], first)


@pytest.mark.parametrize("field", ["total", "byzantine"])
def test_a_round_that_does_not_fit_says_so(field):
    run = federation()
    for size, fits in ((10_000, True), (3, False)):
        capacity = replace(generous(run, 0), **{field: size}, needs=[])
        play(run, first_state(run), 0, capacity)
        assert bool(capacity.fits()) == fits


class Upside(noisegate.LabelFlip):
    """Gives labels that do not exist."""

    def poison(self, x, y, view):
        return x, y + 100


def test_labels_that_do_not_exist_do_not_fit_and_are_refused_without_capacity():
    run = federation().change(attack=Upside())
    with pytest.raises(SpecError, match="labels 0 to 3"):
        play(run, first_state(run), 0)
    capacity = generous(run, 0)
    play(run, first_state(run), 0, capacity)
    assert not bool(capacity.fits())


class Blackout(noisegate.LabelFlip):
    """Blackens its pictures: in place, or in a copy."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        object.__setattr__(self, "in_place", in_place)

    def poison(self, x, y, view):
        return (x.mul_(0.0) if self.in_place else 0.0 * x), y


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("at_once", [2, 99])
def test_poisoned_pictures_are_those_that_byzantine_workers_train_on_and_nobody_else(in_place, at_once, monkeypatch):
    monkeypatch.setattr("noisegate.simulate.adversary.POISONED_AT_ONCE", 7)
    clean = federation().change(attack=noisegate.Honest(), sigma=0.0, aggregator=noisegate.Mean())
    black = clean.change(attack=Blackout(in_place))
    pool = clean.workers.x.clone()
    for run in (clean, black):
        active = run.active(run.phase(0))
        active.__dict__["holdings"] = replace(active.holdings, at_once=at_once)
    uploads = [play(run, first_state(run), 0)[0].uploads for run in (clean, black)]
    lying = clean.adversary.byzantine
    assert torch.equal(clean.workers.x, pool)
    assert (uploads[0] - uploads[1])[~lying].norm(dim=1).max() < CLOSE
    assert (uploads[0] - uploads[1])[lying].norm(dim=1).min() > 0.1
    # A black picture has no gradient in the first layer's weights.
    assert uploads[1][lying][:, : 256 * 32].abs().max() < 1e-6


class Lists(noisegate.Honest):
    """A phase that cannot be looked up."""

    def phase(self, progress):
        return ["asleep"]


def test_a_phase_that_cannot_be_compared_is_refused():
    run = federation().change(attack=Lists())
    with pytest.raises(SpecError, match=r"its phase must be a word, .* gave \['asleep'\]"):
        play(run, first_state(run), 0)


# Training.


def ready(**settings):
    spec = Spec(model="mlp", workers=5, rounds=20, sigma=1.0, sigma_base=1.0, epsilon=1e6, delta=1e-3, batch=8)
    return prepare(replace(spec, **settings), Compute(device="cpu"), pictures())


def test_lines_are_those_of_the_models_at_their_rounds():
    setup = ready()
    wanted, progress = {}, start(setup.federation)
    rounds = Rounds(setup.federation, progress)
    for t in range(1, 21):
        rounds.step()
        if t % 6 == 0 or t == 20:
            params = rounds.settled().state.params
            wanted[t] = accuracy(setup.federation.mechanism.model, params, setup.x_test, setup.y_test)
    *_, last = Training(setup.federation, start(setup.federation), setup.x_test, setup.y_test, 6)
    assert {line["round"]: line["accuracy"] for line in last.curve} == wanted
    assert last.rounds == 20


class Slow(nn.Module):
    """Waits in the examination, until it is let go."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 4)
        self.gate = gate

    def __deepcopy__(self, memo):
        copied = Slow(self.gate)
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x):
        if len(x) == 90:  # the test set
            self.gate.wait(timeout=60)
        return self.linear(x.flatten(1))


def test_training_does_not_wait_for_an_examination_but_whoever_asks_gets_every_line():
    gate = threading.Event()
    gate.set()
    spec = Spec(workers=5, rounds=20, sigma=1.0, sigma_base=1.0, epsilon=1e6, delta=1e-3, batch=8)
    setup = prepare(spec, Compute(device="cpu"), pictures(), Slow(gate))
    training = Training(setup.federation, start(setup.federation), setup.x_test, setup.y_test, 8)
    gate.clear()
    for _ in range(12):
        side_by_side([training])
    assert training.settled().rounds == 12
    assert training.settled().curve == ()  # still being examined
    gate.set()
    assert [line["round"] for line in training.settled(wait=True).curve] == [8]
    while not training.over:
        side_by_side([training])
    assert [line["round"] for line in training.settled().curve] == [8, 16, 20]


@pytest.mark.parametrize("stop", [5, 10, 12])
def test_a_line_that_an_interruption_left_out_is_made_up_for(stop):
    setup = ready()
    given = setup.federation, start(setup.federation), setup.x_test, setup.y_test, 5
    *_, whole = Training(*given)
    rounds = Rounds(setup.federation, start(setup.federation))
    for _ in range(stop):
        rounds.step()
    left = replace(rounds.settled(), curve=tuple(line for line in whole.curve if line["round"] < stop))
    *_, resumed = Training(setup.federation, left, setup.x_test, setup.y_test, 5)
    assert resumed.curve == whole.curve


def test_a_state_serves_one_round_and_no_round_takes_new_space_for_uploads():
    run = federation()
    state = first_state(run)
    spaces = {state.uploads.data_ptr(), state.spare.data_ptr()}
    for t in range(5):
        state, _ = play(run, state, t)
        assert {state.uploads.data_ptr(), state.spare.data_ptr()} == spaces


# Several runs.


def test_runs_together_are_the_runs_one_by_one():
    spec = Spec(rounds=15, sigma=2.0, sigma_base=2.0, epsilon=1e3)
    specs = [spec, replace(spec, seed=2), replace(spec, attack="gaussian", aggregator="mean")]
    together = noisegate.run_together(specs, compute=Compute(device="cpu"))
    for found, each in zip(together, specs, strict=True):
        alone = noisegate.run(each, compute=Compute(device="cpu"))
        assert replace(found, seconds=0.0, ms_per_round=0.0) == replace(alone, seconds=0.0, ms_per_round=0.0)


def test_side_by_side_takes_everyone_ahead():
    setups = [ready(), ready(seed=2)]
    trainings = [Training(s.federation, start(s.federation), s.x_test, s.y_test, 20) for s in setups]
    side_by_side(trainings)
    assert [training.played for training in trainings] == [1, 1]  # on a CPU there is nothing to queue


def test_data_are_read_and_moved_once():
    shared = SharedData()
    first, second = shared.load(Spec()), shared.load(Spec(seed=2))
    assert first is second
    device = torch.device("cpu")
    assert shared.on(device, first)[0] is shared.on(device, second)[0]
