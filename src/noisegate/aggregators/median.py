"""The coordinate-wise median (Yin, Chen, Ramchandran and Bartlett, 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from noisegate.aggregators.ranks import mean_of_ranks
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class Median(Robust):
    """The median of each coordinate; of an even number of uploads, the mean of the middle two.

    It does not depend on f, which only says how many Byzantine workers it must withstand. It is no weighted mean of
    uploads: the weights are equal shares.
    """

    needs: ClassVar[str] = "n >= 2 f + 1"

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, _ = self.counts(view)
        return verdict_of(view, mean_of_ranks(view.uploads, view.present, (n - 1) // 2, n // 2 + 1, view.scratch))
