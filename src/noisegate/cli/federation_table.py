"""How a federation stands, for people: a live table on a terminal, and otherwise a line now and then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.table import Table

from noisegate.checks import rounded
from noisegate.cli.bar import SILENCE
from noisegate.cli.terminal import Console
from noisegate.deploy.status import ServerStatus, WorkerStatus
from noisegate.deploy.up import Snapshot, round_up

STATES = {
    "recover": "starting",
    "gather": "waiting for workers",
    "paused": "paused",
    "collect": "running",
    "done": "done",
}
"""The states of a server, in words."""


class TrialView:
    """Shows snapshots of a trial. hostile: who attacks, which only a trial knows. epsilon: the budget of a worker."""

    def __init__(self, console: Console, hostile: tuple[str, ...], epsilon: float | None) -> None:
        self.console, self.hostile, self.epsilon = console, hostile, epsilon
        self._live: Live | None = None
        self._said, self._spoke = "", 0.0

    @contextmanager
    def shown(self) -> Iterator["TrialView"]:
        """Draw the table while the context is open, if anybody sees it."""
        if not self.console.is_terminal or self.console.quiet:
            yield self
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            yield self

    def tell(self, now: Snapshot) -> None:
        """Show how the trial stands."""
        if self._live is not None:
            self._live.update(self._table(now), refresh=True)
            return
        for round, accuracy in now.evaluated:
            self._say(f"round {round} of {now.status.rounds if now.status else '?'}: accuracy {accuracy:.3f}")
        said = _waits(now)
        if said and (said != self._said and time.monotonic() - self._spoke > SILENCE / 5):
            self._said, self._spoke = said, time.monotonic()
            self._say(said)

    def _say(self, line: str) -> None:
        self.console.print(f"up: {line}", soft_wrap=True, highlight=False)

    def _table(self, now: Snapshot) -> Table:
        status = now.status
        table = Table(box=None, pad_edge=False, title=_title(now), title_justify="left", title_style="bold")
        for name in ("worker", "status", "weight", "k", "epsilon"):
            table.add_column(name, justify="left" if name in ("worker", "status") else "right")
        for name, one in (status.workers if status else {}).items():
            word = f"ended with {now.ended[name]}" if now.ended.get(name) else one.last
            budget = "" if self.epsilon is None else f" of {self.epsilon:g}"
            spent = f"{round_up(now.spent[name])}{budget}" if name in now.spent else ""
            style = "red" if name in self.hostile else None
            table.add_row(f"{name}{' (hostile)' if style else ''}", word, *_numbers(one), spent, style=style)
        return table


def _title(now: Snapshot) -> str:
    status = now.status
    if status is None or now.waiting:
        return f"{_waits(now)} ({now.seconds:.0f} s)"
    accuracy = "" if status.accuracy is None else f", accuracy {status.accuracy:.3f}"
    why = f": {status.why}" if status.why else ""
    state = STATES.get(status.state, status.state)
    return f"round {status.round + 1} of {status.rounds}{accuracy}, {state}{why} ({now.seconds:.0f} s)"


def _waits(now: Snapshot) -> str:
    if not now.waiting:
        return ""
    some = ", ".join(now.waiting[:8]) + (f" and {len(now.waiting) - 8} more" if len(now.waiting) > 8 else "")
    why = now.status.why if now.status else ""
    return f"waiting for {some}{f'; {why}' if why else ''}"


def _numbers(one: WorkerStatus) -> tuple[str, str]:
    return f"{one.weight:.3f}", f"{one.k}"


def show_status(status: ServerStatus, console: Console) -> None:
    """Print how a server stands, and a table of its workers."""
    accuracy = "not taken yet" if status.accuracy is None else f"{status.accuracy:.3f}"
    state = STATES.get(status.state, status.state)
    if not status.running and status.state != "done":
        state = "stopped: no server process is running"
    elif status.why:
        state = f"{state}: {status.why}"
    rows = [
        ("state", state),
        ("round", f"{status.round + 1} of {status.rounds}, {status.judged} judged"),
        ("accuracy", accuracy),
    ]
    head = Table(box=None, show_header=False, pad_edge=False)
    head.add_column(style="bold")
    for row in rows:
        head.add_row(*row)
    console.print(head)
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "connected", "last round", "weight", "used", "refused", "missing", "other", "k"):
        table.add_column(name, justify="left" if name in ("worker", "connected", "last round") else "right")
    for name, one in status.workers.items():
        told = [one.rounds[word] for word in ("used", "refused", "missing")]
        other = sum(one.rounds.values()) - sum(told)
        here = "yes" if one.connected and status.running else "no"
        table.add_row(name, here, one.last, f"{one.weight:.3f}", *map(str, told), str(other), str(one.k))
    console.print(table)


def show_outcome(found: dict[str, Any], console: Console) -> None:
    """Print the short table that ends a trial."""
    workers = found["workers"]
    honest = [one for one in workers.values() if not one["hostile"]]
    spent = [one["epsilon"] for one in honest if one["epsilon"] is not None]
    accuracy = "–" if found["accuracy"] is None else f"{found['accuracy']:.3f}"
    attacked = f"{found['attack']} by {len(found['hostile'])} of {len(workers)} workers"
    rows = [("accuracy", accuracy, f"{found['aggregator']} against {attacked}")]
    if found["why"]:
        rows.append(("ended early", "", found["why"]))
    if found["hostile"]:
        share = f"of the weight in the model; they are {len(found['hostile']) / len(workers):.0%} of the workers"
        rows.append(("hostile weight", f"{found['hostile_weight']:.1%}", share))
    if spent:
        note = f"the most that an honest worker spent of {found['epsilon']:g}, delta {found['delta']:.2g}"
        rows.append(("epsilon", rounded(max(spent), 4), f"{note}, sigma {found['sigma']:.3f}"))
    rows.append(("time", f"{found['seconds']:.1f} s", f"{found['rounds']} rounds judged"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    each = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("worker", "mean weight", "used", "refused", "missing", "epsilon spent"):
        each.add_column(name, justify="left" if name == "worker" else "right")
    for name, one in workers.items():
        counts = [str(one["rounds"][word]) for word in ("used", "refused", "missing")]
        cost = "–" if one["epsilon"] is None else rounded(one["epsilon"], 4)
        each.add_row(f"{name}{' (hostile)' if one['hostile'] else ''}", f"{one['weight']:.3f}", *counts, cost)
    console.print(each)
    console.print(f"written to {found['out']}", style="dim", soft_wrap=True)
