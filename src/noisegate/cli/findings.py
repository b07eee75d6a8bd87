"""What a red team found, for people and for programs."""

from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from noisegate.cli.progress import runs
from noisegate.cli.table import MOST_MESSAGE, spread
from noisegate.cli.terminal import Console
from noisegate.redteam import Findings
from noisegate.redteam.findings import Repeat, Trial, Yardsticks
from noisegate.redteam.objectives import Measure, kind_of, word_of
from noisegate.redteam.plot import WITHOUT, describe, part
from noisegate.redteam.settings import BEHAVED
from noisegate.sweeps.outcome import Outcome

EXTRA: dict[str, list[str]] = {"accuracy": [], "recall": ["drop", "class"], "backdoor": ["success"], "metric": ["{}"]}
"""The columns that a kind of objective adds to the table. Braces stand for the name of a metric, here and below."""

LEGENDS: dict[str, str] = {
    "accuracy": "",
    "recall": "drop: by how much the recall of the class that is harmed most fell; ",
    "backdoor": "success: share of the test examples of other classes called the target once they carry the trigger; ",
    "metric": "",
}
"""What these columns are."""

COUNTED: dict[str, str] = {
    "accuracy": "a cost counts from the lower of these two accuracies",
    "recall": "a drop counts from the lower recall of a class in these two runs",
    "backdoor": "a cost counts from the success of the same trigger in the reference",
    "metric": "a cost counts from the lower {} of these two runs",
}
"""What a cost is measured by."""

NOTHING: dict[str, str] = {
    "accuracy": "no attack lowered the accuracy",
    "recall": "no attack lowered the recall of a class",
    "backdoor": "no trigger worked better than in the reference",
    "metric": "no attack lowered {}",
}
"""What is said if no attack cost anything."""


def _trial(trial: Trial, clean: float | None, measure: Measure) -> dict[str, Any]:
    outcome = trial.outcome
    behind = None if clean is None or outcome.accuracy is None else clean - outcome.accuracy
    return {
        "stage": trial.stage,
        "status": outcome.status,
        "attack": trial.spec.canonical()["attack"],
        "attack_start": trial.spec.attack_start,
        "attack_asleep": trial.spec.attack_asleep,
        "byzantine": trial.spec.byzantine,
        "seed": trial.spec.seed,
        "accuracy": outcome.accuracy,
        "below_reference": behind,
        "recall": outcome.recall,
        "recall_drop": measure.value(outcome) if measure.objective == "recall" else None,
        "class": measure.victim(outcome),
        "attack_success": outcome.attack_success,
        "balanced_accuracy": outcome.balanced_accuracy,
        "auc": outcome.auc,
        "metrics": outcome.metrics,
        "worker_accuracy": outcome.worker_accuracy,
        "fallback": outcome.fallback,
        "byzantine_selected": outcome.byzantine_selected,
        "honest_rejected": outcome.honest_rejected,
        "message": outcome.message,
        "value": measure.value(outcome),
        "described": describe(trial),
    }


def as_json(found: Findings, examples: int) -> dict[str, Any]:
    """The findings as one JSON object."""
    measure, reference = found.measure, found.yardsticks.reference.outcome
    clean = reference.accuracy
    return {
        "spec": found.spec.canonical(),
        "objective": measure.objective,
        "budget": found.budget,
        "runs": sum(trial.outcome.status != "skipped" for trial in found.trials),
        "measure": word_of(measure.objective),
        "reference_value": None if measure.objective == "recall" else measure.value(reference),
        "reference_accuracy": clean,
        "reference_recall": reference.recall,
        "reference_attack_success": reference.attack_success,
        "without_attack": _trial(found.yardsticks.behaved, clean, measure),
        "cost": found.cost,
        "noise": found.noise(examples),
        "test_examples": examples,
        "harmful": found.harmful(examples),
        "verdict": verdict(found, examples),
        "worst": _trial(found.worst, clean, measure) if found.worst else None,
        "trials": [_trial(trial, clean, measure) for trial in sorted(found.trials, key=found.rank)],
        "untried": [
            {"stage": stage, "attack": spec.canonical()["attack"], "attack_start": spec.attack_start}
            | {"attack_asleep": spec.attack_asleep, "byzantine": spec.byzantine}
            for stage, spec in found.untried
        ],
        "seeds": {
            "trials": [_again(found, again) for again in found.seeds],
            **spread([again.worst.accuracy for again in found.seeds if again.worst.outcome.status == "done"]),
            "cost_on_other_seeds": spread([cost for _, cost in found.elsewhere()]),
        },
    }


