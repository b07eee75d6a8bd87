"""`noisegate redteam`: every attack against one configuration, worst case first."""

import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from noisegate.checks import refuse
from noisegate.cli.run import SILENCE, gather, run_command
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.lab import Findings, Spec, red_team
from noisegate.lab.crew import Crew
from noisegate.lab.plot import WITHOUT, describe, part, plot
from noisegate.lab.redteam import BEHAVED, BUDGET, SHARES, Outcome, Stage, Trial, behaved, check_search
from noisegate.lab.setup import Setup, prepare
from noisegate.lab.trials import TrialFolder
from noisegate.version import __version__

NOT_OURS = ("threads", "resume", "baselines", "out", "as_json")
"""Flags of `run` that mean something else here, or nothing."""

SPEC_FLAGS = tuple(
    name
    for name in inspect.signature(run_command).parameters
    if name not in (*NOT_OURS, "spec_file", "settings", "device", "memory")
)
MOST_MESSAGE = 300


def redteam_command(
    *,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each run. [1]")] = None,
    budget: Annotated[
        int, typer.Option(help="Most runs of the search, beside two without attack and --seeds.")
    ] = BUDGET,
    shares: Annotated[
        str, typer.Option(help="Byzantine shares at which the worst attacks are tried too, with commas between them.")
    ] = ",".join(map(str, SHARES)),
    seeds: Annotated[
        str, typer.Option(help="Other seeds on which the worst case is repeated in the end, as 2,3,4. [none]")
    ] = "",
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores; 16 on CUDA]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; a search that is there goes on. [runs/redteam-NAME]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as one JSON object and nothing else.")
    ] = False,
    **of_run: Any,
) -> None:
    """Search for the attack that harms a configuration most: every attack there is, then settings of the worst.

    SPEC.toml and flags say what is attacked, as in `run`; --attack, with its settings, is only the first to be tried.
    """
    spec_file, settings = of_run["spec_file"], of_run["settings"] or []
    flags = {name: of_run[name] for name in SPEC_FLAGS if of_run[name] is not None}
    compute = Compute(device=of_run["device"], threads=threads, memory=of_run["memory"])
    spec = gather(spec_file, flags, settings)
    others, repeats = _numbers("shares", shares, float), _numbers("seeds", seeds, int)
    check_search(spec, budget, others)
    crew = Crew(compute, jobs)
    # What is wrong with the configuration itself is said once, and not once for every attack.
    setup = prepare(behaved(spec), compute)
    _check_somebody_lies(spec, others, setup)
    examples = len(setup.y_test)
    del setup  # which has its data on the device
    console = Console(stderr=True, quiet=as_json)
    with TrialFolder(out or Path("runs") / f"redteam-{spec.name()}", spec, crew.how) as folder:
        _announce(console, budget, crew, folder)
        try:
            with _watched(console, budget, spec.byzantine) as watch, crew:
                evaluate = Evaluation(crew, folder, watch)
                found = red_team(spec, evaluate, budget=budget, shares=others, seeds=repeats)
        except KeyboardInterrupt:
            told = f"interrupted: {_runs(len(folder))} kept in {folder.path}; the same command goes on from there"
            Console(stderr=True).print(told, soft_wrap=True)
            raise typer.Exit(130) from None
        files = _write(found, folder, crew)
    if as_json:
        named = {name: str(path) for name, path in files.items()}
        print(json.dumps({**_as_json(found, examples), **named}, indent=2))
    else:
        _show(found, examples, files)


def _sign(command: Any) -> None:
    """Give `redteam` the flags of `run`, from `run` itself, so that they cannot drift apart."""
    own = inspect.signature(command, eval_str=True)
    taken = inspect.signature(run_command, eval_str=True).parameters.values()
    mine = [entry for entry in own.parameters.values() if entry.kind is not inspect.Parameter.VAR_KEYWORD]
    theirs = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in taken if entry.name not in NOT_OURS]
    everything = [*theirs, *mine]
    command.__signature__ = own.replace(parameters=everything)
    command.__annotations__ = {entry.name: entry.annotation for entry in everything}


_sign(redteam_command)


class Evaluation:
    """Runs what the folder does not know yet, and keeps each run there as soon as it ends."""

    def __init__(self, crew: Crew, folder: TrialFolder, watch: Any) -> None:
        self.crew, self.folder, self.watch = crew, folder, watch

    def __call__(self, specs: Sequence[Spec], stage: Stage) -> list[Outcome]:
        """The outcomes, in the order of the specs."""
        found = {i: outcome for i, spec in enumerate(specs) if (outcome := self.folder.find(spec)) is not None}
        for i, outcome in found.items():
            self.watch(Trial(specs[i], stage, outcome))
        new = [i for i in range(len(specs)) if i not in found]
        for place, outcome in self.crew.play([specs[i] for i in new]):
            i = new[place]
            self.folder.add(specs[i], stage, outcome)
            self.watch(Trial(specs[i], stage, outcome))
            found[i] = outcome
        return [found[i] for i in range(len(specs))]


