"""Runs of a search on disk: a line for each that ended, so that none has to be run again.

results.jsonl  a line per run, in the order in which they ended
plot.html      accuracy against the Byzantine share
worst.toml     the spec of the worst case
.lock          empty; locked while a search writes here
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from noisegate.errors import StoreError
from noisegate.lab.launch import fingerprint
from noisegate.lab.redteam import Outcome, Stage
from noisegate.lab.spec import Spec

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two searches apart
    fcntl = None  # type: ignore[assignment]

RESULTS, LOCK = "results.jsonl", ".lock"


class TrialFolder:
    """What a search leaves, and finds again. Nobody else's until it is closed.

    how: what the numbers depend on beside the spec, as version and device; what was run otherwise is run anew.
    """

    def __init__(self, path: Path, spec: Spec, how: str) -> None:
        self.path, self.how = path, how
        self._inputs = fingerprint(spec, None, None)  # all runs of a search use the same data
        self._known: dict[str, Outcome] = {}
        self.strange = 0
        """Runs in the folder that were run otherwise."""
        try:
            names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
            if names and RESULTS not in names and names != {LOCK}:  # which is all that one leaves before its first run
                raise StoreError(f"{path}: is not empty and holds no search; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as held:
                held.enter_context(_locked(path))
                self._read()
                self._held = held.pop_all()  # unless it could not be read
        except OSError as error:
            raise StoreError(f"{path}: cannot be used ({error.strerror}); choose another --out") from None

    def __enter__(self) -> "TrialFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the folder to others."""
        self._held.close()

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
                else:
                    self.strange += 1
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other searches out of a folder; the system unlocks it if this process ends in any other way."""
    with (path / LOCK).open("ab") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{path}: is being written to by another search; wait or choose another --out") from None
        except OSError:
            pass  # a file system without locks, where it is up to the user
        yield
