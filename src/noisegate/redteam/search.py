"""An automatic adversary: every attack of the catalog against one configuration, narrowed down to the worst found."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import Any, Literal

from noisegate import checks
from noisegate.attacks import ATTACKS
from noisegate.catalog import find
from noisegate.errors import NoisegateError, SpecError
from noisegate.runs.launch import reference
from noisegate.runs.spec import Spec
from noisegate.sweeps.outcome import Outcome

BUDGET = 72
"""Runs of a search: enough to screen the catalog twice, early and late, and to narrow down a third of that."""

SHARES = (0.2, 0.4, 0.6, 0.9)
SEARCHED = 6
LATE = 0.9
STARTS = (0.0, 0.2, 0.5, LATE)
STRENGTHS = (1.0, 0.5, 0.25, 0.1)
FORMS = ("ranked", "valid")

Values = Mapping[str, Sequence[Any]]

SETTINGS: dict[str, Values] = {
    "rank-matched": {
        "form": FORMS,
        "strength": STRENGTHS,
        "target": ("ascend", "weights", "random", "descend"),
    },
    "score-banking": {
        "turn": (0.2, 0.5, 0.9),
        "form": FORMS,
        "strength": STRENGTHS,
        "attack": (None, "gradient-ascent", "label-flip", "inner", "a-little"),
    },
    "trojan": {
        "pull": (0.1, 0.3, 0.6),
        "drift": ("random", "weights"),
        "form": FORMS,
        "apart": (False, True),
        "strength": STRENGTHS,
    },
    "on-off": {
        "share": (0.25, 0.5, 0.75),
        "period": (0.02, 0.1, 0.5),
        "attack": (None, "gradient-ascent", "label-flip", "inner", "a-little"),
    },
    "label-flip": {"to": ("reverse", "random")},
    "gradient-ascent": {},
    "sign-flip": {"scale": (0.5, 1.0, 2.0)},
    "inner": {"scale": (0.1, 0.5, 1.0, 2.0, 10.0)},
    "a-little": {"deviation": (None, 0.25, 0.5, 1.0, 2.0)},
    "inner-tuned": {"highest": (1.0, 100.0), "questions": (16, 32)},
    "a-little-tuned": {"highest": (1.0, 100.0), "questions": (16, 32)},
    "local-poisoning": {},
    "min-max": {"perturbation": ("std", "unit", "sign")},
    "min-sum": {"perturbation": ("std", "unit", "sign")},
    "fang-krum": {"halvings": (5, 20)},
    "fang-trimmed-mean": {"stretch": (1.1, 2.0, 10.0)},
    "mimic": {"worker": (0, 1, 2)},
    "dormant": {"until": (0.2, 0.5, 0.9), "asleep": ("behave", "copy")},
    "gaussian": {"scale": (0.5, 1.0, 2.0, 10.0)},
    "large-norm": {"factor": (1.0, 10.0, 1e3, 1e6)},
    "zero": {},
    "nan": {"value": ("nan", "inf")},
}
"""By attack: the settings that matter, and the values to try; None is the default. The most promising ones are first.

An attack that is not here is tried at its defaults, and with another start.
"""

OWN_CLOCK = ("dormant", "score-banking")
"""Attacks that a late start makes into another attack of the catalog."""

BEHAVED = "none"
"""Of the catalog, but no attack: what it leaves is what attacks are measured by."""

SURE = 0.95
"""How sure it has to be that what an attack cost is not noise."""

Stage = Literal["reference", "screen", "settings", "shares", "seeds"]


@dataclass(frozen=True)
class Trial:
    """A run of the search and what came of it."""

    spec: Spec
    stage: Stage
    outcome: Outcome

    @property
    def attack(self) -> str:
        """The attack's name."""
        return _attack_of(self.spec)

    @property
    def accuracy(self) -> float:
        """Of the last round; what is not known harms nobody."""
        return self.outcome.accuracy if self.outcome.accuracy is not None else float("inf")


