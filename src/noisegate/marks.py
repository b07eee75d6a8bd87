"""Which numbers of a table stand for examples that a worker holds, and a random number for each of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate.checks import count, refuse
from noisegate.entropy import Randomness, uniforms

DRAWN_AT_ONCE = 256
"""Workers whose uniforms exist at the same time. Part of what a seed means on a CUDA device: not to be changed."""


@dataclass(frozen=True, eq=False)
class Held:
    """What workers hold. marks: (n, longest) which numbers are those of examples. all: whether every one is."""

    marks: Tensor
    all: bool

    def among(self, drawn: list[Tensor]) -> Tensor:
        """(n, longest) what was drawn, block by block, of these examples."""
        marked = joined(drawn)
        return marked if self.all else marked.logical_and_(self.marks)


def held_by(sizes: Tensor) -> Held:
    """What workers with so many examples hold: (n,) int64."""
    longest = check_sizes(sizes)
    marks = torch.arange(longest, device=sizes.device) < sizes[:, None]
    return Held(marks, bool(marks.all()))


def uniform_blocks(held: Held, rng: Randomness) -> Iterator[tuple[slice, Tensor]]:
    """(which workers, a float64 uniform for each of their examples), a block of workers at a time."""
    n, longest = held.marks.shape
    for first in range(0, n, DRAWN_AT_ONCE):
        block = slice(first, min(first + DRAWN_AT_ONCE, n))
        shape = block.stop - first, longest
        yield block, uniforms(rng, shape, held.marks.device)


def below(uniform: Tensor, chance: float) -> Tensor:
    """Which of these numbers are below the chance."""
    return uniform < chance if uniform.is_cuda else torch.from_numpy(uniform.numpy() < chance)


def joined(blocks: list[Tensor]) -> Tensor:
    """All blocks as one."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def check_sizes(sizes: Tensor) -> int:
    """The largest size, after checking that they are sizes of at least 1."""
    if sizes.dim() != 1 or len(sizes) == 0 or sizes.dtype != torch.int64:
        shape = f"{tuple(sizes.shape)} {sizes.dtype}"
        raise refuse("sizes", shape, "must be one int64 number of examples for each worker, shape (n,), n >= 1")
    smallest, longest = torch.stack(torch.aminmax(sizes)).tolist()
    count(examples=smallest)
    return int(longest)
