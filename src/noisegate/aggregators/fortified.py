"""A filter built on what an honest upload is: a short signal plus fresh, independent noise of known scale."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noisegate import checks, kernels
from noisegate.aggregators import probes
from noisegate.aggregators.doubts import SPEED, doubts, error_of_mean
from noisegate.aggregators.evidence import FARTHEST, PLENTY, SIZES, gathered, largest, sizes_on, together
from noisegate.aggregators.independence import GROUP, largest_product, shared
from noisegate.aggregators.noise_tests import honest_lengths, ks_rejects, room_for_signal
from noisegate.aggregators.probes import Expected, Seen, along_gradient, along_history, hoped_agreement
from noisegate.errors import SpecError, StoreError
from noisegate.views import Memory, Reason, ServerView, Verdict

TESTS = 4
"""Length, distribution, evidence, copies: each may refuse a fourth of the honest uploads that all may."""

SPEEDS = (0.3, 0.05, 0.01)
"""Of the moving averages of past updates: over some 3, 20 and 100 rounds."""

OWN_SPEED = 0.02
"""Of the moving average of a worker's own past uploads: over some 50 rounds."""

COMMON = 1 + len(SPEEDS) + 1
"""Probes that are the same for all: the server's gradient, the moving averages, and the rift between workers."""

PROBES = COMMON + 1
"""These and a worker's own past."""

CAUTION = 0.5
"""An honest worker is looked for at this share of the agreement expected of it, in case that is too high."""

BEST = 10
"""Where not one worker in so many agrees as was expected, that was wrong: the server's examples are few."""

AGREED_SPEED = 0.01
"""Of the moving averages of how far workers agree with the server's gradient: over some 100 rounds."""

LUCKY = 2.0
"""Agreement earns trust up to this many deviations above what is expected, so that nobody earns it fast."""

MOST_TRUST = 7.0
"""Trust is the logarithm of odds, between this and minus this, so that it cannot be hoarded."""

LEAST_WEIGHT = 0.02
"""Uploads that would weigh less than this share of the heaviest are left out."""

LEAN = 1.5
"""Room for workers who lean on their last uploads more than the server's examples would."""

MOST_AGAIN = 0.95
"""Of a lean, that the next upload may repeat. More is next to no noise, and nothing to find."""

TINY = 1e-30
"""Stands in for a length of zero."""

RESTART = 1e-12
"""Of the server's gradient, added to the rift when it is looked for: what to start from if there is none.

It is never a probe itself: in the mean of the server's examples along it each of them meets itself."""

ROWS = 16
"""Workers whose past is worked on at a time on a CPU, at most: more leave its caches."""

STAGES = (Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION, Reason.EVIDENCE, Reason.DEPENDENT, Reason.SCORE)
"""What an upload has to get past, in this order."""


