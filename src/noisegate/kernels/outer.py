"""Lengths and weighted sums of per-example gradients, in few launches (Triton, for one CUDA device).

E examples lie in a row, those of worker 0 first, then worker 1, and so on; the examples of worker i are
starts[i] .. starts[i+1] - 1. Places from starts[n] on are empty: whatever they hold, nothing here depends on it.

The gradient of example j at a Linear layer is the O x K matrix delta_j a_j'. It is never made:

    |delta_j a_j'|^2     = |a_j|^2 |delta_j|^2                                       (`linear_lengths`)
    <delta_j a_j', M_i>  = sum_k a_jk y_jk   with   y_jk = sum_o delta_jo M_i[o, k]
    sum_j w_j delta_j a_j'   tile by tile of the O x K matrix, example by example    (`linear_add`)

A bias is one more column of M_i, at which every a_j is 1. Gradients of other layers come as rows, made by others
(`row_lengths`, `row_add`). `mix` turns squares and inner products into lengths of g + r m; `totals` adds up weights.

Weights made from these lengths decide a privacy bound. So all products are those of float32 or better (no tf32, hence
no tl.dot), squares are float64 from the first product on, and where a length depends on them no more than 256 products
are added up one after the other in float32. All sums have a fixed order: the same input gives the same bits.

No function looks at a value on the host, and block sizes follow from shapes alone, so all can be captured in a CUDA
graph. One launch each; `linear_lengths` takes two for layers of more than 1,024 inputs or 256 outputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TOGETHER = 8
"""Examples of a worker that share one reading of its matrix. They cost a register each for every column of a thread,
and what is left over of 16 or 20 is computed in vain; other readings of the same matrix come from the L2 cache."""

FEW = 512
"""Below so many programs a GPU is not full, and half as many examples share a reading."""

COLUMNS, OUTPUTS = 1024, 256
"""Most columns and rows of a matrix that one program takes: larger ones are cut, for there is work enough for many."""

UNROLL = 8
"""Loads that wait for memory at once, where a loop would make them wait one after the other."""

COUNTS = ("examples", "workers", "groups")
"""Numbers that differ from call to call: a kernel compiled for one of them must serve for all."""

ANYWHERE = ("inputs", "outputs", "stride", "last_stride", "w0", "b0")
"""Numbers whose divisors Triton shall not use. A layer begins anywhere in a vector, so its matrix cannot be read four
numbers at a time; inputs that are would have to change places between threads to meet it."""


# --- lengths ---------------------------------------------------------------------------------------------------------


def linear_lengths(
    a: Tensor,
    delta: Tensor,
    starts: Tensor,
    vectors: Tensor | None,
    w0: int,
    b0: int | None,
    square: Tensor,
    inner: Tensor | None,
    first: bool,
    width: int,
) -> None:
    """square[j] += the squared length of example j's gradient, inner[j] += its inner product with its worker's vector.

    a: (E, K). delta: (E, O). starts: (n + 1,) int64. square, inner: (E,) float64.
    vectors: (n, d), with the layer's weight in columns w0 .. w0 + O K - 1 and its bias (if any) in b0 .. b0 + O - 1.
    inner: None if not wanted; then `vectors` is not looked at.
    first: write instead of adding; empty places then get 1 and 0. Otherwise they stay as they are.
    width: about as many examples as a worker has at most; a worker with more takes longer, that is all.
    """
    (examples, inputs), outputs, workers = a.shape, delta.shape[1], len(starts) - 1
    if not examples:
        return
    if inner is None:
        block = _power(inputs, outputs, most=COLUMNS)
        together = max(1, min(32, COLUMNS // block))
        _linear_squares[(triton.cdiv(examples, together),)](
            a, delta, starts, square, examples, workers, inputs, outputs,
            BIAS=b0 is not None, FIRST=first, J=together, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return
    if vectors is None:
        raise ValueError("an inner product needs the workers' vectors")
    columns, rows = _power(inputs, most=COLUMNS), _power(outputs, most=OUTPUTS)
    across, down = triton.cdiv(inputs, columns), triton.cdiv(outputs, rows)
    split = across * down > 1
    few = workers * triton.cdiv(width, TOGETHER) * across * down < FEW
    together = _power(width, least=1, most=TOGETHER // 2 if few else TOGETHER)
    groups = max(1, triton.cdiv(width, together))
    # Of a cut matrix: |a|^2 by columns, |delta|^2 by rows, inner products by both.
    parts = square.new_empty(across + down + across * down, examples) if split else square
    sets = workers if split or not first else workers + 1  # one more to write the empty places
    _linear_lengths[(sets * groups, across * down)](
        a, delta, starts, vectors, square, inner, parts,
        examples, workers, groups, across, down, inputs, outputs, vectors.stride(0), w0, b0 or 0,
        BIAS=b0 is not None, FIRST=first, SPLIT=split, J=together, COLUMNS=columns, ROWS=rows,
        UNROLL=min(UNROLL, rows), num_warps=max(1, columns // 256),
    )  # fmt: skip
    if split:
        _combine[(triton.cdiv(examples, 128),)](
            parts, starts, square, inner, examples, workers, across, down,
            BIAS=b0 is not None, FIRST=first, BLOCK=128, num_warps=4,
        )  # fmt: skip


def row_lengths(
    rows: Tensor,
    owner: Tensor,
    vectors: Tensor | None,
    c0: int,
    square: Tensor,
    inner: Tensor | None,
    first: bool,
    workers: int,
) -> None:
    """As `linear_lengths`, of gradients rows (E, k) whose place in the vectors is c0 .. c0 + k - 1.

    owner: (E,) int64, the worker of each example, or `workers` at an empty place.
    """
    examples, size = rows.shape
    if not examples:
        return
    if inner is not None and vectors is None:
        raise ValueError("an inner product needs the workers' vectors")
    block = _power(size, most=COLUMNS)
    together = max(1, min(32, COLUMNS // block))
    _row_lengths[(triton.cdiv(examples, together),)](
        rows, owner, rows if vectors is None else vectors, square, square if inner is None else inner,
        examples, workers, size, 0 if vectors is None else vectors.stride(0), c0,
        INNER=inner is not None, FIRST=first, J=together, BLOCK=block, num_warps=4,
    )  # fmt: skip


class Limits(NamedTuple):
    """Which lengths are trusted (`mix`)."""

    cancellation: float
    low: float
    high: float
    shortest: float


def mix(
    square: Tensor,
    inner: Tensor | None,
    last: Tensor | None,
    owner: Tensor,
    ratio: float,
    limits: Limits,
    workers: int,
) -> tuple[Tensor, Tensor]:
    """(length (E,) float64, trusted (E,) bool) of g + ratio m, from |g|^2, <g, m> and each worker's |m|^2 (n,) float64.

    Trusted is a length that neither cancellation nor the range of float32 can have spoiled: at least `cancellation`
    times the lengths of both terms laid end to end, at least `low`, and these below `high`. NaN is never trusted.
    Where g and ratio m laid end to end are shorter than `shortest`, the length is inf, so that its inverse is a weight
    of zero, and is trusted.
    Empty places get a length of 1, and are trusted. inner, last: None if there is no m.
    """
    length = torch.empty_like(square)
    trusted = torch.empty(square.shape, dtype=torch.bool, device=square.device)
    if len(square):
        if (inner is None) != (last is None):
            raise ValueError("inner products and squared lengths of the vectors come together")
        # Numbers are constants of the kernel, since Triton hands over other floats as float32.
        _mix[(triton.cdiv(len(square), 128),)](
            square, square if inner is None else inner, square if last is None else last, owner,
            length, trusted.view(torch.uint8), len(square), workers,
            RATIO=float(ratio), CANCELLATION=float(limits.cancellation), LOW=float(limits.low),
            HIGH=float(limits.high), SHORTEST=float(limits.shortest), INNER=inner is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return length, trusted


# --- sums ------------------------------------------------------------------------------------------------------------


def linear_add(
    a: Tensor,
    delta: Tensor,
    weights: Tensor,
    starts: Tensor,
    into: Tensor,
    w0: int,
    b0: int | None,
    last: Tensor | None = None,
    totals: Tensor | None = None,
) -> None:
    """into (n, d) += each worker's weighted sum of gradients, and totals[i] times its row of `last`, in one pass.

    weights: (E,) float32. An example of weight 0 adds nothing, even if it holds NaN; so does `last` times a total of 0.
    last, totals: (n, d) and (n,) float32, or None. Only this layer's columns are looked at and written.
    """
    inputs, outputs, workers = a.shape[1], delta.shape[1], len(into)
    columns, rows = _power(inputs, most=128), _power(outputs, least=1, most=8)
    across, down = triton.cdiv(inputs, columns), triton.cdiv(outputs, rows)
    if not workers:
        return
    _linear_add[(workers * down * across,)](
        a, delta, weights, starts, into, into if last is None else last, weights if totals is None else totals,
        across, down, inputs, outputs, into.stride(0), _stride(last, totals), w0, b0 or 0,
        BIAS=b0 is not None, LAST=last is not None, COLUMNS=columns, ROWS=rows, UNROLL=UNROLL // 2, num_warps=1,
    )  # fmt: skip


def row_add(
    rows: Tensor,
    weights: Tensor,
    starts: Tensor,
    into: Tensor,
    c0: int,
    last: Tensor | None = None,
    totals: Tensor | None = None,
) -> None:
    """As `linear_add`, of gradients rows (E, k) whose place is c0 .. c0 + k - 1."""
    size, workers = rows.shape[1], len(into)
    block = _power(size, most=512)
    across = triton.cdiv(size, block)
    if not workers:
        return
    _row_add[(workers * across,)](
        rows, weights, starts, into, into if last is None else last, weights if totals is None else totals,
        across, size, into.stride(0), _stride(last, totals), c0,
        LAST=last is not None, BLOCK=block, UNROLL=UNROLL, num_warps=max(1, block // 128),
    )  # fmt: skip


def totals(weights: Tensor, starts: Tensor, factor: float) -> Tensor:
    """(n,) float32: factor times the sum of each worker's weights (E,) float32 or float64, added up in float64."""
    found = torch.empty(len(starts) - 1, dtype=torch.float32, device=weights.device)
    if len(found):
        _totals[(len(found),)](weights, starts, found, FACTOR=float(factor), BLOCK=32, num_warps=1)
    return found


