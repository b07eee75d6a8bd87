"""`noisegate sweep`: every combination of some settings, kept in one folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.table import Table

from noisegate.cli.progress import PoolSettings, play, runs, there
from noisegate.cli.records import SweepFlags
from noisegate.cli.sweep_csv import sweep_csv
from noisegate.cli.table import MOST_MESSAGE, show_costs, spread
from noisegate.cli.terminal import Console
from noisegate.cli.writing import write_beside
from noisegate.compute import Compute
from noisegate.redteam.plot import part
from noisegate.runs import Spec, costs, imbalance
from noisegate.runs.recall import worst_class
from noisegate.sweeps.bills import bills_of
from noisegate.sweeps.sweep import SweepCell, SweepFolder, SweepGrid, read_grid


def sweep_command(given: SweepFlags) -> None:
    """Run what is not done yet, and show what came of all."""
    grid = read_grid(given.spec_file)
    specs = grid.specs()
    folder = SweepFolder(given.out or Path("runs") / f"sweep-{given.spec_file.stem}")
    compute = Compute(device=given.device, threads=given.threads, memory=given.memory)
    settings = PoolSettings(given.engine, compute, given.jobs, given.time_limit)  # type: ignore[arg-type]  # see below
    settings.pool(folder)  # which checks the settings before anything is written
    folder.check(specs)
    if given.dry_run:
        cells = folder.cells(specs)
    else:
        folder.keep(given.spec_file.read_bytes(), specs)
        cells = play("sweep", specs, folder, settings, quiet=given.as_json)
        if given.csv:
            write_beside(given.csv, sweep_csv(cells, grid.varied(), folder))
    cost = bills_of(cells) if not given.dry_run else []
    if given.as_json:
        print(json.dumps(_as_json(grid, cells, folder) | costs.as_json(cost), indent=2))
    else:
        _show(grid, cells, folder, None if given.dry_run else cost)
    if not given.dry_run and (_count(cells, "failed") or not _count(cells, "done")):
        raise typer.Exit(1)


def _settings(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    canonical = spec.canonical()
    return {key: canonical.get(key) for key in keys}


def _rows(grid: SweepGrid, cells: Sequence[SweepCell]) -> list[tuple[dict[str, Any], list[SweepCell]]]:
    """Each combination of the settings that vary beside the seed, and its runs."""
    keys = [key for key in grid.varied() if key != "seed"]
    rows: dict[str, tuple[dict[str, Any], list[SweepCell]]] = {}
    for cell in cells:
        settings = _settings(cell.spec, keys)
        rows.setdefault(json.dumps(settings), (settings, []))[1].append(cell)
    return list(rows.values())


SHOWN = (
    "accuracy",
    "balanced_accuracy",
    "majority_share",
    "auc",
    "recall",
    "attack_success",
    "metrics",
    "worker_accuracy",
    "fallback",
)
"""What is told of the result of each run. Those of earlier versions have the accuracy alone."""


def _more(cells: Sequence[SweepCell]) -> dict[str, list[float]]:
    """What the table shows beside the accuracy, where it applies: of each run that is done and has it."""
    done = [cell.result for cell in cells if cell.result]
    worst = [found.recall for result in done if (found := worst_class(result.get("recall")))]
    success = [result["attack_success"] for result in done if result.get("attack_success") is not None]
    fallback = [result.get("fallback", 0.0) for result in done]
    return {
        **imbalance.gathered(done),
        "worst class": worst,
        "success": success,
        "fell back": fallback if any(fallback) else [],
    }


def _spread(cells: Sequence[SweepCell]) -> dict[str, float]:
    return spread(cell.result["accuracy"] for cell in cells if cell.result)


def _as_json(grid: SweepGrid, cells: Sequence[SweepCell], folder: SweepFolder) -> dict[str, Any]:
    return {
        "out": str(folder.path),
        "runs": len(cells),
        **{status: _count(cells, status) for status in ("done", "failed", "skipped", "running", "waiting")},
        "cells": [
            {
                "name": cell.spec.name(),
                "settings": _settings(cell.spec, list(grid.axes)),
                "status": cell.status,
                **{name: cell.result.get(name) if cell.result else None for name in SHOWN},
                "message": cell.message,
                "folder": str(folder.run_path(cell.spec)),
            }
            for cell in cells
        ],
        "accuracy": [
            {"settings": settings, "runs": len(some), "done": _count(some, "done"), **_spread(some)}
            for settings, some in _rows(grid, cells)
        ],
    }


def _show(grid: SweepGrid, cells: Sequence[SweepCell], folder: SweepFolder, cost: Sequence[costs.Bill] | None) -> None:
    """Print a line for each combination, and the runs that failed. cost: of all runs; None if nothing was run."""
    console, rows = Console(highlight=False), _rows(grid, cells)
    seeds = "seed" in grid.varied()
    table = Table(box=None, pad_edge=False)
    for key in rows[0][0]:
        table.add_column(key, overflow="fold")
    for name in ["mean", "min", "max", "seeds"] if seeds else ["accuracy"]:
        table.add_column(name, justify="right")
    more = [name for name, values in _more(cells).items() if values]
    for name in more:
        table.add_column(name, justify="right")
    for settings, some in rows:
        accuracies, done = _spread(some), _count(some, "done")
        numbers = [f"{accuracies[name]:.3f}" if accuracies else "" for name in ("mean", "min", "max")]
        if seeds:
            numbers.append(f"{done}" if done == len(some) else f"{done} of {len(some)}")
        else:
            numbers = [numbers[0] if accuracies else some[0].status]
        beside = _more(some)
        numbers += [f"{fmean(beside[name]):.3f}" if beside.get(name) else "" for name in more]
        table.add_row(*map(part, settings.values()), *numbers)
    console.print(table)
    for cell in cells:
        if cell.status in ("failed", "skipped"):
            chosen = ", ".join(f"{key} {part(value)}" for key, value in _settings(cell.spec, grid.varied()).items())
            told = f"{cell.status}: {chosen or cell.spec.name()}: {' '.join(cell.message.split())}"
            console.print(told[:MOST_MESSAGE], soft_wrap=True)
    if cost is None:
        console.print(f"{there(cells)}; nothing was run", soft_wrap=True)
        return
    if failed := _count(cells, "failed"):
        console.print(f"{runs(failed)} failed; the same command tries again", soft_wrap=True)
    show_costs(cost, console)
    console.print(f"kept in {folder.path}", style="dim", soft_wrap=True)


def _count(cells: Sequence[SweepCell], status: str) -> int:
    return sum(cell.status == status for cell in cells)
