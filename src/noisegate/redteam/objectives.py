"""What a search for the worst attack wants to make as bad as it can."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noisegate.errors import NoisegateError
from noisegate.runs.measures import check_name, class_of, value_of
from noisegate.runs.recall import Recall, largest_drop
from noisegate.sweeps.outcome import Outcome

Objective = str
"""accuracy: the lowest of all. recall: the class that is recognized least, measured by what it is without an attack.
backdoor: the trigger that works best. Any other: the lowest of the metric of that name."""

OBJECTIVES: tuple[Objective, ...] = ("accuracy", "recall", "backdoor")

METRIC = "metric"
"""The kind of an objective that is the name of a metric."""

WORDS: dict[Objective, str] = {"accuracy": "accuracy", "recall": "drop in recall", "backdoor": "attack success"}
"""What the number is by which a search ranks."""


def kind_of(objective: Objective) -> str:
    """The objective itself, or METRIC."""
    return objective if objective in OBJECTIVES else METRIC


def check_objective(objective: Objective) -> None:
    """SpecError if there is none of that name."""
    if kind_of(objective) == METRIC:
        check_name("objective", objective, OBJECTIVES)


def word_of(objective: Objective) -> str:
    """What the number is by which a search ranks."""
    return WORDS.get(objective, objective)


@dataclass(frozen=True)
class Measure:
    """By what a search ranks its runs.

    recall: that of each class without an attack, for the objective "recall". counts: the test examples of each class;
    only the noise of "recall" and "backdoor" asks for them.
    """

    objective: Objective = "accuracy"
    recall: Recall = ()
    counts: Sequence[int] = ()

    @property
    def is_metric(self) -> bool:
        """Whether the objective is the name of a metric, which is the better the higher it is."""
        return kind_of(self.objective) == METRIC

    def check_known(self, outcome: Outcome) -> None:
        """NoisegateError if a run without an attack has no such metric, or one that is no share of 1."""
        value = self.value(outcome)
        if self.is_metric and (value is None or not 0 <= value <= 1):
            told = "has none" if value is None else f"has {value:g}"
            raise NoisegateError(
                f"objective = {self.objective!r}: the reference run {told}, but it must be from 0 to 1, the higher "
                "the better; choose another"
            )

    def measured_on(self, examples: int) -> int:
        """Of how many examples a metric is a share, or varies like one; examples: all, if the classes are not known.

        Balanced accuracy varies like the share of K^2 / (1/n_1 + ... + 1/n_K) examples. An AUC varies no more than a
        share of the smaller class. Of a user's own metric nobody knows; the smallest class stands for it.
        """
        counts = [count for count in self.counts if count]
        if not counts or self.objective == "accuracy":
            return examples
        if self.objective == "balanced_accuracy":
            return max(1, int(len(counts) ** 2 / sum(1 / count for count in counts)))
        label = class_of(self.objective)
        return max(1, self.counts[label] if label is not None and label < len(self.counts) else min(counts))

    def value(self, outcome: Outcome) -> float | None:
        """The metric, the largest drop of a class's recall, or the attack success; None if the run has none."""
        if self.objective == "accuracy":
            return outcome.accuracy
        if self.objective == "backdoor":
            return outcome.attack_success
        if self.is_metric:
            return value_of(vars(outcome), self.objective)
        drop = largest_drop(outcome.recall, self.recall)
        return None if drop is None else drop[1]

    def rank(self, outcome: Outcome) -> float:
        """A number that is the lower, the worse it went for the server; infinite for a run that has none."""
        value = self.value(outcome)
        if value is None:
            return math.inf
        return value if self.objective == "accuracy" or self.is_metric else -value

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
