"""What is held against each worker, and for it, after a round: evidence, trust, and offsets."""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate import kernels
from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.doubt import OFFSET_SPEED
from noisegate.aggregators.fortified.evidence import gathered, largest, together
from noisegate.aggregators.fortified.expectation import expected
from noisegate.aggregators.fortified.state import COMMON, FortifiedState
from noisegate.aggregators.fortified.trust import AGREEMENT_SPEED, best_agreement, earned
from noisegate.views import ServerView


class WorkerStanding(NamedTuple):
    """What is known of everyone after a round: evidence, trust, agreement, offsets and unrefuted as in the state.

    candidates: (n,) who is unrefuted and passed the first tests: these may have a weight.
    score: (n,) the log-odds of being honest, without the prior ones: the trust before the round less the evidence after
    it. Trust after the round would let noise along the server's gradient add to the weight of the very upload that it
    is in, so that the update would follow the server's few examples.
    """

    evidence: Tensor
    unrefuted: Tensor
    candidates: Tensor
    trust: Tensor
    score: Tensor
    agreement: Tensor
    offsets: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        projections: Projections,
        counts: Tensor,
        examples: int,
        evidence_limit: float,
    ) -> "WorkerStanding":
        """counts: (n,) whose upload passed the first tests. What is known of the others stays as it was.

        examples: how many the server has. evidence_limit: the largest log-likelihood ratio that is allowed.
        """
        best = best_agreement(state, view.believed_honest)
        if kernels.fused(projections.of_uploads):
            from noisegate.aggregators.fortified.kernels import standing

            given = (state, projections, best, counts, view.noise_std, examples, evidence_limit)
            return standing.stand(*given)
        along, moments = projections.of_uploads, projections.moments
        interval, variance = expected(view, state, projections, examples)
        evidence = gathered(state.evidence, interval.outside(along, variance), counts)
        unrefuted = largest(evidence) <= evidence_limit
        agreement = torch.minimum(projections.agreement, best.clamp(min=0.0))
        trust = torch.where(counts, earned(state.trust, along[:, 0], agreement, moments.variance[0]), state.trust)
        averages = torch.where(counts, torch.lerp(state.agreement, along[:, 0], AGREEMENT_SPEED), state.agreement)
        offsets = torch.lerp(state.offsets, along[:, 1:COMMON] - moments.mean[1:COMMON], OFFSET_SPEED)
        offsets = torch.where(counts[:, None], offsets, state.offsets)
        score = state.trust - together(evidence)
        return cls(evidence, unrefuted, counts & unrefuted, trust, score, averages, offsets)
