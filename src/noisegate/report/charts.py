"""Charts for the page, as plotly reads them. A color is the name of a style sheet's variable, so it follows the theme.

Axes are honest: accuracy and shares from 0 to 1, counts of privacy from 0. Whoever zooms does so by hand.
"""

import html
from typing import Any

import numpy as np

from noisegate.report.folders import RunRecord
from noisegate.report.numbers import Grid, Spent, refused_shares
from noisegate.report.sweeps import Facet, mean
from noisegate.views import Reason

Chart = dict[str, Any]

LINES = [f"--line-{i}" for i in range(6)]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross"]
GROUP_NAMES = {"honest": "honest", "byzantine": "Byzantine"}
GROUP_COLORS = {"honest": "--honest", "byzantine": "--byzantine"}

MEANINGS = {
    Reason.KEPT: "used",
    Reason.MALFORMED: "malformed: not a finite vector of the right form",
    Reason.NORM: "norm: a length that the privacy noise does not allow",
    Reason.DISTRIBUTION: "distribution: coordinates unlike the privacy noise",
    Reason.SCORE: "score: passed every test, others ranked higher",
    Reason.EVIDENCE: "evidence: over the rounds too far in one direction",
    Reason.DEPENDENT: "dependent: shares its noise with another upload",
    Reason.MISSING: "missing: the round was lost with its process",
}


def color_of(reason: Reason) -> str:
    """The style sheet's variable."""
    return f"--{reason.word}"


def accuracy(record: RunRecord) -> Chart:
    """Accuracy over the rounds, and the runs beside it as lines across."""
    at = [line["round"] for line in record.curve]
    total = int(record.result["rounds"]) if record.result else max(at, default=1)
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "this run",
            "x": at,
            "y": [line["accuracy"] for line in record.curve],
            "line": {"color": LINES[0], "width": 2},
            "marker": {"color": LINES[0], "size": 6},
            "hovertemplate": "round %{x}: accuracy %{y:.3f}<extra></extra>",
        }
    ]
    for i, (word, result) in enumerate(sorted(record.beside.items()), 1):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{word}, at its end",
                "x": [0, total],
                "y": [result["accuracy"]] * 2,
                "line": {"color": LINES[i], "dash": DASHES[i], "width": 2},
                "hovertemplate": f"{word} {result['accuracy']:.3f}<extra></extra>",
            }
        )
    return {"data": data, "layout": _layout("round", "accuracy", x_range=[0, total * 1.02], unit=True)}


def verdicts(grid: Grid) -> Chart:
    """A row for each worker, a column for each bin of rounds; honest workers above, Byzantine ones below."""
    groups = [group for group in GROUP_NAMES if len(grid.workers[group])]
    rows = {group: len(grid.workers[group]) for group in groups}
    step = 1 / len(Reason)
    scale = [[edge, color_of(reason)] for i, reason in enumerate(Reason) for edge in (i * step, (i + 1) * step)]
    layout = _layout("round", "")
    data = []
    gap = 0.08 if len(groups) > 1 else 0.0
    top = 1.0
    for i, group in enumerate(groups, 1):
        axis = "" if i == 1 else str(i)
        height = (1 - gap) * rows[group] / sum(rows.values())
        bottom = max(0.0, top - height)
        layout[f"yaxis{axis}"] = {
            **layout["yaxis"],
            "domain": [bottom, top],
            "title": {"text": GROUP_NAMES[group]},
            "autorange": "reversed",
            "showgrid": False,
            "ticks": "",
            "type": "category",
            "nticks": max(2, round(rows[group] / 2)),
        }
        layout["xaxis"]["anchor"] = f"y{axis}"  # below the last
        data.append(
            {
                "type": "heatmap",
                "x": _middles(grid),
                "y": [f"{worker}" for worker in grid.workers[group]],
                "z": grid.reasons[group].tolist(),
                "yaxis": f"y{axis}",
                "zmin": -0.5,
                "zmax": len(Reason) - 0.5,
                "colorscale": scale,
                "showscale": False,
                "ygap": 1,
                "text": [[Reason(code).word for code in row] for row in grid.reasons[group].tolist()],
                "customdata": [_spans(grid)] * rows[group],
                "hovertemplate": f"{GROUP_NAMES[group]} worker %{{y}}, %{{customdata}}: %{{text}}<extra></extra>",
            }
        )
        top = bottom - gap
    layout["xaxis"] |= {"range": [0.5, int(grid.rounds[-1, 1]) + 0.5], "showgrid": False}
    layout["height"] = min(900, 110 + 14 * sum(rows.values()) + 30 * len(groups))
    return {"data": data, "layout": layout}


