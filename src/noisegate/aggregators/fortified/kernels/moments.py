"""The moments of the server's examples along each direction, and what else follows (twin: `Projections.of`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import directions, state
from noisegate.aggregators.fortified import moments as plain
from noisegate.views import ServerView

COMMON = tl.constexpr(state.COMMON)
TINY = tl.constexpr(state.TINY)
RESTART_SHARE = tl.constexpr(directions.RESTART_SHARE)
LEAST_LENGTH = tl.constexpr(plain.LEAST_LENGTH)
LEAST_VARIANCE = tl.constexpr(plain.LEAST_LENGTH**2)


class PartialSums(NamedTuple):
    """What the kernels that read the uploads leave.

    products: (COMMON + n, A) of every direction with every example. squares: (programs, WIDE) and sums:
    (n, pieces, 2 WIDE + 2), as `_directions` and `_rows` have them.
    """

    products: Tensor
    squares: Tensor
    sums: Tensor


def moments(
    view: ServerView, contributions: Tensor, known: state.FortifiedState, read: PartialSums, unit: float
) -> tuple[directions.Projections, Tensor]:
    """The projections without the new own averages and main difference, and (n,) the loads of `next_difference`."""
    examples, strata = len(contributions), view.strata
    n, pieces, _ = read.sums.shape
    programs, wide = read.squares.shape
    new, each = contributions.new_empty, examples // strata
    numbers, of_uploads, loads, scalars = new(5, state.COMMON + n), new(n, state.PROBES), new(n), new(4)
    of_error = (1, examples) if each < 2 else (strata, each)
    _moments[(state.COMMON + n,)](
        *read,
        known.counted.view(torch.uint8),
        known.unrefuted.view(torch.uint8),
        numbers,
        of_uploads,
        loads,
        scalars,
        n,
        examples,
        *of_error,
        programs,
        pieces,
        float(view.batch),
        float(view.largest) ** 2,
        float(view.noise_std**2),
        *directions.MomentumTerm.scales(view),
        unit,
        (1 - 1 / strata) / max(1, examples * (examples - each)),
        1 / strata / max(1, examples * (each - 1)),
        WIDE=wide,
        PROGRAMS=triton.next_power_of_2(programs),
        PIECES=triton.next_power_of_2(pieces),
        S=triton.next_power_of_2(of_error[0]),
        E=triton.next_power_of_2(of_error[1]),
        num_warps=4,
    )
    mean, spread, variance, error, lengths = numbers.unbind()
    echo, noise, signal, agreement = scalars.unbind()
    found = directions.Projections(
        of_uploads=of_uploads,
        moments=plain.ExampleMoments(mean, spread, variance),
        mean_variance=error[: state.COMMON],
        lengths=lengths[: state.COMMON],
        own_lengths=lengths[state.COMMON :],
        agreement=agreement,
        momentum=directions.MomentumTerm(echo, noise, signal),
        own_averages=known.own_averages,
        main_difference=known.main_difference,
    )
    return found, loads


@triton.jit
def _entry(vector, which, place: tl.constexpr):
    """One entry of a vector whose places are `which`."""
    return tl.sum(tl.where(which == place, vector, 0.0), 0)


@triton.jit(do_not_specialize=["n", "count", "strata", "each", "programs", "pieces"])
def _moments(
    products,
    squares,
    sums,
    counted,
    unrefuted,
    numbers,
    of_uploads,
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
    echo_factor,
    divisor,  # of the momentum term, for its part of the variance
    unit,
    between,  # weights of the pairs of examples
    within,
    WIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """One direction: a common one, or a worker's own average, which comes with all that belongs to that worker."""
    probe = tl.program_id(0)
    row = probe - COMMON
    is_own = probe >= COMMON
    direction = tl.arange(0, WIDE)
    program = tl.arange(0, PROGRAMS)
    here = (program[:, None] < programs) & (direction[None, :] < COMMON + 2)
    totals = tl.sum(tl.load(squares + program[:, None] * WIDE + direction[None, :], mask=here, other=0.0), 0)
    lengths = tl.maximum(tl.sqrt(totals), TINY)
    gradient = _entry(lengths, direction, 0)

    # The worker. What there is none of is zero.
    piece = tl.arange(0, PIECES)
    some = piece < tl.where(is_own, pieces, 0)
    begin = sums + (row * pieces + piece).to(tl.int64) * (2 * WIDE + 2)
    tile, here = begin[:, None] + direction[None, :], some[:, None] & (direction[None, :] < COMMON)
    of_upload = tl.sum(tl.load(tile, mask=here, other=0.0), 0)
    of_average = tl.sum(tl.load(tile + WIDE, mask=here, other=0.0), 0)
    of_both = tl.sum(tl.load(begin + 2 * WIDE, mask=some, other=0.0), 0)
    own_length = tl.maximum(tl.sqrt(tl.sum(tl.load(begin + 2 * WIDE + 1, mask=some, other=0.0), 0)), TINY)
    along = tl.where(direction < COMMON, of_upload / lengths, of_both / own_length)
    tl.store(of_uploads + row * (COMMON + 1) + direction, along, mask=direction < tl.where(is_own, COMMON + 1, 0))
    load = _entry(of_average, direction, COMMON - 1) + _entry(of_average, direction, 0) * RESTART_SHARE / gradient
    suspected = (tl.load(counted + row, mask=is_own, other=0) == 0) | (
        tl.load(unrefuted + row, mask=is_own, other=0) == 0
    )
    tl.store(loads + row, tl.where(suspected, 0.0, load), mask=is_own)

    # The server's examples along the probe.
    length = tl.where(is_own, own_length, tl.sum(tl.where(direction == probe, lengths, 0.0), 0))
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

    signal = _entry(totals, direction, COMMON) / count
    momentum = tl.maximum(largest_square - signal, 0.0)
    noise = momentum / divisor + noise_variance
    squares_of_batch = variance * (1.0 - 1.0 / count) + mean * mean
    probes = n + COMMON
    tl.store(numbers + probe, mean)
    tl.store(numbers + probes + probe, spread)
    tl.store(numbers + 2 * probes + probe, tl.maximum(squares_of_batch / batch + noise, LEAST_VARIANCE))
    tl.store(numbers + 3 * probes + probe, error)
    raw = tl.sum(tl.where(direction == probe, tl.sqrt(totals), 0.0), 0)
    tl.store(numbers + 4 * probes + probe, tl.where(is_own, own_length * unit, raw))

    # What belongs to no worker, by the first program: it is the one along the server's gradient.
    all_pairs = count * raw * (count * raw)
    same_class = _entry(totals, direction, COMMON + 1)
    pairs = (all_pairs - same_class) * between + (same_class - _entry(totals, direction, COMMON)) * within
    agreement = pairs / tl.maximum(raw, LEAST_LENGTH)
    first = probe == 0
    tl.store(scalars, momentum * echo_factor, mask=first)
    tl.store(scalars + 1, noise, mask=first)
    tl.store(scalars + 2, signal, mask=first)
    error_of_one = spread / tl.sqrt(count.to(tl.float32))
    tl.store(scalars + 3, tl.where(agreement > error_of_one, agreement, 0.0), mask=first)
