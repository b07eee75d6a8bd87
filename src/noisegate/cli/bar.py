"""How far a command is: a bar on a terminal, and otherwise a line now and then."""

import time
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from noisegate.cli.terminal import Console

SILENCE = 15.0
"""Seconds between two lines where there is no terminal to draw a bar on."""

WHOLE_SWEEP = 24 * 3600.0
"""Seconds over which the speed of many runs is averaged: a run may take minutes, and the next one half of that."""


class Bar:
    """A bar that is drawn while the context is open; without a terminal, `tell` prints a line every `SILENCE` seconds.

    title: what the bar and each line begin with.
    """

    def __init__(self, console: Console, title: str, drawn: Progress, **start: Any) -> None:
        self.console, self.title, self.drawn = console, title, drawn
        self.task = drawn.add_task(title, **start)
        self.spoke = time.monotonic()

    @property
    def visible(self) -> bool:
        """Whether anyone sees the bar."""
        return self.console.is_terminal and not self.console.quiet

    def __enter__(self) -> Self:
        if self.visible:
            self.drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.visible:
            self.drawn.stop()

    def update(self, **changes: Any) -> None:
        """Draw the bar anew."""
        self.drawn.update(self.task, **changes)

    def tell(self, line: str, **changes: Any) -> None:
        """Draw the bar anew, or print the line if the last one is long ago."""
        self.update(**changes)
        if not self.console.is_terminal and time.monotonic() - self.spoke > SILENCE:
            self.spoke = time.monotonic()
            self.console.print(f"{self.title}: {line}", soft_wrap=True, highlight=False)


def bar_of_rounds(console: Console, title: str) -> Bar:
    """The bar of one run, or of one audit."""
    columns = (TextColumn(f"{title:12}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
    drawn = Progress(*columns, console=console, transient=True)
    return Bar(console, title, drawn, total=None, status="reading data, calibrating noise")


def bar_of_runs(console: Console, title: str, counter: ProgressColumn, **start: Any) -> Bar:
    """The bar of many runs. counter: the column that says how many of them have ended."""
    drawn = Progress(
        TextColumn(title),
        BarColumn(bar_width=16),
        counter,
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
        console=console,
        transient=True,
        speed_estimate_period=WHOLE_SWEEP,
    )
    return Bar(console, title, drawn, status="starting", **start)
