"""`fortified` beside the paper: accuracy under its attacks, from withstand.csv, and in its authors' logs.

python benchmarks/beside_paper.py        # prints the table in docs/results.md, and runs nothing
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from noisegate import paper
from noisegate.paper import label
from noisegate.runs import Spec, reference
from withstand import read, tables

HERE = Path(__file__).parent
SETTINGS = ("dataset", "epsilon", "non_iid", "attack", "byzantine")
"""What tells the paper's cells apart."""


class Beside(NamedTuple):
    """A cell: accuracies as shares of 1. logged: the mean of the authors' logs. The others have one for each seed."""

    where: Mapping[str, Any]
    logged: float
    fortified: list[float]
    two_stage: list[float]
    clean: list[float]

    @property
    def difference(self) -> float:
        """How far `fortified` is ahead of the logs."""
        return fmean(self.fortified) - self.logged


def cells() -> list[Beside]:
    """Every cell of the paper's attacks that was run with `fortified`."""
    accuracy = {name: float(row["accuracy"]) for name, row in read([HERE / "withstand.csv"]).items() if row["accuracy"]}
    every = {spec.name(): spec for table in tables(HERE / "withstand.toml") for spec in table.specs}
    runs: dict[tuple[Any, ...], dict[str, list[Spec]]] = {}
    for spec in every.values():
        if not spec.attack_start and spec.gamma is None:
            key = tuple(label(getattr(spec, name)) for name in SETTINGS)
            runs.setdefault(key, {}).setdefault(str(spec.canonical()["aggregator"]["name"]), []).append(spec)
    found = []
    for cell in (*paper.load("attacks").cells, *paper.load("majority").cells):
        here = runs.get(tuple(label(cell.varies[name]) for name in SETTINGS))
        if here and cell.expected is not None:
            own, others = here["fortified"], here["two-stage"]
            numbers = ([accuracy[spec.name()] for spec in some] for some in (own, others, map(reference, own)))
            found.append(Beside(cell.varies, cell.expected, *numbers))
    return found


def markdown(found: list[Beside]) -> str:
    """The table, and a line that counts."""
    names = ["data set", "epsilon", "partition", "attack", "Byzantine", "authors' logs", "`fortified`", "ahead by"]
    lines = [f"| {' | '.join([*names, '`two-stage`', 'reference'])} |"]
    lines.append("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for one in found:
        where = [one.where["dataset"], label(one.where["epsilon"]), "non-iid" if one.where["non_iid"] else "iid"]
        where += [label(one.where["attack"]), f"{one.where['byzantine']:.0%}"]
        spread = f"{fmean(one.fortified):.3f} ({min(one.fortified):.3f} to {max(one.fortified):.3f})"
        numbers = [f"{one.logged:.3f}", spread, f"{100 * one.difference:+.1f}"]
        numbers += [f"{fmean(some):.3f}" for some in (one.two_stage, one.clean)]
        lines.append(f"| {' | '.join([*where, *numbers])} |")
    ahead = sum(one.difference > 0 for one in found)
    most, least = (100 * pick(one.difference for one in found) for pick in (max, min))
    counted = f"Ahead in {ahead} of {len(found)} cells, by {most:.1f} points at most; at worst {least:+.1f}."
    return "\n".join([*lines, "", counted])


if __name__ == "__main__":
    print(markdown(cells()))
