"""Rounds one after the other: at once on a CPU, queued on a CUDA device.

On a CUDA device every round is played with `Capacity`, so that the host never has to wait for the device in the middle
of one. Once a phase of the attack was played, and the aggregator's state has its form, the kernels are recorded in a
CUDA graph and then repeated: only the generators are set anew, by the host. A round that does not fit stops the
device's clock: it and all that were queued behind it leave no trace, and when the host next looks it plays that round
without capacity and queues the others again. So a batch of any size is drawn and used as it fell, whatever the bounds
are.

A round with capacity has the same shapes in a graph or not, so that the bytes do not depend on when a graph was
recorded, and a run that is interrupted and resumed ends in the same bytes as one that is not.
"""

import signal
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from noisegate.simulate.federation import Federation, FederationState, Streams
from noisegate.simulate.progress import Progress
from noisegate.simulate.round import play
from noisegate.vectors import copy_if
from noisegate.views import State, Verdict

MOST_GRAPHS = 4
"""Phases of an attack that are recorded; any more are played kernel by kernel."""

PROTOCOL, ADVERSARY = "protocol", ("poison", "attack")
"""Names of generators."""

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
        self._device = Device(federation, progress, graph) if federation.x.is_cuda else None

    def step(self) -> None:
        """Play the next round, or queue it."""
        run, progress = self.federation, self._progress
        self.begun += 1
        if self._device:
            self._device.queue()
            return
        state, verdict = play(run, progress.state, progress.rounds)
        progress.reasons[progress.rounds] = verdict.reason
        progress.scores[progress.rounds] = verdict.score
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
    """The rounds of one run on a CUDA device. The tensors of its state stay where they are."""

    def __init__(self, federation: Federation, progress: Progress, graph: bool) -> None:
        self.run = federation
        self.stream = torch.cuda.Stream(federation.x.device)
        self.queued = progress.rounds
        self.reasons, self.scores = progress.reasons, progress.scores
        self.graph = graph
        self.graphs: dict[Hashable, Recorded | None] = {}
        self.stream.wait_stream(torch.cuda.current_stream(federation.x.device))
        with torch.cuda.stream(self.stream):
            self.state = progress.state
            self.done = torch.full((1,), progress.rounds, device=federation.x.device)
            self.going = torch.ones((), dtype=torch.bool, device=federation.x.device)

    def queue(self) -> None:
        """Put the next round behind the others.

        It counts as queued before it is: who is interrupted in between finds a round that was not played.
        """
        t, phase = self.queued, self.run.phase(self.queued)
        with torch.cuda.stream(self.stream):
            if recorded := self.graphs.get(phase):
                self.queued += 1
                recorded.replay(t)
            else:
                self.settle()
                self.queued += 1
                self._play(t)

    def settle(self) -> tuple[int, FederationState]:
        """(rounds done, the state after them), all that was queued included."""
        with torch.cuda.stream(self.stream):
            asked, ahead = self.queued, 0
            while (done := int(self.done)) < asked:
                if done < self.queued:  # it did not fit, or was never started, and those behind it did nothing
                    self.queued, ahead = done + 1, 0
                    self.going.fill_(True)
                    self._play(done)
                # After one that did not fit the next may not either: about twice as many each time that all fit.
                ahead = min(2 * ahead + 1, asked - self.queued)
                for _ in range(ahead):
                    self.queue()
        return self.queued, self.state

    def _play(self, t: int) -> None:
        """A round that is not recorded; then record it for the next time, if it may be."""
        phase, before = self.run.phase(t), form_of(self.state.aggregator)
        generators, capacity = Generators(self.run, t), self.run.active(phase).capacity()
        begin_secret(self.run, t)
        state, verdict = play(self.run, self.state, t, capacity, generators)
        if not bool(capacity.fits()):
            begin_secret(self.run, t)
            state, verdict = play(self.run, self.state, t, None, Generators(self.run, t))
        with held_back():
            self._adopt(state, verdict)
        steady = before == form_of(state.aggregator)  # in the first round an aggregator's state takes its form
        if self.graph and steady and phase not in self.graphs and len(self.graphs) < MOST_GRAPHS:
            self.graphs[phase] = self._record(t, phase, generators)

    def _record(self, t: int, phase: Hashable, generators: "Generators") -> "Recorded | None":
        """A round like `t` as a graph; None if an aggregator, an attack or a model asks the host for something."""
        own = generators.used()
        begin_secret(self.run, t)
        graph = torch.cuda.CUDAGraph()
        for generator in own.values():
            graph.register_generator_state(generator)
        used = Used()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"), used:
                capacity = self.run.active(phase).capacity()
                new, verdict = play(self.run, self.state, t, capacity, generators)
                self.going.logical_and_(capacity.fits())
                self._adopt(new, verdict)
        except RuntimeError:
            return None
        return Recorded(self.run, graph, own, used)

    def _adopt(self, new: FederationState, verdict: Verdict) -> None:
        """Take over what a round gave, if the device's clock is still going."""
        if form_of(new.aggregator) != form_of(self.state.aggregator):  # what is recorded writes to the old one
            self.state = replace(self.state, aggregator={name: value.clone() for name, value in new.aggregator.items()})
            self.graphs.clear()
        state = self.state
        pairs = [(state.params, new.params), (state.uploads, new.uploads)]
        pairs += [(state.aggregator[name], value) for name, value in new.aggregator.items()]
        self.reasons.index_copy_(0, self.done, verdict.reason[None].to(self.reasons))
        self.scores.index_copy_(0, self.done, verdict.score[None].to(self.scores))
        for old, value in pairs:
            copy_if(self.going, value, old)
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


