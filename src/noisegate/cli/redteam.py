"""`noisegate redteam`: every attack against one configuration, worst case first."""

import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from noisegate.cli.run import SILENCE, gather, run_command
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.lab import Findings, Spec, red_team
from noisegate.lab.crew import Crew
from noisegate.lab.plot import describe, part, plot
from noisegate.lab.redteam import BUDGET, SHARES, Outcome, Stage, Trial
from noisegate.lab.setup import prepare
from noisegate.lab.trials import TrialFolder

NOT_OURS = ("resume", "baselines", "out", "as_json")
"""Flags of `run` that mean something else here, or nothing."""

SPEC_FLAGS = tuple(
    name
    for name in inspect.signature(run_command).parameters
    if name not in (*NOT_OURS, "spec_file", "settings", "device", "threads", "memory")
)
MOST_MESSAGE = 300


def redteam_command(
    *,
    budget: Annotated[int, typer.Option(help="Most runs of the search.")] = BUDGET,
    shares: Annotated[str, typer.Option(help="Byzantine shares at which the worst attacks are tried too.")] = ",".join(
        map(str, SHARES)
    ),
    seeds: Annotated[str, typer.Option(help="Seeds on which the worst case is repeated, as 1,2,3.")] = "",
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. [one a core; 16 on CUDA]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; a search in it goes on. [runs/redteam-NAME]")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as one JSON object and nothing else.")
    ] = False,
    **of_run: Any,
) -> None:
    """Attack a configuration with everything there is, and report the worst case that was found."""
    spec_file, settings = of_run["spec_file"], of_run["settings"] or []
    flags = {name: of_run[name] for name in SPEC_FLAGS if of_run[name] is not None}
    compute = Compute(device=of_run["device"], threads=of_run["threads"], memory=of_run["memory"])
    spec = gather(spec_file, flags, settings)
    others, repeats = _numbers("shares", shares, float), _numbers("seeds", seeds, int)
    folder_path = out or Path("runs") / f"redteam-{spec.name()}"
    console = Console(stderr=True, quiet=as_json)
    crew = Crew(compute, jobs)
    # What is wrong with the configuration itself is said once, and not once for every attack.
    prepare(replace(spec, attack="none", attack_start=0.0), compute)
    folder = TrialFolder(folder_path, spec, crew.how)
    try:
        with _watched(console, budget) as watch, crew:
            evaluate = Evaluation(crew, folder, watch)
            found = red_team(spec, evaluate, budget=budget, shares=others, seeds=repeats)
    except KeyboardInterrupt:
        told = f"interrupted: {len(folder)} runs kept in {folder_path}; the same command goes on from there"
        Console(stderr=True).print(told, soft_wrap=True)
        raise typer.Exit(130) from None
    files = _write(found, folder)
    if as_json:
        print(json.dumps({**_as_json(found), **{name: str(path) for name, path in files.items()}}, indent=2))
    else:
        _show(found, files)


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


