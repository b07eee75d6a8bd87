"""`noisegate redteam`: every attack against one configuration, worst case first."""

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from noisegate.checks import plain, refuse
from noisegate.cli.findings import as_json as as_json_of
from noisegate.cli.findings import show_findings
from noisegate.cli.privacy import read_delta
from noisegate.cli.progress import runs
from noisegate.cli.run import SILENCE, gather, run_command
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.redteam import Findings, red_team
from noisegate.redteam.findings import Stage, Trial
from noisegate.redteam.plot import describe, plot
from noisegate.redteam.search import BUDGET, SHARES, check_search
from noisegate.redteam.settings import BEHAVED, behaved
from noisegate.redteam.trials import TrialFolder
from noisegate.runs import Spec, costs
from noisegate.runs.setup import Setup, prepare
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.pool import Pool
from noisegate.version import __version__

NOT_OURS = ("threads", "resume", "baselines", "out", "as_json")
"""Flags of `run` that mean something else here, or nothing."""

SPEC_FLAGS = tuple(
    name
    for name in inspect.signature(run_command).parameters
    if name not in (*NOT_OURS, "spec_file", "settings", "device", "memory")
)


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
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that a run may take; then it has failed. [no limit]")
    ] = None,
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
    of_run["delta"] = read_delta(of_run["delta"])
    flags = {name: of_run[name] for name in SPEC_FLAGS if of_run[name] is not None}
    compute = Compute(device=of_run["device"], threads=threads, memory=of_run["memory"])
    spec = gather(spec_file, flags, settings)
    others, repeats = _numbers("shares", shares, float), _numbers("seeds", seeds, int)
    check_search(spec, budget, others)
    pool = Pool(compute, jobs, time_limit=time_limit)
    # What is wrong with the configuration itself is said once, and not once for every attack.
    setup = prepare(behaved(spec), compute)
    _check_somebody_lies(spec, others, setup)
    examples, terms = len(setup.y_test), {spec.seed: costs.terms_of(behaved(spec), setup)}
    del setup  # which has its data on the device
    if spec.sampling == "fixed":  # where the noise follows how many examples the smallest worker holds, on each seed
        others_ready = {seed: replace(behaved(spec), seed=seed) for seed in repeats}
        terms |= {seed: costs.terms_of(one, prepare(one, compute)) for seed, one in others_ready.items()}
    console = Console(stderr=True, quiet=as_json)
    with TrialFolder(out or Path("runs") / f"redteam-{spec.name()}", spec, pool.how) as folder:
        _announce(console, budget, pool, folder)
        try:
            with _watched(console, budget, spec.byzantine) as watch, pool:
                evaluate = Evaluation(pool, folder, watch)
                found = red_team(spec, evaluate, budget=budget, shares=others, seeds=repeats)
        except KeyboardInterrupt:
            told = f"interrupted: {runs(len(folder))} kept in {folder.path}; the same command goes on from there"
            Console(stderr=True).print(told, soft_wrap=True)
            raise typer.Exit(130) from None
        files = _write(found, folder, pool)
    cost = _bills(found, terms)
    if as_json:
        named = {name: str(path) for name, path in files.items()}
        print(json.dumps({**as_json_of(found, examples), **costs.as_json(cost), **named}, indent=2))
    else:
        show_findings(found, examples, files)
        show_costs(cost, Console())


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

    def __init__(self, pool: Pool, folder: TrialFolder, watch: Any) -> None:
        self.pool, self.folder, self.watch = pool, folder, watch

    def __call__(self, specs: Sequence[Spec], stage: Stage) -> list[Outcome]:
        """The outcomes, in the order of the specs."""
        found = {i: outcome for i, spec in enumerate(specs) if (outcome := self.folder.find(spec)) is not None}
        for i, outcome in found.items():
            self.watch(Trial(specs[i], stage, outcome))
        new = [i for i in range(len(specs)) if i not in found]
        for place, outcome in self.pool.play([specs[i] for i in new]):
            i = new[place]
            self.folder.add(specs[i], stage, outcome)
            self.watch(Trial(specs[i], stage, outcome))
            found[i] = outcome
        return [found[i] for i in range(len(specs))]


def _announce(console: Console, budget: int, pool: Pool, folder: TrialFolder) -> None:
    """What is about to happen, and what has already."""
    told = f"redteam: at most {runs(budget)}, {pool.jobs} at a time, kept in {folder.path}"
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
            console.print(f"redteam: {done} of at most {runs(budget)}; {status}", soft_wrap=True)

    if console.is_terminal:
        bar.start()
    try:
        yield watch
    finally:
        if bar.live.is_started:
            bar.stop()


def _ended(trial: Trial) -> str:
    """What has ended, in a few words."""
    told = "reference" if trial.spec.byzantine == 0 else plain(describe(trial))
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
    honest = int((~setup.federation.adversary.byzantine).sum())
    for name, share in [("byzantine", spec.byzantine), *(("shares", share) for share in shares)]:
        if replace(spec, byzantine=share).count_byzantine(honest) == 0:
            raise refuse(name, share, f"makes no Byzantine worker beside the honest ones ({honest}); raise it")


def _write(found: Findings, folder: TrialFolder, pool: Pool) -> dict[str, Path]:
    """The plot and the worst case, if a run ended at all."""
    files = {"out": folder.path}
    if found.worst is not None:
        files["plot"] = folder.write("plot.html", plot(found))
        again = f"noisegate run worst.toml {pool.flags}"
        head = f"# accuracy {found.worst.accuracy!r} with noisegate {__version__}; again with: {again}\n"
        files["worst_spec"] = folder.write("worst.toml", head + found.worst.spec.to_toml())
    return files


def _bills(found: Findings, terms: Mapping[int, costs.PricedRun]) -> list[costs.Bill]:
    """What the search cost. Every run trains on the same data with the same noise; those that failed count too.

    terms: by seed, those of a run in which all behave. Only there do several workers that behave hold one example.
    """
    yardsticks = [found.yardsticks, *(again.yardsticks for again in found.seeds)]
    trials = [*found.trials, *(again.worst for again in found.seeds)]
    for by in yardsticks:
        trials += [by.reference, by.behaved]
    distinct = {trial.spec.name(): trial for trial in trials if trial.outcome.status != "skipped"}

    def training(spec: Spec, attack: str) -> costs.PricedRun:
        own = terms.get(spec.seed, terms[found.spec.seed])
        return own if attack == BEHAVED and spec.byzantine > 0 else costs.without_copies(own)

    return costs.bills(training(trial.spec, trial.attack) for trial in distinct.values())
