"""The record every data set becomes, and the server's share of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisegate import checks
from noisegate.errors import NO_REGRESSION, DataError
from noisegate.streams import stream

SPLIT = "test-split"
"""The stream that splits test examples off."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples to train on and examples to measure on.

    A record that exists is sound: x and x_test are finite float32 of shape (N, ...) with the same feature
    shape, y and y_test are int64 of shape (N,) with values in 0..classes-1, each part has at least one
    example, and there are at least two classes.

    owner: (N,) int64, 0 or more: which worker holds each example of x, where the data say so. owner_test: the same of
    x_test, whose owners are among those of x: with it a run tells how accurate the model is for each worker's own.

    class_names, worker_names, feature_names: what people call classes, the workers 0, 1, 2, ..., and the features of
    (N, features), all of them or none. notes: what was done to the data on their way here, a sentence each. `of` and
    `of_workers` make a record of what you have.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    owner: Tensor | None = None
    owner_test: Tensor | None = None
    class_names: tuple[str, ...] = ()
    worker_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, x: Any, y: Any = None, *, worker: Any = None, test: Any = None, name: str = "own", seed: int = 1
    ) -> "Dataset":
        """A data set of numpy arrays, tensors, lists, or a frame of pandas or its like.

        x, y: features (N, ...) and labels (N,). Labels are whole numbers 0, 1, 2, ..., or texts, which become classes
        in sorted order. Pictures of bytes, uint8 of shape (N, height, width, ...), are divided by 255; all else is
        taken as it is. With a frame as x, y may be the name of its label column, None the last one; what is in that
        column are names of classes, numbers too. worker: (N,) who holds each example, as whole numbers or texts; or the
        name of a frame's column, which is the one named `worker` unless given. test: the test examples, as (x, y), as
        (x, y, worker), or as a frame like x; unless given, a fifth of each worker's examples is split off, as many of
        each class as its share of them is, by `seed` as a run of that seed would.
        """
        from noisegate.data.own import dataset_of

        return dataset_of(x, y, worker, test, name, stream(seed, SPLIT))

    @classmethod
    def of_workers(cls, parts: Any, y: str | None = None, *, name: str = "own", seed: int = 1) -> "Dataset":
        """A data set of one part per worker, whose sizes and classes may differ.

        parts: a list, or a dict by the workers' names. Each is (x, y) or (x, y, x_test, y_test) of arrays as `of` takes
        them, a `Dataset`, a frame, or a torch data set that gives (x, y) for each example. All of them, or none, bring
        test examples; if none, a fifth of each part is split off, as `of` does. y: the label column of frames; unless
        given, the last one.
        """
        from noisegate.data.own import dataset_of_workers

        return dataset_of_workers(parts, y, name, stream(seed, SPLIT))

    def __post_init__(self) -> None:
        checks.count(classes=self.classes)
        if self.classes < 2:
            raise DataError(f"{self.name}: has {self.classes} class, but a classifier needs at least 2")
        _check_part(self.name, "x", self.x, "y", self.y, self.classes)
        _check_part(self.name, "x_test", self.x_test, "y_test", self.y_test, self.classes)
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: an example of x has shape {tuple(self.x.shape[1:])}, but one of x_test has "
                f"{tuple(self.x_test.shape[1:])}; both parts need the same shape"
            )
        if self.owner is not None:
            _check_owner(self.name, "owner", self.owner, "x", len(self.y))
        if self.owner_test is not None:
            self._check_owner_test(self.owner_test)
        self._check_names()

    def _check_names(self) -> None:
        workers = -1 if self.owner is None else int(self.owner.max()) + 1
        for what, names, wanted in (
            ("class_names", self.class_names, self.classes),
            ("worker_names", self.worker_names, workers),
            ("feature_names", self.feature_names, self.x.shape[1] if self.x.ndim == 2 else -1),
        ):
            if names and len(names) != wanted:
                raise DataError(f"{self.name}: {what} has {len(names)} names, but there are {max(0, wanted)} to name")

    def _check_owner_test(self, owner_test: Tensor) -> None:
        if self.owner is None:
            raise DataError(f"{self.name}: owner_test is given without owner; give both, or leave it out")
        _check_owner(self.name, "owner_test", owner_test, "x_test", len(self.y_test))
        if strangers := sorted(set(owner_test.tolist()) - set(self.owner.tolist())):
            raise DataError(
                f"{self.name}: owner_test has worker {strangers[0]}, who holds no example of x; test examples belong "
                "to workers that train"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example: what a model builder takes."""
        return tuple(self.x.shape[1:])


def _check_owner(name: str, what: str, owner: Tensor, of: str, examples: int) -> None:
    if owner.dtype != torch.int64 or owner.shape != (examples,):
        raise DataError(
            f"{name}: {what} must be int64 of shape ({examples},), one worker for each example of {of}, got "
            f"{owner.dtype} of shape {tuple(owner.shape)}"
        )
    if int(owner.min()) < 0:
        raise DataError(f"{name}: {what} has {int(owner.min())}; workers are numbered 0, 1, 2, ...")


def _check_part(name: str, x_name: str, x: Tensor, y_name: str, y: Tensor, classes: int) -> None:
    if x.dtype != torch.float32 or y.dtype != torch.int64:
        why = f"; {NO_REGRESSION}" * y.is_floating_point()
        raise DataError(f"{name}: {x_name} must be float32 and {y_name} int64, got {x.dtype} and {y.dtype}{why}")
    if x.ndim < 2 or y.ndim != 1 or x[:1].numel() == 0:
        raise DataError(
            f"{name}: {x_name} must have shape (N, ...) and {y_name} (N,), with at least one example and one "
            f"feature, got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if len(x) != len(y):
        raise DataError(f"{name}: {x_name} has {len(x)} examples, but {y_name} has {len(y)} labels; they must agree")
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{name}: {x_name} has NaN or infinite values; remove or replace them first")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise DataError(f"{name}: {y_name} has labels {low}..{high}, but they must lie in 0..{classes - 1}")


def hold_out(y: Tensor, classes: int, per_class: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split the examples with labels `y` into the server's auxiliary data and the workers' pool.

    Returns (aux_indices, pool_indices): disjoint, together every index, aux with exactly `per_class` of every
    class in 0..classes-1, ordered by class, and pool in increasing order. Which examples are taken depends on
    `rng` alone.
    """
    checks.count(classes=classes, per_class=per_class)
    taken = []
    for label in range(classes):
        members = torch.nonzero(y == label).flatten()
        if len(members) < per_class:
            raise DataError(
                f"class {label} has {len(members)} training examples, but {per_class} of every class are "
                "held out as the server's auxiliary data; add examples of it or hold out fewer"
            )
        taken.append(members[torch.randperm(len(members), generator=rng)[:per_class]])
    aux = torch.cat(taken)
    in_pool = torch.ones(len(y), dtype=torch.bool)
    in_pool[aux] = False
    return aux, torch.nonzero(in_pool).flatten()
