"""Inner product manipulation (Xie, Koyejo and Gupta, 2019)."""

from dataclasses import dataclass

from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Inner(Forger):
    """Send -scale times the mean of the honest uploads.

    A plain mean turns around where scale > H/M.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        return (-self.scale * view.honest.mean(0)).expand(view.workers, -1)
