"""Our runs beside the paper's numbers: what came out of each cell, and whether that is within its tolerance."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, Literal

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.paper import Cell, Experiment
from noisegate.runs.launch import reference
from noisegate.runs.spec import Spec

REFERENCE_POINTS, EXTREME_REFERENCE_POINTS, COLORECTAL_POINTS = 1.5, 3.0, 4.0
"""How far a Reference Accuracy may lie off the paper's: at epsilon 0.5 and above, below that, and on few examples."""

ATTACKED_POINTS, EXTREME_ATTACKED_POINTS = 2.0, 4.0
"""How far below the paper an attacked cell may lie; the latter at the smallest epsilon."""

BESIDE_POINTS = 8.0
"""How far below our own reference a cell of the quick subset may lie: 360 test examples, two seeds."""

EXTREME = 0.125

Verdict = Literal["within", "outside", "departs", "shown", "missing", "failed", "impossible"]
"""departs: outside, for a reason that is on the list of departures. impossible: there is no such attack."""


@dataclass(frozen=True)
class Record:
    """One run: what came of it, where and when. status: done, failed, skipped or missing."""

    run: str
    status: str
    accuracy: float | None = None
    honest_rejected: float | None = None
    byzantine_selected: float | None = None
    seconds: float | None = None
    device: str = ""
    versions: str = ""
    message: str = ""


Records = Mapping[str, Record]
"""By the name of the run."""


@dataclass(frozen=True)
class Outcome:
    """A cell and what our runs say of it. accuracies: of the seeds that ended."""

    cell: Cell
    accuracies: tuple[float, ...]
    verdict: Verdict
    note: str
    beside: float | None = None

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def difference(self) -> float | None:
        """From what is expected: the paper, the authors' logs, or our own reference."""
        expected = self.beside if self.cell.judged == "beside" else self.cell.expected
        return None if self.mean is None or expected is None else self.mean - expected


def needed(experiment: Experiment) -> list[Spec]:
    """Every run that an experiment needs: its own, and where cells are judged by our own reference, that."""
    specs = experiment.specs
    if experiment.judged == "beside":
        specs = [*map(reference, specs), *specs]
    return list({spec.name(): spec for spec in specs}.values())


def outcomes(experiment: Experiment, records: Records) -> list[Outcome]:
    """What came of every cell; none is left out."""
    return [_outcome(cell, records) for cell in experiment.cells]


def _outcome(cell: Cell, records: Records) -> Outcome:
    found = [records.get(spec.name(), Record(spec.name(), "missing")) for spec in cell.specs]
    accuracies = tuple(record.accuracy for record in found if record.accuracy is not None)
    clean = [records.get(reference(spec).name()) for spec in cell.specs] if cell.judged == "beside" else []
    known = [record.accuracy for record in clean if record is not None and record.accuracy is not None]
    beside = fmean(known) if known and len(known) == len(clean) else None
    if len(accuracies) < len(found):
        return Outcome(cell, accuracies, *_incomplete(found), beside)
    if cell.judged == "beside" and beside is None:
        lacking = [record or Record("", "missing") for record in clean]
        return Outcome(cell, accuracies, *_incomplete(lacking, "the reference: "), None)
    outcome = Outcome(cell, accuracies, "shown", "", beside)
    allowed = tolerance(cell)
    if allowed is None or outcome.difference is None:
        return outcome
    off = outcome.difference if cell.judged != "reference" else -abs(outcome.difference)
    if off >= -allowed / 100 - 1e-9:
        return Outcome(cell, accuracies, "within", "", beside)
    if cell.reason and off >= -cell.points / 100 - 1e-9:
        return Outcome(cell, accuracies, "departs", cell.reason, beside)
    return Outcome(cell, accuracies, "outside", "", beside)


def _incomplete(found: Sequence[Record], what: str = "") -> tuple[Verdict, str]:
    """What is said of a cell of which not every seed ended."""
    ended = sum(record.accuracy is not None for record in found)
    if failed := [record for record in found if record.status == "failed"]:
        return "failed", what + failed[0].message
    if all(record.status == "skipped" for record in found):
        return "impossible", what + found[0].message
    return "missing", f"{what}{ended} of {len(found)} seeds"


def tolerance(cell: Cell) -> float | None:
    """Points; None if nothing is asked of a cell."""
    spec = cell.specs[0]
    extreme = spec.epsilon is not None and spec.epsilon < 0.5
    if cell.judged == "reference":
        usual = EXTREME_REFERENCE_POINTS if extreme else REFERENCE_POINTS
        return COLORECTAL_POINTS if spec.dataset == "colorectal" else usual
    if cell.judged == "attacked":
        return EXTREME_ATTACKED_POINTS if spec.epsilon == EXTREME else ATTACKED_POINTS
    return BESIDE_POINTS if cell.judged == "beside" else None


def passed(found: Iterable[Outcome]) -> bool:
    """Whether nothing is outside, missing or broken, and what cannot exist is on the list of departures."""
    return all(
        outcome.verdict in ("within", "departs", "shown") or (outcome.verdict == "impossible" and outcome.cell.reason)
        for outcome in found
    )


def to_csv(records: Iterable[Record]) -> str:
    """A small file of runs, in the order of their names."""
    text = io.StringIO()
    lines = csv.DictWriter(text, [entry.name for entry in fields(Record)], lineterminator="\n")
    lines.writeheader()
    for record in sorted(records, key=lambda record: record.run):
        lines.writerow({key: _short(value) for key, value in asdict(record).items()})
    return text.getvalue()


def from_csv(text: str, where: str) -> dict[str, Record]:
    """What `to_csv` wrote."""
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
        found = {row["run"]: Record(**{key: _long(key, value) for key, value in row.items()}) for row in rows}
        for record in found.values():
            if record.status not in STATUSES or (record.status == "done") != (record.accuracy is not None):
                raise ValueError(f"run {record.run}: its status and its accuracy do not go together")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise StoreError(f"{plain(where)}: is no file of runs ({plain(error)}); make one with --csv") from None
    return found


STATUSES = ("done", "failed", "skipped", "missing")
NUMBERS = ("accuracy", "honest_rejected", "byzantine_selected", "seconds")


def _short(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _long(key: str, value: str) -> Any:
    """What a file says, checked: texts that a terminal may show, numbers that are finite, and shares from 0 to 1."""
    if key not in NUMBERS:
        return "\n".join(map(plain, value.split("\n")))
    if not value:
        return None
    found = float(value)
    if not 0 <= found <= (math.inf if key == "seconds" else 1) or math.isinf(found):
        raise ValueError(f"{key} = {value}: out of range")
    return found
