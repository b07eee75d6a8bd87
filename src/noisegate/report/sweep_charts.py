"""The charts of a sweep."""

import html
from typing import Any

from noisegate.report.charts import DASHES, LINES, Chart, layout_of, look_of, short
from noisegate.report.facets import Facet
from noisegate.report.sweeps import mean

OPEN = ["circle-open", "square-open", "diamond-open", "triangle-up-open", "x-open", "cross-open"]
"""The markers of lines that others are compared with."""


def against(facet: Facet, axis: str) -> Chart:
    """The accuracy against a setting: the mean over seeds, with a bar from the lowest to the highest."""
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
                "y": [short(value) for value in middles],
                "error_y": _bars([group.accuracies for group in ended], middles, LINES[i % len(LINES)]),
                "text": [f"{len(group.accuracies)} of {len(group.cells)} runs" for group in ended],
                "hovertemplate": f"{axis} %{{x:g}}: %{{y:.3f}} (%{{text}})<extra></extra>",
                **look_of(i),
            }
        )
    data += [_beside(name, points, i) for i, (name, points) in enumerate(facet.beside.items())]
    values |= {at for points in facet.beside.values() for at, _ in points}
    layout = _legend(layout_of(axis, "accuracy", unit=True), facet)
    layout["height"] = 380 if facet.beside else layout["height"]
    if values and min(values) > 0 and max(values) / min(values) >= 8:
        ticks = sorted(values)
        layout["xaxis"] |= {"type": "log", "title": {"text": f"{axis} (logarithmic)"}, "tickvals": ticks}
        layout["xaxis"]["ticktext"] = [f"{tick:g}" for tick in ticks]
    elif values and min(values) >= 0 and max(values) <= 1:
        layout["xaxis"]["range"] = [0, 1]
    return {"data": data, "layout": layout}


def _beside(name: str, points: list[tuple[float, float]], i: int) -> dict[str, Any]:
    """A line to compare the others with: gray, with open markers."""
    look = {"color": "--quiet", "dash": DASHES[(i + 1) % len(DASHES)], "width": 1.5}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(name, quote=False),
        "x": [at for at, _ in points],
        "y": [short(value) for _, value in points],
        "line": look,
        "marker": {"color": "--quiet", "symbol": OPEN[i % len(OPEN)], "size": 8},
        "hovertemplate": f"{html.escape(name)}, %{{x:g}}: %{{y:.3f}}<extra></extra>",
    }


def ranges(facet: Facet) -> Chart:
    """The accuracy of each group: a dot for the mean over seeds, a bar from the lowest to the highest."""
    ended = [(label, group) for label, groups in facet.lines.items() for group in groups if group.accuracies]
    middles = [mean(group.accuracies) for _, group in ended]
    bars = _bars([group.accuracies for _, group in ended], middles, LINES[0])
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [short(value) for value in middles],
            "y": [html.escape(label, quote=False) for label, _ in ended],
            "error_x": bars,
            "marker": {"color": LINES[0], "size": 9},
            "text": [f"{len(group.accuracies)} of {len(group.cells)} runs" for _, group in ended],
            "hovertemplate": "%{y}: %{x:.3f} (%{text})<extra></extra>",
        }
    ]
    layout = layout_of("accuracy", html.escape(facet.legend, quote=False))
    layout["xaxis"]["range"] = [0, 1]
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    layout["height"] = 110 + 28 * len(ended)
    return {"data": data, "layout": layout}


def courses(facet: Facet) -> Chart:
    """The accuracy over the rounds: a line for each group, the mean over its seeds."""
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
                        "y": [short(value) for _, value in group.curve],
                        "hovertemplate": "round %{x}: %{y:.3f}<extra></extra>",
                        **look_of(i),
                    }
                )
    last = max((trace["x"][-1] for trace in data), default=1)
    layout = _legend(layout_of("round", "accuracy", x_range=[0, last * 1.02], unit=True), facet)
    return {"data": data, "layout": layout}


def _legend(layout: dict[str, Any], facet: Facet) -> dict[str, Any]:
    """The layout with the setting that the lines are values of above them."""
    layout["legend"] |= (
        {"title": {"text": html.escape(facet.legend, quote=False), "font": {"size": 13}}} if facet.legend else {}
    )
    return layout


def _bars(accuracies: list[list[float]], middles: list[float], color: str) -> dict[str, Any]:
    """Error bars from the lowest to the highest accuracy of each group."""
    pairs = list(zip(accuracies, middles, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [short(max(values) - middle) for values, middle in pairs],
        "arrayminus": [short(middle - min(values)) for values, middle in pairs],
        "color": color,
        "thickness": 1.5,
    }
