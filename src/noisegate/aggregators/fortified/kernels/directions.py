"""Where uploads and examples lie along the directions, in five launches (twin: `Projections.of`).

One kernel reads the server's examples and the common directions, one all that belongs to a worker (its upload, the last
one, its own average) along with the directions, one the own averages again. Each program sums what it reads, and writes
the sum. Who needs the total adds these up, in a fixed order: there are some hundreds at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import state as plain
from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.kernels.main_difference import next_difference
from noisegate.aggregators.fortified.kernels.moments import PartialSums, moments
from noisegate.views import ServerView

COMMON = tl.constexpr(plain.COMMON)
UPDATES = tl.constexpr(len(plain.UPDATE_SPEEDS))
OWN_SPEED = tl.constexpr(plain.OWN_SPEED)

PROGRAMS = 512  # at most, that share out the columns; as many sums are added up at the end
PIECES = 64  # at most, of a worker's row
COLUMNS = 32  # that a program reads of many rows at once: one cache line of each
BLOCK = 512  # columns that a program reads of one worker at once
ACROSS = 16  # classes, and examples of a class, at most, that are read at once
MOST_EXAMPLES = 2048  # of the server, with which those of one direction still are one tile
WIDE = triton.next_power_of_2(plain.COMMON + 2)  # sums that belong together: of each direction, and two more


def takes(contributions: Tensor, strata: int) -> bool:
    """Whether the kernels can read so many examples."""
    examples, each = len(contributions), len(contributions) // strata
    return triton.next_power_of_2(strata) * triton.next_power_of_2(each) <= MOST_EXAMPLES and examples <= MOST_EXAMPLES


def project(view: ServerView, contributions: Tensor, state: plain.FortifiedState, unit: float) -> Projections:
    """As `Projections.of`. Scratch is that of the view, or what one row takes if that is more."""
    contributions = contributions.contiguous()
    n, d = view.uploads.shape
    rows = min(n, max(1, view.scratch // (16 * d)))
    probes = contributions.new_empty(plain.COMMON + rows, d)
    squares = _common_directions(contributions, view.strata, state, probes)
    products, sums, own_averages = _rows_of_workers(view, contributions, state, probes, unit)
    found, loads = moments(view, contributions, state, PartialSums(products, squares, sums), unit)
    difference = next_difference(state, loads)
    return found._replace(own_averages=own_averages, main_difference=difference)


def _common_directions(contributions: Tensor, strata: int, state: plain.FortifiedState, probes: Tensor) -> Tensor:
    """(programs, WIDE) sums of squares; the common directions are written to the first rows of `probes`."""
    d, each = contributions.shape[1], len(contributions) // strata
    blocks = triton.cdiv(d, COLUMNS)
    squares = contributions.new_empty(min(PROGRAMS, blocks), WIDE)
    _directions[(len(squares),)](
        contributions,
        state.update_averages,
        state.main_difference,
        probes,
        squares,
        d,
        strata,
        each,
        blocks,
        WIDE=WIDE,
        S=min(ACROSS, triton.next_power_of_2(strata)),
        E=min(ACROSS, triton.next_power_of_2(each)),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return squares


def _rows_of_workers(
    view: ServerView, contributions: Tensor, state: plain.FortifiedState, probes: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(products of all directions with all examples, sums of products of each piece of a row, the new own averages).

    probes: (COMMON + rows, d) the common directions, and space for as many own averages as are worked on at once.
    """
    uploads, common, rows = view.uploads.contiguous(), plain.COMMON, len(probes) - plain.COMMON
    last = uploads if view.last is None else view.last.contiguous()
    missing = state.counted if view.missing is None else view.missing
    n, d = uploads.shape
    span = triton.cdiv(triton.cdiv(d, BLOCK), PIECES) * BLOCK
    pieces = triton.cdiv(d, span)
    products = contributions.new_empty(common + n, len(contributions))
    sums, averages = contributions.new_empty(n, pieces, 2 * WIDE + 2), torch.empty_like(state.own_averages)
    for first in range(0, n, rows):
        here, begin = slice(first, first + rows), 0 if first == 0 else common
        size = min(rows, n - first)
        _rows[(size * pieces,)](
            uploads[here],
            last[here],
            state.own_averages[here],
            state.counted[here].view(torch.uint8),
            missing[here].view(torch.uint8),
            probes,
            averages[here],
            sums[here],
            d,
            size,
            span,
            pieces,
            unit,
            HAS_LAST=view.last is not None,
            HAS_MISSING=view.missing is not None,
            WIDE=WIDE,
            BLOCK=BLOCK,
            num_warps=4,
        )
        to = slice(begin + first, common + first + size)
        torch.mm(probes[begin : common + size], contributions.T, out=products[to])
    return products, sums, averages


