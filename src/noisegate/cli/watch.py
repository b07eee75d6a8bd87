"""`noisegate watch`: a running job in the terminal. It only reads files, so it can begin and end at any time."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisegate.checks import plain
from noisegate.cli.terminal import Console
from noisegate.cli.watched_run import WatchedRun, describe, read_watched, span
from noisegate.errors import NoisegateError, StoreError
from noisegate.report.folders import kind_of, number, read_run
from noisegate.report.sweeps import STATUSES, flatten, show
from noisegate.runs.publish import BESIDE
from noisegate.runs.store import CHECKPOINT
from noisegate.runs.unbuilt import AnySpec
from noisegate.sweeps.sweep import SweepCell, SweepFolder

WIDTH, BAR = 32, 30
"""Characters of a row of accuracies, and of a progress bar."""

MOST_MESSAGES = 5
"""Different messages of failed or skipped runs that are shown."""

MOST_ROWS = 24
"""Runs of a sweep that are shown one by one: the running ones first."""

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
COLORS = {"done": "green", "running": "cyan", "failed": "red", "skipped": "yellow", "waiting": "dim"}


def watch_command(folder: Path, once: bool, every: float) -> None:
    """Watch a run or a sweep from its folder until it is done. Ctrl-C leaves, and the job goes on."""
    console = Console()
    if (kind := kind_of(folder)) == "server":
        raise StoreError(f"{folder}: is that of a server; look at it with `noisegate federation status`")
    screen = _SweepScreen(folder) if kind == "sweep" else _RunScreen(folder)
    try:
        if once:
            console.print(screen.look(console))
        elif console.is_terminal:
            with Live(screen.look(console), console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
                while not screen.over:
                    time.sleep(every)
                    live.update(screen.look(console), refresh=True)
        else:
            _lines(screen, console, every)
    except KeyboardInterrupt:
        pass  # the usual way out


def _lines(screen: "_RunScreen | _SweepScreen", console: Console, every: float) -> None:
    """Without a terminal: print a line whenever something changed."""
    said = ""
    while True:
        screen.look(console)
        if screen.line != said:
            said = screen.line
            console.print(Text(said), soft_wrap=True)
        if screen.over:
            return
        time.sleep(every)


class _RunScreen:
    """A run, and those in its folder that put it into proportion."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.line = folder, False, ""

    def look(self, console: Console) -> RenderableType:
        """Read the folder again, and draw it."""
        main = read_watched(self.folder)
        beside = [self.folder / name for name in BESIDE if (self.folder / name / "spec.toml").exists()]
        shown = [(plain(main.record.title), main)] + [(path.name, read_watched(path)) for path in beside]
        self.over = all(watched.over for _, watched in shown)
        now = next((pair for pair in reversed(shown) if not pair[1].over), shown[0])
        self.line = f"{now[0]}: {describe(now[1])}"
        pieces: list[RenderableType] = []
        for title, watched in shown:
            pieces += _drawn(title, watched, console)
        return Group(*pieces)


def _drawn(title: str, watched: WatchedRun, console: Console) -> list[RenderableType]:
    bar = Table.grid(padding=(0, 1))
    accuracies = [line["accuracy"] for line in watched.record.curve]
    total = watched.total or None
    bar.add_row(
        ProgressBar(total=total, completed=watched.played if total else 0, width=BAR, animation_time=0.0),
        Text(describe(watched)),
    )
    pieces: list[RenderableType] = [Text(title, style="bold"), bar]
    if accuracies:
        line = spark(accuracies, plain=not _has_blocks(console))
        pieces.append(Text.assemble(("accuracy 0 to 1  ", "dim"), line, f"  {accuracies[-1]:.3f}"))
    pieces += [Text(plain(problem), style="yellow") for problem in watched.record.problems]
    if watched.record.message:
        pieces.append(Text(plain(watched.record.message), style="red"))
    return pieces


