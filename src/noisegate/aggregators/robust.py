"""The base of the aggregators that reckon with a number of Byzantine workers."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate.errors import SpecError
from noisegate.roles import Aggregator, Number
from noisegate.views import Reason, ServerView, State, Verdict


@dataclass(frozen=True)
class Robust(Aggregator):
    """An aggregator for the uploads of n workers of which f may be Byzantine.

    byzantine: f. Without it, as many as the server believes, but no more than the aggregator admits: where most workers
        are Byzantine, these aggregators cannot tell which group is the honest one.
    """

    needs: ClassVar[str] = "fewer Byzantine workers"

    byzantine: int | None = None

    def __post_init__(self) -> None:
        if self.byzantine is not None and not (type(self.byzantine) is int and self.byzantine >= 0):
            raise SpecError(f"byzantine = {self.byzantine!r}: must be a whole number, 0 or more")

    @abstractmethod
    def most(self, workers: Number) -> Number:
        """The largest f that it admits among so many workers, below 0 if they are too few for any."""

    @abstractmethod
    def __call__(self, view: ServerView, state: State) -> Verdict: ...

    def chosen(self) -> int | None:
        """f, if it was given."""
        return self.byzantine

    def check(self, workers: int, f: int | None = None) -> None:
        """SpecError if the aggregator does not exist for so many workers, or not with this f, or the chosen one."""
        most, chosen = self.most(workers), self.chosen() if f is None else f
        if most < 0 or (chosen is not None and chosen > most):
            asked = f"byzantine = {chosen}" if chosen is not None else f"{workers} workers"
            fewest = next((str(n) for n in range(workers, 100 * workers) if self.most(n) >= 0), "more")
            at_most = f"at most {most} of {workers} workers; lower byzantine"
            help = at_most if most >= 0 else f"at least {fewest}; raise workers"
            raise SpecError(f"{asked}: needs {self.condition()}, so {help}")

    def reckoned(self, workers: int, honest: int) -> int:
        """f for so many workers of which the server believes so many honest."""
        chosen = self.chosen()
        wanted = workers - honest if chosen is None else chosen
        return max(0, min(wanted, self.most(workers)))

    def counts(self, view: ServerView) -> tuple[int, int] | tuple[Tensor, Tensor]:
        """(n, f) of a round: n uploads are well-formed, f of them may be Byzantine. () tensors on a CUDA device.

        An upload that is malformed or missing is not among the n. This does not prove that one Byzantine worker fewer
        is left: f stays, if the aggregator still admits it.
        """
        workers, honest = len(view.present), view.believed_honest
        f = self.reckoned(workers, honest)
        if not view.present.is_cuda:
            n = int(view.present.sum())
            return n, max(0, min(f, self.most(n)))
        number = view.present.sum()
        return number, self.most(number).clamp(0, f)


def verdict_of(
    view: ServerView,
    update: Tensor,
    kept: Tensor | None = None,
    score: Tensor | None = None,
    state: State | None = None,
    weights: Tensor | None = None,
) -> Verdict:
    """The verdict of an aggregator that accuses nobody but prefers some uploads to others.

    kept: (n,) whose uploads are in the update; unless given, all that arrived well-formed. Where it is nobody, the
        update must be zero.
    weights: (n,) what each of these counted for, of any sum; unless given, they count alike. See `Verdict.weights`.
    """
    kept = view.present if kept is None else kept & view.present
    reason = view.mark_absent(torch.where(kept, Reason.KEPT.value, Reason.SCORE.value))
    score = torch.zeros_like(view.norms) if score is None else score.to(view.norms).masked_fill(~view.present, 0.0)
    if weights is not None:
        weights = torch.where(kept, weights.double(), 0.0)
        weights = (weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)).to(view.norms)
    # A score that overflowed is the largest there is.
    return Verdict(update, kept, reason, score.nan_to_num(), state or {}, weights=weights)  # type: ignore[arg-type]


def lower(one: Number, other: Number) -> Number:
    """The smaller of two numbers, which may be on a device: by arithmetic alone."""
    return (one + other - abs(one - other)) // 2
