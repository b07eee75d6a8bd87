"""Who takes part: the server's list of workers and their keys."""

import re
from dataclasses import dataclass
from pathlib import Path

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.federation.keys import checked_name, public_key
from noisegate.settings import read_settings

MOST_WORKERS = 10_000
SERIAL = re.compile("[0-9A-Fa-f]{1,64}")


@dataclass(frozen=True)
class Roster:
    """The workers by name, in order, each with its Ed25519 public key; and the serial numbers of revoked certificates.

    A certificate counts if it names a worker of the roster and that worker's key. The order is that of the rows which
    an aggregator sees.
    """

    keys: dict[str, bytes]
    revoked: frozenset[int] = frozenset()

    @classmethod
    def read(cls, path: Path) -> "Roster":
        """The roster in a TOML file: a table [[worker]] with name and key for each, and `revoked`, a list of texts."""
        found, where, keys = read_settings(path), checks.plain(path), {}
        if wrong := set(found) - {"worker", "revoked"}:
            raise SpecError(f"{where}: {checks.plain(', '.join(sorted(wrong)))}: unknown; choose from worker, revoked")
        entries = found.get("worker", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise SpecError(f"{where}: worker: must be tables, [[worker]] with name and key")
        for entry in entries:
            if set(entry) != {"name", "key"}:
                raise SpecError(f"{where}: a [[worker]] has name and key, and nothing else")
            name = checked_name(entry["name"], f"{where}: name")
            if name in keys:
                raise SpecError(f"{where}: name = {name!r}: stands there twice; every worker has one entry")
            keys[name] = public_key(entry["key"], f"{where}: key of {name}")
        if not 0 < len(keys) <= MOST_WORKERS:
            raise SpecError(f"{where}: has {len(keys)} workers; it must have 1 to {MOST_WORKERS}")
        if len(set(keys.values())) < len(keys):
            raise SpecError(f"{where}: two workers have the same key; every worker has its own")
        serials = found.get("revoked", [])
        texts = isinstance(serials, list) and all(isinstance(serial, str) for serial in serials)
        if not texts or not all(map(SERIAL.fullmatch, serials)):
            raise SpecError(f"{where}: revoked: must be a list of serial numbers in hexadecimal, as texts")
        return cls(keys, frozenset(int(serial, 16) for serial in serials))

    def to_toml(self) -> str:
        """The roster as a file."""
        lines = [f'[[worker]]\nname = "{name}"\nkey = "{key.hex()}"\n' for name, key in self.keys.items()]
        serials = ", ".join(f'"{serial:x}"' for serial in sorted(self.revoked))
        return "\n".join([f"revoked = [{serials}]\n", *lines])
