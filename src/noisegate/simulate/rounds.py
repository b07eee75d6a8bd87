"""Rounds one after the other: at once on a CPU, queued on a CUDA device.

On a CUDA device every round is played with a `Capacity`, so that the host never waits for the device in the middle of
one. Once a phase of the attack was played, and the aggregator's state has its form, the kernels are recorded in a CUDA
graph and then repeated: the host only sets the generators anew. A round that does not fit stops the device's clock: it
and all that were queued behind it leave no trace. When the host next looks, it plays that round without a capacity and
queues the others again. So a batch of any size is drawn and used as it fell, whatever the bounds are.

A round with a capacity has the same shapes in a graph or not. So the bytes do not depend on when a graph was recorded,
and a run that is interrupted and resumed ends in the same bytes as one that is not.
"""

import signal
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from noisegate.simulate.federation import Federation, FederationState
from noisegate.simulate.graphs import Generators, Recorded, UsedTensors, begin_secret
from noisegate.simulate.progress import Progress
from noisegate.simulate.round import play
from noisegate.vectors import copy_if
from noisegate.views import State, Verdict

MOST_GRAPHS = 4
"""Phases of an attack that are recorded; any more are played kernel by kernel."""

QUEUED = 64
"""Most rounds that a device may lag behind."""


class Rounds:
    """Plays the rounds of one run, from where `progress` stands.

    Several of these on one CUDA device work side by side, each on its own stream, and none changes another's bytes.
    """

    def __init__(self, federation: Federation, progress: Progress, graph: bool = True) -> None:
        self.federation = federation
        self._progress = progress
        self.begun = progress.rounds
        """Rounds that something was drawn for. What is queued on a device is always finished."""
        self._device = Device(federation, progress, graph) if federation.device.type == "cuda" else None

    def step(self) -> None:
        """Play the next round, or queue it."""
        progress = self._progress
        self.begun += 1
        if self._device:
            self._device.queue()
            return
        state, verdict = play(self.federation, progress.state, progress.rounds)
        progress.note(progress.rounds, verdict)
        self._progress = replace(progress, rounds=progress.rounds + 1, state=state)

    def settled(self) -> Progress:
        """Where the run stands when all that was queued is done."""
        if self._device:
            rounds, state = self._device.settle()
            self._progress = replace(self._progress, rounds=rounds, state=state)
        return self._progress

    def stride(self) -> int:
        """How many rounds are worth queuing before the next look."""
        return QUEUED if self._device else 1

    def beside(self) -> Any:
        """A context in which work is put behind this run's rounds."""
        return torch.cuda.stream(self._device.stream) if self._device else nullcontext()


class Device:
    """The rounds of one run on a CUDA device. The tensors of its state stay where they are.

    asked: rounds that were asked for. queued: those of them that were begun. done: (1,) those that count, which the
    device knows. going: () False from the first round that did not fit until the host has looked.
    """

    def __init__(self, federation: Federation, progress: Progress, graph: bool) -> None:
        self.federation, self.progress, self.graph = federation, progress, graph
        self.stream = torch.cuda.Stream(federation.device)
        self.asked = self.queued = progress.rounds
        self.graphs: dict[Hashable, Recorded | None] = {}
        self.stream.wait_stream(torch.cuda.current_stream(federation.device))
        with torch.cuda.stream(self.stream):
            self.state = progress.state
            self.done = torch.full((1,), progress.rounds, device=federation.device)
            self.going = torch.ones((), dtype=torch.bool, device=federation.device)

    def queue(self) -> None:
        """Put one more round behind the others."""
        self.asked += 1
        self._go_on(wait=False)

    def settle(self) -> tuple[int, FederationState]:
        """(rounds done, the state after them), all that was queued included."""
        self._go_on(wait=True)
        return self.asked, self.state

    def _go_on(self, wait: bool) -> None:
        """Until every round that was asked for is queued, or with `wait` done.

        A round counts as queued before it is: after an interruption in between it is found not done, and played.
        """
        ahead = QUEUED  # rounds to queue before the next look at the device
        with torch.cuda.stream(self.stream):
            while True:
                self._replay(ahead)
                if self.queued == self.asked and not wait:
                    return
                done = int(self.done)  # here the host waits
                if done == self.asked:
                    return
                ahead = 2 * ahead + 1
                if done < self.queued:  # it did not fit, or was never begun, and those behind it did nothing
                    ahead = 1  # the next may not fit either
                    self.going.fill_(True)
                elif self.graphs.get(self.federation.phase(done)):
                    continue
                self.queued = done + 1
                self._play(done)

    def _replay(self, most: int) -> None:
        """Queue the next rounds, as far as they are recorded."""
        for _ in range(min(most, self.asked - self.queued)):
            recorded = self.graphs.get(self.federation.phase(self.queued))
            if recorded is None:
                return
            self.queued += 1
            recorded.replay(self.queued - 1)

    def _play(self, t: int) -> None:
        """A round that is not recorded; then record it for the next time, if it may be."""
        run, phase, before = self.federation, self.federation.phase(t), form_of(self.state.server.aggregator)
        generators, capacity = Generators(run, t), run.active(phase).capacity()
        begin_secret(run, t)
        state, verdict = play(run, self.state, t, capacity, generators)
        if not bool(capacity.fits()):
            begin_secret(run, t)
            state, verdict = play(run, self.state, t, None, Generators(run, t))
        with held_back():
            self._adopt(state, verdict)
        steady = before == form_of(state.server.aggregator)  # in the first round an aggregator's state takes its form
        if self.graph and steady and phase not in self.graphs and len(self.graphs) < MOST_GRAPHS:
            self.graphs[phase] = self._record(t, phase, generators)

    def _record(self, t: int, phase: Hashable, generators: Generators) -> Recorded | None:
        """A round like `t` as a graph; None if an aggregator, an attack or a model asks the host for something."""
        own = generators.used()
        begin_secret(self.federation, t)
        graph = torch.cuda.CUDAGraph()
        for generator in own.values():
            graph.register_generator_state(generator)
        used = UsedTensors()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"), used:
                capacity = self.federation.active(phase).capacity()
                new, verdict = play(self.federation, self.state, t, capacity, generators)
                self.going.logical_and_(capacity.fits())
                self._adopt(new, verdict)
        except RuntimeError:
            return None
        return Recorded(self.federation, graph, own, used)

    def _adopt(self, new: FederationState, verdict: Verdict) -> None:
        """Take over what a round gave, if the device's clock is still going."""
        old, server = self.state.server, new.server
        if form_of(server.aggregator) != form_of(old.aggregator):  # what is recorded writes to the old one
            old = replace(old, aggregator={name: value.clone() for name, value in server.aggregator.items()})
            self.state = replace(self.state, server=old)
            self.graphs.clear()
        pairs = [(old.params, server.params), (old.received, server.received)]
        pairs += [(old.aggregator[name], value) for name, value in server.aggregator.items()]
        self.progress.note(self.done, verdict)
        for into, value in pairs:
            copy_if(self.going, value, into)
        self.done.add_(self.going)


def form_of(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What a recorded round takes for granted of an aggregator's state."""
    return {name: (value.shape, value.dtype) for name, value in state.items()}


@contextmanager
def held_back() -> Iterator[None]:
    """An interruption waits until this is over, so that it is done as a whole or not at all."""
    if threading.current_thread() is not threading.main_thread():  # only there is one ever raised
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt
