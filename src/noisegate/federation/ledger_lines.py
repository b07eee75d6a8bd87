"""The lines of a ledger: what each says, how it is checked, and what they come to.

A line is a JSON object in one canonical form. `n` counts the lines from 0, `previous` is the sha256 of the line before,
and `sum` that of the line's own content. So a byte that changed anywhere is noticed, and a line that was taken out or
put in. `time` is for people: nothing is computed from it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError, StoreError
from noisegate.files import count, number, parse, read_whole
from noisegate.privacy import Cost
from noisegate.sampling import Poisson

FILE = "ledger.jsonl"
"""The name of a ledger's file in its folder."""

OUTBOX = "outbox"
"""The name of the folder beside it with what is being sent."""

VERSION = 1
ZEROS = "0" * 64
"""Stands for the sha256 of the line before the first one."""

MOST_BYTES = 2**32
"""The largest ledger that is read: some ten million rounds."""

MOST_FINGERPRINT = 200

FIELDS = {
    "ledger": {"version", "id"},
    "data": {"fingerprint"},
    "run": {"terms", "server"},
    "charge": {"run", "round", "model", "upload"},
}
"""The kinds of lines, and what a line of each says beside n, kind, time, previous and sum."""

EVERY = {"n", "kind", "time", "previous", "sum"}

RESTORE = (
    "nothing of this ledger is believed: put back the newest whole copy of its folder; "
    "docs/ledger.md says how and what to check then"
)


@dataclass(frozen=True)
class Charge:
    """A round that was paid for. model: sha256 of the model's body; upload: sha256 of the upload's whole message."""

    round: int
    model: str
    upload: str


@dataclass(frozen=True)
class RunEntry:
    """A run that the data set took part in. terms, server: as they stood at its beginning. charges: by round."""

    terms: Mapping[str, Any]
    server: str
    charges: dict[int, Charge] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """The last round that was charged; -1 if none was."""
        return next(reversed(self.charges), -1)

    def cost(self, rounds: int | None = None) -> Cost:
        """What the rounds that were charged cost an example, or so many rounds."""
        terms, charged = self.terms, len(self.charges) if rounds is None else rounds
        return Cost(terms["declared"], terms["batch"], "poisson", float(terms["sigma"]), charged)


@dataclass
class Book:
    """What the lines of a ledger come to. entries: how many. size: in bytes. previous: the sha256 of the last one."""

    entries: int = 0
    size: int = 0
    previous: str = ZEROS
    data: list[str] = field(default_factory=list)
    runs: dict[str, RunEntry] = field(default_factory=dict)

    def line(self, kind: str, time: str, **fields: Any) -> bytes:
        """The line that comes next, with its end."""
        entry = {"n": self.entries, "kind": kind, "time": time, "previous": self.previous, **fields}
        return canonical({**entry, "sum": hashlib.sha256(canonical(entry)).hexdigest()}) + b"\n"

    def add(self, line: bytes) -> None:
        """Count a line without its end. ValueError says why it cannot come next."""
        entry = _checked(line)
        if entry["n"] != self.entries:
            raise ValueError(f"it says that it is entry {checks.shown(entry['n'])}, and entry {self.entries} is due")
        if entry["previous"] != self.previous:
            raise ValueError("it does not follow the line before")
        if (entry["kind"] == "ledger") != (self.entries == 0):
            raise ValueError(f"a line of the kind {entry['kind']!r} does not stand here")
        match entry["kind"]:
            case "ledger":
                if entry["version"] != VERSION:
                    raise ValueError(f"of version {checks.shown(entry['version'])}, and this noisegate reads {VERSION}")
            case "data":
                self.data.append(fingerprint_of(entry["fingerprint"]))
            case "run":
                self._add_run(entry["terms"], entry["server"])
            case "charge":
                self._add_charge(entry["run"], Charge(entry["round"], entry["model"], entry["upload"]))
        self.entries += 1
        self.size += len(line) + 1
        self.previous = hashlib.sha256(line).hexdigest()

    def _add_run(self, terms: Any, server: Any) -> None:
        if not isinstance(terms, dict) or not is_digest(terms.get("run")) or not is_digest(server):
            raise ValueError("a run has terms and the key of a server")
        counts = [terms.get(name) for name in ("rounds", "parameters", "batch", "declared")]
        if (
            not all(count(value) and value for value in counts)
            or not number(terms.get("sigma"))
            or not terms["sigma"] > 0
        ):
            raise ValueError("the terms of its run have no price")
        try:
            Poisson(terms["batch"]).rate(terms["declared"])
        except SpecError as error:
            raise ValueError(str(error)) from None
        if not isinstance(terms.get("title"), str):
            raise ValueError("its run has no title")
        if terms["run"] in self.runs:
            raise ValueError("its run stands there already")
        self.runs[terms["run"]] = RunEntry(terms, server)

    def _add_charge(self, run: Any, charge: Charge) -> None:
        if not isinstance(run, str) or run not in self.runs:
            raise ValueError("it charges a run that no line before begins")
        if not count(charge.round) or not is_digest(charge.model) or not is_digest(charge.upload):
            raise ValueError("a charge has a round and two digests")
        if charge.round <= self.runs[run].last_round:
            raise ValueError(f"it charges round {charge.round} after round {self.runs[run].last_round}")
        self.runs[run].charges[charge.round] = charge


