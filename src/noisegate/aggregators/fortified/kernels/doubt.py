"""The doubt that is left about each worker (twin: `doubt.remaining_doubt`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import doubt as plain

OFFSET_SKEW = tl.constexpr(plain.OFFSET_SKEW)
WIDTH = tl.constexpr(plain.WIDTH)
FAR = tl.constexpr(plain.FAR)
MOST_DOUBT = tl.constexpr(plain.MOST_DOUBT)

MANY = 1024  # workers that are read at once where one program reads all


def remaining_doubt(
    offsets: Tensor, error: Tensor, spread: Tensor, noise: Tensor, passed: Tensor, ties: Tensor
) -> Tensor:
    """(n,) as `doubt.remaining_doubt` has it."""
    n, K = offsets.shape
    found, beyond = offsets.new_empty(n), offsets.new_empty(n)
    near = min(n, plain.NEIGHBORS)
    _doubt[(n,)](
        offsets,
        error,
        spread,
        noise,
        passed.view(torch.uint8),
        ties,
        found,
        near,
        DRAWN=n > plain.NEIGHBORS,
        K=K,
        COLUMNS=triton.next_power_of_2(K),
        BLOCK=triton.next_power_of_2(near),
        num_warps=4,
    )
    block = min(MANY, triton.next_power_of_2(n))
    _beyond_least[(1,)](found, passed.view(torch.uint8), beyond, n, BLOCK=block, num_warps=4)
    return beyond


@triton.jit
def _bounded(x):
    return tl.minimum(tl.maximum(x, -FAR), FAR)


@triton.jit(do_not_specialize=["near"])
def _doubt(
    offsets,
    error,
    spread,
    noise,
    passed,
    ties,
    found,
    near,
    DRAWN: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The doubt about one worker."""
    row = tl.program_id(0)
    k = tl.arange(0, COLUMNS)
    real = k < K
    of_noise = tl.load(noise + k, mask=real, other=1.0)
    skew = tl.load(spread + k, mask=real, other=0.0) * OFFSET_SKEW
    alone = tl.sqrt(2 * (tl.load(error + k, mask=real, other=0.0) + skew * skew + of_noise))
    apart = tl.sqrt(2 * of_noise) * WIDTH
    offset = tl.load(offsets + row * K + k, mask=real, other=0.0)
    own = _bounded(offset / alone)
    place = _bounded(offset / apart)

    j = tl.arange(0, BLOCK)
    neighbor = j.to(tl.int64)
    if DRAWN:
        neighbor = tl.load(ties + j, mask=j < near, other=0)
    counts = tl.load(passed + neighbor, mask=j < near, other=0) != 0
    here = counts[:, None] & real[None, :]
    theirs = tl.load(offsets + neighbor[:, None] * K + k[None, :], mask=here, other=0.0)
    doubt = _bounded(theirs / alone[None, :])
    chance = place[None, :] - _bounded(theirs / apart[None, :])
    least = tl.min(tl.where(here, doubt * doubt + chance * chance, float("inf")), 0)
    tl.store(found + row, tl.max(tl.where(real, tl.minimum(own * own, least), 0.0), 0))


@triton.jit(do_not_specialize=["n"])
def _beyond_least(found, passed, beyond, n, BLOCK: tl.constexpr):
    """Less the smallest doubt of those that passed; nothing where nobody did."""
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        counts = tl.load(passed + row, mask=row < n, other=0) != 0
        smallest = tl.minimum(smallest, tl.load(found + row, mask=counts, other=float("inf")))
    least = tl.min(smallest, 0)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        value = tl.load(found + row, mask=row < n, other=0.0) - least
        tl.store(beyond + row, tl.minimum(tl.maximum(value, 0.0), MOST_DOUBT), mask=row < n)
