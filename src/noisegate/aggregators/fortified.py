"""A filter built on what an honest upload is: a short signal plus fresh, independent noise of known scale."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate import checks, kernels
from noisegate.aggregators.doubts import SPEED, doubts
from noisegate.aggregators.evidence import SIZES
from noisegate.aggregators.independence import GROUP, largest_product, shared
from noisegate.aggregators.judged import AGREED_SPEED, Judged
from noisegate.aggregators.known import COMMON, PROBES, TINY, Known, speeds
from noisegate.aggregators.ks_test import ks_rejects, room_for_signal
from noisegate.aggregators.probed import Probed
from noisegate.aggregators.upload_lengths import honest_lengths
from noisegate.errors import SpecError
from noisegate.roles import Aggregator
from noisegate.views import Reason, ServerView, State, Verdict

TESTS = 4
"""Length, distribution, evidence, copies: each may refuse a fourth of the honest uploads that all may."""

LEAST_WEIGHT = 0.02
"""Uploads that would weigh less than this share of the heaviest are left out."""

STAGES = (Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION, Reason.EVIDENCE, Reason.DEPENDENT, Reason.SCORE)
"""What an upload has to get past, in this order."""


@dataclass(frozen=True)
class Fortified(Aggregator):
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

    def __call__(self, view: ServerView, state: State) -> Verdict:
        chance = self.refused / 1000 / TESTS
        own = _contributions(view)
        n, d = view.uploads.shape

        # 1. What one upload alone shows: its length, and the distribution of its coordinates.
        low, high = honest_lengths(d, view.noise_std, view.batch, view.largest, chance)
        alone = Alone.of(view, low, high, chance)

        # 2. Where it lies along directions that were fixed before the round.
        known = Known.of(state, view)
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
            ways=torch.lerp(known.ways, known.step, speeds(known.ways)),
            step=update,
            heaviest=weighed.heaviest,
            past=probed.past,
            rift=probed.rift,
            counted=alone.counts,
            clear=judged.clear,
        )
        return Verdict(update, weighed.kept, weighed.reason, weighed.score, learned._asdict())


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
            rejected = ks_rejects(view.uploads, view.noise_std, chance, view.scratch, room)
        if kernels.fused(view.norms):
            from noisegate.kernels import judging

            return cls(*judging.alone(view.norms, view.present, rejected, low, high))
        fits = (view.norms >= low) & (view.norms <= high)
        like = view.present if rejected is None else ~rejected
        return cls(fits, like, view.present & fits & like)


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
        if kernels.fused(score):
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


def _one(like: Tensor) -> Tensor:
    return _one_on(like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _one_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    """()"""
    return torch.ones((), dtype=dtype, device=device)
