"""What the aggregator `fortified` makes of where uploads lie: evidence against workers, and trust in them."""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate import kernels
from noisegate.aggregators import probes
from noisegate.aggregators.doubts import SPEED
from noisegate.aggregators.evidence import FARTHEST, PLENTY, gathered, largest, sizes_on, together
from noisegate.aggregators.known import COMMON, OWN_SPEED, SPEEDS, TINY, Known, speeds
from noisegate.aggregators.probed import Probed
from noisegate.aggregators.probes import Expected, Seen, along_gradient, along_history
from noisegate.views import ServerView

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
        if kernels.fused(probed.found):
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
            speeds=speeds(known.ways),
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
    part = known.heaviest.amax() * echo * speeds(known.ways)[:, 0]  # of one upload in the newest part of a way
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
    if kernels.fused(known.agreed):
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
