"""What the rule `fortified` makes of where uploads lie (twins: `aggregators.fortified` and what it calls).

A program judges one worker, or all of them for what is the largest or the sum. `probing` says where they lie.

Nothing is added atomically, so a rerun gives the same bytes. Nothing waits for the device and no shape depends on a
value: fit for a CUDA graph. All tensors are contiguous, float32 unless stated, and on one device. Rows come in the
order in which they are named; bool tensors are read and written as bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY = 1024  # workers that are read at once where one program reads all


def alone(norms: Tensor, present: Tensor, rejected: Tensor | None, low: float, high: float) -> tuple[Tensor, ...]:
    """(n,) bool each: whether the length is in [low, high], the distribution is not rejected, and all of it counts."""
    n, block = len(norms), 256
    fits, like, counts = (torch.empty_like(present) for _ in range(3))
    _alone[(triton.cdiv(n, block),)](
        norms,
        present.view(torch.uint8),
        (present if rejected is None else rejected).view(torch.uint8),
        fits.view(torch.uint8),
        like.view(torch.uint8),
        counts.view(torch.uint8),
        n,
        low,
        high,
        TESTED=rejected is not None,
        BLOCK=block,
        num_warps=4,
    )
    return fits, like, counts


@triton.jit(do_not_specialize=["n"])
def _alone(norms, present, rejected, fits, like, counts, n, low, high, TESTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = row < n
    norm = tl.load(norms + row, mask=known, other=0.0)
    here = tl.load(present + row, mask=known, other=0) != 0
    right = (norm >= low) & (norm <= high)
    noise = here
    if TESTED:
        noise = tl.load(rejected + row, mask=known, other=1) == 0
    tl.store(fits + row, right.to(tl.uint8), mask=known)
    tl.store(like + row, noise.to(tl.uint8), mask=known)
    tl.store(counts + row, (here & right & noise).to(tl.uint8), mask=known)


def best(agreed: Tensor, clear: Tensor, counted: Tensor, place: int) -> Tensor:
    """() the `place`-th largest of what up to MANY workers agreed; nothing of who is not both `clear` and `counted`."""
    found = agreed.new_empty(())
    n = len(agreed)
    given = (agreed, clear.view(torch.uint8), counted.view(torch.uint8), found, n, place)
    _best[(1,)](*given, BLOCK=max(16, triton.next_power_of_2(n)), num_warps=4)
    return found


@triton.jit(do_not_specialize=["n", "place"])
def _best(agreed, clear, counted, found, n, place, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    known = row < n
    counts = (tl.load(clear + row, mask=known, other=0) != 0) & (tl.load(counted + row, mask=known, other=0) != 0)
    agrees = tl.load(agreed + row, mask=counts, other=0.0)
    ordered = tl.sort(tl.where(known, agrees, float("-inf")), descending=True)
    tl.store(found, tl.max(tl.where(row == place - 1, ordered, float("-inf")), 0))


class Limits(NamedTuple):
    """Constants of `probes`, `evidence`, `doubts`, `known` and `judged`; speeds and sizes: (ways,) and (sizes,) on the
    device."""

    speeds: Tensor
    sizes: Tensor
    own_speed: float
    certainty: float
    skew: float
    harmless: float
    least_length: float
    tiny: float
    farthest: float
    plenty: float
    caution: float
    lucky: float
    most_trust: float
    agreed_speed: float
    off_speed: float


class Seen(NamedTuple):
    """What of `Found` is judged by."""

    found: Tensor
    mean: Tensor
    spread: Tensor
    variance: Tensor
    lengths: Tensor
    past_lengths: Tensor
    echo: Tensor
    hoped: Tensor


class Before(NamedTuple):
    """What was known: evidence, trust, agreed and off as in `Judged`. aged, best: (). heaviest: (2,)."""

    evidence: Tensor
    trust: Tensor
    agreed: Tensor
    aged: Tensor
    best: Tensor
    off: Tensor
    heaviest: Tensor


class Judged(NamedTuple):
    """evidence: (n, 2 (C + 1), sizes). clear, among: (n,) bool. trust, score, agreed: (n,). off: (n, C - 1)."""

    evidence: Tensor
    clear: Tensor
    among: Tensor
    trust: Tensor
    score: Tensor
    agreed: Tensor
    off: Tensor


def judged(
    seen: Seen, before: Before, counts: Tensor, noise_std: float, count: int, most: float, limits: Limits
) -> Judged:
    """What is known after a round, one worker to a program.

    counts: (n,) bool, whose upload says anything. count: A, examples of the server. most: evidence that is allowed.
    """
    n, bounds, sizes = before.evidence.shape
    new = Judged(
        evidence=torch.empty_like(before.evidence),
        clear=torch.empty_like(counts),
        among=torch.empty_like(counts),
        trust=torch.empty_like(before.trust),
        score=torch.empty_like(before.trust),
        agreed=torch.empty_like(before.agreed),
        off=torch.empty_like(before.off),
    )
    _judge[(n,)](
        *seen,
        before.heaviest,
        counts.view(torch.uint8),
        before.evidence,
        before.trust,
        before.agreed,
        before.aged,
        before.best,
        before.off,
        limits.speeds.view(-1),  # a kernel of our own is not seen by who notes what a graph reads; making a view is
        limits.sizes.view(-1),
        new.evidence,
        new.clear.view(torch.uint8),
        new.among.view(torch.uint8),
        new.trust,
        new.score,
        new.agreed,
        new.off,
        float(noise_std * limits.harmless),
        limits.certainty / math.sqrt(count),
        most,
        limits.caution,
        OWN_SPEED=limits.own_speed,
        SKEW=limits.skew,
        LEAST_LENGTH=limits.least_length,
        TINY=limits.tiny,
        FARTHEST=limits.farthest,
        PLENTY=limits.plenty,
        LUCKY=limits.lucky,
        MOST_TRUST=limits.most_trust,
        AGREED_SPEED=limits.agreed_speed,
        OFF_SPEED=limits.off_speed,
        PROBES=bounds // 2,
        SIZES=sizes,
        BOUNDS=triton.next_power_of_2(bounds),
        COLUMNS=triton.next_power_of_2(sizes),
        num_warps=1,
    )
    return new


@triton.jit
def _judge(
    found,
    mean,
    spread,
    variance,
    lengths,
    past_lengths,
    echo,
    hoped,
    heaviest,
    counts,
    evidence,
    trust,
    agreed,
    aged,
    best,
    off,
    speeds,
    sizes,
    new_evidence,
    new_clear,
    new_among,
    new_trust,
    new_score,
    new_agreed,
    new_off,
    harmless,
    errors,  # standard errors, over the root of A
    most,
    caution,
    OWN_SPEED: tl.constexpr,
    SKEW: tl.constexpr,
    LEAST_LENGTH: tl.constexpr,
    TINY: tl.constexpr,
    FARTHEST: tl.constexpr,
    PLENTY: tl.constexpr,
    LUCKY: tl.constexpr,
    MOST_TRUST: tl.constexpr,
    AGREED_SPEED: tl.constexpr,
    OFF_SPEED: tl.constexpr,
    PROBES: tl.constexpr,
    SIZES: tl.constexpr,
    BOUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    COMMON: tl.constexpr = PROBES - 1
    row = tl.program_id(0)
    says = tl.load(counts + row) != 0

    # Where it is expected along every probe: first all upper bounds, then all lower ones.
    bound = tl.arange(0, BOUNDS)
    real = bound < 2 * PROBES
    k = bound % PROBES
    is_past = k == COMMON
    probe = tl.where(is_past, COMMON + row, k)
    lies = tl.load(found + row * PROBES + k)
    middle = tl.load(mean + probe)
    width = tl.load(spread + probe)
    squared = tl.load(variance + probe)
    leaned = tl.load(echo)
    heavy = tl.maximum(tl.load(heaviest), tl.load(heaviest + 1))
    is_way = (k > 0) & (k < COMMON - 1)
    speed = tl.load(speeds + k - 1, mask=is_way, other=0.0)
    length = tl.maximum(tl.load(lengths + k, mask=is_way, other=1.0), TINY)
    of_past = OWN_SPEED * leaned / tl.load(past_lengths + row)
    lean = tl.where(is_way, tl.minimum(heavy * leaned * speed / length, 1.0), 0.0)
    lean = tl.where(is_past, tl.minimum(of_past, 1.0), lean)
    error = width * errors
    slack = width * SKEW + harmless
    is_gradient = k == 0
    high = middle + error + tl.where(is_gradient, slack, harmless + lean)
    low = tl.where(
        is_gradient, -(error * error / tl.maximum(middle, LEAST_LENGTH)) / 4 - slack, middle - error - harmless
    )
    outside = tl.where(bound < PROBES, lies - high, low - lies) / tl.sqrt(squared)
    outside = tl.where(outside != outside, FARTHEST, outside)
    outside = tl.minimum(tl.maximum(outside, -FARTHEST), FARTHEST)

    # The evidence.
    column = tl.arange(0, COLUMNS)
    here = real[:, None] & (column[None, :] < SIZES)
    place = row.to(tl.int64) * (2 * PROBES * SIZES) + bound[:, None] * SIZES + column[None, :]
    size = tl.load(sizes + column, mask=column < SIZES, other=0.0)[None, :]
    before = tl.load(evidence + place, mask=here, other=0.0)
    after = tl.where(says, tl.maximum(before + (outside[:, None] * size - size * size / 2), 0.0), before)
    tl.store(new_evidence + place, after, mask=here)
    is_clear = tl.max(tl.max(tl.where(here, after, 0.0), 1), 0) <= most
    ratios = tl.where(here, tl.exp(tl.minimum(after, PLENTY)), 0.0)
    against = tl.log(tl.sum(tl.sum(ratios, 1), 0) / (2 * PROBES * SIZES))
    tl.store(new_clear + row, is_clear.to(tl.uint8))
    tl.store(new_among + row, (is_clear & says).to(tl.uint8))

    # Trust.
    hope = tl.minimum(tl.load(hoped), tl.maximum(tl.load(best) / tl.maximum(tl.load(aged), TINY), 0.0))
    of_noise = tl.load(variance)
    looked_for = caution * hope
    along = tl.load(found + row * PROBES)
    agrees = tl.minimum(along, hope + LUCKY * tl.sqrt(of_noise))
    trusted = tl.load(trust + row)
    tl.store(new_score + row, trusted - against)
    earned = trusted + looked_for / of_noise * (agrees - looked_for / 2)
    trusted = tl.where(says, tl.minimum(tl.maximum(earned, -MOST_TRUST), MOST_TRUST), trusted)
    tl.store(new_trust + row, trusted)
    agreement = tl.load(agreed + row)
    tl.store(new_agreed + row, tl.where(says, agreement + AGREED_SPEED * (along - agreement), agreement))

    # How far off it lies, along all but the gradient and its own past.
    counted_off = (bound > 0) & (bound < COMMON)
    place = row * (COMMON - 1) + bound - 1
    was = tl.load(off + place, mask=counted_off, other=0.0)
    now = tl.where(says, was + OFF_SPEED * (lies - middle - was), was)
    tl.store(new_off + place, now, mask=counted_off)


def doubts(
    off: Tensor,
    error: Tensor,
    spread: Tensor,
    noise: Tensor,
    passed: Tensor,
    ties: Tensor,
    *,
    skew: float,
    width: float,
    far: float,
    most: float,
    neighbors: int,
) -> Tensor:
    """(n,) what `doubts.doubts` finds; the constants are those there."""
    n, K = off.shape
    found, beyond = off.new_empty(n), off.new_empty(n)
    near = min(n, neighbors)
    _doubt[(n,)](
        off,
        error,
        spread,
        noise,
        passed.view(torch.uint8),
        ties,
        found,
        near,
        DRAWN=n > neighbors,
        SKEW=skew,
        WIDTH=width,
        FAR=far,
        K=K,
        COLUMNS=triton.next_power_of_2(K),
        BLOCK=triton.next_power_of_2(near),
        num_warps=4,
    )
    block = min(MANY, triton.next_power_of_2(n))
    _beyond_least[(1,)](found, passed.view(torch.uint8), beyond, n, MOST=most, BLOCK=block, num_warps=4)
    return beyond


@triton.jit
def _bounded(x, FAR: tl.constexpr):
    return tl.minimum(tl.maximum(x, -FAR), FAR)


@triton.jit(do_not_specialize=["near"])
def _doubt(
    off,
    error,
    spread,
    noise,
    passed,
    ties,
    found,
    near,
    DRAWN: tl.constexpr,
    SKEW: tl.constexpr,
    WIDTH: tl.constexpr,
    FAR: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The doubt about one worker."""
    row = tl.program_id(0)
    k = tl.arange(0, COLUMNS)
    real = k < K
    of_noise = tl.load(noise + k, mask=real, other=1.0)
    skewed = SKEW * tl.load(spread + k, mask=real, other=0.0)
    alone = tl.sqrt(2 * (tl.load(error + k, mask=real, other=0.0) + skewed * skewed + of_noise))
    apart = WIDTH * tl.sqrt(2 * of_noise)
    lies = tl.load(off + row * K + k, mask=real, other=0.0)
    own = _bounded(lies / alone, FAR)
    place = _bounded(lies / apart, FAR)

    j = tl.arange(0, BLOCK)
    other = j.to(tl.int64)
    if DRAWN:
        other = tl.load(ties + j, mask=j < near, other=0)
    counts = tl.load(passed + other, mask=j < near, other=0) != 0
    here = counts[:, None] & real[None, :]
    theirs = tl.load(off + other[:, None] * K + k[None, :], mask=here, other=0.0)
    doubt = _bounded(theirs / alone[None, :], FAR)
    chance = place[None, :] - _bounded(theirs / apart[None, :], FAR)
    least = tl.min(tl.where(here, doubt * doubt + chance * chance, float("inf")), 0)
    tl.store(found + row, tl.max(tl.where(real, tl.minimum(own * own, least), 0.0), 0))


