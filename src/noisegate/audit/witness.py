"""Ways to a worker's sum that the adversary knows the outcome of. They stand in for `Federation.sums` in a round."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisegate.examples import Examples
from noisegate.roles import Worker
from noisegate.workers import Sums


@dataclass(frozen=True, eq=False)
class Recorder(Sums):
    """Notes the labels of the drawn examples, and adds what `inner` adds, or nothing."""

    inner: Sums | None = None
    noted: list[Tensor] = field(default_factory=list)

    def add(
        self, worker: Worker, params: Tensor, examples: Examples, last_uploads: Tensor, into: Tensor, scale: float = 1.0
    ) -> None:
        """As `inner` does."""
        self.noted.append(examples.y.clone())
        if self.inner is not None:
            self.inner.add(worker, params, examples, last_uploads, into, scale)

    def floats(self, x: Tensor, y: Tensor) -> int:
        """As many as `inner` takes."""
        return self.inner.floats(x, y) if self.inner is not None else x[0].numel()

    def labels(self) -> Tensor:
        """All labels that were noted since the last call."""
        found = torch.cat(self.noted) if self.noted else torch.zeros(0, dtype=torch.int64)
        self.noted.clear()
        return found


@dataclass(frozen=True, eq=False)
class Constant(Sums):
    """Every worker's sum is the same vector (d,), whatever it drew."""

    vector: Tensor

    def add(
        self, worker: Worker, params: Tensor, examples: Examples, last_uploads: Tensor, into: Tensor, scale: float = 1.0
    ) -> None:
        """The vector, times the scale."""
        into += scale * self.vector.to(into)

    def floats(self, x: Tensor, y: Tensor) -> int:
        """Its own numbers."""
        return x[0].numel()
