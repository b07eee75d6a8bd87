r"""The gradient of a convolution's weight for each example separately, without unfolding the inputs.

For a two-dimensional convolution with zero padding and one group, the loss of example $b$ depends on the weight
$w_{o,c,i,j}$ through every output position $t = (y, x)$, so that

$$
G_{b,o,(c,i,j)} \;=\; \sum_{t=(y,x)} \delta_{b,o,t}\;
    \bar a_{b,\,c,\; y s_h + i d_h - p_h,\; x s_w + j d_w - p_w},
$$

where $\delta$ is the gradient with respect to the layer's outputs, $\bar a$ the inputs continued by zeros, and $s$, $p$
and $d$ the stride, the padding and the dilation.  For each example this is the product of a matrix of $O \times T$ and
one of $T \times K$, with $T = H' W'$ and $K = C k_h k_w$.  The second one is what `unfold` writes to memory, $k_h k_w$
times the size of the inputs; here its tiles are gathered from the inputs themselves while they are multiplied.

The address of an element splits into a part of $k = (c, i, j)$ and a part of $t = (y, x)$,

$$
\bigl(c H W + (i d_h - p_h) W + j d_w - p_w\bigr) + \bigl(y s_h W + x s_w\bigr),
$$

of which the first is worked out once for a tile and the second once for a step along $t$.  Whether it lies in the
padding is decided by $i$ with $y$ and by $j$ with $x$; see `windows.outside`.

The products are made by tensor cores, which read 11 significant bits of a float32.  Each factor is written as a head
of so many bits plus a tail, and head times head, head times tail and tail times head are added: what is left out,
and what is cut from a tail, is of the order of $2^{-22}$ of the product.  Tensor cores also cut when they add, always
towards zero, so each step's product is made from nothing and added to the sum by an ordinary, rounded addition.

One program makes a tile of one example's gradient and walks along $t$ in a fixed order; nothing is added atomically, so
the result is the same on every run.  Where examples are too few to fill the device, $t$ is cut into pieces whose sums
are kept apart and added at the end, again in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.kernels.windows import INDEX_LIMIT, Pair, Window, column_parts, leading, outside, pad_large_window

FILL_WARPS = 2048
"""Warps that fill a device: about 16 for each of the 132 multiprocessors of an H200."""

LEAST_STEPS = 4
"""Least steps in a piece of the sum. A shorter piece costs more to start than it saves."""


class GradientTiling(NamedTuple):
    """How the gradient of one layer is cut up."""

    outputs: int  # output channels in a tile
    columns: int  # columns (c, i, j) in the main part of a tile
    extra: int  # columns in its second part, or 0: parts are powers of two, and a frequent K, 144, is far from one
    positions: int  # output positions in a step
    warps: int
    stages: int = 2  # the inputs of the next step are on their way while those of one are multiplied

    @property
    def width(self) -> int:
        return self.columns + self.extra


def choose_tiling(outputs: int, columns: int, positions: int) -> GradientTiling:
    """The tiling for a layer with so many output channels, columns and output positions.

    Four warps and 64 columns are what a Hopper tensor core instruction (wgmma) takes, with registers left for 16 to 20
    warps on a multiprocessor.  Fewer columns would leave most of such a tile empty.  And 144 columns, 16 channels with
    windows of 3 x 3, would fill only three quarters of three of them: one tile of 128 + 16 needs little more than half
    the instructions, and reads the deltas once.
    """
    block = min(64, max(16, triton.next_power_of_2(outputs)))
    step = 16 if positions <= 16 else 32
    if columns <= 16:
        return GradientTiling(block, 16, 0, step, warps=1)
    if columns <= 32:
        return GradientTiling(block, 32, 0, step, warps=2 if block == 64 else 1)
    if 128 < columns <= 144 and block == 16:
        return GradientTiling(block, 128, 16, step, warps=2)
    return GradientTiling(block, 64, 0, step, warps=4)


def pieces_of(warps: int, steps: int) -> tuple[int, int]:
    """Into how many pieces the sum is cut when one piece keeps `warps` busy, and the steps of a piece."""
    wanted = max(1, min(triton.cdiv(FILL_WARPS, warps), steps // LEAST_STEPS))
    length = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, length), length


@triton.jit  # type: ignore[untyped-decorator]
def _gather(a, k_offset, k_bits, t_offset, t_bits, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile (positions, columns) of the unfolded inputs.

    Positions come first because the compiler, where it cannot tell, lets neighbouring threads differ in the first
    index, and neighbouring positions are neighbours in memory.  Their offsets are added in 64 bits, so that what is
    left for each element is one multiply-add.
    """
    pointers = (a + t_offset.to(tl.int64)[:, None]) + k_offset[None, :]
    if PADDED:
        return tl.load(pointers, mask=(t_bits[:, None] & k_bits[None, :]) == 0, other=0.0)
    else:  # without padding every window lies inside
        return tl.load(pointers)


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, y):  # type: ignore[no-untyped-def]
    """The product of two float32 tiles, as three of the four products of heads and tails."""
    x_head = leading(x)
    y_head = leading(y)
    x_tail = x - x_head
    y_tail = y - y_head
    product = tl.dot(x_tail, y_head, input_precision="tf32")
    product = tl.dot(x_head, y_tail, product, input_precision="tf32")
    return tl.dot(x_head, y_head, product, input_precision="tf32")