@dataclass(frozen=True)
class Fortified:
    """Refuse what no honest worker would send, by tests that add up over the rounds; weigh the rest by earned trust.

    An honest upload is a signal of length at most about 1 plus noise that is fresh, independent of everything, and of
    known scale. Each of four tests refuses what cannot be that:

    * its length, with the exact bounds for any signal (`honest_lengths`);
    * the distribution of its coordinates (`ks_rejects`);
    * evidence over the rounds, from how far it lies along directions fixed before the round: the gradient of the
      server's examples, moving averages of past updates, and of the worker's own past uploads (`probes`, `evidence`);
    * being a copy of another upload of the round (`independence`).

    Those that pass are averaged, each with its odds of being honest: the prior odds that the server believes in, times
    what agreement with the server's examples has earned it so far, over the evidence against it, and over the doubt
    that is left (`doubts`). Trust is earned slowly, up to a limit, and never outweighs a test. Uploads that share more
    than honest ones can share their weight too. No number of workers to keep is needed, and a wrong belief about the
    share of honest ones is outweighed in time.

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
        alone = Alone.of(view, low, high, chance)

        # 2. Where it lies along directions that were fixed before the round.
        known = Known.of(memory, view)
        probed = Probed.of(view, own, known, high / math.sqrt(d))

        # 3. What that says of it, added up over the rounds: evidence against it, how much to trust it, and how far off
        # the server's examples it lies where it could not be refused for that.
        judged = Judged.of(view, known, probed, alone.counts, len(own), math.log(2 * PROBES * len(SIZES) / chance))

        # 4. What it shares with other uploads of the round.
        limit = largest_product(view.noise_std, high, probed.lean.signals, chance, min(n, GROUP) - 1)
        copies, others = shared(view.uploads, judged.among, limit, high, judged.score, view.ties)
        passed = judged.among ^ copies  # which are among them

        # 5. How much doubt that leaves, along neither the server's examples themselves nor its own past, which nobody
        # else has.
        _, spread, variance = (each[1:COMMON] for each in probed.seen)
        noise = variance * (SPEED / (2 - SPEED))
        doubt = doubts(judged.off, probed.error[1:], spread, noise, passed, view.ties)

        # 6. The mean of those that are left, each with its odds, and what several say with that of one.
        stages = [view.present, alone.fits, alone.like, judged.clear, copies]
        weighed = Weighed.of(view, known, judged.score, doubt, others, passed, stages)
        update = weighed.weights @ view.uploads

        learned = Known(
            evidence=judged.evidence,
            trust=judged.trust,
            agreed=judged.agreed,
            aged=torch.lerp(known.aged, _one(known.aged), AGREED_SPEED),
            off=judged.off,
            ways=torch.lerp(known.ways, known.step, _speeds(known.ways)),
            step=update,
            heaviest=weighed.heaviest,
            past=probed.past,
            rift=probed.rift,
            counted=alone.counts,
            clear=judged.clear,
        )
        return Verdict(update, weighed.kept, weighed.reason, weighed.score, learned._asdict())


class Known(NamedTuple):
    """What the rule remembers of past rounds.

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
    def of(cls, memory: Memory, view: ServerView) -> "Known":
        """From the rule's memory; nothing at all before the first round."""
        if memory:
            if memory.keys() != set(cls._fields):
                raise StoreError("aggregator 'fortified': its memory is that of another version; start the run anew")
            return cls(**{name: memory[name] for name in cls._fields})
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


def _fused(like: Tensor) -> bool:
    """Whether kernels of our own do the rest: a device takes longer to start a small operation than to do it."""
    return like.is_cuda and kernels.available() and like.dtype == torch.float32


class Alone(NamedTuple):
    """What one upload alone shows: (n,) each.

    fits: by its length. like: by the distribution of its coordinates. counts: by both. Nothing that a huge upload says
    is added to anything.
    """

    fits: Tensor
    like: Tensor
    counts: Tensor

    @classmethod
    def of(cls, view: ServerView, low: float, high: float, chance: float) -> "Alone":
        """low, high: lengths that an honest upload has. chance: that the test of the distribution refuses one."""
        rejected = None
        if view.noise_std:
            room = room_for_signal(view.uploads.shape[1], view.noise_std, view.largest)
            rejected = ks_rejects(view.uploads, view.noise_std, chance, view.memory, room)
        if _fused(view.norms):
            from noisegate.kernels import judging

            return cls(*judging.alone(view.norms, view.present, rejected, low, high))
        fits = (view.norms >= low) & (view.norms <= high)
        like = view.present if rejected is None else ~rejected
        return cls(fits, like, view.present & fits & like)


class Lean(NamedTuple):
    """What momentum does to an honest upload beside its signal: () each.

    echo: how far it may reach along the worker's upload of two rounds ago, times that one's length: l^2 if it leans by
    l on its last upload, and that one on the one before; and so on, each time by at most another largest / (length of
    the noise).
    noise: the variance along a direction that has nothing to do with it, that of the lean included.
    signals: the mean square of the lengths that the server's examples would add.
    """

    echo: Tensor
    noise: Tensor
    signals: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor) -> "Lean":
        """own: (A, d) what the server's examples would add; the lean is what lacks to the largest."""
        echo, spread = cls.scales(view)
        signals = own.norm().square() / len(own)
        lean = (view.largest**2 - signals).clamp(min=0.0)
        return cls(lean * echo, lean / spread + view.noise_std**2, signals)

    @staticmethod
    def scales(view: ServerView) -> tuple[float, float]:
        """What the lean is multiplied by for its echo, and divided by for its part of the variance."""
        d = view.uploads.shape[1]
        again = min(MOST_AGAIN, view.largest / (view.noise_std * math.sqrt(d) + TINY))
        return LEAN / (1 - again), d * (1 - again**2)


