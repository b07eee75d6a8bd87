"""The weight of each upload in the update: its odds of being honest, and the reason of those that have none."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.mixture import Mixture, balanced
from noisegate.aggregators.fortified.state import TINY, FortifiedState
from noisegate.views import Reason, ServerView

LEAST_WEIGHT = 0.02
"""Uploads that would weigh less than this share of the heaviest one are left out."""

STAGES = (Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION, Reason.EVIDENCE, Reason.DEPENDENT, Reason.SCORE)
"""What an upload has to get past, in this order."""


class Weights(NamedTuple):
    """Everyone's part in the update: (n,) each, as in `Verdict`, and `largest_weights` (2,) as in the state."""

    weights: Tensor
    kept: Tensor
    reason: Tensor
    score: Tensor
    largest_weights: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        score: Tensor,
        doubt: Tensor,
        repeats: Tensor,
        passed: Tensor,
        stages: list[Tensor],
        mixture: Mixture,
    ) -> "Weights":
        """score, doubt: (n,) logarithms of odds. repeats: (n,) as `find_copies` has it. passed: (n,) all the tests.

        stages: (n,) each, who got past each of STAGES but the last; of the last but one, who did not: the copies.
        """
        prior = view.believed_honest / (len(score) + 1)
        prior = math.log(prior / (1 - prior))
        odds = torch.sigmoid(score + prior) * (-doubt).exp() * passed / (1 + repeats)
        odds = balanced(odds, mixture)
        heavy = odds >= LEAST_WEIGHT * odds.amax()
        kept = passed & heavy
        odds = odds * kept
        weights = odds / odds.sum().clamp(min=TINY)
        largest_weights = torch.stack([weights.amax(), state.largest_weights[0]])
        *tests, copies = stages
        return cls(weights, kept, first_failed([*tests, ~copies, heavy]), score - doubt, largest_weights)

    def unless(self, fails: Tensor, chosen: Tensor, repeats: Tensor, state: FortifiedState) -> "Weights":
        """These, unless the premise `fails`: then the chosen (n,) have equal weights, but what is repeated counts once.

        Who passed the tests and is not chosen is out by its score.
        """
        odds = chosen / (1 + repeats)
        weights = torch.where(fails, odds / odds.sum().clamp(min=TINY), self.weights)
        by_score = (self.reason == Reason.KEPT) | (self.reason == Reason.SCORE)
        reason = torch.where(chosen, Reason.KEPT.value, Reason.SCORE.value)
        return self._replace(
            weights=weights,
            kept=torch.where(fails, chosen, self.kept),
            reason=torch.where(fails & by_score, reason, self.reason),
            largest_weights=torch.stack([weights.amax(), state.largest_weights[0]]),
        )


def first_failed(passed: list[Tensor]) -> Tensor:
    """(n,) the reason of the first of STAGES that an upload did not get past; KEPT if it got past all.

    passed: (n,) for each stage.
    """
    return _reasons(passed[0].device)[torch.stack(passed).cumprod(0).sum(0)]


@functools.lru_cache(maxsize=8)
def _reasons(device: torch.device) -> Tensor:
    """The reason by the number of stages that were passed."""
    return torch.tensor([*STAGES, Reason.KEPT], dtype=torch.int64, device=device)
