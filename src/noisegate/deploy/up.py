"""Runs a trial: a server and its workers as real processes on this machine, watched until the run is over."""

import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisegate.checks import plain
from noisegate.deploy import layout
from noisegate.deploy.child import ATTACKER
from noisegate.deploy.members import read_roster
from noisegate.deploy.processes import Children
from noisegate.deploy.status import RecordTail, ServerStatus, read_result, read_status
from noisegate.deploy.trial import LocalTrial
from noisegate.errors import FederationError, NoisegateError
from noisegate.federation.ledger import spendings
from noisegate.federation.ledger_folder import read_ledger
from noisegate.federation.policy import Policy
from noisegate.federation.settings import ServerSettings
from noisegate.federation.spending import price
from noisegate.federation.store import RECORD
from noisegate.locks import alone

LOOK, PRICED = 0.25, 3.0
"""Seconds between two looks at the processes, and between two looks at the ledgers."""

LEAVING = 20.0
"""Seconds that workers have to leave once the server has ended."""


@dataclass(frozen=True)
class Snapshot:
    """How a trial stands. waiting: whom it waits for before it begins. spent: the epsilon of each worker so far.

    evaluated: (round, accuracy) of the rounds that were evaluated since the last snapshot. ended: the exit status of
    each worker whose process has ended.
    """

    status: ServerStatus | None
    waiting: list[str]
    spent: dict[str, float]
    ended: dict[str, int]
    evaluated: list[tuple[int, float]]
    seconds: float


