"""Where accuracy alone misleads: uneven classes, and a model that predicts nearly one of them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from noisegate import metrics

UNEVEN = 1.5
"""Test classes are uneven where the most frequent one has more than this times an equal share."""

HIDDEN = 0.6
"""A majority share from which on an accuracy looks like more than it is."""


def uneven(result: Mapping[str, Any]) -> bool:
    """Whether the accuracy of a result needs other numbers beside it: there are two classes, or they are uneven."""
    share, recall = result.get("majority_share"), result.get("recall")
    return share is not None and bool(recall) and (len(recall) == 2 or share * len(recall) > UNEVEN)  # type: ignore[arg-type]


def columns(result: Mapping[str, Any]) -> dict[str, float]:
    """What a table of many runs shows of one beside its accuracy, by column, where it says something."""
    found = {"balanced": result.get("balanced_accuracy"), "AUC": result.get("auc")} if uneven(result) else {}
    if (worst := worst_worker(result)) is not None:
        found["worst worker"] = worst.accuracy
    found |= result.get("metrics") or {}
    return {name: float(value) for name, value in found.items() if value is not None}


class WorstWorker(NamedTuple):
    """The worker on whose own test examples a model is worst, and what it is for the median one."""

    name: str
    accuracy: float
    median: float
    workers: int

    def sentence(self) -> str:
        """What the accuracy is of."""
        return f"on the test examples of worker {self.name} alone; median of {self.workers} workers {self.median:.3f}"


def worst_worker(result: Mapping[str, Any]) -> WorstWorker | None:
    """Of equals the first; None where the data do not say whose the test examples are."""
    known = {name: value for name, value in (result.get("worker_accuracy") or {}).items() if value is not None}
    if not known:
        return None
    name = min(known, key=lambda each: known[each])
    return WorstWorker(name, known[name], median(known.values()), len(known))


def gathered(results: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The same of many results: by column, the values of those that have one."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, value in columns(result).items():
            found.setdefault(name, []).append(value)
    return found


def told(result: Mapping[str, Any]) -> str:
    """The sentence that says that a model predicts nearly one class; empty if it does not, or nobody knows."""
    confusion = result.get("confusion")
    label = metrics.one_class(confusion) if confusion else None
    if label is None or not confusion:
        return ""
    total = sum(map(sum, confusion))
    share, balanced = sum(row[label] for row in confusion) / total, result["balanced_accuracy"]
    return (
        f"the model calls {share:.1%} of the test examples class {label}, whatever they are: its accuracy is "
        f"{result['accuracy']:.3f}, its balanced accuracy {balanced:.3f}"
    )


def hidden(result: Mapping[str, Any]) -> str:
    """`told`, where the accuracy does not show it by itself."""
    return told(result) if (result.get("majority_share") or 0) >= HIDDEN else ""


def mistakes(confusion: Sequence[Sequence[int]]) -> str:
    """A confusion matrix of two classes in words."""
    (right, missed), (called, found) = confusion
    return f"class 0: {right} right, {missed} called 1; class 1: {found} right, {called} called 0"
