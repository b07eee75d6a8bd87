"""Sweeps: many runs in one folder, resumable, several at a time, by one process or by many."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from noisegate import checks
from noisegate.compute import Compute
from noisegate.errors import StoreError
from noisegate.runs.spec import Spec
from noisegate.sweeps.folder import SweepCell, SweepFolder
from noisegate.sweeps.grid import SweepGrid, read_grid, read_sweep
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.play import play_one, play_several
from noisegate.sweeps.pool import Pool
from noisegate.sweeps.ray_pool import RayPool

__all__ = ["Engine", "SweepCell", "SweepFolder", "SweepGrid", "make_pool", "read_grid", "read_sweep", "sweep"]

Engine = Literal["local", "ray"]
ENGINES = ("local", "ray")
"""The names of the two kinds of pool."""

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
    watch: Callable[[SweepCell], None] | None = None,
) -> list[SweepCell]:
    """Run the specs that have no result yet, and give the cells of all, in the order of `specs`.

    A run that raises stops no other, and is tried again next time. A run that another process works on is left to
    that process, and its result is taken over. watch: called with the cell of each run that ends during this call.
    engine, compute, jobs, time_limit: as for `make_pool`.
    """
    folder = folder if isinstance(folder, SweepFolder) else SweepFolder(Path(folder))
    distinct = {spec.name(): spec for spec in specs}
    folder.check(list(distinct.values()))
    pool = make_pool(engine, folder, compute or Compute(), jobs, time_limit)
    ended = {name: cell for name, spec in distinct.items() if (cell := folder.cell(spec)).status == "done"}
    mine, others = [spec for name, spec in distinct.items() if name not in ended], list[Spec]()

    def end(cell: SweepCell) -> None:
        ended[cell.spec.name()] = cell
        if watch:
            watch(cell)

    if mine:
        with pool:
            while mine or others:
                for i, outcome in pool.play(mine):
                    cell = _cell_after(folder, mine[i], outcome)
                    if cell.ended:
                        end(cell)
                    else:
                        others.append(cell.spec)
                if others:
                    time.sleep(POLL)
                cells = folder.cells(others)
                mine = [
                    cell.spec for cell in cells if cell.status == "waiting"
                ]  # the process that worked on it has ended
                others = [cell.spec for cell in cells if cell.status == "running"]
                for cell in cells:
                    if cell.ended:
                        end(cell)
    return [ended[spec.name()] for spec in specs]


def make_pool(
    engine: Engine, folder: SweepFolder, compute: Compute, jobs: int | None, time_limit: float | None = None
) -> Pool:
    """The pool that runs the specs of a sweep. jobs, time_limit: as for `Pool`.

    engine: "local" is processes of this machine, or runs side by side on its CUDA device. "ray" is tasks on the
    cluster of RAY_ADDRESS, on every machine of which the folder must have the same path, or on one of this machine.
    """
    checks.one_of(ENGINES, engine=engine)
    absolute = SweepFolder(folder.path.absolute())
    kind = RayPool if engine == "ray" else Pool
    return kind(compute, jobs, partial(play_one, absolute), partial(play_several, absolute), time_limit)


def _cell_after(folder: SweepFolder, spec: Spec, outcome: Outcome) -> SweepCell:
    """The cell of a run that a pool gave back. If its process was killed, its failure is written here."""
    cell = folder.cell(spec)
    if cell.status != "waiting" or outcome.status != "failed":
        return cell
    try:
        with folder.lock(spec) as lock:
            if lock is None:
                return folder.cell(spec)
            folder.fail(spec, outcome)
    except StoreError:
        pass  # nothing can be written there; the cell still tells the failure
    return SweepCell(spec, "failed", None, outcome.message)
