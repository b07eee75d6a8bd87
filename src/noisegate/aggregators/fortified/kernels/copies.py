"""Who copies whom, and how often the rest is repeated (twin: `copies._within_group`). A program for each worker."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import copies as plain

COPY_SHARE = tl.constexpr(plain.COPY_SHARE)
TRUST_STEP = tl.constexpr(plain.TRUST_STEP)
GROUP = tl.constexpr(plain.GROUP)
MOST_WORKERS = tl.constexpr(plain.MOST_WORKERS)


def within_group(
    products: Tensor, candidates: Tensor, limit: Tensor, longest: float, score: Tensor, rank: Tensor
) -> plain.Dependence:
    """As `copies._within_group`, from the inner products of a group. rank: (n,) int64. All programs meet after each
    step."""
    n = len(candidates)
    grid, block = (n,), max(16, triton.next_power_of_2(n))
    square = float(longest) ** 2
    given = products.contiguous(), candidates.view(torch.uint8), limit
    conflict = torch.empty(n, n, dtype=torch.uint8, device=candidates.device)
    rivals, common, repeats = torch.empty_like(rank), torch.empty_like(score), torch.empty_like(score)
    out, after, wins = (torch.empty_like(candidates).view(torch.uint8) for _ in range(3))
    _conflict[grid](*given, conflict, rivals, common, out, n, square, BLOCK=block, num_warps=4)
    for _ in range(plain.TURNS):
        _win[grid](conflict, out, common, rivals, score, rank, wins, n, BLOCK=block, num_warps=4)
        _lose[grid](conflict, out, wins, after, n, ANY=False, BLOCK=block, num_warps=4)
        out, after = after, out
    _lose[grid](conflict, out, wins, after, n, ANY=True, BLOCK=block, num_warps=4)
    _repeat[grid](*given, after, repeats, n, square, BLOCK=block, num_warps=4)
    return plain.Dependence(after.view(torch.bool), repeats)


@triton.jit
def _rounded(x):
    """The nearest whole number; the even one of two, as `torch.round` has it."""
    below = tl.floor(x)
    rest = x - below
    odd = below - 2 * tl.floor(below / 2) == 1
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)


@triton.jit
def _products(i, products, candidates, n, BLOCK: tl.constexpr):
    """Those of worker i with everyone else, of who counts; 0 of the others."""
    j = tl.arange(0, BLOCK)
    counts = (tl.load(candidates + j, mask=j < n, other=0) != 0) & (j != i)
    product = tl.load(products + i.to(tl.int64) * n + j, mask=counts, other=0.0)
    return tl.where(tl.load(candidates + i) != 0, product, 0.0)


@triton.jit(do_not_specialize=["n"])
def _conflict(products, candidates, limit, conflict, rivals, common, out, n, square, BLOCK: tl.constexpr):
    """With whom worker i conflicts, with how many, and how much it has in common with them. Nobody is out yet."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    product = _products(i, products, candidates, n, BLOCK)
    against = product > tl.maximum(tl.load(limit), square * COPY_SHARE)
    tl.store(conflict + i.to(tl.int64) * n + j, against.to(tl.uint8), mask=j < n)
    tl.store(rivals + i, tl.sum(against.to(tl.int64), 0))
    tl.store(common + i, tl.sum(tl.where(against, product, 0.0), 0))
    tl.store(out + i, 0)


@triton.jit
def _conflicts_left(i, conflict, out, n, BLOCK: tl.constexpr):
    """With whom worker i conflicts of those who are not out, unless it is itself."""
    j = tl.arange(0, BLOCK)
    against = tl.load(conflict + i.to(tl.int64) * n + j, mask=j < n, other=0) != 0
    return against & (tl.load(out + j, mask=j < n, other=1) == 0) & (tl.load(out + i) == 0)


@triton.jit(do_not_specialize=["n"])
def _win(conflict, out, common, rivals, score, rank, wins, n, BLOCK: tl.constexpr):
    """Whether worker i comes before all its rivals."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    exists = j < n
    shared = tl.load(common + j, mask=exists, other=0.0)
    most = tl.max(shared, 0)
    shared = tl.where(most > 0, _rounded(100 * shared / tl.where(most > 0, most, 1.0)), 0.0)
    steps = _rounded(tl.load(score + j, mask=exists, other=0.0) / TRUST_STEP).to(tl.float64)
    order = steps * GROUP - tl.load(rivals + j, mask=exists, other=0).to(tl.float64)
    order = (order * 128 + shared.to(tl.float64)) * MOST_WORKERS
    order -= tl.load(rank + j, mask=exists, other=0).to(tl.float64)
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
def _repeat(products, candidates, limit, out, repeats, n, square, BLOCK: tl.constexpr):
    """How many further uploads that of worker i is as good as repeated by."""
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    product = _products(i, products, candidates, n, BLOCK)
    stays = (tl.load(out + j, mask=j < n, other=1) == 0) & (tl.load(out + i) == 0)
    tl.store(repeats + i, tl.sum(tl.where(stays & (product > tl.load(limit)), product, 0.0), 0) / square)
