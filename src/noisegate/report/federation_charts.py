"""The charts of a server folder."""

from collections.abc import Mapping, Sequence

import numpy as np

from noisegate.report.charts import LINES, Chart, layout_of, short

MOST_COLUMNS = 240
"""Columns of the map of weights. More rounds than that are averaged."""

COLORS = {
    "used": "--kept",
    "refused": "--evidence",
    "malformed": "--malformed",
    "forged": "--dependent",
    "late": "--norm",
    "missing": "--missing",
}
"""The colors of the statuses: those of the verdicts that they are most like."""


def accuracy(taken: Sequence[tuple[int, float]], rounds: int) -> Chart:
    """The accuracy over the rounds."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [at for at, _ in taken],
            "y": [short(value) for _, value in taken],
            "line": {"color": LINES[0], "width": 2},
            "marker": {"color": LINES[0], "size": 6},
            "hovertemplate": "round %{x}: accuracy %{y:.3f}<extra></extra>",
        }
    ]
    return {"data": data, "layout": layout_of("round", "accuracy", x_range=[0, rounds * 1.02], unit=True)}


def binned(values: np.ndarray, at: Sequence[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(workers, columns) means of at most `MOST_COLUMNS` bins of rounds, and the first and last round of each."""
    parts = np.array_split(np.arange(len(at)), min(len(at), MOST_COLUMNS))
    means = np.stack([values[:, part].mean(axis=1) for part in parts], axis=1)
    return means, [(at[part[0]], at[part[-1]]) for part in parts]


def weights(names: Sequence[str], values: np.ndarray, spans: Sequence[tuple[int, int]]) -> Chart:
    """A map: a row for each worker, a column for each bin of rounds."""
    said = [f"round {first}" if first == last else f"rounds {first} to {last}" for first, last in spans]
    data = [
        {
            "type": "heatmap",
            "x": [(first + last) / 2 for first, last in spans],
            "y": list(names),
            "z": [[short(value) for value in row] for row in values.tolist()],
            "zmin": 0,
            "zmax": short(max(float(values.max()), 1e-3)),
            "colorscale": [[0, "--card"], [1, LINES[0]]],
            "showscale": True,
            "ygap": 1,
            "customdata": [said] * len(names),
            "hovertemplate": "%{y}, %{customdata}: weight %{z:.3f}<extra></extra>",
        }
    ]
    layout = layout_of("round", "")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False, "ticks": ""}
    layout["xaxis"] |= {"showgrid": False}
    layout["height"] = min(900, 110 + 18 * len(names))
    return {"data": data, "layout": layout}


def statuses(names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> Chart:
    """What became of each worker's rounds, in stacked bars."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": word,
            "x": list(found),
            "y": list(names),
            "marker": {"color": COLORS[word], "line": {"width": 0}},
            "hovertemplate": f"%{{y}}: %{{x}} rounds {word}<extra></extra>",
        }
        for word, found in counts.items()
    ]
    layout = layout_of("rounds", "")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False, "ticks": ""}
    layout["legend"]["traceorder"] = "normal"
    layout |= {"barmode": "stack", "height": min(900, 130 + 20 * len(names))}
    return {"data": data, "layout": layout}


def waits(known: Sequence[tuple[int, float]]) -> Chart:
    """How long each round waited for uploads."""
    data = [
        {
            "type": "scatter",
            "mode": "lines" if len(known) > 1 else "markers",
            "x": [at for at, _ in known],
            "y": [short(wait) for _, wait in known],
            "line": {"color": LINES[1], "width": 1.5},
            "marker": {"color": LINES[1]},
            "hovertemplate": "round %{x}: %{y:.3f} s<extra></extra>",
        }
    ]
    layout = layout_of("round", "seconds")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["height"] = 260
    return {"data": data, "layout": layout}
