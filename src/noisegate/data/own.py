"""A `Dataset` of what a user has: arrays, frames, one part per worker, with or without test examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisegate.checks import guess, shown
from noisegate.data.arrays import (
    MOST_CLASSES,
    WORKER,
    Names,
    array_of,
    classes_of,
    features_of,
    is_frame,
    labels_of,
    notes_of,
    numbered,
    same_scale,
    split,
)
from noisegate.data.dataset import Dataset
from noisegate.data.hints import warn_of_scale
from noisegate.data.tables import listed
from noisegate.data.torch_sets import examples_of
from noisegate.errors import NO_REGRESSION, DataError


@dataclass(frozen=True)
class Labeled:
    """Examples, their labels, and who holds them, if that is known."""

    x: Tensor
    y: Tensor
    owner: Tensor | None = None


@dataclass(frozen=True)
class Words:
    """What people call classes, workers and features; empty where nobody said. notes: what was done to the data."""

    classes: Names = ()
    workers: Names = ()
    features: Names = ()
    notes: Names = ()


def assemble(where: str | Path, train: Labeled, test: Labeled | None, words: Words, rng: torch.Generator) -> Dataset:
    """The data set. Without test examples a fifth of each worker's is split off; warns of features far from 0 to 1.

    where: the name of the data set, or the path that it is from.
    """
    name = where if isinstance(where, str) else where.resolve().stem
    _check_lengths(where, train)
    notes = words.notes + notes_of(split_off=test is None, owned=train.owner is not None)
    if test is None:
        learnt, tried = split(where, train.y, train.owner, rng)
        train, test = _some(train, learnt), _some(train, tried)
    classes = len(words.classes) or classes_of(where, torch.cat((train.y, test.y)))
    dataset = Dataset(
        *(name, train.x, train.y, test.x, test.y, classes, train.owner, test.owner),
        *(words.classes, words.workers, words.features, notes),
    )
    warn_of_scale(where, dataset)
    return dataset


def _check_lengths(name: object, part: Labeled) -> None:
    if len(part.x) != len(part.y) or not len(part.y):
        raise DataError(f"{name}: there are {len(part.x)} examples and {len(part.y)} labels; give one label for each")
    if part.owner is not None and len(part.owner) != len(part.y):
        raise DataError(
            f"{name}: worker has {len(part.owner)} entries; it must have one for each of {len(part.y)} examples"
        )


def _some(part: Labeled, which: Tensor) -> Labeled:
    return Labeled(part.x[which], part.y[which], None if part.owner is None else part.owner[which])


@dataclass(frozen=True)
class Given:
    """Features, labels and workers as a user gives them.

    named: labels are names, even if numbers. features: what the features are called, where x itself does not say.
    """

    x: Any
    y: Any
    worker: Any = None
    named: bool = False
    features: Names = ()


def dataset_of(x: Any, y: Any, worker: Any, test: Any, name: str, rng: torch.Generator) -> Dataset:
    """What `Dataset.of` does."""
    given = [_given(name, x, y, worker)]
    if test is not None and is_frame(test) and given[0].named:
        given.append(_given(name, test, y, worker))
    elif test is not None:
        if not isinstance(test, tuple | list) or len(test) not in (2, 3):
            raise DataError(
                f"{name}: test must be (x, y), (x, y, worker), or a frame like x, got {type(test).__name__}"
            )
        given.append(_given(name, *test))
    _check_columns(given, (name, f"{name}, test"))
    labels, classes = _labels(name, given)
    owners, workers = _owners(name, [part.worker for part in given])
    arrays = [array_of(name, key, part.x) for key, part in zip(("x", "x_test"), given, strict=False)]
    same_scale((name, f"{name}, test"), arrays)
    parts = [
        Labeled(features_of(name, key, array), label, owner)
        for key, array, label, owner in zip(("x", "x_test"), arrays, labels, owners, strict=False)
    ]
    words = Words(classes, workers, _columns(given[0]), notes_of(*arrays))
    return assemble(name, parts[0], parts[1] if test is not None else None, words, rng)


def dataset_of_workers(parts: Any, y: str | None, name: str, rng: torch.Generator) -> Dataset:
    """What `Dataset.of_workers` does."""
    called = tuple(str(key) for key in parts) if isinstance(parts, Mapping) else ()
    listed = list(parts.values() if isinstance(parts, Mapping) else parts)
    if not listed:
        raise DataError(f"{name}: there are no parts; give one for each worker")
    words = called or tuple(str(number) for number in range(len(listed)))
    held = [_of_worker(f"{name}, worker {word}", part, y) for word, part in zip(words, listed, strict=True)]
    bring = [test is not None for _, test in held]
    if any(bring) and not all(bring):
        raise DataError(
            f"{name}: worker {words[bring.index(True)]} brings test examples and worker {words[bring.index(False)]} "
            "none; give them for all workers, or for none"
        )
    given = [train for train, _ in held] + [test for _, test in held if test is not None]
    who = [*words, *(words if all(bring) else ())]
    wheres = [f"{name}, worker {word}" for word in who]
    _check_columns(given, wheres)
    labels, classes = _labels(name, given)
    arrays = [array_of(where, "x", part.x) for where, part in zip(wheres, given, strict=True)]
    same_scale(wheres, arrays)
    features = [features_of(where, "x", array) for where, array in zip(wheres, arrays, strict=True)]
    joined = joined_parts(wheres, features, labels, len(listed))
    return assemble(name, *joined, Words(classes, called, _columns(given[0]), notes_of(*arrays)), rng)


def joined_parts(
    wheres: Sequence[str], features: Sequence[Tensor], labels: Sequence[Tensor], workers: int
) -> tuple[Labeled, Labeled | None]:
    """The training and the test part of all workers: as many parts, and as many again if there are test examples."""
    for where, x, label in zip(wheres, features, labels, strict=True):
        _check_lengths(where, Labeled(x, label))
        if x.shape[1:] != features[0].shape[1:]:
            raise DataError(
                f"{where}: an example has shape {tuple(x.shape[1:])}, but one of {wheres[0]} has "
                f"{tuple(features[0].shape[1:])}; all workers need the same"
            )
    parts: list[Labeled] = []
    for some in (slice(workers), slice(workers, None)):
        if not features[some]:
            return parts[0], None
        owner = torch.arange(workers).repeat_interleave(torch.tensor([len(label) for label in labels[some]]))
        parts.append(Labeled(torch.cat(list(features[some])), torch.cat(list(labels[some])), owner))
    return parts[0], parts[1]


def _of_worker(where: str, part: Any, y: str | None) -> tuple[Given, Given | None]:
    """What one worker brings: training examples, and test examples or None."""
    if isinstance(part, Dataset):
        named = [part.class_names[label] for label in part.y.tolist()] if part.class_names else part.y
        tried = [part.class_names[label] for label in part.y_test.tolist()] if part.class_names else part.y_test
        names = part.feature_names
        return Given(part.x, named, features=names), Given(part.x_test, tried, features=names)
    if is_frame(part):
        if (given := _given(where, part, y)).worker is not None:
            raise DataError(f"{where}: has a column worker, and each part is one worker's; drop the column")
        return given, None
    if isinstance(part, torch.utils.data.Dataset):
        return Given(*examples_of(where, part)), None
    if not isinstance(part, tuple | list) or len(part) not in (2, 4):
        raise DataError(
            f"{where}: is a {type(part).__name__}; give (x, y), (x, y, x_test, y_test), a Dataset, a frame, or a torch "
            "data set"
        )
    return Given(*part[:2]), Given(*part[2:]) if len(part) == 4 else None


def _given(name: str, x: Any, y: Any, worker: Any = None) -> Given:
    """Features apart from the columns of a frame that say label and worker."""
    if not is_frame(x):
        for key, value in (("y", y), ("worker", worker)):
            if isinstance(value, str):
                raise DataError(f"{name}: {key} = {shown(value)} names a column, but x is no frame; give an array")
        if y is None:
            raise DataError(f"{name}: y is missing; give the labels (N,), or a frame that has them in a column")
        return Given(x, y, worker)
    names = list(x.columns)
    if worker is None and WORKER in names and not (isinstance(y, str) and y == WORKER):
        worker = WORKER
    for key, value in (("y", y), ("worker", worker)):
        if isinstance(value, str) and value not in names:
            raise DataError(
                f"{name}: {key} = {shown(value)}: is no column{guess(value, names)}; there are {listed(names)}"
            )
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two columns have the same name; name every column once")
    left = [column for column in names if not (isinstance(worker, str) and column == worker)]
    own = (left[-1] if y is None else y) if y is None or isinstance(y, str) else None
    if own is not None:
        left.remove(own)
    if not left:
        raise DataError(f"{name}: no column is left for features; give y, the name of the label column")
    held = worker if not isinstance(worker, str) else _texts(name, worker, x[worker])
    return Given(x[left], y if own is None else _texts(name, own, x[own]), held, named=own is not None)


def _texts(name: str, column: Any, values: Any) -> list[str]:
    """What a column of a frame says, as texts."""
    array = array_of(name, f"column {shown(column)}", values)
    if array.ndim != 1 or array.dtype.kind not in "buifU":
        raise DataError(
            f"{name}: column {shown(column)} has dtype {array.dtype}; it must be texts or numbers, without holes"
        )
    return [str(value) for value in array.tolist()]


def _columns(given: Given) -> Names:
    return tuple(str(name) for name in given.x.columns) if is_frame(given.x) else given.features


def _check_columns(given: Sequence[Given], wheres: Sequence[str]) -> None:
    """DataError if frames have other columns than the first."""
    first = _columns(given[0])
    for part, where in zip(given, wheres, strict=False):
        if (own := _columns(part)) != first:
            raise DataError(
                f"{where}: has the columns {listed(own)}, and {wheres[0]} {listed(first)}; give all "
                "the same, in the same order"
            )


def _labels(name: str, given: Sequence[Given]) -> tuple[list[Tensor], Names]:
    """The labels of each part as numbers, and the names of the classes where labels are names."""
    arrays = [array_of(name, "y", part.y) for part in given]
    if not any(part.named or array.dtype.kind == "U" for part, array in zip(given, arrays, strict=True)):
        return [labels_of(name, "y", array) for array in arrays], ()
    if len({array.dtype.kind == "U" for array in arrays}) > 1:
        raise DataError(f"{name}: y has texts in one part and numbers in another; give one kind")
    if (odd := next((array for array in arrays if array.ndim != 1), None)) is not None:
        raise DataError(f"{name}: y has shape {odd.shape}; labels must have shape (N,)")
    texts = [str(entry) for array in arrays for entry in array.tolist()]
    numbers, names = named_labels(name, texts)
    return list(numbers.split([len(array) for array in arrays])), names


def named_labels(where: object, texts: list[str]) -> tuple[Tensor, Names]:
    """Classes numbered by their names in sorted order, numbers by size. DataError if these are hardly names."""
    try:
        values = [float(text) for text in texts]
    except ValueError:  # names in words
        values = []
    if values:
        broken = next((text for text, value in zip(texts, values, strict=True) if not value.is_integer()), None)
        if broken is not None:
            raise DataError(
                f"{where}: the label {shown(broken)} is no whole number; name another column as the label, if that is "
                f"none; {NO_REGRESSION}"
            )
        texts = [str(int(value)) for value in values]
    numbers, names = numbered(texts)
    if values:
        order = sorted(names, key=int)
        place = torch.tensor([order.index(name) for name in names])
        numbers, names = place[numbers], tuple(order)
    if not 2 <= len(names) <= MOST_CLASSES:
        raise DataError(
            f"{where}: the labels are {len(names)} different ones, such as {shown(names[0])}; give a column of 2 to "
            f"{MOST_CLASSES} classes" + f"; {NO_REGRESSION}" * (bool(values) and len(names) > 2)
        )
    return numbers, names


def _owners(name: str, given: Sequence[Any]) -> tuple[list[Tensor | None], Names]:
    """The worker of each example of each part, and the workers' names where they are texts."""
    arrays = [None if worker is None else array_of(name, "worker", worker) for worker in given]
    known = [array for array in arrays if array is not None]
    if not any(array.dtype.kind == "U" for array in known):
        return [None if array is None else labels_of(name, "worker", array) for array in arrays], ()
    if any(array.ndim != 1 or array.dtype.kind != "U" for array in known):
        raise DataError(f"{name}: worker must be of shape (N,), and texts in both parts or in none")
    numbers, names = numbered([text for array in known for text in array.tolist()])
    parts = iter(numbers.split([len(array) for array in known]))
    return [None if array is None else next(parts) for array in arrays], names