class _SweepScreen:
    """A sweep, its running runs first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.line = SweepFolder(folder), False, ""
        try:
            self.specs = self.folder.specs()
        except NoisegateError as error:
            raise StoreError(f"{folder}: what is to be run cannot be read ({plain(error)})") from None
        if not self.specs:
            raise StoreError(f"{folder}: holds no run yet")
        self.ended: dict[str, SweepCell] = {}
        flat = [flatten(spec) for spec in self.specs]
        keys = dict.fromkeys(key for settings in flat for key in settings)
        self.keys = [key for key in keys if len({repr(settings.get(key)) for settings in flat}) > 1]
        self.began = self.last_end = time.monotonic()
        self.ended_first = self.ended_last = -1  # how many runs had ended at the first look, and at the last one

    def look(self, console: Console) -> RenderableType:
        """Read the folder again, and draw it."""
        cells = [self._cell(spec) for spec in self.specs]
        self.over = all(cell.ended for cell in cells)
        ended = sum(cell.ended for cell in cells)
        self.ended_first = ended if self.ended_first < 0 else self.ended_first
        if ended != self.ended_last:
            self.ended_last, self.last_end = ended, time.monotonic()
        counts = Counter[str](cell.status for cell in cells)
        told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        self.line = f"{ended} of {len(cells)} runs ended: {told}{self._left(cells, ended)}"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=len(cells), completed=ended, width=BAR), Text(self.line))
        title = Text(plain(self.folder.path.resolve().name), style="bold")
        return Group(title, bar, *self._table(cells, console), *_messages(cells), *self._advice(cells))

    def _table(self, cells: Sequence[SweepCell], console: Console) -> Iterator[RenderableType]:
        table = Table(box=None, pad_edge=False)
        for column in (*self.keys, "status", "accuracy", "", ""):
            table.add_column(Text(plain(column)), no_wrap=True)
        order = ["running", "failed", "skipped", "done", "waiting"]
        shown = sorted(cells, key=lambda cell: order.index(cell.status))[:MOST_ROWS]
        for cell in shown:
            table.add_row(*self._row(cell, console))
        yield table
        if len(cells) > len(shown):
            yield Text(f"and {len(cells) - len(shown)} more runs", style="dim")

    def _advice(self, cells: Sequence[SweepCell]) -> Iterator[RenderableType]:
        """How to go on, if runs wait and none is running."""
        if self.over or any(cell.status == "running" for cell in cells):
            return
        stopped = sum(self._stopped(cell) for cell in cells)
        where = f", {stopped} of the waiting runs where they stopped" if stopped else ""
        yield Text(f"No process works on it now; the same `noisegate sweep` goes on{where}.", style="yellow")

    def _stopped(self, cell: SweepCell) -> bool:
        """Whether it was interrupted."""
        return cell.status == "waiting" and (self.folder.run_path(cell.spec) / CHECKPOINT).exists()

    def _cell(self, spec: AnySpec) -> SweepCell:
        """The status of a run. A run that is done is read only once."""
        name = spec.name()
        if name not in self.ended:
            cell = self.folder.cell(spec)
            if cell.status != "done":
                return cell
            self.ended[name] = cell
        return self.ended[name]

    def _left(self, cells: Sequence[SweepCell], ended: int) -> str:
        """The time left, judged by the runs that ended since the watch began; empty if that cannot be told."""
        since = ended - self.ended_first
        if since <= 0 or self.over:
            return ""
        whole = (self.last_end - self.began) / since * (len(cells) - ended)
        left = whole - (time.monotonic() - self.last_end)
        return f", about {span(left)} left" if left > 0 else ""

    def _row(self, cell: SweepCell, console: Console) -> list[Text]:
        flat = flatten(cell.spec)
        accuracies: list[float] = []
        rounds = plain(cell.message) if cell.status == "running" else ""
        if cell.result:
            accuracies = [line["accuracy"] for line in cell.result.get("curve", []) if number(line.get("accuracy"))]
        elif cell.status == "running":
            with suppress(StoreError):  # it is only beginning
                record = read_run(self.folder.run_path(cell.spec), beside=False)
                accuracies = [line["accuracy"] for line in record.curve]
        return [
            *(Text(plain(show(flat.get(key)))) for key in self.keys),
            Text(cell.status, style=COLORS[cell.status]),
            Text(f"{accuracies[-1]:.3f}" if accuracies else "–" if _has_blocks(console) else "-"),
            Text(spark(accuracies, width=10, plain=not _has_blocks(console))),
            Text(rounds, style="dim"),
        ]


def _messages(cells: Sequence[SweepCell]) -> Iterator[RenderableType]:
    """Why runs failed or were skipped: the most frequent messages."""
    why = Counter((cell.status, cell.message) for cell in cells if cell.status in ("failed", "skipped"))
    for (status, message), count in why.most_common(MOST_MESSAGES):
        yield Text(f"{count} {status}: {plain(message)}", style=COLORS[status])
    if len(why) > MOST_MESSAGES:
        yield Text(f"and {len(why) - MOST_MESSAGES} more messages", style="dim")


def spark(values: Sequence[float], width: int = WIDTH, plain: bool = False) -> str:
    """Accuracies as a row of bars whose full height is 1. Of more than `width`, evenly spaced ones are shown."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    bars = PLAIN if plain else BLOCKS
    return "".join(bars[min(len(bars) - 1, int(max(0.0, value) * len(bars)))] for value in values)


def _has_blocks(console: Console) -> bool:
    try:
        BLOCKS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return not console.legacy_windows
