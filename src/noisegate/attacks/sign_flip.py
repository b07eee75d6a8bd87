"""Honest computation with the sign turned around (Li, Xu, Chen, Giannakis and Ling, 2019)."""

from dataclasses import dataclass

from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class SignFlip(Honest):
    """Send -scale times what the protocol computed for the worker itself.

    Noise turned around is noise all the same: with scale = 1 only the direction of the signal tells.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    def forge(self, view: AdversaryView) -> Tensor:
        """Every worker its own upload, turned around."""
        return -self.scale * view.own
