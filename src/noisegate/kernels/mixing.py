"""Lengths of per-example gradients with momentum, and which of them can be trusted (see `outer`)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.kernels.outer import COUNTS, ByWorker


class TrustLimits(NamedTuple):
    """Which lengths are trusted (`mix`).

    cancellation: least share of the lengths of both terms, laid end to end, that a trusted length has.
    low, high: the least length, and the bound of the lengths laid end to end.
    shortest: the bound of lengths laid end to end below which an example has a weight of zero.
    """

    cancellation: float
    low: float
    high: float
    shortest: float


def mix(
    square: Tensor,
    inner: Tensor | None,
    last: Tensor | None,
    by_worker: ByWorker,
    ratio: float,
    limits: TrustLimits,
) -> tuple[Tensor, Tensor]:
    """(length (E,) float64, trusted (E,) bool) of g + ratio m, from |g|^2, <g, m> and each worker's |m|^2 (n,) float64.

    A length is trusted if neither cancellation nor the range of float32 can have spoiled it: it is at least
    `limits.cancellation` times the lengths of both terms laid end to end and at least `limits.low`, and these are below
    `limits.high`. NaN is never trusted. Where g and ratio m laid end to end are shorter than `limits.shortest`, the
    length is inf, so that its inverse is a weight of zero, and is trusted.
    Empty places get a length of 1, and are trusted. inner, last: None if there is no m.
    """
    length = torch.empty_like(square)
    trusted = torch.empty(square.shape, dtype=torch.bool, device=square.device)
    if len(square):
        if (inner is None) != (last is None):
            raise ValueError("inner products and squared lengths of the vectors come together")
        # Numbers are constants of the kernel, since Triton hands over other floats as float32.
        _mix[(triton.cdiv(len(square), 128),)](
            square, square if inner is None else inner, square if last is None else last, by_worker.owner,
            length, trusted.view(torch.uint8), len(square), by_worker.workers,
            RATIO=float(ratio), CANCELLATION=float(limits.cancellation), LOW=float(limits.low),
            HIGH=float(limits.high), SHORTEST=float(limits.shortest), INNER=inner is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return length, trusted


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
