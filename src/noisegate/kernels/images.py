r"""Two-dimensional convolutions of many small images with few channels, and their gradients with respect to the images.

With zero padding and one group, a convolution gives at the position $t = (y, x)$ of example $b$

$$
z_{b,o,t} \;=\; \beta_o + \sum_{c,i,j} w_{o,c,i,j}\;
    \bar a_{b,\,c,\; y s_h + i d_h - p_h,\; x s_w + j d_w - p_w},
$$

where $\bar a$ are the images continued by zeros, and $s$, $p$ and $d$ the stride, the padding and the dilation.  Taken
together, the positions of all examples are the rows of one long matrix, unfolded, and the weights the columns of a
small one: the product has $B T$ rows, but only $O$ columns and $K = C k_h k_w$ terms, a shape that libraries are not
made for.  As in `convolution`, tiles of the unfolded images are gathered from the images while they are multiplied.

For the gradient with respect to the images, let the stride be one.  The pixel $(v, u)$ enters at $y = v + p_h - i d_h$,
and with $i = k_h - 1 - i'$ that is $y = v + i' d_h - (d_h (k_h - 1) - p_h)$, so that

$$
\frac{\partial}{\partial a_{b,c,v,u}} \;=\; \sum_{o,i',j'} w_{o,\,c,\,k_h - 1 - i',\,k_w - 1 - j'}\;
    \bar\delta_{b,\,o,\; v + i' d_h - q_h,\; u + j' d_w - q_w}, \qquad q = d (k - 1) - p,
$$

which is a convolution of the deltas, with turned weights, channels and outputs exchanged, and the padding $q$.

The sum over $K$ is cut into steps.  With enough channels a step is one tap $(i, j)$ of the window with a block of
channels: an address then is that of the position, plus one number for the step, plus a multiple of $H W$ for the
channel, and whether it lies in the padding does not depend on the channel at all.  With eight channels or fewer, which
would fill half of such a step or less, a step takes any columns $(c, i, j)$ in a row, whose parts of the address are
known when compiling.

Products are made by tensor cores from heads and tails, as `convolution` explains.  The weights are cut once, and laid
out in the order of the steps, by `convolution_weights.lay_out`.  Their heads are rounded, so that their tails, and with
them the products of two tails that are left out, have either sign; then it is enough to cut the images' heads off,
which is one instruction less for each element of the unfolded matrix.  What is left is an error of the order of
$2^{-22}$.  A number that is infinite has a tail that is NaN, and so has its product.

Every output is made by one program in a fixed order, from its own example alone: the result is the same on every run,
and whatever is in an example, NaN even, stays there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.grad import conv2d_input

from noisegate.kernels.convolution_weights import choose_tiling, lay_out
from noisegate.kernels.windows import INDEX_LIMIT, Pair, Window, column_parts, outside, pad_large_window


@triton.jit  # type: ignore[untyped-decorator]
def _times_weights(inputs, heads, tails):  # type: ignore[no-untyped-def]
    """The product of inputs (positions, depth) and weights (outputs, depth), all but the product of the tails."""
    inputs_head = (inputs.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    inputs_tail = inputs - inputs_head
    heads = tl.trans(heads)
    product = tl.dot(inputs_tail, heads, input_precision="tf32")
    product = tl.dot(inputs_head, tl.trans(tails), product, input_precision="tf32")
    return tl.dot(inputs_head, heads, product, input_precision="tf32")


@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def _convolve_kernel(  # type: ignore[no-untyped-def]
    a_pointer,
    weight_pointer,  # as `convolution_weights.lay_out` leaves them
    bias_pointer,
    out_pointer,
    batch,  # examples
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
    BIASED: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    DEPTH: tl.constexpr,
    BY_TAPS: tl.constexpr,
):
    T: tl.constexpr = HO * WO
    TAPS: tl.constexpr = KH * KW
    PADDED: tl.constexpr = PH > 0 or PW > 0
    O_TILES: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    WEIGHTS: tl.constexpr = O_TILES * BLOCK_O * DEPTH  # heads, or tails, of one step

    program = tl.program_id(0)
    o = (program % O_TILES) * BLOCK_O + tl.arange(0, BLOCK_O)
    # Positions are counted through all examples, which fills tiles where one example has few.
    start = (program // O_TILES).to(tl.int64) * BLOCK_T
    first_example = start // T
    first = (start - first_example * T).to(tl.int32)
    left = tl.minimum(batch * tl.full((), T, tl.int64) - start, BLOCK_T).to(tl.int32)
    row = tl.arange(0, BLOCK_T)
    position = first + tl.minimum(row, left - 1)  # past the last position: the last one, again; not written
    examples_on = position // T
    t = position - examples_on * T
    example = first_example + examples_on
    y = t // WO
    t_row = y * SH
    t_col = (t - y * WO) * SW
    t_bits = outside(t_row, t_col, KH, KW, H, W, PH, PW, DH, DW) if PADDED else t_row
    a = a_pointer + (example * (C * H * W) + (t_row * W + t_col))

    k = tl.arange(0, DEPTH)
    weights = weight_pointer + (o[:, None] * DEPTH + k[None, :])
    total = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    if BY_TAPS:
        for step in range(STEPS):
            block = step // TAPS
            tap = step - block * TAPS
            i = tap // KW
            j = tap - i * KW
            channel = k * (H * W)
            if C % DEPTH != 0:  # channels past the last repeat it; their weights are zero
                channel = tl.minimum(k, C - 1 - block * DEPTH) * (H * W)
            here = a + (block * (DEPTH * H * W) + (i * DH - PH) * W + (j * DW - PW))
            pointers = here[:, None] + channel[None, :]
            if PADDED:
                inside = ((t_bits >> i) | (t_bits >> (j + KH))) & 1 == 0
                inputs = tl.load(pointers, mask=inside[:, None], other=0.0)
            else:
                inputs = tl.load(pointers)
            heads = tl.load(weights + step * WEIGHTS)
            tails = tl.load(weights + (STEPS + step) * WEIGHTS)
            total += _times_weights(inputs, heads, tails)
    else:
        for step in tl.static_range(STEPS):
            column = tl.minimum(step * DEPTH + k, C * TAPS - 1)
            k_offset, k_bits = column_parts(column, KH, KW, H, W, PH, PW, DH, DW)
            pointers = a[:, None] + k_offset[None, :]
            if PADDED:
                inputs = tl.load(pointers, mask=(t_bits[:, None] & k_bits[None, :]) == 0, other=0.0)
            else:
                inputs = tl.load(pointers)
            heads = tl.load(weights + step * WEIGHTS)
            tails = tl.load(weights + (STEPS + step) * WEIGHTS)
            total += _times_weights(inputs, heads, tails)

    if BIASED:
        total += tl.load(bias_pointer + o, mask=o < O, other=0.0)[None, :]
    out = out_pointer + (example * (O * T) + t)
    tl.store(out[:, None] + (o * T)[None, :], total, mask=(row < left)[:, None] & (o < O)[None, :])


def _output_shape(a: Tensor, weight: Tensor, bias: Tensor | None, window: Window, transposed: bool) -> tuple[int, Pair]:
    """The output channels, and the rows and columns of the outputs. Raises where the arguments do not go together."""
    outputs, inner = weight.shape[1::-1] if transposed else weight.shape[:2]
    if any(x is not None and x.dtype != torch.float32 for x in (a, weight, bias)):
        raise TypeError("images, weights and bias must be float32")
    if a.shape[1] != inner or (bias is not None and tuple(bias.shape) != (outputs,)):
        raise ValueError(f"weights of shape {tuple(weight.shape)} do not belong to images of shape {tuple(a.shape)}")
    height, width = a.shape[2:]
    positions = window.positions((height, width))
    if min(positions) < 1:
        raise ValueError(f"a window of {window.size} does not fit into images of {height} x {width}")
    if max(a.shape[1:].numel(), outputs * positions[0] * positions[1], weight.numel()) >= INDEX_LIMIT:
        raise ValueError("one example is too large for 32-bit offsets")
    return outputs, positions


def _launch(a: Tensor, weight: Tensor, bias: Tensor | None, window: Window, transposed: bool) -> Tensor:
    """The convolution of images with `weight`; `transposed`: with the weights that the gradient needs."""
    a, window = pad_large_window(a, window)
    a, weight = a.contiguous(), weight.contiguous()
    outputs, (out_height, out_width) = _output_shape(a, weight, bias, window, transposed)
    batch, channels, height, width = a.shape
    out = a.new_empty((batch, outputs, out_height, out_width))
    if out.numel() == 0:
        return out
    tiling = choose_tiling(channels, outputs, window.size[0] * window.size[1])
    weights = lay_out(weight, tiling, transposed)
    tiles = triton.cdiv(batch * out_height * out_width, tiling.positions) * triton.cdiv(outputs, tiling.outputs)
    _convolve_kernel[(tiles,)](
        a,
        weights,
        weights if bias is None else bias.contiguous(),  # not read then
        out,
        batch,
        C=channels,
        H=height,
        W=width,
        O=outputs,
        HO=out_height,
        WO=out_width,
        **window.constants(),
        BIASED=bias is not None,
        STEPS=tiling.steps,
        BLOCK_T=tiling.positions,
        BLOCK_O=tiling.outputs,
        DEPTH=tiling.depth,
        BY_TAPS=tiling.by_taps,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def convolve(a: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The convolution (B, O, H', W') of images `a` (B, C, H, W) with `weight` (O, C, kh, kw), all float32.

    It is that of `torch.nn.functional.conv2d` with one group.
    """
    return _launch(a, weight, bias, window, transposed=False)


def input_gradient(delta: Tensor, weight: Tensor, input_size: torch.Size, window: Window) -> Tensor:
    """The gradient with respect to the images, of size `input_size`, where `delta` is the one of the outputs.

    Torch makes it where this is not a convolution: with strides, or with more padding than the window reaches over.
    """
    (kh, kw), stride, (ph, pw), dilation = window
    turned = dilation[0] * (kh - 1) - ph, dilation[1] * (kw - 1) - pw
    if stride != (1, 1) or min(turned) < 0:
        found: Tensor = conv2d_input(list(input_size), weight, delta, *window[1:])
        return found
    gradient = _launch(delta, weight, None, window._replace(padding=turned), transposed=True)
    if gradient.shape != input_size:
        raise ValueError(f"deltas of shape {tuple(delta.shape)} do not belong to images of {tuple(input_size)}")
    return gradient
