"""The charts of a report as PNG and SVG files, for papers and slides. Needs matplotlib: the extra `figures`."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from noisegate.errors import SpecError, StoreError
from noisegate.report import put
from noisegate.report.charts import GROUP_NAMES
from noisegate.report.facets import MOST_CHARTS, AttackMap, Facet, attack_maps, axes_of, facets
from noisegate.report.folders import RunRecord, kind_of, read_run
from noisegate.report.numbers import GROUPS, Timeline, privacy_spent, shares_by_reason, timeline_of
from noisegate.report.sweeps import SweepRecord, mean, read_sweep_folder
from noisegate.report.targets import recalls_of
from noisegate.views import Reason

FORMATS = ("png", "svg")
"""The formats in which every figure is written."""

LINES = ["#0072b2", "#b35a00", "#00785a", "#a3437d", "#5b5b5b", "#2a8fc4"]
"""The colors of lines, as in the light theme of the page."""

STYLES = ["-", "--", ":", "-.", (0, (6, 2)), (0, (1, 1))]
"""The dashes of lines."""

MARKERS = ["o", "s", "D", "^", "x", "P"]
"""The markers of lines."""

GROUP_LOOKS = {"honest": ("#0072b2", "-"), "byzantine": ("#c44e00", ":")}
"""The color and the dash of each group of workers."""

REASON_COLORS = {
    Reason.KEPT: "#e4e8ec",
    Reason.MALFORMED: "#1b1f24",
    Reason.NORM: "#e69f00",
    Reason.DISTRIBUTION: "#56b4e9",
    Reason.SCORE: "#9aa5b1",
    Reason.EVIDENCE: "#cc4a00",
    Reason.DEPENDENT: "#b8609a",
    Reason.MISSING: "#5f6670",
    Reason.LOST: "#ffffff",
}
"""The colors of verdicts, as in the light theme of the page."""

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.hashsalt": "noisegate",
    "svg.fonttype": "none",
    "font.size": 9,
}
"""Settings of matplotlib: a dollar sign in a name is text, equal figures are equal files, text in an SVG stays text."""


def write_figures(folder: Path, into: Path) -> list[Path]:
    """Write every figure of a run folder or a sweep folder, in both formats, and give their paths."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise SpecError("--figures: needs matplotlib; install it with: pip install 'noisegate[figures]'") from None
    if (kind := kind_of(folder)) in ("server", "redteam"):
        what = "a server" if kind == "server" else "a red team"
        raise StoreError(f"{folder}: {what} has no figures; leave --figures out, the page has its charts")
    drawings = _of_run(read_run(folder)) if kind == "run" else _of_sweep(read_sweep_folder(folder))
    written = []
    with rc_context(SETTINGS):
        for name, draw in drawings.items():
            figure = draw()
            for form in FORMATS:
                buffer = io.BytesIO()
                metadata = {"Date": None} if form == "svg" else {"Software": None}
                figure.savefig(buffer, format=form, dpi=200, metadata=metadata)
                path = into / f"{name}.{form}"
                put(path, buffer.getvalue())
                written.append(path)
    return written


def _of_run(record: RunRecord) -> dict[str, Callable[[], Any]]:
    drawings: dict[str, Callable[[], Any]] = {}
    if record.curve:
        drawings["accuracy"] = lambda: _accuracy(record)
    if any(each is not None for each in recalls_of(record.result)):
        drawings["recall"] = lambda: _recall(record)
    if any(shares_by_reason(record.curve).values()):
        drawings["unused"] = lambda: _unused(record.curve)
    if record.verdicts is not None:
        timeline = timeline_of(record.verdicts)
        drawings["verdicts"] = lambda: _verdicts(timeline)
        if timeline.byzantine_weight is not None and timeline.all_workers["byzantine"]:
            drawings["byzantine-weight"] = lambda: _byzantine_weight(timeline)
        if record.verdicts.scores.any():
            drawings["scores"] = lambda: _scores(timeline)
    spent = privacy_spent(record)
    if spent.rounds:
        drawings["privacy"] = lambda: _privacy(spent.rounds, spent.epsilons)
    return drawings


def _of_sweep(record: SweepRecord) -> dict[str, Callable[[], Any]]:
    drawings: dict[str, Callable[[], Any]] = {}
    for place, axis in enumerate(axes_of(record) or [None]):
        found = [
            facet
            for facet in facets(record, axis)
            if any(group.accuracies for groups in facet.lines.values() for group in groups)
        ]
        stem = f"accuracy-{axis}" if place else "accuracy"
        for i, facet in enumerate(found[:MOST_CHARTS], 1):
            name = stem if len(found) == 1 else f"{stem}-{i}"
            drawings[name] = lambda facet=facet, axis=axis: _against(facet, axis) if axis else _ranges(facet)  # type: ignore[misc]
    for i, found_map in enumerate(attack_maps(record)[:MOST_CHARTS], 1):
        drawings[f"attacks-{i}"] = lambda found=found_map: _map(found)  # type: ignore[misc]
    return drawings


