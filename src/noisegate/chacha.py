"""ChaCha20 (Bernstein, 2008; RFC 8439), the block function alone, for devices on which nothing else is cryptographic.

This is the plain one, which runs wherever torch does. `kernels.noise` has its twin for CUDA devices. A word of 32 bits
is an int64 between 0 and 2^32, since torch has no unsigned arithmetic everywhere.
"""

import torch
from torch import Tensor

CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""The words "expand 32-byte k"."""

KEY_WORDS, DOUBLE_ROUNDS = 8, 10
MASK = 2**32 - 1


def words(key: Tensor, round: Tensor, purpose: int, call: int, blocks: int) -> Tensor:
    """(blocks, 16) words of 32 bits, in int64. key: (8,) int32. round: (1,) int32.

    The block number is the counter, and (call, round, purpose) is the nonce.
    """
    device = key.device
    counter = torch.arange(blocks, dtype=torch.int64, device=device)
    constants = torch.tensor(CONSTANTS, dtype=torch.int64, device=device)
    own, last = key.to(torch.int64) & MASK, torch.tensor([call, purpose], dtype=torch.int64, device=device)
    nonce = torch.cat([last[:1], round.to(torch.int64) & MASK, last[1:]])
    start = torch.cat([constants, own, torch.zeros(1, dtype=torch.int64, device=device), nonce])
    state = start[:, None].expand(16, blocks).clone()
    state[12] = counter
    return permuted(state).add_(state).bitwise_and_(MASK).T


def permuted(state: Tensor) -> Tensor:
    """(16, blocks): the 20 rounds, which are columns and diagonals in turn."""
    a, b, c, d = state.clone().view(4, 4, -1)
    for _ in range(DOUBLE_ROUNDS):
        a, b, c, d = _quarter(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _quarter(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d])


def _quarter(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four quarter rounds side by side."""
    a = (a + b) & MASK
    d = _rotated(d ^ a, 16)
    c = (c + d) & MASK
    b = _rotated(b ^ c, 12)
    a = (a + b) & MASK
    d = _rotated(d ^ a, 8)
    c = (c + d) & MASK
    b = _rotated(b ^ c, 7)
    return a, b, c, d


def _rotated(word: Tensor, left: int) -> Tensor:
    return ((word << left) | (word >> (32 - left))) & MASK
