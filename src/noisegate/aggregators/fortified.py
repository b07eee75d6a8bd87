"""A filter built on what an honest upload is: a short signal plus fresh, independent noise of known scale."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noisegate import checks
from noisegate.aggregators.evidence import SIZES, gathered, largest, together
from noisegate.aggregators.independence import GROUP, dependent, largest_product
from noisegate.aggregators.noise_tests import honest_lengths, ks_rejects, room_for_signal
from noisegate.aggregators.probes import LEAN, Expected, along_gradient, along_history, hoped_agreement
from noisegate.errors import SpecError
from noisegate.views import Memory, Reason, ServerView, Verdict

TESTS = 4
"""Length, distribution, evidence, independence: each may refuse a fourth of the honest uploads that all may."""

SPEEDS = (0.3, 0.05, 0.01)
"""Of the moving averages of past updates: over some 3, 20 and 100 rounds."""

OWN_SPEED = 0.02
"""Of the moving average of a worker's own past uploads: over some 50 rounds."""

PROBES = 1 + len(SPEEDS) + 2
"""The server's gradient, the moving averages, the rift between workers, and a worker's own past."""

CAUTION = 0.5
"""An honest worker is looked for at this share of the agreement expected of it, in case that is too high."""

LUCKY = 2.0
"""Agreement earns trust up to this many deviations above what is expected, so that nobody earns it fast."""

MOST_TRUST = 7.0
"""Trust is the logarithm of odds, between this and minus this, so that it cannot be hoarded."""

LEAST_WEIGHT = 0.02
"""Uploads that would weigh less than this share of the heaviest are left out."""

MOST_AGAIN = 0.95
"""Of a lean, that the next upload may repeat. More is next to no noise, and nothing to find."""

TINY = 1e-30
"""Stands in for a length of zero."""

ROWS = 16
"""Workers whose past is worked on at a time on a CPU, at most: more leave its caches."""


@dataclass(frozen=True)
class Fortified:
    """Refuse what no honest worker would send, by tests that add up over the rounds; weigh the rest by earned trust.

    An honest upload is a signal of length at most about 1 plus noise that is fresh, independent of everything, and of
    known scale. Each of four tests refuses what cannot be that:

    * its length, with the exact bounds for any signal (`honest_lengths`);
    * the distribution of its coordinates (`ks_rejects`);
    * evidence over the rounds, from how far it lies along directions fixed before the round: the gradient of the
      server's examples, moving averages of past updates, and of the worker's own past uploads (`probes`, `evidence`);
    * independence of the other uploads of the round (`independence`).

    Those that pass are averaged, each with its odds of being honest: the prior odds that the server believes in, times
    what agreement with the server's examples has earned it so far, over the evidence against it. Trust is earned
    slowly, up to a limit, and never outweighs a test. No number of workers to keep is needed, and a wrong belief about
    the share of honest ones is outweighed in time.

    refused: honest uploads wrongly refused, expected in 1,000. A fourth of it goes to each test.
    """

    refused: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(refused=self.refused)
        if not 1e-3 <= self.refused <= 500:
            raise checks.refuse("refused", self.refused, "is out of 1,000, and must be from 0.001 to 500")

    @property
    def tests_noise(self) -> bool:
        """It takes uploads for Gaussian noise."""
        return True

    @property
    def follows_workers(self) -> bool:
        """It must know a worker again in the next round."""
        return True

    def __call__(self, view: ServerView, memory: Memory) -> Verdict:
        chance = self.refused / 1000 / TESTS
        own = _contributions(view)
        n, d = view.uploads.shape

        # 1. What one upload alone shows: its length, and the distribution of its coordinates.
        low, high = honest_lengths(d, view.noise_std, view.batch, view.largest, chance)
        reason = torch.full_like(view.present, Reason.KEPT.value, dtype=torch.int64)
        if view.noise_std:
            room = room_for_signal(d, view.noise_std, view.largest)
            unlike = ks_rejects(view.uploads, view.noise_std, chance, view.memory, room)
            reason.masked_fill_(unlike, Reason.DISTRIBUTION.value)
        reason.masked_fill_((view.norms < low) | (view.norms > high), Reason.NORM.value)
        reason.masked_fill_(~view.present, Reason.MALFORMED.value)
        counts = reason == Reason.KEPT.value  # nothing that a huge upload says is added to anything

        # 2. What it shows along directions that were fixed before the round, added up over the rounds.
        known = Known.of(memory, view)
        limit = math.log(2 * PROBES * len(SIZES) / chance)
        squares = torch.linalg.vector_norm(own, dim=1).square()
        lean = Lean.of(view, squares)
        # All directions at once: to read the uploads is what takes time.
        directions = torch.cat([own.mean(0)[None], known.ways, known.rift[None]])
        lengths = directions.norm(dim=1)
        directions /= lengths.clamp(min=TINY)[:, None]  # one that is zero stays so
        found, of_own = view.uploads @ directions.T, own @ directions.T
        agreement = found[:, :1]
        expected = along_gradient(of_own[:, :1], lengths[0], lean.noise, view.batch)
        along_ways = _along_ways(view, of_own[:, 1:], lengths[1:-1], known, lean)
        own_past, past, rift = _along_past(view, own, known, lean, limit, high / math.sqrt(d))
        outside = [expected.outside(agreement), along_ways.outside(found[:, 1:]), own_past]
        evidence = gathered(known.evidence, torch.cat(outside, 1), counts)
        reason.masked_fill_(counts & (largest(evidence) > limit), Reason.EVIDENCE.value)

        # 3. How much to trust it: the logarithm of the odds, but for the prior ones, that it is honest.
        hoped = hoped_agreement(own, view.labels)
        trusted = _trusted(known.trust, agreement[:, 0], hoped, expected.deviation[0, 0])
        trust = torch.where(counts, trusted, known.trust)
        score = trust - together(evidence)

        # 4. What it shares with other uploads of the round.
        shared = largest_product(view.noise_std, high, squares.mean(), chance, min(n, GROUP) - 1)
        lost = dependent(view.uploads, reason == Reason.KEPT.value, shared, score, view.ties)
        reason.masked_fill_(lost, Reason.DEPENDENT.value)

        # 5. The mean of those that are left, each with its odds.
        prior = view.believed_honest / (n + 1)
        passed = reason == Reason.KEPT.value
        odds = torch.sigmoid(score + math.log(prior / (1 - prior))) * passed
        reason.masked_fill_(passed & (odds < LEAST_WEIGHT * odds.amax()), Reason.SCORE.value)
        kept = reason == Reason.KEPT.value
        weights = odds * kept / (odds * kept).sum().clamp(min=TINY)
        update = weights @ view.uploads

        ways = known.ways + _speeds(known.ways) * (known.step - known.ways)
        heaviest = torch.stack([weights.amax(), known.heaviest[0]])
        learned = Known(evidence, trust, ways, update, heaviest, past, rift, counts)
        return Verdict(update, kept, reason, score, learned._asdict())


