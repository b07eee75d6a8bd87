"""What a data set holds, in numbers: what `noisegate data show` tells."""

from typing import Any

import torch

from noisegate.checks import plain
from noisegate.data.dataset import Dataset
from noisegate.data.hints import of_scale

MAJORITY, SMALL, FEW = 0.9, 16, 10
"""Hinted at: a class with more than the first share of the examples, a worker with fewer examples than the second, a
class with fewer than the third.
"""


def describe(dataset: Dataset) -> dict[str, Any]:
    """Sizes, shape, classes and workers with their counts, range, what was done, and what is hardly meant."""
    train, test = (part.bincount(minlength=dataset.classes).tolist() for part in (dataset.y, dataset.y_test))
    names = dataset.class_names or tuple(str(label) for label in range(dataset.classes))
    classes = [{"name": name, "train": one, "test": other} for name, one, other in zip(names, train, test, strict=True)]
    return {
        "name": dataset.name,
        "train": len(dataset.y),
        "test": len(dataset.y_test),
        "shape": list(dataset.shape),
        "features": list(dataset.feature_names),
        "range": [float(dataset.x.min()), float(dataset.x.max())],
        "classes": classes,
        "workers": _workers(dataset),
        "notes": list(dataset.notes),
        "warnings": hints(dataset),
    }


def _workers(dataset: Dataset) -> list[dict[str, Any]]:
    """Each worker's examples, and how many there are of each class; none where the data do not say."""
    if dataset.owner is None:
        return []
    tested = torch.zeros(0, dtype=torch.int64) if dataset.owner_test is None else dataset.owner_test
    most = int(dataset.owner.max()) + 1
    mixes = (dataset.owner * dataset.classes + dataset.y).bincount(minlength=most * dataset.classes)
    tests = tested.bincount(minlength=most).tolist()
    return [
        {
            "name": dataset.worker_names[worker] if dataset.worker_names else str(worker),
            "train": sum(mix),
            "test": tests[worker] if dataset.owner_test is not None else None,
            "classes": mix,
        }
        for worker, mix in enumerate(mixes.view(most, dataset.classes).tolist())
        if sum(mix)
    ]


def hints(dataset: Dataset) -> list[str]:
    """What is allowed and rarely meant, a sentence each."""
    found = [f"{scale[0].upper()}{scale[1:]}."] if (scale := of_scale(dataset)) else []
    counts = dataset.y.bincount(minlength=dataset.classes)
    called = dataset.class_names or tuple(str(label) for label in range(dataset.classes))
    share = float(counts.max()) / len(dataset.y)
    if share > MAJORITY:
        found.append(
            f"Class {plain(called[int(counts.argmax())])} has {share:.1%} of the examples: a model that always "
            "answers so has that accuracy; look at balanced accuracy."
        )
    if rare := [
        f"{plain(called[place])} ({int(counts[place])})" for place in range(len(called)) if counts[place] < FEW
    ]:
        found.append(
            f"Classes with few training examples: {_some(rare)}; the server's auxiliary examples, 2 of each class "
            "unless told otherwise, are taken from them."
        )
    if small := [f"{plain(one['name'])} ({one['train']})" for one in _workers(dataset) if one["train"] < SMALL]:
        found.append(f"Workers with fewer than {SMALL} training examples, who hardly add a signal: {_some(small)}.")
    flat = dataset.x.flatten(1)
    same = torch.nonzero((flat == flat[0]).all(0)).flatten().tolist() if dataset.x.ndim == 2 else []
    if same:
        columns = [plain(dataset.feature_names[place]) if dataset.feature_names else str(place) for place in same]
        found.append(f"Features that are the same for all: {_some(columns)}.")
    return found


def _some(words: list[str], most: int = 10) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
