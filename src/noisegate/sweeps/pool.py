"""Many runs at a time: in processes of their own on a CPU, side by side on a CUDA device."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, TypeVar

import torch

from noisegate import checks
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.redteam.search import Outcome
from noisegate.runs.launch import run, run_together
from noisegate.runs.result import Result
from noisegate.runs.spec import Spec
from noisegate.version import __version__

SIDE_BY_SIDE = 16
"""Runs that share a CUDA device unless told otherwise."""

MOST_JOBS = 1024

GRACE = 20.0
"""Seconds for a process that is stopped to save where its run stands."""

LATE_GRACE = 2.0
"""The same for one whose time is up: it may be stuck."""

T = TypeVar("T")
One = Callable[[Spec, Compute], Outcome]
Several = Callable[[Sequence[Spec], Compute], list[Outcome]]


class Pool:
    """Runs specs and says what came of each as soon as it is known. A run that breaks breaks no other.

    A run that calls a plugin's code is given to a process even where there is one job: that code may end the process,
    or never come back.

    jobs: how many at a time; None takes a process for each core, or 16 on a CUDA device. On a CPU a run has one thread
    unless `compute` says otherwise, so that its numbers do not depend on how many run beside it.
    one, several: what is done with a spec, in a process that can import it, and with several on a CUDA device; as here
    nothing is left on disk.
    time_limit: seconds that a run may take; then its process is ended, and it has failed.
    """

    def __init__(
        self,
        compute: Compute,
        jobs: int | None = None,
        one: One | None = None,
        several: Several | None = None,
        time_limit: float | None = None,
    ) -> None:
        if jobs is not None:
            checks.count(jobs=jobs)
            if jobs > MOST_JOBS:
                raise checks.refuse("jobs", jobs, f"must be at most {MOST_JOBS}")
        if time_limit is not None:
            checks.positive(time_limit=time_limit)
            if compute.resolve().type == "cuda":
                rule = "runs on a CUDA device share a process, and one alone cannot be ended; use --device cpu"
                raise checks.refuse("time_limit", time_limit, rule)
        self.time_limit = time_limit
        self.cuda = compute.resolve().type == "cuda"
        self.compute = compute if self.cuda else replace(compute, threads=compute.threads or 1)
        self.jobs = jobs or (SIDE_BY_SIDE if self.cuda else max(1, _cores() // (self.compute.threads or 1)))
        self.one, self.several = one or alone, several or side_by_side
        self._hands: dict[Connection, BaseProcess] = {}

    @property
    def how(self) -> str:
        """What the numbers of this pool depend on beside the spec: what was run otherwise may have others."""
        return f"noisegate {__version__} {self.flags}"

    @property
    def flags(self) -> str:
        """The flags with which `noisegate run`, of this version, gives the numbers of this pool, to the last digit."""
        flags = "--device cuda" if self.cuda else f"--device cpu --threads {self.compute.threads}"
        return flags if self.compute.memory is None else f"{flags} --memory {self.compute.memory}"

    @property
    def pace(self) -> str:
        """How many at a time, for people."""
        return f"{self.jobs} at a time"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever still runs is stopped. A run with a folder saves where it stands."""
        for process in self._hands.values():
            process.terminate()
        end = time.monotonic() + GRACE
        for hand in list(self._hands):
            self._dismiss(hand, max(0.1, end - time.monotonic()))

    def play(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Outcome]]:
        """(which spec, what came of it), in the order in which they end."""
        if self.cuda:
            for batch in batches(specs, self.jobs):
                yield from zip(batch, self.several([specs[i] for i in batch], self.compute), strict=True)
        elif self.jobs == 1 and self.time_limit is None and not any(map(calls_plugins, specs)):
            yield from ((i, self.one(spec, self.compute)) for i, spec in enumerate(specs))
        else:
            yield from self._share_out(specs)

    def _share_out(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Outcome]]:
        waiting, busy = deque(enumerate(specs)), dict[Connection, int]()
        due = dict[Connection, float]()  # when the time of a run is up
        while waiting or busy:
            while waiting and len(busy) < self.jobs:
                hand = next((hand for hand in self._hands if hand not in busy), None) or self._hire()
                try:
                    hand.send(waiting[0][1])
                except ConnectionError:
                    self._dismiss(hand)  # it was ended while it waited
                    continue
                busy[hand] = waiting.popleft()[0]
            left = max(0.0, min(due.values()) - time.monotonic()) if due else None
            for ready in wait(list(busy), left):
                hand = next(hand for hand in busy if hand is ready)
                try:
                    outcome: Outcome | None = hand.recv()
                except (EOFError, ConnectionError):
                    outcome = Outcome("failed", message=self._why_it_ended(hand))
                    self._dismiss(hand)
                if outcome is None:  # it has begun; that took as long as Python and torch take to start
                    if self.time_limit is not None:
                        due[hand] = time.monotonic() + self.time_limit
                    continue
                due.pop(hand, None)
                yield busy.pop(hand), outcome
            for hand in [hand for hand, end in due.items() if end <= time.monotonic()]:
                del due[hand]
                self._dismiss(hand, LATE_GRACE)
                told = f"took longer than its time limit, {self.time_limit:g} s, and was ended"
                yield busy.pop(hand), Outcome("failed", message=told)

    def _hire(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        process = context.Process(target=_serve, args=(theirs, self.compute, self.one), daemon=True)
        with _deaf():
            process.start()
        theirs.close()
        self._hands[ours] = process
        return ours

    def _dismiss(self, hand: Connection, grace: float = GRACE) -> None:
        """End a process for good."""
        process = self._hands.pop(hand)
        process.terminate()
        process.join(grace)
        process.kill()
        process.join()
        hand.close()

    def _why_it_ended(self, hand: Connection) -> str:
        """Of a process that has hung up."""
        process = self._hands[hand]
        process.join(1.0)
        if (status := process.exitcode) is not None and status >= 0:
            return f"its process ended in the middle of it (status {status}), as code that exits does"
        return "its process was ended from outside, as for want of memory, or crashed"


def calls_plugins(spec: Spec) -> bool:
    """Whether a part of a spec is loaded from a path, as package.module:Name."""
    left: list[Any] = [spec.attack, spec.aggregator, spec.worker]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            left += [entry for key, entry in part.items() if key == "name" or isinstance(entry, Mapping)]
        elif ":" in str(part):
            return True
    return False


def batches(specs: Sequence[Spec], most: int) -> list[list[int]]:
    """Which to run side by side, by position: those next to one another by data set, attackers' share and attack.

    Their rounds take about as long, and a batch waits for its last.
    """
    like = sorted(range(len(specs)), key=lambda i: (specs[i].dataset, specs[i].byzantine, str(specs[i].attack)))
    return [like[first : first + most] for first in range(0, len(like), most)]


def left_of_part(specs: Sequence[Spec], part: str, most: int, done: Container[str]) -> list[Spec]:
    """What is left to one of several processes that share these runs, as "2/4"; done: names of runs.

    First to each its own batches, then without those that are done: however far the others are, no run is lost.
    """
    number, parts = map(int, part.split("/"))
    own = [specs[i] for batch in batches(specs, most)[number - 1 :: parts] for i in batch]
    return [spec for spec in own if spec.name() not in done]


def alone(spec: Spec, compute: Compute) -> Outcome:
    """What comes of one run."""
    try:
        return outcome_of(run(spec, compute=compute))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of anyone's attack or rule; the search goes on without it
        return broken(error)


def side_by_side(specs: Sequence[Spec], compute: Compute) -> list[Outcome]:
    """What comes of runs that share a device. If one of them breaks, both halves are tried by themselves."""

    def together(specs: Sequence[Spec]) -> list[Outcome]:
        return [outcome_of(result) for result in run_together(specs, compute=compute)]

    return halved(specs, together, lambda spec: alone(spec, compute))


def halved(specs: Sequence[Spec], together: Callable[[Sequence[Spec]], list[T]], one: Callable[[Spec], T]) -> list[T]:
    """What comes of all specs together; where that breaks, of the halves, and in the end of each by itself."""
    if len(specs) < 2:
        return [one(spec) for spec in specs]
    try:
        return together(specs)
    except (Exception, SystemExit):  # noqa: BLE001  # whatever it was, it comes again where it belongs
        half = len(specs) // 2
    # Out here the error is gone, and with it the memory of what it broke.
    return [*halved(specs[:half], together, one), *halved(specs[half:], together, one)]


def outcome_of(result: Result) -> Outcome:
    """What came of a run that ended."""
    return Outcome("done", result.accuracy, result.byzantine_selected, result.honest_rejected)


def broken(error: BaseException) -> Outcome:
    """What came of a run that raised."""
    if isinstance(error, SpecError):
        return Outcome("skipped", message=checks.told(error))
    return Outcome("failed", message=f"{type(error).__name__}: {checks.told(error)}")


def _serve(line: Connection, compute: Compute, one: One) -> None:
    """Run what comes in until nobody asks any more."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        torch.set_num_threads(compute.threads or 1)
        while True:
            spec = line.recv()
            line.send(None)
            line.send(one(spec, compute))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _interrupt(number: int, _: object) -> None:
    """To be ended is to be interrupted, so that a run is saved; once, so that nothing interrupts the saving."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _deaf() -> Iterator[None]:
    """A process started here ignores Ctrl-C, which reaches all processes of a terminal: the first one ends the rest."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
