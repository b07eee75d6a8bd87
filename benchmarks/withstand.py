"""What the fortified filter withstands, beside the published one: accuracy below the reference, over seeds.

    python benchmarks/withstand.py --out withstand.csv
    python benchmarks/withstand.py --device cuda --part 1/4 --out part1.csv
    python benchmarks/withstand.py --tables withstand.csv

The runs are those of withstand.toml. What is in the file named by --out already is not run again. With --part several
processes share the work, each with a file of its own; --tables takes several.
"""

import argparse
import csv
import itertools
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noisegate import Compute
from noisegate.runs import Spec, make_spec, reference
from noisegate.sweeps.pool import Pool, batches, left_of_part

HERE = Path(__file__).parent
FIELDS = ("run", "accuracy", "honest_rejected", "byzantine_selected", "message")
Row = dict[str, str]


def tables(path: Path) -> list[tuple[str, float, list[Spec]]]:
    """(title, points asked for, specs) of every table."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for table in content["table"]:
        title, asked, swept = table.pop("title"), table.pop("asked"), table.pop("sweep")
        specs = []
        for values in itertools.product(*swept.values()):
            settings = {"delta": content["delta"]} | table | dict(zip(swept, values, strict=True))
            if settings["byzantine"] == 0 and settings["attack"] != "none":
                continue
            noise = content["noise"][settings["dataset"]]
            settings |= {"sigma": noise[f"{settings['epsilon']:g}"], "sigma_base": noise["2"]}
            specs.append(make_spec(settings))
        found.append((title, asked, specs))
    return found


def wanted(path: Path) -> list[Spec]:
    """Every run once."""
    specs = [spec for _, _, some in tables(path) for spec in some]
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


def markdown(title: str, asked: float, specs: Sequence[Spec], rows: Mapping[str, Row]) -> str:
    """A table: for each attack the reference, fortified and two-stage; means over seeds, and the lowest."""
    cells: dict[tuple[str, ...], dict[str, list[Spec]]] = {}
    for spec in specs:
        where = [f"{spec.byzantine:.0%}"] if len({one.byzantine for one in specs}) > 1 else []
        where += [spec.dataset] if len({one.dataset for one in specs}) > 1 else []
        where += [f"from {spec.attack_start:.0%}"] if spec.attack_start else []
        where += [f"believed {spec.gamma:.0%} honest"] if spec.gamma else []
        cells.setdefault((*where, label(spec.attack)), {}).setdefault(_name(spec), []).append(spec)
    lines = [f"### {title}", "", f"Asked: at most {asked:g} points below the reference."]
    lines += ["", "| attack | reference | fortified | below | | refused of 1,000 honest | two-stage | below |"]
    lines.append("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for where, by_aggregator in cells.items():
        own = by_aggregator["fortified"]
        clean = _accuracies([reference(spec) for spec in own], rows)
        found, other = _accuracies(own, rows), _accuracies(by_aggregator.get("two-stage", []), rows)
        below = _below(clean, found)
        verdict = "missing" if below is None else "reached" if below <= asked / 100 + 1e-9 else "**not reached**"
        refused = [float(rows[spec.name()]["honest_rejected"]) for spec in own if spec.name() in rows]
        columns = [", ".join(where), _shown(clean), _shown(found), _points(below), verdict]
        columns += [f"{1000 * statistics.mean(refused):.2f}" if refused else "", _shown(other)]
        lines.append(f"| {' | '.join([*columns, _points(_below(clean, other))])} |")
    return "\n".join(lines) + "\n"


def _accuracies(specs: Sequence[Spec], rows: Mapping[str, Row]) -> list[float | None]:
    found = [rows.get(spec.name(), {}).get("accuracy") for spec in specs]
    return [float(accuracy) if accuracy else None for accuracy in found]


def _below(clean: Sequence[float | None], found: Sequence[float | None]) -> float | None:
    """How far the mean is below the mean of the references; None if a run is missing."""
    if not found or None in (*clean, *found):
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
                lines.writerow(dict(zip(FIELDS, [batch[i].name(), *shown, found.message], strict=True)))
            file.flush()
            seconds = time.perf_counter() - began
            print(f"batch {number + 1} of {len(todo)}, {seconds:.0f} s: {label(batch[-1].attack)}", flush=True)


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
    parser.add_argument("--tables", type=Path, nargs="+", help="print the tables of these files and stop")
    chosen = parser.parse_args()
    if chosen.tables:
        rows = read(chosen.tables)
        print("\n".join(markdown(*table, rows) for table in tables(chosen.spec)))
        return
    done = read([chosen.out, *chosen.known])
    specs = [spec for spec in wanted(chosen.spec) if not chosen.only or spec.dataset in chosen.only.split(",")]
    pool = Pool(Compute(device=chosen.device), chosen.jobs)
    left = left_of_part(specs, chosen.part, pool.jobs, done)
    aggregators = [[spec for spec in left if (_name(spec) == "two-stage") == beside] for beside in (False, True)]
    todo = [[some[i] for i in batch] for some in aggregators for batch in batches(some, pool.jobs)]
    measure(todo, pool, chosen.out, chosen.minutes)


if __name__ == "__main__":
    main()
