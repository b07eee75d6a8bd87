"""How a convolution is cut into tiles, and its weights laid out in the order in which `images` reads them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from noisegate.kernels.windows import leading

LEAST_DEPTH, MOST_DEPTH = 16, 32
"""Terms of a step: the least that a tensor core takes, and the most that registers hold."""

COLUMN_STEPS = 8
"""Most steps by columns, which are written out one by one."""


class ConvolutionTiling(NamedTuple):
    """How one convolution is cut up."""

    positions: int  # rows of a tile: positions, of one example or of several in a row
    outputs: int  # columns of a tile: output channels
    depth: int  # terms of a step of the sum
    by_taps: bool  # whether a step is a tap with a block of channels
    steps: int
    warps: int
    stages: int


def choose_tiling(channels: int, outputs: int, taps: int) -> ConvolutionTiling:
    """The tiling for a convolution with so many input and output channels and so large a window.

    With 16 outputs two warps make a tile, by the older tensor core instruction (mma): each has 64 positions, over
    which it spreads the cost of a step, with registers for 14 warps on a multiprocessor.  More outputs need four, for
    which there is the instruction of Hopper (wgmma), and 64 of them half as many positions.  Two stages keep little in
    shared memory, and what is left of it is the cache that the other taps of the window are read from.
    """
    block = min(64, max(16, triton.next_power_of_2(outputs)))
    positions = 64 if block == 64 else 128
    columns = channels * taps
    if channels <= LEAST_DEPTH // 2 and columns <= MOST_DEPTH * COLUMN_STEPS:
        depth = LEAST_DEPTH if columns <= LEAST_DEPTH else MOST_DEPTH
        return ConvolutionTiling(positions, block, depth, False, triton.cdiv(columns, depth), warps=4, stages=1)
    depth = LEAST_DEPTH if triton.cdiv(channels, LEAST_DEPTH) % 2 else MOST_DEPTH
    warps = 2 if block == 16 else 4
    return ConvolutionTiling(positions, block, depth, True, triton.cdiv(channels, depth) * taps, warps, stages=2)


@triton.jit  # type: ignore[untyped-decorator]
def _lay_out_kernel(  # type: ignore[no-untyped-def]
    weight_pointer,  # element (o, c, tap) at o * STRIDE_O + c * STRIDE_C + tap
    out_pointer,  # (2, steps, O rounded up to tiles, DEPTH)
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    TAPS: tl.constexpr,
    STRIDE_O: tl.constexpr,
    STRIDE_C: tl.constexpr,
    TURNED: tl.constexpr,  # whether taps are taken from the last to the first
    STEPS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    O_TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    BY_TAPS: tl.constexpr,
):
    """The weights of one step for one tile of outputs, cut into heads and tails, with zeros where there are none."""
    step = tl.program_id(0)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, DEPTH)
    if BY_TAPS:
        channel = (step // TAPS) * DEPTH + k
        tap = step % TAPS
    else:
        channel = (step * DEPTH + k) // TAPS
        tap = (step * DEPTH + k) % TAPS
    if TURNED:
        tap = TAPS - 1 - tap
    offset = o[:, None] * STRIDE_O + (channel * STRIDE_C + tap)[None, :]
    weight = tl.load(weight_pointer + offset, mask=(o[:, None] < O) & (channel[None, :] < C), other=0.0)
    head = leading(weight)
    out = out_pointer + (step * (O_TILES * BLOCK_O) + o[:, None]) * DEPTH + k[None, :]
    tl.store(out, head)
    tl.store(out + STEPS * O_TILES * BLOCK_O * DEPTH, weight - head)


def lay_out(weight: Tensor, tiling: ConvolutionTiling, transposed: bool) -> Tensor:
    """The weights (O, C, kh, kw) as the kernel reads them; `transposed`: those of the gradient, (C, O) and turned."""
    outputs, channels = weight.shape[1::-1] if transposed else weight.shape[:2]
    taps = weight.shape[2] * weight.shape[3]
    rows, columns = weight.shape[1] * taps, taps
    tiles = triton.cdiv(outputs, tiling.outputs)
    laid_out = weight.new_empty((2, tiling.steps, tiles * tiling.outputs, tiling.depth))
    _lay_out_kernel[(tiling.steps, tiles)](
        weight,
        laid_out,
        C=channels,
        O=outputs,
        TAPS=taps,
        STRIDE_O=columns if transposed else rows,
        STRIDE_C=rows if transposed else columns,
        TURNED=transposed,
        STEPS=tiling.steps,
        BLOCK_O=tiling.outputs,
        O_TILES=tiles,
        DEPTH=tiling.depth,
        BY_TAPS=tiling.by_taps,
        num_warps=1,
    )
    return laid_out
