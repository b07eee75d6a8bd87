"""Weighted sums of per-example gradients, a row for each worker (see `outer`)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.kernels.outer import ANYWHERE, UNROLL, LayerPlace, power_of_two


class Momentum(NamedTuple):
    """The workers' last vectors (n, d), and by how much of each a sum grows, (n,) float32."""

    last: Tensor
    totals: Tensor


def linear_add(
    a: Tensor,
    delta: Tensor,
    weights: Tensor,
    starts: Tensor,
    into: Tensor,
    place: LayerPlace,
    momentum: Momentum | None = None,
) -> None:
    """into (n, d) += each worker's weighted sum of gradients, and its total times its last vector, in one pass.

    a: (E, K). delta: (E, O). weights: (E,) float32. starts: (n + 1,) int64.
    An example of weight 0 adds nothing, even if it holds NaN; neither does a last vector with a total of 0.
    Only this layer's columns are read and written.
    """
    inputs, outputs, workers = a.shape[1], delta.shape[1], len(into)
    columns, rows = power_of_two(inputs, most=128), power_of_two(outputs, least=1, most=8)
    across, down = triton.cdiv(inputs, columns), triton.cdiv(outputs, rows)
    if not workers:
        return
    last, totals = (into, weights) if momentum is None else momentum  # not read then
    _linear_add[(workers * down * across,)](
        a, delta, weights, starts, into, last, totals,
        across, down, inputs, outputs, into.stride(0), last.stride(0), place.weight, place.bias or 0,
        BIAS=place.bias is not None, LAST=momentum is not None,
        COLUMNS=columns, ROWS=rows, UNROLL=UNROLL // 2, num_warps=1,
    )  # fmt: skip


def row_add(
    rows: Tensor, weights: Tensor, starts: Tensor, into: Tensor, begin: int, momentum: Momentum | None = None
) -> None:
    """As `linear_add`, of gradients rows (E, k) whose place is begin .. begin + k - 1."""
    size, workers = rows.shape[1], len(into)
    block = power_of_two(size, most=512)
    across = triton.cdiv(size, block)
    if not workers:
        return
    last, totals = (into, weights) if momentum is None else momentum  # not read then
    _row_add[(workers * across,)](
        rows, weights, starts, into, last, totals, across, size, into.stride(0), last.stride(0), begin,
        LAST=momentum is not None, BLOCK=block, UNROLL=UNROLL, num_warps=max(1, block // 128),
    )  # fmt: skip


def totals(weights: Tensor, starts: Tensor, factor: float) -> Tensor:
    """(n,) float32: factor times the sum of each worker's weights (E,) float32 or float64, added up in float64."""
    found = torch.empty(len(starts) - 1, dtype=torch.float32, device=weights.device)
    if len(found):
        _totals[(len(found),)](weights, starts, found, FACTOR=float(factor), BLOCK=32, num_warps=1)
    return found


@triton.jit
def _unless_zero(factor, values):
    """values, or 0 where they will be multiplied by 0, which alone would not silence a NaN.

    A choice after loading, not a mask: loads do not wait for the factor.
    """
    return tl.where(factor != 0, values, 0.0)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _linear_add(
    a, delta, weights, starts, into, last, totals,
    across, down, inputs, outputs, stride, last_stride, w0, b0,
    BIAS: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A program for a piece of ROWS x COLUMNS of one worker's matrix, held in registers; example by example."""
    across_here = tl.program_id(0) % across
    down_here = tl.program_id(0) // across % down
    worker = tl.program_id(0) // across // down
    o = down_here * ROWS + tl.arange(0, ROWS)[:, None]
    k = across_here * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (o < outputs) & (k < inputs)
    there_bias = (o < outputs) & (across_here == 0)
    begin, stop = tl.load(starts + worker), tl.load(starts + worker + 1)

    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    found_bias = tl.zeros((ROWS, 1), tl.float32)
    for start in range(begin, stop, UNROLL):
        for step in tl.static_range(UNROLL):
            j = start + step
            weight = tl.load(weights + j, mask=j < stop, other=0.0)
            outer = tl.load(delta + j * outputs + o, mask=(o < outputs) & (j < stop), other=0.0)
            x = tl.load(a + j * inputs + k, mask=(k < inputs) & (j < stop), other=0.0)
            outer = weight * _unless_zero(weight, outer)
            found += outer * _unless_zero(weight, x)
            if BIAS:
                found_bias += outer
    row = into + worker.to(tl.int64) * stride
    here, here_bias = w0 + o * inputs + k, b0 + o
    if LAST:
        total = tl.load(totals + worker)
        old = last + worker.to(tl.int64) * last_stride
        found += total * _unless_zero(total, tl.load(old + here, mask=there, other=0.0))
        if BIAS:
            found_bias += total * _unless_zero(total, tl.load(old + here_bias, mask=there_bias, other=0.0))
    tl.store(row + here, tl.load(row + here, mask=there, other=0.0) + found, mask=there)
    if BIAS:
        before = tl.load(row + here_bias, mask=there_bias, other=0.0)
        tl.store(row + here_bias, before + found_bias, mask=there_bias)


@triton.jit
def _row_add(
    rows, weights, starts, into, last, totals, across, size, stride, last_stride, c0,
    LAST: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A program for a piece of one worker's vector; example by example."""
    worker = tl.program_id(0) // across
    k = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    begin, stop = tl.load(starts + worker), tl.load(starts + worker + 1)
    place = into + worker.to(tl.int64) * stride + c0 + k
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, stop, UNROLL):
        for step in tl.static_range(UNROLL):
            j = start + step
            weight = tl.load(weights + j, mask=j < stop, other=0.0)
            x = tl.load(rows + j * size + k, mask=(k < size) & (j < stop), other=0.0)
            found += weight * _unless_zero(weight, x)
    if LAST:
        total = tl.load(totals + worker)
        old = last + worker.to(tl.int64) * last_stride + c0 + k
        found += total * _unless_zero(total, tl.load(old, mask=k < size, other=0.0))
    tl.store(place, tl.load(place, mask=k < size, other=0.0) + found, mask=k < size)


@triton.jit
def _totals(weights, starts, found, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    worker = tl.program_id(0)
    stop = tl.load(starts + worker + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(tl.load(starts + worker), stop, BLOCK):
        j = start + tl.arange(0, BLOCK)
        total += tl.load(weights + j, mask=j < stop, other=0.0).to(tl.float64)
    tl.store(found + worker, (tl.sum(total, 0) * FACTOR).to(tl.float32))
