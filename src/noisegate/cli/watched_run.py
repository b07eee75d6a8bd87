"""How far a run is, read from its folder while it is running."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.report.folders import RunRecord, number, read_run
from noisegate.runs.checkpoints import read_standing
from noisegate.runs.store import CHECKPOINT

SILENCE = 60.0
"""Seconds after which a job that wrote nothing may have been interrupted."""


@dataclass(frozen=True)
class WatchedRun:
    """How far a run is, as its files tell. total: rounds; 0 if not known. age: seconds since something was written."""

    record: RunRecord
    played: int
    total: int
    seconds: float
    age: float

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.record.status != "unfinished"


def read_watched(path: Path) -> WatchedRun:
    """How far a run is."""
    record = read_run(path, beside=False)
    last = int(record.curve[-1]["round"]) if record.curve else 0
    if record.result:
        return WatchedRun(
            record, int(record.result["rounds"]), int(record.result["rounds"]), _seconds(record.result), 0.0
        )
    total = (record.spec.rounds if record.spec else None) or 0
    saved = read_standing(path / CHECKPOINT)
    written = [found.stat().st_mtime for found in path.glob("*") if found.is_file()]
    age = max(0.0, time.time() - max(written, default=time.time()))
    if saved is None:
        return WatchedRun(record, last, total, 0.0, age)
    return WatchedRun(record, saved.rounds, saved.of, saved.seconds, age)


def _seconds(result: dict[str, Any]) -> float:
    return float(result["seconds"]) if number(result.get("seconds")) else 0.0


def describe(watched: WatchedRun) -> str:
    """How far a run is, in one line."""
    record = watched.record
    said = [f"round {watched.played}" + (f" of {watched.total}" if watched.total else "")]
    if record.curve:
        said.append(f"accuracy {record.curve[-1]['accuracy']:.3f}")
    if watched.played and watched.seconds:
        pace = watched.seconds / watched.played
        said.append(f"{1e3 * pace:.1f} ms a round")
        if not watched.over and watched.total > watched.played:
            left = max(0.0, pace * (watched.total - watched.played) - watched.age)
            said.append(f"about {span(left)} left")
    if watched.over:
        said.append(record.status)
    elif watched.age > max(SILENCE, 0.2 * watched.seconds):
        said.append(f"nothing written for {span(watched.age)}: interrupted?")
    return ", ".join(said)


def span(seconds: float) -> str:
    """A duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
