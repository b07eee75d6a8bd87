"""What the rule `fortified` makes of a round, in a dozen launches instead of some 250 (twin: `aggregators.fortified`).

Everything but matrix products is here. Two kinds of kernels:

* over d: one reads the server's examples and the common directions, one everything there is of a worker (its upload,
  the last one, its past) along with the directions, one the pasts again. Each program sums what it reads, and writes
  the sum. Who needs the total adds these up, in a fixed order: there are some hundreds at most.
* over workers: a program judges one worker, or all of them where they have to be compared.

Nothing is added atomically, so a rerun gives the same bytes. Nothing waits for the device and no shape depends on a
value: fit for a CUDA graph. All tensors are contiguous, float32 unless stated, and on one device. Rows come in the
order in which they are named; bool tensors are read and written as bytes.
"""

from __future__ import annotations

import math
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
MOST_COMPARED = 128  # workers whose products with one another one program holds
MANY = 1024  # workers that are read at once where one program reads all


# --- over d --------------------------------------------------------------------------------------------------------


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
    """Numbers that what is read is measured by; see `fortified.Probed` and what makes it."""

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


# --- over workers --------------------------------------------------------------------------------------------------


def alone(norms: Tensor, present: Tensor, rejected: Tensor | None, low: float, high: float) -> tuple[Tensor, ...]:
    """(n,) bool each: whether the length is in [low, high], the distribution is not rejected, and all of it counts."""
    n, block = len(norms), 256
    fits, like, counts = (torch.empty_like(present) for _ in range(3))
    _alone[(triton.cdiv(n, block),)](
        norms,
        present.view(torch.uint8),
        (present if rejected is None else rejected).view(torch.uint8),
        fits.view(torch.uint8),
        like.view(torch.uint8),
        counts.view(torch.uint8),
        n,
        low,
        high,
        TESTED=rejected is not None,
        BLOCK=block,
        num_warps=4,
    )
    return fits, like, counts


