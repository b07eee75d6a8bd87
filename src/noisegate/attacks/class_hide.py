"""Honest computation on examples of one class that carry the label of another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.views import DataView


@dataclass(frozen=True)
class ClassHide(Honest):
    """Run the whole protocol on own data in which the class `hidden` has the label `shown`."""

    hidden: int = 0
    shown: int = 1

    def __post_init__(self) -> None:
        checks.label(hidden=self.hidden, shown=self.shown)
        if self.hidden == self.shown:
            raise checks.refuse("shown", self.shown, "must be another class than hidden")

    def check_classes(self, classes: int) -> None:
        """Both classes must exist."""
        checks.label(classes, hidden=self.hidden, shown=self.shown)

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Examples of the hidden class get the other label; all others keep theirs."""
        return x, torch.where(y == self.hidden, self.shown, y)