@triton.jit(do_not_specialize=["n"])
def _beyond_least(found, passed, beyond, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Less the smallest of those that passed; nothing where nobody did."""
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        counts = tl.load(passed + row, mask=row < n, other=0) != 0
        smallest = tl.minimum(smallest, tl.load(found + row, mask=counts, other=float("inf")))
    least = tl.min(smallest, 0)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        value = tl.load(found + row, mask=row < n, other=0.0) - least
        tl.store(beyond + row, tl.minimum(tl.maximum(value, 0.0), MOST), mask=row < n)


class Weighed(NamedTuple):
    """weights, score: (n,). kept: (n,) bool. reason: (n,) int64. heaviest: (2,)."""

    weights: Tensor
    kept: Tensor
    reason: Tensor
    score: Tensor
    heaviest: Tensor


def weighed(
    score: Tensor,
    doubt: Tensor,
    others: Tensor,
    passed: Tensor,
    stages: list[Tensor],
    heaviest: Tensor,
    reasons: Tensor,
    prior: float,
    least_weight: float,
    tiny: float,
) -> Weighed:
    """Everyone's weight, and why it has none.

    stages: (n,) bool each, all but the last that an upload has to get past; reasons: (stages + 2,) int64 on the device.
    prior: logarithm of the odds. heaviest: of the last two rounds.
    """
    n = len(score)
    new = Weighed(
        torch.empty_like(score),
        torch.empty_like(passed),
        torch.empty(n, dtype=torch.int64, device=score.device),
        torch.empty_like(score),
        torch.empty_like(heaviest),
    )
    present, fits, like, clear, copies = (stage.view(torch.uint8) for stage in stages)
    _weigh[(1,)](
        score,
        doubt,
        others,
        passed.view(torch.uint8),
        present,
        fits,
        like,
        clear,
        copies,
        heaviest,
        reasons.view(-1),
        new.weights,
        new.kept.view(torch.uint8),
        new.reason,
        new.score,
        new.heaviest,
        n,
        prior,
        LEAST_WEIGHT=least_weight,
        TINY=tiny,
        BLOCK=min(MANY, triton.next_power_of_2(n)),
        num_warps=4,
    )
    return new


@triton.jit
def _odds(row, score, doubt, others, passed, n, prior):
    """Of these workers; those that did not pass, or do not exist, have none."""
    counts = tl.load(passed + row, mask=row < n, other=0) != 0
    logit = tl.load(score + row, mask=counts, other=0.0) + prior
    against = tl.exp(-tl.load(doubt + row, mask=counts, other=0.0))
    small = tl.exp(-tl.abs(logit))  # never too large
    odds = tl.where(logit >= 0, 1.0, small) / (1.0 + small) * against
    odds = odds / (1.0 + tl.load(others + row, mask=counts, other=0.0))
    return counts, tl.where(counts, odds, 0.0)


@triton.jit(do_not_specialize=["n"])
def _weigh(
    score,
    doubt,
    others,
    passed,
    present,
    fits,
    like,
    clear,
    copies,
    heaviest,
    reasons,
    weights,
    kept,
    reason,
    new_score,
    new_heaviest,
    n,
    prior,
    LEAST_WEIGHT: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, others, passed, n, prior)
        largest = tl.maximum(largest, odds)
    most = tl.max(largest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        counts, odds = _odds(first + tl.arange(0, BLOCK), score, doubt, others, passed, n, prior)
        sums += tl.where(odds >= LEAST_WEIGHT * most, odds, 0.0)
    total = tl.maximum(tl.sum(sums, 0), TINY)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        known = row < n
        counts, odds = _odds(row, score, doubt, others, passed, n, prior)
        heavy = odds >= LEAST_WEIGHT * most
        tl.store(weights + row, tl.where(heavy, odds, 0.0) / total, mask=known)
        tl.store(kept + row, (counts & heavy).to(tl.uint8), mask=known)
        got = (tl.load(present + row, mask=known, other=0) != 0).to(tl.int32)
        stage = got
        got = got * (tl.load(fits + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(like + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(clear + row, mask=known, other=0) != 0).to(tl.int32)
        stage += got
        got = got * (tl.load(copies + row, mask=known, other=1) == 0).to(tl.int32)
        stage += got
        stage += got * heavy.to(tl.int32)
        tl.store(reason + row, tl.load(reasons + stage, mask=known, other=0), mask=known)
        here = tl.load(score + row, mask=known, other=0.0) - tl.load(doubt + row, mask=known, other=0.0)
        tl.store(new_score + row, here, mask=known)
    before = tl.load(heaviest)
    tl.store(new_heaviest, most / total)
    tl.store(new_heaviest + 1, before)
