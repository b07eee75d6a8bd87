"""Counting values between fixed edges, and comparing the counts with what is allowed, in three launches.

For ascending edges at[0] <= ... <= at[m - 1] the place of a value v is the number of edges <= v. The values of a row
below at[j] are those with a place <= j, so that their number is C(j) = counts[0] + ... + counts[j], if counts[q] is how
many have the place q. A row is outside if C(j) < least[j] or C(j) > most[j] for some j.

Places. The edges of the Kolmogorov-Smirnov test are where the mass p(v) of N(0, s^2) below v passes k/d - t
(k of 1 .. d) and where it exceeds k/d + t (k of 0 .. d - 1). So about

    min(floor(d (p(v) + t)), d) + max(ceil(d (p(v) - t)), 0)

edges are <= v. That is a guess: at d = 25,450 float32 takes it one place away, once in 600 values. The table decides:
place q is right exactly if at[q - 1] <= v < at[q]. A wrong one moves by one place, and what is then still wrong is
found by bisection. Hence the places are exact whatever the guess, and a good one only saves time.

Counts. No count and no sum of counts of one row exceeds d. If d < 2^16, one int32 word holds two of them: word w those
of the places w and words + w. Adding words adds both, never with a carry from one to the other, and one cumulative
sum over the words is two. That halves the memory to clear, to count in and to read.

Sums. A row's words are cut into up to 16 parts, which different programs compare. What lies before a part they know
from 32 further counts of the row, of the values in each part and half, which are kept along with the others.

All sums are of integers, so the order in which they are added atomically does not show in the result. Nothing waits
for the device and no shape depends on a value: fit for a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PACKED_LIMIT = 2**16  # values of a row, from which on two counts no longer fit into one word
PARTS = 16  # parts of a row; twice as many counts are one for each thread of a warp
LEAST_PART = 512  # words of a part: in fewer, the threads of a program would have nothing to do
VALUES = 1024  # values to a program that finds places: four to a thread, which leaves room for as many as fit
ROWS, WORDS = 2, 2048  # what a program compares at once: rows that share the limits they are compared with, and words
WARPS = 8
LARGEST = 3.0e38  # factors beyond what float32 holds would only spoil the guess


class Guess(NamedTuple):
    """Where the edges are about: of the noise's standard deviation s and the test's threshold t, (1 / s, t)."""

    inv_std: float
    threshold: float


class Layout(NamedTuple):
    """How the counts of a row lie in memory: so many int32 words of counts, then 2 * PARTS counts of its parts.

    part: the words of one part, a power of two.
    packed: whether a word holds two counts.
    """

    words: int
    part: int
    packed: bool

    @property
    def stride(self) -> int:
        return self.words + 2 * PARTS

    @classmethod
    def of(cls, d: int, m: int) -> Layout:
        """For rows of d values and m edges. Words come in multiples of 32, which keeps rows and halves aligned."""
        packed = d < PACKED_LIMIT
        words = triton.cdiv(triton.cdiv(m + 1, 2) if packed else m + 1, 32) * 32
        return cls(words, max(LEAST_PART, triton.next_power_of_2(triton.cdiv(words, PARTS))), packed)


def scratch_bytes(d: int) -> int:
    """What `any_outside` takes for one row of d values and 2 d edges: about 4 d bytes, or 8 d if d is 2^16 or more."""
    return 4 * Layout.of(d, 2 * d).stride


def any_outside(values: Tensor, at: Tensor, least: Tensor, most: Tensor, guess: Guess) -> Tensor:
    """(n,) whether for any j the number of a row's values below at[j] is not in [least[j], most[j]]. Exact.

    values: (n, d) float32, contiguous, no NaN. at: (m,) float32, ascending; edges may be equal or infinite.
    least, most: int32, of which the first m are read. Everything on one CUDA device.
    guess: where the edges are about. It decides how long this takes, never the answer.
    """
    (n, d), m = values.shape, len(at)
    if d == 0 or m == 0:
        raise ValueError(f"values are {tuple(values.shape)} and edges {m}; there is nothing to count")
    if not values.is_contiguous():
        raise ValueError("values are not contiguous")
    layout = Layout.of(d, m)
    counts = torch.zeros(n, layout.stride, dtype=torch.int32, device=values.device)
    outside = torch.empty(n, dtype=torch.uint8, device=values.device)
    if n == 0:
        return outside.view(torch.bool)
    pieces, parts = triton.cdiv(d, VALUES), triton.cdiv(layout.words, layout.part)
    _count_kernel[(n * pieces,)](
        values,
        at,
        counts,
        outside,
        min(guess.inv_std, LARGEST),
        guess.threshold,
        float(d),
        d,
        m,
        pieces,
        layout.words,
        layout.stride,
        PART=layout.part,
        PARTS=PARTS,
        VALUES=VALUES,
        STEPS=m.bit_length(),
        num_warps=WARPS,
    )
    _compare_kernel[(triton.cdiv(n, ROWS) * parts,)](
        counts,
        least,
        most,
        outside,
        n,
        m,
        parts,
        layout.words,
        layout.stride,
        PACKED=layout.packed,
        PART=layout.part,
        PARTS=PARTS,
        ROWS=ROWS,
        WORDS=min(WORDS, layout.part),
        num_warps=WARPS,
    )
    return outside.view(torch.bool)


@triton.jit  # type: ignore[untyped-decorator]
def _guessed_place(v, inv_std, threshold, size, m):  # type: ignore[no-untyped-def]
    """About the number of edges <= v, in 0 .. m."""
    mass = 0.5 + 0.5 * tl.erf(v * inv_std * 0.7071067811865476)
    # Brought to 0 .. size as floats, since one that is too large has no integer.
    ends = tl.minimum(tl.maximum(tl.floor(size * (mass + threshold)), 0.0), size)
    starts = tl.minimum(tl.maximum(tl.ceil(size * (mass - threshold)), 0.0), size)
    return tl.minimum(tl.maximum(ends.to(tl.int32) + starts.to(tl.int32), 0), m)


@triton.jit  # type: ignore[untyped-decorator]
def _corrected(v, place, wrong, at, m):  # type: ignore[no-untyped-def]
    """The places after one step of those that may be wrong, and which of them still may: those that moved."""
    has_right = wrong & (place < m)
    has_left = wrong & (place > 0)
    right = tl.load(at + place, mask=has_right, other=0.0)
    left = tl.load(at + place - 1, mask=has_left, other=0.0)
    up = has_right & (v >= right)
    down = has_left & (v < left)
    return place + up.to(tl.int32) - down.to(tl.int32), up | down


@triton.jit  # type: ignore[untyped-decorator]
def _bisected(v, place, wrong, at, m, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places, with those that are wrong found anew, by so many steps as m + 1 places take."""
    low = tl.where(wrong, 0, place)
    high = tl.where(wrong, m, place)
    for _ in range(STEPS):
        searched = low < high
        middle = (low + high) >> 1
        edge = tl.load(at + middle, mask=searched, other=0.0)
        low = tl.where(searched & (v >= edge), middle + 1, low)
        high = tl.where(searched & (v < edge), middle, high)
    return low


