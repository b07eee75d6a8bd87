"""The record every data set becomes, and the server's share of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples to train on and examples to measure on.

    A record that exists is sound: x and x_test are finite float32 of shape (N, ...) with the same feature
    shape, y and y_test are int64 of shape (N,) with values in 0..classes-1, each part has at least one
    example, and there are at least two classes.

    owner: (N,) int64, 0 or more: which worker holds each example of x, where the data say so. owner_test: the same of
    x_test, whose owners are among those of x: with it a run tells how accurate the model is for each worker's own.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    owner: Tensor | None = None
    owner_test: Tensor | None = None

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
        raise DataError(f"{name}: {x_name} must be float32 and {y_name} int64, got {x.dtype} and {y.dtype}")
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
