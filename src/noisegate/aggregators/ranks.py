"""Order statistics of every coordinate, some coordinates at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from noisegate.aggregators.sorting_network import MOST_ROWS, mean_by_network
from noisegate.vectors import counting

NEAR = 2**19
"""Bytes of columns that are worked on at a time on a CPU: what stays in a core's cache."""

COPIES = 12
"""How often columns are copied while they are sorted and chosen from, at the worst: a CUDA sort numbers them too."""


def columns_at_once(uploads: Tensor, copies: int, scratch: int) -> int:
    """How many columns to take at a time if each is copied so often: at least one."""
    room = scratch // copies if uploads.is_cuda else min(scratch // copies, NEAR)
    return max(1, room // (len(uploads) * uploads.element_size()))


def mean_of_ranks(uploads: Tensor, rows: Tensor, low: int | Tensor, high: int | Tensor, scratch: int) -> Tensor:
    """(d,) per coordinate, the mean of the marked rows' values of ranks low <= r < high, where 0 is the lowest.

    Zero if there are none. rows: (n,) bool.
    """
    if isinstance(low, int) and isinstance(high, int) and not rows.is_cuda and int(rows.sum()) <= MOST_ROWS:
        return _joined(mean_by_network(uploads, rows, low, high, scratch), uploads)
    rank = counting(len(rows), rows.device)
    inside = (rank >= low) & (rank < high) & (rank < rows.sum())
    weights = inside.to(uploads.dtype) / inside.sum().clamp(min=1)
    blocks = ascending_columns(uploads, rows, scratch)
    return _joined((columns @ weights[: columns.shape[1]] for columns in blocks), uploads)


def mean_near_median(uploads: Tensor, rows: Tensor, keep: int | Tensor, scratch: int) -> Tensor:
    """(d,) per coordinate, the mean of the `keep` of the marked rows' values that are closest to their median.

    Zero if no row is marked; no more than there are may be kept. Of two values that are equally close the lower is
    preferred. The median of an even number of values is the mean of the middle two.
    """
    count = rows.sum()
    blocks = ascending_columns(uploads, rows, scratch)
    if isinstance(keep, int):
        return _joined((nearest_by_number(columns, keep) for columns in blocks), uploads)
    return _joined((nearest_by_mask(columns, count, keep) for columns in blocks), uploads)


def _joined(parts: Iterable[Tensor], uploads: Tensor) -> Tensor:
    """(d,) the means of some columns after the other, each of which is made when there is a place for it.

    Values were divided before they were added up: only rounding can take a mean beyond the largest number.
    """
    update, start = torch.empty_like(uploads[0]), 0
    for part in parts:
        update[start : start + len(part)] = part
        start += len(part)
    return update.nan_to_num_()


def ascending_columns(uploads: Tensor, rows: Tensor, scratch: int) -> Iterator[Tensor]:
    """(some columns, values), until there are no more columns: the marked rows' values, each column in ascending order.

    There may be places behind the marked rows' ones: see `everyone_ascending`.
    """
    size = columns_at_once(uploads, COPIES, scratch)
    return everyone_ascending(uploads, rows, size) if uploads.is_cuda else marked_ascending(uploads, rows, size)


def marked_ascending(uploads: Tensor, rows: Tensor, size: int) -> Iterator[Tensor]:
    """`size` columns at a time; what one step gives is overwritten by the next."""
    values, marked = uploads.numpy(), rows.nonzero().flatten()
    scratch = torch.empty(size, len(marked), dtype=uploads.dtype)
    for start in range(0, uploads.shape[1], size):
        some = values[:, start : start + size]
        columns = scratch[: some.shape[1]]
        columns.numpy()[:] = (some if len(marked) == len(rows) else some[marked.numpy()]).T
        columns.numpy().sort(axis=1)  # ten times as fast as torch
        yield columns


def everyone_ascending(uploads: Tensor, rows: Tensor, size: int) -> Iterator[Tensor]:
    """For a CUDA device, which is not asked how many are marked: the others come behind them, as the largest number.

    A marked row may hold that number too, but then it does not matter which of them stands first.
    """
    for block in uploads.split(size, dim=1):
        yield torch.where(rows, block.T, torch.finfo(block.dtype).max).sort(dim=1).values


def nearest_by_number(columns: Tensor, keep: int) -> Tensor:
    """The mean of the `keep` closest to the median, of ascending columns.

    They have consecutive ranks. Begin with the lowest, and move on while the value behind the last is closer to the
    median than the first is: once it is not, it never will be. With a <= b in the middle, x <= a is further away than
    y >= b if a - x > y - b. In float64, where no difference overflows.
    """
    count = columns.shape[1]
    if not count:
        return columns.sum(1)
    below, above = (columns[:, i, None].double() for i in ((count - 1) // 2, count // 2))
    moves = below - columns[:, : count - keep] > columns[:, keep:] - above
    chosen = columns.gather(1, moves.sum(1, keepdim=True) + counting(keep, columns.device))
    return chosen.div_(keep).sum(1)


def nearest_by_mask(columns: Tensor, count: Tensor, keep: Tensor) -> Tensor:
    """`nearest_by_number` of the first `count` places, for a device that is not asked for the two numbers."""
    rank = counting(columns.shape[1], columns.device)
    first, last = columns.double(), len(rank) - 1
    behind = first.index_select(1, (rank + keep).clamp(max=last))
    below, above = (first.index_select(1, i.clamp(0, last).view(1)) for i in ((count - 1) // 2, count // 2))
    moves = (below - first > behind - above) & (rank + keep < count)
    begin = moves.sum(1, keepdim=True)
    inside = (rank >= begin) & (rank < begin + keep)
    return torch.where(inside, columns / keep.clamp(min=1), 0.0).sum(1)
