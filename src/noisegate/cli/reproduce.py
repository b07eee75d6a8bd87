"""`noisegate reproduce`: the paper's experiments, beside what it prints and what its authors logged."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from noisegate import paper
from noisegate.checks import plain
from noisegate.cli.comparison import PARTITION, comparison_as_json, show_comparison, show_experiments
from noisegate.cli.progress import PoolSettings, play
from noisegate.cli.reading import read_numbers
from noisegate.cli.records import ReproduceFlags
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
from noisegate.cli.writing import write_beside
from noisegate.compute import Compute
from noisegate.errors import SpecError, StoreError
from noisegate.files import read_json
from noisegate.paper import QUICK, Experiment
from noisegate.paper.claims import claims
from noisegate.paper.comparison import as_table, cells_csv
from noisegate.paper.outcomes import Record, from_csv, needed, outcomes, passed, to_csv
from noisegate.paper.page import page
from noisegate.runs import costs
from noisegate.runs.spec import Spec
from noisegate.sweeps.bills import bills_of
from noisegate.sweeps.sweep import SweepCell, SweepFolder
from noisegate.usual import QUICK_SEEDS

CLAIMED = ("clipping", "guerraoui", "zhu-ling", "side-effect", "attacks", "majority", "learning-rate", "adaptive")
"""Experiments that a claim of the paper rests on."""


def reproduce_command(given: ReproduceFlags) -> None:
    """Run what is asked for, and compare it."""
    named = given.experiments or []
    if given.quick and named:
        raise SpecError(f"--quick: is an experiment of its own; leave out {', '.join(named)}")
    if PARTITION in named:
        if len(named) > 1:
            raise SpecError(f"{PARTITION}: has no runs; give it alone")
        _partition(given.dataset or "mnist", given.out)
        return
    chosen = load(given)
    compute = Compute(device=given.device, memory=given.memory)
    if given.listing:
        show_experiments(chosen, load_one(given, QUICK), compute)
        return
    specs = list({spec.name(): spec for one in chosen for spec in needed(one)}.values())
    cells = _run(specs, given, compute) if given.source is None else []
    records = _records(cells, given)
    cost = bills_of(cells)
    found = {one.name: outcomes(one, records) for one in chosen}
    verdicts = claims(found) if any(one.name in CLAIMED for one in chosen) else []
    if given.source is None:
        tables = [as_table(one, found[one.name]) for one in chosen]
        write_beside(given.out / "tables.json", json.dumps(tables, indent=1) + "\n")
    if given.csv:
        write_beside(given.csv, to_csv(records[spec.name()] for spec in specs if spec.name() in records))
    if given.cells:
        write_beside(given.cells, cells_csv(chosen, found))
    if given.docs:
        made = page(chosen, found, verdicts, records, str(given.source or ""), str(given.cells or ""))
        write_beside(given.docs, made)
    fine = all(passed(some) for some in found.values())
    if given.as_json:
        compared = comparison_as_json(chosen, found, verdicts, fine)
        print(json.dumps(compared | (costs.as_json(cost) if given.source is None else {})))
    else:
        show_comparison(chosen, found, verdicts, fine)
        show_costs(cost, Console())
    if not fine:
        raise typer.Exit(1)


def load(given: ReproduceFlags) -> list[Experiment]:
    """The experiments that are asked for, with the cells that are asked for."""
    chosen = [QUICK] if given.quick else list(given.experiments or paper.names())
    loaded = [one for one in (load_one(given, name) for name in chosen) if one.cells]
    if not loaded:
        raise SpecError("no cell of these experiments has such settings; see --list, and choose fewer filters")
    return loaded


def load_one(given: ReproduceFlags, name: str) -> Experiment:
    """One experiment, with the cells that are asked for."""
    usual = QUICK_SEEDS if name == QUICK else paper.SEEDS
    seeds = tuple(dict.fromkeys(read_numbers("seeds", given.seeds, int))) or usual
    return paper.load(name, aggregator=given.aggregator, seeds=seeds, only=_only(given))


def _only(given: ReproduceFlags) -> dict[str, Sequence[Any]]:
    """The values that the filters leave, by setting."""
    if given.setting not in ("", "iid", "non-iid"):
        raise SpecError(f"setting = {given.setting!r}: must be iid or non-iid")
    only: dict[str, Sequence[Any]] = {
        "dataset": given.dataset.split(",") if given.dataset else [],
        "attack": given.attack.split(",") if given.attack else [],
        "epsilon": read_numbers("epsilon", given.epsilon, float),
        "byzantine": read_numbers("byzantine", given.byzantine, float),
        "non_iid": [given.setting == "non-iid"] if given.setting else [],
    }
    return {name: values for name, values in only.items() if values}


def _run(specs: Sequence[Spec], given: ReproduceFlags, compute: Compute) -> list[SweepCell]:
    folder = SweepFolder(given.out)
    settings = PoolSettings(given.engine, compute, given.jobs, given.time_limit)  # type: ignore[arg-type]  # see below
    settings.pool(folder)  # which checks the settings before anything is written
    folder.check(specs)
    folder.keep_list(specs)
    return play("reproduce", specs, folder, settings, quiet=given.as_json)


def _records(cells: Sequence[SweepCell], given: ReproduceFlags) -> Mapping[str, Record]:
    """The runs to be compared, by name: those of the file that was given, or else those that were just run."""
    if given.source is not None:
        return _read(given.source)
    folder = SweepFolder(given.out)
    return {cell.spec.name(): record(folder, cell) for cell in cells}


def record(folder: SweepFolder, cell: SweepCell) -> Record:
    """What a run of the folder is compared by."""
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


def _partition(dataset: str, out: Path) -> None:
    """Print how the non-iid partition deals out the classes, and write the figure."""
    from noisegate.paper.partition_figure import PRIVATE, WHERE, distribution
    from noisegate.report.partition_page import partition_page

    found = distribution(dataset)
    (out / "runs").mkdir(parents=True, exist_ok=True)  # so that it is taken for a store, as it will be
    table = Table("worker", *(f"class {label}" for label in range(found.shares.shape[1])), box=None, pad_edge=False)
    for number, shares in enumerate(found.shares.tolist(), 1):
        table.add_row(str(number), *(f"{share:.2f}" for share in shares))
    print(PRIVATE)
    Console().print(table)
    write_beside(out / "partition.html", partition_page(found).html())
    print(f"{WHERE}; here {dataset}, {len(found.shares)} workers, mean total variation {found.distance:.2f}")
    print(f"{PRIVATE}; written to {out / 'partition.html'}")
