"""Order statistics of few rows by a sorting network (Batcher, 1968): a comparison is done for many columns at once."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_ROWS = 64
"""The comparisons grow like n log^2 n: with more rows than this, sorting column by column is faster."""

COLUMNS = 2**14
"""Columns at a time: enough that a comparison takes longer than its call."""


class Plan(NamedTuple):
    """What to do with n rows. Lines 0 .. n - 1 are the rows, which are only read; those behind are buffers.

    steps: (whether the lower is wanted, line, line, line that the result goes to), one after the other.
    buffers: how many. kept: those that hold the wanted ranks in the end, in any order.
    """

    steps: tuple[tuple[bool, int, int, int], ...]
    buffers: int
    kept: tuple[int, ...]


def mean_by_network(uploads: Tensor, rows: Tensor, low: int, high: int, scratch: int) -> Iterator[Tensor]:
    """Parts of (d,), on a CPU: per coordinate the mean of the marked rows' values of ranks low <= r < high."""
    marked = rows.nonzero().flatten().tolist()
    low, high = max(0, low), min(high, len(marked))
    if low >= high:
        yield torch.zeros_like(uploads[0])
        return
    plan = plan_of(len(marked), low, high)
    size = max(1, min(COLUMNS, uploads.shape[1], scratch // (plan.buffers * uploads.element_size())))
    lines_of, values = torch.empty(plan.buffers, size, dtype=uploads.dtype), uploads.numpy()
    weights = torch.zeros(plan.buffers, dtype=uploads.dtype)
    weights[list(plan.kept)] = 1 / (high - low)
    for start in range(0, uploads.shape[1], size):
        buffers = lines_of[:, : uploads.shape[1] - start]
        lines = [values[i, start : start + size] for i in marked] + list(buffers.numpy())
        for lower, one, other, into in plan.steps:
            (np.minimum if lower else np.maximum)(lines[one], lines[other], out=lines[into])
        yield weights @ buffers


@functools.lru_cache(maxsize=64)
def plan_of(n: int, low: int, high: int) -> Plan:
    """How to find the ranks low .. high - 1 of n rows."""
    line, free, lines = list(range(n)), list[int](), n  # the line of each place; buffers to use again; how many lines
    steps = list[tuple[bool, int, int, int]]()

    def add(lower: bool, one: int, other: int, spare: list[int]) -> int:
        nonlocal lines
        if not spare:
            spare, lines = [lines], lines + 1
        steps.append((lower, one, other, spare.pop()))
        return steps[-1][-1]

    for i, j, wants_lower, wants_higher in needed_comparisons(n, low, high):
        one, other = line[i], line[j]
        overwritten = [buffer for buffer in (one, other) if buffer >= n]
        if wants_lower and wants_higher:
            line[i] = add(True, one, other, free)
            line[j] = add(False, one, other, overwritten)
        else:
            line[i if wants_lower else j] = add(wants_lower, one, other, overwritten)
        free += overwritten
    for i in range(low, high):
        if line[i] < n:  # was never compared
            line[i] = add(True, line[i], line[i], free)
    return Plan(tuple(steps), lines - n, tuple(at - n for at in line[low:high]))


def needed_comparisons(n: int, low: int, high: int) -> list[tuple[int, int, bool, bool]]:
    """(place, place, whether its lower result is wanted, its higher one): what is left of `comparisons`, in order.

    Not wanted is what ends up outside low .. high - 1. And as only the sum of the wanted matters, two places that are
    both wanted or both not, and will not be compared with others any more, need not be compared with each other.
    """
    wanted: list[bool | None] = [low <= place < high for place in range(n)]  # None: will be compared
    needed = []
    for i, j in reversed(comparisons(n)):
        if wanted[i] is None or wanted[i] is not wanted[j]:
            needed.append((i, j, wanted[i] is not False, wanted[j] is not False))
            wanted[i] = wanted[j] = None
    return needed[::-1]


def comparisons(n: int) -> list[tuple[int, int]]:
    """Batcher's merge exchange: to put the lower of each pair of places first, one after the other, sorts n values."""
    found, length = [], 1  # of sorted runs
    while length < n:
        step = length
        while step:
            for first in range(step % length, n - step, 2 * step):
                for i in range(first, min(first + step, n - step)):
                    if i // (2 * length) == (i + step) // (2 * length):
                        found.append((i, i + step))
            step //= 2
        length *= 2
    return found