class Known(NamedTuple):
    """What the rule remembers of past rounds.

    evidence: (n, bounds, sizes) against each worker. trust: (n,) in each. ways: (SPEEDS, d) moving averages of the
    updates, up to the last but one; step: (d,) the last. heaviest: (2,) the largest weight of an upload in the last
    update and the one before. past: (n, d) moving averages of each worker's own uploads up to the last but one, in
    units of about the noise and in half precision, which is more than enough for something that is mostly noise.
    rift: (d,) the direction in which the pasts of those who are not suspected differ most, as far as found.
    counted: (n,) whose last upload passed the first tests, and may become part of its past.
    """

    evidence: Tensor | None
    trust: Tensor
    ways: Tensor
    step: Tensor
    heaviest: Tensor
    past: Tensor
    rift: Tensor
    counted: Tensor

    @classmethod
    def of(cls, memory: Memory, view: ServerView) -> "Known":
        """From the rule's memory; nothing at all before the first round."""
        if memory:
            return cls(**{name: memory[name] for name in cls._fields})
        n, d = view.uploads.shape
        new = view.uploads.new_zeros
        nobody = torch.zeros_like(view.present)
        return cls(None, new(n), new(len(SPEEDS), d), new(d), new(2), new(n, d, dtype=torch.float16), new(d), nobody)


def _contributions(view: ServerView) -> Tensor:
    """(A, d) what the server's own examples would add to an upload."""
    if view.contributions is None:
        raise SpecError("aggregator 'fortified': needs ServerView.contributions, which this server does not have")
    own = view.contributions()
    if len(own) < 2:
        raise SpecError(f"aggregator 'fortified': needs two examples of the server's own or more, not {len(own)}")
    if not own.is_cuda and bool(own.norm() < torch.inf):  # nothing to replace, and a copy takes time
        return own
    return own.nan_to_num(0.0, 0.0, 0.0)


