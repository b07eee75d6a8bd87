"""How far many runs are: a bar on a terminal, and otherwise a line now and then."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import typer
from rich.progress import TextColumn

from noisegate.checks import plain
from noisegate.cli.bar import bar_of_runs
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.runs import Spec, estimate
from noisegate.sweeps.pool import Pool
from noisegate.sweeps.sweep import Engine, SweepCell, SweepFolder, make_pool, sweep

LOOK = 2.0
"""Seconds between two looks at how far the runs are."""


@dataclass(frozen=True)
class PoolSettings:
    """By what many runs are computed. jobs: runs at a time. time_limit: seconds that a run may take."""

    engine: Engine
    compute: Compute
    jobs: int | None
    time_limit: float | None

    def pool(self, folder: SweepFolder) -> Pool:
        """The pool that runs the specs of a folder. Settings that no pool can have are an error."""
        return make_pool(self.engine, folder, self.compute, self.jobs, self.time_limit)


def play(
    title: str, specs: Sequence[Spec], folder: SweepFolder, settings: PoolSettings, *, quiet: bool
) -> list[SweepCell]:
    """Run what is not done yet, and tell how far it is. If it is interrupted, say what is kept, and exit with 130.

    title: the command; each line begins with it. quiet: say nothing but that it was interrupted.
    """
    console, cells = Console(stderr=True, quiet=quiet), folder.cells(specs)
    told = f"{title}: {there(cells)}, {settings.pool(folder).pace}, kept in {folder.path}"
    console.print(told, soft_wrap=True, highlight=False)
    try:
        # Ray and plugins may print. Standard output is for what the command itself prints when it is done.
        with redirect_stdout(sys.stderr), watched(title, console, folder, cells) as watch:
            return sweep(specs, folder, watch=watch, **vars(settings))
    except KeyboardInterrupt:
        done = sum(cell.status == "done" for cell in folder.cells(specs))
        told = f"interrupted: {done} of {runs(len(specs))} done in {folder.path}; the same command goes on"
        Console(stderr=True).print(told, soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def watched(
    title: str, console: Console, folder: SweepFolder, cells: Sequence[SweepCell]
) -> Iterator[Callable[[SweepCell], None]]:
    """Give the function that is to be called with each run that ends. The bar counts work, also of running runs."""
    ended = {cell.spec.name() for cell in cells if cell.status == "done"}
    stop = threading.Event()

    def done() -> float:
        """Work that is done, as far as it is known."""
        shares = [1.0 if cell.spec.name() in ended else folder.share(cell.spec) for cell in cells]
        return sum(share * _work(cell.spec) for share, cell in zip(shares, cells, strict=True))

    def count() -> str:
        return f"{len(ended)} of {runs(len(cells))}"

    def watch(cell: SweepCell) -> None:
        ended.add(cell.spec.name())
        status = f"{plain(cell.spec.name())} " + (f"{cell.result['accuracy']:.3f}" if cell.result else cell.status)
        bar.tell(f"{count()}; {status}", count=count(), status=status)

    def look() -> None:
        while not stop.wait(LOOK):
            bar.update(completed=done())

    total = sum(_work(cell.spec) for cell in cells)
    column = TextColumn("{task.fields[count]}")
    with bar_of_runs(console, title, column, total=total, completed=done(), count=count()) as bar:
        if not bar.visible:
            yield watch
            return
        looking = threading.Thread(target=look, daemon=True)
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
    """About how long a run takes, in units that are the same for all runs of a sweep."""
    taken = estimate.seconds([spec], cuda=False)
    return taken if taken is not None else (spec.rounds or 1) * (spec.workers or 1) / (1 - spec.byzantine)
