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
padding is decided by $i$ with $y$ and by $j$ with $x$; see `_outside`.

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

FILL_WARPS = 2048  # about 16 for each of the 132 multiprocessors of an H200
LEAST_STEPS = 4  # a piece of the sum shorter than this costs more to start than it saves
WINDOW_LIMIT = 31  # rows and columns of a window for which `_outside` has bits
INDEX_LIMIT = 2**30  # offsets within one example are 32-bit, and a tile may reach past its end


class Tiling(NamedTuple):
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


def choose_tiling(outputs: int, columns: int, positions: int) -> Tiling:
    """The tiling for a layer with so many output channels, columns and output positions.

    Four warps and 64 columns are what a Hopper tensor core instruction (wgmma) takes, with registers left for 16 to 20
    warps on a multiprocessor.  Fewer columns would leave most of such a tile empty.  And 144 columns, 16 channels with
    windows of 3 x 3, would fill only three quarters of three of them: one tile of 128 + 16 needs little more than half
    the instructions, and reads the deltas once.
    """
    block = min(64, max(16, triton.next_power_of_2(outputs)))
    step = 16 if positions <= 16 else 32
    if columns <= 16:
        return Tiling(block, 16, 0, step, warps=1)
    if columns <= 32:
        return Tiling(block, 32, 0, step, warps=2 if block == 64 else 1)
    if 128 < columns <= 144 and block == 16:
        return Tiling(block, 128, 16, step, warps=2)
    return Tiling(block, 64, 0, step, warps=4)