def _power(*sizes: int, least: int = 16, most: int) -> int:
    """The power of two that covers the largest of these sizes, within bounds."""
    return max(least, min(most, int(triton.next_power_of_2(max(1, *sizes)))))


def _stride(last: Tensor | None, factors: Tensor | None) -> int:
    if (last is None) != (factors is None):
        raise ValueError("last vectors and their totals come together")
    return 0 if last is None else last.stride(0)


# --- kernels: lengths ------------------------------------------------------------------------------------------------


@triton.jit
def _squares_of(rows, j, valid, size, J: tl.constexpr, BLOCK: tl.constexpr):
    """(J, 1) float64: squared lengths of rows j (J, 1) int64 of a contiguous (E, size) matrix."""
    found = tl.zeros((J, BLOCK), tl.float64)
    for begin in range(0, size, BLOCK):
        k = begin + tl.arange(0, BLOCK)[None, :]
        x = tl.load(rows + j * size + k, mask=valid & (k < size), other=0.0).to(tl.float64)
        found += x * x
    return tl.sum(found, 1, keep_dims=True)


@triton.jit
def _put(place, value, empty, j, examples, valid, FIRST: tl.constexpr):
    """place[j] = value, or what an empty place gets; or place[j] += value, and empty places stay as they are."""
    if FIRST:
        tl.store(place + j, tl.where(valid, value, empty), mask=j < examples)
    else:
        tl.store(place + j, tl.load(place + j, mask=valid, other=0.0) + value, mask=valid)


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
    _put(square, of_a * _squares_of(delta, j, valid, outputs, J, BLOCK), 1.0, j, examples, valid, FIRST)


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
    _put(square, of_a * of_delta, 1.0, j, examples, valid, FIRST)
    _put(inner, product, 0.0, j, examples, valid, FIRST)


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
    _put(square, tl.sum(squares, 1, keep_dims=True), 1.0, j, examples, valid, FIRST)
    if INNER:
        _put(inner, tl.sum(products, 1, keep_dims=True), 0.0, j, examples, valid, FIRST)


