"""`noisegate watch`: a running job in the terminal. It reads files and nothing else, so it can begin any time."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisegate.checks import plain
from noisegate.cli.terminal import Console
from noisegate.errors import NoisegateError, StoreError
from noisegate.report.folders import RunRecord, kind_of, number, read_run
from noisegate.report.sweeps import STATUSES, flatten, show
from noisegate.runs.checkpoints import read_standing
from noisegate.runs.store import CHECKPOINT
from noisegate.runs.unbuilt import AnySpec
from noisegate.sweeps.sweep import SweepCell, SweepFolder

SILENCE = 60.0
"""Seconds without a word after which a job may have been interrupted."""

WIDTH, BAR = 32, 30
MOST_MESSAGES = 5
MOST_ROWS = 24
"""Runs of a sweep that are shown one by one: those at work first."""

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
COLORS = {"done": "green", "running": "cyan", "failed": "red", "skipped": "yellow", "missing": "dim"}


@dataclass(frozen=True)
class Standing:
    """Where a run stands, as far as its files tell. total: 0 if not known. age: seconds since something was written."""

    record: RunRecord
    played: int
    total: int
    seconds: float
    age: float

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.record.status != "unfinished"


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder or a sweep folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print how it stands and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a run or a sweep from its folder until it is done. Ctrl-C leaves, and the job goes on."""
    console = Console()
    view = _Sweep(folder) if kind_of(folder) == "sweep" else _Run(folder)
    try:
        if once:
            console.print(view.look(console))
        elif console.is_terminal:
            with Live(view.look(console), console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
                while not view.over:
                    time.sleep(every)
                    live.update(view.look(console), refresh=True)
        else:
            _lines(view, console, every)
    except KeyboardInterrupt:
        pass  # the usual way out


def _lines(view: "_Run | _Sweep", console: Console, every: float) -> None:
    """A line whenever something changed, where there is no screen to draw on."""
    said = ""
    while True:
        view.look(console)
        if view.line != said:
            said = view.line
            console.print(Text(said), soft_wrap=True)
        if view.over:
            return
        time.sleep(every)


class _Run:
    """A run, and the ones that `noisegate run` puts beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.line = folder, False, ""

    def look(self, console: Console) -> RenderableType:
        main = stand(self.folder)
        beside = [
            self.folder / name for name in ("reference", "undefended") if (self.folder / name / "spec.toml").exists()
        ]
        shown = [(plain(main.record.title), main)] + [(path.name, stand(path)) for path in beside]
        self.over = all(standing.over for _, standing in shown)
        now = next((pair for pair in reversed(shown) if not pair[1].over), shown[0])
        self.line = f"{now[0]}: {words(now[1])}"
        pieces: list[RenderableType] = []
        for title, standing in shown:
            pieces += _drawn(title, standing, console)
        return Group(*pieces)


def _drawn(title: str, standing: Standing, console: Console) -> list[RenderableType]:
    bar = Table.grid(padding=(0, 1))
    accuracies = [line["accuracy"] for line in standing.record.curve]
    total = standing.total or None
    bar.add_row(
        ProgressBar(total=total, completed=standing.played if total else 0, width=BAR, animation_time=0.0),
        Text(words(standing)),
    )
    pieces: list[RenderableType] = [Text(title, style="bold"), bar]
    if accuracies:
        line = spark(accuracies, plain=not _has_blocks(console))
        pieces.append(Text.assemble(("accuracy 0 to 1  ", "dim"), line, f"  {accuracies[-1]:.3f}"))
    pieces += [Text(plain(problem), style="yellow") for problem in standing.record.problems]
    if standing.record.message:
        pieces.append(Text(plain(standing.record.message), style="red"))
    return pieces


class _Sweep:
    """A sweep, its runs at work first."""

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
        self.done_then = self.done_last = -1

    def look(self, console: Console) -> RenderableType:
        cells = [self._cell(spec) for spec in self.specs]
        counts = {status: sum(cell.status == status for cell in cells) for status in STATUSES}
        self.over = all(cell.ended for cell in cells)
        ended = sum(cell.ended for cell in cells)
        self.done_then = ended if self.done_then < 0 else self.done_then
        if ended != self.done_last:
            self.done_last, self.last_end = ended, time.monotonic()
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        self.line = f"{ended} of {len(cells)} runs ended: {told}{self._left(cells, ended)}"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=len(cells), completed=ended, width=BAR), Text(self.line))
        table = Table(box=None, pad_edge=False)
        for column in (*self.keys, "status", "accuracy", "", ""):
            table.add_column(Text(plain(column)), no_wrap=True)
        order = ["running", "failed", "skipped", "done", "missing"]
        shown = sorted(cells, key=lambda cell: order.index(cell.status))[:MOST_ROWS]
        for cell in shown:
            table.add_row(*self._row(cell, console))
        pieces: list[RenderableType] = [Text(plain(self.folder.path.resolve().name), style="bold"), bar, table]
        if len(cells) > len(shown):
            pieces.append(Text(f"and {len(cells) - len(shown)} more runs", style="dim"))
        why = Counter((cell.status, cell.message) for cell in cells if cell.status in ("failed", "skipped"))
        for (status, message), count in why.most_common(MOST_MESSAGES):
            pieces.append(Text(f"{count} {status}: {plain(message)}", style=COLORS[status]))
        if len(why) > MOST_MESSAGES:
            pieces.append(Text(f"and {len(why) - MOST_MESSAGES} more messages", style="dim"))
        if not self.over and not counts["running"]:
            stopped = sum(self._stopped(cell) for cell in cells)
            where = f", {stopped} of the missing runs where they stopped" if stopped else ""
            told = f"Nobody is at work on it now; the same `noisegate sweep` goes on{where}."
            pieces.append(Text(told, style="yellow"))
        return Group(*pieces)

    def _stopped(self, cell: SweepCell) -> bool:
        """Whether it was interrupted."""
        return cell.status == "missing" and (self.folder.run_path(cell.spec) / CHECKPOINT).exists()

    def _cell(self, spec: AnySpec) -> SweepCell:
        """How a run stands; what is done stays done."""
        name = spec.name()
        if name not in self.ended:
            cell = self.folder.cell(spec)
            if cell.status != "done":
                return cell
            self.ended[name] = cell
        return self.ended[name]

    def _left(self, cells: Sequence[SweepCell], ended: int) -> str:
        """The time left, from what ended since the watch began; nothing if it is over and runs are not."""
        since = ended - self.done_then
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


def stand(path: Path) -> Standing:
    """Where a run stands."""
    record = read_run(path, beside=False)
    last = int(record.curve[-1]["round"]) if record.curve else 0
    if record.result:
        return Standing(
            record, int(record.result["rounds"]), int(record.result["rounds"]), _seconds(record.result), 0.0
        )
    total = (record.spec.rounds if record.spec else None) or 0
    saved = read_standing(path / CHECKPOINT)
    written = [found.stat().st_mtime for found in path.glob("*") if found.is_file()]
    age = max(0.0, time.time() - max(written, default=time.time()))
    if saved is None:
        return Standing(record, last, total, 0.0, age)
    return Standing(record, saved.rounds, saved.of, saved.seconds, age)


def _seconds(result: dict[str, Any]) -> float:
    return float(result["seconds"]) if number(result.get("seconds")) else 0.0


def words(standing: Standing) -> str:
    """Where a run stands in a line."""
    record = standing.record
    said = [f"round {standing.played}" + (f" of {standing.total}" if standing.total else "")]
    if record.curve:
        said.append(f"accuracy {record.curve[-1]['accuracy']:.3f}")
    if standing.played and standing.seconds:
        pace = standing.seconds / standing.played
        said.append(f"{1e3 * pace:.1f} ms a round")
        if not standing.over and standing.total > standing.played:
            left = max(0.0, pace * (standing.total - standing.played) - standing.age)
            said.append(f"about {span(left)} left")
    if standing.over:
        said.append(record.status)
    elif standing.age > max(SILENCE, 0.2 * standing.seconds):
        said.append(f"nothing written for {span(standing.age)}: interrupted?")
    return ", ".join(said)


def spark(values: Sequence[float], width: int = WIDTH, plain: bool = False) -> str:
    """Accuracies as a row of bars whose full height is 1; of many, evenly spaced ones and the last."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    bars = PLAIN if plain else BLOCKS
    return "".join(bars[min(len(bars) - 1, int(max(0.0, value) * len(bars)))] for value in values)


def span(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _has_blocks(console: Console) -> bool:
    try:
        BLOCKS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return not console.legacy_windows