@dataclass(frozen=True)
class Yardsticks:
    """What an attack is measured by, on one seed.

    reference: no attackers and no filter. behaved: the filter, and Byzantine workers that behave.
    """

    reference: Trial
    behaved: Trial

    @property
    def accuracy(self) -> float:
        """The lower one: what a filter costs by itself is not the attack's doing. Of those that ended."""
        return min(self.reference.accuracy, self.behaved.accuracy)


@dataclass(frozen=True)
class Repeat:
    """The worst case again, on one seed."""

    worst: Trial
    yardsticks: Yardsticks

    @property
    def cost(self) -> float | None:
        """How far the attack lowered the accuracy; None if that is not known."""
        cost = self.yardsticks.accuracy - self.worst.accuracy
        return cost if math.isfinite(cost) else None


@dataclass(frozen=True)
class Findings:
    """What a search found. trials: in the order of the search. untried: what the budget did not reach, by stage."""

    spec: Spec
    budget: int
    yardsticks: Yardsticks
    trials: tuple[Trial, ...]
    untried: tuple[tuple[Stage, Spec], ...]
    seeds: tuple[Repeat, ...] = ()
    """The worst case on each of the seeds that were asked for."""

    @property
    def worst(self) -> Trial | None:
        """The lowest accuracy at the spec's own share; of equal ones, the one found first. None if no run ended."""
        return min(self._candidates(), key=lambda trial: trial.accuracy, default=None)

    @property
    def cost(self) -> float | None:
        """How far the worst case lowered the accuracy; None if no run ended."""
        return Repeat(self.worst, self.yardsticks).cost if self.worst else None

    def elsewhere(self) -> list[tuple[Repeat, float]]:
        """The worst case on the seeds that it was not chosen on, and what it cost there."""
        others = [again for again in self.seeds if again.worst.spec.seed != self.spec.seed]
        return [(again, again.cost) for again in others if again.cost is not None]

    def noise(self, examples: int) -> float:
        """What the worst case may cost by chance alone, measured on so many test examples: it was the worst of many."""
        return by_chance(self.yardsticks.accuracy, examples, max(1, len(self._candidates())))

    def harmful(self, examples: int) -> bool:
        """Whether the worst case cost more than noise: where it was found, and on average on other seeds, if tried."""
        if self.cost is None or self.cost <= self.noise(examples):
            return False
        elsewhere = self.elsewhere()
        if not elsewhere:
            return True
        clean = fmean(again.yardsticks.accuracy for again, _ in elsewhere)
        return fmean(cost for _, cost in elsewhere) > by_chance(clean, examples * len(elsewhere))

    def _candidates(self) -> list[Trial]:
        return [trial for trial in self.trials if _ended(trial) and trial.spec.byzantine == self.spec.byzantine]

    def worst_by_attack(self, share: float) -> list[Trial]:
        """At that share, each attack's worst, worst first; then those of which no run ended."""
        found: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.spec.byzantine != share:
                continue
            if trial.attack not in found or trial.accuracy < found[trial.attack].accuracy:
                found[trial.attack] = trial
        return sorted(found.values(), key=lambda trial: trial.accuracy)

    def shares(self) -> list[float]:
        """The shares that were tried, from the smallest."""
        return sorted({trial.spec.byzantine for trial in self.trials})

    def unfinished(self) -> list[Trial]:
        """What was skipped or failed."""
        return [trial for trial in (self.yardsticks.behaved, *self.trials) if not _ended(trial)]


def by_chance(accuracy: float, examples: int, runs: int = 1) -> float:
    """How far the worst of so many runs may fall below another of that accuracy by chance, 19 times of 20 no further.

    Only what comes from measuring on so many test examples. How far training varies by itself, other seeds show.
    """
    share = (accuracy * examples + 1) / (examples + 2)  # all right, or all wrong, is not certain to be so again
    return NormalDist().inv_cdf(1 - (1 - SURE) / runs) * math.sqrt(2 * share * (1 - share) / examples)


Evaluate = Callable[[Sequence[Spec], Stage], Sequence[Outcome]]
"""Runs specs, in any order and all at once if it can; gives their outcomes in the order of the specs."""


