"""The paper's experiments and their comparison, for people and for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.paper import QUICK, Experiment
from noisegate.paper.claims import PaperClaim, named
from noisegate.paper.comparison import columns, rows
from noisegate.paper.outcomes import CellOutcome, needed, passed
from noisegate.runs import estimate
from noisegate.runs.spec import Spec

PARTITION = "partition"
"""The paper's figure of its non-iid partition, for which nothing is run."""


def show_experiments(chosen: Sequence[Experiment], quick: Experiment, compute: Compute) -> None:
    """Print what can be run. quick: is shown also if it is not chosen, unless the filters leave nothing of it."""
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


def show_comparison(
    chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]], verdicts: Sequence[PaperClaim], fine: bool
) -> None:
    """Print a table for each experiment, each claim with its verdict, and whether everything is within tolerance."""
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


def comparison_as_json(
    chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]], verdicts: Sequence[PaperClaim], fine: bool
) -> dict[str, Any]:
    """The same as one JSON object."""
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
