"""What the fortified filter withstands, beside the published one: accuracy below the reference, over seeds.

    python benchmarks/withstand.py --out withstand.csv
    python benchmarks/withstand.py --device cuda --part 1/4 --out part1.csv
    python benchmarks/withstand.py --tables withstand.csv
    python benchmarks/withstand.py --spec benchmarks/unlike.toml --few --out unlike.csv
    python benchmarks/withstand.py --spec benchmarks/unlike.toml --tables unlike.csv --measured

The runs are those of withstand.toml, or of the file named by --spec. --few makes the data set of few examples that
unlike.toml names. What is in the file named by --out already is not run again. With --part several
processes share the work, each with a file of its own; --tables takes several. --measured leaves out of the tables what
was not run, and says how much that is.
"""

import argparse
import csv
import itertools
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noisegate import Compute
from noisegate.data import load
from noisegate.runs import Spec, make_spec, reference
from noisegate.sweeps.pool import Pool, batches, left_of_part

HERE = Path(__file__).parent
FIELDS = ("run", "accuracy", "honest_rejected", "byzantine_selected", "message", "recall", "attack_success", "fallback")
FEW, FEW_EXAMPLES = Path("runs/fashion-few.npz"), 10_000
"""A data set that --few makes: the first training pictures of Fashion-MNIST, and all its test pictures."""

Row = dict[str, str]


class Table(NamedTuple):
    """asked: how far below the reference `fortified` may be, in points; or below two-stage, where `against` says so.

    asked_recall: the same for the recall of any class. asked_success: how often a trigger may work, in percent.
    """

    title: str
    asked: float
    specs: list[Spec]
    asked_recall: float | None = None
    asked_success: float | None = None
    against: str = "reference"


def tables(path: Path) -> list[Table]:
    """Every table of a file."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for table in content["table"]:
        swept, specs = table.pop("sweep"), list[Spec]()
        about = {name: table.pop(name) for name in Table._fields if name in table}
        for values in itertools.product(*swept.values()):
            settings = {"delta": content["delta"]} | table | dict(zip(swept, values, strict=True))
            if settings["byzantine"] == 0 and settings["attack"] != "none":
                continue
            noise = content["noise"][settings["dataset"]]
            settings |= {"sigma": noise[f"{settings['epsilon']:g}"], "sigma_base": noise["2"]}
            specs.append(make_spec(settings))
        found.append(Table(specs=specs, **about))
    return found


def wanted(path: Path) -> list[Spec]:
    """Every run once."""
    specs = [spec for table in tables(path) for spec in table.specs]
    return list({spec.name(): spec for spec in [*map(reference, specs), *specs]}.values())


def _name(spec: Spec) -> str:
    return str(spec.canonical()["aggregator"]["name"])


def label(part: Any) -> str:
    """A part's name and settings."""
    if not isinstance(part, Mapping):
        return str(part)
    chosen = [name if value is True else str(value) for name, value in part.items() if name != "name"]
    return f"{part['name']} ({', '.join(chosen)})"


def read(paths: Sequence[Path]) -> dict[str, Row]:
    """By the name of the run."""
    rows: dict[str, Row] = {}
    for path in paths:
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows |= {row["run"]: row for row in csv.DictReader(file)}
    return rows


