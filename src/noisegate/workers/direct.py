"""The obvious way: make every example's gradient, mix, scale, add up. For any module; the oracle of the fast way."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from noisegate.examples import Examples
from noisegate.roles import Worker
from noisegate.vectors import FlatModel, add_rows

SHORTEST = 1e-30
"""A mix shorter than this counts as zero. So short is the gradient of an example that a model is all but sure of."""


def per_example_gradients(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(B, d): the gradient of each example's own loss."""

    def loss_of_one(vector: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
        return model.losses(vector, one_x[None], one_y[None])[0]

    gradients: Tensor = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(params, x, y)
    return gradients


def contributions(worker: Worker, gradients: Tensor, last_uploads: Tensor) -> Tensor:
    """(B, d): what each example adds to its worker's sum. Both arguments are (B, d).

    Lengths are taken in float64, so that neither overflow nor underflow can bend them.
    """
    mixed = ((1 - worker.momentum) * gradients + worker.momentum * last_uploads).double()
    norms = torch.linalg.vector_norm(mixed, dim=1, keepdim=True)
    usable = norms.isfinite() & (norms >= SHORTEST)
    scaled = mixed * worker.weights(torch.where(usable, norms, 1.0))
    return torch.where(usable, scaled, 0.0).to(gradients.dtype)


Add = TypeVar("Add", bound=Callable[..., None])


def one_thread_at_a_time(add: Add) -> Add:
    """`Sums.add`, which holds the model's lock: another thread's hooks or parameters would get into these sums."""

    @functools.wraps(add)
    def locked(self: Any, *args: Any, **named: Any) -> None:
        with self.model.lock:
            add(self, *args, **named)

    return cast(Add, locked)


class Sums(ABC):
    """A way to a model's sums of contributions."""

    def __call__(
        self, worker: Worker, params: Tensor, x: Tensor, y: Tensor, owner: Tensor, last_uploads: Tensor
    ) -> Tensor:
        """(n, d): each worker's sum of contributions, before noise.

        x, y: the examples of all workers in one row; owner: (E,) the worker of each, ascending; last_uploads: (n, d).
        """
        sums = torch.zeros_like(last_uploads)
        self.add(worker, params, Examples(x, y, owner), last_uploads, sums)
        return sums

    @abstractmethod
    def add(
        self, worker: Worker, params: Tensor, examples: Examples, last_uploads: Tensor, into: Tensor, scale: float = 1.0
    ) -> None:
        """into (n, d) += scale times the sums of contributions of n workers. last_uploads: (n, d)."""

    @abstractmethod
    def floats(self, x: Tensor, y: Tensor) -> int:
        """Floats that one more example of the shape of x[0] takes while sums are made."""


@dataclass(frozen=True)
class Direct(Sums):
    """Sums by way of every single gradient; at most `chunk` of them exist at once. why: not by the closed form."""

    model: FlatModel
    chunk: int = 128
    why: str = ""

    def floats(self, x: Tensor, y: Tensor) -> int:
        """Its own numbers: gradients are made so many at a time, however many there are."""
        return x[0].numel()

    @one_thread_at_a_time
    def add(
        self, worker: Worker, params: Tensor, examples: Examples, last_uploads: Tensor, into: Tensor, scale: float = 1.0
    ) -> None:
        """One chunk of gradients after the other."""
        workers = len(last_uploads)
        for start in range(0, len(examples), self.chunk):
            some = examples.some(slice(start, start + self.chunk))
            who = some.owner.clamp(max=workers - 1)
            gradients = per_example_gradients(self.model, params, some.x, some.y)
            added = contributions(worker, gradients, last_uploads[who])
            if examples.capacity:  # an empty place may hold any example
                added = torch.where(some.owner[:, None] < workers, added, 0.0)
            add_rows(into, who, added * scale)