@triton.jit(do_not_specialize=["batch", "steps"])  # type: ignore[untyped-decorator]
def _weight_gradient_kernel(  # type: ignore[no-untyped-def]
    a_pointer,
    delta_pointer,
    out_pointer,
    batch,  # examples
    steps,  # steps along t of one piece
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    T: tl.constexpr = HO * WO
    K: tl.constexpr = C * KH * KW
    WIDTH: tl.constexpr = BLOCK_K + EXTRA_K
    PADDED: tl.constexpr = PH > 0 or PW > 0
    K_TILES: tl.constexpr = (K + WIDTH - 1) // WIDTH
    O_TILES: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O

    # Tiles of one example follow each other, so that what one of them brought to the cache serves the others.
    program = tl.program_id(0)
    k_tile = program % K_TILES
    o_tile = (program // K_TILES) % O_TILES
    part = program // (K_TILES * O_TILES)  # = piece * batch + example
    piece = part // batch
    example = part - piece * batch

    a = a_pointer + example.to(tl.int64) * (C * H * W)
    delta = delta_pointer + example.to(tl.int64) * (O * T)
    out = out_pointer + part.to(tl.int64) * (O * K)

    o = o_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    k = k_tile * WIDTH + tl.arange(0, BLOCK_K)
    # Columns past the last repeat it: they need no mask when read, and are not written.
    k_offset, k_bits = column_parts(tl.minimum(k, K - 1), KH, KW, H, W, PH, PW, DH, DW)
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    if EXTRA_K > 0:
        extra_k = k_tile * WIDTH + BLOCK_K + tl.arange(0, EXTRA_K)
        e_offset, e_bits = column_parts(tl.minimum(extra_k, K - 1), KH, KW, H, W, PH, PW, DH, DW)
        extra_total = tl.zeros((EXTRA_K, BLOCK_O), dtype=tl.float32)

    first = piece * steps
    last = tl.minimum(first + steps, (T + BLOCK_T - 1) // BLOCK_T)
    for step in range(first, last):
        t = step * BLOCK_T + tl.arange(0, BLOCK_T)
        factors = tl.load(delta + (o[:, None] * T + t[None, :]), mask=(o[:, None] < O) & (t[None, :] < T), other=0.0)
        position = tl.minimum(t, T - 1)  # likewise: the deltas past the last position are zero
        y = position // WO
        t_row = y * SH
        t_col = (position - y * WO) * SW
        t_offset = t_row * W + t_col
        t_bits = outside(t_row, t_col, KH, KW, H, W, PH, PW, DH, DW) if PADDED else t_offset
        inputs = _gather(a, k_offset, k_bits, t_offset, t_bits, PADDED)
        total += _product(tl.trans(inputs), tl.trans(factors))
        if EXTRA_K > 0:
            extra_inputs = _gather(a, e_offset, e_bits, t_offset, t_bits, PADDED)
            extra_total += _product(tl.trans(extra_inputs), tl.trans(factors))

    tl.store(out + (o[None, :] * K + k[:, None]), total, mask=(o[None, :] < O) & (k[:, None] < K))
    if EXTRA_K > 0:
        tl.store(out + (o[None, :] * K + extra_k[:, None]), extra_total, mask=(o[None, :] < O) & (extra_k[:, None] < K))


def _checked(a: Tensor, delta: Tensor, window: Window) -> None:
    """Raise unless the deltas belong to the inputs, and one example is small enough for the kernel's offsets."""
    if a.dtype != torch.float32 or delta.dtype != torch.float32:
        raise TypeError(f"inputs and deltas must be float32, not {a.dtype} and {delta.dtype}")
    if len(delta) != len(a) or tuple(delta.shape[2:]) != window.positions((a.shape[2], a.shape[3])):
        raise ValueError(f"deltas of shape {tuple(delta.shape)} do not belong to inputs of shape {tuple(a.shape)}")
    gradient = delta.shape[1] * a.shape[1] * window.size[0] * window.size[1]
    if max(a.shape[1:].numel(), delta.shape[1:].numel(), gradient) >= INDEX_LIMIT:
        raise ValueError("one example is too large for 32-bit offsets")


def weight_gradients(a: Tensor, delta: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The gradients (B, O, C * kh * kw) of a convolution's weight for each of B examples.

    `a` (B, C, H, W) are the inputs of the convolution, `delta` (B, O, H', W') the gradient of each example's loss with
    respect to its outputs, both float32.
    """
    a, window = pad_large_window(a, Window(kernel, stride, padding, dilation))
    a, delta = a.contiguous(), delta.contiguous()
    _checked(a, delta, window)
    (batch, channels, height, width), (outputs, out_height, out_width) = a.shape, delta.shape[1:]
    columns, positions = channels * kernel[0] * kernel[1], out_height * out_width
    if batch == 0:
        return a.new_zeros((0, outputs, columns))
    tiling = choose_tiling(outputs, columns, positions)
    tiles = triton.cdiv(columns, tiling.width) * triton.cdiv(outputs, tiling.outputs)
    pieces, steps = pieces_of(batch * tiles * tiling.warps, triton.cdiv(positions, tiling.positions))
    sums = a.new_empty((pieces, batch, outputs, columns))
    _weight_gradient_kernel[(tiles * batch * pieces,)](
        a,
        delta,
        sums,
        batch,
        steps,
        C=channels,
        H=height,
        W=width,
        O=outputs,
        HO=out_height,
        WO=out_width,
        **window.constants(),
        BLOCK_O=tiling.outputs,
        BLOCK_K=tiling.columns,
        EXTRA_K=tiling.extra,
        BLOCK_T=tiling.positions,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return sums[0] if pieces == 1 else sums.sum(0)
