"""What the aggregator `fortified` remembers from round to round."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.evidence import SIZES
from noisegate.errors import StoreError
from noisegate.views import ServerView, State

SPEEDS = (0.3, 0.05, 0.01)
"""Of the moving averages of past updates: over some 3, 20 and 100 rounds."""

OWN_SPEED = 0.02
"""Of the moving average of a worker's own past uploads: over some 50 rounds."""

COMMON = 1 + len(SPEEDS) + 1
"""Probes that are the same for all: the server's gradient, the moving averages, and the rift between workers."""

PROBES = COMMON + 1
"""These and a worker's own past."""

TINY = 1e-30
"""Stands in for a length of zero."""


class Known(NamedTuple):
    """What the aggregator remembers of past rounds.

    evidence: (n, bounds, sizes) against each worker. trust: (n,) in each. agreed: (n,) moving averages of how far each
    lies along the server's gradient, which began at nothing; aged: () what such an average of ones would be by now.
    off: (n, COMMON - 1) moving averages of how far each lies off the server's examples. ways: (SPEEDS, d) moving
    averages of the updates, up to the last but one; step: (d,) the last. heaviest: (2,) the largest weight of an upload
    in the last update and the one before. past: (n, d) moving averages of each worker's own uploads up to the last but
    one, in units of about the noise and in half precision, which is more than enough for something that is mostly
    noise. rift: (1, d) the direction in which the pasts of those who are not suspected differ most, as far as found.
    counted: (n,) whose last upload passed the first tests, and may become part of its past. clear: (n,) against whom
    there was no more evidence than is allowed.
    """

    evidence: Tensor
    trust: Tensor
    agreed: Tensor
    aged: Tensor
    off: Tensor
    ways: Tensor
    step: Tensor
    heaviest: Tensor
    past: Tensor
    rift: Tensor
    counted: Tensor
    clear: Tensor

    @classmethod
    def of(cls, state: State, view: ServerView) -> "Known":
        """From the aggregator's state; nothing at all before the first round."""
        if state:
            if state.keys() != set(cls._fields):
                raise StoreError("aggregator 'fortified': its state is that of another version; start the run anew")
            return cls(**{name: state[name] for name in cls._fields})
        n, d = view.uploads.shape
        new = view.uploads.new_zeros
        nobody = torch.zeros_like(view.present)
        return cls(
            evidence=new(n, 2 * PROBES, len(SIZES)),
            trust=new(n),
            agreed=new(n),
            aged=new(()),
            off=new(n, COMMON - 1),
            ways=new(len(SPEEDS), d),
            step=new(d),
            heaviest=new(2),
            past=new(n, d, dtype=torch.float16),
            rift=new(1, d),
            counted=nobody,
            clear=nobody,
        )


def speeds(like: Tensor) -> Tensor:
    return _speeds_on(like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _speeds_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(SPEEDS, 1)"""
    return torch.tensor(SPEEDS, dtype=dtype, device=device)[:, None]
