"""The queue of a CUDA device, on a CPU: streams that do nothing, and a recorded round that is played when repeated."""

import contextlib
from dataclasses import replace

import pytest
import torch

import noisegate
from noisegate.simulate import Federation, Progress, first_state, play, start
from noisegate.simulate.graphs import Generators, begin_secret
from noisegate.simulate.rounds import Device, held_back
from test_entropy import keyed
from test_rounds import federation

ROUNDS = 20


class Stream:
    """Does everything at once."""

    def __init__(self, device) -> None: ...

    def wait_stream(self, other) -> None: ...


class Played:
    """What a recorded round would do. `interrupt`: the round after which Ctrl-C strikes, before anyone hears of it."""

    def __init__(self, device: Device, phase) -> None:
        self.device, self.phase, self.interrupt, self.repeated = device, phase, None, []

    def replay(self, t: int) -> None:
        device, capacity = self.device, self.device.federation.active(self.phase).capacity()
        begin_secret(device.federation, t)  # as `Recorded.replay` does
        new, verdict = play(device.federation, device.state, t, capacity, Generators(device.federation, t))
        device.going.logical_and_(capacity.fits())
        device._adopt(new, verdict)
        self.repeated.append(t)
        if self.interrupt == t:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def streams_that_do_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(Device, "_record", lambda self, t, phase, generators: Played(self, phase))
    # A CPU's generator cannot say whether it was used.
    monkeypatch.setattr(Generators, "used", lambda self: dict(self.made))


def tightened(run: Federation, share: float) -> Federation:
    """The same, with capacity for so few examples that this share of the rounds does not fit."""
    run = replace(run)
    active = run.active(run.phase(0))
    sizes = active.holdings.sizes
    usual = active.capacity()
    few = run.mechanism.sampling.largest_sum(len(sizes), int(sizes.sum()), run.mechanism.declared, share)
    active.__dict__["capacity"] = lambda: replace(usual, total=few, needs=[])
    return run


def played(run: Federation, progress: Progress | None = None, rounds: int = ROUNDS) -> tuple[Device, Progress]:
    progress = progress or start(run)
    device = Device(run, progress, graph=True)
    while device.queued < rounds:
        for _ in range(min(7, rounds - device.queued)):
            device.queue()
        done, state = device.settle()
        assert done == device.queued == int(device.done)
    return device, replace(progress, rounds=done, state=state)


def same_bytes(one: Progress, other: Progress) -> bool:
    pairs = [(one.state.params, other.state.params), (one.state.uploads, other.state.uploads)]
    pairs += [(one.reasons, other.reasons), (one.scores, other.scores)]
    return one.rounds == other.rounds and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("attack", ["none", "gaussian", "label-flip"])
def test_rounds_that_do_not_fit_are_played_again_and_those_behind_them_too(attack):
    run = federation(attack=attack, rounds=ROUNDS)
    _, roomy = played(run)
    device, redone = played(tightened(run, 0.3))
    recorded = device.graphs[run.phase(0)]
    assert len(recorded.repeated) > len(set(recorded.repeated))  # some were queued, undone and queued again
    assert torch.equal(redone.reasons, roomy.reasons)
    assert (redone.state.params - roomy.state.params).norm() < 1e-5
    assert (redone.scores - roomy.scores).abs().max() < 1e-4


def test_secret_rounds_that_do_not_fit_draw_what_they_drew_before():
    """A batch that is too large for the capacity is used as it fell: to draw another would be another mechanism."""
    secret = keyed()
    run = federation(attack="label-flip", rounds=ROUNDS).change(secret=secret)
    _, roomy = played(run)
    _, redone = played(tightened(run, 0.3))
    state = first_state(run)
    for t in range(ROUNDS):
        state, _ = play(run, state, t)
    for other in (redone.state.params, state.params):
        assert (other - roomy.state.params).norm() < 1e-5


def test_secret_rounds_on_a_device_never_share_noise():
    run = federation(attack="none", rounds=4).change(secret=keyed(), sigma=1e3)  # nothing but noise
    state, sent = first_state(run), []
    for t in range(4):
        state, _ = play(run, state, t)
        sent.append(state.uploads.clone())
    away = torch.corrcoef(torch.cat(sent)) - torch.eye(4 * len(sent[0]))
    assert away.abs().max() < 6 / sent[0].shape[1] ** 0.5


