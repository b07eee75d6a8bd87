"""Runs of a search on disk: a line for each that ended, so that none has to be run again.

results.jsonl  a line per run, in the order in which they ended
plot.html      accuracy against the Byzantine share
worst.toml     the spec of the worst case
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noisegate.errors import StoreError
from noisegate.lab.launch import fingerprint
from noisegate.lab.redteam import Outcome, Stage
from noisegate.lab.spec import Spec

RESULTS = "results.jsonl"


class TrialFolder:
    """What a search leaves, and finds again.

    how: on what device and with how many threads, which may change the last digits; what was run otherwise is run anew.
    """

    def __init__(self, path: Path, spec: Spec, how: str) -> None:
        self.path, self.how = path, how
        self._inputs = fingerprint(spec, None, None)  # all runs of a search use the same data
        self._known: dict[str, Outcome] = {}
        try:
            if path.is_dir() and not (path / RESULTS).exists() and any(path.iterdir()):
                raise StoreError(f"{path}: is not empty and holds no search; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
            self._read()
        except OSError as error:
            raise StoreError(f"{path}: cannot be used ({error.strerror}); choose another --out") from None

    def __len__(self) -> int:
        return len(self._known)

    def find(self, spec: Spec) -> Outcome | None:
        """What came of a run; None if it has not ended yet, or failed: what failed once may not fail again."""
        found = self._known.get(self._key(spec))
        return None if found is None or found.status == "failed" else found

    def add(self, spec: Spec, stage: Stage, outcome: Outcome) -> None:
        """Keep a run."""
        line = {"key": self._key(spec), "how": self.how, "stage": stage, **asdict(outcome), "spec": spec.canonical()}
        self._known[self._key(spec)] = outcome
        self._guarded(RESULTS, (json.dumps(line) + "\n").encode(), append=True)

    def write(self, name: str, content: str) -> Path:
        """A file that is whole once it exists."""
        part = f".{name}.part"
        self._guarded(part, content.encode(), append=False)
        (self.path / part).replace(self.path / name)
        return self.path / name

    def _key(self, spec: Spec) -> str:
        return f"{spec.name()}-{self._inputs[:12]}" if self._inputs else spec.name()

    def _read(self) -> None:
        path = self.path / RESULTS
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a line without an end was cut off as it was written
        if whole != content:
            self.write(RESULTS, whole.decode())
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found: dict[str, Any] = json.loads(line)
                outcome = Outcome(**{name: found[name] for name in Outcome.__dataclass_fields__})
                if found["how"] == self.how:
                    self._known[found["key"]] = outcome
            except (ValueError, LookupError, TypeError):
                raise StoreError(f"{path}: line {number} is damaged; remove it, or choose another --out") from None

    def _guarded(self, name: str, content: bytes, append: bool) -> None:
        try:
            with (self.path / name).open("ab" if append else "wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"{self.path / name}: cannot be written ({error.strerror}); make room or choose another --out"
            ) from None
