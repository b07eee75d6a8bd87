"""Whether the server's examples are like the workers', and what to do where they are not.

Everything that `fortified` tests rests on one premise: an honest upload is made of examples like the server's. Where
they are not, the tests refuse honest workers, and believe whoever imitates the server's examples. Two signs tell:

* the workers who agree most with the server's examples agree by less than half of what these examples promise, on
  average over about a hundred rounds. Byzantine workers cannot bring this about: the best tenth of the workers would
  have to be theirs, and disagree;
* fewer workers are left than are honest, by the server's own belief.

Then evidence and trust count for nothing, and workers are ranked by their accumulated scores, as the paper's second
stage does it (`two_stage`): along the same plain gradient, since examples that are long are the ones that tell most
where the others tell nothing. Lengths, distributions, copies, and noise alone are still told by themselves.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.state import TINY, FortifiedState
from noisegate.aggregators.fortified.trust import AGREEMENT_SPEED, CAUTION, MOST_TRUST, best_agreement
from noisegate.aggregators.two_stage import CREDIT, add_up, highest, mean_of_best, places
from noisegate.views import ServerView

CHANCE = 4.0
"""How many standard deviations of an average of noise the best must lie below what is expected."""

LEAST_LEFT = 0.75
"""The share of the believed honest workers that must be left: chance refuses some of them for a while."""


class Premise(NamedTuple):
    """fails: () whether the premise fails in this round. credit: as in the state, after the round.

    best: (n,) who is among the best by accumulated scores, and did not send noise alone.
    """

    fails: Tensor
    credit: Tensor
    best: Tensor

    @classmethod
    def of(cls, view: ServerView, state: FortifiedState, counts: Tensor, unrefuted: Tensor) -> "Premise":
        """counts: (n,) whose upload passed the first tests. unrefuted: (n,) as in the state, after the round."""
        # Both are averages of the same rounds, and the missing correction of both is the same.
        promised = state.promised / state.bias_correction.amax().clamp(min=TINY)
        chance = CHANCE * view.noise_std * (AGREEMENT_SPEED / 2) ** 0.5
        disagrees = best_agreement(state, view.believed_honest) + chance < CAUTION * promised
        few = unrefuted.sum() < LEAST_LEFT * places(view)
        credit = credited(view, state, counts)
        noise_alone = state.presence < -MOST_TRUST
        best = highest(credit[0].masked_fill(noise_alone, -1.0), view) & ~noise_alone
        return cls(disagrees | few, credit, best)


def credited(view: ServerView, state: FortifiedState, counts: Tensor) -> Tensor:
    """(CREDIT, n) the credit after the round, as `TwoStage` reckons it. counts: (n,) who passed the first tests."""
    gradient = view.auxiliary(False).nan_to_num(0.0, 0.0, 0.0)
    score = torch.where(counts, view.uploads @ gradient, 0.0).nan_to_num(0.0, 0.0, 0.0)
    doubled = score.double()
    score = score.masked_fill(score < mean_of_best(doubled, doubled, view), 0.0)
    learned = add_up(score, view, dict(zip(CREDIT, state.credit, strict=True)))
    return torch.stack([learned[name] for name in CREDIT])
