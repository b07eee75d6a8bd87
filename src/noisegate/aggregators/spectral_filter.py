"""Robust mean estimation by iterative spectral filtering (Zhu, Wang, Pang, Wang, Jiao, Song and Jordan, 2023)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.bucketing import buckets, shares
from noisegate.aggregators.distances import ROUNDING, inner_products, shortening
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict

SQUARINGS = 6
"""How often the matrix is squared whose largest eigenvalue is sought. This makes 64 steps of the power method, which
find 96 % of it or more."""

SNAP = 1e-4
"""A bucket that is left with a smaller share of its weight loses it all. Of one very far away, what is left would
otherwise be rounding."""

TINY = 1e-300
"""The least divisor, in place of 0."""


@dataclass(frozen=True)
class SpectralFilter(Robust):
    """Take weight from uploads that stick out in the direction of largest variance until it is explained by the noise.

    Random buckets are averaged; then, again and again, the direction is found in which the weighted averages vary most,
    and each loses the share of its weight that its squared deviation has of the largest one. It ends when that variance
    is no larger than `threshold` times what noise alone has, or after 2 f times: while the variance is too large,
    Byzantine workers lose more weight than honest ones if they spoil less than a third of the buckets.

    The paper compares with a known bound on the variance, and cuts the coordinates into parts that are filtered on
    their own. Here the noise gives the bound, s^2 / bucket (sqrt(d) + sqrt(m))^2 over the total weight of m buckets
    (the Marchenko-Pastur edge), and all coordinates are one part.

    threshold: the multiple of that bound.
    bucket: uploads in a bucket, 1 for none. Averages have lighter tails, which Gaussian noise does not need, and a
        Byzantine worker spoils the whole bucket.
    score: the weight that is left.
    """

    needs: ClassVar[str] = "ceil(n / bucket) > 3 f"
    threshold: float = 1.5
    bucket: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(threshold=self.threshold)
        checks.count(bucket=self.bucket)

    def most(self, workers: Number) -> Number:
        """A third of the buckets, less one."""
        return (-(-workers // self.bucket) - 1) // 3

    def __call__(self, view: ServerView, state: State) -> Verdict:
        _, f = self.counts(view)
        member = buckets(view, self.bucket)
        mixing = shares(member)
        products = mixing @ inner_products(view.uploads, view.norms) @ mixing.T
        rounds = 2 * self.reckoned(len(view.present), view.believed_honest)
        # A bucket that is not full counts less, since it has more noise.
        weights = member.sum(1) / self.bucket
        weights = self._filtered(products, weights.double(), self._bound(view, member), rounds, 2 * f)
        left = weights @ mixing
        share = left / left.sum().clamp(min=TINY) * shortening(view.norms)
        return verdict_of(view, share.to(view.uploads.dtype) @ view.uploads, left > 0, left * self.bucket, weights=left)

    def _bound(self, view: ServerView, member: Tensor) -> Tensor:
        """() the largest variance that is put down to the noise, times the total weight."""
        number, d = member.any(1).sum().double(), view.uploads.shape[1]
        return self.threshold * view.noise_std**2 / self.bucket * (math.sqrt(d) + number.sqrt()) ** 2

    def _filtered(self, products: Tensor, weights: Tensor, bound: Tensor, rounds: int, until: int | Tensor) -> Tensor:
        """(m,) in float64, what is left of the buckets' weights after `until` of `rounds` rounds or before."""
        for i in range(rounds):
            variance, deviations = main_direction(products, weights)
            rounding = ROUNDING * torch.where(weights > 0, products.diagonal(), 0.0).max()  # equal uploads do not vary
            too_large = (variance > rounding) & (variance * weights.sum() > bound) & (i < until)
            if not products.is_cuda and not bool(too_large):
                break
            deviations = torch.where(weights > 0, deviations, 0.0)
            left = 1 - deviations / deviations.max().clamp(min=TINY)
            left = torch.where(left < SNAP, 0.0, left)
            weights = torch.where(too_large, weights * left, weights)
        return weights


def main_direction(products: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The largest variance of weighted points in any direction, and (m,) their squared deviations in that direction.

    products: (m, m) their inner products. By the power method on the matrix of weighted inner products around the mean,
    which has the eigenvalues of the covariance.
    """
    share = weights / weights.sum().clamp(min=TINY)
    toward = products @ share
    centered = products - toward[:, None] - toward[None, :] + share @ toward
    roots = share.sqrt()
    matrix = roots[:, None] * centered * roots
    power = matrix
    for _ in range(SQUARINGS):
        power = power / power.diagonal().sum().clamp(min=TINY)
        power = power @ power
    # Of a power of one large eigenvalue every column is its vector; the one of the largest entry has most of it.
    start = power.index_select(1, power.diagonal().argmax()[None])[:, 0]
    vector = start / torch.linalg.vector_norm(start).clamp(min=TINY)
    # The direction is the sum of the centered points by these factors, over its length.
    factors = roots * vector
    toward = centered @ factors
    deviations = toward**2 / (factors @ toward).clamp(min=TINY)
    return share @ deviations, deviations