@contextmanager
def _watched(console: Console, budget: int) -> Iterator[Any]:
    """A progress bar on a terminal, and otherwise a line now and then."""
    bar = Progress(
        TextColumn("redteam"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("redteam", total=budget, status="starting")
    spoke, done, worst = time.monotonic(), 0, float("inf")

    def watch(trial: Trial) -> None:
        nonlocal spoke, done, worst
        if trial.stage not in ("reference", "seeds"):
            done += trial.outcome.status != "skipped"
            worst = min(worst, trial.accuracy)
        status = f"{trial.stage}: {describe(trial)}" + (f"; worst so far {worst:.3f}" if worst <= 1 else "")
        bar.update(task, completed=done, status=status)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"redteam: {done} of at most {budget} runs; {status}", soft_wrap=True)

    if console.is_terminal:
        bar.start()
    try:
        yield watch
    finally:
        if bar.live.is_started:
            bar.stop()


def _numbers(name: str, text: str, kind: type[float] | type[int]) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise SpecError(f"{name} = {text!r}: must be numbers with commas between them") from None


def _write(found: Findings, folder: TrialFolder) -> dict[str, Path]:
    """The plot and the worst case, if a run ended at all."""
    files = {"out": folder.path}
    if found.worst is not None:
        files["plot"] = folder.write("plot.html", plot(found))
        head = f"# accuracy {found.worst.accuracy!r}; again with: noisegate run worst.toml {folder.how}\n"
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


def _as_json(found: Findings) -> dict[str, Any]:
    clean = found.reference.outcome.accuracy
    ranked = sorted(found.trials, key=lambda trial: trial.accuracy)
    return {
        "spec": found.spec.canonical(),
        "budget": found.budget,
        "runs": sum(trial.outcome.status != "skipped" for trial in found.trials),
        "reference_accuracy": clean,
        "worst": _trial(found.worst, clean) if found.worst else None,
        "trials": [_trial(trial, clean) for trial in ranked],
        "untried": [
            {"stage": stage, "attack": spec.canonical()["attack"], "attack_start": spec.attack_start}
            | {"attack_asleep": spec.attack_asleep, "byzantine": spec.byzantine}
            for stage, spec in found.untried
        ],
        "seeds": {
            "trials": [
                _trial(trial, clean.outcome.accuracy) | {"reference_accuracy": clean.outcome.accuracy}
                for trial, clean in found.seeds
            ],
            **_spread(found),
        },
    }


def _spread(found: Findings) -> dict[str, float]:
    """Mean, least and most accuracy of the worst case over the seeds."""
    known = [trial.accuracy for trial, _ in found.seeds if trial.outcome.status == "done"]
    return {"mean": sum(known) / len(known), "min": min(known), "max": max(known)} if known else {}


def _show(found: Findings, files: dict[str, Path]) -> None:
    """Each attack's worst case: first at the spec's share, then at the others; and all that did not come off."""
    console, clean = Console(), found.reference.accuracy
    table = Table(box=None, pad_edge=False)
    for name in ("accuracy", "below", "attack", "start", "share", "used", "refused"):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    own = found.spec.byzantine
    for share in [own, *(share for share in found.shares() if share != own)]:
        for trial in found.worst_by_attack(share):
            if trial.outcome.status == "done":
                table.add_row(*_row(trial, clean), style="bold" if trial is found.worst else "")
        table.add_section()
    console.print(table)
    legend = (
        f"below: how far below the reference accuracy {clean:.3f} (same private training, no attackers, plain mean); "
        "used: Byzantine share of the uploads used; refused: share of honest uploads that a test refused; "
        "settings that are not named are the defaults of `noisegate list attacks`"
    )
    console.print(legend, style="dim", soft_wrap=True)
    for trial in found.unfinished():
        told = f"{trial.outcome.status}: {describe(trial)} at {trial.spec.byzantine:.0%}: {trial.outcome.message}"
        console.print(told[:MOST_MESSAGE], style="dim", soft_wrap=True, markup=False)
    if found.untried:
        screened = [
            describe(Trial(spec, stage, Outcome("skipped"))) for stage, spec in found.untried if stage == "screen"
        ]
        which = f", among them {', '.join(screened)}" if screened else ""
        told = f"not tried for want of budget: {len(found.untried)} more{which}; raise --budget"
        console.print(told, style="dim", soft_wrap=True, markup=False)
    for trial, reference in found.seeds:
        both = [
            f"{one.accuracy:.3f}" if one.outcome.status == "done" else one.outcome.message for one in (trial, reference)
        ]
        told = f"worst case on seed {trial.spec.seed}: {both[0]}, reference {both[1]}"
        console.print(told, soft_wrap=True, markup=False)
    if spread := _spread(found):
        console.print("over these seeds: " + ", ".join(f"{name} {value:.3f}" for name, value in spread.items()))
    if found.worst is None:
        console.print("no run came to its end; see above")
    for name, path in files.items():
        if name != "out":
            console.print(f"written to {path}", style="dim", soft_wrap=True)


def _row(trial: Trial, clean: float) -> list[str]:
    outcome = trial.outcome
    attack = part(trial.spec.canonical()["attack"])
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
