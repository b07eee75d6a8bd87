"""Every aggregator under the same privacy and attacks: accuracy over seeds, one table for each Byzantine share.

    python benchmarks/rivals.py --jobs 2 --out rivals.jsonl
    python benchmarks/rivals.py --table rivals.jsonl

The runs are the grid of rivals.toml, or of the file named by --spec. Those that are in --out already are not repeated.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

Settings = dict[str, object]
HERE = Path(__file__).parent
KEEP = ("accuracy", "believed_byzantine", "byzantine_selected", "epsilon", "sigma", "rounds", "byzantine_workers")


def grid(path: Path) -> list[Settings]:
    """The settings of every run: all combinations of the lists under [sweep], on top of what is above it."""
    fixed = tomllib.loads(path.read_text())
    swept = fixed.pop("sweep")
    return [fixed | dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def label(part: object) -> str:
    """A part's name, and what is set."""
    if isinstance(part, str):
        return part
    settings = dict(part)  # type: ignore[call-overload]
    name = settings.pop("name")
    return f"{name} ({', '.join(map(str, settings.values()))})"


def measure(settings: Settings) -> dict[str, object]:
    """One run."""
    import noisegate

    result = noisegate.run(noisegate.Spec(**settings), compute=noisegate.Compute(threads=1))
    return {"settings": settings, **{key: getattr(result, key) for key in KEEP}}


def tables(rows: Iterable[dict]) -> str:
    """Markdown: for each share a table of aggregators by attacks, mean accuracy and in parentheses the lowest."""
    found: dict[tuple[float, str, str], list[dict]] = {}
    for row in rows:
        chosen = row["settings"]
        found.setdefault((chosen["byzantine"], label(chosen["aggregator"]), chosen["attack"]), []).append(row)
    shares, rules, attacks = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))
    lines = []
    for share in sorted(shares):
        lines += [f"**{share:.0%} Byzantine**", "", f"| aggregator | f | {' | '.join(attacks)} |"]
        lines.append("| --- |" + " --- |" * (len(attacks) + 1))
        for rule in rules:
            cells = [found.get((share, rule, attack), []) for attack in attacks]
            reckoned = next((row["believed_byzantine"] for cell in cells for row in cell), None)
            lines.append(f"| {rule} | {'' if reckoned is None else reckoned} | {' | '.join(map(summary, cells))} |")
        lines.append("")
    return "\n".join(lines)


def summary(rows: list[dict]) -> str:
    """The mean accuracy, and the lowest."""
    if not rows:
        return "missing"
    values = [row["accuracy"] for row in rows]
    return f"{statistics.mean(values):.2f} ({min(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=HERE / "rivals.toml")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("rivals.jsonl"))
    parser.add_argument("--table", type=Path, help="print the tables of this file and stop")
    chosen = parser.parse_args()
    if chosen.table:
        print(tables([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return
    rows = [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out.exists() else []
    done = [row["settings"] for row in rows]
    jobs = [settings for settings in grid(chosen.spec) if settings not in done]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool, chosen.out.open("a") as file:
        for i, row in enumerate(pool.imap_unordered(measure, jobs), 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            left = (time.perf_counter() - began) / i * (len(jobs) - i)
            print(
                f"{i} of {len(jobs)}, {left / 60:.0f} minutes left: {row['accuracy']:.3f} {row['settings']}", flush=True
            )
    order = grid(chosen.spec)
    print(
        tables(sorted((row for row in rows if row["settings"] in order), key=lambda row: order.index(row["settings"])))
    )


if __name__ == "__main__":
    main()
