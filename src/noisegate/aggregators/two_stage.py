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
from noisegate.vectors import counting
from noisegate.views import Reason, ServerView, State, Verdict

CREDIT = ("total", "earned", "attended", "missed", "allowance")
"""What is carried from one round to the next for each worker, as `add_up` explains it."""


@dataclass(frozen=True)
class TwoStage(Aggregator):
    """Refuse uploads that do not look like the privacy noise, then keep those that agree with the server's own data.

    Stage one: an upload is rejected if its length is more than `width` standard deviations off what noise alone gives,
    or its KS test against the noise has a p-value below `significance`. Stage two: scores are inner products with the
    gradient of the auxiliary data; those below the mean of the top k are set to zero, the rest accumulates over the
    rounds, and the k workers with the highest totals are selected. Used are those that were selected and passed.

    A missing upload is out of its round: the top k, by score and by total, are among the workers whose uploads arrived,
    and k is the believed share of those. For the rounds that it missed, a worker is credited with its own mean score
    over the rounds that it attended, but with no more than these rounds brought on average to the k workers with the
    highest totals. So absence costs an honest worker little, and who comes back with worse uploads loses the credit
    again. A high mean of few rounds stands for all that were missed: absence can buy what as many honest rounds would
    have bought. A malformed or rejected upload scores zero, as printed.

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
        return view.mark_absent(reason)

    def _second_stage(self, view: ServerView, passed: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """(n,) whom the accumulated scores leave out, (n,) those scores, and the new state."""
        gradient = self._server_gradient(view, state)
        # A product that overflows says nothing, and must not stay in the state.
        score = (view.uploads @ gradient).masked_fill_(~passed, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        # In float64: in float32 the mean of equal scores can come out above them all.
        doubled = score.double()
        threshold = mean_of_best(doubled, doubled, view)
        score.masked_fill_(score < threshold, 0.0)
        learned = add_up(score, view, state)
        total = learned["total"]
        return ~highest(total, view), total, {**learned, "gradient": gradient}

    def _server_gradient(self, view: ServerView, state: State) -> Tensor:
        now = view.auxiliary(self.server_gradient == "normalized").nan_to_num(0.0, 0.0, 0.0)
        if not self.server_momentum:
            return now
        before = state.get("gradient", now)
        return self.server_momentum * before + (1 - self.server_momentum) * now


def ranked(values: Tensor, view: ServerView) -> Tensor:
    """(n,) the workers from the highest value; those whose uploads are missing come last.

    Equal values, as the totals of the first rounds, are ranked by a random order and never by position.
    """
    if view.missing is not None:
        values = values.masked_fill(view.missing, -torch.inf)
    return view.ties[torch.argsort(values[view.ties], descending=True, stable=True)]


def places(view: ServerView) -> Tensor | int:
    """k: as many as are believed honest, of all workers. Of fewer that arrived, the same share, rounded up."""
    if view.missing is None:
        return view.believed_honest
    n = len(view.missing)
    return (view.believed_honest * (~view.missing).sum() + n - 1) // n


def highest(values: Tensor, view: ServerView) -> Tensor:
    """(n,) who has one of the k highest values of those whose uploads arrived."""
    top = counting(len(values), values.device) < places(view)
    return torch.empty_like(top).scatter_(0, ranked(values, view), top)


def mean_of_best(values: Tensor, by: Tensor, view: ServerView) -> Tensor:
    """() the mean of these values over the k workers that have the highest of `by`; 0 where nobody is there."""
    if view.missing is None and values is by:
        return values.topk(view.believed_honest).values.mean()
    chosen = highest(by, view)
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp(min=1)


def add_up(score: Tensor, view: ServerView, state: State) -> dict[str, Tensor]:
    """The state after a round, (n,) each.

    earned: what a worker's uploads scored. attended, missed: the rounds in which they arrived, or did not. allowance:
    what the rounds that it missed brought on average to the k workers with the highest totals. total: earned, and for
    the missed rounds as much as in the mean of the others, but no more than the allowance.

    score: (n,) what this round's uploads are credited with; zero for those that are missing.
    """
    total, earned, attended, missed, allowance = (state.get(name, torch.zeros_like(score)) for name in CREDIT)
    earned = earned + score
    if view.missing is None:
        attended = attended + 1
    else:
        # By the totals before the round: the round's own best scores are higher than anyone's over time.
        usual = mean_of_best(score, total, view)
        allowance = allowance + torch.where(view.missing, usual, 0.0)
        attended, missed = attended + ~view.missing, missed + view.missing
    total = earned + torch.minimum(earned / attended.clamp(min=1) * missed, allowance)
    return dict(zip(CREDIT, (total, earned, attended, missed, allowance), strict=True))
