"""What is measured of a model on test examples. Scores are (N, classes), a confusion matrix (classes, classes)."""

from collections.abc import Sequence

import torch
from torch import Tensor

NEARLY_ALL = 0.95
"""A model that calls this share of every class by one name predicts nearly one class."""

MOST_CLASSES = 100
"""The largest number of classes of which a confusion matrix is kept: it has as many numbers as the square of that."""


def confusion_of(called: Tensor, y: Tensor, classes: int) -> Tensor:
    """(classes, classes): how many examples of the class of a row are called by the class of a column."""
    return torch.bincount(y * classes + called, minlength=classes**2).view(classes, classes)


def recall_of(confusion: Tensor) -> list[float | None]:
    """Share of the examples of each class that are called by it; None for a class of which there are none."""
    found, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    return [hits / count if count else None for hits, count in zip(found, counts, strict=True)]


def balanced_accuracy(recall: Sequence[float | None]) -> float:
    """The mean recall of the classes of which there are examples: every class counts alike, however few it has."""
    known = [value for value in recall if value is not None]
    return sum(known) / len(known)


def majority_share(confusion: Tensor) -> float:
    """The share of the most frequent class: the accuracy of whoever always answers it."""
    counts = confusion.sum(1)
    return int(counts.max()) / int(counts.sum())


def auc(scores: Tensor, y: Tensor) -> float | None:
    """The chance that an example of class 1 has more of its score than one of class 0; a tie counts half.

    By ranks (Mann and Whitney). None unless there are two classes, examples of both, and no score is NaN.
    """
    if scores.shape[1] != 2:
        return None
    margin, positive = (scores[:, 1].double() - scores[:, 0].double()).cpu(), (y == 1).cpu()
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros or bool(margin.isnan().any()):
        return None
    _, place, counts = margin.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[place]  # equal ones share the mean of their ranks
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def one_class(confusion: Sequence[Sequence[int]]) -> int | None:
    """The class that nearly every example is called, whatever it is; None if there is none, as for a good model.

    It is called so by NEARLY_ALL of the examples of other classes, and of its own. So a model that is right on few
    examples of a rare class is not taken for one that predicts one class.
    """
    for label in range(len(confusion)):
        own = confusion[label]
        others = [row for i, row in enumerate(confusion) if i != label]
        groups = [(own[label], sum(own)), (sum(row[label] for row in others), sum(map(sum, others)))]
        if groups[1][1] and all(hits >= NEARLY_ALL * count for hits, count in groups):
            return label
    return None