def markdown(table: Table, rows: Mapping[str, Row]) -> str:
    """A table: for each attack the reference, fortified and two-stage; means over seeds, and the lowest."""
    cells: dict[tuple[str, ...], dict[str, list[Spec]]] = {}
    for spec in table.specs:
        where = [f"{spec.byzantine:.0%}"] if len({one.byzantine for one in table.specs}) > 1 else []
        where += [Path(spec.dataset).stem] if len({one.dataset for one in table.specs}) > 1 else []
        where += [f"from {spec.attack_start:.0%}"] if spec.attack_start else []
        where += [f"believed {spec.gamma:.0%} honest"] if spec.gamma else []
        cells.setdefault((*where, label(spec.attack)), {}).setdefault(_name(spec), []).append(spec)
    lines = [
        f"### {table.title}",
        "",
        f"Asked: at most {table.asked:g} points below {_the(table.against)}{_more(table)}.",
    ]
    names = ["attack", "reference", "fortified", "below", "", "refused of 1,000 honest", "two-stage", "below"]
    names += ["lowest recall of a class", ""] if table.asked_recall is not None else []
    names += ["attack success", "", "two-stage"] if table.asked_success is not None else []
    lines += ["", f"| {' | '.join(names)} |".replace("|  |", "| |").replace("|  |", "| |")]
    lines.append(f"| {' | '.join('---' if name in ('attack', '') else '---:' for name in names)} |")
    for where, by_aggregator in cells.items():
        own, others = by_aggregator["fortified"], by_aggregator.get("two-stage", [])
        references = [reference(spec) for spec in own]
        clean, found, other = (_numbers(some, rows, "accuracy") for some in (references, own, others))
        below = _below(clean, found)
        reached = _reached(below if table.against == "reference" else _below(other, found), table.asked)
        refused = [float(rows[spec.name()]["honest_rejected"]) for spec in own if spec.name() in rows]
        columns = [", ".join(where), _shown(clean), _shown(found), _points(below), reached]
        columns += [f"{1000 * statistics.mean(refused):.2f}" if refused else "", _shown(other)]
        columns.append(_points(_below(clean, other)))
        if table.asked_recall is not None:
            columns += _recalls(references, own, rows, table.asked_recall)
        if table.asked_success is not None:
            columns += _successes(references, own, others, rows, table.asked_success)
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def measured(table: Table, rows: Mapping[str, Row]) -> str:
    """The table of the runs of fortified that were run, with their references; and how many that are."""
    run = [spec for spec in table.specs if {spec.name(), reference(spec).name()} <= rows.keys()]
    cells = {_cell(spec) for spec in run if _name(spec) == "fortified"}
    kept = [spec for spec in run if _cell(spec) in cells]
    share = f"Run: {len(kept)} of {len(table.specs)} runs"
    if not kept:
        return f"### {table.title}\n\n{share}.\n"
    seeds = sorted({spec.seed for spec in kept})
    several = len(seeds) > 1
    share += f", with seed{'s' * several} {', '.join(map(str, seeds))}"
    share += f"{'; a cell is the mean of those that it has' * several}."
    return f"{markdown(table._replace(specs=kept), rows)}\n{share}\n"


def _cell(spec: Spec) -> tuple[Any, ...]:
    """What a run of one aggregator has in common with that of another beside it."""
    return spec.dataset, spec.byzantine, label(spec.attack), spec.attack_start, spec.seed


def _the(against: str) -> str:
    return "the reference" if against == "reference" else against


def _more(table: Table) -> str:
    asked = f", no class recalled more than {table.asked_recall:g} points below" if table.asked_recall else ""
    return asked + (
        f", a trigger that works at most {table.asked_success:g} % of the time" if table.asked_success else ""
    )


def _recalls(references: Sequence[Spec], own: Sequence[Spec], rows: Mapping[str, Row], asked: float) -> list[str]:
    """The class whose mean recall lies furthest below the reference's: what it is, beside what it should be."""
    clean, found = (_mean_recall(some, rows) for some in (references, own))
    if not clean or not found:
        return ["missing", "missing"]
    drop, worst = max((there - here, number) for number, (here, there) in enumerate(zip(found, clean, strict=True)))
    shown = f"class {worst}: {found[worst]:.3f}, reference {clean[worst]:.3f}"
    return [shown, _reached(drop, asked)]


def _mean_recall(specs: Sequence[Spec], rows: Mapping[str, Row]) -> list[float]:
    lines = [rows.get(spec.name(), {}).get("recall") for spec in specs]
    if not all(lines):
        return []
    return [statistics.mean(some) for some in zip(*(map(float, line.split()) for line in lines if line), strict=True)]


def _successes(
    references: Sequence[Spec], own: Sequence[Spec], others: Sequence[Spec], rows: Mapping[str, Row], asked: float
) -> list[str]:
    """How often the trigger works, with the highest of the seeds; beside it the reference's."""
    clean, found, other = (
        [value for value in _numbers(some, rows, "attack_success") if value is not None]
        for some in (references, own, others)
    )
    if len(found) < len(own) or len(clean) < len(references):
        return ["missing", "missing", "missing"]
    shown = f"{statistics.mean(found):.3f} ({max(found):.3f}), reference {statistics.mean(clean):.3f}"
    beside = f"{statistics.mean(other):.3f} ({max(other):.3f})" if other else "missing"
    return [shown, _reached(statistics.mean(found), asked), beside]


