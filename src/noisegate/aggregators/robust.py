"""What all aggregators have in common that reckon with a number of liars."""

import typing
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate.errors import SpecError
from noisegate.roles import Aggregator
from noisegate.views import Reason, ServerView, State, Verdict

Number = typing.TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class Robust(Aggregator):
    """An aggregator for n uploads of which f may be lies.

    byzantine: f. Without it, as many as the server believes, but no more than the aggregator admits: where most
    workers lie,
        these aggregators have no honest choice.
    """

    needs: ClassVar[str] = "fewer liars"
    """The condition on n and f, for people."""

    byzantine: int | None = None

    def __post_init__(self) -> None:
        if self.byzantine is not None and not (type(self.byzantine) is int and self.byzantine >= 0):
            raise SpecError(f"byzantine = {self.byzantine!r}: must be a whole number, 0 or more")

    @abstractmethod
    def most(self, workers: Number) -> Number:
        """The largest f that the aggregator admits of so many workers, below 0 if they are too few for any.

        By arithmetic alone: a device counts the workers with a tensor.
        """

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
            room = f"at most {most} of {workers} workers; lower byzantine"
            help = room if most >= 0 else f"at least {fewest}; raise workers"
            raise SpecError(f"{asked}: needs {self.condition()}, so {help}")

    def condition(self) -> str:
        """What it needs, in full."""
        return self.needs

    def reckoned(self, workers: int, honest: int) -> int:
        """f for so many workers of which the server believes so many honest."""
        chosen = self.chosen()
        wanted = workers - honest if chosen is None else chosen
        return max(0, min(wanted, self.most(workers)))

    def counts(self, view: ServerView) -> tuple[int, int] | tuple[Tensor, Tensor]:
        """(n, f) of a round: of the well-formed uploads. () tensors on a CUDA device, where nobody looks.

        A malformed upload is out, but does not prove that one liar fewer is left: f stays, if the aggregator still
        admits it.
        """
        workers, honest = len(view.present), view.believed_honest
        f = self.reckoned(workers, honest)
        if not view.present.is_cuda:
            n = int(view.present.sum())
            return n, max(0, min(f, self.most(n)))
        number = view.present.sum()
        return number, self.most(number).clamp(0, f)


def judged(
    view: ServerView,
    update: Tensor,
    kept: Tensor | None = None,
    score: Tensor | None = None,
    state: State | None = None,
) -> Verdict:
    """The verdict of an aggregator that refuses nobody but prefers some. kept: (n,); everyone unless given.

    Where nobody is kept the update must be zero, and it is: there was nothing to make it of.
    """
    kept = view.present if kept is None else kept & view.present
    reason = torch.where(kept, Reason.KEPT.value, Reason.SCORE.value)
    reason = torch.where(view.present, reason, Reason.MALFORMED.value)
    score = torch.zeros_like(view.norms) if score is None else score.to(view.norms).masked_fill(~view.present, 0.0)
    # A score that overflowed is the largest there is.
    return Verdict(update, kept, reason, score.nan_to_num(), state or {})


def lower(one: Number, other: Number) -> Number:
    """The smaller of two numbers, which a device may hold: by arithmetic alone."""
    return (one + other - abs(one - other)) // 2
