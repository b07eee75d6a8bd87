"""The recall of classes, compared."""

from collections.abc import Sequence
from typing import NamedTuple

Recall = Sequence[float | None]
"""By class; None for a class without test examples."""


class ClassRecall(NamedTuple):
    """A class, its recall, and that of the same class to compare with, if it is known."""

    label: int
    recall: float
    beside: float | None = None


def worst_class(found: Recall | None, beside: Recall | None = None) -> ClassRecall | None:
    """The class with the lowest recall, of equals the first; None if no recall is known."""
    known = [(value, label) for label, value in enumerate(found or ()) if value is not None]
    if not known:
        return None
    value, label = min(known)
    return ClassRecall(label, value, beside[label] if beside and label < len(beside) else None)


def largest_drop(found: Recall | None, clean: Recall | None) -> tuple[int, float] | None:
    """The class whose recall lies furthest below that of `clean`, and by how much; None if that is not known."""
    pairs = enumerate(zip(found or (), clean or (), strict=False))
    drops = [(there - here, -label) for label, (here, there) in pairs if here is not None and there is not None]
    if not drops:
        return None
    drop, label = max(drops)
    return -label, drop
