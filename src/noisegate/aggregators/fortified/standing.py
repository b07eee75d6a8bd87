"""What is held against each worker, and for it, after a round: evidence, trust, and offsets."""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.doubt import OFFSET_SPEED
from noisegate.aggregators.fortified.evidence import gathered, largest, together
from noisegate.aggregators.fortified.expectation import expected
from noisegate.aggregators.fortified.mixture import Mixture
from noisegate.aggregators.fortified.state import COMMON, FortifiedState
from noisegate.aggregators.fortified.trust import (
    AGREEMENT_SPEED,
    MOST_TRUST,
    agreement_of,
    best_agreement,
    earned,
    leaning,
    promised_by,
)
from noisegate.views import ServerView


class WorkerStanding(NamedTuple):
    """What is known of everyone after a round: what the state has under the same names.

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
    promised: Tensor
    offsets: Tensor
    presence: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        projections: Projections,
        mixture: Mixture,
        contributions: Tensor,
        counts: Tensor,
        evidence_limit: float,
    ) -> "WorkerStanding":
        """counts: (n,) whose upload passed the first tests. What is known of the others stays as it was.

        contributions: (A, d) of the server's examples. evidence_limit: the largest log-likelihood ratio that is
        allowed.
        """
        along, moments = projections.of_uploads, projections.moments
        interval = expected(view, state, projections)
        evidence = gathered(state.evidence, interval.outside(along, moments.variance), counts)
        unrefuted = largest(evidence) <= evidence_limit
        found, should = agreement_of(mixture, moments.error[:, 0])
        promised = torch.lerp(state.promised, promised_by(mixture, moments.error[:, 0]), AGREEMENT_SPEED)
        should = torch.minimum(should, best_agreement(state, view.believed_honest).clamp(min=0.0))
        trust = torch.where(counts, earned(state.trust, found, should, moments.variance[:, 0]), state.trust)
        averages = torch.where(counts, torch.lerp(state.agreement, found, AGREEMENT_SPEED), state.agreement)
        offsets = torch.lerp(state.offsets, along[:, 1:COMMON] - moments.mean[:, 1:COMMON], OFFSET_SPEED)
        offsets = torch.where(counts[:, None], offsets, state.offsets)
        leans = leaning(view, contributions, mixture.mix, view.noise_std**2, projections.along_last)
        presence = (state.presence + leans).clamp(-2 * MOST_TRUST, 0.0)
        presence = torch.where(counts & state.counted, presence, state.presence)
        score = state.trust + state.presence - together(evidence)
        return cls(evidence, unrefuted, counts & unrefuted, trust, score, averages, promised, offsets, presence)
