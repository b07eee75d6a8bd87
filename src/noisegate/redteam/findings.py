"""What a search finds: its trials, the worst case among them, and whether that is more than noise."""

import math
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Literal

from noisegate.redteam.objectives import Measure, lower
from noisegate.redteam.settings import attack_of
from noisegate.roles import trigger_of
from noisegate.runs.recall import Recall
from noisegate.runs.spec import Spec
from noisegate.sweeps.outcome import Outcome

CONFIDENCE = 0.95
"""The probability with which noise alone costs less than what `by_chance` gives."""

Stage = Literal["reference", "screen", "settings", "shares", "seeds"]
"""The stages of a search, in their order."""


@dataclass(frozen=True)
class Trial:
    """A run of the search and its outcome."""

    spec: Spec
    stage: Stage
    outcome: Outcome

    @property
    def ended(self) -> bool:
        """Whether the run ended with a result."""
        return self.outcome.status == "done"

    @property
    def attack(self) -> str:
        """The name of the attack."""
        return attack_of(self.spec)

    @property
    def accuracy(self) -> float:
        """The accuracy after the last round; infinite if the run did not end, so that it is never the lowest."""
        return self.outcome.accuracy if self.outcome.accuracy is not None else float("inf")


@dataclass(frozen=True)
class Yardsticks:
    """The two runs without an attack that an attack is measured by, on one seed.

    reference: honest workers only and a plain mean. behaved: the same aggregator, and Byzantine workers that behave.
    """

    reference: Trial
    behaved: Trial

    @property
    def accuracy(self) -> float:
        """The lower accuracy of those that ended. What an aggregator costs by itself is not the attack's doing."""
        return min(self.reference.accuracy, self.behaved.accuracy)

    @property
    def recall(self) -> Recall:
        """The lower recall of each class, for the same reason."""
        return lower(self.reference.outcome.recall, self.behaved.outcome.recall)

    def level(self, measure: Measure, victim: int | None = None) -> float | None:
        """What an attack is measured by: the accuracy, the recall of the class `victim`, or how far a trigger works.

        Only the reference has the trigger: workers that behave have none.
        """
        if measure.objective == "accuracy":
            return self.accuracy
        if measure.objective == "backdoor":
            return self.reference.outcome.attack_success
        if measure.is_metric:
            known = [measure.value(each.outcome) for each in (self.reference, self.behaved)]
            return min((value for value in known if value is not None), default=None)
        return self.recall[victim] if victim is not None and victim < len(self.recall) else None


@dataclass(frozen=True)
class Repeat:
    """The worst case, repeated on one seed."""

    worst: Trial
    yardsticks: Yardsticks

    def cost(self, measure: Measure, victim: int | None = None) -> float | None:
        """What the attack cost, as a share of 1; None if it is not known.

        By how much it lowered the accuracy, or the recall of the class `victim`, or raised the share of examples that a
        trigger makes the target of.
        """
        before, outcome = self.yardsticks.level(measure, victim), self.worst.outcome
        if measure.objective == "recall":
            known = outcome.recall is not None and victim is not None and victim < len(outcome.recall)
            after = outcome.recall[victim] if known else None  # type: ignore[index]
        else:
            after = measure.value(outcome)
        if before is None or after is None or not math.isfinite(before):
            return None
        return after - before if measure.objective == "backdoor" else before - after


