"""Any attack, asleep for the first part of the run: the paper's adaptive attacker."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.attacks.label_flip import LabelFlip
from noisegate.views import AdversaryView, Attack, DataView, Knowledge

ASLEEP = ("behave", "copy")
SLEEP = "asleep"


@dataclass(frozen=True)
class Dormant(Honest):
    """Behave until the share `until` of the run has passed, then attack.

    asleep: "behave" follows the protocol with own data and noise; "copy" sends, from each worker and in each round,
        the upload of a random honest worker, as the paper's adaptive attacker does.
    """

    knows: ClassVar[Knowledge] = "omniscient"  # at most: as much as the attack it wakes up to, and whom it copies
    attack: Attack = field(default_factory=LabelFlip)
    until: float = 0.5
    asleep: Literal["behave", "copy"] = "behave"

    def __post_init__(self) -> None:
        checks.share(until=self.until)
        checks.one_of(ASLEEP, asleep=self.asleep)

    def check(self, honest: int, byzantine: int) -> None:
        """As the attack itself."""
        self.attack.check(honest, byzantine)

    def phase(self, progress: float) -> Hashable:
        """SLEEP until the share `until` has passed, then what the attack makes of the time."""
        return SLEEP if progress < self.until else ("awake", self.attack.phase(progress))

    def needs_own(self, phase: Hashable) -> bool:
        """Asleep, only to behave; awake, as the attack itself."""
        return self.asleep == "behave" if phase == SLEEP else self.attack.needs_own(_inner(phase))

    def ascends(self, phase: Hashable) -> bool:
        """Awake, as the attack itself."""
        return phase != SLEEP and self.attack.ascends(_inner(phase))

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Clean data until it wakes."""
        return (x, y) if view.phase == SLEEP else self.attack.poison(x, y, replace(view, phase=_inner(view.phase)))

    def forge(self, view: AdversaryView) -> Tensor | None:
        """Trustworthy uploads until it wakes."""
        if view.phase != SLEEP:
            return self.attack.forge(replace(view, phase=_inner(view.phase)))
        if self.asleep == "behave":
            return None
        honest = view.honest
        device = honest.device
        return honest[torch.randint(len(honest), (view.workers,), generator=view.rng, device=device)]


def _inner(phase: Any) -> Hashable:
    """The phase of the attack that woke up."""
    inner: Hashable = phase[1]
    return inner
