"""Local model poisoning of the trimmed mean and the median (Fang, Cao, Jia and Gong, 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class FangTrimmedMean(Forger):
    """Send, in every coordinate, values a little beyond all honest ones on the side that the honest mean is not on.

    Where the mean of the honest values is positive, below their minimum a: uniform between a and stretch a, or a /
    stretch if a is positive. Elsewhere above their maximum, likewise. Each worker draws its own.
    """

    stretch: float = 2.0

    def __post_init__(self) -> None:
        checks.positive(stretch=self.stretch)
        if self.stretch < 1:
            raise checks.refuse("stretch", self.stretch, "must be 1 or more")

    def forge(self, view: AdversaryView) -> Tensor:
        """Values beyond the honest ones."""
        honest = view.honest
        below = honest.mean(0, dtype=torch.float64) > 0
        low, high = honest.aminmax(dim=0)
        near = torch.where(below, low, high)
        outward = (near > 0) != below  # away from 0 is away from the honest values
        far = torch.where(outward, near * self.stretch, near / self.stretch)
        shares = torch.rand(view.workers, len(near), generator=view.rng, device=near.device, dtype=near.dtype)
        return torch.lerp(near, far, shares)