@dataclass(frozen=True)
class Findings:
    """What a search found.

    budget: the largest number of its runs. trials: in the order of the search. untried: the specs that the budget did
    not reach, with their stage. seeds: the worst case on each of the seeds that were asked for. measure: by what runs
    are ranked. also: other runs without an attack, which cost privacy as all do.
    """

    spec: Spec
    budget: int
    yardsticks: Yardsticks
    trials: tuple[Trial, ...]
    untried: tuple[tuple[Stage, Spec], ...]
    seeds: tuple[Repeat, ...] = ()
    measure: Measure = field(default_factory=Measure)
    also: tuple[Trial, ...] = ()

    def rank(self, trial: Trial) -> float:
        """A number that is the lower, the worse the trial."""
        return self.measure.rank(trial.outcome)

    @property
    def worst(self) -> Trial | None:
        """The worst trial at the spec's own share, such as that with the lowest accuracy; of equals the first.

        None if no run ended.
        """
        return min(self._candidates(), key=self.rank, default=None)

    @property
    def victim(self) -> int | None:
        """The class that the worst case harms, if a search was for that."""
        return self.measure.victim(self.worst.outcome) if self.worst else None

    @property
    def cost(self) -> float | None:
        """What the worst case cost, as a share of 1; None if no run ended."""
        return self.cost_of(Repeat(self.worst, self.yardsticks)) if self.worst else None

    def cost_of(self, again: Repeat) -> float | None:
        """What the worst case cost on one seed. On other seeds it is measured on the class that it was chosen for."""
        return again.cost(self.measure, self.victim)

    def elsewhere(self) -> list[tuple[Repeat, float]]:
        """The worst case on the seeds on which it was not chosen, and its cost there."""
        others = [again for again in self.seeds if again.worst.spec.seed != self.spec.seed]
        return [(again, cost) for again in others if (cost := self.cost_of(again)) is not None]

    def level(self, yardsticks: Yardsticks) -> float:
        """What the worst case is measured by; of an unknown level, that with the most noise."""
        found = yardsticks.level(self.measure, self.victim)
        return 0.5 if found is None else found

    def measured_on(self, examples: int) -> int:
        """How many of `examples` test examples count: all, those of the class harmed, or those not of the target."""
        counts, worst = self.measure.counts, self.worst
        if not counts or worst is None:
            return examples
        if self.victim is not None:
            return counts[self.victim]
        if self.measure.is_metric:
            return self.measure.measured_on(examples)
        trigger = trigger_of(worst.spec.build_attack()) if self.measure.objective == "backdoor" else None
        return sum(counts) - counts[trigger.target] if trigger else examples

    def noise(self, examples: int) -> float:
        """The cost that the worst case may have by chance alone, measured on `examples` test examples."""
        chosen = max(1, len(self._candidates()))
        if self.victim is not None or self.measure.objective == "worst_recall":
            chosen *= max(1, len(self.measure.counts))  # the worst class of each run was chosen, too
        return by_chance(self.level(self.yardsticks), self.measured_on(examples), chosen)

    def harmful(self, examples: int) -> bool:
        """Whether the worst case cost more than noise: on its own seed and, if tried, on average on other seeds."""
        if self.cost is None or self.cost <= self.noise(examples):
            return False
        elsewhere = self.elsewhere()
        if not elsewhere:
            return True
        clean = fmean(self.level(again.yardsticks) for again, _ in elsewhere)
        return fmean(cost for _, cost in elsewhere) > by_chance(clean, self.measured_on(examples) * len(elsewhere))

    def _candidates(self) -> list[Trial]:
        own = [trial for trial in self.trials if trial.ended and trial.spec.byzantine == self.spec.byzantine]
        return [trial for trial in own if math.isfinite(self.rank(trial))]

    def worst_by_attack(self, share: float) -> list[Trial]:
        """The worst trial of each attack at that share, worst first. Attacks of which no run ended are last."""
        found: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.spec.byzantine != share:
                continue
            if trial.attack not in found or self.rank(trial) < self.rank(found[trial.attack]):
                found[trial.attack] = trial
        return sorted(found.values(), key=self.rank)

    def shares(self) -> list[float]:
        """The Byzantine shares that were tried, from the smallest."""
        return sorted({trial.spec.byzantine for trial in self.trials})

    def unfinished(self) -> list[Trial]:
        """The trials that were skipped or failed."""
        return [trial for trial in (self.yardsticks.behaved, *self.trials) if not trial.ended]


def by_chance(accuracy: float, examples: int, runs: int = 1) -> float:
    """By how much the worst of `runs` runs may fall below another of that accuracy by chance, with CONFIDENCE.

    It counts the noise of measuring on `examples` test examples only. Other seeds show how much training varies.
    """
    share = (accuracy * examples + 1) / (examples + 2)  # all right, or all wrong, is not certain to be so again
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / runs) * math.sqrt(2 * share * (1 - share) / examples)
