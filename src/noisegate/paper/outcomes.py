"""Our runs compared with the paper's numbers: the outcome of each cell, and whether it is within its tolerance."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, Literal

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.paper import Experiment, PaperCell
from noisegate.runs.launch import reference
from noisegate.runs.spec import Spec

REFERENCE_POINTS = 1.5
"""A Reference Accuracy may differ from the paper's by so many points."""

EXTREME_REFERENCE_POINTS = 3.0
"""A Reference Accuracy at an epsilon below 0.5 may differ from the paper's by so many points."""

COLORECTAL_POINTS = 4.0
"""A Reference Accuracy on Colorectal, which has few examples, may differ from the paper's by so many points."""

ATTACKED_POINTS = 2.0
"""A cell under attack may be so many points below the paper."""

EXTREME_ATTACKED_POINTS = 4.0
"""A cell under attack at the smallest epsilon may be so many points below the paper."""

BESIDE_POINTS = 8.0
"""A cell of the quick subset, which has 360 test examples, may be so many points below our own reference."""

EXTREME = 0.125
"""The smallest epsilon of the paper."""

CellVerdict = Literal["within", "outside", "departs", "shown", "missing", "failed", "impossible"]
"""How a cell compares with what is expected of it.

within, outside: its tolerance. departs: outside, for a reason in departures.toml. shown: nothing is expected of it.
missing, failed: a run of it is missing, or failed. impossible: such a run cannot exist.
"""


@dataclass(frozen=True)
class Record:
    """One run: its result, its device and its versions. status: done, failed, skipped or missing."""

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
"""Records by the name of their run."""


@dataclass(frozen=True)
class CellOutcome:
    """What our runs of a cell gave.

    accuracies: those of the seeds that ended. note: why the verdict is what it is. beside: our Reference Accuracy, if
    the cell is judged by it.
    """

    cell: PaperCell
    accuracies: tuple[float, ...]
    verdict: CellVerdict
    note: str
    beside: float | None = None

    @property
    def mean(self) -> float | None:
        """The mean accuracy over seeds; None if no run ended."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def difference(self) -> float | None:
        """The mean less what is expected: the paper's number, that of the authors' logs, or our own reference."""
        expected = self.beside if self.cell.judged == "beside" else self.cell.expected
        return None if self.mean is None or expected is None else self.mean - expected


def needed(experiment: Experiment) -> list[Spec]:
    """The specs that an experiment needs: those of its cells and, if these are judged by it, our own reference."""
    specs = experiment.specs
    if experiment.judged == "beside":
        specs = [*map(reference, specs), *specs]
    return list({spec.name(): spec for spec in specs}.values())


def outcomes(experiment: Experiment, records: Records) -> list[CellOutcome]:
    """The outcomes of all cells, run or not."""
    return [_outcome(cell, records) for cell in experiment.cells]


def _outcome(cell: PaperCell, records: Records) -> CellOutcome:
    found = [records.get(spec.name(), Record(spec.name(), "missing")) for spec in cell.specs]
    accuracies = tuple(record.accuracy for record in found if record.accuracy is not None)
    clean = [records.get(reference(spec).name()) for spec in cell.specs] if cell.judged == "beside" else []
    known = [record.accuracy for record in clean if record is not None and record.accuracy is not None]
    beside = fmean(known) if known and len(known) == len(clean) else None
    if len(accuracies) < len(found):
        return CellOutcome(cell, accuracies, *_incomplete(found), beside)
    if cell.judged == "beside" and beside is None:
        references = [record or Record("", "missing") for record in clean]
        return CellOutcome(cell, accuracies, *_incomplete(references, "the reference: "), None)
    outcome = CellOutcome(cell, accuracies, "shown", "", beside)
    allowed = tolerance(cell)
    if allowed is None or outcome.difference is None:
        return outcome
    difference = outcome.difference if cell.judged != "reference" else -abs(outcome.difference)
    if difference >= -allowed / 100 - 1e-9:
        return CellOutcome(cell, accuracies, "within", "", beside)
    if cell.reason and difference >= -cell.points / 100 - 1e-9:
        return CellOutcome(cell, accuracies, "departs", cell.reason, beside)
    return CellOutcome(cell, accuracies, "outside", "", beside)


def _incomplete(found: Sequence[Record], what: str = "") -> tuple[CellVerdict, str]:
    """The verdict and the note of a cell of which not every seed ended."""
    ended = sum(record.accuracy is not None for record in found)
    if failed := [record for record in found if record.status == "failed"]:
        return "failed", what + failed[0].message
    if all(record.status == "skipped" for record in found):
        return "impossible", what + found[0].message
    return "missing", f"{what}{ended} of {len(found)} seeds"


def tolerance(cell: PaperCell) -> float | None:
    """The tolerance of a cell in points; None if nothing is expected of it."""
    spec = cell.specs[0]
    extreme = spec.epsilon is not None and spec.epsilon < 0.5
    if cell.judged == "reference":
        usual = EXTREME_REFERENCE_POINTS if extreme else REFERENCE_POINTS
        return COLORECTAL_POINTS if spec.dataset == "colorectal" else usual
    if cell.judged == "attacked":
        return EXTREME_ATTACKED_POINTS if spec.epsilon == EXTREME else ATTACKED_POINTS
    return BESIDE_POINTS if cell.judged == "beside" else None


def passed(found: Iterable[CellOutcome]) -> bool:
    """Whether no cell is outside, missing or failed, and every impossible one is on the list of departures."""
    return all(
        outcome.verdict in ("within", "departs", "shown") or (outcome.verdict == "impossible" and outcome.cell.reason)
        for outcome in found
    )


def to_csv(records: Iterable[Record]) -> str:
    """Runs as CSV, in the order of their names."""
    text = io.StringIO()
    lines = csv.DictWriter(text, [entry.name for entry in fields(Record)], lineterminator="\n")
    lines.writeheader()
    for record in sorted(records, key=lambda record: record.run):
        lines.writerow({key: _written(value) for key, value in asdict(record).items()})
    return text.getvalue()


def from_csv(text: str, where: str) -> dict[str, Record]:
    """The runs that `to_csv` wrote. StoreError if the text is not such a file."""
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
        found = {row["run"]: Record(**{key: _read(key, value) for key, value in row.items()}) for row in rows}
        for record in found.values():
            if record.status not in STATUSES or (record.status == "done") != (record.accuracy is not None):
                raise ValueError(f"run {record.run}: its status and its accuracy do not go together")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise StoreError(f"{plain(where)}: is no file of runs ({plain(error)}); make one with --csv") from None
    return found


STATUSES = ("done", "failed", "skipped", "missing")
"""The statuses that a record may have."""

NUMBERS = ("accuracy", "honest_rejected", "byzantine_selected", "seconds")
"""The fields of a record that are numbers."""


def _written(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _read(key: str, value: str) -> Any:
    """A value of a file, checked: a text without control characters, a finite number, or a share from 0 to 1."""
    if key not in NUMBERS:
        return "\n".join(map(plain, value.split("\n")))
    if not value:
        return None
    found = float(value)
    if not 0 <= found <= (math.inf if key == "seconds" else 1) or math.isinf(found):
        raise ValueError(f"{key} = {value}: out of range")
    return found