def scores(grid: Grid) -> Chart:
    """What the aggregator ranks by: a thin line for each worker, one color and dash for each group."""
    data = []
    middles, spans = _middles(grid), _spans(grid)
    for group, dash in (("honest", "solid"), ("byzantine", "dot")):
        x: list[Any] = []
        y: list[Any] = []
        text: list[str] = []
        for worker, row in zip(grid.workers[group], grid.scores[group], strict=True):
            x += [*middles, None]
            y += [*(_short(value) for value in row), None]  # a gap, so that workers are not joined
            text += [*(f"worker {worker}, {span}" for span in spans), ""]
        if not x:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(middles) > 1 else "markers",
                "name": GROUP_NAMES[group],
                "x": x,
                "y": y,
                "text": text,
                "opacity": 0.75,
                "line": {"color": GROUP_COLORS[group], "dash": dash, "width": 1.2},
                "marker": {"color": GROUP_COLORS[group]},
                "hovertemplate": f"{GROUP_NAMES[group]} %{{text}}: score %{{y:.4g}}<extra></extra>",
            }
        )
    return {"data": data, "layout": _layout("round", "score", x_range=[0, int(grid.rounds[-1, 1]) * 1.02])}


def refused(curve: list[dict[str, Any]]) -> Chart:
    """Shares of uploads refused, by reason: bars on top of each other, each as wide as the rounds it counts."""
    ends = [int(line["round"]) for line in curve]
    starts = [0, *ends[:-1]]
    data = []
    layout = _layout("round", "", x_range=[0, ends[-1] + 0.5])
    found = refused_shares(curve)
    shown: set[Reason] = set()
    for i, (group, shares) in enumerate(found.items(), 1):
        axis = "" if i == 1 else str(i)
        half = 0.45 if len(found) > 1 else 1.0
        layout[f"yaxis{axis}"] = {
            **layout["yaxis"],
            "domain": [1 - half, 1] if i == 1 else [0, half],
            "range": [0, 1],
            "tickformat": ".0%",
            "title": {"text": GROUP_NAMES[group]},
        }
        layout["xaxis"]["anchor"] = f"y{axis}"
        for reason in shares or [Reason.SCORE]:
            data.append(
                {
                    "type": "bar",
                    "name": reason.word,
                    "legendgroup": reason.word,
                    "showlegend": reason not in shown and bool(shares),
                    "x": [(start + end) / 2 + 0.5 for start, end in zip(starts, ends, strict=True)],
                    "width": [end - start for start, end in zip(starts, ends, strict=True)],
                    "y": [_short(share) for share in shares.get(reason, [0.0] * len(ends))],
                    "yaxis": f"y{axis}",
                    "text": [f"rounds {start + 1} to {end}" for start, end in zip(starts, ends, strict=True)],
                    "textposition": "none",
                    "marker": {"color": color_of(reason), "line": {"width": 0}},
                    "hovertemplate": f"{GROUP_NAMES[group]}, %{{text}}: %{{y:.1%}} {reason.word}<extra></extra>",
                }
            )
            shown |= {reason} if shares else set()
    layout |= {"barmode": "stack", "bargap": 0, "height": 380 if len(found) > 1 else 280}
    return {"data": data, "layout": layout}