def pieces_of(warps: int, steps: int) -> tuple[int, int]:
    """Into how many pieces the sum is cut when one piece keeps `warps` busy, and the steps of a piece."""
    wanted = max(1, min(triton.cdiv(FILL_WARPS, warps), steps // LEAST_STEPS))
    length = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, length), length


@triton.jit  # type: ignore[untyped-decorator]
def _column_parts(  # type: ignore[no-untyped-def]
    k,
    KH: tl.constexpr,
    KW: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
):
    """Of the columns k = (c, i, j): their part of an input's address, and the bits i and KH + j (see `_outside`)."""
    channel = k // (KH * KW)
    tap = k - channel * (KH * KW)
    i = tap // KW
    j = tap - i * KW
    one = tl.full(k.shape, 1, tl.int32)
    return channel * (H * W) + (i * DH - PH) * W + (j * DW - PW), (one << i) | (one << (j + KH))


@triton.jit  # type: ignore[untyped-decorator]
def _outside(  # type: ignore[no-untyped-def]
    row,
    col,
    KH: tl.constexpr,
    KW: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
):
    """For windows that begin at (row, col) of the padded inputs: bit i where row i of the window lies in the padding,
    bit KH + j where column j does.

    An element is then outside where its window's bits and its column's have one in common, a single instruction, and
    the bits are worked out once for a position, not for every element.
    """
    bits = tl.zeros(row.shape, dtype=tl.int32)
    for i in tl.static_range(KH):
        y = row + (i * DH - PH)
        bits |= tl.where((y < 0) | (y >= H), 1 << i, 0)
    for j in tl.static_range(KW):
        x = col + (j * DW - PW)
        bits |= tl.where((x < 0) | (x >= W), 1 << (KH + j), 0)
    return bits


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


@triton.jit
def _leading(x):  # type: ignore[no-untyped-def]
    """The float32 numbers rounded to the 10 bits after the point that a tensor core reads.

    The sum may carry a NaN over into a zero; then the tail, the number less its head, still is NaN.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of two float32 tiles, by default as three products of halves (all but the least of the four)."""
    if PRECISION == "tf32x3":
        x_head = _leading(x)
        y_head = _leading(y)
        x_tail = x - x_head
        y_tail = y - y_head
        product = tl.dot(x_tail, y_head, input_precision="tf32")
        product = tl.dot(x_head, y_tail, product, input_precision="tf32")
        return tl.dot(x_head, y_head, product, input_precision="tf32")
    else:
        return tl.dot(x, y, input_precision=PRECISION)


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
    PRECISION: tl.constexpr,
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
    k_offset, k_bits = _column_parts(tl.minimum(k, K - 1), KH, KW, H, W, PH, PW, DH, DW)
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    if EXTRA_K > 0:
        extra_k = k_tile * WIDTH + BLOCK_K + tl.arange(0, EXTRA_K)
        e_offset, e_bits = _column_parts(tl.minimum(extra_k, K - 1), KH, KW, H, W, PH, PW, DH, DW)
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
        t_bits = _outside(t_row, t_col, KH, KW, H, W, PH, PW, DH, DW) if PADDED else t_offset
        inputs = _gather(a, k_offset, k_bits, t_offset, t_bits, PADDED)
        total += _product(tl.trans(inputs), tl.trans(factors), PRECISION)
        if EXTRA_K > 0:
            extra_inputs = _gather(a, e_offset, e_bits, t_offset, t_bits, PADDED)
            extra_total += _product(tl.trans(extra_inputs), tl.trans(factors), PRECISION)

    tl.store(out + (o[None, :] * K + k[:, None]), total, mask=(o[None, :] < O) & (k[:, None] < K))
    if EXTRA_K > 0:
        tl.store(out + (o[None, :] * K + extra_k[:, None]), extra_total, mask=(o[None, :] < O) & (extra_k[:, None] < K))


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def weight_gradients(
    a: Tensor,
    delta: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    *,
    precision: str = "tf32x3",
    tiling: Tiling | None = None,
) -> Tensor:
    """The gradients (B, O, C * kh * kw) of a convolution's weight for each of B examples.

    `a` (B, C, H, W) are the inputs of the convolution, `delta` (B, O, H', W') the gradient of each example's loss with
    respect to its outputs, both float32.  `precision` is "tf32x3" (tensor cores, near float32), "ieee" (float32) or
    "tf32" (fast, three digits); `tiling` is chosen from the shapes unless given.
    """
    if padding != (0, 0) and sum(kernel) > WINDOW_LIMIT:  # so large a window is rare enough for a copy
        a = torch.nn.functional.pad(a, (padding[1], padding[1], padding[0], padding[0]))
        padding = (0, 0)
    a, delta = a.contiguous(), delta.contiguous()
    batch, channels, height, width = a.shape
    outputs, out_height, out_width = delta.shape[1:]
    columns, positions = channels * kernel[0] * kernel[1], out_height * out_width
    expected = tuple(
        _output_size(size, *of) for size, *of in zip((height, width), kernel, stride, padding, dilation, strict=True)
    )
    if a.dtype != torch.float32 or delta.dtype != torch.float32:
        raise TypeError(f"inputs and deltas must be float32, not {a.dtype} and {delta.dtype}")
    if delta.shape[0] != batch or (out_height, out_width) != expected:
        raise ValueError(f"deltas of shape {tuple(delta.shape)} do not belong to inputs of shape {tuple(a.shape)}")
    if max(channels * height * width, outputs * positions, outputs * columns) >= INDEX_LIMIT:
        raise ValueError("one example is too large for 32-bit offsets")
    if batch == 0:
        return a.new_zeros((0, outputs, columns))

    tiling = tiling or choose_tiling(outputs, columns, positions)
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
        KH=kernel[0],
        KW=kernel[1],
        SH=stride[0],
        SW=stride[1],
        PH=padding[0],
        PW=padding[1],
        DH=dilation[0],
        DW=dilation[1],
        BLOCK_O=tiling.outputs,
        BLOCK_K=tiling.columns,
        EXTRA_K=tiling.extra,
        BLOCK_T=tiling.positions,
        PRECISION=precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return sums[0] if pieces == 1 else sums.sum(0)
