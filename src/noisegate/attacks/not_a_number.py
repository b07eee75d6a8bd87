"""What is not a vector of real numbers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class NotANumber(Forger):
    """Send NaN in every coordinate, which a server that adds up what it gets never recovers from.

    value: "nan" or "inf".
    """

    knows: ClassVar[Knowledge] = "blind"
    value: Literal["nan", "inf"] = "nan"

    def __post_init__(self) -> None:
        checks.one_of(("nan", "inf"), value=self.value)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same value everywhere."""
        return view.params.new_full((view.workers, len(view.params)), float(self.value))
