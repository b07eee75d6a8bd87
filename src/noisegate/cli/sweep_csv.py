"""The runs of a sweep as a CSV file: a line for each, for a spreadsheet or a program of one's own."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from noisegate.redteam.plot import part
from noisegate.runs import imbalance
from noisegate.runs.recall import worst_class
from noisegate.sweeps.sweep import SweepCell, SweepFolder

FIELDS = (
    *("accuracy", "best_accuracy", "balanced_accuracy", "majority_share", "auc", "attack_success"),
    *("byzantine_weight", "honest_rejected", "fallback", "epsilon", "delta", "sigma", "rounds", "seconds"),
)
"""What a line has of a result, under the names of result.json."""


def sweep_csv(cells: Sequence[SweepCell], keys: Sequence[str], folder: SweepFolder) -> str:
    """A header and a line for each run. keys: the settings that vary. What a run does not have is an empty cell."""
    metrics = dict.fromkeys(name for cell in cells for name in (cell.result or {}).get("metrics") or {})
    text = io.StringIO()
    columns = [*keys, "status", *FIELDS, "lowest_recall", "worst_worker", *metrics, "message", "folder"]
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    for cell in cells:
        settings = cell.spec.canonical()
        line = {key: part(settings[key]) if settings.get(key) is not None else "" for key in keys}
        line |= {"status": cell.status, "message": " ".join(cell.message.split())}
        table.writerow(line | _found(cell.result or {}) | {"folder": str(folder.run_path(cell.spec))})
    return text.getvalue()


def _found(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a run found, by column."""
    lowest, worker = worst_class(result.get("recall")), imbalance.worst_worker(result)
    return {
        **{name: result.get(name) for name in FIELDS},
        "lowest_recall": lowest.recall if lowest else None,
        "worst_worker": worker.accuracy if worker else None,
        **(result.get("metrics") or {}),
    }
