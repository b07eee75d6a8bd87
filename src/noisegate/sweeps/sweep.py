"""Sweeps: many runs in one folder, resumable, several at a time, by one process or by many."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from noisegate import checks
from noisegate.compute import Compute
from noisegate.errors import StoreError
from noisegate.redteam.search import Outcome
from noisegate.runs.spec import Spec
from noisegate.sweeps.cells import Cell, SweepFolder, play_one, play_several
from noisegate.sweeps.grid import Grid, read_grid, read_sweep
from noisegate.sweeps.pool import Pool
from noisegate.sweeps.ray_pool import RayPool

__all__ = ["Cell", "Engine", "Grid", "SweepFolder", "hire", "read_grid", "read_sweep", "sweep"]

Engine = Literal["local", "ray"]
ENGINES = ("local", "ray")
POLL = 0.5
"""Seconds between two looks at the runs that other processes work on."""


def sweep(
    specs: Sequence[Spec],
    folder: SweepFolder | Path | str,
    *,
    engine: Engine = "local",
    compute: Compute | None = None,
    jobs: int | None = None,
    time_limit: float | None = None,
    watch: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Run what is not done yet, and give how all runs stand, in the order of `specs`.

    A run that breaks stops no other, and is tried again next time. What another process works on is left to it, and
    its result taken over. watch: called with each run that ends from now on.
    engine, compute, jobs, time_limit: as for `hire`.
    """
    folder = folder if isinstance(folder, SweepFolder) else SweepFolder(Path(folder))
    distinct = {spec.name(): spec for spec in specs}
    folder.check(list(distinct.values()))
    pool = hire(engine, folder, compute or Compute(), jobs, time_limit)
    ended = {name: cell for name, spec in distinct.items() if (cell := folder.cell(spec)).status == "done"}
    mine, others = [spec for name, spec in distinct.items() if name not in ended], list[Spec]()

    def end(cell: Cell) -> None:
        ended[cell.spec.name()] = cell
        if watch:
            watch(cell)

    if mine:
        with pool:
            while mine or others:
                for i, outcome in pool.play(mine):
                    cell = _came_of(folder, mine[i], outcome)
                    if cell.ended:
                        end(cell)
                    else:
                        others.append(cell.spec)
                if others:
                    time.sleep(POLL)
                cells = folder.cells(others)
                mine = [cell.spec for cell in cells if cell.status == "missing"]  # given up by whoever had it
                others = [cell.spec for cell in cells if cell.status == "running"]
                for cell in cells:
                    if cell.ended:
                        end(cell)
    return [ended[spec.name()] for spec in specs]


def hire(
    engine: Engine, folder: SweepFolder, compute: Compute, jobs: int | None, time_limit: float | None = None
) -> Pool:
    """Whoever runs the specs of a sweep. time_limit: seconds that a run may take, as for `Pool`.

    local: processes of this machine, or runs side by side on its CUDA device. ray: tasks on the cluster of RAY_ADDRESS,
    where the folder must have the same path on every machine, or else on one of this machine alone.
    """
    checks.one_of(ENGINES, engine=engine)
    everywhere = SweepFolder(folder.path.absolute())
    kind = RayPool if engine == "ray" else Pool
    return kind(compute, jobs, partial(play_one, everywhere), partial(play_several, everywhere), time_limit)


def _came_of(folder: SweepFolder, spec: Spec, outcome: Outcome) -> Cell:
    """How a run stands that came back. What the folder says counts; a process that was killed could not write there."""
    cell = folder.cell(spec)
    if cell.status != "missing" or outcome.status != "failed":
        return cell
    try:
        with folder.claim(spec) as claim:
            if claim is None:
                return folder.cell(spec)
            folder.fail(spec, outcome)
    except StoreError:
        pass  # and if nothing can be written there, that is the failure
    return Cell(spec, "failed", None, outcome.message)
