"""The Kolmogorov-Smirnov (KS) test of an upload against the privacy noise, in the paper's first stage (Algorithm 2).

If noise of standard deviation s dominates an honest upload g of d coordinates, its coordinates are a sample of
N(0, s^2).

The test needs no sorting. Let p(v) be the normal mass below v, C(e) the number of coordinates below e, and t the
threshold. The statistic exceeds t exactly if, for some rank k,

    C(e) >= k  where e is the smallest float32 with k/d - p(e) <= t   (k of 1 .. d: too many coordinates too low), or
    C(e) <= k  where e is the smallest float32 with p(e) - k/d > t    (k of 0 .. d-1: too few).

These 2 d edges do not depend on the uploads. So the test counts coordinates between fixed edges and compares integers.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

from noisegate import kernels
from noisegate.aggregators.first_floats import Flags, Floats, Integers, first_floats

FINENESS = 8.0
"""A bin has up to 1 / (FINENESS sqrt(d)) of the noise's mass, the one in the middle twice as much. The threshold
shrinks like 1 / sqrt(d) too, so that this stays about an eleventh of it.

Finer bins take longer to compare, coarser ones leave more rows in doubt (now one in 25 of pure noise)."""

CHUNK = 2_400_000
"""Bytes of scratch for the counts in bins: what stays near a core. At d = 25,450 nine rows, whose bins fit int16."""


@functools.lru_cache(maxsize=64)
def ks_threshold(d: int, significance: float) -> float:
    """The Kolmogorov-Smirnov statistic of d samples whose p-value is `significance` (exact distribution)."""
    return float(stats.kstwo.isf(significance, d))


def room_for_signal(d: int, noise_std: float, largest: float, tilt: float = 0.1) -> float:
    """What a signal of at most this length can add to the KS statistic of noise.

    It moves the expected distribution of the coordinates by at most, in first order, the density times its mean
    coordinate, and in second order 0.121 l^2 / (s^2 d): half the largest slope of the density. The mean coordinate
    is at most l / sqrt(d), which only a signal of equal coordinates has: up to the share `tilt` of that is allowed for.
    """
    signal = largest / (noise_std * math.sqrt(d))
    return tilt * signal / math.sqrt(2 * math.pi) + 0.121 * signal**2


class Edges(NamedTuple):
    """Where to count, and which counts noise may have.

    at: (m,) float32, ascending.
    least, most: (m + 1,) int32. A row is rejected if for some j its count below at[j] is not in [least[j], most[j]].
        The last is [0, 0], for what `_any_outside` finds behind the last edge.
    start: (m + 1,) int32, what the counts of a row start from: nothing, and -d behind the last edge.
    one: () int32, the number 1.
    """

    at: Tensor
    least: Tensor
    most: Tensor
    start: Tensor
    one: Tensor


class Grid(NamedTuple):
    """The edges in bins of equal width. Bin 0 holds nothing: what lies below a bin is what lies up to the one before.

    scale, half: the bin of a value is half + 1 + its product with `scale`, brought to [-half, half] and cut towards
        zero. So the bin in the middle is twice as wide, which saves a pass over the uploads.
    first: (bins + 1,) edges first[b] .. first[b + 1] - 1 are those in bin b.
    least, most: (bins + 1,) the largest `least` and the smallest `most` of the edges in a bin; the last is of no bin.
    """

    scale: float
    half: int
    first: Integers
    least: Integers
    most: Integers

    @property
    def bins(self) -> int:
        return 2 * self.half + 2


def ks_rejects(
    uploads: Tensor, noise_std: float, significance: float, scratch: int = 2**28, room: float = 0.0
) -> Tensor:
    """(n,) whether each float32 row's KS statistic, in float64, exceeds the one with the p-value `significance`.

    room: by more than this.

    Exact, for finite values of any size and with any ties, and linear in n and d. `scratch` is the most bytes of
    scratch, or what one row takes if that is more: 34 d bytes on CUDA, 110 d on a CPU at the worst. The 2 d edges, 32 d
    bytes, are kept for the next call. Once they are there, the host never waits for a CUDA device: fit for a graph.
    """
    if uploads.dtype != torch.float32:
        raise TypeError(f"uploads are {uploads.dtype}; the edges of the KS test are exact for torch.float32 only")
    decide = count_every_value if uploads.is_cuda else count_where_in_doubt
    return decide(uploads.detach(), noise_std, significance, scratch, room)


def count_every_value(
    uploads: Tensor, noise_std: float, significance: float, scratch: int, room: float = 0.0
) -> Tensor:
    """What `ks_rejects` promises, by one pass over all edges. Nothing depends on values but values: fit for a graph."""
    d = uploads.shape[1]
    edges = _edges(d, noise_std, significance, uploads.device, room)
    if uploads.is_cuda and kernels.available():
        from noisegate.kernels import counting

        guess = counting.Guess(1 / noise_std, ks_threshold(d, significance) + room)
        blocks = uploads.contiguous().split(max(1, scratch // counting.scratch_bytes(d)))
        # Views, since a kernel of our own is not seen by who notes which tensors a graph reads; making a view is.
        at, least, most = (part.view(-1) for part in (edges.at, edges.least, edges.most))
        parts = [counting.any_outside(block, at, least, most, guess) for block in blocks]
    else:
        # int64 places; for each edge two int32 counts, one clamped, and a flag
        blocks = uploads.contiguous().split(max(1, scratch // (34 * d + 13)))
        parts = [_any_outside(block, edges) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _any_outside(values: Tensor, edges: Edges) -> Tensor:
    """(n,) whether any count of a row of the (n, d) values lies outside what the edges allow."""
    places = torch.bucketize(values, edges.at, right=True)
    counts = edges.start.repeat(len(values), 1).scatter_add_(1, places, edges.one.expand_as(places))
    # Every row adds up to nothing, so that one cumulative sum over all rows begins each at nothing. On CUDA that is
    # eight times faster than a sum per row.
    below = counts.view(-1).cumsum(0, dtype=torch.int32).view_as(counts)
    return (below.clamp(edges.least, edges.most) != below).any(1)


def count_where_in_doubt(
    uploads: Tensor, noise_std: float, significance: float, scratch: int, room: float = 0.0
) -> Tensor:
    """What `ks_rejects` promises, on a CPU: most rows are decided by their counts in bins of equal width.

    A count below an edge lies between the counts up to the left and up to the right end of the edge's bin. Where that
    leaves a doubt, the values in the bins in doubt are counted, edge by edge.
    """
    n, d = uploads.shape
    grid = _grid(d, noise_std, significance, room)
    edges = _edges(d, noise_std, significance, uploads.device, room)
    rows = max(1, min(n, min(CHUNK, scratch) // (8 * d + 18 * grid.bins)))
    buffers = _Buffers.of(rows, d, grid)
    rejected = np.zeros(n, dtype=bool)
    for start in range(0, n, rows):
        block = uploads[start : start + rows]
        below = _counts_up_to(block, grid, buffers)
        for row in _somewhere_outside(below, grid.least[1:], grid.most[:-1]).nonzero()[0].tolist():
            certain = _somewhere_outside(below[row], grid.least[:-1], grid.most[1:])
            bins = buffers.places[row].numpy() - row * grid.bins
            rejected[start + row] = certain or _refined(block[row].numpy(), bins, below[row], grid, edges)
    return torch.from_numpy(rejected)


class _Buffers(NamedTuple):
    """Memory to use again for every block of rows, since fresh memory is slow, and where each row's bins begin."""

    products: Tensor
    places: Tensor
    begins: Tensor

    @classmethod
    def of(cls, rows: int, d: int, grid: Grid) -> "_Buffers":
        narrow = torch.int16 if rows * grid.bins < 2**15 else torch.int32
        begins = torch.arange(0, rows * grid.bins, grid.bins, dtype=narrow)[:, None]
        return cls(torch.empty(rows, d), torch.empty(rows, d, dtype=narrow), begins + (grid.half + 1))


