"""Any attack, asleep for the first part of the run: the paper's adaptive attacker."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger, Honest
from noisegate.attacks.label_flip import LabelFlip
from noisegate.attacks.turns import Turns
from noisegate.roles import Attack
from noisegate.views import AdversaryView

ASLEEP = ("behave", "copy")


@dataclass(frozen=True)
class Dormant(Turns):
    """Behave until the share `until` of the run has passed, then attack.

    asleep: "behave" follows the protocol with own data and noise; "copy" sends, from each worker and in each round,
        the upload of a random honest worker, as the paper's adaptive attacker does.
    """

    attack: Attack = field(default_factory=LabelFlip)
    until: float = 0.5
    asleep: Literal["behave", "copy"] = "behave"

    def __post_init__(self) -> None:
        checks.share(until=self.until)
        checks.one_of(ASLEEP, asleep=self.asleep)

    def attacks(self, progress: float) -> bool:
        """From the share `until` on."""
        return progress >= self.until

    def part(self, attacking: bool) -> Attack:
        """Honest, or a copy of honest workers, until it wakes; then the attack."""
        return self.attack if attacking else Honest() if self.asleep == "behave" else Copier()


@dataclass(frozen=True)
class Copier(Forger):
    """Send, from each worker, the upload of a random honest one."""

    def forge(self, view: AdversaryView) -> Tensor:
        """Others' uploads."""
        honest = view.honest
        device = honest.device
        return honest[torch.randint(len(honest), (view.workers,), generator=view.rng, device=device)]