class Pasts(NamedTuple):
    """What there is to each worker's own past, and the past itself with the last uploads added.

    found, lengths: (n,) how far the upload lies along it, and its length. of_own: (A, n) the server's examples there.
    past, rift: as in `Known`.
    """

    found: Tensor
    lengths: Tensor
    of_own: Tensor
    past: Tensor
    rift: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor, known: Known, gradient: Tensor, unit: float) -> "Pasts":
        """unit: that a past is measured in: the noise, or what fits half precision. gradient: (1, d) a direction.

        The rift is the first principal component of the pasts, by one step of power iteration a round: pasts change
        more slowly than it converges. Where liars push and honest workers push back, no average shows either, but
        their difference does.
        """
        n, aim = len(view.uploads), torch.add(known.rift[0], gradient[0], alpha=RESTART)
        sums, loads = own.new_zeros(2, own.shape[1]), own.new_empty(2, n)
        found, lengths, of_own = own.new_empty(n), own.new_empty(n), own.new_empty(len(own), n)
        loads[1] = known.counted & known.clear
        past, speed = torch.empty_like(known.past), OWN_SPEED * known.counted[:, None].to(own.dtype)
        rows = max(1, view.memory // (16 * own.shape[1]))
        rows = rows if own.is_cuda else min(rows, ROWS)
        for first in range(0, n, rows):
            here = slice(first, first + rows)
            average = known.past[here].to(own.dtype)
            torch.linalg.vecdot(view.uploads[here], average, out=found[here])
            torch.linalg.vector_norm(average, dim=1, out=lengths[here])
            of_own[:, here] = own @ average.T
            torch.mul(average @ aim, loads[1, here], out=loads[0, here])
            sums.addmm_(loads[:, here], average)
            if view.last is not None:  # in place, since fresh memory is slow; a speed of 0 leaves an average as it was
                average.lerp_(view.last[here] / unit, speed[here])
            past[here] = average
        lengths.clamp_(min=TINY)
        middle, many = loads.sum(1)
        rift = torch.addcmul(sums[:1], sums[1:], middle / many.clamp(min=1.0), value=-1.0)
        rift = functional.normalize(rift, eps=TINY)
        return cls(found / lengths, lengths * unit, of_own / lengths, past, rift)


class Probed(NamedTuple):
    """Where everything lies along the probes: the COMMON directions, and each worker's past.

    found: (n, PROBES) the uploads. seen: (COMMON + n,) each, the server's examples; error: (COMMON,) the squared
    standard error of their mean. lengths: (COMMON,) of the directions before they were made unit vectors, past_lengths:
    (n,) of the pasts. hoped: () how far along the server's gradient honest uploads should lie.
    lean: as momentum allows. past, rift: as in `Known`, with the last uploads.
    """

    found: Tensor
    seen: Seen
    error: Tensor
    lengths: Tensor
    past_lengths: Tensor
    hoped: Tensor
    lean: Lean
    past: Tensor
    rift: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor, known: Known, unit: float) -> "Probed":
        """own: (A, d) what the server's examples would add. unit: that a past is measured in."""
        if _fused(own) and (fused := cls._by_kernels(view, own, known, unit)):
            return fused
        lean = Lean.of(view, own)
        # All directions at once: to read the uploads is what takes time.
        directions = torch.cat([own.mean(0, keepdim=True), known.ways, known.rift])
        lengths = directions.norm(dim=1)
        directions /= lengths.clamp(min=TINY)[:, None]  # one that is zero stays so
        pasts = Pasts.of(view, own, known, directions[:1], unit)
        found = torch.cat([view.uploads @ directions.T, pasts.found[:, None]], 1)
        of_own = torch.cat([own @ directions.T, pasts.of_own], 1)
        seen = Seen.of(of_own, lean.noise, view.batch)
        error = error_of_mean(of_own[:, :COMMON], view.strata)
        hoped = hoped_agreement(own, lengths[0], seen.spread[0], view.strata)
        return cls(found, seen, error, lengths, pasts.lengths, hoped, lean, pasts.past, pasts.rift)

    @classmethod
    def _by_kernels(cls, view: ServerView, own: Tensor, known: Known, unit: float) -> "Probed | None":
        """None if the server has too many examples for them."""
        from noisegate.kernels import probing

        if not probing.takes(own, view.strata):
            return None
        old = (known.ways, known.rift, known.past, known.counted, known.clear)
        echo, spread = Lean.scales(view)
        scales = probing.Scales(
            strata=view.strata,
            batch=view.batch,
            largest=view.largest,
            noise_variance=view.noise_std**2,
            echo=echo,
            spread=spread,
            unit=unit,
            speed=OWN_SPEED,
            restart=RESTART,
            tiny=TINY,
            least_length=probes.TINY,
            least_variance=probes.TINY**2,
        )
        new = probing.probed(probing.Round(view.uploads, view.last, own, *old), scales, view.memory)
        seen, lean = Seen(new.mean, new.spread, new.variance), Lean(new.echo, new.noise, new.signals)
        return cls(new.found, seen, new.error, new.lengths, new.past_lengths, new.hoped, lean, new.past, new.rift)


