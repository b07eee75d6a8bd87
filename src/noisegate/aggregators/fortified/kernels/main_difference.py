"""One step of power iteration for the main difference between workers (twin: `OwnProjections.of`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import state as plain

TINY = tl.constexpr(plain.TINY)

PROGRAMS = 512  # at most, that share out the columns; as many sums are added up at the end
COLUMNS = 32  # that a program reads of many rows at once: one cache line of each
ROWS = 64  # workers that a program reads at once
MANY = 1024  # workers that are read at once where one program reads all


def next_difference(state: plain.FortifiedState, loads: Tensor) -> Tensor:
    """(1, d) the sum of the own averages times (load less the mean load), of those that count, as a unit vector."""
    n, d = state.own_averages.shape
    blocks = triton.cdiv(d, COLUMNS)
    difference, squares = torch.empty_like(state.main_difference), loads.new_empty(min(PROGRAMS, blocks))
    _difference[(len(squares),)](
        state.own_averages,
        loads,
        state.counted.view(torch.uint8),
        state.unrefuted.view(torch.uint8),
        difference,
        squares,
        n,
        d,
        blocks,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        MANY=min(MANY, triton.next_power_of_2(n)),
        num_warps=4,
    )
    programs = triton.next_power_of_2(len(squares))
    _unit[(triton.cdiv(d, MANY),)](difference, squares, len(squares), d, PROGRAMS=programs, BLOCK=MANY, num_warps=4)
    return difference


@triton.jit
def _counts(row, counted, unrefuted, n):
    """Whether the own averages of these workers count."""
    passed = tl.load(counted + row, mask=row < n, other=0) != 0
    return passed & (tl.load(unrefuted + row, mask=row < n, other=0) != 0)


@triton.jit(do_not_specialize=["n", "blocks"])
def _difference(
    own_averages,
    loads,
    counted,
    unrefuted,
    main_difference,
    squares,
    n,
    d,
    blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
):
    """The main difference in one program's columns before it is a unit vector, and its sum of squares there."""
    total_load = tl.zeros([MANY], tl.float32)
    many = tl.zeros([MANY], tl.float32)
    for first in range(0, n, MANY):
        row = first + tl.arange(0, MANY)
        counts = _counts(row, counted, unrefuted, n)
        total_load += tl.load(loads + row, mask=row < n, other=0.0)
        many += tl.where(counts, 1.0, 0.0)
    mean_load = tl.sum(total_load, 0) / tl.maximum(tl.sum(many, 0), 1.0)
    square = tl.zeros([COLUMNS], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, n, ROWS):
            row = first + tl.arange(0, ROWS)
            counts = _counts(row, counted, unrefuted, n)
            load = tl.where(counts, tl.load(loads + row, mask=row < n, other=0.0) - mean_load, 0.0)
            here = counts[:, None] & (column[None, :] < d)
            x = tl.load(own_averages + row[:, None].to(tl.int64) * d + column[None, :], mask=here, other=0.0)
            total += tl.sum(load[:, None] * x.to(tl.float32), 0)
        tl.store(main_difference + column, total, mask=column < d)
        square += total * total
    tl.store(squares + tl.program_id(0), tl.sum(square, 0))


@triton.jit(do_not_specialize=["programs"])
def _unit(main_difference, squares, programs, d, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Divide by the length."""
    program = tl.arange(0, PROGRAMS)
    length = tl.sqrt(tl.sum(tl.load(squares + program, mask=program < programs, other=0.0), 0))
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(main_difference + column, mask=column < d, other=0.0)
    tl.store(main_difference + column, value / tl.maximum(length, TINY), mask=column < d)