def _reached(found: float | None, asked: float) -> str:
    return "missing" if found is None else "reached" if found <= asked / 100 + 1e-9 else "**not reached**"


def _numbers(specs: Sequence[Spec], rows: Mapping[str, Row], name: str) -> list[float | None]:
    found = [rows.get(spec.name(), {}).get(name) for spec in specs]
    return [float(value) if value else None for value in found]


def _below(clean: Sequence[float | None], found: Sequence[float | None]) -> float | None:
    """How far the mean is below the mean of the references; None if a run is missing."""
    if not clean or not found or None in (*clean, *found):
        return None
    return statistics.mean(map(float, clean)) - statistics.mean(map(float, found))  # type: ignore[arg-type]


def _points(below: float | None) -> str:
    return "missing" if below is None else f"{100 * below:.1f}"


def _shown(found: Sequence[float | None]) -> str:
    known = [value for value in found if value is not None]
    if not known:
        return "missing"
    return f"{statistics.mean(known):.3f} ({min(known):.3f})" + ("" if len(known) == len(found) else " incomplete")


def measure(todo: Sequence[Sequence[Spec]], pool: Pool, out: Path, minutes: float) -> None:
    """Run these batches and add them to `out`."""
    new = not out.exists()
    began = time.perf_counter()
    with pool, out.open("a", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            lines.writeheader()
        for number, batch in enumerate(todo):
            if time.perf_counter() - began > 60 * minutes:
                print(f"{sum(map(len, todo[number:]))} runs are left: the time is over", flush=True)
                return
            for i, found in pool.play(batch):
                values = found.accuracy, found.honest_rejected, found.byzantine_selected
                shown = ["" if value is None else f"{value:.6g}" for value in values]
                recall = " ".join("nan" if each is None else f"{each:.4f}" for each in found.recall or ())
                success = "" if found.attack_success is None else f"{found.attack_success:.6g}"
                columns = [batch[i].name(), *shown, found.message, recall, success, f"{found.fallback:.6g}"]
                lines.writerow(dict(zip(FIELDS, columns, strict=True)))
            file.flush()
            seconds = time.perf_counter() - began
            print(f"batch {number + 1} of {len(todo)}, {seconds:.0f} s: {label(batch[-1].attack)}", flush=True)


def make_few() -> None:
    """Write the data set of few examples."""
    data = load("fashion")
    FEW.parent.mkdir(exist_ok=True)
    x, y = data.x[:FEW_EXAMPLES].numpy(), data.y[:FEW_EXAMPLES].numpy()
    np.savez(FEW, x=x, y=y, x_test=data.x_test.numpy(), y_test=data.y_test.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=HERE / "withstand.toml")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: as many as cores, on CUDA 16")
    parser.add_argument("--part", default="1/1", help="of the runs, as 2/4")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after that")
    parser.add_argument("--only", default="", help="data sets, as fashion,usps")
    parser.add_argument("--out", type=Path, default=Path("withstand.csv"))
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files whose runs are not repeated either")
    parser.add_argument("--few", action="store_true", help="make the data set of few examples first")
    parser.add_argument("--tables", type=Path, nargs="+", help="print the tables of these files and stop")
    parser.add_argument("--measured", action="store_true", help="leave out of the tables what was not run")
    chosen = parser.parse_args()
    if chosen.tables:
        rows, shown = read(chosen.tables), measured if chosen.measured else markdown
        print("\n".join(shown(table, rows) for table in tables(chosen.spec)))
        return
    if chosen.few:
        make_few()
    done = read([chosen.out, *chosen.known])
    specs = [spec for spec in wanted(chosen.spec) if not chosen.only or spec.dataset in chosen.only.split(",")]
    pool = Pool(Compute(device=chosen.device), chosen.jobs)
    left = left_of_part(specs, chosen.part, pool.jobs, done)
    aggregators = [[spec for spec in left if (_name(spec) == "two-stage") == beside] for beside in (False, True)]
    todo = [[some[i] for i in batch] for some in aggregators for batch in batches(some, pool.jobs)]
    measure(todo, pool, chosen.out, chosen.minutes)


if __name__ == "__main__":
    main()
