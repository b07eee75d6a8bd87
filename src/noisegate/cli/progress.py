"""How far many runs are: a bar on a terminal, and otherwise a line now and then."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from noisegate.checks import plain
from noisegate.cli.run import SILENCE
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.runs import Spec, estimate
from noisegate.sweeps.sweep import Engine, SweepCell, SweepFolder, make_pool, sweep

LOOK = 2.0
"""Seconds between two looks at how far the runs are."""

WHOLE_SWEEP = 24 * 3600.0
"""Seconds over which the speed is averaged: a run may take minutes, and the next one half of that."""


def play(
    title: str,
    specs: Sequence[Spec],
    folder: SweepFolder,
    *,
    engine: Engine,
    compute: Compute,
    jobs: int | None,
    quiet: bool,
    time_limit: float | None = None,
) -> list[SweepCell]:
    """Run what is not done yet, and tell how far it is. Where it is interrupted, say what is kept, and exit with 130.

    title: the command, which each line begins with. quiet: say nothing but that it was interrupted.
    time_limit: seconds of a run.
    """
    console, cells = Console(stderr=True, quiet=quiet), folder.cells(specs)
    told = (
        f"{title}: {there(cells)}, {make_pool(engine, folder, compute, jobs, time_limit).pace}, kept in {folder.path}"
    )
    console.print(told, soft_wrap=True, highlight=False)
    try:
        # Ray, and an attack or an aggregator of anyone's, may print; what belongs to standard output comes later.
        with redirect_stdout(sys.stderr), watched(title, console, folder, cells) as watch:
            return sweep(specs, folder, engine=engine, compute=compute, jobs=jobs, time_limit=time_limit, watch=watch)
    except KeyboardInterrupt:
        done = sum(cell.status == "done" for cell in folder.cells(specs))
        told = f"interrupted: {done} of {runs(len(specs))} done in {folder.path}; the same command goes on"
        Console(stderr=True).print(told, soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def watched(
    title: str, console: Console, folder: SweepFolder, cells: Sequence[SweepCell]
) -> Iterator[Callable[[SweepCell], None]]:
    """What is to be called with each run that ends. The bar counts work, also of runs on their way."""
    bar = Progress(
        TextColumn(title),
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
        return f"{len(ended)} of {runs(len(cells))}"

    task = bar.add_task(title, total=total, completed=done(), count=count(), status="starting")  # type: ignore[arg-type]

    def watch(cell: SweepCell) -> None:
        nonlocal spoke
        ended.add(cell.spec.name())
        status = f"{plain(cell.spec.name())} " + (f"{cell.result['accuracy']:.3f}" if cell.result else cell.status)
        bar.update(task, count=count(), status=status)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"{title}: {count()}; {status}", soft_wrap=True, highlight=False)

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


def there(cells: Sequence[SweepCell]) -> str:
    """How many runs there are, and how many of them are done."""
    done = sum(cell.status == "done" for cell in cells)
    return runs(len(cells)) + (f", {done} of them done already" if done else "")


def runs(count: int) -> str:
    """A number of runs, in words."""
    return f"{count} run" if count == 1 else f"{count} runs"


def _work(spec: Spec) -> float:
    """About what a run takes, compared to others beside it."""
    taken = estimate.seconds([spec], cuda=False)
    return taken if taken is not None else (spec.rounds or 1) * (spec.workers or 1) / (1 - spec.byzantine)
