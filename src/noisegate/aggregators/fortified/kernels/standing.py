"""Evidence, trust and offsets after a round (twin: `WorkerStanding.of`). A program judges one worker."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from noisegate.aggregators.fortified import doubt, evidence, expectation, moments, state, trust
from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.standing import WorkerStanding

UPDATE_SPEED_0, UPDATE_SPEED_1, UPDATE_SPEED_2 = (tl.constexpr(speed) for speed in state.UPDATE_SPEEDS)
OWN_SPEED = tl.constexpr(state.OWN_SPEED)
COMMON = tl.constexpr(state.COMMON)
PROBES = tl.constexpr(state.PROBES)
TINY = tl.constexpr(state.TINY)
LEAST_LENGTH = tl.constexpr(moments.LEAST_LENGTH)
GRADIENT_SKEW = tl.constexpr(expectation.GRADIENT_SKEW)
SHIFT_0, SHIFT_1, SHIFT_2, SHIFT_3, SHIFT_4 = (tl.constexpr(shift) for shift in evidence.SHIFTS)
SHIFTS = tl.constexpr(len(evidence.SHIFTS))
LARGEST_DISTANCE = tl.constexpr(evidence.LARGEST_DISTANCE)
MOST_EVIDENCE = tl.constexpr(evidence.MOST_EVIDENCE)
CAUTION = tl.constexpr(trust.CAUTION)
LUCK = tl.constexpr(trust.LUCK)
MOST_TRUST = tl.constexpr(trust.MOST_TRUST)
AGREEMENT_SPEED = tl.constexpr(trust.AGREEMENT_SPEED)
OFFSET_SPEED = tl.constexpr(doubt.OFFSET_SPEED)
BOUNDS = tl.constexpr(triton.next_power_of_2(2 * state.PROBES))
COLUMNS = tl.constexpr(triton.next_power_of_2(len(evidence.SHIFTS)))


def stand(
    known: state.FortifiedState,
    projections: Projections,
    best: Tensor,
    counts: Tensor,
    noise_std: float,
    examples: int,
    evidence_limit: float,
) -> WorkerStanding:
    """As `WorkerStanding.of`. best: () as `trust.best_agreement` has it. counts: (n,) bool."""
    new = WorkerStanding(
        evidence=torch.empty_like(known.evidence),
        unrefuted=torch.empty_like(counts),
        candidates=torch.empty_like(counts),
        trust=torch.empty_like(known.trust),
        score=torch.empty_like(known.trust),
        agreement=torch.empty_like(known.agreement),
        offsets=torch.empty_like(known.offsets),
    )
    _stand[(len(counts),)](
        projections.of_uploads,
        *projections.moments,
        projections.lengths,
        projections.own_lengths,
        projections.momentum.echo,
        projections.agreement,
        best,
        counts.view(torch.uint8),
        known.evidence,
        known.trust,
        known.agreement,
        known.offsets,
        known.largest_weights,
        new.evidence,
        new.unrefuted.view(torch.uint8),
        new.candidates.view(torch.uint8),
        new.trust,
        new.score,
        new.agreement,
        new.offsets,
        float(noise_std * expectation.HARMLESS_SHIFT),
        moments.STANDARD_ERRORS / math.sqrt(examples),
        evidence_limit,
        num_warps=1,
    )
    return new


@triton.jit
def _update_speeds(k):
    """The speed of the moving average of updates that is direction k; 0 for other directions."""
    speed = tl.where(k == 1, UPDATE_SPEED_0, 0.0)
    speed = tl.where(k == 2, UPDATE_SPEED_1, speed)
    return tl.where(k == 3, UPDATE_SPEED_2, speed)


@triton.jit
def _shifts(column):
    shift = tl.where(column == 0, SHIFT_0, 0.0)
    shift = tl.where(column == 1, SHIFT_1, shift)
    shift = tl.where(column == 2, SHIFT_2, shift)
    shift = tl.where(column == 3, SHIFT_3, shift)
    return tl.where(column == 4, SHIFT_4, shift)


@triton.jit
def _outside(
    row, bound, along, mean, spread, variance, lengths, own_lengths, echo, largest_weights, harmless, standard_errors
):
    """How many standard deviations a worker lies beyond every bound: first all the upper ones, then all lower ones."""
    k = bound % PROBES
    is_own = k == COMMON
    probe = tl.where(is_own, row + COMMON, k)
    lies = tl.load(along + row * PROBES + k)
    middle = tl.load(mean + probe)
    width = tl.load(spread + probe)
    squared = tl.load(variance + probe)
    echoed = tl.load(echo)
    weight = tl.maximum(tl.load(largest_weights), tl.load(largest_weights + 1))
    is_update = (k > 0) & (k < COMMON - 1)
    length = tl.maximum(tl.load(lengths + k, mask=is_update, other=1.0), TINY)
    of_own = echoed * OWN_SPEED / tl.load(own_lengths + row)
    further = tl.where(is_update, tl.minimum(weight * echoed * _update_speeds(k) / length, 1.0), 0.0)
    further = tl.where(is_own, tl.minimum(of_own, 1.0), further)
    error = width * standard_errors
    slack = width * GRADIENT_SKEW + harmless
    is_gradient = k == 0
    high = middle + error + tl.where(is_gradient, slack, harmless + further)
    low = tl.where(
        is_gradient, -(error * error / tl.maximum(middle, LEAST_LENGTH)) / 4 - slack, middle - error - harmless
    )
    outside = tl.where(bound < PROBES, lies - high, low - lies) / tl.sqrt(squared)
    outside = tl.where(outside != outside, LARGEST_DISTANCE, outside)
    return tl.minimum(tl.maximum(outside, -LARGEST_DISTANCE), LARGEST_DISTANCE)


@triton.jit
def _stand(
    along,
    mean,
    spread,
    variance,
    lengths,
    own_lengths,
    echo,
    agreement_of_examples,
    best,
    counts,
    evidence,
    trust,
    agreement,
    offsets,
    largest_weights,
    new_evidence,
    new_unrefuted,
    new_candidates,
    new_trust,
    new_score,
    new_agreement,
    new_offsets,
    harmless,
    standard_errors,  # over the root of the number of examples
    evidence_limit,
):
    row = tl.program_id(0)
    says = tl.load(counts + row) != 0

    # The evidence.
    bound = tl.arange(0, BOUNDS)
    column = tl.arange(0, COLUMNS)
    outside = _outside(
        row,
        bound,
        along,
        mean,
        spread,
        variance,
        lengths,
        own_lengths,
        echo,
        largest_weights,
        harmless,
        standard_errors,
    )
    here = (bound < 2 * PROBES)[:, None] & (column[None, :] < SHIFTS)
    place = row.to(tl.int64) * (2 * PROBES * SHIFTS) + bound[:, None] * SHIFTS + column[None, :]
    shift = _shifts(column)[None, :]
    before = tl.load(evidence + place, mask=here, other=0.0)
    after = tl.where(says, tl.maximum(before + (outside[:, None] * shift - shift * shift / 2), 0.0), before)
    tl.store(new_evidence + place, after, mask=here)
    is_unrefuted = tl.max(tl.max(tl.where(here, after, 0.0), 1), 0) <= evidence_limit
    ratios = tl.where(here, tl.exp(tl.minimum(after, MOST_EVIDENCE)), 0.0)
    against = tl.log(tl.sum(tl.sum(ratios, 1), 0) / (2 * PROBES * SHIFTS))
    tl.store(new_unrefuted + row, is_unrefuted.to(tl.uint8))
    tl.store(new_candidates + row, (is_unrefuted & says).to(tl.uint8))

    # The trust.
    expected = tl.minimum(tl.load(agreement_of_examples), tl.maximum(tl.load(best), 0.0))
    of_noise = tl.load(variance)
    looked_for = expected * CAUTION
    lies = tl.load(along + row * PROBES)
    agrees = tl.minimum(lies, expected + tl.sqrt(of_noise) * LUCK)
    trusted = tl.load(trust + row)
    tl.store(new_score + row, trusted - against)
    earned = trusted + looked_for / of_noise * (agrees - looked_for / 2)
    trusted = tl.where(says, tl.minimum(tl.maximum(earned, -MOST_TRUST), MOST_TRUST), trusted)
    tl.store(new_trust + row, trusted)
    average = tl.load(agreement + row)
    tl.store(new_agreement + row, tl.where(says, average + (lies - average) * AGREEMENT_SPEED, average))

    # The offsets, along all common directions but the gradient.
    has_offset = (bound > 0) & (bound < COMMON)
    place = row * (COMMON - 1) + bound - 1
    was = tl.load(offsets + place, mask=has_offset, other=0.0)
    found = tl.load(along + row * PROBES + bound, mask=has_offset, other=0.0)
    now = found - tl.load(mean + bound, mask=has_offset, other=0.0) - was
    tl.store(new_offsets + place, tl.where(says, was + now * OFFSET_SPEED, was), mask=has_offset)