class Lean(NamedTuple):
    """What momentum does to an honest upload beside its signal.

    echo: () how far it may reach along the worker's upload of two rounds ago, times that one's length: l^2 if it leans
    by l on its last upload, and that one on the one before; and so on, each time by another l / (length of an upload).
    noise: () its standard deviation along a direction that has nothing to do with it, that of the lean included.
    """

    echo: Tensor
    noise: Tensor

    @classmethod
    def of(cls, view: ServerView, squares: Tensor) -> "Lean":
        """squares: (A,) of the lengths that the server's examples would add; the lean is what lacks to the largest."""
        d = view.uploads.shape[1]
        lean = (view.largest**2 - squares).clamp(min=0.0).sqrt().mean()
        again = (lean / (view.noise_std * math.sqrt(d) + TINY)).clamp(max=MOST_AGAIN)
        noise = (view.noise_std**2 + lean.square() / d / (1 - again.square())).sqrt()
        return cls(LEAN * lean.square() / (1 - again), noise)


def _along_ways(view: ServerView, own: Tensor, lengths: Tensor, known: Known, lean: Lean) -> Expected:
    """What is expected along the averages of past updates and the rift: own (A, SPEEDS + 1) are the examples there.

    lengths: (SPEEDS,) of these averages.
    """
    part = _speeds(known.ways)[:, 0] * known.heaviest.amax()  # of one worker's upload in the newest part of a way
    leans = (part * lean.echo / lengths.clamp(min=TINY)).clamp(max=1.0)
    leans = functional.pad(leans, (0, 1))  # the rift is older than anything that is still leaned on
    return along_history(own, lean.noise, view.batch, leans)


def _along_past(
    view: ServerView, own: Tensor, known: Known, lean: Lean, limit: float, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(n, bounds) the same along each worker's own past, (n, d) their pasts with their last uploads, (d,) the rift.

    The rift is the first principal component of the pasts, by one step of power iteration a round: pasts change more
    slowly than it converges. Where liars push and honest workers push back, no average shows either, but their
    difference does.
    unit: that a past is measured in: the noise, or what fits half precision.
    """
    n = len(view.uploads)
    clear = known.counted if known.evidence is None else known.counted & (largest(known.evidence) <= limit)
    aim = torch.where(known.rift.any(), known.rift, own.mean(0))
    sums, loads = own.new_zeros(2, own.shape[1]), torch.stack([own.new_zeros(n), clear.to(own.dtype)])
    found, lengths, of_own = own.new_empty(n), own.new_empty(n), own.new_empty(len(own), n)
    past, speed = torch.empty_like(known.past), OWN_SPEED * known.counted[:, None].to(own.dtype)
    rows = max(1, view.memory // (16 * own.shape[1]))
    rows = rows if own.is_cuda else min(rows, ROWS)
    for first in range(0, n, rows):
        here = slice(first, first + rows)
        average = known.past[here].to(own.dtype)
        found[here] = torch.linalg.vecdot(view.uploads[here], average)
        lengths[here] = average.norm(dim=1)
        of_own[:, here] = own @ average.T
        loads[0, here] = average @ aim * loads[1, here]
        sums.addmm_(loads[:, here], average)
        if view.last is not None:  # in place, since fresh memory is slow; a speed of 0 leaves an average as it was
            average.mul_(1 - speed[here]).addcmul_(view.last[here], speed[here] / unit)
        past[here] = average
    lengths.clamp_(min=TINY)
    leans = (OWN_SPEED * lean.echo / (unit * lengths)).clamp(max=1.0)
    expected = along_history(of_own / lengths, lean.noise, view.batch, leans)
    outside = Expected(*(part.T for part in expected)).outside((found / lengths)[:, None])
    middle = loads[0].sum() / clear.sum().clamp(min=1)
    rift = sums[0] - middle * sums[1]
    return outside, past, rift / rift.norm().clamp(min=TINY)


def _trusted(trust: Tensor, agreement: Tensor, hoped: Tensor, deviation: Tensor) -> Tensor:
    """(n,) trust after a round: plus the logarithm of a likelihood ratio, honest against no signal at all.

    hoped: () what an honest worker's agreement should be; near the optimum nothing, and nothing is learned.
    """
    looked_for = CAUTION * hoped
    seen = torch.minimum(agreement, hoped + LUCKY * deviation)
    return (trust + looked_for * (seen - looked_for / 2) / deviation.square()).clamp(-MOST_TRUST, MOST_TRUST)


def _speeds(like: Tensor) -> Tensor:
    return _speeds_on(like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _speeds_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(SPEEDS, 1)"""
    return torch.tensor(SPEEDS, dtype=dtype, device=device)[:, None]