def privacy(spent: Spent) -> Chart:
    """Epsilon over the rounds, from 0."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "epsilon",
            "x": spent.rounds,
            "y": [_short(value) for value in spent.epsilons],
            "line": {"color": LINES[0], "width": 2},
            "marker": {"color": LINES[0], "size": 5},
            "hovertemplate": "after %{x} rounds: epsilon %{y:.3f}<extra></extra>",
        }
    ]
    layout = _layout("rounds so far", "epsilon", x_range=[0, spent.rounds[-1] * 1.02])
    layout["yaxis"] |= {"range": [0, max(spent.epsilons) * 1.08], "rangemode": "tozero"}
    layout["height"] = 260
    return {"data": data, "layout": layout}


def against(facet: Facet, axis: str) -> Chart:
    """Accuracy against a setting: the mean over seeds, with a bar from the least to the most."""
    data = []
    values: set[float] = set()
    for i, (label, groups) in enumerate(facet.lines.items()):
        ended = sorted((group for group in groups if group.accuracies), key=lambda group: float(group.settings[axis]))
        if not ended:
            continue
        middles = [mean(group.accuracies) for group in ended]
        values |= {float(group.settings[axis]) for group in ended}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": html.escape(label, quote=False),
                "x": [group.settings[axis] for group in ended],
                "y": [_short(value) for value in middles],
                "error_y": _bars([group.accuracies for group in ended], middles, LINES[i % len(LINES)]),
                "text": [f"{len(group.accuracies)} of {len(group.cells)} runs" for group in ended],
                "hovertemplate": f"{axis} %{{x:g}}: %{{y:.3f}} (%{{text}})<extra></extra>",
                **_style(i),
            }
        )
    layout = _layout(axis, "accuracy", unit=True)
    if values and min(values) > 0 and max(values) / min(values) >= 8:
        ticks = sorted(values)
        layout["xaxis"] |= {"type": "log", "title": {"text": f"{axis} (logarithmic)"}, "tickvals": ticks}
        layout["xaxis"]["ticktext"] = [f"{tick:g}" for tick in ticks]
    elif values and min(values) >= 0 and max(values) <= 1:
        layout["xaxis"]["range"] = [0, 1]
    return {"data": data, "layout": layout}


def ranges(facet: Facet) -> Chart:
    """Accuracy of each group: a dot for the mean over seeds, a bar from the least to the most."""
    ended = [(label, group) for label, groups in facet.lines.items() for group in groups if group.accuracies]
    middles = [mean(group.accuracies) for _, group in ended]
    bars = _bars([group.accuracies for _, group in ended], middles, LINES[0])
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [_short(value) for value in middles],
            "y": [html.escape(label, quote=False) for label, _ in ended],
            "error_x": bars,
            "marker": {"color": LINES[0], "size": 9},
            "text": [f"{len(group.accuracies)} of {len(group.cells)} runs" for _, group in ended],
            "hovertemplate": "%{y}: %{x:.3f} (%{text})<extra></extra>",
        }
    ]
    layout = _layout("accuracy", "")
    layout["xaxis"]["range"] = [0, 1]
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    layout["height"] = 110 + 28 * len(ended)
    return {"data": data, "layout": layout}


def courses(facet: Facet) -> Chart:
    """Accuracy over the rounds: a line for each group, the mean over its seeds."""
    data = []
    for i, (label, groups) in enumerate(facet.lines.items()):
        for group in groups:
            if group.curve:
                data.append(
                    {
                        "type": "scatter",
                        "mode": "lines",
                        "name": html.escape(label, quote=False),
                        "x": [at for at, _ in group.curve],
                        "y": [_short(value) for _, value in group.curve],
                        "hovertemplate": "round %{x}: %{y:.3f}<extra></extra>",
                        **_style(i),
                    }
                )
    last = max((trace["x"][-1] for trace in data), default=1)
    return {"data": data, "layout": _layout("round", "accuracy", x_range=[0, last * 1.02], unit=True)}


def _style(i: int) -> dict[str, Any]:
    color = LINES[i % len(LINES)]
    return {
        "line": {"color": color, "dash": DASHES[i % len(DASHES)], "width": 2},
        "marker": {"color": color, "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8},
    }


def _bars(accuracies: list[list[float]], middles: list[float], color: str) -> dict[str, Any]:
    pairs = list(zip(accuracies, middles, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [_short(max(values) - middle) for values, middle in pairs],
        "arrayminus": [_short(middle - min(values)) for values, middle in pairs],
        "color": color,
        "thickness": 1.5,
    }


def _layout(x: str, y: str, x_range: list[float] | None = None, unit: bool = False) -> dict[str, Any]:
    axis = {
        "color": "--text",
        "gridcolor": "--grid",
        "linecolor": "--axis",
        "zerolinecolor": "--axis",
        "automargin": True,
        "ticks": "outside",
        "showline": True,
    }
    return {
        "paper_bgcolor": "--card",
        "plot_bgcolor": "--card",
        "font": {"color": "--text", "family": "system-ui, sans-serif", "size": 13},
        "hoverlabel": {"bgcolor": "--card", "bordercolor": "--axis", "font": {"color": "--text"}},
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "height": 320,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "uirevision": "kept",  # a change of theme keeps the zoom
        "xaxis": {**axis, "title": {"text": html.escape(x, quote=False)}, **({"range": x_range} if x_range else {})},
        "yaxis": {**axis, "title": {"text": y}, **({"range": [0, 1.005]} if unit else {})},
    }


def _middles(grid: Grid) -> list[float]:
    return [float(middle) for middle in grid.rounds.mean(axis=1)]


def _spans(grid: Grid) -> list[str]:
    return [f"round {first}" if first == last else f"rounds {first} to {last}" for first, last in grid.rounds.tolist()]


def _short(value: float) -> float | None:
    """Five digits are more than a chart shows; None is a gap."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