def red_team(
    spec: Spec,
    evaluate: Evaluate,
    *,
    budget: int = BUDGET,
    shares: Sequence[float] = SHARES,
    seeds: Sequence[int] = (),
) -> Findings:
    """Search for the attack that harms `spec` most, with at most `budget` runs.

    First every attack at its defaults, from the start and turning late, and the spec's own attack as it stands. Then
    the settings of the worst few, one at a time, each kept if it lowers the accuracy. Then those at other `shares`.
    The first takes two thirds of the budget at most, or what every attack once takes; the last has a sixth to itself,
    if that is left. A run that is skipped costs nothing, nor do the yardsticks and `seeds`, on which the worst case is
    repeated in the end.
    """
    check_search(spec, budget, shares)
    search = _Search(evaluate, budget)
    names = _by_promise(name for name in ATTACKS if name != BEHAVED)
    own = [] if _attack_of(spec) == BEHAVED else [spec]
    first = [*own, *(_plain(spec, name) for name in names)]
    late = [replace(_plain(spec, name), attack_start=LATE) for name in names if name not in OWN_CLOCK]
    by = Yardsticks(*search.beside([reference(spec), behaved(spec)], "reference"))
    if not _ended(by.reference):
        raise NoisegateError(f"the reference run without attackers did not end: {by.reference.outcome.message}")
    search.run([*first, *late], "screen", keep=budget - max(len(_distinct(first)), budget * 2 // 3))

    leaders = _narrow(search, _worst_of_each(search.trials, names)[:SEARCHED], keep=budget // 6)
    others = [share for share in dict.fromkeys(shares) if share != spec.byzantine]
    search.run([replace(best, byzantine=share) for best in leaders for share in others], "shares")
    found = Findings(spec, budget, by, tuple(search.trials), search.left_out())
    if found.worst is None:
        return found
    repeated = [replace(found.worst.spec, seed=seed) for seed in dict.fromkeys(seeds)]
    search.beside([*repeated, *map(reference, repeated), *map(behaved, repeated)], "seeds")  # all at once
    return replace(found, seeds=tuple(search.repeat(one) for one in repeated))


def check_search(spec: Spec, budget: int, shares: Sequence[float]) -> None:
    """Refuse a search that cannot be, before anything is run or written."""
    checks.count(budget=budget)
    for share in shares:
        if not 0 < share < 1:
            raise checks.refuse("shares", share, "must be above 0 and below 1")
    if spec.byzantine == 0:
        raise SpecError("byzantine = 0.0: nobody is left to attack; give a share above 0")


def behaved(spec: Spec) -> Spec:
    """The same without an attack: the Byzantine workers are as honest as the others."""
    return _plain(spec, BEHAVED)


@dataclass
class _Search:
    """What was tried so far, and what may still be."""

    evaluate: Evaluate
    left: int
    trials: list[Trial] = field(default_factory=list)
    untried: dict[str, tuple[Stage, Spec]] = field(default_factory=dict)
    known: dict[str, Trial] = field(default_factory=dict)

    def run(self, specs: Sequence[Spec], stage: Stage, keep: int = 0) -> None:
        """Try what was not tried yet, in this order, until only `keep` runs are left of the budget."""
        waiting = [spec for spec in _distinct(specs) if spec.name() not in self.known]
        while waiting and (room := self.left - max(0, keep)) > 0:  # again, where skipped runs gave their room back
            batch, waiting = waiting[:room], waiting[room:]
            trials = self.beside(batch, stage)
            self.trials += trials
            self.left -= sum(trial.outcome.status != "skipped" for trial in trials)
        for spec in waiting:
            self.untried.setdefault(spec.name(), (stage, spec))

    def repeat(self, spec: Spec) -> Repeat:
        """A spec that was run, beside its yardsticks."""
        worst, *by = (self.known[one.name()] for one in (spec, reference(spec), behaved(spec)))
        return Repeat(worst, Yardsticks(*by))

    def left_out(self) -> tuple[tuple[Stage, Spec], ...]:
        """What the budget did not reach in the end."""
        return tuple(entry for name, entry in self.untried.items() if name not in self.known)

    def beside(self, specs: Sequence[Spec], stage: Stage) -> list[Trial]:
        """Beside the budget. What was tried before is not tried again."""
        new = [spec for spec in _distinct(specs) if spec.name() not in self.known]
        outcomes = self.evaluate(new, stage) if new else []
        for spec, outcome in zip(new, outcomes, strict=True):
            self.known[spec.name()] = Trial(spec, stage, outcome)
        return [self.known[spec.name()] for spec in specs]


def _narrow(search: _Search, worst: Sequence[Trial], keep: int) -> list[Spec]:
    """Lower the accuracy of each, one setting at a time, side by side; again and again while something helps.

    What they came to is given worst first.
    """
    best = [trial.spec for trial in worst]
    improving = list(range(len(best)))
    while improving:
        before = list(best)
        walks = {i: _settings_of(worst[i].attack) for i in improving}
        while moves := {i: step for i, walk in walks.items() if (step := next(walk, None))}:
            tries = {i: _moved(best[i], *step) for i, step in moves.items()}
            search.run([spec for some in tries.values() for spec in some], "settings", keep)
            for i, some in tries.items():
                known = [search.known[spec.name()] for spec in (best[i], *some) if spec.name() in search.known]
                best[i] = min(known, key=lambda trial: trial.accuracy).spec  # the best so far is the first of equals
        improving = [i for i in improving if best[i] != before[i]]
    return sorted(best, key=lambda spec: search.known[spec.name()].accuracy)


def _settings_of(attack: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """(setting, values) to try for an attack, the most promising first."""
    if attack not in OWN_CLOCK:
        yield "attack_start", STARTS
    yield from SETTINGS.get(attack, {}).items()
    if attack not in OWN_CLOCK:
        yield "attack_asleep", ("behave", "copy")


def _moved(spec: Spec, setting: str, values: Sequence[Any]) -> list[Spec]:
    """`spec` with each of the values of one setting; what gives no valid spec, or the same again, is left out."""
    found = []
    for value in values:
        try:
            moved = _with(spec, setting, value)
        except SpecError:
            continue  # as a nested attack without a setting of that name
        if moved != spec:
            found.append(moved)
    return found


def _with(spec: Spec, setting: str, value: Any) -> Spec:
    """One setting changed. A default is left out, so that equal attacks are one spec and not two."""
    if setting in ("attack_start", "attack_asleep"):
        return replace(spec, **{setting: value})
    table = dict(spec.canonical()["attack"])
    table.pop(setting, None)
    if value is not None and value != _defaults(table["name"]).get(setting, dataclasses.MISSING):
        table[setting] = value
    return replace(spec, attack=table)


def _defaults(attack: str) -> dict[str, Any]:
    kind = find("attack", attack, ATTACKS)
    return {entry.name: entry.default for entry in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _attack_of(spec: Spec) -> str:
    return str(spec.canonical()["attack"]["name"])


def _plain(spec: Spec, attack: str) -> Spec:
    """An attack at its defaults, from the first round."""
    return replace(spec, attack=attack, attack_start=0.0)


def _by_promise(names: Iterable[str]) -> list[str]:
    """Those that the table does not know first: nobody knows what they can do."""
    place = {name: i for i, name in enumerate(SETTINGS)}
    return sorted(names, key=lambda name: place.get(name, -1))


def _worst_of_each(trials: Sequence[Trial], names: Sequence[str]) -> list[Trial]:
    """Each attack's worst trial that ended, worst first; of equal ones the more promising."""
    found: dict[str, Trial] = {}
    for trial in trials:
        if _ended(trial) and (trial.attack not in found or trial.accuracy < found[trial.attack].accuracy):
            found[trial.attack] = trial
    place = {name: i for i, name in enumerate(names)}
    return sorted(found.values(), key=lambda trial: (trial.accuracy, place.get(trial.attack, -1)))


def _distinct(specs: Sequence[Spec]) -> list[Spec]:
    return list({spec.name(): spec for spec in specs}.values())


def _ended(trial: Trial) -> bool:
    return trial.outcome.status == "done"