@triton.jit(do_not_specialize=["d", "m", "pieces"])  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    values,
    at,
    counts,
    outside,
    inv_std,
    threshold,
    size,  # d, as a float
    d,
    m,
    pieces,  # programs to a row
    words,
    stride,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    STEPS: tl.constexpr,  # of a bisection among m + 1 places
):
    """Count the values of one piece of a row at their places."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    columns = piece * VALUES + tl.arange(0, VALUES)
    live = columns < d
    v = tl.load(values + row * d + columns, mask=live, other=0.0)

    place = _guessed_place(v, inv_std, threshold, size, m)
    place, wrong = _corrected(v, place, live, at, m)
    place, wrong = _corrected(v, place, wrong, at, m)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        place = _bisected(v, place, wrong, at, m, STEPS)

    upper = place >= words  # never, if a word holds one count
    word = tl.where(upper, place - words, place)
    here = counts + row * stride
    tl.atomic_add(here + word, tl.where(upper, 65536, 1), mask=live, sem="relaxed")
    part = (word.to(tl.uint32) // PART).to(tl.int32)  # without a sign, which makes it a shift
    in_parts = tl.histogram(part + tl.where(upper, PARTS, 0), 2 * PARTS, mask=live)
    tl.atomic_add(here + words + tl.arange(0, 2 * PARTS), in_parts, mask=in_parts > 0, sem="relaxed")
    # The kernel that compares only ever writes 1: here is where a row begins as not outside.
    tl.store(outside + row, 0, mask=piece == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _not_allowed(below, least, most, j, exists):  # type: ignore[no-untyped-def]
    """(rows, words) whether the counts below the edges j are not allowed. Anything is, where there is no edge."""
    low = tl.load(least + j, mask=exists, other=0)
    high = tl.load(most + j, mask=exists, other=0x7FFFFFFF)
    return (below < low[None, :]) | (below > high[None, :])


@triton.jit(do_not_specialize=["n", "m", "parts"])  # type: ignore[untyped-decorator]
def _compare_kernel(  # type: ignore[no-untyped-def]
    counts,
    least,
    most,
    outside,
    n,
    m,
    parts,  # of a row that are not empty
    words,
    stride,
    PACKED: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Mark those of a few rows that are outside in one part."""
    part = tl.program_id(0) % parts
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    live = row < n
    here = counts + row.to(tl.int64) * stride

    which = tl.arange(0, 2 * PARTS)[None, :]
    in_parts = tl.load(here[:, None] + words + which, mask=live[:, None] & (which < 2 * PARTS), other=0)
    before = tl.sum(tl.where(which < part, in_parts, 0), 1)
    before_upper = tl.sum(tl.where(which < PARTS + part, in_parts, 0), 1)

    found = tl.zeros((ROWS, WORDS), dtype=tl.int1)
    for start in range(0, PART, WORDS):
        word = part * PART + start + tl.arange(0, WORDS)
        inside = word < words
        counted = tl.load(here[:, None] + word[None, :], mask=live[:, None] & inside[None, :], other=0)
        sums = tl.cumsum(counted, 1)
        total = tl.sum(counted, 1)
        if PACKED:
            below = before[:, None] + (sums & 0xFFFF)
            found |= _not_allowed(below, least, most, word, inside & (word < m))
            below = before_upper[:, None] + ((sums >> 16) & 0xFFFF)
            found |= _not_allowed(below, least, most, words + word, inside & (words + word < m))
            before += total & 0xFFFF
            before_upper += (total >> 16) & 0xFFFF
        else:
            found |= _not_allowed(before[:, None] + sums, least, most, word, inside & (word < m))
            before += total
    marked = tl.max(found.to(tl.int32), 1) > 0
    # Programs of the same row may meet here, but all of them write the same.
    tl.store(outside + row, tl.full((ROWS,), 1, dtype=tl.uint8), mask=live & marked)