def _new(rows: int = 1, height: float = 3.0, ratios: list[int] | None = None) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # and not pyplot, which keeps every figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    return figure, list(axes)


def _accuracy(record: RunRecord) -> Any:
    figure, (axes,) = _new()
    curves = {"this run": record.curve, **{word: result["curve"] for word, result in sorted(record.beside.items())}}
    for i, (word, curve) in enumerate(curves.items()):
        look = {"color": LINES[i], "linestyle": STYLES[i], "marker": MARKERS[i], "markersize": 3, "label": word}
        axes.plot([line["round"] for line in curve], [line["accuracy"] for line in curve], **look)
    _unit(axes)
    axes.set(xlabel="round", title=record.title)
    axes.legend(loc="lower right")
    return figure


def _recall(record: RunRecord) -> Any:
    figure, (axes,) = _new()
    found, clean = recalls_of(record.result), recalls_of(record.beside.get("reference"))
    runs = {"this run": found, **({"reference": clean} if len(clean) == len(found) else {})}
    wide, at = 0.8 / len(runs), np.arange(len(found))
    for i, (name, values) in enumerate(runs.items()):
        heights = [value or 0.0 for value in values]
        look = {"color": LINES[i], "hatch": "//" * i, "edgecolor": "white"}
        axes.bar(at + wide * (i - (len(runs) - 1) / 2), heights, wide, label=name, **look)
    _unit(axes)
    axes.set(xlabel="class", ylabel="recall", title=record.title, xticks=at)
    axes.legend(loc="lower right")
    return figure