def _announce(console: Console, budget: int, crew: Crew, folder: TrialFolder) -> None:
    """What is about to happen, and what has already."""
    told = f"redteam: at most {_runs(budget)}, {crew.jobs} at a time, kept in {folder.path}"
    if len(folder):
        told += f"; {len(folder)} are there already"
    if folder.strange:
        told += f"; {folder.strange} there are of another version, device or number of threads, and do not count"
    if folder.damaged:
        told += f"; {folder.damaged} there were damaged, and are run again"
    console.print(told, soft_wrap=True, highlight=False)


@contextmanager
def _watched(console: Console, budget: int, share: float) -> Iterator[Any]:
    """A progress bar on a terminal, and otherwise a line now and then. share: the one whose worst case is asked for."""
    bar = Progress(
        TextColumn("redteam"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
        console=console,
        transient=True,
    )
    task = bar.add_task("redteam", total=budget, status="starting")
    spoke, done, worst = time.monotonic(), 0, float("inf")

    def watch(trial: Trial) -> None:
        nonlocal spoke, done, worst
        if trial.stage not in ("reference", "seeds"):
            done += trial.outcome.status != "skipped"
            worst = min(worst, trial.accuracy if trial.spec.byzantine == share else worst)
        status = (f"worst so far {worst:.3f}; " if worst <= 1 else "") + _ended(trial)
        bar.update(task, completed=done, status=status)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"redteam: {done} of at most {_runs(budget)}; {status}", soft_wrap=True)

    if console.is_terminal:
        bar.start()
    try:
        yield watch
    finally:
        if bar.live.is_started:
            bar.stop()


def _ended(trial: Trial) -> str:
    """What has ended, in a few words."""
    told = "reference" if trial.spec.byzantine == 0 else describe(trial)
    if trial.stage == "shares":
        told += f" at {trial.spec.byzantine:.0%}"
    if trial.stage == "seeds":
        told += f" on seed {trial.spec.seed}"
    stage = f"{trial.stage}: " if trial.stage != "reference" else ""
    done = trial.outcome.status == "done"
    return f"{stage}{told} {f'{trial.accuracy:.3f}' if done else trial.outcome.status}"


def _numbers(name: str, text: str, kind: type[float] | type[int]) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise SpecError(f"{name} = {text!r}: must be numbers with commas between them") from None


def _check_somebody_lies(spec: Spec, shares: Sequence[float], setup: Setup) -> None:
    """A small share of few workers is nobody."""
    honest = int((~setup.federation.byzantine).sum())
    for name, share in [("byzantine", spec.byzantine), *(("shares", share) for share in shares)]:
        if replace(spec, byzantine=share).count_byzantine(honest) == 0:
            raise refuse(name, share, f"makes no Byzantine worker beside the honest ones ({honest}); raise it")


def _write(found: Findings, folder: TrialFolder, crew: Crew) -> dict[str, Path]:
    """The plot and the worst case, if a run ended at all."""
    files = {"out": folder.path}
    if found.worst is not None:
        files["plot"] = folder.write("plot.html", plot(found))
        again = f"noisegate run worst.toml {crew.flags}"
        head = f"# accuracy {found.worst.accuracy!r} with noisegate {__version__}; again with: {again}\n"
        files["worst_spec"] = folder.write("worst.toml", head + found.worst.spec.to_toml())
    return files


def _trial(trial: Trial, clean: float | None) -> dict[str, Any]:
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
        "byzantine_selected": outcome.byzantine_selected,
        "honest_rejected": outcome.honest_rejected,
        "message": outcome.message,
    }


def _as_json(found: Findings, examples: int) -> dict[str, Any]:
    clean = found.yardsticks.reference.outcome.accuracy
    ranked = sorted(found.trials, key=lambda trial: trial.accuracy)
    return {
        "spec": found.spec.canonical(),
        "budget": found.budget,
        "runs": sum(trial.outcome.status != "skipped" for trial in found.trials),
        "reference_accuracy": clean,
        "without_attack": _trial(found.yardsticks.behaved, clean),
        "cost": found.cost,
        "noise": found.noise(examples),
        "test_examples": examples,
        "harmful": found.harmful(examples),
        "worst": _trial(found.worst, clean) if found.worst else None,
        "trials": [_trial(trial, clean) for trial in ranked],
        "untried": [
            {"stage": stage, "attack": spec.canonical()["attack"], "attack_start": spec.attack_start}
            | {"attack_asleep": spec.attack_asleep, "byzantine": spec.byzantine}
            for stage, spec in found.untried
        ],
        "seeds": {
            "trials": [
                _trial(again.worst, again.yardsticks.reference.outcome.accuracy)
                | {"reference_accuracy": again.yardsticks.reference.outcome.accuracy}
                | {"without_attack_accuracy": again.yardsticks.behaved.outcome.accuracy, "cost": again.cost}
                for again in found.seeds
            ],
            **_spread([again.worst.accuracy for again in found.seeds if again.worst.outcome.status == "done"]),
            "cost_on_other_seeds": _spread([cost for _, cost in found.elsewhere()]),
        },
    }