def _counts_up_to(uploads: Tensor, grid: Grid, scratch: _Buffers) -> Integers:
    """(n, bins) how many values of each row are in a bin or those before it."""
    n = len(uploads)
    places = _write_bins(uploads, grid, *(part[:n] for part in scratch))
    counts = torch.bincount(places.view(-1), minlength=n * grid.bins).view(n, -1)
    below: Integers = counts.cumsum(1, dtype=torch.int32).numpy()
    return below


def _write_bins(values: Tensor, grid: Grid, products: Tensor, places: Tensor, begins: Tensor) -> Tensor:
    """The bin of every value, in `places`. Rounding is monotone: bins never change the order of two values."""
    torch.mul(values, grid.scale, out=products).clamp_(-grid.half, grid.half)
    return places.copy_(products).add_(begins)


def _somewhere_outside(below: Integers, least: Integers, most: Integers) -> Flags:
    """Whether a row has an entry outside [least, most]. numpy compares and reduces faster than torch on a CPU."""
    return np.asarray(((below < least) | (below > most)).any(-1))


def _refined(row: Floats, places: Integers, below: Integers, grid: Grid, edges: Edges) -> bool:
    """Whether one row is rejected, from the values and the edges in those of its bins that leave a doubt.

    places: (d,) the bin of each of its values. below: (bins,) how many are in this bin and those before.
    """
    left = np.concatenate([[0], below[:-1]])
    doubt = (left < grid.least[:-1]) | (below > grid.most[:-1])
    bins = doubt.nonzero()[0]
    sizes = grid.first[bins + 1] - grid.first[bins]
    chosen = np.repeat(grid.first[bins] - _sum_before(sizes), sizes) + np.arange(sizes.sum())
    at, least, most = (part.numpy()[chosen] for part in (edges.at, edges.least, edges.most))
    near = ((places >= bins[0]) & (places <= bins[-1])).nonzero()[0]  # to compare is fast, to look up is slow
    values = row[near[doubt.take(places[near])]]
    found = np.bincount(at.searchsorted(values, "right"), minlength=len(at) + 1)[:-1].cumsum()
    elsewhere = left[bins] - _sum_before(below[bins] - left[bins])
    return bool(_somewhere_outside(found + np.repeat(elsewhere, sizes), least, most))


