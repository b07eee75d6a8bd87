"""`noisegate reproduce`: the paper's experiments, beside what it prints and what its authors logged."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from rich.table import Table

from noisegate import paper
from noisegate.checks import plain
from noisegate.cli.progress import play
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.errors import SpecError, StoreError
from noisegate.paper import QUICK, Experiment
from noisegate.paper.claims import PaperClaim, claims, named
from noisegate.paper.comparison import as_table, columns, page, rows
from noisegate.paper.outcomes import CellOutcome, Record, from_csv, needed, outcomes, passed, to_csv
from noisegate.runs import costs, estimate
from noisegate.runs.files import read_json
from noisegate.runs.spec import Spec
from noisegate.runs.store import write_whole
from noisegate.sweeps.bills import bills_of
from noisegate.sweeps.sweep import Engine, SweepCell, SweepFolder, make_pool

QUICK_SEEDS = (1, 2, 3, 4)  # of the subset on digits, whose 360 test examples make single runs noisy
PARTITION = "partition"
"""The paper's figure of its non-iid partition, for which nothing is run."""


def reproduce_command(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names, as --list shows them. [all that have runs]")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the experiments, their runs and about how long.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A subset on digits, in a few minutes.")] = False,
    dataset: Annotated[str, typer.Option(help="Only these data sets, with commas between them.")] = "",
    epsilon: Annotated[str, typer.Option(help="Only these budgets, with commas.")] = "",
    attack: Annotated[str, typer.Option(help="Only these attacks, with commas.")] = "",
    byzantine: Annotated[str, typer.Option(help="Only these Byzantine shares, with commas.")] = "",
    setting: Annotated[str, typer.Option(help="Only iid, or only non-iid.")] = "",
    seeds: Annotated[str, typer.Option(help="With commas. [1,2,3; 1,2 for quick]")] = "",
    aggregator: Annotated[str, typer.Option(help="In place of the paper's filter.")] = paper.PAPER_AGGREGATOR,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores; 16 on CUDA]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    memory: Annotated[int | None, typer.Option(help="MiB of a run beside its uploads.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that a run may take; then it has failed. [no limit]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs; those that are there are not repeated.")] = Path(
        "runs/reproduce"
    ),
    source: Annotated[
        Path | None, typer.Option("--from", help="Compare the runs of this CSV file, and run nothing.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the runs to this file.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run the paper's experiments and compare. Exit 1 if a cell is outside its tolerance, missing or failed."""
    if quick and experiments:
        raise SpecError(f"--quick: is an experiment of its own; leave out {', '.join(experiments)}")
    if experiments and PARTITION in experiments:
        if len(experiments) > 1:
            raise SpecError(f"{PARTITION}: has no runs; give it alone")
        _partition(dataset or "mnist", out)
        return
    only = _only(dataset, epsilon, attack, byzantine, setting)
    chosen = _load(experiments, quick, seeds, aggregator, only)
    compute = Compute(device=device, memory=memory)
    if listing:
        _list(chosen, _load_one(QUICK, seeds, aggregator, only), compute)
        return
    specs = list({spec.name(): spec for one in chosen for spec in needed(one)}.values())
    cells = _run(specs, out, engine, compute, jobs, as_json, time_limit) if source is None else []
    records = (
        _read(source) if source is not None else {cell.spec.name(): record(SweepFolder(out), cell) for cell in cells}
    )
    cost = bills_of(cells)
    found = {one.name: outcomes(one, records) for one in chosen}
    verdicts = claims(found) if any(one.name in CLAIMED for one in chosen) else []
    if source is None:
        tables = [as_table(one, found[one.name]) for one in chosen]
        _write(out / "tables.json", json.dumps(tables, indent=1) + "\n")
    if csv:
        _write(csv, to_csv(records[spec.name()] for spec in specs if spec.name() in records))
    if docs:
        _write(docs, page(chosen, found, verdicts, records, str(source or "")))
    fine = all(passed(some) for some in found.values())
    if as_json:
        print(json.dumps(_told(chosen, found, verdicts, fine) | (costs.as_json(cost) if source is None else {})))
    else:
        _show(chosen, found, verdicts, fine)
        show_costs(cost, Console())
    if not fine:
        raise typer.Exit(1)


CLAIMED = ("clipping", "guerraoui", "zhu-ling", "side-effect", "attacks", "majority", "learning-rate", "adaptive")
"""Experiments that a claim of the paper rests on."""


def _load(
    names: Sequence[str] | None, quick: bool, seeds: str, aggregator: str, only: Mapping[str, Sequence[Any]]
) -> list[Experiment]:
    chosen = [QUICK] if quick else list(names or paper.names())
    loaded = [_load_one(name, seeds, aggregator, only) for name in chosen]
    if not any(one.cells for one in loaded):
        raise SpecError("no cell of these experiments has such settings; see --list, and choose fewer filters")
    return [one for one in loaded if one.cells]


def _load_one(name: str, seeds: str, aggregator: str, only: Mapping[str, Sequence[Any]]) -> Experiment:
    usual = QUICK_SEEDS if name == QUICK else paper.SEEDS
    numbers = tuple(dict.fromkeys(_numbers("seeds", seeds, int))) or usual
    return paper.load(name, aggregator=aggregator, seeds=numbers, only=only)


def _only(dataset: str, epsilon: str, attack: str, byzantine: str, setting: str) -> dict[str, Sequence[Any]]:
    only: dict[str, Sequence[Any]] = {}
    if dataset:
        only["dataset"] = dataset.split(",")
    if attack:
        only["attack"] = attack.split(",")
    if epsilon:
        only["epsilon"] = _numbers("epsilon", epsilon, float)
    if byzantine:
        only["byzantine"] = _numbers("byzantine", byzantine, float)
    if setting:
        if setting not in ("iid", "non-iid"):
            raise SpecError(f"setting = {setting!r}: must be iid or non-iid")
        only["non_iid"] = [setting == "non-iid"]
    return only


def _partition(dataset: str, out: Path) -> None:
    from noisegate.paper.partition_figure import PRIVATE, WHERE, distribution, figure

    found = distribution(dataset)
    (out / "runs").mkdir(parents=True, exist_ok=True)  # so that it is taken for a store, as it will be
    table = Table("worker", *(f"class {label}" for label in range(found.shares.shape[1])), box=None, pad_edge=False)
    for number, shares in enumerate(found.shares.tolist(), 1):
        table.add_row(str(number), *(f"{share:.2f}" for share in shares))
    print(PRIVATE)
    Console().print(table)
    _write(out / "partition.html", figure(found))
    print(f"{WHERE}; here {dataset}, {len(found.shares)} workers, mean total variation {found.distance:.2f}")
    print(f"{PRIVATE}; written to {out / 'partition.html'}")


def _numbers(name: str, text: str, kind: Any) -> list[Any]:
    try:
        return [kind(entry) for entry in text.split(",") if entry.strip()]
    except ValueError:
        raise SpecError(f"{name} = {text!r}: must be numbers with commas between them, as 2,0.5") from None


def _run(
    specs: Sequence[Spec],
    out: Path,
    engine: str,
    compute: Compute,
    jobs: int | None,
    quiet: bool,
    time_limit: float | None,
) -> list[SweepCell]:
    folder, kind = SweepFolder(out), _engine(engine)
    make_pool(kind, folder, compute, jobs, time_limit)  # so that a mistake is told before anything is written
    folder.check(specs)
    folder.keep_list(specs)
    return play("reproduce", specs, folder, engine=kind, compute=compute, jobs=jobs, quiet=quiet, time_limit=time_limit)


def _engine(engine: str) -> Engine:
    if engine == "local":
        return "local"
    if engine == "ray":
        return "ray"
    raise SpecError(f"engine = {engine!r}: must be local or ray")


def record(folder: SweepFolder, cell: SweepCell) -> Record:
    """A run of the store."""
    name = cell.spec.name()
    if cell.result is None:
        return Record(name, cell.status, message=cell.message)
    path = folder.run_path(cell.spec) / "environment.json"
    try:
        place = read_json(path)
        packages = dict(place["packages"])
    except (OSError, StoreError, ValueError, TypeError, LookupError):
        place, packages = {}, {}  # where it ran is not known, but what came of it is
    return Record(
        run=name,
        status=cell.status,
        accuracy=cell.result["accuracy"],
        honest_rejected=cell.result["honest_rejected"],
        byzantine_selected=cell.result["byzantine_selected"],
        seconds=cell.result["seconds"],
        device=plain(place.get("device", "")),
        versions=", ".join(f"{name} {plain(packages[name])}" for name in ("noisegate", "torch") if name in packages),
    )


def _read(path: Path) -> dict[str, Record]:
    try:
        return from_csv(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); give a file that --csv wrote") from None
    except UnicodeDecodeError:
        raise StoreError(f"{path}: is no text; give a file that --csv wrote") from None


def _write(path: Path, content: str) -> None:
    """A file that is whole once it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    write_whole(path, content.encode(), f".{path.name}.{uuid4().hex}.part")  # another command may write the same file


def _list(chosen: Sequence[Experiment], quick: Experiment, compute: Compute) -> None:
    """What can be run. quick: shown even where it is not chosen, as long as the filters leave something of it."""
    cuda = compute.resolve().type == "cuda"
    slow = estimate.slowness(compute)
    table = Table("experiment", "in the paper", "cells", "runs", "about", box=None, pad_edge=False)
    every: dict[str, Spec] = {}
    aside = [quick] if quick.cells and quick not in chosen else []
    for one in (*chosen, *aside):
        specs = needed(one)
        every |= {spec.name(): spec for spec in specs} if one not in aside else {}
        taken = estimate.shown(estimate.seconds(specs, cuda, slow))
        title = f"{one.title}, run by --quick" if one.name == QUICK else one.title
        table.add_row(one.name, f"{title}. {one.paper}", str(len(one.cells)), str(len(specs)), taken)
    table.add_row(
        PARTITION, "How the non-iid partition deals classes out (private); alone, and with --dataset", "", "0", "1 s"
    )
    Console().print(table)
    total = estimate.shown(estimate.seconds(every.values(), cuda, slow))
    where = "an NVIDIA H200, many at once" if cuda else "one core of this machine"
    beside = f" beside {QUICK}" if aside else ""
    print(f"{len(every)} different runs{beside}; times are estimates for {where}, {total} in all")


def _show(
    chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]], verdicts: Sequence[PaperClaim], fine: bool
) -> None:
    console = Console()
    for one in chosen:
        names, some = columns(one, found[one.name]), found[one.name]
        settings = sum(name in {key for outcome in some for key in outcome.cell.varies} for name in names)
        table = Table(box=None, pad_edge=False, title=f"{one.title} ({one.paper})", title_justify="left")
        for name in ("cell", *names[settings:]):
            table.add_column(name, overflow="fold")
        for outcome, row in zip(some, rows(one, some), strict=True):
            table.add_row(named(outcome), *row[settings:])
        console.print(table)
        print()
    for claim in verdicts:
        print(f"claim {claim.number}: {claim.verdict}. {claim.text} ({claim.why})")
    if fine:
        print("every cell is within its tolerance, or departs from it for a known reason")
        return
    count = Counter(outcome.verdict for some in found.values() for outcome in some if not passed([outcome]))
    print(f"not every cell is within its tolerance: {', '.join(f'{count[verdict]} {verdict}' for verdict in count)}")


def _told(
    chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]], verdicts: Sequence[PaperClaim], fine: bool
) -> dict[str, Any]:
    return {
        "passed": fine,
        "claims": [vars(claim) for claim in verdicts],
        "experiments": [
            {
                "name": one.name,
                "cells": [
                    {
                        "varies": dict(outcome.cell.varies),
                        "paper": outcome.cell.printed,
                        "logs": outcome.cell.logged.mean if outcome.cell.logged else None,
                        "ours": list(outcome.accuracies),
                        "mean": outcome.mean,
                        "difference": outcome.difference,
                        "verdict": outcome.verdict,
                        "note": outcome.note,
                    }
                    for outcome in found[one.name]
                ],
            }
            for one in chosen
        ],
    }
