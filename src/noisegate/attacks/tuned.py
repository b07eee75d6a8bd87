"""Known attacks that go as far as the server's aggregator lets them, found by asking it (Fang, Cao, Jia and Gong,
2020).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.a_little import largest_deviation
from noisegate.attacks.honest import Forger
from noisegate.attacks.line_search import FEWEST, lowest_at
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Tuned(Forger, ABC):
    """Choose the scale of an attack in every round, so that the update goes furthest against the honest mean.

    The aggregator is asked what it would answer to a scale (`AdversaryView.judge`), and the scale chosen for which
    <update, mean of the honest uploads> is lowest: that of the attack which is not tuned, or one of a geometric grid
    from `lowest` to `highest`, or of a finer one around the best of these. Of equal ones, the smallest.

    questions: how often the aggregator is asked in a round.
    """

    lowest: float = 0.1
    highest: float = 100.0
    questions: int = 16

    def __post_init__(self) -> None:
        checks.positive(lowest=self.lowest, highest=self.highest)
        checks.count(questions=self.questions)
        if self.highest <= self.lowest:
            raise checks.refuse("highest", self.highest, f"must lie above lowest = {self.lowest}")
        if self.questions < FEWEST:
            raise checks.refuse("questions", self.questions, f"must be {FEWEST} or more")

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest
        start, direction = self.line(honest)
        mean = honest.mean(0, dtype=torch.float64)

        def upload(scale: Tensor) -> Tensor:
            return (start - scale * direction).expand(view.workers, -1)

        def agreement(scale: Tensor) -> Tensor:
            return view.judge(upload(scale)).update.double() @ mean

        known = self.untuned(len(honest), view.workers)
        return upload(lowest_at(agreement, known, self.lowest, self.highest, self.questions, honest.device))

    @abstractmethod
    def line(self, honest: Tensor) -> tuple[Tensor, Tensor]:
        """(d,) start and direction: the uploads are start - scale direction."""

    @abstractmethod
    def untuned(self, honest: int, byzantine: int) -> float:
        """The scale of the attack that is not tuned."""


@dataclass(frozen=True)
class ALittleTuned(Tuned):
    """Send mean - z std of the honest uploads, with the z that harms most under the server's own aggregator.

    "A little is enough" (Baruch, Baruch and Goldberg, 2019), never less harmful to the aggregator as the adversary
    imagines it than with the z of its formula, which is asked for too.

    lowest, highest: between what values of z. questions: how often the aggregator is asked in a round.
    """

    def line(self, honest: Tensor) -> tuple[Tensor, Tensor]:
        """Deviations from the mean."""
        return honest.mean(0), honest.std(0, correction=0)

    def untuned(self, honest: int, byzantine: int) -> float:
        """That of its formula."""
        return largest_deviation(honest, byzantine)


@dataclass(frozen=True)
class InnerTuned(Tuned):
    """Send -scale times the mean of the honest uploads, with the scale that harms this aggregator most.

    Inner product manipulation (Xie, Koyejo and Gupta, 2019), never less harmful to the aggregator as the adversary
    imagines it than with scale = 1, which is asked for too.

    lowest, highest: between what scales. questions: how often the aggregator is asked in a round.
    """

    def line(self, honest: Tensor) -> tuple[Tensor, Tensor]:
        """Multiples of the mean."""
        mean = honest.mean(0)
        return torch.zeros_like(mean), mean

    def untuned(self, honest: int, byzantine: int) -> float:
        """1."""
        return 1.0