def _sum_before(values: Integers) -> Integers:
    return values.cumsum() - values


@functools.lru_cache(maxsize=2)
def _grid(d: int, noise_std: float, significance: float, room: float = 0.0) -> Grid:
    """The grid of `_edges`. Any scale serves that float32 can hold; this one spares most rows a closer look.

    Bins of equal width end where the tail has as much of the noise as a bin in the middle: the last takes the rest.
    """
    edges = _edges(d, noise_std, significance, torch.device("cpu"), room)
    share = 1 / (FINENESS * math.sqrt(d))
    half = math.ceil(-special.ndtri(share) / (share * math.sqrt(2 * math.pi)))
    scale = min(max(1 / (share * math.sqrt(2 * math.pi) * noise_std), 1e-30), 1e30)
    nothing = np.zeros(0, np.int64)
    grid = Grid(scale, half, nothing, nothing, nothing)
    of_edge = _write_bins(edges.at[None], grid, *_Buffers.of(1, 2 * d, grid))[0].numpy()
    first = of_edge.searchsorted(np.arange(grid.bins + 1))
    least, most = np.zeros(grid.bins + 1, np.int32), np.full(grid.bins + 1, d, np.int32)
    full, at = np.diff(first).nonzero()[0], edges.at.numpy()
    # No value lies below the smallest float or beyond the largest, so edges there reject nothing.
    least[full] = np.maximum.reduceat(np.where(at < np.inf, edges.least[:-1].numpy(), 0), first[full])
    most[full] = np.minimum.reduceat(np.where(at > np.finfo(np.float32).min, edges.most[:-1].numpy(), d), first[full])
    return grid._replace(first=first, least=least, most=most)


@functools.lru_cache(maxsize=2)
def _edges(d: int, noise_std: float, significance: float, device: torch.device, room: float = 0.0) -> Edges:
    """The 2 d edges of the test. They take 5 ms for 25,450 coordinates and 4 s for ten million."""
    ranks, threshold = np.arange(d + 1) / d, ks_threshold(d, significance) + room

    def low_no_more(values: Floats, i: Integers) -> Flags:
        return np.less_equal(ranks[i + 1] - _mass_below(values, noise_std), threshold)

    def too_high(values: Floats, i: Integers) -> Flags:
        return np.greater(_mass_below(values, noise_std) - ranks[i], threshold)

    ends = first_floats(low_no_more, noise_std * special.ndtri(np.maximum(ranks[1:] - threshold, 0)))
    starts = first_floats(too_high, noise_std * special.ndtri(np.minimum(ranks[:-1] + threshold, 1)))
    at = np.concatenate([ends, starts])
    order = at.argsort(kind="stable")  # two ascending runs, which this merges in linear time
    counts = np.arange(d, dtype=np.int32)
    most = np.concatenate([counts, np.full_like(counts, d)])[order]  # C >= k rejects, k of 1 .. d
    least = np.concatenate([np.zeros_like(counts), counts + 1])[order]  # C <= k rejects, k of 0 .. d - 1
    start = np.append(np.zeros_like(most), np.int32(-d))
    parts = (at[order], np.append(least, np.int32(0)), np.append(most, np.int32(0)), start, np.array(1, np.int32))
    return Edges(*(torch.from_numpy(part).to(device) for part in parts))


def _mass_below(values: Floats, noise_std: float) -> NDArray[np.float64]:
    """The mass of N(0, noise_std^2) below each value.

    scipy's function is within 1e-15 of the true one. Should it ever fall between neighbours, by its last digit, then
    the edges define the decision.
    """
    with np.errstate(over="ignore"):  # what a small noise takes to infinity has all the mass below it, or none
        mass: NDArray[np.float64] = special.ndtr(values.astype(np.float64) / noise_std)
    return mass
