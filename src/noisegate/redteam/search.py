"""The search for the worst attack: it tries every attack of the catalog on one configuration and improves the worst."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from noisegate import checks
from noisegate.catalog import is_own
from noisegate.errors import NoisegateError, SpecError
from noisegate.redteam.findings import Findings, Repeat, Stage, Trial, Yardsticks
from noisegate.redteam.objectives import METRIC, Measure, Objective, check_objective, kind_of
from noisegate.redteam.settings import (
    BEHAVED,
    LATE,
    OWN_START,
    attack_of,
    behaved,
    by_promise,
    candidates,
    fits,
    settings_of,
    variants,
    with_attack,
)
from noisegate.runs.launch import reference
from noisegate.runs.spec import Spec
from noisegate.sweeps.outcome import Outcome
from noisegate.usual import BUDGET, SHARES

SEARCHED = 6
"""The number of attacks whose settings are searched."""


Evaluate = Callable[[Sequence[Spec], Stage], Sequence[Outcome]]
"""Runs specs, in any order or all at once, and gives their outcomes in the order of the specs."""


def red_team(
    spec: Spec,
    evaluate: Evaluate,
    *,
    budget: int = BUDGET,
    shares: Sequence[float] = SHARES,
    seeds: Sequence[int] = (),
    objective: Objective = "accuracy",
    counts: Sequence[int] = (),
) -> Findings:
    """Search for the attack that harms `spec` most, with at most `budget` runs.

    objective: what harm is: the lowest accuracy, another metric by its name, the "recall" of a class, or a "backdoor",
    for which only attacks with a trigger are tried. counts: the test examples of each
    class, by which the noise of "recall" and "backdoor" is known.

    1. Screen: the spec's own attack, then every attack at its defaults, from the start and with a late start. This
       takes at most two thirds of the budget, or as many runs as there are attacks, if that is more.
    2. Settings: those of the worst few attacks, one at a time. A value is kept if it makes them worse.
    3. Shares: the worst few at the other Byzantine shares. A sixth of the budget is reserved for this.

    In the end the worst case is repeated on `seeds`. The budget counts neither these runs, nor those without an
    attack, nor runs that are skipped.
    """
    check_search(spec, budget, shares, objective)
    spec = measuring(spec, objective)
    search = _Search(evaluate, budget)
    names = by_promise(candidates(objective))
    own = [spec] if attack_of(spec) != BEHAVED and fits(spec, objective) else []
    early = [*own, *(with_attack(spec, name) for name in names)]
    late = [replace(with_attack(spec, name), attack_start=LATE) for name in names if name not in OWN_START]
    clean = reference(early[0] if objective == "backdoor" else spec)  # which is to have a trigger then
    yardsticks = Yardsticks(*search.play([clean, behaved(spec)], "reference"))
    _check_ended(yardsticks.reference)
    search.measure = Measure(objective, yardsticks.recall, tuple(counts))
    search.measure.check_known(yardsticks.reference.outcome)
    search.spend([*early, *late], "screen", reserve=budget - max(len(_distinct(early)), budget * 2 // 3))

    worst = _improve(search, _worst_of_each(search, names)[:SEARCHED], reserve=budget // 6)
    others = [share for share in dict.fromkeys(shares) if share != spec.byzantine]
    search.spend([replace(one, byzantine=share) for one in worst for share in others], "shares")
    found = Findings(spec, budget, yardsticks, tuple(search.trials), search.left_out(), measure=search.measure)
    if (worst_case := found.worst) is None:
        return found
    if objective == "backdoor":  # how far the trigger of the worst case works by itself
        clean_of_it = search.play([reference(worst_case.spec)], "reference")[0]
        _check_ended(clean_of_it)
        found = replace(found, yardsticks=replace(yardsticks, reference=clean_of_it), also=(yardsticks.reference,))
    repeated = [replace(worst_case.spec, seed=seed) for seed in dict.fromkeys(seeds)]
    search.play([*repeated, *map(reference, repeated), *map(behaved, repeated)], "seeds")  # all at once
    return replace(found, seeds=tuple(search.repeat(one) for one in repeated))


def check_search(spec: Spec, budget: int, shares: Sequence[float], objective: Objective = "accuracy") -> None:
    """Raise SpecError if there can be no such search, before anything is run or written."""
    checks.count(budget=budget)
    check_objective(objective)
    for share in shares:
        if not 0 < share < 1:
            raise checks.refuse("shares", share, "must be above 0 and below 1")
    if spec.byzantine == 0:
        raise SpecError("byzantine = 0.0: there is no Byzantine worker to attack; give a share above 0")


def measuring(spec: Spec, objective: Objective) -> Spec:
    """The spec, whose runs measure a user's own metric if that is the objective."""
    own = kind_of(objective) == METRIC and is_own(objective)
    return replace(spec, metrics=[*(spec.metrics or []), objective]) if own else spec


