"""Where uploads lie along the probes of the rule `fortified`, in five launches (twin: `aggregators.probed`).

One kernel reads the server's examples and the common directions, one everything there is of a worker (its upload, the
last one, its past) along with the directions, one the pasts again. Each program sums what it reads, and writes the sum.
Who needs the total adds these up, in a fixed order: there are some hundreds at most.

Nothing is added atomically, so a rerun gives the same bytes. Nothing waits for the device and no shape depends on a
value: fit for a CUDA graph. All tensors are contiguous, float32 unless stated, and on one device. Rows come in the
order in which they are named; bool tensors are read and written as bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # at most, that share out the columns; as many sums are added up at the end
PIECES = 64  # at most, of a worker's row
COLUMNS = 32  # that a program reads of many rows at once: one cache line of each
BLOCK = 512  # columns that a program reads of one worker at once
ACROSS = 16  # classes, and examples of a class, at most, that are read at once
MOST_EXAMPLES = 2048  # of the server, with which those of one direction still are one tile
MANY = 1024  # workers that are read at once where one program reads all


class Round(NamedTuple):
    """What the kernels over d read: n workers, A examples of the server's, C common directions, d coordinates.

    uploads, last: (n, d). own: (A, d). ways: (C - 2, d). rift: (1, d). past: (n, d) half. counted, clear: (n,) bool.
    The common directions are the mean of `own`, the ways and the rift.
    """

    uploads: Tensor
    last: Tensor | None
    own: Tensor
    ways: Tensor
    rift: Tensor
    past: Tensor
    counted: Tensor
    clear: Tensor


class Scales(NamedTuple):
    """Numbers that what is read is measured by; see `probed.Probed` and what makes it."""

    strata: int
    batch: int
    largest: float
    noise_variance: float
    echo: float  # per lean
    spread: float  # that the variance of a lean is divided by
    unit: float
    speed: float
    restart: float
    tiny: float
    least_length: float
    least_variance: float


class Found(NamedTuple):
    """found: (n, C + 1). mean, spread, variance: (C + n,), of the common directions and each past. error, lengths:
    (C,). past_lengths: (n,). echo, noise, signals, hoped: (). past: (n, d) half. rift: (1, d)."""

    found: Tensor
    mean: Tensor
    spread: Tensor
    variance: Tensor
    error: Tensor
    lengths: Tensor
    past_lengths: Tensor
    echo: Tensor
    noise: Tensor
    signals: Tensor
    hoped: Tensor
    past: Tensor
    rift: Tensor


def takes(own: Tensor, strata: int) -> bool:
    """Whether `probed` can read so many examples."""
    each = len(own) // strata
    return triton.next_power_of_2(strata) * triton.next_power_of_2(each) <= MOST_EXAMPLES and len(own) <= MOST_EXAMPLES


def probed(given: Round, scales: Scales, memory: int) -> Found:
    """What uploads and examples show along the directions, and the pasts and the rift that follow.

    memory: most bytes of scratch, or what one row takes if that is more.
    """
    uploads, own = given.uploads.contiguous(), given.own.contiguous()
    last = uploads if given.last is None else given.last.contiguous()
    (n, d), count, common = uploads.shape, len(own), len(given.ways) + 2
    new, strata, each = own.new_empty, scales.strata, count // scales.strata
    wide = triton.next_power_of_2(common + 2)
    rows = min(n, max(1, memory // (16 * d)))
    probes, products = new(common + rows, d), new(common + n, count)

    blocks = triton.cdiv(d, COLUMNS)
    squares = new(min(PROGRAMS, blocks), wide)
    _directions[(len(squares),)](
        own,
        given.ways,
        given.rift,
        probes,
        squares,
        d,
        strata,
        each,
        blocks,
        WAYS=common - 2,
        WIDE=wide,
        S=min(ACROSS, triton.next_power_of_2(strata)),
        E=min(ACROSS, triton.next_power_of_2(each)),
        COLUMNS=COLUMNS,
        num_warps=4,
    )

    span = triton.cdiv(triton.cdiv(d, BLOCK), PIECES) * BLOCK
    pieces = triton.cdiv(d, span)
    sums, past = new(n, pieces, 2 * wide + 2), torch.empty_like(given.past)
    for first in range(0, n, rows):
        here, begin = slice(first, first + rows), 0 if first == 0 else common
        size = min(rows, n - first)
        _rows[(size * pieces,)](
            uploads[here],
            last[here],
            given.past[here],
            given.counted[here].view(torch.uint8),
            probes,
            past[here],
            sums[here],
            d,
            size,
            span,
            pieces,
            scales.unit,
            scales.speed,
            HAS_LAST=given.last is not None,
            COMMON=common,
            WIDE=wide,
            BLOCK=BLOCK,
            num_warps=4,
        )
        to = slice(begin + first, common + first + size)
        torch.mm(probes[begin : common + size], own.T, out=products[to])

    numbers, found, loads, scalars = new(5, common + n), new(n, common + 1), new(n), new(4)
    of_error = (1, count) if each < 2 else (strata, each)
    _seen[(common + n,)](
        products,
        squares,
        sums,
        given.counted.view(torch.uint8),
        given.clear.view(torch.uint8),
        numbers,
        found,
        loads,
        scalars,
        n,
        count,
        *of_error,
        len(squares),
        pieces,
        float(scales.batch),
        float(scales.largest) ** 2,
        float(scales.noise_variance),
        scales.echo,
        scales.spread,
        scales.unit,
        (1 - 1 / strata) / max(1, count * (count - each)),
        1 / strata / max(1, count * (each - 1)),
        RESTART=scales.restart,
        TINY=scales.tiny,
        LEAST_LENGTH=scales.least_length,
        LEAST_VARIANCE=scales.least_variance,
        COMMON=common,
        WIDE=wide,
        PROGRAMS=triton.next_power_of_2(len(squares)),
        PIECES=triton.next_power_of_2(pieces),
        S=triton.next_power_of_2(of_error[0]),
        E=triton.next_power_of_2(of_error[1]),
        num_warps=4,
    )
    rift = _next_rift(given, loads, scales.tiny)
    mean, spread, variance, error, lengths = numbers.unbind()
    echo, noise, signals, hoped = scalars.unbind()
    return Found(
        found=found,
        mean=mean,
        spread=spread,
        variance=variance,
        error=error[:common],
        lengths=lengths[:common],
        past_lengths=lengths[common:],
        echo=echo,
        noise=noise,
        signals=signals,
        hoped=hoped,
        past=past,
        rift=rift,
    )


def _next_rift(given: Round, loads: Tensor, tiny: float) -> Tensor:
    """(1, d) the sum of the pasts times (load less the mean load), of those that count, as a unit vector."""
    n, d = given.past.shape
    blocks = triton.cdiv(d, COLUMNS)
    rift, squares = torch.empty_like(given.rift), loads.new_empty(min(PROGRAMS, blocks))
    _rift[(len(squares),)](
        given.past,
        loads,
        given.counted.view(torch.uint8),
        given.clear.view(torch.uint8),
        rift,
        squares,
        n,
        d,
        blocks,
        ROWS=64,
        COLUMNS=COLUMNS,
        MANY=min(MANY, triton.next_power_of_2(n)),
        num_warps=4,
    )
    many = triton.next_power_of_2(len(squares))
    _unit[(triton.cdiv(d, MANY),)](rift, squares, len(squares), d, TINY=tiny, PROGRAMS=many, BLOCK=MANY, num_warps=4)
    return rift


@triton.jit(do_not_specialize=["strata", "each", "blocks"])
def _directions(
    own,
    ways,
    rift,
    probes,
    squares,
    d,
    strata,
    each,
    blocks,
    WAYS: tl.constexpr,
    WIDE: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The common directions in the first rows of `probes`, and sums of squares of one program's columns.

    In this order: of each direction, of the examples, and of the sums over each class.
    """
    program = tl.program_id(0)
    way = tl.arange(0, WIDE)
    of_mean = tl.zeros([COLUMNS], tl.float32)
    of_ways = tl.zeros([WIDE, COLUMNS], tl.float32)
    of_rift = tl.zeros([COLUMNS], tl.float32)
    of_own = tl.zeros([COLUMNS], tl.float32)
    of_classes = tl.zeros([COLUMNS], tl.float32)
    for block in range(program, blocks, tl.num_programs(0)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < d
        total = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, strata, S):
            stratum = first + tl.arange(0, S)
            classes = tl.zeros([S, COLUMNS], tl.float32)
            for begin in range(0, each, E):
                example = begin + tl.arange(0, E)
                row = (stratum[:, None] * each + example[None, :]).to(tl.int64)
                live = (stratum[:, None] < strata) & (example[None, :] < each)
                where = own + row[:, :, None] * d + column[None, None, :]
                x = tl.load(where, mask=live[:, :, None] & inside[None, None, :], other=0.0)
                of_own += tl.sum(tl.sum(x * x, 1), 0)
                classes += tl.sum(x, 1)
            of_classes += tl.sum(classes * classes, 0)
            total += tl.sum(classes, 0)
        mean = total / (strata * each)
        tl.store(probes + column, mean, mask=inside)
        of_mean += mean * mean
        here = (way[:, None] < WAYS) & inside[None, :]
        offset = way[:, None].to(tl.int64) * d + column[None, :]
        x = tl.load(ways + offset, mask=here, other=0.0)
        tl.store(probes + d + offset, x, mask=here)
        of_ways += x * x
        x = tl.load(rift + column, mask=inside, other=0.0)
        tl.store(probes + d * (WAYS + 1) + column, x, mask=inside)
        of_rift += x * x
    here = squares + program * WIDE
    tl.store(here, tl.sum(of_mean, 0))
    tl.store(here + 1 + way, tl.sum(of_ways, 1), mask=way < WAYS)
    tl.store(here + WAYS + 1, tl.sum(of_rift, 0))
    tl.store(here + WAYS + 2, tl.sum(of_own, 0))
    tl.store(here + WAYS + 3, tl.sum(of_classes, 0))


