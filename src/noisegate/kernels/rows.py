"""Rows of a large matrix that are changed or left alone, as the device decides (Triton).

The plain twins, `masked_fill_` and `torch.where`, read and write every row either way. These touch a row only if it has
to change, which for the first is almost never.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Numbers to a program."""


def clear_rows(rows: Tensor, absent: Tensor) -> None:
    """Zeros in the rows of (n, d) that `absent` (n,) bool marks, in place."""
    n, d = rows.shape
    if n and d:
        pieces = triton.cdiv(d, BLOCK)
        _clear[(n * pieces,)](rows, absent.view(torch.uint8), d, pieces, rows.stride(0), BLOCK=BLOCK, num_warps=4)


def copy_if(going: Tensor, value: Tensor, into: Tensor) -> None:
    """into = value if `going` (() bool) holds; both contiguous, of one shape and float32."""
    if value.numel():
        grid = (triton.cdiv(value.numel(), BLOCK),)
        _copy_if[grid](going.view(torch.uint8), value, into, value.numel(), BLOCK=BLOCK, num_warps=4)


@triton.jit
def _clear(rows, absent, size, pieces, stride, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = program // pieces
    if tl.load(absent + row) != 0:
        column = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
        tl.store(rows + row.to(tl.int64) * stride + column, tl.zeros([BLOCK], tl.float32), mask=column < size)


@triton.jit
def _copy_if(going, value, into, size, BLOCK: tl.constexpr):
    if tl.load(going) != 0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(into + place, tl.load(value + place, mask=place < size), mask=place < size)