def _verdicts(timeline: Timeline) -> Any:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    groups = [group for group in GROUPS if len(timeline.workers[group])]
    rows = [len(timeline.workers[group]) for group in groups]
    figure, many = _new(len(groups), 1.2 + 0.11 * sum(rows), rows)
    colors = ListedColormap([REASON_COLORS[reason] for reason in Reason])
    edges = [*(timeline.rounds[:, 0] - 0.5), timeline.rounds[-1, 1] + 0.5]
    last = len(Reason) - 0.5
    for axes, group in zip(many, groups, strict=True):
        count = len(timeline.workers[group])
        rows_at = np.arange(count + 1) - 0.5
        axes.pcolormesh(edges, rows_at, timeline.reasons[group], cmap=colors, vmin=-0.5, vmax=last)
        ticks = range(0, count, max(1, count // 10))
        axes.set_yticks(list(ticks), [str(timeline.workers[group][tick]) for tick in ticks])
        axes.set(ylabel=f"{GROUP_NAMES[group]} worker")
        axes.invert_yaxis()
    binned = "a column shows the most frequent verdict of its rounds" if timeline.binned else "a column is a round"
    many[-1].set(xlabel=f"round ({binned})")
    met = [reason for reason in Reason if any((timeline.reasons[group] == reason).any() for group in groups)]
    patches = [Patch(facecolor=REASON_COLORS[r], edgecolor="#8a939e", label=_verdict(r)) for r in met]
    figure.legend(handles=patches, loc="outside upper center", ncols=4)
    return figure


def _verdict(reason: Reason) -> str:
    return "used" if reason is Reason.KEPT else reason.word


def _scores(timeline: Timeline) -> Any:
    figure, (axes,) = _new()
    middles = timeline.rounds.mean(axis=1)
    for group in GROUPS:
        color, style = GROUP_LOOKS[group]
        for i, row in enumerate(timeline.scores[group]):
            label = GROUP_NAMES[group] if i == 0 else None
            axes.plot(middles, row, style, color=color, linewidth=0.8, alpha=0.75, label=label)
    axes.set(xlabel="round", ylabel="score")
    axes.legend()
    return figure


def _byzantine_weight(timeline: Timeline) -> Any:
    figure, (axes,) = _new(height=2.4)
    share = timeline.all_workers["byzantine"] / sum(timeline.all_workers.values())
    color, _ = GROUP_LOOKS["byzantine"]
    axes.plot(timeline.rounds.mean(axis=1), timeline.byzantine_weight, color=color, label="weight of Byzantine uploads")
    axes.axhline(share, color=LINES[4], linestyle=STYLES[1], label="Byzantine share of the workers")
    axes.set(xlabel="round", ylabel="weight", ylim=(0, 1))
    axes.legend()
    return figure


def _unused(curve: list[dict[str, Any]]) -> Any:
    shares = {group: reasons for group, reasons in shares_by_reason(curve).items() if reasons}
    figure, many = _new(len(shares), 1.2 + 1.6 * len(shares))
    ends = np.array([line["round"] for line in curve])
    starts = np.array([0, *ends[:-1]])
    labeled: set[Reason] = set()
    for axes, (group, reasons) in zip(many, shares.items(), strict=True):
        below = np.zeros(len(ends))
        for reason, found in reasons.items():
            label = None if reason in labeled else reason.word
            axes.bar(starts, found, ends - starts, below, align="edge", color=REASON_COLORS[reason], label=label)
            below += np.array(found)
            labeled.add(reason)
        axes.set(ylabel=f"{GROUP_NAMES[group]}, share not used", ylim=(0, 1))
    many[-1].set(xlabel="round")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _privacy(rounds: list[int], epsilons: list[float]) -> Any:
    figure, (axes,) = _new()
    axes.plot(rounds, epsilons, "o-", color=LINES[0], markersize=3)
    axes.set(xlabel="round", ylabel="epsilon", ylim=(0, 1.08 * max(epsilons)), xlim=(0, None))
    return figure


def _against(facet: Facet, axis: str) -> Any:
    figure, (axes,) = _new(height=3.6)
    values = set()
    for i, (label, groups) in enumerate(facet.lines.items()):
        ended = sorted((group for group in groups if group.accuracies), key=lambda group: float(group.settings[axis]))
        if ended:
            x = [float(group.settings[axis]) for group in ended]
            values |= set(x)
            look = {"color": LINES[i % 6], "linestyle": STYLES[i % 6], "marker": MARKERS[i % 6], "markersize": 4}
            middles, spread = _spread([group.accuracies for group in ended])
            axes.errorbar(x, middles, yerr=spread, capsize=2, label=label, **look)
    for i, (name, points) in enumerate(facet.beside.items()):
        look = {"color": "#4f5863", "linestyle": STYLES[(i + 1) % 6], "marker": MARKERS[i % 6], "markersize": 4}
        axes.plot(*zip(*points, strict=True), markerfacecolor="none", linewidth=1, label=name, **look)
        values |= {at for at, _ in points}
    if min(values) > 0 and max(values) / min(values) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
        axes.minorticks_off()
    _unit(axes)
    axes.set(xlabel=axis, title=facet.title)
    figure.legend(loc="outside lower center", ncols=2, title=facet.legend or None)
    return figure


def _ranges(facet: Facet) -> Any:
    ended = [(label, group) for label, groups in facet.lines.items() for group in groups if group.accuracies]
    figure, (axes,) = _new(height=1.0 + 0.3 * len(ended))
    middles, spread = _spread([group.accuracies for _, group in ended])
    axes.errorbar(middles, range(len(ended)), xerr=spread, fmt="o", color=LINES[0], capsize=2)
    axes.set_yticks(range(len(ended)), [label for label, _ in ended])
    axes.invert_yaxis()
    axes.set(xlabel="accuracy", ylabel=facet.legend, xlim=(0, 1), title=facet.title)
    return figure


def _map(found: AttackMap) -> Any:
    wide, high = len(found.aggregators), len(found.attacks)
    figure, (axes,) = _new(height=1.2 + 0.3 * high)
    values = [[found.values.get((row, column), np.nan) for column in found.aggregators] for row in found.attacks]
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")  # pale enough for dark numbers
    for row, column in np.ndindex(high, wide):
        told = f"{values[row][column]:.3f}" if np.isfinite(values[row][column]) else "–"
        axes.text(column, row, told, ha="center", va="center")
    axes.set_xticks(range(wide), found.aggregators)
    axes.set_yticks(range(high), found.attacks)
    axes.set(xlabel="aggregator", ylabel="attack", title=found.title)
    return figure


def _spread(accuracies: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """The means, and the distances from them down to the lowest and up to the highest accuracy."""
    middles = [mean(values) for values in accuracies]
    pairs = list(zip(accuracies, middles, strict=True))
    below = [max(0.0, middle - min(values)) for values, middle in pairs]
    return middles, [below, [max(0.0, max(values) - middle) for values, middle in pairs]]


def _unit(axes: Any) -> None:
    axes.set(ylabel="accuracy", ylim=(0, 1))
    axes.grid(color="#e6e9ed")
