"""Nearest neighbor mixing (Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, 2023)."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from noisegate.aggregators.distances import distances_of
from noisegate.aggregators.robust import verdict_of
from noisegate.aggregators.trimmed_mean import TrimmedMean
from noisegate.aggregators.wrapper import INNER_NEEDS, Wrapper
from noisegate.roles import Aggregator, Number
from noisegate.vectors import counting, finite_rows
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class NearestNeighborMixing(Wrapper):
    """Replace each upload by the mean of the n - f nearest to it, then any aggregator on the means.

    An upload is kept if it has a share in a mean that the aggregator keeps. Its weight is the sum of its shares in the
    means, each times the weight that the aggregator gives to that mean. A missing upload has no share in any mean, and
    the mean around it is missing too.

    aggregator: what judges the means, with the same f. Their noise has standard deviation s / sqrt(n - f). A CUDA
        device does not count how many uploads are malformed or missing for it, and takes the n of a round with none.
    score: what the aggregator gives to the mean around an upload.
    """

    needs: ClassVar[str] = f"n > 2 f, and {INNER_NEEDS}"
    aggregator: Aggregator = field(default_factory=TrimmedMean)

    def admitted(self, workers: Number) -> Number:
        """(n - 1) / 2."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, f = self.counts(view)
        near = nearest(view, n - f)
        # Divided before it is added up; and one product of matrices, instead of n - f rows for each of n.
        weights = near.to(view.uploads.dtype) / near.sum(1, keepdim=True).clamp(min=1)
        workers = len(view.uploads)
        rows, norms, formed = finite_rows(weights @ view.uploads)
        honest = workers - self.reckoned(workers, view.believed_honest)
        mixed = n - f if isinstance(n, int) and isinstance(f, int) else honest
        seen = replace(
            view,
            uploads=rows,
            norms=norms,
            present=formed & view.present,
            noise_std=view.noise_std / math.sqrt(max(1, mixed)),
            believed_honest=honest,
        )
        verdict = self.aggregator(seen, state)
        kept = (near & verdict.kept[:, None]).any(0)
        composed = verdict.weights.double() @ weights.double()
        found = verdict_of(view, verdict.update, kept, verdict.score, verdict.state, composed)
        return replace(found, fell_back=verdict.fell_back)


def nearest(view: ServerView, count: int | Tensor) -> Tensor:
    """(n, n) for each upload the `count` nearest, itself included; equal ones by `ties`.

    A malformed or missing upload is near to none, and none to it.
    """
    apart = distances_of(view)
    order = view.ties[torch.argsort(apart[:, view.ties], dim=1, stable=True)]
    place = torch.empty_like(order).scatter_(1, order, counting(len(order), order.device).expand_as(order))
    return (place < count) & view.present & view.present[:, None]
