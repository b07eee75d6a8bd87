"""The geometric median by smoothed Weiszfeld steps, RFA (Pillutla, Kakade and Harchaoui, 2022)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.distances import LONGEST, inner_products, shortening
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict

SMALLEST = 1e-30
"""The least smoothing, a length: 1 / smoothing must be a finite number."""

SHARE = 1e-3
"""The default smoothing as a share of the noise's length: about what inner products in float32 can tell apart."""


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point whose distances to all uploads have the smallest sum.

    Each step weighs the uploads by 1 / max(distance, smoothing) from the last point, the first of them from zero. All
    points are weighted means, so their distances come from the inner products of the uploads, and a step takes no pass
    over the coordinates.

    smoothing: a length below which a distance does not pull more; without it, a thousandth of the length s sqrt(d) of
        the noise, which no two honest uploads come close to, and at least 1e-6.
    tolerance: stop when all uploads, each pulling with force 1, pull with less than this times n together. A CUDA
        device does all steps.
    iterations: most steps. Noise takes few. Where nearly half of all agree on a point far from the others, the steps
        away from it grow only slowly.
    score: the weight of an upload.
    """

    needs: ClassVar[str] = "n > 2 f"
    smoothing: float | None = None
    tolerance: float = 1e-6
    iterations: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothing is not None:
            checks.positive(smoothing=self.smoothing)
            if not SMALLEST <= self.smoothing <= LONGEST:
                raise checks.refuse("smoothing", self.smoothing, f"must lie between {SMALLEST:g} and {LONGEST:g}")
        checks.fraction(tolerance=self.tolerance)
        checks.count(iterations=self.iterations)

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2: who has half of the uploads can put the median anywhere."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        products = inner_products(view.uploads, view.norms)
        weights = self._weights(products, view.present, self._smoothing(view))
        shares = (weights * shortening(view.norms)).to(view.uploads.dtype)
        return verdict_of(view, shares @ view.uploads, score=weights, weights=weights)

    def _smoothing(self, view: ServerView) -> float:
        noise = view.noise_std * math.sqrt(view.uploads.shape[1])
        return max(1e-6, SHARE * noise) if self.smoothing is None else self.smoothing

    def _weights(self, products: Tensor, present: Tensor, smoothing: float) -> Tensor:
        """(n,) in float64, the weights of the uploads in the last point; they add up to 1."""
        squares = products.diagonal()
        weights = torch.zeros_like(squares)
        for _ in range(self.iterations):
            toward = products @ weights
            apart = (squares - 2 * toward + weights @ toward).clamp(min=0.0).sqrt().clamp(min=smoothing)
            pull = present / apart
            last, weights = weights, pull / pull.sum().clamp(min=torch.finfo(pull.dtype).tiny)
            if not products.is_cuda:
                step = weights - last
                force = pull.sum() * (step @ products @ step).clamp(min=0.0).sqrt()
                if float(force) <= self.tolerance * len(present):
                    break
        return weights