def _check_ended(clean: Trial) -> None:
    """Raise NoisegateError if a reference run did not end: without it nothing can be said of an attack."""
    if not clean.ended:
        raise NoisegateError(f"the reference run did not end: {clean.outcome.message}")


@dataclass
class _Search:
    """A search in progress.

    left: the runs that are left of the budget. trials: those that the budget paid for. known: all trials by the name
    of their spec. untried: the specs that the budget did not reach, by name. measure: by what trials are ranked.
    """

    evaluate: Evaluate
    left: int
    trials: list[Trial] = field(default_factory=list)
    known: dict[str, Trial] = field(default_factory=dict)
    untried: dict[str, tuple[Stage, Spec]] = field(default_factory=dict)
    measure: Measure = field(default_factory=Measure)

    def rank(self, spec: Spec) -> float:
        """A number that is the lower, the worse the trial of a spec that was tried."""
        return self.measure.rank(self.known[spec.name()].outcome)

    def spend(self, specs: Sequence[Spec], stage: Stage, reserve: int = 0) -> None:
        """Try the specs that were not tried yet, in this order, until only `reserve` runs are left of the budget."""
        waiting = [spec for spec in _distinct(specs) if spec.name() not in self.known]
        while waiting and (most := self.left - max(0, reserve)) > 0:  # once more, if skipped runs left some of it
            batch, waiting = waiting[:most], waiting[most:]
            trials = self.play(batch, stage)
            self.trials += trials
            self.left -= sum(trial.outcome.status != "skipped" for trial in trials)
        for spec in waiting:
            self.untried.setdefault(spec.name(), (stage, spec))

    def play(self, specs: Sequence[Spec], stage: Stage) -> list[Trial]:
        """The trials of specs, at no cost to the budget. A spec that was tried before is not run again."""
        new = [spec for spec in _distinct(specs) if spec.name() not in self.known]
        outcomes = self.evaluate(new, stage) if new else []
        for spec, outcome in zip(new, outcomes, strict=True):
            self.known[spec.name()] = Trial(spec, stage, outcome)
        return [self.known[spec.name()] for spec in specs]

    def repeat(self, spec: Spec) -> Repeat:
        """The trial of a spec that was run, with its two runs without an attack."""
        worst, *without = (self.known[one.name()] for one in (spec, reference(spec), behaved(spec)))
        return Repeat(worst, Yardsticks(*without))

    def left_out(self) -> tuple[tuple[Stage, Spec], ...]:
        """The specs that the budget did not reach in the end."""
        return tuple(entry for name, entry in self.untried.items() if name not in self.known)


def _improve(search: _Search, worst: Sequence[Trial], reserve: int) -> list[Spec]:
    """Make each trial worse, one setting at a time, and give the specs that this leads to, worst first.

    All settings of an attack are tried again as long as one of them helps. The attacks are searched side by side.
    """
    best, aims = [trial.spec for trial in worst], search.measure.objective
    improving = list(range(len(best)))
    while improving:
        before = list(best)
        walks = {i: settings_of(worst[i].attack) for i in improving}
        while steps := {i: step for i, walk in walks.items() if (step := next(walk, None))}:
            tries = {i: [one for one in variants(best[i], *step) if fits(one, aims)] for i, step in steps.items()}
            search.spend([spec for some in tries.values() for spec in some], "settings", reserve)
            for i, some in tries.items():
                known = [spec for spec in (best[i], *some) if spec.name() in search.known]
                best[i] = min(known, key=search.rank)  # of equals the first: the best so far
        improving = [i for i in improving if best[i] != before[i]]
    return sorted(best, key=search.rank)


def _worst_of_each(search: _Search, names: Sequence[str]) -> list[Trial]:
    """The worst trial of each attack, of those that ended, worst first; of equals the more promising first."""
    found: dict[str, Trial] = {}
    rank = search.measure.rank
    for trial in search.trials:
        if trial.ended and (trial.attack not in found or rank(trial.outcome) < rank(found[trial.attack].outcome)):
            found[trial.attack] = trial
    place = {name: i for i, name in enumerate(names)}
    return sorted(found.values(), key=lambda trial: (rank(trial.outcome), place.get(trial.attack, -1)))


def _distinct(specs: Sequence[Spec]) -> list[Spec]:
    return list({spec.name(): spec for spec in specs}.values())
