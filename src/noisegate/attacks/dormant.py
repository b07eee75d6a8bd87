"""Any attack, asleep for the first part of the run: the paper's adaptive attacker."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.attacks.label_flip import LabelFlip
from noisegate.views import AdversaryView, Attack, DataView

ASLEEP = ("behave", "copy")


@dataclass(frozen=True)
class Dormant(Honest):
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

    def _sleeps(self, progress: float) -> bool:
        return progress < self.until

    def check(self, honest: int, byzantine: int) -> None:
        """As the attack itself."""
        self.attack.check(honest, byzantine)

    def needs_own(self, progress: float) -> bool:
        """Asleep, only to behave; awake, as the attack itself."""
        return self.asleep == "behave" if self._sleeps(progress) else self.attack.needs_own(progress)

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Clean data until it wakes."""
        return (x, y) if self._sleeps(view.progress) else self.attack.poison(x, y, view)

    def forge(self, view: AdversaryView) -> Tensor:
        """Trustworthy uploads until it wakes."""
        if not self._sleeps(view.progress):
            return self.attack.forge(view)
        if self.asleep == "behave":
            return view.own
        honest = view.honest
        device = honest.device
        return honest[torch.randint(len(honest), (len(view.own),), generator=view.rng, device=device)]
