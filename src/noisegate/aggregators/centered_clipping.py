"""Centered clipping (Karimireddy, He and Jaggi, 2021)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.distances import ROUNDING
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.errors import SpecError
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class CenteredClipping(Robust):
    """Step from a center, the last update, by the mean of the uploads' differences to it, each cut to a radius.

    Its state is the center. A missing upload has no part in the step; where no upload arrives, the center stays.

    radius: without it, the length s sqrt(d) of the noise. An honest upload is the noise and a short signal, so its
        distance is hardly larger. A smaller radius would shorten honest differences, and a larger one would let a
        Byzantine worker move the update further.
    iterations: steps in a round. The first starts at the last round's update (zero in the first round), where the
        paper proves one to be enough.
    score: the share of its difference that the last cut left to an upload.
    weights: the update is a weighted mean of the center and the uploads. The verdict has the uploads' parts, as shares
        of all that is not the center's.
    """

    needs: ClassVar[str] = "n > 2 f"
    radius: float | None = None
    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius is not None:
            checks.positive(radius=self.radius)
        checks.count(iterations=self.iterations)

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2: most differences must be honest."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        radius, norms = self._radius(view), view.norms.double()
        center, left, weights = stepped(state.get("center"), radius, view, norms)
        for _ in range(self.iterations - 1):
            center, left, step = stepped(center, radius, view, norms)
            weights = weights * (1 - step.sum()) + step
        # Without any upload, an update would be the server's own invention.
        update = center * view.present.any()
        return verdict_of(view, update, score=left, state={"center": center}, weights=weights)

    def _radius(self, view: ServerView) -> float:
        radius = view.noise_std * math.sqrt(view.uploads.shape[1]) if self.radius is None else self.radius
        if not radius:
            raise SpecError("radius: must be given where uploads have no noise")
        return radius


def stepped(center: Tensor | None, radius: float, view: ServerView, norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A point (None is zero) moved by the mean of the clipped differences.

    Beside it, (n,) the share that clipping left of each difference, and (n,) the uploads' weights in the new point; the
    rest of its weight is the old point's.
    """
    left = (radius / distances_to(center, view.uploads, norms)).clamp(max=1.0) * view.present
    share = left / view.present.sum().clamp(min=1)
    step = share.to(view.uploads.dtype) @ view.uploads
    return step if center is None else step + center * (1 - share.sum()), left, share


def distances_to(center: Tensor | None, uploads: Tensor, norms: Tensor) -> Tensor:
    """(n,) in float64, how far the uploads are from a point (None is zero), without their differences.

    A distance that rounding hides is taken for the largest that it can be. norms: the lengths in float64.
    """
    if center is None:
        return norms.clamp(min=torch.finfo(norms.dtype).tiny)
    length = torch.linalg.vector_norm(center, dtype=norms.dtype)
    # By its direction alone, no product is longer than an upload: none overflows.
    direction = (center / length.clamp(min=torch.finfo(center.dtype).tiny)).to(uploads.dtype)
    both = norms**2 + length**2
    apart = both - 2 * length * (uploads @ direction)
    return torch.maximum(apart, ROUNDING * both + torch.finfo(norms.dtype).tiny).sqrt()
