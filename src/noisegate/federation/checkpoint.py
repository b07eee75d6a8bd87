"""Where a server stands after a judged round. Everything that is read back is checked."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisegate.checks import LARGEST, plain
from noisegate.errors import StoreError
from noisegate.federation.keys import NAME
from noisegate.federation.patience import LARGEST_K, Attendance
from noisegate.federation.tensors import damaged, finite, read_tensors, write_tensors
from noisegate.federation.terms import MOST_ROUNDS, Terms
from noisegate.files import count, number

KIND, STATE = "noisegate server checkpoint 1", "state."
NO_UPLOAD = -1
"""The slot of a worker from which nothing is kept: no upload was received yet, or the last one was malformed."""

STATUSES = ("used", "refused", "malformed", "forged", "late", "missing")
"""What became of a worker's upload in a round."""

MOST_WHY = 200
"""Characters of a reason that a worker gave."""


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint is of. names: the workers, in the order of their rows."""

    terms: Terms
    aggregator: dict[str, Any]
    names: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {"terms": self.terms.as_dict(), "aggregator": self.aggregator, "names": list(self.names)}

    def with_names(self, names: tuple[str, ...]) -> "RunIdentity":
        """The same with other workers."""
        return dataclasses.replace(self, names=names)


@dataclass
class Totals:
    """What one worker's rounds add up to. weight: the sum of its weights. rounds: how many had each status."""

    weight: float = 0.0
    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))


@dataclass
class ServerCheckpoint:
    """All that a server must know to go on.

    round: the last judged one, -1 before the first. judged: how many were. seed: of ties. params: the model.
    aggregator: its state. slots, digests: where each worker's last upload lies in the uploads file, and its sha256.
    spent: of the stall. accuracy: the last one that was taken. line: of the last round in the record.
    """

    seed: int
    params: Tensor
    slots: list[int]
    digests: list[str]
    standings: list[Attendance]
    totals: list[Totals]
    aggregator: dict[str, Tensor] = field(default_factory=dict)
    round: int = -1
    judged: int = 0
    spent: float = 0.0
    accuracy: float | None = None
    line: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def first(cls, seed: int, params: Tensor, workers: int) -> "ServerCheckpoint":
        """Before the first round."""
        each = range(workers)
        standings, totals = [Attendance() for _ in each], [Totals() for _ in each]
        return cls(seed, params, [NO_UPLOAD] * workers, [""] * workers, standings, totals)

    def write(self, path: Path, identity: RunIdentity) -> None:
        """Write it, whole or not at all."""
        tensors = {"params": self.params, **{STATE + name: value for name, value in self.aggregator.items()}}
        plainly = ("seed", "round", "judged", "spent", "accuracy", "slots", "digests", "line")
        about = {
            "kind": KIND,
            **identity.as_dict(),
            **{name: getattr(self, name) for name in plainly},
            "standings": [list(vars(each).values()) for each in self.standings],
            "totals": [[each.weight, *each.rounds.values()] for each in self.totals],
        }
        write_tensors(path, tensors, about)


def read_checkpoint(path: Path, identity: RunIdentity) -> tuple[ServerCheckpoint, RunIdentity]:
    """The checkpoint in a file, and what it is of: its workers stay those that the run began with.

    StoreError if it is damaged or of another run; FileNotFoundError if there is none.
    """
    tensors, about = read_tensors(path)
    if about.get("kind") != KIND:
        raise damaged(path, "not a server's checkpoint of this version")
    _same_run(about, identity, path)
    names, d = _names(about.get("names"), path), identity.terms.parameters
    params = tensors.pop("params", None)
    if params is None or params.shape != (d,) or params.dtype != torch.float32:
        raise damaged(path, "its model has another shape or type")
    if not all(name.startswith(STATE) for name in tensors):
        raise damaged(path, "it has other tensors")
    if not all(map(finite, (params, *tensors.values()))):
        raise damaged(path, "its numbers are not finite")
    if (why := _odd(about, len(names))) is not None:
        raise damaged(path, why)
    found = ServerCheckpoint(
        seed=about["seed"],
        params=params,
        slots=about["slots"],
        digests=about["digests"],
        standings=[Attendance(*each) for each in about["standings"]],
        totals=[Totals(float(each[0]), dict(zip(STATUSES, each[1:], strict=True))) for each in about["totals"]],
        aggregator={name.removeprefix(STATE): value for name, value in tensors.items()},
        round=about["round"],
        judged=about["judged"],
        spent=float(about["spent"]),
        accuracy=about["accuracy"],
        line=about["line"],
    )
    return found, identity.with_names(names)


def _same_run(about: Mapping[str, Any], identity: RunIdentity, path: Path) -> None:
    """Refuse to go on with another run, other terms or another aggregator."""
    mine = identity.as_dict()
    for name, what in (("terms", "other terms"), ("aggregator", "another aggregator")):
        if about.get(name) != mine[name]:
            raise StoreError(
                f"{plain(path)}: is of a run with {what}; put federation.toml back as it was, or begin a new run: a "
                "new run id and an empty state folder"
            )


def _names(found: Any, path: Path) -> tuple[str, ...]:
    whole = isinstance(found, list) and all(isinstance(name, str) and NAME.fullmatch(name) for name in found)
    if not whole or not 0 < len(found) == len(set(found)):
        raise damaged(path, "its workers have no names")
    return tuple(found)


def _odd(about: Mapping[str, Any], workers: int) -> str | None:
    """What is wrong with what a checkpoint says; None if nothing is."""
    round, judged, spent, accuracy = (about.get(name) for name in ("round", "judged", "spent", "accuracy"))
    if not count(about.get("seed")) or about["seed"] > LARGEST:
        return "its seed is none"
    if not (isinstance(round, int) and -1 <= round < MOST_ROUNDS and count(judged) and judged <= round + 1):  # type: ignore[operator]
        return "its rounds are none"
    if not number(spent) or spent < 0 or not (accuracy is None or number(accuracy)):  # type: ignore[operator]
        return "its numbers are none"
    if not isinstance(about.get("line"), dict):
        return "its last line is none"
    rows = [about.get(name) for name in ("slots", "digests", "standings", "totals")]
    if not all(isinstance(row, list) and len(row) == workers for row in rows):
        return "it is of another number of workers"
    slots, digests, standings, totals = rows
    if not all(slot in (NO_UPLOAD, 0, 1) and type(slot) is int for slot in slots or ()):
        return "its slots are none"
    if not all(isinstance(text, str) and len(text) in (0, 64) for text in digests or ()):
        return "its digests are none"
    if not all(map(_whole_standing, standings or ())):
        return "the standing of a worker is none"
    return None if all(map(_whole_totals, totals or ())) else "the totals of a worker are none"


def _whole_standing(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != len(dataclasses.fields(Attendance)):
        return False
    *counts, left = found
    return all(map(count, counts)) and counts[1] <= LARGEST_K and isinstance(left, str) and len(left) <= MOST_WHY


def _whole_totals(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 1 + len(STATUSES):
        return False
    return number(found[0]) and found[0] >= 0 and all(map(count, found[1:]))
