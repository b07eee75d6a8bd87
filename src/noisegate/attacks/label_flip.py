"""Honest computation on wrong labels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.views import DataView


@dataclass(frozen=True)
class LabelFlip(Honest):
    """Run the whole protocol on own data with wrong labels: I becomes H-1-I, H being the number of classes.

    to: "reverse", or "random" for another label at random each time an example is used.
    """

    to: Literal["reverse", "random"] = "reverse"

    def __post_init__(self) -> None:
        checks.one_of(("reverse", "random"), to=self.to)

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Every label becomes another one (with an odd H, "reverse" leaves the middle label)."""
        if self.to == "reverse" or view.classes == 1:
            return x, view.classes - 1 - y
        shift = torch.randint(1, view.classes, y.shape, generator=view.rng, device=y.device)
        return x, (y + shift) % view.classes
