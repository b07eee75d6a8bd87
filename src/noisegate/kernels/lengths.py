"""Squared lengths of per-example gradients, and their inner products with a vector of their worker (see `outer`)."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from noisegate.kernels.outer import ANYWHERE, COUNTS, UNROLL, ByWorker, LayerPlace, power_of_two, put

TOGETHER = 8
"""Examples of a worker that share one reading of its matrix. Each takes a register for every column of a thread. More
would leave more of the last group empty, and other readings of the same matrix come from the L2 cache."""

FEW = 512
"""Programs below which a GPU is not full. Then half as many examples share a reading."""

COLUMNS, OUTPUTS = 1024, 256
"""Most columns and rows of a matrix that one program takes. Larger matrices are cut, and fill the GPU all the same."""


class InnerProducts(NamedTuple):
    """Where inner products go, (E,) float64, and the workers' vectors (n, d) that they are with."""

    found: Tensor
    vectors: Tensor


def linear_lengths(
    a: Tensor,
    delta: Tensor,
    by_worker: ByWorker,
    place: LayerPlace,
    square: Tensor,
    inner: InnerProducts | None,
    first: bool,
) -> None:
    """square[j] += the squared length of example j's gradient, inner.found[j] += its product with its worker's vector.

    a: (E, K). delta: (E, O). square: (E,) float64.
    place: where the layer's O K weights and its O biases lie in a vector.
    inner: None if no inner products are wanted.
    first: write instead of adding; empty places then get 1 and 0. Otherwise they stay as they are.
    """
    (examples, inputs), outputs, workers = a.shape, delta.shape[1], by_worker.workers
    biased = place.bias is not None
    if not examples:
        return
    if inner is None:
        block = power_of_two(inputs, outputs, most=COLUMNS)
        together = max(1, min(32, COLUMNS // block))
        _linear_squares[(triton.cdiv(examples, together),)](
            a, delta, by_worker.starts, square, examples, workers, inputs, outputs,
            BIAS=biased, FIRST=first, J=together, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return
    columns, rows = power_of_two(inputs, most=COLUMNS), power_of_two(outputs, most=OUTPUTS)
    across, down = triton.cdiv(inputs, columns), triton.cdiv(outputs, rows)
    split = across * down > 1
    few = workers * triton.cdiv(by_worker.width, TOGETHER) * across * down < FEW
    together = power_of_two(by_worker.width, least=1, most=TOGETHER // 2 if few else TOGETHER)
    groups = max(1, triton.cdiv(by_worker.width, together))
    # Of a cut matrix: |a|^2 by columns, |delta|^2 by rows, inner products by both.
    parts = square.new_empty(across + down + across * down, examples) if split else square
    sets = workers if split or not first else workers + 1  # one more to write the empty places
    _linear_lengths[(sets * groups, across * down)](
        a, delta, by_worker.starts, inner.vectors, square, inner.found, parts,
        examples, workers, groups, across, down, inputs, outputs,
        inner.vectors.stride(0), place.weight, place.bias or 0,
        BIAS=biased, FIRST=first, SPLIT=split, J=together, COLUMNS=columns, ROWS=rows,
        UNROLL=min(UNROLL, rows), num_warps=max(1, columns // 256),
    )  # fmt: skip
    if split:
        _combine[(triton.cdiv(examples, 128),)](
            parts, by_worker.starts, square, inner.found, examples, workers, across, down,
            BIAS=biased, FIRST=first, BLOCK=128, num_warps=4,
        )  # fmt: skip


def row_lengths(
    rows: Tensor, by_worker: ByWorker, begin: int, square: Tensor, inner: InnerProducts | None, first: bool
) -> None:
    """As `linear_lengths`, of gradients rows (E, k) whose place in a vector is begin .. begin + k - 1."""
    examples, size = rows.shape
    if not examples:
        return
    block = power_of_two(size, most=COLUMNS)
    together = max(1, min(32, COLUMNS // block))
    found, vectors = (square, rows) if inner is None else inner  # not read then
    _row_lengths[(triton.cdiv(examples, together),)](
        rows, by_worker.owner, vectors, square, found, examples, by_worker.workers, size, vectors.stride(0), begin,
        INNER=inner is not None, FIRST=first, J=together, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _squares_of(rows, j, valid, size, J: tl.constexpr, BLOCK: tl.constexpr):
    """(J, 1) float64: squared lengths of rows j (J, 1) int64 of a contiguous (E, size) matrix."""
    found = tl.zeros((J, BLOCK), tl.float64)
    for begin in range(0, size, BLOCK):
        k = begin + tl.arange(0, BLOCK)[None, :]
        x = tl.load(rows + j * size + k, mask=valid & (k < size), other=0.0).to(tl.float64)
        found += x * x
    return tl.sum(found, 1, keep_dims=True)


@triton.jit(do_not_specialize=COUNTS)
def _linear_squares(
    a, delta, starts, square, examples, workers, inputs, outputs,
    BIAS: tl.constexpr, FIRST: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Without inner products: a program for every J examples."""
    j = tl.program_id(0).to(tl.int64) * J + tl.arange(0, J)[:, None]
    valid = j < tl.load(starts + workers)
    of_a = _squares_of(a, j, valid, inputs, J, BLOCK)
    if BIAS:
        of_a += 1.0
    put(square, of_a * _squares_of(delta, j, valid, outputs, J, BLOCK), 1.0, j, examples, valid, FIRST)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ANYWHERE)
def _linear_lengths(
    a, delta, starts, vectors, square, inner, parts,
    examples, workers, groups, across, down, inputs, outputs, stride, w0, b0,
    BIAS: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr,
    J: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A program for J examples of a worker at a time, and a piece of ROWS x COLUMNS of its matrix."""
    worker, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    down_here, across_here = tl.program_id(1) // across, tl.program_id(1) % across
    begin = tl.load(starts + worker)
    if worker == workers:  # only launched to write the empty places
        for start in range(begin + group * 128, examples, groups * 128):
            empty = start + tl.arange(0, 128)
            tl.store(square + empty, tl.full((128,), 1.0, tl.float64), mask=empty < examples)
            tl.store(inner + empty, tl.zeros((128,), tl.float64), mask=empty < examples)
    else:
        stop = tl.load(starts + worker + 1)
        vector = vectors + worker.to(tl.int64) * stride
        o_begin = down_here * ROWS
        o_end = tl.minimum(o_begin + ROWS, outputs)
        o = o_begin + tl.arange(0, ROWS)[None, :]
        k = across_here * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        for start in range(begin + group * J, stop, groups * J):
            j = start + tl.arange(0, J)[:, None]
            valid = j < stop

            # y[j, k] = sum over o of delta[j, o] M[o, k], at most ROWS products in float32. No sum crosses threads:
            # a thread has its columns of M, for all J examples, and reads every delta.
            y = tl.zeros((J, COLUMNS), tl.float32)
            for row in range(o_begin, o_end, UNROLL):
                for step in tl.static_range(UNROLL):
                    here = row + step
                    m = tl.load(vector + w0 + here * inputs + k, mask=(k < inputs) & (here < o_end), other=0.0)
                    y += tl.load(delta + j * outputs + here, mask=valid & (here < o_end), other=0.0) * m
            x = tl.load(a + j * inputs + k, mask=valid & (k < inputs), other=0.0).to(tl.float64)
            product = tl.sum(y.to(tl.float64) * x, 1, keep_dims=True)
            of_a = tl.sum(x * x, 1, keep_dims=True)

            outer = tl.load(delta + j * outputs + o, mask=valid & (o < o_end), other=0.0).to(tl.float64)
            of_delta = tl.sum(outer * outer, 1, keep_dims=True)
            if BIAS:
                bias = tl.load(vector + b0 + o, mask=(o < o_end) & (across_here == 0), other=0.0).to(tl.float64)
                product += tl.sum(outer * bias, 1, keep_dims=True)

            if SPLIT:
                last = across + down + tl.program_id(1)
                tl.store(parts + across_here.to(tl.int64) * examples + j, of_a, mask=valid & (down_here == 0))
                column = (across + down_here).to(tl.int64) * examples
                tl.store(parts + column + j, of_delta, mask=valid & (across_here == 0))
                tl.store(parts + last.to(tl.int64) * examples + j, product, mask=valid)
            else:
                if BIAS:
                    of_a += 1.0
                # Every example here is valid or another program's: empty places are written above.
                if not FIRST:
                    product += tl.load(inner + j, mask=valid, other=0.0)
                    tl.store(square + j, tl.load(square + j, mask=valid, other=0.0) + of_a * of_delta, mask=valid)
                else:
                    tl.store(square + j, of_a * of_delta, mask=valid)
                tl.store(inner + j, product, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def _combine(
    parts, starts, square, inner, examples, workers, across, down,
    BIAS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pieces of a cut matrix, added up in order."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = j < tl.load(starts + workers)
    place = parts + j
    of_a = tl.zeros((BLOCK,), tl.float64)
    for _ in range(across):
        of_a += tl.load(place, mask=valid, other=0.0)
        place += examples
    if BIAS:
        of_a += 1.0
    of_delta = tl.zeros((BLOCK,), tl.float64)
    for _ in range(down):
        of_delta += tl.load(place, mask=valid, other=0.0)
        place += examples
    product = tl.zeros((BLOCK,), tl.float64)
    for _ in range(across * down):
        product += tl.load(place, mask=valid, other=0.0)
        place += examples
    put(square, of_a * of_delta, 1.0, j, examples, valid, FIRST)
    put(inner, product, 0.0, j, examples, valid, FIRST)


@triton.jit(do_not_specialize=COUNTS)
def _row_lengths(
    rows, owner, vectors, square, inner, examples, workers, size, stride, c0,
    INNER: tl.constexpr, FIRST: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for every J examples; all in float64, for reading takes longer than multiplying."""
    j = tl.program_id(0).to(tl.int64) * J + tl.arange(0, J)[:, None]
    worker = tl.load(owner + j, mask=j < examples, other=workers)
    valid = worker < workers
    squares = tl.zeros((J, BLOCK), tl.float64)
    products = tl.zeros((J, BLOCK), tl.float64)
    for begin in range(0, size, BLOCK):
        k = begin + tl.arange(0, BLOCK)[None, :]
        there = valid & (k < size)
        x = tl.load(rows + j * size + k, mask=there, other=0.0).to(tl.float64)
        squares += x * x
        if INNER:
            products += x * tl.load(vectors + worker * stride + c0 + k, mask=there, other=0.0).to(tl.float64)
    put(square, tl.sum(squares, 1, keep_dims=True), 1.0, j, examples, valid, FIRST)
    if INNER:
        put(inner, tl.sum(products, 1, keep_dims=True), 0.0, j, examples, valid, FIRST)
