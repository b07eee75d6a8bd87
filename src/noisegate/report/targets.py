"""What the page of a run says of single classes, of a trigger, and of an aggregator that fell back."""

from typing import Any

from noisegate.files import count
from noisegate.report.charts import LINES, Chart, layout_of, short
from noisegate.report.folders import RunRecord, number
from noisegate.report.page import Page, Shade, paragraph, table
from noisegate.runs import imbalance
from noisegate.runs.fallback import told
from noisegate.runs.recall import worst_class

MOST_ROWS = 100
"""The largest number of workers whose own accuracy is shown: the worst."""

MOST_COLUMNS = 20
"""The largest number of classes whose confusion matrix is shown."""


def recalls_of(result: dict[str, Any] | None) -> list[float | None]:
    """The recall by class that a result holds; empty if it holds none that can be read, or is of an earlier version."""
    found = (result or {}).get("recall")
    if not isinstance(found, list) or not all(each is None or (number(each) and 0 <= each <= 1) for each in found):
        return []
    return found


def success(record: RunRecord) -> list[tuple[str, str, str]]:
    """How far the attack's trigger works, if it has one, for the summary."""
    ours, clean = (share_of(result, "attack_success") for result in (record.result, record.beside.get("reference")))
    if ours is None:
        return []
    beside = "" if clean is None else f"; {clean:.1%} in the reference"
    return [("attack success", f"{ours:.1%}", f"of other classes called the target{beside}")]


def balance(record: RunRecord) -> list[tuple[str, str, str]]:
    """What accuracy hides, for the summary, where there are two classes or uneven ones."""
    result: dict[str, Any] = record.result or {}
    if not imbalance.uneven(result):
        return []
    notes = {
        "majority_share": ("majority share", "accuracy of always answering the most frequent class"),
        "balanced_accuracy": ("balanced accuracy", "mean recall of the classes"),
        "auc": ("AUC", "chance that class 1 scores above class 0"),
    }
    shown = []
    for name, (title, note) in notes.items():
        ours, clean = (share_of(found, name) for found in (result, record.beside.get("reference")))
        beside = "" if clean is None or name == "majority_share" else f"; {clean:.3f} in the reference"
        shown += [] if ours is None else [(title, f"{ours:.3f}", f"{note}{beside}")]
    return shown


def own_metrics(record: RunRecord) -> list[tuple[str, str, str]]:
    """The metrics that were asked for, for the summary."""
    ours, clean = ((found or {}).get("metrics") or {} for found in (record.result, record.beside.get("reference")))
    return [
        (
            name,
            "–" if value is None else f"{value:.3f}",
            f"{clean[name]:.3f} in the reference" if clean.get(name) else "",
        )
        for name, value in ours.items()
    ]


def worker_section(page: Page, record: RunRecord) -> None:
    """The accuracy on each worker's own test examples, worst first. Nothing if nobody knows whose they are."""
    found = (record.result or {}).get("worker_accuracy") or {}
    worst = imbalance.worst_worker(record.result or {})
    if worst is None:
        return
    clean = (record.beside.get("reference") or {}).get("worker_accuracy") or {}
    order = sorted(found, key=lambda name: (found[name] is None, found[name] or 0.0))
    columns = ["worker", "accuracy", *(["reference"] if clean else [])]
    rows = [(name, written(found[name]), *([written(clean.get(name))] if clean else [])) for name in order[:MOST_ROWS]]
    note = f"{worst.accuracy:.3f} {worst.sentence()}. Few test examples of a worker make its accuracy noisy."
    left = len(order) - len(rows)
    more = f" {left} workers more are left out." if left else ""
    page.section(
        "Accuracy by worker", table(columns, rows, label="accuracy by worker"), paragraph(note + more, "quiet")
    )


def one_class_section(page: Page, record: RunRecord) -> None:
    """Say that the model predicts nearly one class. Nothing if it does not."""
    if said := imbalance.told(record.result or {}):
        page.section("The model predicts nearly one class", paragraph(f"{said[0].upper()}{said[1:]}."), kind="problems")


def confusion_section(page: Page, record: RunRecord) -> None:
    """The confusion matrix as a table, unless it is too wide to be read."""
    confusion = (record.result or {}).get("confusion")
    if not confusion or len(confusion) > MOST_COLUMNS:
        return
    columns = ["", *map(str, range(len(confusion)))]
    rows = [
        (str(label), *(Shade(str(times), times / max(1, sum(row))) for times in row))
        for label, row in enumerate(confusion)
    ]
    note = "How many test examples of the class of a row the last model calls by the class of a column; the stronger"
    note += " the color, the more of that class."
    matrix = table(columns, rows, label="confusion matrix", sort=False, dense=True)
    page.section("Confusion", matrix, paragraph(note, "quiet"))


def fallback_section(page: Page, record: RunRecord) -> None:
    """Say in how many rounds the aggregator fell back. Nothing if it never did."""
    result: dict[str, Any] = record.result or {}
    share = share_of(result, "fallback")
    rounds, lost = (result.get(name, 0) for name in ("rounds", "rounds_lost"))
    if not share or not count(rounds) or not count(lost):
        return
    said = told(str(result.get("aggregator")), share, rounds - lost)
    page.section("The aggregator fell back", paragraph(f"{said[0].upper()}{said[1:]}."), kind="problems")


def share_of(result: dict[str, Any] | None, name: str) -> float | None:
    """A number from 0 to 1 of a result; None if it has none."""
    found: Any = (result or {}).get(name)
    return float(found) if number(found) and 0 <= found <= 1 else None


def recall_section(page: Page, record: RunRecord) -> None:
    """A bar for each class, with the reference's beside it. Nothing if the run has no recall."""
    found, clean = recalls_of(record.result), recalls_of(record.beside.get("reference"))
    worst = worst_class(found, clean)
    if worst is None:
        return
    beside = "" if worst.beside is None else f", {worst.beside:.3f} in the reference"
    label = f"Recall of each class after the last round: lowest {worst.recall:.3f} for class {worst.label}{beside}"
    clean = clean if len(clean) == len(found) else []
    columns = ["class", "recall", "reference"] if clean else ["class", "recall"]
    rows = [
        (str(i), *map(written, each)) for i, each in enumerate(zip(found, *([clean] if clean else []), strict=True))
    ]
    caption = "Share of the test examples of each class that the model recognizes. The axis goes from 0 to 1."
    caption += "" if clean else " The reference was not run, or is not in this folder."
    page.section("Recall by class", page.chart(recall_chart(found, clean), label, caption, table(columns, rows)))


def recall_chart(found: list[float | None], clean: list[float | None]) -> Chart:
    """Bars by class. clean: of the reference; empty if it was not run."""
    data = [
        {
            "type": "bar",
            "name": name,
            "x": [str(label) for label in range(len(values))],
            "y": [None if value is None else short(value) for value in values],
            "marker": {"color": color},
            "hovertemplate": f"class %{{x}}, {name}: recall %{{y:.3f}}<extra></extra>",
        }
        for name, values, color in (("this run", found, LINES[0]), ("reference", clean, LINES[1]))
        if values
    ]
    layout = layout_of("class", "recall", unit=True)
    layout["xaxis"] |= {"type": "category"}
    layout |= {"barmode": "group", "height": 260}
    return {"data": data, "layout": layout}


def written(value: float | None) -> str:
    """An accuracy or a recall with four digits; a dash if there is none."""
    return "–" if value is None else f"{value:.4f}"
