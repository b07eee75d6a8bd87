"""The coordinate-wise trimmed mean (Yin, Chen, Ramchandran and Bartlett, 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from noisegate.aggregators.ranks import mean_of_ranks
from noisegate.aggregators.robust import Number, Robust, judged
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of each coordinate without its f lowest and its f highest values."""

    needs: ClassVar[str] = "n >= 2 f + 1"

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, f = self.counts(view)
        return judged(view, mean_of_ranks(view.uploads, view.present, f, n - f, view.scratch))
