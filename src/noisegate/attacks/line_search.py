"""How far an attack should go against the aggregator at hand: a line search that asks the aggregator itself."""

from collections.abc import Callable

import torch
from torch import Tensor

FEWEST = 6
"""The fewest questions of a search: the known scale, two ends of a grid, and some between."""


def lowest_at(
    value: Callable[[Tensor], Tensor],
    known: float,
    lowest: float,
    highest: float,
    questions: int,
    device: torch.device,
) -> Tensor:
    """() float64, the scale where `value` is lowest among so many scales; of equal ones, the smallest.

    Asked are `known`, a geometric grid from `lowest` to `highest`, and a finer one between the neighbors of the best of
    these. `value` takes and gives () tensors, and the device is never asked for their values.
    """

    def shares(count: int) -> Tensor:
        """(count,) from 0 to 1. Made on the device: while a round is recorded nothing can be copied there."""
        return torch.linspace(0.0, 1.0, count, dtype=torch.float64, device=device)

    coarse, fine = questions // 2 - 1, questions - questions // 2
    grid = (lowest * (highest / lowest) ** shares(coarse)).clamp(lowest, highest)
    scales = torch.cat([torch.full_like(grid[:1], known), grid])
    values = torch.stack([value(scale) for scale in scales])

    best, step = _best(scales, values), (highest / lowest) ** (1 / (coarse - 1))
    low, high = (best / step).clamp(lowest, highest), (best * step).clamp(lowest, highest)
    finer = low * (high / low) ** shares(fine + 2)[1:-1]
    values = torch.cat([values, torch.stack([value(scale) for scale in finer])])
    return _best(torch.cat([scales, finer]), values)


def _best(scales: Tensor, values: Tensor) -> Tensor:
    """() the smallest scale of those with the lowest value; what is not a number is no value."""
    values = values.nan_to_num(torch.inf, torch.inf)
    return torch.where(values == values.min(), scales, torch.inf).min()
