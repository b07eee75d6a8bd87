"""Krum and Multi-Krum (Blanchard, El Mhamdi, Guerraoui and Stainer, 2017)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.average import average_of
from noisegate.aggregators.distances import distances_of, lowest
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.vectors import counting
from noisegate.views import ServerView, State, Verdict


def krum_scores(apart: Tensor, neighbors: int | Tensor) -> Tensor:
    """(n,) the sum of each upload's squared distances to its `neighbors` nearest others, from (n, n) of them."""
    nearest = apart.sort(dim=1).values[:, 1:]  # the first is its own, 0
    chosen = counting(nearest.shape[1], apart.device) < neighbors
    return torch.where(chosen, nearest, 0.0).sum(1)


@dataclass(frozen=True)
class MultiKrum(Robust):
    """The mean of the `keep` uploads whose n - f - 2 nearest others are nearest.

    keep: n - f unless given. score: the sum of the squared distances to those others, which counts against an upload.
    """

    needs: ClassVar[str] = "n >= 2 f + 3"
    keep: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            checks.count(keep=self.keep)

    def most(self, workers: Number) -> Number:
        """(n - 3) / 2."""
        return (workers - 3) // 2

    def check(self, workers: int, f: int | None = None) -> None:
        """As for every aggregator; and there must be as many as are to be kept."""
        super().check(workers, f)
        if self.keep is not None and self.keep > workers:
            raise checks.refuse("keep", self.keep, f"must be at most the {workers} workers there are")

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, f = self.counts(view)
        score = krum_scores(distances_of(view), n - f - 2)
        kept = lowest(score, view, n - f if self.keep is None else self.keep)
        return verdict_of(view, average_of(view.uploads, kept), kept, score)


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one upload whose n - f - 2 nearest others are nearest.

    score: the sum of the squared distances to them, which counts against an upload.
    """

    keep: int | None = field(default=1, init=False)
