"""Every aggregator under the same privacy and attacks: accuracy over seeds, one table for each Byzantine share.

    python benchmarks/rivals.py --jobs 2 --out rivals.csv
    python benchmarks/rivals.py --table rivals.csv

The runs are the grid of rivals.toml, or of the file named by --spec. Those that are in --out already are not repeated.
"""

import argparse
import csv
import itertools
import multiprocessing
import statistics
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisegate.runs.usual import partner_of

HERE = Path(__file__).parent
KEY = ("byzantine", "aggregator", "attack", "seed")
FOUND = ("accuracy", "believed_byzantine", "byzantine_selected", "epsilon")
Row = dict[str, str]


def grid(path: Path) -> list[dict[str, Any]]:
    """The settings of every run: all combinations of the lists under [sweep], on top of what is above it.

    What is under [usual] is for the aggregators that do not bring it along.
    """
    fixed = tomllib.loads(path.read_text())
    swept, usual = fixed.pop("sweep"), fixed.pop("usual", {})
    runs = [fixed | dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    brought = [partner_of(run["aggregator"]) for run in runs]
    return [
        {name: value for name, value in usual.items() if name not in own} | run
        for run, own in zip(runs, brought, strict=True)
    ]


def label(value: Any) -> str:
    """A part's name and what is set; anything else as it is."""
    if not isinstance(value, Mapping):
        return str(value)
    chosen = ", ".join(label(entry) for key, entry in value.items() if key != "name")
    return f"{value['name']} ({chosen})"


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a run from the others."""
    return tuple(label(row[name]) for name in KEY)


def measure(settings: dict[str, Any]) -> Row:
    """One run."""
    import noisegate

    result = noisegate.run(noisegate.Spec(**settings), compute=noisegate.Compute(threads=1))
    found = {name: getattr(result, name) for name in FOUND}
    shown = {name: "" if value is None else f"{value:.4g}" for name, value in found.items()}
    return dict(zip(KEY, key_of(settings), strict=True)) | shown


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tables(rows: list[Row]) -> str:
    """Markdown: for each share a table of aggregators by attacks, mean accuracy and in parentheses the lowest."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(key_of(row)[:3], []).append(row)
    shares, aggregators, attacks = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))
    lines = []
    for share in sorted(shares):
        lines += [f"**{float(share):.0%} Byzantine**", "", f"| aggregator | f | {' | '.join(attacks)} |"]
        lines.append("| --- |" + " --- |" * (len(attacks) + 1))
        for aggregator in aggregators:
            cells = [found.get((share, aggregator, attack), []) for attack in attacks]
            reckoned = next((row["believed_byzantine"] for cell in cells for row in cell), "")
            lines.append(f"| {aggregator} | {reckoned} | {' | '.join(map(summary, cells))} |")
        lines.append("")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """The mean accuracy, and the lowest."""
    values = [float(row["accuracy"]) for row in rows]
    return f"{statistics.mean(values):.2f} ({min(values):.2f})" if values else "missing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=HERE / "rivals.toml")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("rivals.csv"))
    parser.add_argument("--table", type=Path, help="print the tables of this file and stop")
    chosen = parser.parse_args()
    if chosen.table:
        print(tables(read(chosen.table)))
        return
    wanted = {key_of(settings): settings for settings in grid(chosen.spec)}
    done = {key_of(row): row for row in read(chosen.out)} if chosen.out.exists() else {}
    jobs = [settings for key, settings in wanted.items() if key not in done]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool, chosen.out.open("a", newline="") as file:
        lines = csv.DictWriter(file, KEY + FOUND, lineterminator="\n")
        if not done:
            lines.writeheader()
        for i, row in enumerate(pool.imap_unordered(measure, jobs), 1):
            lines.writerow(row)
            file.flush()
            done[key_of(row)] = row
            left = (time.perf_counter() - began) / i * (len(jobs) - i)
            print(f"{i} of {len(jobs)}, {left / 60:.0f} minutes left: {row['accuracy']} {key_of(row)}", flush=True)
    print(tables([done[key] for key in wanted]))


if __name__ == "__main__":
    main()
