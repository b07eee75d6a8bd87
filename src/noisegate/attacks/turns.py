"""Two attacks in turn: the base of the attacks that change their behavior during a run."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from noisegate.roles import Attack, Knowledge, Triggered, check_classes, trigger_of
from noisegate.views import KNOWS, AdversaryView, DataView


@dataclass(frozen=True)
class Turns(ABC):
    """Base of the attacks that play a harmless part at some times, and another attack at the others."""

    @property
    def knows(self) -> Knowledge:
        """As much as the part that knows more. Either part gets a view of no more than it declares itself."""
        return max((self.part(attacking).knows for attacking in (False, True)), key=list(KNOWS).index)

    @abstractmethod
    def attacks(self, progress: float) -> bool:
        """Whether it attacks when this share of the rounds lies behind."""

    @abstractmethod
    def part(self, attacking: bool) -> Attack:
        """What it plays: the attack, or a harmless part."""

    def check(self, honest: int, byzantine: int) -> None:
        """As both of its parts."""
        for attacking in (False, True):
            self.part(attacking).check(honest, byzantine)

    def check_classes(self, classes: int) -> None:
        """As both of its parts."""
        for attacking in (False, True):
            check_classes(self.part(attacking), classes)

    def triggered(self) -> Triggered | None:
        """As the attack that it plays at times."""
        return trigger_of(self.part(True))

    def phase(self, progress: float) -> Hashable:
        """Which part it plays, and the phase of that part."""
        attacking = self.attacks(progress)
        return attacking, self.part(attacking).phase(progress)

    def needs_own(self, phase: Hashable) -> bool:
        """As the part that it plays."""
        part, inner = self._played(phase)
        return part.needs_own(inner)

    def ascends(self, phase: Hashable) -> bool:
        """As the part that it plays."""
        part, inner = self._played(phase)
        return part.ascends(inner)

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """As the part that it plays."""
        part, inner = self._played(view.phase)
        return part.poison(x, y, replace(view, phase=inner))

    def forge(self, view: AdversaryView) -> Tensor | None:
        """As the part that it plays."""
        part, inner = self._played(view.phase)
        return part.forge(replace(view, phase=inner, knows=part.knows))

    def _played(self, phase: Any) -> tuple[Attack, Hashable]:
        """The part that is played in this phase, and the phase of its own."""
        attacking, inner = phase
        return self.part(attacking), inner