def test_where_no_round_fits_few_are_queued_in_vain():
    run = federation(attack="none", rounds=ROUNDS)
    device = Device(tightened(run, 1 - 1e-9), start(run), graph=True)
    for _ in range(ROUNDS):
        device.queue()
    assert device.settle()[0] == int(device.done) == ROUNDS
    (recorded,) = device.graphs.values()
    assert ROUNDS - 2 < len(recorded.repeated) < 2 * ROUNDS  # once all of them, then one at a time


def test_an_attack_that_changes_its_phase_is_recorded_for_each():
    run = federation(attack_start=0.5, attack="inner", rounds=ROUNDS)
    device, _ = played(run)
    assert len(device.graphs) == 2
    sleep, awake = (device.graphs[run.phase(t)].repeated for t in (0, ROUNDS - 1))
    assert max(sleep) < ROUNDS // 2 < min(awake)


@pytest.mark.parametrize("strikes", [5, 9, 16])
def test_interrupted_after_a_round_that_nobody_heard_of_a_run_ends_in_the_same_bytes(strikes):
    run = federation(attack="none", rounds=ROUNDS)
    _, whole = played(run)
    progress = start(run)
    device = Device(run, progress, graph=True)
    for _ in range(3):
        device.queue()
    device.graphs[run.phase(0)].interrupt = strikes
    while device.queued < strikes:
        device.queue()
    with pytest.raises(KeyboardInterrupt):
        device.queue()
    rounds, state = device.settle()
    assert rounds == int(device.done) == strikes + 1
    _, resumed = played(run, replace(progress, rounds=rounds, state=state))
    assert same_bytes(resumed, whole)


def test_interrupted_before_a_queued_round_began_a_run_ends_in_the_same_bytes():
    run = federation(attack="none", rounds=ROUNDS)
    _, whole = played(run)
    device = Device(run, progress := start(run), graph=True)
    for _ in range(6):
        device.queue()
    recorded = device.graphs[run.phase(0)]

    def strike(t: int) -> None:
        raise KeyboardInterrupt

    recorded.replay = strike
    with pytest.raises(KeyboardInterrupt):
        device.queue()
    del recorded.replay
    rounds, state = device.settle()
    assert rounds == 7
    _, resumed = played(run, replace(progress, rounds=rounds, state=state))
    assert same_bytes(resumed, whole)


def test_what_is_held_back_is_done_as_a_whole():
    import os
    import signal

    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - where it is raised is the point
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
        done.append("not reached")
    assert done == ["all of it"]
    with held_back():
        done.append("nothing happened")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Grows(noisegate.Mean):
    """Remembers every round's lengths."""

    def __call__(self, view, state):
        verdict, now = super().__call__(view, {}), view.norms[None]
        return replace(verdict, state={"lengths": torch.cat([state["lengths"], now]) if state else now})


class Doubles(noisegate.Mean):
    """Scores in float64."""

    def __call__(self, view, state):
        verdict = super().__call__(view, {})
        return replace(verdict, score=view.norms.double())


class Widens(noisegate.Mean):
    """A state that takes another form in the middle of the run."""

    def __call__(self, view, state):
        count = state["count"] + 1 if state else torch.zeros(1)
        wide = {"count": count, "more": view.norms.clone()} if float(count) >= 9 else {"count": count}
        return replace(super().__call__(view, {}), state=wide)


@pytest.mark.parametrize("aggregator", [Grows(), Doubles(), Widens()], ids=lambda aggregator: type(aggregator).__name__)
def test_an_aggregator_may_keep_what_it_likes(aggregator):
    run = federation(attack="none", rounds=ROUNDS).change(aggregator=aggregator)
    state = first_state(run)
    for t in range(ROUNDS):
        state, _ = play(run, state, t, run.active(run.phase(t)).capacity(), Generators(run, t))
    for some in (run, tightened(run, 0.3)):
        device, progress = played(some)
        assert progress.state.server.aggregator.keys() == state.server.aggregator.keys()
        for name, value in state.server.aggregator.items():
            assert (progress.state.server.aggregator[name] - value).abs().max() < 1e-4
        assert bool(device.graphs) == (type(aggregator) is not Grows)
