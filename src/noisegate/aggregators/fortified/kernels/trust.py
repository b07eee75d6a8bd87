"""The agreement of the best workers (twin: `trust.best_agreement`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import state as plain

TINY = tl.constexpr(plain.TINY)

MANY = 1024  # workers at most: one program reads all


def best_agreement(state: plain.FortifiedState, place: int) -> Tensor:
    """() the `place`-th largest agreement of up to MANY workers; 0 for those who are not unrefuted and counted."""
    found, n = state.agreement.new_empty(()), len(state.agreement)
    _best_agreement[(1,)](
        state.agreement,
        state.bias_correction,
        state.unrefuted.view(torch.uint8),
        state.counted.view(torch.uint8),
        found,
        n,
        place,
        BLOCK=max(16, triton.next_power_of_2(n)),
        num_warps=4,
    )
    return found


@triton.jit(do_not_specialize=["n", "place"])
def _best_agreement(agreement, bias_correction, unrefuted, counted, found, n, place, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    exists = row < n
    counts = tl.load(unrefuted + row, mask=exists, other=0) != 0
    counts = counts & (tl.load(counted + row, mask=exists, other=0) != 0)
    agrees = tl.load(agreement + row, mask=counts, other=0.0)
    agrees = agrees / tl.maximum(tl.load(bias_correction + row, mask=counts, other=1.0), TINY)
    ordered = tl.sort(tl.where(exists, agrees, float("-inf")), descending=True)
    tl.store(found, tl.max(tl.where(row == place - 1, ordered, float("-inf")), 0))
