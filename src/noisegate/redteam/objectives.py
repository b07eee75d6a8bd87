"""What a search for the worst attack wants to make as bad as it can."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noisegate.runs.recall import Recall, largest_drop
from noisegate.sweeps.outcome import Outcome

Objective = Literal["accuracy", "recall", "backdoor"]
"""accuracy: the lowest of all. recall: the class that is recognized least, measured by what it is without an attack.
backdoor: the trigger that works best."""

OBJECTIVES: tuple[Objective, ...] = ("accuracy", "recall", "backdoor")

WORDS: dict[Objective, str] = {"accuracy": "accuracy", "recall": "drop in recall", "backdoor": "attack success"}
"""What the number is by which a search ranks."""


@dataclass(frozen=True)
class Measure:
    """By what a search ranks its runs.

    recall: that of each class without an attack, for the objective "recall". counts: the test examples of each class;
    only the noise of "recall" and "backdoor" asks for them.
    """

    objective: Objective = "accuracy"
    recall: Recall = ()
    counts: Sequence[int] = ()

    def value(self, outcome: Outcome) -> float | None:
        """The accuracy, the largest drop of a class's recall, or the attack success; None if the run has none."""
        if self.objective == "accuracy":
            return outcome.accuracy
        if self.objective == "backdoor":
            return outcome.attack_success
        drop = largest_drop(outcome.recall, self.recall)
        return None if drop is None else drop[1]

    def rank(self, outcome: Outcome) -> float:
        """A number that is the lower, the worse it went for the server; infinite for a run that has none."""
        value = self.value(outcome)
        if value is None:
            return math.inf
        return value if self.objective == "accuracy" else -value

    def victim(self, outcome: Outcome) -> int | None:
        """The class that an attack harms most, for the objective "recall"."""
        drop = largest_drop(outcome.recall, self.recall) if self.objective == "recall" else None
        return None if drop is None else drop[0]


def lower(one: Recall | None, other: Recall | None) -> Recall:
    """The lower recall of each class, of those that are known."""
    if not one or not other or len(one) != len(other):
        return one or other or ()
    pairs = zip(one, other, strict=True)
    return [min((each for each in pair if each is not None), default=None) for pair in pairs]
