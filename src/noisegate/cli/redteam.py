"""`noisegate redteam`: every attack against one configuration, worst case first."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich.progress import MofNCompleteColumn

from noisegate.checks import plain, refuse
from noisegate.cli.bar import bar_of_runs
from noisegate.cli.findings import as_json, show_findings
from noisegate.cli.progress import runs
from noisegate.cli.reading import read_numbers
from noisegate.cli.records import RedteamFlags
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.errors import NoisegateWarning
from noisegate.files import seal
from noisegate.redteam import Findings, red_team
from noisegate.redteam.findings import Stage, Trial
from noisegate.redteam.objectives import word_of
from noisegate.redteam.plot import describe
from noisegate.redteam.search import check_search, measuring
from noisegate.redteam.settings import BEHAVED, behaved
from noisegate.redteam.trials import FINDINGS, TrialFolder
from noisegate.report.redteam_page import redteam_page
from noisegate.runs import Spec, costs
from noisegate.runs.setup import Setup, prepare
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.pool import Pool
from noisegate.version import __version__


def redteam_command(flags: RedteamFlags) -> None:
    """Search, and show what was found."""
    compute = Compute(device=flags.device, threads=flags.threads, memory=flags.memory)
    spec, objective = flags.spec(), flags.objective
    shares, seeds = read_numbers("shares", flags.shares, float), read_numbers("seeds", flags.seeds, int)
    check_search(spec, flags.budget, shares, objective)
    spec = measuring(spec, objective)
    pool = Pool(compute, flags.jobs, time_limit=flags.time_limit)
    # What is wrong with the configuration itself is said once, and not once for every attack.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* so nobody attacks", NoisegateWarning)  # which is refused below
        setup = prepare(behaved(spec), compute)
    _check_there_are_byzantine_workers(spec, shares, setup)
    counts = torch.bincount(setup.y_test, minlength=setup.federation.adversary.classes).tolist()
    examples, terms = len(setup.y_test), {spec.seed: costs.terms_of(behaved(spec), setup)}
    del setup  # which has its data on the device
    if spec.sampling != "poisson":  # the noise follows how many examples the smallest worker holds, on each seed
        others = {seed: replace(behaved(spec), seed=seed) for seed in seeds}
        terms |= {seed: costs.terms_of(other, prepare(other, compute)) for seed, other in others.items()}
    console = Console(stderr=True, quiet=flags.as_json)
    aim = "" if objective == "accuracy" else "".join(letter if letter.isalnum() else "-" for letter in objective) + "-"
    out = flags.out or Path("runs") / f"redteam-{aim}{spec.name()}"
    with TrialFolder(out, spec, pool.how, objective) as folder:
        _announce(console, flags.budget, pool, folder)
        try:
            with _watched(console, flags.budget, spec.byzantine, objective) as watch, pool:
                evaluate = Evaluation(pool, folder, watch)
                found = red_team(
                    spec,
                    evaluate,
                    budget=flags.budget,
                    shares=shares,
                    seeds=seeds,
                    objective=objective,
                    counts=counts,
                )
        except KeyboardInterrupt:
            told = f"interrupted: {runs(len(folder))} kept in {folder.path}; the same command goes on from there"
            Console(stderr=True).print(told, soft_wrap=True)
            raise typer.Exit(130) from None
        files = _write(found, folder, pool, examples)
    cost = _bills(found, terms)
    if flags.as_json:
        named = {name: str(path) for name, path in files.items()}
        print(json.dumps({**as_json(found, examples), **costs.as_json(cost), **named}, indent=2))
    else:
        show_findings(found, examples, files)
        show_costs(cost, Console())


class Evaluation:
    """It runs what the folder does not hold yet, and keeps each run there as soon as it ends."""

    def __init__(self, pool: Pool, folder: TrialFolder, watch: Callable[[Trial], None]) -> None:
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
    """Say how many runs there may be, and how many of them are there already."""
    told = f"redteam: at most {runs(budget)}, {pool.jobs} at a time, kept in {folder.path}"
    if len(folder):
        told += f"; {len(folder)} are there already"
    if folder.strange:
        told += f"; {folder.strange} there are of another version, device or number of threads, and do not count"
    if folder.damaged:
        told += f"; {folder.damaged} there were damaged, and are run again"
    console.print(told, soft_wrap=True, highlight=False)


@contextmanager
def _watched(
    console: Console, budget: int, share: float, objective: str = "accuracy"
) -> Iterator[Callable[[Trial], None]]:
    """Give the function that is to be called with each trial that ends. share: the one whose worst case is told."""
    done, worst = 0, float("inf")
    told = objective == "accuracy"  # what is worst for a class is known only beside the runs without an attack

    def watch(trial: Trial) -> None:
        nonlocal done, worst
        if trial.stage not in ("reference", "seeds"):
            done += trial.outcome.status != "skipped"
            worst = min(worst, trial.accuracy if trial.spec.byzantine == share else worst)
        status = (f"worst so far {worst:.3f}; " if told and worst <= 1 else "") + _ended(trial)
        bar.tell(f"{done} of at most {runs(budget)}; {status}", completed=done, status=status)

    with bar_of_runs(console, "redteam", MofNCompleteColumn(), total=budget) as bar:
        yield watch


def _ended(trial: Trial) -> str:
    """A trial that has ended, in a few words."""
    told = "reference" if trial.spec.byzantine == 0 else plain(describe(trial))
    if trial.stage == "shares":
        told += f" at {trial.spec.byzantine:.0%}"
    if trial.stage == "seeds":
        told += f" on seed {trial.spec.seed}"
    stage = f"{trial.stage}: " if trial.stage != "reference" else ""
    done = trial.outcome.status == "done"
    return f"{stage}{told} {f'{trial.accuracy:.3f}' if done else trial.outcome.status}"


def _check_there_are_byzantine_workers(spec: Spec, shares: Sequence[float], setup: Setup) -> None:
    """A small share of few workers may be less than one worker."""
    honest = int((~setup.federation.adversary.byzantine).sum())
    for name, share in [("byzantine", spec.byzantine), *(("shares", share) for share in shares)]:
        if replace(spec, byzantine=share).count_byzantine(honest) == 0:
            raise refuse(name, share, f"makes no Byzantine worker beside the honest ones ({honest}); raise it")


def _write(found: Findings, folder: TrialFolder, pool: Pool, examples: int) -> dict[str, Path]:
    """Write the findings; and the page and the worst case, if any attack was run to its end."""
    files = {"out": folder.path}
    findings = as_json(found, examples)
    folder.write(FINDINGS, seal(findings))
    if found.worst is not None:
        files["plot"] = folder.write("plot.html", redteam_page(findings).html())
        again = f"noisegate run worst.toml {pool.flags}"
        worth = f"accuracy {found.worst.accuracy!r}"
        if found.measure.objective != "accuracy":
            worth += f", {word_of(found.measure.objective)} {found.measure.value(found.worst.outcome)!r}"
        head = f"# {worth} with noisegate {__version__}; again with: {again}\n"
        files["worst_spec"] = folder.write("worst.toml", head + found.worst.spec.to_toml())
    return files


def _bills(found: Findings, terms: Mapping[int, costs.PricedRun]) -> list[costs.Bill]:
    """What the search cost. Every run trains on the same data with the same noise. Runs that failed count too.

    terms: by seed, what a run costs in which the Byzantine workers behave. Only in such a run do they hold copies of
    private examples.
    """
    yardsticks = [found.yardsticks, *(again.yardsticks for again in found.seeds)]
    trials = [*found.trials, *found.also, *(again.worst for again in found.seeds)]
    for by in yardsticks:
        trials += [by.reference, by.behaved]
    distinct = {trial.spec.name(): trial for trial in trials if trial.outcome.status != "skipped"}

    def training(spec: Spec, attack: str) -> costs.PricedRun:
        own = terms.get(spec.seed, terms[found.spec.seed])
        return own if attack == BEHAVED and spec.byzantine > 0 else costs.without_copies(own)

    return costs.bills(training(trial.spec, trial.attack) for trial in distinct.values())
