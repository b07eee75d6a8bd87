"""How a server stands, read from its folder by anyone who may. Nothing is asked of the server itself."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.federation.checkpoint import STATUSES
from noisegate.federation.keys import NAME
from noisegate.federation.store import RESULT, STATUS
from noisegate.files import count, number, parse, read_json, read_whole
from noisegate.locks import LOCK, take

MOST_STATUS = 2**26
MOST_RECORD = 2**31
"""The largest files that are read, in bytes."""


@dataclass(frozen=True)
class WorkerStatus:
    """How a worker stands at the server.

    last: its status in the last round, and why. rounds: how many had each status. weight: its mean weight over all
    judged rounds. k: missed deadlines, less what was recovered.
    """

    connected: bool
    last: str
    rounds: dict[str, int]
    weight: float
    k: int
    left: str


@dataclass(frozen=True)
class ServerStatus:
    """How a server stands. running: whether a process holds its folder. time: when it was written."""

    running: bool
    time: float
    state: str
    why: str
    title: str
    round: int
    rounds: int
    judged: int
    accuracy: float | None
    workers: dict[str, WorkerStatus]


def read_status(server: Path) -> ServerStatus | None:
    """How a server stands; None if it was never started. StoreError if its status is damaged."""
    path = server / "state" / STATUS
    try:
        found = read_json(path, MOST_STATUS)
        texts = [_text(found[name]) for name in ("state", "why", "title")]
        last, rounds, judged, accuracy = (found[name] for name in ("round", "rounds", "judged", "accuracy"))
        sound = count(rounds) and count(judged) and number(found["time"]) and isinstance(last, int) and last >= -1
        if not sound or not (accuracy is None or number(accuracy)):
            raise ValueError
        workers = {_name(name): _worker(each, judged) for name, each in found["workers"].items()}
    except FileNotFoundError:
        return None
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StoreError(f"{plain(path)}: is damaged; the server writes it anew when it runs") from None
    state, why, title = texts
    at = float(found["time"])
    return ServerStatus(runs(server), at, state, why, title, last, rounds, judged, accuracy, workers)


def runs(server: Path) -> bool:
    """Whether a process holds the lock of the server's state."""
    try:
        file = os.open(server / "state" / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not take(file, exclusive=False)
    finally:
        os.close(file)


def read_result(server: Path) -> dict[str, Any] | None:
    """What came of the run of a server; None while there is nothing."""
    path = server / "state" / RESULT
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("workers"), dict):
        raise StoreError(f"{plain(path)}: is damaged")
    return found


class RecordTail:
    """Reads the rounds that a server adds to its record, a few at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def more(self) -> list[dict[str, Any]]:
        """The rounds since the last call. A server that starts again may take some back; they are given once more."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                content = file.read()
        except OSError:
            return []
        whole = content.rfind(b"\n") + 1
        self._at += whole
        lines = [_line(line) for line in content[:whole].splitlines()]
        return [line for line in lines if line is not None]


def read_record(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(the readable rounds of a record, how many lines are damaged)."""
    try:
        lines = read_whole(path, MOST_RECORD).split(b"\n")
    except FileNotFoundError:
        return [], 0
    found = [_line(line) for line in lines[:-1]]
    whole = [line for line in found if line is not None]
    return whole, len(found) - len(whole)


def _line(content: bytes) -> dict[str, Any] | None:
    """A line of a record, once it is known to be one."""
    try:
        found = parse(content, "rounds.jsonl")
        if not count(found["round"]) or not (found.get("accuracy") is None or number(found["accuracy"])):
            return None
        for name, fate in found["workers"].items():
            weight = fate.get("weight", 0.0)
            if not NAME.fullmatch(name) or fate["status"] not in STATUSES or not number(weight):
                return None
        seconds = found.get("seconds", {})
        if not all(map(number, seconds.values())):
            return None
    except (StoreError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def _worker(found: dict[str, Any], judged: int) -> WorkerStatus:
    why = found.get("reason") or found.get("detail") or ""
    last = f"{_text(found['status'])}{f' ({_text(why)})' if why else ''}"
    rounds = {word: found["rounds"][word] for word in STATUSES}
    if not all(map(count, (*rounds.values(), found["k"]))) or not number(found["weight_total"]):
        raise ValueError
    mean = found["weight_total"] / max(1, judged)
    return WorkerStatus(bool(found["connected"]), last, rounds, mean, found["k"], _text(found["left"]))


def _name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return plain(value)