def _again(found: Findings, again: Repeat) -> dict[str, Any]:
    reference, peace = again.yardsticks.reference.outcome, again.yardsticks.behaved.outcome
    drop = {"recall_drop": found.cost_of(again), "class": found.victim}  # of the class and by the runs of that seed
    return {
        **_trial(again.worst, reference.accuracy, found.measure),
        **(drop if found.measure.objective == "recall" else {}),
        "reference_accuracy": reference.accuracy,
        "without_attack_accuracy": peace.accuracy,
        "cost": found.cost_of(again),
    }


def show_findings(found: Findings, examples: int, files: dict[str, Path]) -> None:
    """Print each attack's worst case, first at the spec's share, then at the others; and what did not finish."""
    console, by = Console(highlight=False), found.yardsticks
    clean = by.reference.accuracy
    table = Table(box=None, pad_edge=False)
    extra = EXTRA[kind_of(found.measure.objective)]
    for name in (
        *(name.format(found.measure.objective) for name in extra),
        "accuracy",
        "below",
        "attack",
        "start",
        "share",
        "used",
        "refused",
    ):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    own = found.spec.byzantine
    for share in [own, *(share for share in found.shares() if share != own)]:
        if share != own:
            table.add_row()
        for trial in found.worst_by_attack(share):
            if trial.outcome.status == "done":
                table.add_row(*_extra(found, trial), *_row(trial, clean), style="bold" if trial is found.worst else "")
        if share == own and by.behaved.outcome.status == "done":
            table.add_row(*_extra(found, by.behaved), *_row(by.behaved, clean), style="dim")
    console.print(table)
    kind, objective = kind_of(found.measure.objective), found.measure.objective
    legend = LEGENDS[kind] + (
        f"below: how far below the reference accuracy {clean:.3f} (same private training, no attackers, plain mean); "
        "used: Byzantine share of the uploads used; refused: share of honest uploads that a test refused; "
        f"{WITHOUT}: the Byzantine workers behave; {COUNTED[kind].format(objective)}; "
        "settings that are not named are the defaults of `noisegate list attacks`"
    )
    console.print(legend, style="dim", soft_wrap=True)
    for trial in found.unfinished():
        told = f"{trial.outcome.status}: {describe(trial)} at {trial.spec.byzantine:.0%}: {trial.outcome.message}"
        console.print(told[:MOST_MESSAGE], style="dim", soft_wrap=True)
    if found.untried:
        console.print(_untried(found), style="dim", soft_wrap=True)
    for again in found.seeds:
        console.print(_repeated(found, again), soft_wrap=True)
    console.print(verdict(found, examples), soft_wrap=True)
    for name, path in files.items():
        if name != "out":
            console.print(f"written to {path}", style="dim", soft_wrap=True)


def _repeated(found: Findings, again: Repeat) -> str:
    """The worst case on another seed, in a line."""
    yardsticks = (again.yardsticks.reference, again.yardsticks.behaved)
    worst, reference, peace = (
        f"{one.accuracy:.3f}" if one.outcome.status == "done" else one.outcome.message
        for one in (again.worst, *yardsticks)
    )
    told = f"worst case on seed {again.worst.spec.seed}: {worst}, reference {reference}, {WITHOUT} {peace}"
    cost = found.cost_of(again)
    aimed = found.measure.objective != "accuracy" and cost is not None
    return f"{told}; {_harm(found, again.worst, again.yardsticks)}" if aimed else told


