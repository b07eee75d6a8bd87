"""The attack that behaves, and the base of all others."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from noisegate.roles import Knowledge
from noisegate.views import AdversaryView, DataView


@dataclass(frozen=True)
class Honest:
    """Follow the protocol with own data and own noise."""

    knows: ClassVar[Knowledge] = "data-only"

    def check(self, honest: int, byzantine: int) -> None:
        """Exists for any numbers."""

    def check_classes(self, classes: int) -> None:
        """Exists for any classes."""

    def phase(self, progress: float) -> Hashable:
        """Always the same."""
        return None

    def needs_own(self, phase: Hashable) -> bool:
        """Sends what the protocol computes."""
        return True

    def ascends(self, phase: Hashable) -> bool:
        """Descends, as everyone should."""
        return False

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Leaves its examples as they are."""
        return x, y

    def forge(self, view: AdversaryView) -> Tensor | None:
        """Sends what the protocol computes."""
        return None


@dataclass(frozen=True)
class Forger(Honest):
    """Base of the attacks that make their uploads up and need no computation of their own workers."""

    knows: ClassVar[Knowledge] = "omniscient"

    def needs_own(self, phase: Hashable) -> bool:
        """Never reads what the protocol would have computed."""
        return False