def canonical(entry: Mapping[str, Any]) -> bytes:
    """The one form in which a ledger writes a JSON object. It is of one line and in ASCII."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def is_digest(text: Any) -> bool:
    """Whether a value is 64 hexadecimal digits: a sha256, the id of a run, or a public key."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def fingerprint_of(text: Any) -> str:
    """The fingerprint of a data set. ValueError if a ledger cannot hold it."""
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= MOST_FINGERPRINT:
        raise ValueError(f"a fingerprint has 1 to {MOST_FINGERPRINT} printable characters")
    return text


def _checked(line: bytes) -> dict[str, Any]:
    """The entry of a line, if it has the form of one and its own sum. ValueError says what is wrong."""
    try:
        entry = parse(line, "it")
    except StoreError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str) or entry["kind"] not in FIELDS:
        raise ValueError("not an entry of a ledger")
    if set(entry) != EVERY | FIELDS[entry["kind"]] or type(entry["n"]) is not int or not isinstance(entry["time"], str):
        raise ValueError("it lacks something, or says too much")
    bare = {name: value for name, value in entry.items() if name != "sum"}
    if canonical(entry) != line or hashlib.sha256(canonical(bare)).hexdigest() != entry["sum"]:
        raise ValueError("its checksum does not fit")
    return entry


def read_file(folder: Path) -> bytes | None:
    """The bytes of the ledger in a folder; None if there is none."""
    try:
        return read_whole(folder / FILE, MOST_BYTES)
    except FileNotFoundError:
        return None
    except StoreError as error:
        raise StoreError(f"{error}; {RESTORE}") from None


def read_book(content: bytes, folder: Path) -> Book:
    """What a ledger's bytes say. StoreError unless every line is whole, unchanged and in its place."""
    where, book = checks.plain(folder / FILE), Book()
    *lines, torn = content.split(b"\n")
    for place, line in enumerate(lines, 1):
        try:
            book.add(line)
        except ValueError as error:
            raise StoreError(f"{where}: line {place} is damaged ({checks.plain(error)}); {RESTORE}") from None
    if not lines:
        raise StoreError(f"{where}: has no whole line, and a ledger is made with one; {RESTORE}")
    if torn:
        raise StoreError(
            f"{where}: its last line, {place + 1}, is torn ({len(torn)} bytes and no end), as a crash or a full disk "
            f"leaves it; `noisegate ledger repair {checks.plain(folder)}` takes it away and loses no charge"
        )
    return book
