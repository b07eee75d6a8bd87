"""Everyone's weight in the update, and the reason of those that have none (twin: `Weights.of`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import weights as plain
from noisegate.aggregators.fortified.state import TINY as LEAST_SUM
from noisegate.aggregators.fortified.state import FortifiedState
from noisegate.views import Reason

TINY = tl.constexpr(LEAST_SUM)
LEAST_WEIGHT = tl.constexpr(plain.LEAST_WEIGHT)
MALFORMED, NORM, DISTRIBUTION, EVIDENCE, DEPENDENT, SCORE = (tl.constexpr(stage.value) for stage in plain.STAGES)
KEPT = tl.constexpr(Reason.KEPT.value)

MANY = 1024  # workers that are read at once


def weigh(
    prior: float,
    state: FortifiedState,
    score: Tensor,
    doubt: Tensor,
    repeats: Tensor,
    passed: Tensor,
    stages: list[Tensor],
) -> plain.Weights:
    """As `Weights.of`. prior: the logarithm of the prior odds. stages: (n,) bool each."""
    n = len(score)
    new = plain.Weights(
        weights=torch.empty_like(score),
        kept=torch.empty_like(passed),
        reason=torch.empty(n, dtype=torch.int64, device=score.device),
        score=torch.empty_like(score),
        largest_weights=torch.empty_like(state.largest_weights),
    )
    _weigh[(1,)](
        score,
        doubt,
        repeats,
        passed.view(torch.uint8),
        *(stage.view(torch.uint8) for stage in stages),
        state.largest_weights,
        new.weights,
        new.kept.view(torch.uint8),
        new.reason,
        new.score,
        new.largest_weights,
        n,
        prior,
        BLOCK=min(MANY, triton.next_power_of_2(n)),
        num_warps=4,
    )
    return new


@triton.jit
def _odds(row, score, doubt, repeats, passed, n, prior):
    """Of these workers; those that did not pass, or do not exist, have none."""
    counts = tl.load(passed + row, mask=row < n, other=0) != 0
    logit = tl.load(score + row, mask=counts, other=0.0) + prior
    against = tl.exp(-tl.load(doubt + row, mask=counts, other=0.0))
    small = tl.exp(-tl.abs(logit))  # never too large
    odds = tl.where(logit >= 0, 1.0, small) / (1.0 + small) * against
    odds = odds / (1.0 + tl.load(repeats + row, mask=counts, other=0.0))
    return counts, tl.where(counts, odds, 0.0)


@triton.jit(do_not_specialize=["n"])
def _weigh(
    score,
    doubt,
    repeats,
    passed,
    present,
    fits_length,
    passes_distribution,
    unrefuted,
    copies,
    largest_weights,
    weights,
    kept,
    reason,
    new_score,
    new_largest_weights,
    n,
    prior,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, repeats, passed, n, prior)
        largest = tl.maximum(largest, odds)
    most = tl.max(largest, 0)
    least = most * LEAST_WEIGHT
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, repeats, passed, n, prior)
        sums += tl.where(odds >= least, odds, 0.0)
    total = tl.maximum(tl.sum(sums, 0), TINY)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < n
        counts, odds = _odds(row, score, doubt, repeats, passed, n, prior)
        heavy = odds >= least
        tl.store(weights + row, tl.where(heavy, odds, 0.0) / total, mask=exists)
        tl.store(kept + row, (counts & heavy).to(tl.uint8), mask=exists)
        # The last stage first, so that the reason that stays is that of the first one that was not passed.
        why = tl.where(heavy, KEPT, SCORE)
        why = tl.where(tl.load(copies + row, mask=exists, other=1) == 0, why, DEPENDENT)
        why = tl.where(tl.load(unrefuted + row, mask=exists, other=0) != 0, why, EVIDENCE)
        why = tl.where(tl.load(passes_distribution + row, mask=exists, other=0) != 0, why, DISTRIBUTION)
        why = tl.where(tl.load(fits_length + row, mask=exists, other=0) != 0, why, NORM)
        why = tl.where(tl.load(present + row, mask=exists, other=0) != 0, why, MALFORMED)
        tl.store(reason + row, why.to(tl.int64), mask=exists)
        left = tl.load(score + row, mask=exists, other=0.0) - tl.load(doubt + row, mask=exists, other=0.0)
        tl.store(new_score + row, left, mask=exists)
    before = tl.load(largest_weights)
    tl.store(new_largest_weights, most / total)
    tl.store(new_largest_weights + 1, before)
