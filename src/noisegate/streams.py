"""Randomness by name. Nothing in noisegate draws from a global generator.

A stream is a generator that depends on (seed, name, round) alone, so a run that is resumed at round t draws exactly
what an uninterrupted run draws there, and two purposes never share numbers.

>>> import torch
>>> first, again = (torch.rand(2, generator=stream(1, "noise", 7)) for _ in range(2))
>>> bool((first == again).all()), bool((first == torch.rand(2, generator=stream(1, "noise", 8))).any())
(True, False)
"""

import hashlib

import torch


def stream(seed: int, name: str, round: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of `name` in `round` of the run with `seed`, on `device`."""
    digest = hashlib.blake2b(f"{seed}/{name}/{round}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    return generator
