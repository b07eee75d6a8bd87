"""The folder of a search. It keeps every run that ended, so that a search that is started again does not repeat it.

results.jsonl  one line for each run, in the order in which they ended, each with its own checksum
findings.json  what was found, once the search is over
plot.html      the same as a page
worst.toml     the spec of the worst case
.lock          an empty file, locked while a search writes here
"""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import MOST_TEXT, parse, read_whole, seal, unseal, write_whole
from noisegate.locks import LOCK, alone
from noisegate.redteam.findings import Stage
from noisegate.redteam.objectives import Measure, Objective
from noisegate.runs.key import fingerprint
from noisegate.runs.spec import Spec
from noisegate.runs.wellformed import fields_of
from noisegate.sweeps.outcome import Outcome

RESULTS = "results.jsonl"
"""The file that holds the outcomes."""

FINDINGS = "findings.json"
"""The file that holds what was found."""


class TrialFolder:
    """The folder of a search, locked against other searches until it is closed.

    how: what the numbers depend on beside the spec, such as version and device. Runs with another `how`, and runs whose
    line is damaged, are repeated. So are those of an earlier version that have not what the objective asks for.
    """

    def __init__(self, path: Path, spec: Spec, how: str, objective: Objective = "accuracy") -> None:
        self.path, self.how, self.objective = path, how, objective
        inputs = fingerprint(spec, None, None)  # all runs of a search use the same data
        self._inputs = f"-{inputs.key}-{inputs.digest[:12]}" if inputs else ""
        self._known: dict[str, Outcome] = {}
        self._lines: list[bytes] = []
        self.strange = 0
        """The number of runs in the folder that have another `how`."""
        self.damaged = 0
        """The number of lines that were damaged and are dropped."""
        try:
            names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        except OSError as error:
            raise StoreError(f"{plain(path)}: cannot be used ({error.strerror}); choose another --out") from None
        known = {RESULTS, LOCK, f".{RESULTS}.part"}  # the files that a search leaves before its first run ends
        if names and RESULTS not in names and not names <= known:
            raise StoreError(f"{plain(path)}: is not empty and holds no search; choose another --out")
        with ExitStack() as held:
            held.enter_context(alone(path))
            self._read()
            self._held = held.pop_all()  # a folder that could not be read is unlocked

    def __enter__(self) -> "TrialFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock the folder."""
        self._held.close()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, spec: Spec) -> Outcome | None:
        """The outcome of a run; None if it has not ended yet, or failed and may succeed the next time."""
        found = self._known.get(self._key(spec))
        if found is None or found.status == "failed":
            return None
        measure = Measure(self.objective)
        lacking = measure.value(found) is None if measure.is_metric else found.recall is None
        older = found.status == "done" and lacking and self.objective != "accuracy"
        return None if older else found

    def add(self, spec: Spec, stage: Stage, outcome: Outcome) -> None:
        """Keep the outcome of a run. The file is replaced as a whole, so a full disk leaves the old lines intact."""
        line = {"key": self._key(spec), "how": self.how, "stage": stage, **asdict(outcome), "spec": spec.canonical()}
        lines = [*self._lines, seal(line, indent=None)]
        self.write(RESULTS, b"".join(lines))
        self._lines, self._known[self._key(spec)] = lines, outcome

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, which appears only once it is whole, and give its path."""
        write_whole(self.path / name, content.encode() if isinstance(content, str) else content, f".{name}.part")
        return self.path / name

    def _key(self, spec: Spec) -> str:
        return f"{spec.name()}{self._inputs}"

    def _read(self) -> None:
        try:
            content = read_whole(self.path / RESULTS, MOST_TEXT)
        except FileNotFoundError:
            return
        lines = content.splitlines(keepends=True)
        torn = bool(lines) and not lines[-1].endswith(b"\n")
        for line in lines:
            try:
                self._take(line)
                self._lines.append(line)
            except StoreError:
                self.damaged += 1
        if self.damaged > torn and not self._lines:  # then the file is not that of a search, and is left alone
            raise StoreError(f"{plain(self.path / RESULTS)}: no line of it is of a search; choose another --out")
        if self.damaged:
            self.write(RESULTS, b"".join(self._lines))

    def _take(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            raise StoreError("cut off as it was written")
        found: dict[str, Any] = unseal(parse(line, RESULTS), RESULTS)
        values = fields_of(Outcome, found, RESULTS)
        outcome = Outcome(**{**values, "message": "\n".join(map(plain, values["message"].split("\n")))})
        key, how = found.get("key"), found.get("how")
        if not isinstance(key, str) or not isinstance(how, str):
            raise StoreError("not a run")
        if outcome.status == "done" and outcome.accuracy is None:
            raise StoreError("a run that is done has an accuracy")
        if how == self.how:
            self._known[key] = outcome
        else:
            self.strange += 1