class Judged(NamedTuple):
    """What is known of everyone after a round: evidence, trust, agreed and off as in `Known`.

    clear: (n,) against whom there is no more evidence than is allowed; among: (n,) those of them whose uploads count.
    score: (n,) the logarithm of the odds, but for the prior ones, that it is honest: by its trust before the round. By
    that after it, noise along the server's gradient would add to the weight of the upload that it is in, and so to the
    update, which would follow the server's few examples.
    """

    evidence: Tensor
    clear: Tensor
    among: Tensor
    trust: Tensor
    score: Tensor
    agreed: Tensor
    off: Tensor

    @classmethod
    def of(cls, view: ServerView, known: Known, probed: Probed, counts: Tensor, count: int, most: float) -> "Judged":
        """counts: (n,) whose upload says anything. count: the server's examples. most: evidence that is allowed."""
        if _fused(probed.found):
            return cls._by_kernels(view, known, probed, counts, count, most)
        found, seen = probed.found, probed.seen
        expected, variance = _expected(view, known, probed, count)
        evidence = gathered(known.evidence, expected.outside(found, variance), counts)
        clear = largest(evidence) <= most
        best = _best(known, view.believed_honest)
        hoped = torch.minimum(probed.hoped, (best / known.aged.clamp(min=TINY)).clamp(min=0.0))
        trust = torch.where(counts, _trusted(known.trust, found[:, 0], hoped, seen.variance[0]), known.trust)
        agreed = torch.where(counts, torch.lerp(known.agreed, found[:, 0], AGREED_SPEED), known.agreed)
        off = torch.lerp(known.off, found[:, 1:COMMON] - seen.mean[1:COMMON], SPEED)
        off = torch.where(counts[:, None], off, known.off)
        return cls(evidence, clear, counts & clear, trust, known.trust - together(evidence), agreed, off)

    @classmethod
    def _by_kernels(
        cls, view: ServerView, known: Known, probed: Probed, counts: Tensor, count: int, most: float
    ) -> "Judged":
        from noisegate.kernels import judging

        limits = judging.Limits(
            speeds=_speeds(known.ways),
            sizes=sizes_on(known.trust.dtype, known.trust.device)[0],
            own_speed=OWN_SPEED,
            certainty=probes.CERTAINTY,
            skew=probes.SKEW,
            harmless=probes.HARMLESS,
            least_length=probes.TINY,
            tiny=TINY,
            farthest=FARTHEST,
            plenty=PLENTY,
            caution=CAUTION,
            lucky=LUCKY,
            most_trust=MOST_TRUST,
            agreed_speed=AGREED_SPEED,
            off_speed=SPEED,
        )
        seen = judging.Seen(
            probed.found, *probed.seen, probed.lengths, probed.past_lengths, probed.lean.echo, probed.hoped
        )
        best = _best(known, view.believed_honest)
        old = judging.Before(known.evidence, known.trust, known.agreed, known.aged, best, known.off, known.heaviest)
        return cls(*judging.judged(seen, old, counts, view.noise_std, count, most, limits))