@triton.jit(do_not_specialize=["strata", "each", "blocks"])
def _directions(
    contributions,
    update_averages,
    main_difference,
    probes,
    squares,
    d,
    strata,
    each,
    blocks,
    WIDE: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The common directions in the first rows of `probes`, and sums of squares of one program's columns.

    In this order: of each direction, of the examples, and of the sums over each class.
    """
    program = tl.program_id(0)
    update = tl.arange(0, WIDE)
    of_mean = tl.zeros([COLUMNS], tl.float32)
    of_updates = tl.zeros([WIDE, COLUMNS], tl.float32)
    of_difference = tl.zeros([COLUMNS], tl.float32)
    of_examples = tl.zeros([COLUMNS], tl.float32)
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
                where = contributions + row[:, :, None] * d + column[None, None, :]
                x = tl.load(where, mask=live[:, :, None] & inside[None, None, :], other=0.0)
                of_examples += tl.sum(tl.sum(x * x, 1), 0)
                classes += tl.sum(x, 1)
            of_classes += tl.sum(classes * classes, 0)
            total += tl.sum(classes, 0)
        mean = total / (strata * each)
        tl.store(probes + column, mean, mask=inside)
        of_mean += mean * mean
        here = (update[:, None] < UPDATES) & inside[None, :]
        offset = update[:, None].to(tl.int64) * d + column[None, :]
        x = tl.load(update_averages + offset, mask=here, other=0.0)
        tl.store(probes + d + offset, x, mask=here)
        of_updates += x * x
        x = tl.load(main_difference + column, mask=inside, other=0.0)
        tl.store(probes + d * (UPDATES + 1) + column, x, mask=inside)
        of_difference += x * x
    here = squares + program * WIDE
    tl.store(here, tl.sum(of_mean, 0))
    tl.store(here + 1 + update, tl.sum(of_updates, 1), mask=update < UPDATES)
    tl.store(here + UPDATES + 1, tl.sum(of_difference, 0))
    tl.store(here + UPDATES + 2, tl.sum(of_examples, 0))
    tl.store(here + UPDATES + 3, tl.sum(of_classes, 0))


@triton.jit(do_not_specialize=["n", "pieces"])
def _rows(
    uploads,
    last,
    own_averages,
    counted,
    missing,
    probes,
    new_own_averages,
    sums,
    d,
    n,
    span,
    pieces,
    unit,
    HAS_LAST: tl.constexpr,
    HAS_MISSING: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One worker's own average after the round, that before it in `probes`, and products over a piece of its columns.

    In this order: of the upload with each direction, of the own average with each, of both, of the latter with itself.
    """
    # Programs of one piece follow each other, so that the directions come from the cache.
    piece = tl.program_id(0) // n
    row = tl.program_id(0) % n
    begins = row.to(tl.int64) * d
    direction = tl.arange(0, WIDE)
    joins = tl.load(counted + row) != 0
    if HAS_MISSING:
        joins = joins & (tl.load(missing + row) == 0)
    of_upload = tl.zeros([WIDE, BLOCK], tl.float32)
    of_average = tl.zeros([WIDE, BLOCK], tl.float32)
    of_both = tl.zeros([BLOCK], tl.float32)
    of_self = tl.zeros([BLOCK], tl.float32)
    for start in range(piece * span, tl.minimum(piece * span + span, d), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < d
        upload = tl.load(uploads + begins + column, mask=inside, other=0.0)
        average = tl.load(own_averages + begins + column, mask=inside, other=0.0).to(tl.float32)
        here = (direction[:, None] < COMMON) & inside[None, :]
        directions = tl.load(probes + direction[:, None].to(tl.int64) * d + column[None, :], mask=here, other=0.0)
        of_upload += directions * upload[None, :]
        of_average += directions * average[None, :]
        of_both += upload * average
        of_self += average * average
        tl.store(probes + (row + COMMON).to(tl.int64) * d + column, average, mask=inside)
        if HAS_LAST:
            sent = tl.load(last + begins + column, mask=inside, other=0.0) / unit
            average = tl.where(joins, average + (sent - average) * OWN_SPEED, average)
        tl.store(new_own_averages + begins + column, average.to(tl.float16), mask=inside)
    here = sums + (row * pieces + piece).to(tl.int64) * (2 * WIDE + 2)
    tl.store(here + direction, tl.sum(of_upload, 1))
    tl.store(here + WIDE + direction, tl.sum(of_average, 1))
    tl.store(here + 2 * WIDE, tl.sum(of_both, 0))
    tl.store(here + 2 * WIDE + 1, tl.sum(of_self, 0))
