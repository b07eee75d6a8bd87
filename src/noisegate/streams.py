"""Randomness by name. Nothing in noisegate draws from a global generator.

A stream is a generator that depends on (seed, name, round) alone, so a run that is resumed at round t draws exactly
what an uninterrupted run draws there, and two purposes never share numbers.

>>> import torch
>>> first, again = (torch.rand(2, generator=stream(1, "noise", 7)) for _ in range(2))
>>> bool((first == again).all()), bool((first == torch.rand(2, generator=stream(1, "noise", 8))).any())
(True, False)
"""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from noisegate.errors import NoisegateError

MT_WORDS = 624  # of 32 bits: the state of the Mersenne twister that torch uses on a CPU
MT_START = 3  # where they begin in torch's saved state, counted in 64-bit words; each takes one
MT_BYTES = 5056  # of that saved state


def stream(seed: int, name: str, round: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of `name` in `round` of the run with `seed`, on `device`."""
    generator = torch.Generator(device=device)
    rewind(generator, seed, name, round)
    return generator


def rewind(generator: torch.Generator, seed: int, name: str, round: int = 0) -> None:
    """Make `generator` what `stream` would give on its device."""
    text = f"{seed}/{name}/{round}".encode()
    if generator.device.type == "cpu":
        # On a CPU torch keeps 32 bits of a seed. So few would make two of a run's 1,500 noise streams the same with
        # probability 3e-4, as much as a delta. The whole state comes from the name instead.
        words = np.frombuffer(hashlib.shake_256(text).digest(4 * MT_WORDS), dtype="<u4").astype(np.int64)
        state = _fresh_state().clone()
        state.view(torch.int64)[MT_START : MT_START + MT_WORDS] = torch.from_numpy(words)
        generator.set_state(state)
    else:
        generator.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


@functools.cache
def _fresh_state() -> torch.Tensor:
    """The state of a CPU generator that has drawn nothing yet."""
    state = torch.Generator().manual_seed(0).get_state()
    if state.numel() != MT_BYTES:
        raise NoisegateError(f"torch {torch.__version__} keeps its CPU generator in another form; use another torch")
    return state


@contextmanager
def for_a_while(generator: torch.Generator) -> Iterator[None]:
    """Torch's global generator is where this one is, for others' code that draws from it; afterwards it is put back."""
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(generator.get_state())
        yield