@triton.jit(do_not_specialize=["n"])
def _alone(norms, present, rejected, fits, like, counts, n, low, high, TESTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = row < n
    norm = tl.load(norms + row, mask=known, other=0.0)
    here = tl.load(present + row, mask=known, other=0) != 0
    right = (norm >= low) & (norm <= high)
    noise = here
    if TESTED:
        noise = tl.load(rejected + row, mask=known, other=1) == 0
    tl.store(fits + row, right.to(tl.uint8), mask=known)
    tl.store(like + row, noise.to(tl.uint8), mask=known)
    tl.store(counts + row, (here & right & noise).to(tl.uint8), mask=known)


class Limits(NamedTuple):
    """Constants of `probes`, `evidence`, `doubts` and `fortified`; speeds and sizes: (ways,) and (sizes,) on the
    device."""

    speeds: Tensor
    sizes: Tensor
    own_speed: float
    certainty: float
    skew: float
    harmless: float
    least_length: float
    tiny: float
    farthest: float
    plenty: float
    caution: float
    lucky: float
    most_trust: float
    off_speed: float


class Seen(NamedTuple):
    """What of `Found` is judged by."""

    found: Tensor
    mean: Tensor
    spread: Tensor
    variance: Tensor
    lengths: Tensor
    past_lengths: Tensor
    echo: Tensor
    hoped: Tensor


class Before(NamedTuple):
    """What was known: evidence, trust and off as in `Judged`. heaviest: (2,)."""

    evidence: Tensor
    trust: Tensor
    off: Tensor
    heaviest: Tensor


class Judged(NamedTuple):
    """evidence: (n, 2 (C + 1), sizes). clear, among: (n,) bool. trust, score: (n,). off: (n, C - 1)."""

    evidence: Tensor
    clear: Tensor
    among: Tensor
    trust: Tensor
    score: Tensor
    off: Tensor


def judged(
    seen: Seen, before: Before, counts: Tensor, noise_std: float, count: int, most: float, limits: Limits
) -> Judged:
    """What is known after a round, one worker to a program.

    counts: (n,) bool, whose upload says anything. count: A, examples of the server. most: evidence that is allowed.
    """
    n, bounds, sizes = before.evidence.shape
    new = Judged(
        evidence=torch.empty_like(before.evidence),
        clear=torch.empty_like(counts),
        among=torch.empty_like(counts),
        trust=torch.empty_like(before.trust),
        score=torch.empty_like(before.trust),
        off=torch.empty_like(before.off),
    )
    _judge[(n,)](
        *seen,
        before.heaviest,
        counts.view(torch.uint8),
        before.evidence,
        before.trust,
        before.off,
        limits.speeds.view(-1),  # a kernel of our own is not seen by who notes what a graph reads; making a view is
        limits.sizes.view(-1),
        new.evidence,
        new.clear.view(torch.uint8),
        new.among.view(torch.uint8),
        new.trust,
        new.score,
        new.off,
        float(noise_std * limits.harmless),
        limits.certainty / math.sqrt(count),
        most,
        limits.caution,
        OWN_SPEED=limits.own_speed,
        SKEW=limits.skew,
        LEAST_LENGTH=limits.least_length,
        TINY=limits.tiny,
        FARTHEST=limits.farthest,
        PLENTY=limits.plenty,
        LUCKY=limits.lucky,
        MOST_TRUST=limits.most_trust,
        OFF_SPEED=limits.off_speed,
        PROBES=bounds // 2,
        SIZES=sizes,
        BOUNDS=triton.next_power_of_2(bounds),
        COLUMNS=triton.next_power_of_2(sizes),
        num_warps=1,
    )
    return new


@triton.jit
def _judge(
    found,
    mean,
    spread,
    variance,
    lengths,
    past_lengths,
    echo,
    hoped,
    heaviest,
    counts,
    evidence,
    trust,
    off,
    speeds,
    sizes,
    new_evidence,
    new_clear,
    new_among,
    new_trust,
    new_score,
    new_off,
    harmless,
    errors,  # standard errors, over the root of A
    most,
    caution,
    OWN_SPEED: tl.constexpr,
    SKEW: tl.constexpr,
    LEAST_LENGTH: tl.constexpr,
    TINY: tl.constexpr,
    FARTHEST: tl.constexpr,
    PLENTY: tl.constexpr,
    LUCKY: tl.constexpr,
    MOST_TRUST: tl.constexpr,
    OFF_SPEED: tl.constexpr,
    PROBES: tl.constexpr,
    SIZES: tl.constexpr,
    BOUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    COMMON: tl.constexpr = PROBES - 1
    row = tl.program_id(0)
    says = tl.load(counts + row) != 0

    # Where it is expected along every probe: first all upper bounds, then all lower ones.
    bound = tl.arange(0, BOUNDS)
    real = bound < 2 * PROBES
    k = bound % PROBES
    is_past = k == COMMON
    probe = tl.where(is_past, COMMON + row, k)
    lies = tl.load(found + row * PROBES + k)
    middle = tl.load(mean + probe)
    width = tl.load(spread + probe)
    squared = tl.load(variance + probe)
    leaned = tl.load(echo)
    heavy = tl.maximum(tl.load(heaviest), tl.load(heaviest + 1))
    is_way = (k > 0) & (k < COMMON - 1)
    speed = tl.load(speeds + k - 1, mask=is_way, other=0.0)
    length = tl.maximum(tl.load(lengths + k, mask=is_way, other=1.0), TINY)
    of_past = OWN_SPEED * leaned / tl.load(past_lengths + row)
    lean = tl.where(is_way, tl.minimum(heavy * leaned * speed / length, 1.0), 0.0)
    lean = tl.where(is_past, tl.minimum(of_past, 1.0), lean)
    error = width * errors
    slack = width * SKEW + harmless
    is_gradient = k == 0
    high = middle + error + tl.where(is_gradient, slack, harmless + lean)
    low = tl.where(
        is_gradient, -(error * error / tl.maximum(middle, LEAST_LENGTH)) / 4 - slack, middle - error - harmless
    )
    outside = tl.where(bound < PROBES, lies - high, low - lies) / tl.sqrt(squared)
    outside = tl.where(outside != outside, FARTHEST, outside)
    outside = tl.minimum(tl.maximum(outside, -FARTHEST), FARTHEST)

    # The evidence.
    column = tl.arange(0, COLUMNS)
    here = real[:, None] & (column[None, :] < SIZES)
    place = row.to(tl.int64) * (2 * PROBES * SIZES) + bound[:, None] * SIZES + column[None, :]
    size = tl.load(sizes + column, mask=column < SIZES, other=0.0)[None, :]
    before = tl.load(evidence + place, mask=here, other=0.0)
    after = tl.where(says, tl.maximum(before + (outside[:, None] * size - size * size / 2), 0.0), before)
    tl.store(new_evidence + place, after, mask=here)
    is_clear = tl.max(tl.max(tl.where(here, after, 0.0), 1), 0) <= most
    ratios = tl.where(here, tl.exp(tl.minimum(after, PLENTY)), 0.0)
    against = tl.log(tl.sum(tl.sum(ratios, 1), 0) / (2 * PROBES * SIZES))
    tl.store(new_clear + row, is_clear.to(tl.uint8))
    tl.store(new_among + row, (is_clear & says).to(tl.uint8))

    # Trust.
    hope = tl.load(hoped)
    of_noise = tl.load(variance)
    looked_for = caution * hope
    agrees = tl.minimum(tl.load(found + row * PROBES), hope + LUCKY * tl.sqrt(of_noise))
    trusted = tl.load(trust + row)
    earned = trusted + looked_for / of_noise * (agrees - looked_for / 2)
    trusted = tl.where(says, tl.minimum(tl.maximum(earned, -MOST_TRUST), MOST_TRUST), trusted)
    tl.store(new_trust + row, trusted)
    tl.store(new_score + row, trusted - against)

    # How far off it lies, along all but the gradient and its own past.
    counted_off = (bound > 0) & (bound < COMMON)
    place = row * (COMMON - 1) + bound - 1
    was = tl.load(off + place, mask=counted_off, other=0.0)
    now = tl.where(says, was + OFF_SPEED * (lies - middle - was), was)
    tl.store(new_off + place, now, mask=counted_off)


class Sharing(NamedTuple):
    """Constants of `independence`."""

    alike: float
    step: float
    group: int
    most_workers: int
    turns: int


def shared(
    products: Tensor, among: Tensor, limit: Tensor, longest: float, trust: Tensor, ties: Tensor, limits: Sharing
) -> tuple[Tensor, Tensor]:
    """(n,) bool, (n,): what `independence.shared` finds of up to MOST_COMPARED workers, from their inner products.

    ties: (n,) int64, a random order.
    """
    block = max(16, triton.next_power_of_2(len(among)))
    copies, others = torch.empty_like(among), torch.empty_like(trust)
    _shared[(1,)](
        products.contiguous(),
        among.view(torch.uint8),
        limit,
        trust,
        ties,
        copies.view(torch.uint8),
        others,
        len(among),
        float(longest) ** 2,
        ALIKE=limits.alike,
        STEP=limits.step,
        GROUP=limits.group,
        MOST_WORKERS=limits.most_workers,
        TURNS=limits.turns,
        BLOCK=block,
        num_warps=max(4, block * block // 512),  # which leaves all of it in registers
    )
    return copies, others


@triton.jit
def _rounded(x):
    """The nearest whole number; the even one of two, as `torch.round` has it."""
    below = tl.floor(x)
    rest = x - below
    odd = below - 2 * tl.floor(below / 2) == 1
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)


@triton.jit(do_not_specialize=["n"])
def _shared(
    products,
    among,
    limit,
    trust,
    ties,
    copies,
    others,
    n,
    square,
    ALIKE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_WORKERS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    known = i < n
    counts = tl.load(among + i, mask=known, other=0) != 0
    both = counts[:, None] & counts[None, :] & (i[:, None] != i[None, :])
    product = tl.load(products + i[:, None] * n + i[None, :], mask=both, other=0.0)
    most = tl.load(limit)
    conflict = product > tl.maximum(most, ALIKE * square)

    tie = tl.load(ties + i, mask=known, other=-1).to(tl.int32)
    rank = tl.sum(tl.where(tie[None, :] == i[:, None], i[None, :], 0), 1)
    leaning = tl.sum(tl.where(conflict, product, 0.0), 1)
    heaviest = tl.max(leaning, 0)
    leaning = tl.where(heaviest > 0, _rounded(100 * leaning / tl.where(heaviest > 0, heaviest, 1.0)), 0.0)
    rivals = tl.sum(conflict.to(tl.int32), 1)
    steps = _rounded(tl.load(trust + i, mask=known, other=0.0) / STEP).to(tl.float64)
    order = steps * GROUP - rivals.to(tl.float64)
    order = (order * 128 + leaning.to(tl.float64)) * MOST_WORKERS - rank.to(tl.float64)

    # How many come before each: the same comparisons, with half the registers.
    order = tl.sum((order[None, :] > order[:, None]).to(tl.int32), 1)

    out = tl.zeros([BLOCK], tl.int32)
    for _ in tl.static_range(TURNS):
        best = tl.min(tl.where(conflict, order[None, :], BLOCK), 1)
        wins = (order < best).to(tl.int32)
        lost = tl.max(tl.where(conflict, wins[None, :], 0), 1)
        out = out | lost
        conflict = conflict & ((lost[:, None] | lost[None, :]) == 0)
    out = out | tl.max(conflict.to(tl.int32), 1)
    repeated = (product > most) & ((out[:, None] | out[None, :]) == 0)
    tl.store(copies + i, out.to(tl.uint8), mask=known)
    tl.store(others + i, tl.sum(tl.where(repeated, product, 0.0), 1) / square, mask=known)


def doubts(
    off: Tensor,
    error: Tensor,
    spread: Tensor,
    noise: Tensor,
    passed: Tensor,
    ties: Tensor,
    *,
    skew: float,
    width: float,
    far: float,
    most: float,
    neighbors: int,
) -> Tensor:
    """(n,) what `doubts.doubts` finds; the constants are those there."""
    n, K = off.shape
    found, beyond = off.new_empty(n), off.new_empty(n)
    near = min(n, neighbors)
    _doubt[(n,)](
        off,
        error,
        spread,
        noise,
        passed.view(torch.uint8),
        ties,
        found,
        near,
        DRAWN=n > neighbors,
        SKEW=skew,
        WIDTH=width,
        FAR=far,
        K=K,
        COLUMNS=triton.next_power_of_2(K),
        BLOCK=triton.next_power_of_2(near),
        num_warps=4,
    )
    block = min(MANY, triton.next_power_of_2(n))
    _beyond_least[(1,)](found, passed.view(torch.uint8), beyond, n, MOST=most, BLOCK=block, num_warps=4)
    return beyond


@triton.jit
def _bounded(x, FAR: tl.constexpr):
    return tl.minimum(tl.maximum(x, -FAR), FAR)


@triton.jit(do_not_specialize=["near"])
def _doubt(
    off,
    error,
    spread,
    noise,
    passed,
    ties,
    found,
    near,
    DRAWN: tl.constexpr,
    SKEW: tl.constexpr,
    WIDTH: tl.constexpr,
    FAR: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The doubt about one worker."""
    row = tl.program_id(0)
    k = tl.arange(0, COLUMNS)
    real = k < K
    of_noise = tl.load(noise + k, mask=real, other=1.0)
    skewed = SKEW * tl.load(spread + k, mask=real, other=0.0)
    alone = tl.sqrt(2 * (tl.load(error + k, mask=real, other=0.0) + skewed * skewed + of_noise))
    apart = WIDTH * tl.sqrt(2 * of_noise)
    lies = tl.load(off + row * K + k, mask=real, other=0.0)
    own = _bounded(lies / alone, FAR)
    place = _bounded(lies / apart, FAR)

    j = tl.arange(0, BLOCK)
    other = j.to(tl.int64)
    if DRAWN:
        other = tl.load(ties + j, mask=j < near, other=0)
    counts = tl.load(passed + other, mask=j < near, other=0) != 0
    here = counts[:, None] & real[None, :]
    theirs = tl.load(off + other[:, None] * K + k[None, :], mask=here, other=0.0)
    doubt = _bounded(theirs / alone[None, :], FAR)
    chance = place[None, :] - _bounded(theirs / apart[None, :], FAR)
    least = tl.min(tl.where(here, doubt * doubt + chance * chance, float("inf")), 0)
    tl.store(found + row, tl.max(tl.where(real, tl.minimum(own * own, least), 0.0), 0))


@triton.jit(do_not_specialize=["n"])
def _beyond_least(found, passed, beyond, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Less the smallest of those that passed; nothing where nobody did."""
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        counts = tl.load(passed + row, mask=row < n, other=0) != 0
        smallest = tl.minimum(smallest, tl.load(found + row, mask=counts, other=float("inf")))
    least = tl.min(smallest, 0)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        value = tl.load(found + row, mask=row < n, other=0.0) - least
        tl.store(beyond + row, tl.minimum(tl.maximum(value, 0.0), MOST), mask=row < n)


class Weighed(NamedTuple):
    """weights, score: (n,). kept: (n,) bool. reason: (n,) int64. heaviest: (2,)."""

    weights: Tensor
    kept: Tensor
    reason: Tensor
    score: Tensor
    heaviest: Tensor


def weighed(
    score: Tensor,
    doubt: Tensor,
    others: Tensor,
    passed: Tensor,
    stages: list[Tensor],
    heaviest: Tensor,
    reasons: Tensor,
    prior: float,
    least_weight: float,
    tiny: float,
) -> Weighed:
    """Everyone's weight, and why it has none.

    stages: (n,) bool each, all but the last that an upload has to get past; reasons: (stages + 2,) int64 on the device.
    prior: logarithm of the odds. heaviest: of the last two rounds.
    """
    n = len(score)
    new = Weighed(
        torch.empty_like(score),
        torch.empty_like(passed),
        torch.empty(n, dtype=torch.int64, device=score.device),
        torch.empty_like(score),
        torch.empty_like(heaviest),
    )
    present, fits, like, clear, copies = (stage.view(torch.uint8) for stage in stages)
    _weigh[(1,)](
        score,
        doubt,
        others,
        passed.view(torch.uint8),
        present,
        fits,
        like,
        clear,
        copies,
        heaviest,
        reasons.view(-1),
        new.weights,
        new.kept.view(torch.uint8),
        new.reason,
        new.score,
        new.heaviest,
        n,
        prior,
        LEAST_WEIGHT=least_weight,
        TINY=tiny,
        BLOCK=min(MANY, triton.next_power_of_2(n)),
        num_warps=4,
    )
    return new


@triton.jit
def _odds(row, score, doubt, others, passed, n, prior):
    """Of these workers; those that did not pass, or do not exist, have none."""
    counts = tl.load(passed + row, mask=row < n, other=0) != 0
    logit = tl.load(score + row, mask=counts, other=0.0) + prior
    against = tl.exp(-tl.load(doubt + row, mask=counts, other=0.0))
    small = tl.exp(-tl.abs(logit))  # never too large
    odds = tl.where(logit >= 0, 1.0, small) / (1.0 + small) * against
    odds = odds / (1.0 + tl.load(others + row, mask=counts, other=0.0))
    return counts, tl.where(counts, odds, 0.0)


@triton.jit(do_not_specialize=["n"])
def _weigh(
    score,
    doubt,
    others,
    passed,
    present,
    fits,
    like,
    clear,
    copies,
    heaviest,
    reasons,
    weights,
    kept,
    reason,
    new_score,
    new_heaviest,
    n,
    prior,
    LEAST_WEIGHT: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, others, passed, n, prior)
        largest = tl.maximum(largest, odds)
    most = tl.max(largest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, others, passed, n, prior)
        sums += tl.where(odds >= LEAST_WEIGHT * most, odds, 0.0)
    total = tl.maximum(tl.sum(sums, 0), TINY)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        known = row < n
        counts, odds = _odds(row, score, doubt, others, passed, n, prior)
        heavy = odds >= LEAST_WEIGHT * most
        tl.store(weights + row, tl.where(heavy, odds, 0.0) / total, mask=known)
        tl.store(kept + row, (counts & heavy).to(tl.uint8), mask=known)
        got = (tl.load(present + row, mask=known, other=0) != 0).to(tl.int32)
        stage = got
        got = got * (tl.load(fits + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(like + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(clear + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(copies + row, mask=known, other=1) == 0).to(tl.int32)
        stage += got
        stage += got * heavy.to(tl.int32)
        tl.store(reason + row, tl.load(reasons + stage, mask=known, other=0), mask=known)
        here = tl.load(score + row, mask=known, other=0.0) - tl.load(doubt + row, mask=known, other=0.0)
        tl.store(new_score + row, here, mask=known)
    before = tl.load(heaviest)
    tl.store(new_heaviest, most / total)
    tl.store(new_heaviest + 1, before)
