"""`noisegate sweep`: every combination of some settings, kept in one folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.table import Table

from noisegate.cli.progress import play, runs, there
from noisegate.cli.table import show_costs
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.redteam.plot import part
from noisegate.runs import Spec, costs
from noisegate.sweeps.bills import bills_of
from noisegate.sweeps.sweep import Engine, SweepCell, SweepFolder, SweepGrid, make_pool, read_grid

MOST_MESSAGE = 300


def sweep_command(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="Settings, and lists under [sweep].")],
    engine: Annotated[
        str, typer.Option(help="local, or ray: the cluster of RAY_ADDRESS, else one on this machine.")
    ] = "local",
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores; 16 on CUDA]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; what is done there stays. [runs/sweep-SPEC]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of each run. [1]")] = None,
    memory: Annotated[
        int | None, typer.Option(help="MiB of each run beside the uploads of two rounds. [1024; 8192 on CUDA]")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that a run may take; then it has failed. [no limit]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")] = False,
) -> None:
    """Run every combination of the values under [sweep]. The same command goes on where it was interrupted."""
    grid = read_grid(spec_file)
    specs = grid.specs()
    compute = Compute(device=device, threads=threads, memory=memory)
    folder = SweepFolder(out or Path("runs") / f"sweep-{spec_file.stem}")
    kind: Engine = engine  # type: ignore[assignment]  # which `make_pool` checks
    make_pool(kind, folder, compute, jobs, time_limit)  # so that a mistake is told before anything is written
    folder.check(specs)
    if dry_run:
        cells = folder.cells(specs)
    else:
        folder.keep(spec_file.read_bytes(), specs)
        cells = play(
            "sweep", specs, folder, engine=kind, compute=compute, jobs=jobs, quiet=as_json, time_limit=time_limit
        )
    cost = bills_of(cells) if not dry_run else []
    if as_json:
        print(json.dumps(_as_json(grid, cells, folder) | costs.as_json(cost), indent=2))
    else:
        _show(grid, cells, folder, None if dry_run else cost)
    if not dry_run and (_count(cells, "failed") or not _count(cells, "done")):
        raise typer.Exit(1)


def _settings(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    canonical = spec.canonical()
    return {key: canonical.get(key) for key in keys}


def _rows(grid: SweepGrid, cells: Sequence[SweepCell]) -> list[tuple[dict[str, Any], list[SweepCell]]]:
    """What varied beside the seed, and the runs that have it in common."""
    keys = [key for key in grid.varied() if key != "seed"]
    rows: dict[str, tuple[dict[str, Any], list[SweepCell]]] = {}
    for cell in cells:
        settings = _settings(cell.spec, keys)
        rows.setdefault(json.dumps(settings), (settings, []))[1].append(cell)
    return list(rows.values())


def _spread(cells: Sequence[SweepCell]) -> dict[str, float]:
    known = [cell.result["accuracy"] for cell in cells if cell.result]
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def _as_json(grid: SweepGrid, cells: Sequence[SweepCell], folder: SweepFolder) -> dict[str, Any]:
    return {
        "out": str(folder.path),
        "runs": len(cells),
        **{status: _count(cells, status) for status in ("done", "failed", "skipped", "running", "missing")},
        "cells": [
            {
                "name": cell.spec.name(),
                "settings": _settings(cell.spec, list(grid.axes)),
                "status": cell.status,
                "accuracy": cell.result["accuracy"] if cell.result else None,
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
    """A line for each combination, and what did not come off. cost: of all of it; None if nothing was run."""
    console, rows = Console(highlight=False), _rows(grid, cells)
    seeds = "seed" in grid.varied()
    table = Table(box=None, pad_edge=False)
    for key in rows[0][0]:
        table.add_column(key, overflow="fold")
    for name in ["mean", "min", "max", "seeds"] if seeds else ["accuracy"]:
        table.add_column(name, justify="right")
    for settings, some in rows:
        spread, done = _spread(some), _count(some, "done")
        numbers = [f"{spread[name]:.3f}" if spread else "" for name in ("mean", "min", "max")]
        if seeds:
            numbers.append(f"{done}" if done == len(some) else f"{done} of {len(some)}")
        else:
            numbers = [numbers[0] if spread else some[0].status]
        table.add_row(*map(part, settings.values()), *numbers)
    console.print(table)
    for cell in cells:
        if cell.status in ("failed", "skipped"):
            chosen = ", ".join(f"{key} {part(value)}" for key, value in _settings(cell.spec, grid.varied()).items())
            told = f"{cell.status}: {chosen or cell.spec.name()}: {' '.join(cell.message.split())}"
            console.print(told[:MOST_MESSAGE], soft_wrap=True, markup=False)
    if cost is None:
        console.print(f"{there(cells)}; nothing was run", soft_wrap=True)
        return
    if failed := _count(cells, "failed"):
        console.print(f"{runs(failed)} failed; the same command tries again", soft_wrap=True)
    show_costs(cost, console)
    console.print(f"kept in {folder.path}", style="dim", soft_wrap=True)


def _count(cells: Sequence[SweepCell], status: str) -> int:
    return sum(cell.status == status for cell in cells)
