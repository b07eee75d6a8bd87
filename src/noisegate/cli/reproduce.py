"""`noisegate reproduce`: the paper's experiments, beside what it prints and what its authors logged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from rich.table import Table

from noisegate import paper
from noisegate.checks import plain
from noisegate.cli import flags
from noisegate.cli.comparison import PARTITION, comparison_as_json, show_comparison, show_experiments
from noisegate.cli.progress import PoolSettings, play
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
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
from noisegate.runs.store import write_whole
from noisegate.sweeps.bills import bills_of
from noisegate.sweeps.sweep import SweepCell, SweepFolder

QUICK_SEEDS = (1, 2, 3, 4)
"""Seeds of the subset on digits. It has 360 test examples, so that single runs are noisy."""

CLAIMED = ("clipping", "guerraoui", "zhu-ling", "side-effect", "attacks", "majority", "learning-rate", "adaptive")
"""Experiments that a claim of the paper rests on."""


@dataclass(frozen=True)
class ReproduceFlags:
    """The flags of `noisegate reproduce`. An empty text: not given."""

    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names, as --list shows them. [all that have runs]")
    ] = None
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments, their runs and about how long.")] = (
        False
    )
    quick: Annotated[bool, typer.Option("--quick", help="A subset on digits, in a few minutes.")] = False
    dataset: Annotated[str, typer.Option(help="Only these data sets, with commas between them.")] = ""
    epsilon: Annotated[str, typer.Option(help="Only these budgets, with commas.")] = ""
    attack: Annotated[str, typer.Option(help="Only these attacks, with commas.")] = ""
    byzantine: Annotated[str, typer.Option(help="Only these Byzantine shares, with commas.")] = ""
    setting: Annotated[str, typer.Option(help="Only iid, or only non-iid.")] = ""
    seeds: Annotated[
        str,
        typer.Option(
            help=f"With commas. [{','.join(map(str, paper.SEEDS))}; {','.join(map(str, QUICK_SEEDS))} for quick]"
        ),
    ] = ""
    aggregator: Annotated[str, typer.Option(help="In place of the paper's filter.")] = paper.PAPER_AGGREGATOR
    engine: flags.Engine = "local"
    jobs: flags.Jobs = None
    device: flags.Device = "auto"
    memory: flags.MemoryOfEach = None
    time_limit: flags.TimeLimit = None
    out: Annotated[Path, typer.Option(help="Folder of the runs; those that are there are not repeated.")] = Path(
        "runs/reproduce"
    )
    source: Annotated[
        Path | None, typer.Option("--from", help="Compare the runs of this CSV file, and run nothing.")
    ] = None
    csv: Annotated[Path | None, typer.Option(help="Also write the runs to this file.")] = None
    cells: Annotated[Path | None, typer.Option(help="Also write every cell of the tables to this CSV file.")] = None
    docs: Annotated[Path | None, typer.Option(help="Also write what came out, in short, to this Markdown file.")] = None
    as_json: flags.AsJson = False

    def load(self) -> list[Experiment]:
        """The experiments that are asked for, with the cells that are asked for."""
        chosen = [QUICK] if self.quick else list(self.experiments or paper.names())
        loaded = [one for one in map(self.load_one, chosen) if one.cells]
        if not loaded:
            raise SpecError("no cell of these experiments has such settings; see --list, and choose fewer filters")
        return loaded

    def load_one(self, name: str) -> Experiment:
        """One experiment, with the cells that are asked for."""
        usual = QUICK_SEEDS if name == QUICK else paper.SEEDS
        seeds = tuple(dict.fromkeys(flags.read_numbers("seeds", self.seeds, int))) or usual
        return paper.load(name, aggregator=self.aggregator, seeds=seeds, only=self._only())

    def _only(self) -> dict[str, Sequence[Any]]:
        """The values that the filters leave, by setting."""
        if self.setting not in ("", "iid", "non-iid"):
            raise SpecError(f"setting = {self.setting!r}: must be iid or non-iid")
        only: dict[str, Sequence[Any]] = {
            "dataset": self.dataset.split(",") if self.dataset else [],
            "attack": self.attack.split(",") if self.attack else [],
            "epsilon": flags.read_numbers("epsilon", self.epsilon, float),
            "byzantine": flags.read_numbers("byzantine", self.byzantine, float),
            "non_iid": [self.setting == "non-iid"] if self.setting else [],
        }
        return {name: values for name, values in only.items() if values}


@flags.takes(ReproduceFlags)
def reproduce_command(given: ReproduceFlags) -> None:
    """Run the paper's experiments and compare. Exit 1 if a cell is outside its tolerance, missing or failed."""
    named = given.experiments or []
    if given.quick and named:
        raise SpecError(f"--quick: is an experiment of its own; leave out {', '.join(named)}")
    if PARTITION in named:
        if len(named) > 1:
            raise SpecError(f"{PARTITION}: has no runs; give it alone")
        _partition(given.dataset or "mnist", given.out)
        return
    chosen = given.load()
    compute = Compute(device=given.device, memory=given.memory)
    if given.listing:
        show_experiments(chosen, given.load_one(QUICK), compute)
        return
    specs = list({spec.name(): spec for one in chosen for spec in needed(one)}.values())
    cells = _run(specs, given, compute) if given.source is None else []
    records = _records(cells, given)
    cost = bills_of(cells)
    found = {one.name: outcomes(one, records) for one in chosen}
    verdicts = claims(found) if any(one.name in CLAIMED for one in chosen) else []
    if given.source is None:
        tables = [as_table(one, found[one.name]) for one in chosen]
        _write(given.out / "tables.json", json.dumps(tables, indent=1) + "\n")
    if given.csv:
        _write(given.csv, to_csv(records[spec.name()] for spec in specs if spec.name() in records))
    if given.cells:
        _write(given.cells, cells_csv(chosen, found))
    if given.docs:
        _write(given.docs, page(chosen, found, verdicts, records, str(given.source or ""), str(given.cells or "")))
    fine = all(passed(some) for some in found.values())
    if given.as_json:
        compared = comparison_as_json(chosen, found, verdicts, fine)
        print(json.dumps(compared | (costs.as_json(cost) if given.source is None else {})))
    else:
        show_comparison(chosen, found, verdicts, fine)
        show_costs(cost, Console())
    if not fine:
        raise typer.Exit(1)


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


def _write(path: Path, content: str) -> None:
    """Write a file that is complete as soon as it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    write_whole(path, content.encode(), f".{path.name}.{uuid4().hex}.part")  # another command may write the same file


def _partition(dataset: str, out: Path) -> None:
    """Print how the non-iid partition deals out the classes, and write the figure."""
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
