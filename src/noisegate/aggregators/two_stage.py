"""The paper's filter: first the noise tests, then accumulated scores (Algorithms 2 and 3)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.average import average_of
from noisegate.aggregators.ks_test import ks_rejects
from noisegate.aggregators.upload_lengths import norm_interval
from noisegate.roles import Aggregator
from noisegate.views import Reason, ServerView, State, Verdict


@dataclass(frozen=True)
class TwoStage(Aggregator):
    """Refuse what does not look like the privacy noise, then keep those who agree with the server's own data.

    Stage one: an upload is rejected if its length is more than `width` standard deviations off what noise alone gives,
    or its KS test against the noise has a p-value below `significance`. Stage two: scores are inner products with the
    gradient of the auxiliary data; those below the mean of the top k are set to zero, the rest accumulates over the
    rounds, and the k workers with the highest totals are selected. Used are those that were selected and passed.

    stages: "both", or 1 or 2 alone.
    server_gradient: "plain" as printed; "normalized" averages the auxiliary examples' gradients after scaling each to
        unit length, which is what workers send (the plain one loses label flippers near the optimum).
    server_momentum: moving average of the server's gradient over the rounds; 0 as printed.
    divisor: "selected" divides by the uploads used, "workers" by all n (the literal 1/n of Algorithm 1).
    """

    stages: Literal["both", 1, 2] = "both"
    server_gradient: Literal["plain", "normalized"] = "plain"
    server_momentum: float = 0.0
    divisor: Literal["selected", "workers"] = "selected"
    width: float = 3.0
    significance: float = 0.05

    def __post_init__(self) -> None:
        checks.one_of(("both", 1, 2), stages=self.stages)
        checks.one_of(("plain", "normalized"), server_gradient=self.server_gradient)
        checks.one_of(("selected", "workers"), divisor=self.divisor)
        checks.fraction(server_momentum=self.server_momentum, significance=self.significance)
        checks.positive(width=self.width, significance=self.significance)

    @property
    def tests_noise(self) -> bool:
        """Whether it takes uploads for Gaussian noise."""
        return self.stages != 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        reason = self._first_stage(view)
        if self.stages == 1:
            score = torch.zeros_like(view.norms)
        else:
            passed = reason == Reason.KEPT.value
            others, score, state = self._second_stage(view, passed, state)
            reason.masked_fill_(passed & others, Reason.SCORE.value)
        kept = reason == Reason.KEPT.value
        divisor = len(kept) if self.divisor == "workers" else None
        return Verdict(average_of(view.uploads, kept, divisor), kept, reason, score, state)

    def _first_stage(self, view: ServerView) -> Tensor:
        """(n,) KEPT, or the first test that an upload failed."""
        reason = torch.full_like(view.present, Reason.KEPT.value, dtype=torch.int64)
        if self.stages != 2:
            low, high = norm_interval(view.uploads.shape[1], view.noise_std, self.width)
            outside = (view.norms < low) | (view.norms > high)
            unlike = ks_rejects(view.uploads, view.noise_std, self.significance, view.scratch)
            reason.masked_fill_(unlike, Reason.DISTRIBUTION.value).masked_fill_(outside, Reason.NORM.value)
        return reason.masked_fill_(~view.present, Reason.MALFORMED.value)

    def _second_stage(self, view: ServerView, passed: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """(n,) whom the accumulated scores leave out, (n,) those scores, and the new state."""
        top = view.believed_honest
        gradient = self._server_gradient(view, state)
        # A product that overflows says nothing, and must not stay in the state.
        score = (view.uploads @ gradient).masked_fill_(~passed, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        # In float64: in float32 the mean of equal scores can come out above them all.
        threshold = score.double().topk(top).values.mean()
        score.masked_fill_(score < threshold, 0.0)
        total = score + state["total"] if "total" in state else score
        # Equal totals, as in the first rounds, are ranked by a random order and never by position.
        ranking = view.ties[torch.argsort(total[view.ties], descending=True, stable=True)]
        others = torch.ones_like(passed).index_fill_(0, ranking[:top], False)
        return others, total, {"total": total, "gradient": gradient}

    def _server_gradient(self, view: ServerView, state: State) -> Tensor:
        now = view.auxiliary(self.server_gradient == "normalized").nan_to_num(0.0, 0.0, 0.0)
        if not self.server_momentum:
            return now
        before = state.get("gradient", now)
        return self.server_momentum * before + (1 - self.server_momentum) * now
