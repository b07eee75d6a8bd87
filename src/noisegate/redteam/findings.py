"""What a search finds: its trials, the worst case among them, and whether that is more than noise."""

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

from noisegate.redteam.settings import attack_of
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


@dataclass(frozen=True)
class Repeat:
    """The worst case, repeated on one seed."""

    worst: Trial
    yardsticks: Yardsticks

    @property
    def cost(self) -> float | None:
        """By how much the attack lowered the accuracy, as a share of 1; None if it is not known."""
        cost = self.yardsticks.accuracy - self.worst.accuracy
        return cost if math.isfinite(cost) else None


@dataclass(frozen=True)
class Findings:
    """What a search found.

    budget: the largest number of its runs. trials: in the order of the search. untried: the specs that the budget did
    not reach, with their stage. seeds: the worst case on each of the seeds that were asked for.
    """

    spec: Spec
    budget: int
    yardsticks: Yardsticks
    trials: tuple[Trial, ...]
    untried: tuple[tuple[Stage, Spec], ...]
    seeds: tuple[Repeat, ...] = ()

    @property
    def worst(self) -> Trial | None:
        """The trial with the lowest accuracy at the spec's own share; of equals the first. None if no run ended."""
        return min(self._candidates(), key=lambda trial: trial.accuracy, default=None)

    @property
    def cost(self) -> float | None:
        """By how much the worst case lowered the accuracy, as a share of 1; None if no run ended."""
        return Repeat(self.worst, self.yardsticks).cost if self.worst else None

    def elsewhere(self) -> list[tuple[Repeat, float]]:
        """The worst case on the seeds on which it was not chosen, and its cost there."""
        others = [again for again in self.seeds if again.worst.spec.seed != self.spec.seed]
        return [(again, again.cost) for again in others if again.cost is not None]

    def noise(self, examples: int) -> float:
        """The cost that the worst case may have by chance alone, measured on `examples` test examples."""
        return by_chance(self.yardsticks.accuracy, examples, max(1, len(self._candidates())))

    def harmful(self, examples: int) -> bool:
        """Whether the worst case cost more than noise: on its own seed and, if tried, on average on other seeds."""
        if self.cost is None or self.cost <= self.noise(examples):
            return False
        elsewhere = self.elsewhere()
        if not elsewhere:
            return True
        clean = fmean(again.yardsticks.accuracy for again, _ in elsewhere)
        return fmean(cost for _, cost in elsewhere) > by_chance(clean, examples * len(elsewhere))

    def _candidates(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.ended and trial.spec.byzantine == self.spec.byzantine]

    def worst_by_attack(self, share: float) -> list[Trial]:
        """The worst trial of each attack at that share, worst first. Attacks of which no run ended are last."""
        found: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.spec.byzantine != share:
                continue
            if trial.attack not in found or trial.accuracy < found[trial.attack].accuracy:
                found[trial.attack] = trial
        return sorted(found.values(), key=lambda trial: trial.accuracy)

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
