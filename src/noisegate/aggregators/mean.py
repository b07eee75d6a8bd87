"""No defense at all."""

from dataclasses import dataclass

import torch

from noisegate.aggregators.average import average_of
from noisegate.roles import Aggregator
from noisegate.views import Reason, ServerView, State, Verdict


@dataclass(frozen=True)
class Mean(Aggregator):
    """The average of every well-formed upload that arrived."""

    def __call__(self, view: ServerView, state: State) -> Verdict:
        reason = view.mark_absent(torch.full_like(view.present, Reason.KEPT.value, dtype=torch.int64))
        score = torch.zeros_like(view.norms)
        return Verdict(average_of(view.uploads, view.present), view.present, reason, score, state)
