"""Many runs at a time on a Ray cluster (Moritz et al., 2018)."""

import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from noisegate.checks import refuse
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.runs.spec import Spec
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.pool import GRACE, One, Pool, Several

ADDRESS = "RAY_ADDRESS"
"""The environment variable with the address of the cluster."""

RETRIES = 5
"""How often a run may lose its process before it counts as failed. Each time it resumes from its folder."""

PATIENCE = 10.0
"""Seconds that a cluster has to answer."""


class RayPool(Pool):
    """A pool whose runs are tasks of Ray: one task for each run on CPUs, or for each batch that shares a GPU.

    RAY_ADDRESS says where the cluster is. Without it, and unless this process has started Ray itself, a cluster is
    started on this machine, with `jobs` times the threads of a run as its CPUs. Ray replaces a process that dies.
    """

    def __init__(
        self,
        compute: Compute,
        jobs: int | None = None,
        one: One | None = None,
        several: Several | None = None,
        time_limit: float | None = None,
    ) -> None:
        super().__init__(compute, jobs, one, several)
        if time_limit is not None:  # a task may wait for hours, and Ray does not tell when it begins
            raise refuse("time_limit", time_limit, "cannot be kept with engine = 'ray'; use --engine local")
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError:
            raise SpecError(
                "engine = 'ray': Ray is not installed here; pip install 'noisegate[ray]', or use --engine local"
            ) from None
        self.address = os.environ.get(ADDRESS, "").removeprefix("local")
        self._most = jobs  # tasks that are submitted at a time; None: all, and Ray decides how many run
        self._started = False
        self._pending: dict[Any, range] = {}

    @property
    def pace(self) -> str:
        """How many runs at a time, as text."""
        return super().pace if self._most or not self.address else "as many at a time as the cluster has room for"

    def __enter__(self) -> "RayPool":
        if self.ray.is_initialized():
            return self
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address:
                _check_address(self.address)
                self.ray.init(address=self.address, **quiet)
            else:
                cpus = self.jobs * (self.compute.threads or 1)
                self.ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            told = " ".join(str(error).split())
            where = f"{ADDRESS} = {self.address!r}" if self.address else "engine = 'ray'"
            raise SpecError(f"{where}: no Ray there ({told}); see `ray status`, or use --engine local") from None
        self._started = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Interrupt what still runs, which saves where it stands."""
        if not self.ray.is_initialized():
            return
        for task in self._pending:
            self.ray.cancel(task)
        if self._pending:
            self.ray.wait(list(self._pending), num_returns=len(self._pending), timeout=GRACE)
            self._pending.clear()
        if self._started:
            self.ray.shutdown()

    def play(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Outcome]]:
        """(position of the spec, what came of it), in the order in which the runs end."""
        size = self.jobs if self.cuda else 1
        waiting = [range(first, min(first + size, len(specs))) for first in range(0, len(specs), size)][::-1]
        most = len(waiting) if self._most is None or self.cuda else self._most
        needs = {"num_gpus": 1} if self.cuda else {"num_cpus": self.compute.threads}
        task = self.ray.remote(max_retries=RETRIES, **needs)(_task)
        while waiting or self._pending:
            while waiting and len(self._pending) < most:
                which = waiting.pop()
                batch = [specs[i] for i in which]
                self._pending[task.remote(self.one, self.several, batch, self.compute, os.getcwd())] = which
            ready, _ = self.ray.wait(list(self._pending), timeout=1.0)
            for ended in ready:
                which = self._pending.pop(ended)
                yield from zip(which, self._outcomes(ended, len(which)), strict=True)

    def _outcomes(self, ended: Any, count: int) -> list[Outcome]:
        try:
            found: list[Outcome] = self.ray.get(ended)
            return found
        except self.ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1:] or [""]
            return [Outcome("failed", message=f"{type(error).__name__}: {last[0]}")] * count


def _check_address(address: str) -> None:
    """Raise OSError if no one answers at the address. Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _task(one: One, several: Several, specs: Sequence[Spec], compute: Compute, folder: str) -> list[Outcome]:
    """What a process of the cluster does. folder: where relative paths start from."""
    os.chdir(folder)
    if len(specs) > 1:
        return several(specs, compute)
    torch.set_num_threads(compute.threads or 1)
    return [one(spec, compute) for spec in specs]
