"""Sizes that are fixed before a round, for work whose shapes may not depend on what it finds.

A CUDA graph replays the same kernels on the same shapes and never asks the host. So a round in a graph gets a
`Capacity`. It fills tensors of bounded size, and notes when something does not fit or would need a closer look. Such a
round is thrown away and played again without a capacity, where every tensor has the size that it needs. A bound that is
too small costs time. It never changes a result.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

CACHED = 2**24
"""Floats of work at a time that a CPU is fastest with."""

TAIL = 1e-4
"""The probability that a round draws more examples than its capacity."""


@dataclass(frozen=True, eq=False)
class Capacity:
    """The most examples of one portion of the workers (`total`), of one worker, and of all Byzantine workers."""

    total: int
    per_worker: int
    byzantine: int
    needs: list[Tensor] = field(default_factory=list)

    def need(self, condition: Tensor) -> None:
        """All of `condition` must hold, or this round is not to be used."""
        self.needs.append(condition.all() if condition.ndim else condition)

    def fits(self) -> Tensor:
        """() whether all needs were met."""
        return torch.stack(self.needs).all()


def places(marked: Tensor, size: int, capacity: Capacity | None) -> Tensor:
    """The numbers of the marked entries of (k,), ascending. With a capacity `size` of them, or the round is not used.

    Where fewer are marked than `size`, the rest names the last entry, which may not be marked.
    """
    if capacity is None:
        return marked.nonzero().flatten()
    found = torch.nonzero_static(marked, size=size + 1, fill_value=len(marked) - 1).flatten()
    capacity.need(found[-1] == len(marked) - 1)
    return found