@triton.jit(do_not_specialize=["n", "pieces"])
def _rows(
    uploads,
    last,
    past,
    counted,
    probes,
    new_past,
    sums,
    d,
    n,
    span,
    pieces,
    unit,
    speed,
    HAS_LAST: tl.constexpr,
    COMMON: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One worker's past with its last upload, the past before in `probes`, and products over a piece of its columns.

    In this order: of the upload with each direction, of the past with each, of both, of the past with itself.
    """
    # Programs of one piece follow each other, so that the directions come from the cache.
    piece = tl.program_id(0) // n
    row = tl.program_id(0) % n
    begins = row.to(tl.int64) * d
    way = tl.arange(0, WIDE)
    moves = tl.load(counted + row) != 0
    of_upload = tl.zeros([WIDE, BLOCK], tl.float32)
    of_past = tl.zeros([WIDE, BLOCK], tl.float32)
    of_both = tl.zeros([BLOCK], tl.float32)
    of_self = tl.zeros([BLOCK], tl.float32)
    for start in range(piece * span, tl.minimum(piece * span + span, d), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < d
        upload = tl.load(uploads + begins + column, mask=inside, other=0.0)
        average = tl.load(past + begins + column, mask=inside, other=0.0).to(tl.float32)
        here = (way[:, None] < COMMON) & inside[None, :]
        directions = tl.load(probes + way[:, None].to(tl.int64) * d + column[None, :], mask=here, other=0.0)
        of_upload += directions * upload[None, :]
        of_past += directions * average[None, :]
        of_both += upload * average
        of_self += average * average
        tl.store(probes + (COMMON + row).to(tl.int64) * d + column, average, mask=inside)
        if HAS_LAST:
            sent = tl.load(last + begins + column, mask=inside, other=0.0) / unit
            average = tl.where(moves, average + speed * (sent - average), average)
        tl.store(new_past + begins + column, average.to(tl.float16), mask=inside)
    here = sums + (row * pieces + piece).to(tl.int64) * (2 * WIDE + 2)
    tl.store(here + way, tl.sum(of_upload, 1))
    tl.store(here + WIDE + way, tl.sum(of_past, 1))
    tl.store(here + 2 * WIDE, tl.sum(of_both, 0))
    tl.store(here + 2 * WIDE + 1, tl.sum(of_self, 0))


@triton.jit
def _entry(vector, which, place: tl.constexpr):
    """One entry of a vector whose places are `which`."""
    return tl.sum(tl.where(which == place, vector, 0.0), 0)


@triton.jit(do_not_specialize=["n", "count", "strata", "each", "programs", "pieces"])
def _seen(
    products,
    squares,
    sums,
    counted,
    clear,
    numbers,
    found,
    loads,
    scalars,
    n,
    count,
    strata,  # of the standard error
    each,
    programs,  # that the squares are of
    pieces,
    batch,
    largest_square,
    noise_variance,
    echo,
    spread_by,
    unit,
    between,  # weights of the pairs of examples
    within,
    RESTART: tl.constexpr,
    TINY: tl.constexpr,
    LEAST_LENGTH: tl.constexpr,
    LEAST_VARIANCE: tl.constexpr,
    COMMON: tl.constexpr,
    WIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """One probe: a common direction, or a worker's past, which comes with what there is of that worker."""
    probe = tl.program_id(0)
    row = probe - COMMON
    is_past = probe >= COMMON
    way = tl.arange(0, WIDE)
    program = tl.arange(0, PROGRAMS)
    here = (program[:, None] < programs) & (way[None, :] < COMMON + 2)
    totals = tl.sum(tl.load(squares + program[:, None] * WIDE + way[None, :], mask=here, other=0.0), 0)
    lengths = tl.maximum(tl.sqrt(totals), TINY)
    gradient = _entry(lengths, way, 0)

    # The worker. What there is none of is zero.
    piece = tl.arange(0, PIECES)
    some = piece < tl.where(is_past, pieces, 0)
    begin = sums + (row * pieces + piece).to(tl.int64) * (2 * WIDE + 2)
    tile, here = begin[:, None] + way[None, :], some[:, None] & (way[None, :] < COMMON)
    of_upload = tl.sum(tl.load(tile, mask=here, other=0.0), 0)
    of_past = tl.sum(tl.load(tile + WIDE, mask=here, other=0.0), 0)
    of_both = tl.sum(tl.load(begin + 2 * WIDE, mask=some, other=0.0), 0)
    past_length = tl.maximum(tl.sqrt(tl.sum(tl.load(begin + 2 * WIDE + 1, mask=some, other=0.0), 0)), TINY)
    along = tl.where(way < COMMON, of_upload / lengths, of_both / past_length)
    tl.store(found + row * (COMMON + 1) + way, along, mask=way < tl.where(is_past, COMMON + 1, 0))
    load = _entry(of_past, way, COMMON - 1) + RESTART * _entry(of_past, way, 0) / gradient
    suspected = (tl.load(counted + row, mask=is_past, other=0) == 0) | (
        tl.load(clear + row, mask=is_past, other=0) == 0
    )
    tl.store(loads + row, tl.where(suspected, 0.0, load), mask=is_past)

    # The server's examples along the probe.
    length = tl.where(is_past, past_length, tl.sum(tl.where(way == probe, lengths, 0.0), 0))
    stratum = tl.arange(0, S)
    example = tl.arange(0, E)
    live = (stratum[:, None] < strata) & (example[None, :] < each)
    place = probe.to(tl.int64) * count + stratum[:, None] * each + example[None, :]
    x = tl.load(products + place, mask=live, other=0.0) / length
    mean = tl.sum(tl.sum(x, 1), 0) / count
    apart = tl.where(live, x - mean, 0.0)
    variance = tl.sum(tl.sum(apart * apart, 1), 0) / (count - 1)
    apart = tl.where(live, x - (tl.sum(x, 1) / each)[:, None], 0.0)
    error = tl.sum(tl.sum(apart * apart, 1), 0) / (each - 1) / (strata * count)
    spread = tl.sqrt(variance)

    signals = _entry(totals, way, COMMON) / count
    lean = tl.maximum(largest_square - signals, 0.0)
    noise = lean / spread_by + noise_variance
    squares_of_batch = variance * (1.0 - 1.0 / count) + mean * mean
    probes = COMMON + n
    tl.store(numbers + probe, mean)
    tl.store(numbers + probes + probe, spread)
    tl.store(numbers + 2 * probes + probe, tl.maximum(squares_of_batch / batch + noise, LEAST_VARIANCE))
    tl.store(numbers + 3 * probes + probe, error)
    raw = tl.sum(tl.where(way == probe, tl.sqrt(totals), 0.0), 0)
    tl.store(numbers + 4 * probes + probe, tl.where(is_past, past_length * unit, raw))

    # What the first program knows of all: it is the one along the server's gradient.
    all_pairs = count * raw * (count * raw)
    same_class = _entry(totals, way, COMMON + 1)
    pairs = (all_pairs - same_class) * between + (same_class - _entry(totals, way, COMMON)) * within
    agreement = pairs / tl.maximum(raw, LEAST_LENGTH)
    first = probe == 0
    tl.store(scalars, lean * echo, mask=first)
    tl.store(scalars + 1, noise, mask=first)
    tl.store(scalars + 2, signals, mask=first)
    error_of_one = spread / tl.sqrt(count.to(tl.float32))
    tl.store(scalars + 3, tl.where(agreement > error_of_one, agreement, 0.0), mask=first)


@triton.jit(do_not_specialize=["n", "blocks"])
def _rift(
    past,
    loads,
    counted,
    clear,
    rift,
    squares,
    n,
    d,
    blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
):
    """The rift in one program's columns before it is a unit vector, and its sum of squares there."""
    middle = tl.zeros([MANY], tl.float32)
    many = tl.zeros([MANY], tl.float32)
    for first in range(0, n, MANY):
        row = first + tl.arange(0, MANY)
        known = row < n
        flag = (tl.load(counted + row, mask=known, other=0) != 0) & (tl.load(clear + row, mask=known, other=0) != 0)
        middle += tl.load(loads + row, mask=known, other=0.0)
        many += tl.where(flag, 1.0, 0.0)
    mean = tl.sum(middle, 0) / tl.maximum(tl.sum(many, 0), 1.0)
    square = tl.zeros([COLUMNS], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, n, ROWS):
            row = first + tl.arange(0, ROWS)
            known = row < n
            flag = (tl.load(counted + row, mask=known, other=0) != 0) & (tl.load(clear + row, mask=known, other=0) != 0)
            load = tl.where(flag, tl.load(loads + row, mask=known, other=0.0) - mean, 0.0)
            here = flag[:, None] & (column[None, :] < d)
            x = tl.load(past + row[:, None].to(tl.int64) * d + column[None, :], mask=here, other=0.0)
            total += tl.sum(load[:, None] * x.to(tl.float32), 0)
        tl.store(rift + column, total, mask=column < d)
        square += total * total
    tl.store(squares + tl.program_id(0), tl.sum(square, 0))


@triton.jit(do_not_specialize=["programs"])
def _unit(rift, squares, programs, d, TINY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Divide by the length."""
    program = tl.arange(0, PROGRAMS)
    length = tl.sqrt(tl.sum(tl.load(squares + program, mask=program < programs, other=0.0), 0))
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rift + column, mask=column < d, other=0.0)
    tl.store(rift + column, value / tl.maximum(length, TINY), mask=column < d)