@dataclass
class Budgets:
    """What each worker has spent, read from the ledgers and priced in a thread of its own."""

    trial: LocalTrial
    names: list[str]
    spent: dict[str, float] = field(default_factory=dict)
    _prices: dict[Any, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Budgets":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def look(self) -> None:
        """Read every ledger, and price what is new. One that cannot be read yet is left out."""
        for name in self.names:
            folder = self.trial.worker(name)
            try:
                book, _ = read_ledger(folder / "ledger")
                delta, rounds = Policy.read(folder / "policy.toml").delta, spendings(book)
                key = delta, tuple(rounds)
                if key not in self._prices:
                    self._prices[key] = price(rounds, delta)
                self.spent[name] = self._prices[key]
            except NoisegateError:
                continue
            if self._stop.is_set():
                return

    def _watch(self) -> None:
        while not self._stop.wait(PRICED):
            self.look()


def run_trial(trial: LocalTrial, tell: Callable[[Snapshot], None]) -> dict[str, Any]:
    """Run a trial to its end, and give what came of it. All processes are gone when this returns or raises.

    tell: called with how it stands, a few times a second. FederationError if the server or too many workers fail.
    """
    with alone(trial.folder):
        names, began = list(read_roster(trial.server).keys), time.monotonic()
        budgets = Budgets(trial, names)
        if read_result(trial.server) is None:
            settings = ServerSettings.read(trial.server / layout.SETTINGS)
            check_port(settings)
            with Children(trial.folder / layout.LOGS) as children, budgets:
                _start(trial, names, children)
                _watch(_Watched(trial, settings, names, children, budgets, began), tell)
        budgets.look()
        return _outcome(trial, budgets.spent, time.monotonic() - began)


@dataclass(frozen=True)
class _Watched:
    trial: LocalTrial
    settings: ServerSettings
    names: list[str]
    children: Children
    budgets: Budgets
    began: float


def _start(trial: LocalTrial, names: list[str], children: Children) -> None:
    children.start(layout.SERVER, ["serve", str(trial.server.resolve())])
    for name in names:
        if name in trial.hostile:
            children.start(name, [ATTACKER, str(trial.folder.resolve()), name])
        else:
            children.start(name, ["join", str(trial.worker(name).resolve())])


def _watch(run: _Watched, tell: Callable[[Snapshot], None]) -> None:
    """Look at the processes until the server has ended."""
    tail, since = RecordTail(run.trial.server / "state" / RECORD), time.time()
    tail.more()  # what an earlier process left was shown then
    while (status := run.children.ended(layout.SERVER)) is None:
        _check_workers(run)
        tell(_snapshot(run, tail, since))
        time.sleep(LOOK)
    if status != 0 or read_result(run.trial.server) is None:
        raise failed(run.children, layout.SERVER, f"the server ended with status {status}")
    tell(_snapshot(run, tail, since))
    run.children.wait(LEAVING)


def _snapshot(run: _Watched, tail: RecordTail, since: float) -> Snapshot:
    status = read_status(run.trial.server)
    if status and status.time < since:
        status = None  # of an earlier process
    connected = {name for name, one in status.workers.items() if one.connected} if status else set()
    ended = {name: code for name in run.names if (code := run.children.ended(name)) is not None}
    waiting = [name for name in run.names if name not in connected and name not in ended]
    evaluated = [(line["round"] + 1, line["accuracy"]) for line in tail.more() if line.get("accuracy") is not None]
    early = status is None or status.state in ("recover", "gather", "paused")
    first = ["server"] if status is None else []
    took = time.monotonic() - run.began
    return Snapshot(status, (first + waiting) if early else [], dict(run.budgets.spent), ended, evaluated, took)


def _check_workers(run: _Watched) -> None:
    """FederationError if so many workers have failed that no round can begin any more."""
    wrong = [name for name in run.names if run.children.ended(name) not in (None, 0)]
    if len(run.names) - len(wrong) < run.settings.quorum:
        raise failed(run.children, wrong[-1], f"{len(wrong)} of {len(run.names)} workers have failed")


def failed(children: Children, name: str, what: str) -> FederationError:
    """The error for a process that failed, with the last lines of its log."""
    lines = children.last_lines(name).splitlines()
    said = " | ".join(line for line in lines if line) or "it printed nothing"
    return FederationError(f"{what}; the end of {plain(children.log(name))}: {said}")


def check_port(settings: ServerSettings) -> None:
    """FederationError if the server could not listen."""
    host, port = settings.address()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FederationError(f"{settings.listen}: {error.strerror}; --port 0 picks a free one") from None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def use_port(trial: LocalTrial, port: int) -> None:
    """Let the trial's server listen on another port, and its workers dial it."""
    layout.change_setting(trial.server / layout.SETTINGS, "listen", f"127.0.0.1:{port}")
    for name in read_roster(trial.server).keys:
        layout.change_setting(trial.worker(name) / "worker.toml", "server", f"127.0.0.1:{port}")


def _outcome(trial: LocalTrial, spent: dict[str, float], seconds: float) -> dict[str, Any]:
    """What came of a trial: the server's result, who was hostile, and what it cost each worker."""
    result = read_result(trial.server) or {}
    workers = {
        name: {
            "hostile": name in trial.hostile,
            "weight": one["weight"],
            "epsilon": round_up(spent.get(name)),
            "rounds": one["rounds"],
        }
        for name, one in result["workers"].items()
    }
    used = sum(one["weight"] for one in workers.values())
    hostile = sum(one["weight"] for one in workers.values() if one["hostile"])
    return {
        "accuracy": result.get("accuracy"),
        "rounds": result.get("judged"),
        "hostile": list(trial.hostile),
        "attack": trial.spec.canonical()["attack"]["name"],
        "aggregator": result["aggregator"]["name"],
        "hostile_weight": hostile / used if used else 0.0,
        "epsilon": result.get("epsilon"),
        "delta": result.get("delta"),
        "sigma": result["terms"]["sigma"],
        "workers": workers,
        "stalled": result.get("stalled"),
        "why": result.get("why") or "",
        "seconds": seconds,
        "out": str(trial.folder),
    }


def round_up(epsilon: float | None) -> float | None:
    """An epsilon with four decimals, never less than it is."""
    return None if epsilon is None or not math.isfinite(epsilon) else math.ceil(epsilon * 1e4) / 1e4


def trial_folder(path: Path) -> bool:
    """Whether a folder holds a trial."""
    return (path / layout.TRIAL).is_file()