def _expected(view: ServerView, known: Known, probed: Probed, count: int) -> tuple[Expected, Tensor]:
    """Where each worker is expected along every probe, and with what variance: (n, PROBES) each."""
    seen, echo = probed.seen, probed.lean.echo
    part = known.heaviest.amax() * echo * _speeds(known.ways)[:, 0]  # of one upload in the newest part of a way
    leans = torch.cat([part / probed.lengths[1:-1].clamp(min=TINY), OWN_SPEED * echo / probed.past_lengths])
    leans = leans.clamp(max=1.0)
    # The rift is older than anything that is still leaned on.
    leans = torch.cat([leans[: len(SPEEDS)], torch.zeros_like(leans[:1]), leans[len(SPEEDS) :]])
    gradient = along_gradient(Seen(*(each[:1] for each in seen)), count, view.noise_std)
    history = along_history(Seen(*(each[1:] for each in seen)), count, view.noise_std, leans)
    every = torch.stack([*(torch.cat(both) for both in zip(gradient, history, strict=True)), seen.variance])
    common = every[:, None, :COMMON].expand(-1, len(view.uploads), -1)
    low, high, variance = torch.cat([common, every[:, COMMON:, None]], 2)
    return Expected(low, high), variance


def _best(known: Known, believed_honest: int) -> Tensor:
    """() what the best tenth of the workers agree, or as many as are believed honest if those are fewer.

    Whoever was refused last, or sent nothing, counts as agreeing not at all.
    """
    n = len(known.agreed)
    place = max(1, min(believed_honest, -(-n // BEST)))
    if _fused(known.agreed):
        from noisegate.kernels import judging

        if n <= judging.MANY:
            return judging.best(known.agreed, known.clear, known.counted, place)
    return torch.where(known.clear & known.counted, known.agreed, 0.0).kthvalue(n + 1 - place).values


def _trusted(trust: Tensor, agreement: Tensor, hoped: Tensor, variance: Tensor) -> Tensor:
    """(n,) trust after a round: plus the logarithm of a likelihood ratio, honest against no signal at all.

    hoped: () what an honest worker's agreement should be; near the optimum nothing, and nothing is learned.
    """
    looked_for = CAUTION * hoped
    seen = torch.minimum(agreement, hoped + LUCKY * variance.sqrt())
    return (trust + looked_for / variance * (seen - looked_for / 2)).clamp(-MOST_TRUST, MOST_TRUST)


class Weighed(NamedTuple):
    """Everyone's part in the update: (n,) each but `heaviest`, (2,), which is as in `Known`."""

    weights: Tensor
    kept: Tensor
    reason: Tensor
    score: Tensor
    heaviest: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        known: Known,
        score: Tensor,
        doubt: Tensor,
        others: Tensor,
        passed: Tensor,
        stages: list[Tensor],
    ) -> "Weighed":
        """stages: (n,) each, as in STAGES, but the last; and who is a copy instead of who is not."""
        prior = view.believed_honest / (len(score) + 1)
        prior = math.log(prior / (1 - prior))
        if _fused(score):
            from noisegate.kernels import judging

            reasons = _reasons(score.device)
            given = (score, doubt, others, passed, stages, known.heaviest, reasons, prior, LEAST_WEIGHT, TINY)
            return cls(*judging.weighed(*given))
        odds = torch.sigmoid(score + prior) * (-doubt).exp() * passed / (1 + others)
        heavy = odds >= LEAST_WEIGHT * odds.amax()
        kept = passed & heavy
        odds = odds * kept
        weights = odds / odds.sum().clamp(min=TINY)
        heaviest = torch.stack([weights.amax(), known.heaviest[0]])
        *tests, copies = stages
        return cls(weights, kept, _first_failed([*tests, ~copies, heavy]), score - doubt, heaviest)


def _first_failed(passed: list[Tensor]) -> Tensor:
    """(n,) the reason of the first of STAGES that an upload did not get past, or that it did all. passed: (n,) each."""
    return _reasons(passed[0].device)[torch.stack(passed).cumprod(0).sum(0)]


@functools.lru_cache(maxsize=8)
def _reasons(device: torch.device) -> Tensor:
    """By the number of stages that were passed."""
    return torch.tensor([*STAGES, Reason.KEPT], dtype=torch.int64, device=device)


def _speeds(like: Tensor) -> Tensor:
    return _speeds_on(like.dtype, like.device)


def _one(like: Tensor) -> Tensor:
    return _one_on(like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _one_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    """()"""
    return torch.ones((), dtype=dtype, device=device)


@functools.lru_cache(maxsize=8)
def _speeds_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(SPEEDS, 1)"""
    return torch.tensor(SPEEDS, dtype=dtype, device=device)[:, None]
