"""Which uploads of the rule `fortified` depend on one another (twin: `aggregators.independence`).

A program for each worker. Nothing is added atomically, nothing waits for the device and no shape depends on a value, as
in `judging`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sharing(NamedTuple):
    """Constants of `independence`."""

    alike: float
    step: float
    group: int
    most_workers: int
    turns: int


def shared(
    products: Tensor, among: Tensor, limit: Tensor, longest: float, trust: Tensor, rank: Tensor, limits: Sharing
) -> tuple[Tensor, Tensor]:
    """(n,) bool, (n,): what `independence._shared` finds, from the inner products of a group. rank: (n,) int64.

    A program for each worker, and all of them meet after each step.
    """
    n = len(among)
    grid, block = (n,), max(16, triton.next_power_of_2(n))
    square = float(longest) ** 2
    given = products.contiguous(), among.view(torch.uint8), limit
    conflict = torch.empty(n, n, dtype=torch.uint8, device=among.device)
    rivals, leaning, others = torch.empty_like(rank), torch.empty_like(trust), torch.empty_like(trust)
    out, after, wins = (torch.empty_like(among).view(torch.uint8) for _ in range(3))
    _conflict[grid](*given, conflict, rivals, leaning, out, n, square, ALIKE=limits.alike, BLOCK=block, num_warps=4)
    order = leaning, rivals, trust, rank
    for _ in range(limits.turns):
        _win[grid](
            conflict,
            out,
            *order,
            wins,
            n,
            STEP=limits.step,
            GROUP=limits.group,
            MOST_WORKERS=limits.most_workers,
            BLOCK=block,
            num_warps=4,
        )
        _lose[grid](conflict, out, wins, after, n, ANY=False, BLOCK=block, num_warps=4)
        out, after = after, out
    _lose[grid](conflict, out, wins, after, n, ANY=True, BLOCK=block, num_warps=4)
    _repeat[grid](*given, after, others, n, square, BLOCK=block, num_warps=4)
    return after.view(torch.bool), others


@triton.jit
def _rounded(x):
    """The nearest whole number; the even one of two, as `torch.round` has it."""
    below = tl.floor(x)
    rest = x - below
    odd = below - 2 * tl.floor(below / 2) == 1
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)


@triton.jit
def _products(i, products, among, n, BLOCK: tl.constexpr):
    """Those of worker i with everyone else, of who counts; 0 of the others."""
    j = tl.arange(0, BLOCK)
    counts = (tl.load(among + j, mask=j < n, other=0) != 0) & (j != i)
    product = tl.load(products + i.to(tl.int64) * n + j, mask=counts, other=0.0)
    return tl.where(tl.load(among + i) != 0, product, 0.0)


@triton.jit(do_not_specialize=["n"])
def _conflict(
    products, among, limit, conflict, rivals, leaning, out, n, square, ALIKE: tl.constexpr, BLOCK: tl.constexpr
):
    """With whom worker i conflicts, with how many, and how much they lean on it. Nobody is out yet."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    product = _products(i, products, among, n, BLOCK)
    against = product > tl.maximum(tl.load(limit), ALIKE * square)
    tl.store(conflict + i.to(tl.int64) * n + j, against.to(tl.uint8), mask=j < n)
    tl.store(rivals + i, tl.sum(against.to(tl.int64), 0))
    tl.store(leaning + i, tl.sum(tl.where(against, product, 0.0), 0))
    tl.store(out + i, 0)


@triton.jit
def _conflicts_left(i, conflict, out, n, BLOCK: tl.constexpr):
    """With whom worker i conflicts of those who are not out, unless it is itself."""
    j = tl.arange(0, BLOCK)
    against = tl.load(conflict + i.to(tl.int64) * n + j, mask=j < n, other=0) != 0
    return against & (tl.load(out + j, mask=j < n, other=1) == 0) & (tl.load(out + i) == 0)


@triton.jit(do_not_specialize=["n"])
def _win(
    conflict,
    out,
    leaning,
    rivals,
    trust,
    rank,
    wins,
    n,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_WORKERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether worker i comes before all its rivals."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    known = j < n
    leans = tl.load(leaning + j, mask=known, other=0.0)
    most = tl.max(leans, 0)
    leans = tl.where(most > 0, _rounded(100 * leans / tl.where(most > 0, most, 1.0)), 0.0)
    steps = _rounded(tl.load(trust + j, mask=known, other=0.0) / STEP).to(tl.float64)
    order = steps * GROUP - tl.load(rivals + j, mask=known, other=0).to(tl.float64)
    order = (order * 128 + leans.to(tl.float64)) * MOST_WORKERS
    order -= tl.load(rank + j, mask=known, other=0).to(tl.float64)
    own = tl.max(tl.where(j == i, order, float("-inf")), 0)
    against = _conflicts_left(i, conflict, out, n, BLOCK)
    tl.store(wins + i, (own > tl.max(tl.where(against, order, float("-inf")), 0)).to(tl.uint8))


@triton.jit(do_not_specialize=["n"])
def _lose(conflict, out, wins, after, n, ANY: tl.constexpr, BLOCK: tl.constexpr):
    """Whether worker i is out: it was, or conflicts with a winner. ANY: or with anyone."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    against = _conflicts_left(i, conflict, out, n, BLOCK)
    if not ANY:
        against = against & (tl.load(wins + j, mask=j < n, other=0) != 0)
    tl.store(after + i, tl.maximum(tl.max(against.to(tl.uint8), 0), tl.load(out + i)))


@triton.jit(do_not_specialize=["n"])
def _repeat(products, among, limit, out, others, n, square, BLOCK: tl.constexpr):
    """How many further uploads that of worker i is as good as repeated by."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    product = _products(i, products, among, n, BLOCK)
    stays = (tl.load(out + j, mask=j < n, other=1) == 0) & (tl.load(out + i) == 0)
    tl.store(others + i, tl.sum(tl.where(stays & (product > tl.load(limit)), product, 0.0), 0) / square)
