"""Noise instead of gradients."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Gaussian(Forger):
    """Send pure noise, N(0, (scale s)^2), where an honest upload carries N(0, s^2)."""

    knows: ClassVar[Knowledge] = "blind"
    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    def forge(self, view: AdversaryView) -> Tensor:
        """Pure noise."""
        noise = view.params.new_empty(view.workers, len(view.params))
        return noise.normal_(0.0, self.scale * view.noise_std, generator=view.rng)
