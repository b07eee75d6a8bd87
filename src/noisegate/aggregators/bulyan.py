"""Bulyan over Krum (El Mhamdi, Guerraoui and Rouault, 2018)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate.aggregators.distances import distances_of
from noisegate.aggregators.krum import krum_scores
from noisegate.aggregators.ranks import mean_near_median
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.vectors import counting
from noisegate.views import ServerView, State, Verdict

FARTHEST = 1e200
"""The squared distance that an upload has to itself, so that it never counts: above any other, but not infinite."""


@dataclass(frozen=True)
class Bulyan(Robust):
    """Choose n - 2f uploads by Krum, one after the other, then average the values nearest to the median per coordinate.

    Krum is asked n - 2f times for one of those not chosen yet, as in the paper: with r of them left it counts the
    r - f - 2 nearest others of each that are left too, and at least one, since the last choices leave fewer than Krum
    needs. These last choices may take a Byzantine upload that others are close to. Then, per coordinate, the n - 4f of
    the chosen values closest to their median are averaged, so that no Byzantine worker moves the update beyond what
    honest ones sent. This is no weighted mean of uploads: the weights are equal shares of the chosen.

    score: Krum's before the first choice, the sum of the squared distances, which counts against an upload.
    """

    needs: ClassVar[str] = "n >= 4 f + 3"

    def most(self, workers: Number) -> Number:
        """(n - 3) / 4."""
        return (workers - 3) // 4

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, f = self.counts(view)
        apart = distances_of(view)
        chosen = chosen_in_turn(apart, view, n, f)
        update = mean_near_median(view.uploads, chosen, n - 4 * f, view.scratch)
        return verdict_of(view, update, chosen, krum_scores(apart, n - f - 2))


def chosen_in_turn(apart: Tensor, view: ServerView, n: int | Tensor, f: int | Tensor) -> Tensor:
    """(n,) the n - 2f that Krum chooses, from (n, n) squared distances: each time among those not chosen yet."""
    # In the random order, so that the first of equal scores is the one that the order prefers.
    apart = apart[view.ties][:, view.ties].fill_diagonal_(FARTHEST)
    left = view.present[view.ties]
    nearest, who = apart.sort(dim=1)
    counts = left[who]  # whether the upload of a place in `nearest` is still left
    place = counting(len(left), left.device)
    for turn in range(n - 2 * f if isinstance(n, int) and isinstance(f, int) else len(left)):
        neighbors = n - turn - f - 2
        neighbors = neighbors.clamp(min=1) if isinstance(neighbors, Tensor) else max(1, neighbors)
        used = counts & (counts.cumsum(1, dtype=torch.int32) <= neighbors)
        score = torch.where(used, nearest, 0.0).sum(1).masked_fill_(~left, torch.inf)
        stays = (place != score.argmin()) | (turn >= n - 2 * f)
        left, counts = left & stays, counts & stays[who]
    chosen = torch.empty_like(left)
    chosen[view.ties] = ~left
    return chosen & view.present