@triton.jit(do_not_specialize=COUNTS)
def _mix(
    square, inner, last, owner, length, trusted, examples, workers,
    RATIO: tl.constexpr, CANCELLATION: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    SHORTEST: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    worker = tl.load(owner + j, mask=j < examples, other=workers)
    valid = worker < workers
    found = tl.load(square + j, mask=valid, other=1.0)
    reach = tl.sqrt(found)
    if INNER:
        of_last = tl.load(last + worker, mask=valid, other=0.0)
        found += 2 * RATIO * tl.load(inner + j, mask=valid, other=0.0) + RATIO * RATIO * of_last
        reach += RATIO * tl.sqrt(of_last)
    found = tl.sqrt(found)  # NaN where rounding made the square negative
    # Two comparisons and no maximum, which would have to say what it does with NaN. Against tensors, since Triton cuts
    # a number that something is compared with to float32.
    low, high = tl.full((BLOCK,), LOW, tl.float64), tl.full((BLOCK,), HIGH, tl.float64)
    sound = (found >= CANCELLATION * reach) & (found >= low) & (reach < high)
    silent = reach < tl.full((BLOCK,), SHORTEST, tl.float64)
    tl.store(length + j, tl.where(valid, tl.where(silent, float("inf"), found), 1.0), mask=j < examples)
    tl.store(trusted + j, (sound | silent | (worker >= workers)).to(tl.uint8), mask=j < examples)


# --- kernels: sums ---------------------------------------------------------------------------------------------------


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
