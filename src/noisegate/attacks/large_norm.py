"""A huge step in a random direction (Blanchard, El Mhamdi, Guerraoui and Stainer, 2017)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView

LONGEST = 1e19
"""No upload is longer: the square of its length would not fit float32, and it would count as malformed."""


@dataclass(frozen=True)
class LargeNorm(Forger):
    """Send `factor` times the length of an honest upload's noise, s sqrt(d), in a random direction.

    All workers send the same, so that a mean does not average the directions out. Lengths end at 1e19.
    """

    knows: ClassVar[Knowledge] = "blind"
    factor: float = 1e3

    def __post_init__(self) -> None:
        checks.positive(factor=self.factor)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        direction = functional.normalize(torch.empty_like(view.params).normal_(generator=view.rng), dim=0)
        length = min(self.factor * view.noise_std * math.sqrt(len(direction)), LONGEST)
        return (length * direction).expand(view.workers, -1)