def _harm(found: Findings, trial: Trial, by: Yardsticks) -> str:
    """What an attack left, and what it is without one."""
    objective, before, outcome = found.measure.objective, by.level(found.measure, found.victim), trial.outcome
    if objective == "accuracy":
        return f"accuracy {trial.accuracy:.3f} instead of {by.accuracy:.3f}"
    clean = "an unknown share" if before is None else f"{before:.3f}"
    if objective == "recall":
        left = outcome.recall[found.victim] if outcome.recall and found.victim is not None else None
        return f"recall of class {found.victim} {left or 0:.3f} instead of {clean}"
    if found.measure.is_metric:
        return f"{word_of(objective)} {found.measure.value(outcome) or 0:.3f} instead of {clean}"
    return f"attack success {outcome.attack_success or 0:.3f} instead of {clean}"


def _untried(found: Findings) -> str:
    """How many runs the budget did not suffice for, and which attacks were not tried at all."""
    screened = [Trial(spec, stage, Outcome("skipped")) for stage, spec in found.untried if stage == "screen"]
    tried = {trial.attack for trial in found.trials}
    never = list(dict.fromkeys(trial.attack for trial in screened if trial.attack not in tried))
    late = sum(trial.attack in tried for trial in screened)
    which = [f"all of {', '.join(never)}"] * bool(never) + [f"late turns of {late} others"] * bool(late)
    among = f", among them {' and '.join(which)}" if which else ""
    return f"not tried for want of budget: {runs(len(found.untried))}{among}; raise --budget"


def verdict(found: Findings, examples: int) -> str:
    """What the search found, and whether it is more than chance."""
    worst, cost = found.worst, found.cost
    if worst is None or cost is None:
        return "no attack came to its end; see above"
    noise = found.noise(examples)
    case = f"{describe(worst)}: {_harm(found, worst, found.yardsticks)}"
    measured = f"{found.measured_on(examples)} test examples"
    limit = f"the worst of so many runs on {measured} may seem to cost up to {_points(noise)}"
    elsewhere = [cost for _, cost in found.elsewhere()]
    others = f"on seeds that it was not chosen on it cost {_points(fmean(elsewhere))} on average" if elsewhere else ""
    if found.harmful(examples):
        advice = others or "it was chosen for this seed, so repeat it with --seeds before you quote it"
        return f"the worst case cost {_points(cost)} ({case}), where {limit} by chance; {advice}"
    nothing = "nothing was found that surely harms this configuration, which is no proof that nothing does"
    if cost > noise:
        return f"the worst case cost {_points(cost)} ({case}), but {others}, which may be chance: {nothing}"
    most = (
        f"no attack cost more than {_points(cost)}"
        if cost > 0
        else NOTHING[kind_of(found.measure.objective)].format(found.measure.objective)
    )
    return f"{most} ({case}), and {limit} by chance: {nothing}"


def _points(cost: float) -> str:
    return f"{100 * cost:.1f} points"


def _extra(found: Findings, trial: Trial) -> list[str]:
    """The columns that an objective adds."""
    value, measure = found.measure.value(trial.outcome), found.measure
    if measure.objective == "accuracy":
        return []
    shown = "–" if value is None else f"{value:.3f}"
    victim = measure.victim(trial.outcome)
    return [shown, "–" if victim is None else str(victim)] if measure.objective == "recall" else [shown]


def _row(trial: Trial, clean: float) -> list[str]:
    outcome = trial.outcome
    attack = WITHOUT if trial.attack == BEHAVED else part(trial.spec.canonical()["attack"])
    if trial.spec.attack_asleep == "copy":
        attack += ", copying until it starts"
    return [
        f"{trial.accuracy:.3f}",
        f"{clean - trial.accuracy:.3f}",
        attack,
        f"{trial.spec.attack_start:g}",
        f"{trial.spec.byzantine:.0%}",
        f"{outcome.byzantine_selected or 0:.1%}",
        f"{outcome.honest_rejected or 0:.1%}",
    ]
