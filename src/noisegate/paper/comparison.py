"""Tables that compare our runs with the paper: as rows, for a report, and as a CSV file of all cells."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from noisegate.paper import Experiment, label
from noisegate.paper.outcomes import CellOutcome, tolerance


def columns(experiment: Experiment, found: Sequence[CellOutcome]) -> list[str]:
    """The names of a table's columns: the settings that vary, then the numbers."""
    keys = list(dict.fromkeys(key for outcome in found for key in outcome.cell.varies))
    known = {
        "reference": experiment.judged == "beside",
        "paper": any(outcome.cell.printed is not None for outcome in found),
        "authors' logs": any(outcome.cell.logged is not None for outcome in found),
        "rival": bool(experiment.rival),
    }
    return [*keys, *(name for name, there in known.items() if there), "ours", "difference", "verdict"]


def rows(experiment: Experiment, found: Sequence[CellOutcome]) -> list[list[str]]:
    """A table's rows, one for every cell, run or not."""
    return [[_entry(name, outcome) for name in columns(experiment, found)] for outcome in found]


def _entry(name: str, outcome: CellOutcome) -> str:
    cell = outcome.cell
    if name == "paper":
        return _number(cell.printed, 2)
    if name == "authors' logs":
        return f"{cell.logged.mean:.3f} ({cell.logged.lowest:.3f} to {cell.logged.highest:.3f})" if cell.logged else ""
    if name == "reference":
        return _number(outcome.beside, 3)
    if name == "rival":
        return _number(cell.rival, 2)
    if name == "ours":
        return _ours(outcome)
    if name == "difference":
        return "" if outcome.difference is None else f"{100 * outcome.difference:+.1f}"
    if name == "verdict":
        return _verdict(outcome)
    return label(cell.varies[name]) if name in cell.varies else ""


def _ours(outcome: CellOutcome) -> str:
    if outcome.mean is None:
        return ""
    spread = f" ({min(outcome.accuracies):.3f} to {max(outcome.accuracies):.3f})" if len(outcome.accuracies) > 1 else ""
    return f"{outcome.mean:.3f}{spread}"


def _verdict(outcome: CellOutcome) -> str:
    allowed, reference = tolerance(outcome.cell), outcome.cell.judged == "reference"
    if outcome.verdict == "within":
        above = not reference and outcome.difference is not None and 100 * outcome.difference > (allowed or 0.0)
        return "not below" if above else f"within {allowed:g}"
    if outcome.verdict in ("outside", "departs"):
        words = f"{outcome.verdict}: more than {allowed:g} {'off' if reference else 'below'}"
        return f"{words}; {outcome.note}" if outcome.note else words
    reason = f" ({outcome.cell.reason})" if outcome.verdict == "impossible" and outcome.cell.reason else ""
    return f"{outcome.verdict}: {outcome.note}{reason}" if outcome.note else outcome.verdict


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


CELL_COLUMNS = ("experiment", "settings", "paper", "logs", "rival", "reference", "ours", "lowest", "highest", "seeds")
"""The first columns of a file of cells; `difference`, `verdict` and `note` follow."""


def cells_csv(chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]]) -> str:
    """Every cell of every table as a line of CSV, run or not. Accuracies are shares, the difference is in points."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*CELL_COLUMNS, "difference", "verdict", "note"])
    for one in chosen:
        writer.writerows(_csv_row(one.name, outcome) for outcome in found[one.name])
    return stream.getvalue()


def _csv_row(name: str, outcome: CellOutcome) -> list[str]:
    cell, ours = outcome.cell, outcome.accuracies
    settings = "; ".join(f"{key} {label(value)}" for key, value in cell.varies.items())
    numbers = [cell.printed, cell.logged.mean if cell.logged else None, cell.rival, outcome.beside]
    numbers += [outcome.mean, min(ours, default=None), max(ours, default=None)]
    points = "" if outcome.difference is None else f"{100 * outcome.difference:+.1f}"
    note = " ".join(outcome.note.split())
    return [name, settings, *(_number(value, 4) for value in numbers), str(len(ours)), points, outcome.verdict, note]


def as_table(experiment: Experiment, found: Sequence[CellOutcome]) -> dict[str, Any]:
    """The table as an entry of tables.json, which `noisegate report` shows."""
    return {
        "title": experiment.title,
        "columns": columns(experiment, found),
        "rows": rows(experiment, found),
        "notes": [f"{experiment.about} In the paper: {experiment.paper}."],
    }
