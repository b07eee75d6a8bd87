"""Honest computation on examples of chosen classes that carry each other's labels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.views import DataView


@dataclass(frozen=True)
class ClassSwap(Honest):
    """Run the whole protocol on own data in which chosen pairs of classes have swapped their labels.

    pairs: the pairs, as "0-6,2-4". No class may be in two of them.
    """

    pairs: str = "0-1"

    def __post_init__(self) -> None:
        numbers = [number for pair in self.swapped() for number in pair]
        if len(set(numbers)) != len(numbers):
            raise checks.refuse("pairs", self.pairs, "names a class twice; each may be in one pair")

    def swapped(self) -> list[tuple[int, int]]:
        """The pairs as numbers."""
        found = []
        for pair in self.pairs.split(","):
            one, dash, other = (part.strip() for part in pair.partition("-"))
            if not dash or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in (one, other)):
                raise checks.refuse("pairs", self.pairs, 'must be pairs of classes, such as "0-6,2-4"')
            found.append((int(one), int(other)))
        return found

    def check_classes(self, classes: int) -> None:
        """Every class of a pair must exist."""
        for pair in self.swapped():
            if max(pair) >= classes:
                raise checks.refuse("pairs", self.pairs, f"the classes of the data are 0 to {classes - 1}")

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """Examples of one class of a pair get the label of the other."""
        labels = y
        for one, other in self.swapped():
            labels = torch.where(y == one, other, torch.where(y == other, one, labels))
        return x, labels
