"""Secret bits, and noise rounded to a public grid, by ChaCha20 in one launch each (Triton).

The plain twins are `chacha.words` and what `entropy.Source` makes of it. A program works on some blocks of 16 words;
number i of a sum takes value i // blocks of block i % blocks, so that neighbors in memory are neighbors in a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 128
"""Blocks of ChaCha20 to a program: one to a thread."""

Stream = tuple[Tensor, Tensor, int, int]


def bits(count: int, stream: Stream) -> Tensor:
    """(count,) int64: random bits."""
    key, round, purpose, call = stream
    blocks = triton.cdiv(max(1, count), 8)
    out = torch.empty(8 * blocks, dtype=torch.int64, device=key.device)
    _bits[(triton.cdiv(blocks, BLOCKS),)](out, key, round, purpose, call, blocks, BLOCKS=BLOCKS, num_warps=4)
    return out[:count]


def add_noise(flat: Tensor, constants: Tensor, stream: Stream) -> None:
    """flat = the multiple of the grid nearest to flat + noise, in place.

    constants: (4,) float64, noise over grid, pi / 2^64, 1 / grid, grid: as a tensor, since a launch would take Python's
    numbers as float32.
    """
    key, round, purpose, call = stream
    blocks = triton.cdiv(flat.numel(), 8)
    grid = (triton.cdiv(blocks, BLOCKS),)
    if blocks:
        sizes = flat.numel(), blocks
        _add_noise[grid](flat, constants, key, round, purpose, call, *sizes, BLOCKS=BLOCKS, num_warps=4)


@triton.jit
def _rotated(word, left: tl.constexpr):
    return (word << left) | (word >> (32 - left))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _block(key, round, purpose, call, block):
    """The 16 words of every block, as uint32."""
    zero = block.to(tl.uint32) * 0
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4 = zero + tl.load(key).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    s12 = block.to(tl.uint32)
    s13 = zero + call
    s14 = zero + tl.load(round).to(tl.uint32, bitcast=True)
    s15 = zero + purpose
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7,
        x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + s12, x13 + s13, x14 + s14, x15 + s15,
    )  # fmt: skip


@triton.jit
def _joined(low, high):
    """Two words as one int64."""
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def _bits(out, key, round, purpose, call, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _block(key, round, purpose, call, block)
    inside, place = block < blocks, out + block.to(tl.int64)
    step = block.to(tl.int64) * 0 + blocks  # in 64 bits, since a whole part may be longer than 2^32
    tl.store(place, _joined(w0, w1), mask=inside)
    tl.store(place + step, _joined(w2, w3), mask=inside)
    tl.store(place + 2 * step, _joined(w4, w5), mask=inside)
    tl.store(place + 3 * step, _joined(w6, w7), mask=inside)
    tl.store(place + 4 * step, _joined(w8, w9), mask=inside)
    tl.store(place + 5 * step, _joined(w10, w11), mask=inside)
    tl.store(place + 6 * step, _joined(w12, w13), mask=inside)
    tl.store(place + 7 * step, _joined(w14, w15), mask=inside)


@triton.jit
def _pair(flat, first, size, step, radius, angle, constants):
    """Add a pair of normal numbers at `first` and four times `step` behind it, and round both."""
    uniform = (tl.abs(radius.to(tl.float64)) + 0.5) * 1.0842021724855044e-19  # 2^-63, which float32 holds
    length = tl.load(constants) * tl.sqrt(-2.0 * tl.log(uniform)) * tl.where(radius < 0, -1.0, 1.0)
    turn = angle.to(tl.float64) * tl.load(constants + 1)
    _rounded(flat, first, size, length * tl.sin(turn), constants)
    _rounded(flat, first + 4 * step, size, length * tl.cos(turn), constants)


@triton.jit
def _rounded(flat, place, size, noise, constants):
    inside = place < size
    value = tl.load(flat + place, mask=inside, other=0.0).to(tl.float64) * tl.load(constants + 2)
    nearest = tl.floor(value + noise + 0.5) * tl.load(constants + 3)
    tl.store(flat + place, nearest.to(tl.float32), mask=inside)


@triton.jit
def _add_noise(flat, constants, key, round, purpose, call, size, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _block(key, round, purpose, call, block)
    step = block.to(tl.int64) * 0 + blocks  # in 64 bits, since a whole part may be longer than 2^32
    place = tl.where(block < blocks, block.to(tl.int64), step * 0 + size)
    _pair(flat, place, size, step, _joined(w0, w1), _joined(w2, w3), constants)
    _pair(flat, place + step, size, step, _joined(w4, w5), _joined(w6, w7), constants)
    _pair(flat, place + 2 * step, size, step, _joined(w8, w9), _joined(w10, w11), constants)
    _pair(flat, place + 3 * step, size, step, _joined(w12, w13), _joined(w14, w15), constants)
