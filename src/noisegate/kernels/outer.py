"""Lengths and weighted sums of per-example gradients, in few launches (Triton, for one CUDA device).

E examples lie in a row, those of worker 0 first, then worker 1, and so on; the examples of worker i are
starts[i] .. starts[i+1] - 1. Places from starts[n] on are empty: whatever they hold, no result depends on it.

The gradient of example j at a Linear layer is the O x K matrix delta_j a_j'. It is never made:

    |delta_j a_j'|^2     = |a_j|^2 |delta_j|^2                                       (`lengths.linear_lengths`)
    <delta_j a_j', M_i>  = sum_k a_jk y_jk   with   y_jk = sum_o delta_jo M_i[o, k]
    sum_j w_j delta_j a_j'   tile by tile of the O x K matrix, example by example    (`sums.linear_add`)

A bias is one more column of M_i, at which every a_j is 1. Gradients of other layers are made elsewhere and come as
rows (`lengths.row_lengths`, `sums.row_add`). `mixing.mix` turns squares and inner products into lengths of g + r m.

Weights made from these lengths decide a privacy bound. So all products are those of float32 or better (no tf32, hence
no tl.dot), squares are float64 from the first product on, and where a length depends on them no more than 256 products
are added up one after the other in float32. All sums have a fixed order: the same input gives the same bits.

No function reads a value on the host, and block sizes follow from shapes alone, so all can be captured in a CUDA
graph. Each function is one launch, but `linear_lengths` takes two for layers of more than 1,024 inputs or 256 outputs.
This file holds what `lengths`, `mixing` and `sums` share.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

UNROLL = 8
"""Loads that wait for memory at the same time. In a loop they would wait one after the other."""

COUNTS = ("examples", "workers", "groups")
"""Arguments that differ from call to call. A kernel compiled for one value must serve for all."""

ANYWHERE = ("inputs", "outputs", "stride", "last_stride", "w0", "b0")
"""Arguments whose divisors Triton must not use. A layer begins anywhere in a vector, so its matrix cannot be read four
numbers at a time, and inputs that are read so would have to move between threads to meet it."""


class ByWorker(NamedTuple):
    """Which of E examples belongs to which of n workers.

    owner: (E,) int64 ascending, n at an empty place.
    starts: (n + 1,) int64, where each worker's examples begin; the last is where the empty places begin.
    width: about the most examples of a worker. A worker with more takes longer, with the same result.
    """

    owner: Tensor
    starts: Tensor
    width: int

    @property
    def workers(self) -> int:
        return len(self.starts) - 1


class LayerPlace(NamedTuple):
    """The columns of a vector where a layer's weight and its bias, if it has one, begin."""

    weight: int
    bias: int | None


def power_of_two(*sizes: int, least: int = 16, most: int) -> int:
    """The power of two that covers the largest of these sizes, within bounds."""
    return max(least, min(most, int(triton.next_power_of_2(max(1, *sizes)))))


@triton.jit
def put(place, value, empty, j, examples, valid, FIRST: tl.constexpr):
    """place[j] = value, or what an empty place gets; or place[j] += value, and empty places stay as they are."""
    if FIRST:
        tl.store(place + j, tl.where(valid, value, empty), mask=j < examples)
    else:
        tl.store(place + j, tl.load(place + j, mask=valid, other=0.0) + value, mask=valid)
