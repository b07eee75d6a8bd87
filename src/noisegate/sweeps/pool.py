"""Many runs at a time: in processes of their own on a CPU, side by side on a CUDA device."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TypeVar

import torch

from noisegate import checks
from noisegate.compute import Compute
from noisegate.errors import OneClassWarning
from noisegate.runs.launch import run, run_together
from noisegate.runs.spec import Spec
from noisegate.runs.unbuilt import uses_plugins
from noisegate.sweeps.outcome import Outcome, broken, outcome_of
from noisegate.version import __version__

SIDE_BY_SIDE = 16
"""How many runs share a CUDA device, unless `jobs` says otherwise."""

MOST_JOBS = 1024
"""The largest number of runs at a time."""

GRACE = 20.0
"""Seconds that an interrupted process has to save where its run stands."""

LATE_GRACE = 2.0
"""Seconds that a process has to end when its run has reached the time limit. It may hang."""

T = TypeVar("T")

One = Callable[[Spec, Compute], Outcome]
"""Runs a spec in a process of the pool."""

Several = Callable[[Sequence[Spec], Compute], list[Outcome]]
"""Runs specs side by side on a CUDA device."""


class Pool:
    """Runs specs, and tells what came of each as soon as it has ended. A run that raises stops no other.

    A run that uses a plugin gets a process of its own even with one job: the plugin may exit, or never return.

    jobs: how many runs at a time; None is one for each core, or 16 on a CUDA device. On a CPU a run has one thread
    unless `compute` says otherwise, so that its numbers do not depend on how many run beside it.
    one: what is done with a spec; a function that another process can import. several: what is done with specs that
    share a CUDA device. The defaults leave nothing on disk.
    time_limit: seconds that a run may take. Then its process is ended, and the run has failed.
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
        self.cuda = compute.resolve().type == "cuda"
        if time_limit is not None:
            checks.positive(time_limit=time_limit)
            if self.cuda:
                why = "runs on a CUDA device share a process, and one alone cannot be ended; use --device cpu"
                raise checks.refuse("time_limit", time_limit, why)
        self.time_limit = time_limit
        self.compute = compute if self.cuda else replace(compute, threads=compute.threads or 1)
        self.jobs = jobs or (SIDE_BY_SIDE if self.cuda else max(1, _cores() // (self.compute.threads or 1)))
        self.one, self.several = one or alone, several or side_by_side
        self._processes: dict[Connection, BaseProcess] = {}

    @property
    def how(self) -> str:
        """The version and the flags. Runs with another version or other flags may give other numbers."""
        return f"noisegate {__version__} {self.flags}"

    @property
    def flags(self) -> str:
        """The flags with which `noisegate run`, of this version, gives the numbers of this pool, to the last digit."""
        flags = "--device cuda" if self.cuda else f"--device cpu --threads {self.compute.threads}"
        return flags if self.compute.memory is None else f"{flags} --memory {self.compute.memory}"

    @property
    def pace(self) -> str:
        """How many runs at a time, as text."""
        return f"{self.jobs} at a time"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes. A run with a folder saves where it stands."""
        for process in self._processes.values():
            process.terminate()
        end = time.monotonic() + GRACE
        for connection in list(self._processes):
            self._end_process(connection, max(0.1, end - time.monotonic()))

    def play(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Outcome]]:
        """(position of the spec, what came of it), in the order in which the runs end."""
        if self.cuda:
            for batch in batches(specs, self.jobs):
                yield from zip(batch, self.several([specs[i] for i in batch], self.compute), strict=True)
        elif self.jobs == 1 and self.time_limit is None and not any(uses_plugins(spec.canonical()) for spec in specs):
            yield from ((i, self.one(spec, self.compute)) for i, spec in enumerate(specs))
        else:
            yield from self._play_in_processes(specs)

    def _play_in_processes(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Outcome]]:
        waiting, busy = deque(enumerate(specs)), dict[Connection, int]()
        due = dict[Connection, float]()  # when a run reaches its time limit
        while waiting or busy:
            while waiting and len(busy) < self.jobs:
                idle = next((one for one in self._processes if one not in busy), None) or self._start_process()
                try:
                    idle.send(waiting[0][1])
                except ConnectionError:
                    self._end_process(idle)  # it died while it was idle
                    continue
                busy[idle] = waiting.popleft()[0]
            left = max(0.0, min(due.values()) - time.monotonic()) if due else None
            for ready in wait(list(busy), left):
                connection = next(one for one in busy if one is ready)
                try:
                    outcome: Outcome | None = connection.recv()
                except (EOFError, ConnectionError):
                    outcome = Outcome("failed", message=self._why_it_ended(connection))
                    self._end_process(connection)
                if outcome is None:  # the run has begun; the time to start Python and import torch does not count
                    if self.time_limit is not None:
                        due[connection] = time.monotonic() + self.time_limit
                    continue
                due.pop(connection, None)
                yield busy.pop(connection), outcome
            for connection in [one for one, end in due.items() if end <= time.monotonic()]:
                del due[connection]
                self._end_process(connection, LATE_GRACE)
                message = f"took longer than its time limit, {self.time_limit:g} s, and was ended"
                yield busy.pop(connection), Outcome("failed", message=message)

    def _start_process(self) -> Connection:
        """The connection to a new process of the pool."""
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        process = context.Process(target=_serve, args=(theirs, self.compute, self.one), daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def _end_process(self, connection: Connection, grace: float = GRACE) -> None:
        """End a process of the pool: interrupt it, and kill it after `grace` seconds."""
        process = self._processes.pop(connection)
        process.terminate()
        process.join(grace)
        process.kill()
        process.join()
        connection.close()

    def _why_it_ended(self, connection: Connection) -> str:
        """Why a process has closed its connection, as text."""
        process = self._processes[connection]
        process.join(1.0)
        if (status := process.exitcode) is not None and status >= 0:
            return f"its process ended in the middle of it (status {status}), as code that exits does"
        return "its process was ended from outside, as for want of memory, or crashed"


def batches(specs: Sequence[Spec], most: int) -> list[list[int]]:
    """Which specs to run side by side, by position: at most `most` with similar data set, Byzantine share and attack.

    Rounds of similar runs take about as long, and a batch waits for its slowest run.
    """
    order = sorted(range(len(specs)), key=lambda i: (specs[i].dataset, specs[i].byzantine, str(specs[i].attack)))
    return [order[first : first + most] for first in range(0, len(order), most)]


def left_of_part(specs: Sequence[Spec], part: str, most: int, done: Container[str]) -> list[Spec]:
    """The specs that are left to one of several processes. part: which, as "2/4". done: names of runs that ended.

    The batches are shared out before runs that are done are dropped, so the shares do not depend on what is done.
    """
    number, parts = map(int, part.split("/"))
    own = [specs[i] for batch in batches(specs, most)[number - 1 :: parts] for i in batch]
    return [spec for spec in own if spec.name() not in done]


def alone(spec: Spec, compute: Compute) -> Outcome:
    """Run one spec."""
    try:
        return outcome_of(run(spec, compute=compute))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # plugins raise anything; the pool goes on
        return broken(error)


def side_by_side(specs: Sequence[Spec], compute: Compute) -> list[Outcome]:
    """Run specs side by side on one device. If that raises, each half of them is run by itself."""

    def together(specs: Sequence[Spec]) -> list[Outcome]:
        return [outcome_of(result) for result in run_together(specs, compute=compute)]

    return halved(specs, together, lambda spec: alone(spec, compute))


def halved(specs: Sequence[Spec], together: Callable[[Sequence[Spec]], list[T]], one: Callable[[Spec], T]) -> list[T]:
    """The results of all specs together; if that raises, of each half, and in the end of each spec by itself."""
    if len(specs) < 2:
        return [one(spec) for spec in specs]
    try:
        return together(specs)
    except (Exception, SystemExit):  # noqa: BLE001  # the run that raised will raise again by itself
        half = len(specs) // 2
    # Outside of the except clause the error is freed, and with it the memory of the runs.
    return [*halved(specs[:half], together, one), *halved(specs[half:], together, one)]


def _serve(connection: Connection, compute: Compute, one: One) -> None:
    """What a process of the pool does: run each spec that comes in, until the connection is closed."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.simplefilter("ignore", OneClassWarning)  # a table says it of all runs, with their balanced accuracy
    try:
        torch.set_num_threads(compute.threads or 1)
        while True:
            spec = connection.recv()
            connection.send(None)
            connection.send(one(spec, compute))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _interrupt(number: int, _: object) -> None:
    """Turn SIGTERM into KeyboardInterrupt, so that a run is saved; once, so that nothing interrupts the saving."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started within ignore Ctrl-C, which reaches all processes of a terminal. The pool ends them itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
