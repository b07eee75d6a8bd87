"""What the two kernels of convolutions share: the window, its place in an image, and factors for tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WINDOW_LIMIT = 31
"""Most rows and columns of a window, taken together, for which `outside` has bits."""

INDEX_LIMIT = 2**30
"""Most numbers of one example. Offsets within an example are 32-bit, and a tile may reach past its end."""

Pair = tuple[int, int]


class Window(NamedTuple):
    """The window of a two-dimensional convolution with zero padding and one group: (rows, columns) of each."""

    size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def positions(self, image: Pair) -> Pair:
        """The rows and columns of the outputs for images of this height and width."""
        return self._along(0, image[0]), self._along(1, image[1])

    def _along(self, axis: int, size: int) -> int:
        reach = self.dilation[axis] * (self.size[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def constants(self) -> dict[str, int]:
        """The window as compile-time arguments of a kernel."""
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self
        return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}


def pad_large_window(a: Tensor, window: Window) -> tuple[Tensor, Window]:
    """Images and window, where a window that `outside` has too few bits for gets padded images. That is a copy."""
    if window.padding == (0, 0) or sum(window.size) <= WINDOW_LIMIT:
        return a, window
    rows, columns = window.padding
    return torch.nn.functional.pad(a, (columns, columns, rows, rows)), window._replace(padding=(0, 0))


@triton.jit  # type: ignore[untyped-decorator]
def column_parts(  # type: ignore[no-untyped-def]
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
    """Of the columns k = (c, i, j): their part of an input's address, and the bits i and KH + j (see `outside`)."""
    channel = k // (KH * KW)
    tap = k - channel * (KH * KW)
    i = tap // KW
    j = tap - i * KW
    one = tl.full(k.shape, 1, tl.int32)
    return channel * (H * W) + (i * DH - PH) * W + (j * DW - PW), (one << i) | (one << (j + KH))


@triton.jit  # type: ignore[untyped-decorator]
def outside(  # type: ignore[no-untyped-def]
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
def leading(x):  # type: ignore[no-untyped-def]
    """The float32 numbers rounded to the 10 bits after the point that a tensor core reads.

    The sum may carry a NaN over into a zero; then the tail, the number less its head, still is NaN.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
