"""Who takes part: the server's list of workers and their keys."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.federation.keys import checked_name, public_key
from noisegate.federation.terms import MOST_DECLARED
from noisegate.settings import read_settings

MOST_WORKERS = 10_000
SERIAL = re.compile("[0-9A-Fa-f]{1,64}")


@dataclass(frozen=True)
class Roster:
    """The workers by name, in order, each with its Ed25519 public key; and the serial numbers of revoked certificates.

    sizes: how many examples a worker says that it holds. It is public and nobody checks it. Who has none counts as one
    of the declared size.

    A certificate counts if it names a worker of the roster and that worker's key. The order is that of the rows which
    an aggregator sees.
    """

    keys: dict[str, bytes]
    revoked: frozenset[int] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Roster":
        """The roster in a TOML file: a table [[worker]] with name, key and perhaps size for each, and `revoked`."""
        found, where = read_settings(path), checks.plain(path)
        keys: dict[str, bytes] = {}
        sizes: dict[str, int] = {}
        if wrong := set(found) - {"worker", "revoked"}:
            raise SpecError(f"{where}: {checks.plain(', '.join(sorted(wrong)))}: unknown; choose from worker, revoked")
        entries = found.get("worker", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise SpecError(f"{where}: worker: must be tables, [[worker]] with name and key")
        for entry in entries:
            if set(entry) - {"size"} != {"name", "key"}:
                raise SpecError(f"{where}: a [[worker]] has name and key, perhaps size, and nothing else")
            name = checked_name(entry["name"], f"{where}: name")
            if name in keys:
                raise SpecError(f"{where}: name = {name!r}: stands there twice; every worker has one entry")
            keys[name] = public_key(entry["key"], f"{where}: key of {name}")
            if "size" in entry:
                sizes[name] = checked_size(entry["size"], f"{where}: size of {name}")
        if not 0 < len(keys) <= MOST_WORKERS:
            raise SpecError(f"{where}: has {len(keys)} workers; it must have 1 to {MOST_WORKERS}")
        if len(set(keys.values())) < len(keys):
            raise SpecError(f"{where}: two workers have the same key; every worker has its own")
        serials = found.get("revoked", [])
        texts = isinstance(serials, list) and all(isinstance(serial, str) for serial in serials)
        if not texts or not all(map(SERIAL.fullmatch, serials)):
            raise SpecError(f"{where}: revoked: must be a list of serial numbers in hexadecimal, as texts")
        return cls(keys, frozenset(int(serial, 16) for serial in serials), sizes)

    def claims(self, names: Sequence[str]) -> list[int | None]:
        """The sizes of these workers; None where one says none, or is not here."""
        return [self.sizes.get(name) for name in names]

    def to_toml(self) -> str:
        """The roster as a file."""
        lines = [
            f'[[worker]]\nname = "{name}"\nkey = "{key.hex()}"\n'
            + (f"size = {self.sizes[name]}\n" if name in self.sizes else "")
            for name, key in self.keys.items()
        ]
        serials = ", ".join(f'"{serial:x}"' for serial in sorted(self.revoked))
        return "\n".join([f"revoked = [{serials}]\n", *lines])


def checked_size(value: Any, what: str) -> int:
    """A public number of examples. SpecError if it is none."""
    if type(value) is not int or not 0 < value <= MOST_DECLARED:
        raise SpecError(f"{what} = {checks.plain(value)}: must be a whole number from 1 to {MOST_DECLARED}")
    return value