def _spread(known: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def _show(found: Findings, examples: int, files: dict[str, Path]) -> None:
    """Each attack's worst case: first at the spec's share, then at the others; and all that did not come off."""
    console, by = Console(highlight=False), found.yardsticks
    clean = by.reference.accuracy
    table = Table(box=None, pad_edge=False)
    for name in ("accuracy", "below", "attack", "start", "share", "used", "refused"):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    own = found.spec.byzantine
    for share in [own, *(share for share in found.shares() if share != own)]:
        if share != own:
            table.add_row()
        for trial in found.worst_by_attack(share):
            if trial.outcome.status == "done":
                table.add_row(*_row(trial, clean), style="bold" if trial is found.worst else "")
        if share == own and by.behaved.outcome.status == "done":
            table.add_row(*_row(by.behaved, clean), style="dim")
    console.print(table)
    legend = (
        f"below: how far below the reference accuracy {clean:.3f} (same private training, no attackers, plain mean); "
        "used: Byzantine share of the uploads used; refused: share of honest uploads that a test refused; "
        f"{WITHOUT}: the Byzantine workers behave; a cost counts from the lower of these two accuracies; "
        "settings that are not named are the defaults of `noisegate list attacks`"
    )
    console.print(legend, style="dim", soft_wrap=True)
    for trial in found.unfinished():
        told = f"{trial.outcome.status}: {describe(trial)} at {trial.spec.byzantine:.0%}: {trial.outcome.message}"
        console.print(told[:MOST_MESSAGE], style="dim", soft_wrap=True, markup=False)
    if found.untried:
        console.print(_untried(found), style="dim", soft_wrap=True, markup=False)
    for again in found.seeds:
        yardsticks = (again.yardsticks.reference, again.yardsticks.behaved)
        worst, reference, peace = (
            f"{one.accuracy:.3f}" if one.outcome.status == "done" else one.outcome.message
            for one in (again.worst, *yardsticks)
        )
        told = f"worst case on seed {again.worst.spec.seed}: {worst}, reference {reference}, {WITHOUT} {peace}"
        console.print(told, soft_wrap=True, markup=False)
    console.print(_verdict(found, examples), soft_wrap=True, markup=False)
    for name, path in files.items():
        if name != "out":
            console.print(f"written to {path}", style="dim", soft_wrap=True)


def _untried(found: Findings) -> str:
    """How much the budget did not reach, and which attacks not at all."""
    screened = [Trial(spec, stage, Outcome("skipped")) for stage, spec in found.untried if stage == "screen"]
    tried = {trial.attack for trial in found.trials}
    never = list(dict.fromkeys(trial.attack for trial in screened if trial.attack not in tried))
    late = sum(trial.attack in tried for trial in screened)
    which = [f"all of {', '.join(never)}"] * bool(never) + [f"late turns of {late} others"] * bool(late)
    among = f", among them {' and '.join(which)}" if which else ""
    return f"not tried for want of budget: {_runs(len(found.untried))}{among}; raise --budget"


def _verdict(found: Findings, examples: int) -> str:
    """What the search comes to, and whether it is more than noise."""
    worst, cost = found.worst, found.cost
    if worst is None or cost is None:
        return "no attack came to its end; see above"
    clean, noise = found.yardsticks.accuracy, found.noise(examples)
    case = f"{describe(worst)}: accuracy {worst.accuracy:.3f} instead of {clean:.3f}"
    limit = f"the worst of so many runs on {examples} test examples may seem to cost up to {_points(noise)}"
    elsewhere = [cost for _, cost in found.elsewhere()]
    others = f"on seeds that it was not chosen on it cost {_points(fmean(elsewhere))} on average" if elsewhere else ""
    if found.harmful(examples):
        advice = others or "it was chosen for this seed, so repeat it with --seeds before you quote it"
        return f"the worst case cost {_points(cost)} ({case}), where {limit} by chance; {advice}"
    nothing = "nothing was found that surely harms this configuration, which is no proof that nothing does"
    if cost > noise:
        return f"the worst case cost {_points(cost)} ({case}), but {others}, which may be chance: {nothing}"
    most = f"no attack cost more than {_points(cost)}" if cost > 0 else "no attack lowered the accuracy"
    return f"{most} ({case}), and {limit} by chance: {nothing}"


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _points(cost: float) -> str:
    return f"{100 * cost:.1f} points"


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
