"""Sizes fixed beforehand, for work whose shapes may not depend on what it finds.

A CUDA graph replays the same kernels on the same shapes and never asks the host. So a round in a graph gets a
`Capacity`: it fills tensors of bounded size, and notes when something does not fit or would need a closer look. Such a
round must be thrown away and played again without capacity, where everything may be looked at and has its own size. So
a bound costs time when it is too small, and never changes a result.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

CACHED = 2**24
"""Floats of work at a time that a CPU is fastest with."""

TAIL = 1e-4
"""How often a round may draw more examples than there is capacity for."""


@dataclass(frozen=True, eq=False)
class Capacity:
    """total: most examples of one part of the workers; width: of one worker; liars: of all Byzantine ones."""

    total: int
    width: int
    liars: int
    needs: list[Tensor] = field(default_factory=list)

    def need(self, condition: Tensor) -> None:
        """All of `condition` must hold, or this round is not to be used."""
        self.needs.append(condition.all() if condition.ndim else condition)

    def fits(self) -> Tensor:
        """() whether all needs were met."""
        return torch.stack(self.needs).all()


def places(marked: Tensor, size: int, capacity: Capacity | None) -> Tensor:
    """The numbers of the marked entries of (k,), ascending; with capacity `size` of them, or else the round is not
    used.

    What is left over of `size` names the last entry, which may not be marked.
    """
    if capacity is None:
        return marked.nonzero().flatten()
    found = torch.nonzero_static(marked, size=size + 1, fill_value=len(marked) - 1).flatten()
    capacity.need(found[-1] == len(marked) - 1)
    return found