class Generators(Streams):
    """A round's generators by name, and which of them it used.

    What the protocol itself draws comes from one generator, in the order of the round: setting one costs the host as
    much time as a whole round of a small run may take. What an adversary draws is its own.
    """

    def __init__(self, federation: Federation, t: int) -> None:
        super().__init__(federation, t)
        self.made: dict[str, torch.Generator] = {}

    def generator(self, what: str) -> torch.Generator:
        """Made when first asked for."""
        name = what if what in ADVERSARY else PROTOCOL
        if name not in self.made:
            self.made[name] = super().generator(name)
        return self.made[name]

    def used(self) -> dict[str, torch.Generator]:
        """Those that numbers were drawn from."""
        return {name: generator for name, generator in self.made.items() if generator.get_offset()}


class Recorded:
    """A round as a CUDA graph, with the generators that it draws from."""

    def __init__(
        self,
        federation: Federation,
        graph: torch.cuda.CUDAGraph,
        generators: dict[str, torch.Generator],
        used: "Used",
    ) -> None:
        self.run, self.graph, self.generators, self.used = federation, graph, generators, used

    def replay(self, t: int) -> None:
        """Play round `t`."""
        for what, generator in self.generators.items():
            self.run.rewind(generator, what, t)
        begin_secret(self.run, t)
        self.graph.replay()


def begin_secret(run: Federation, t: int) -> None:
    """Tell the device which round secret numbers are for: not in the round itself, where a graph would record it."""
    if run.secret:
        run.secret.begin(t)


class Used(TorchDispatchMode):
    """While a graph is recorded, notes the tensors that were there before, so that they stay.

    A graph knows addresses only. A table that an aggregator keeps in a cache, say, may be gone when the graph reads it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            address = tensor.untyped_storage().data_ptr()
            if tensor.is_cuda and address not in self._made:
                self.before.setdefault(address, tensor)
        found = function(*args, **kwargs)
        for tensor in tensors_in(found):
            self._made.add(tensor.untyped_storage().data_ptr())
        self._made.difference_update(self.before)
        return found


def tensors_in(values: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    leaves = tree_flatten(values)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
