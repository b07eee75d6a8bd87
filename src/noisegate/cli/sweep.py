"""`noisegate sweep`: every combination of some settings, kept in one folder."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from noisegate.cli.run import SILENCE
from noisegate.compute import Compute
from noisegate.lab import Spec
from noisegate.lab.plot import part
from noisegate.lab.sweep import Cell, Engine, Grid, SweepFolder, hire, read_grid, sweep

LOOK = 2.0
"""Seconds between two looks at how far the runs are."""

WHOLE_SWEEP = 24 * 3600.0
"""Seconds over which the speed is averaged: a run may take minutes, and the next one half of that."""

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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")] = False,
) -> None:
    """Run every combination of the values under [sweep]. The same command goes on where it was interrupted."""
    grid = read_grid(spec_file)
    specs = grid.specs()
    compute = Compute(device=device, threads=threads, memory=memory)
    folder = SweepFolder(out or Path("runs") / f"sweep-{spec_file.stem}")
    kind: Engine = engine  # type: ignore[assignment]  # which `hire` checks
    crew = hire(kind, folder, compute, jobs)
    folder.check(specs)
    cells = folder.cells(specs)
    if not dry_run:
        console = Console(stderr=True, quiet=as_json)
        folder.keep(spec_file.read_bytes())
        told = f"sweep: {_there(cells)}, {crew.pace}, kept in {folder.path}"
        console.print(told, soft_wrap=True, highlight=False)
        try:
            # Ray, and an attack or a rule of anyone's, may print; what belongs to standard output comes later.
            with redirect_stdout(sys.stderr), _watched(console, folder, cells) as watch:
                cells = sweep(specs, folder, engine=kind, compute=compute, jobs=jobs, watch=watch)
        except KeyboardInterrupt:
            done = sum(cell.status == "done" for cell in folder.cells(specs))
            told = f"interrupted: {done} of {_runs(len(specs))} done in {folder.path}; the same command goes on"
            Console(stderr=True).print(told, soft_wrap=True, highlight=False)
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(_as_json(grid, cells, folder), indent=2))
    else:
        _show(grid, cells, folder, dry_run)
    if not dry_run and (_count(cells, "failed") or not _count(cells, "done")):
        raise typer.Exit(1)


@contextmanager
def _watched(console: Console, folder: SweepFolder, cells: Sequence[Cell]) -> Iterator[Callable[[Cell], None]]:
    """A progress bar on a terminal, and otherwise a line now and then. It counts work, also of runs on their way."""
    bar = Progress(
        TextColumn("sweep"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
        console=console,
        transient=True,
        speed_estimate_period=WHOLE_SWEEP,
    )
    ended = {cell.spec.name() for cell in cells if cell.status == "done"}
    total, spoke, stop = sum(_work(cell.spec) for cell in cells), time.monotonic(), threading.Event()

    def done() -> float:
        """Work that is done, as far as it is known."""
        shares = [1.0 if cell.spec.name() in ended else folder.share(cell.spec) for cell in cells]
        return sum(share * _work(cell.spec) for share, cell in zip(shares, cells, strict=True))

    def count() -> str:
        return f"{len(ended)} of {_runs(len(cells))}"

    task = bar.add_task("sweep", total=total, completed=done(), count=count(), status="starting")  # type: ignore[arg-type]

    def watch(cell: Cell) -> None:
        nonlocal spoke
        ended.add(cell.spec.name())
        status = f"{cell.spec.name()} " + (f"{cell.result['accuracy']:.3f}" if cell.result else cell.status)
        bar.update(task, count=count(), status=status)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"sweep: {count()}; {status}", soft_wrap=True, highlight=False)

    def look() -> None:
        while not stop.wait(LOOK):
            bar.update(task, completed=done())

    if not console.is_terminal or console.quiet:
        yield watch
        return
    looking = threading.Thread(target=look, daemon=True)
    with bar:
        looking.start()
        try:
            yield watch
        finally:
            stop.set()
            looking.join()


def _work(spec: Spec) -> float:
    """What a run takes, compared to others of its sweep: rounds times workers."""
    return (spec.rounds or 1) * (spec.workers or 1) / (1 - spec.byzantine)


def _settings(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    canonical = spec.canonical()
    return {key: canonical.get(key) for key in keys}


def _rows(grid: Grid, cells: Sequence[Cell]) -> list[tuple[dict[str, Any], list[Cell]]]:
    """What varied beside the seed, and the runs that have it in common."""
    keys = [key for key in grid.varied() if key != "seed"]
    rows: dict[str, tuple[dict[str, Any], list[Cell]]] = {}
    for cell in cells:
        settings = _settings(cell.spec, keys)
        rows.setdefault(json.dumps(settings), (settings, []))[1].append(cell)
    return list(rows.values())


def _spread(cells: Sequence[Cell]) -> dict[str, float]:
    known = [cell.result["accuracy"] for cell in cells if cell.result]
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def _as_json(grid: Grid, cells: Sequence[Cell], folder: SweepFolder) -> dict[str, Any]:
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


def _show(grid: Grid, cells: Sequence[Cell], folder: SweepFolder, dry_run: bool) -> None:
    """A line for each combination, and what did not come off."""
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
    if dry_run:
        console.print(f"{_there(cells)}; nothing was run", soft_wrap=True)
        return
    if failed := _count(cells, "failed"):
        console.print(f"{_runs(failed)} failed; the same command tries again", soft_wrap=True)
    console.print(f"kept in {folder.path}", style="dim", soft_wrap=True)


def _there(cells: Sequence[Cell]) -> str:
    done = _count(cells, "done")
    return _runs(len(cells)) + (f", {done} of them done already" if done else "")


def _count(cells: Sequence[Cell], status: str) -> int:
    return sum(cell.status == status for cell in cells)


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"
