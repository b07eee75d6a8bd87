"""Nothing instead of gradients."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Zero(Forger):
    """Send zeros, as a free rider does. This slows a mean down, and fails a test of the noise."""

    knows: ClassVar[Knowledge] = "blind"

    def forge(self, view: AdversaryView) -> Tensor:
        """Zeros."""
        return view.params.new_zeros(view.workers, len(view.params))
