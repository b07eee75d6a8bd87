"""What all charts have in common: colors, words and the layout, as plotly reads them.

A color is the name of a variable of the style sheet, so it follows the theme. Accuracy and shares have axes from 0 to
1, and epsilon has an axis from 0.
"""

import html
from typing import Any

import numpy as np

from noisegate.views import Reason

Chart = dict[str, Any]
"""A chart as plotly reads it: `data` and `layout`."""

LINES = [f"--line-{i}" for i in range(6)]
"""The colors of lines."""

DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
"""The dashes of lines, so that they can be told apart without colors."""

SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross"]
"""The markers of lines."""

GROUP_NAMES = {"honest": "honest", "byzantine": "Byzantine"}
"""How the two groups of workers are called on a page."""

GROUP_COLORS = {"honest": "--honest", "byzantine": "--byzantine"}
"""The colors of the two groups of workers."""

MEANINGS = {
    Reason.KEPT: "used",
    Reason.MALFORMED: "malformed: not a vector of d finite numbers",
    Reason.NORM: "norm: a length that the privacy noise does not allow",
    Reason.DISTRIBUTION: "distribution: coordinates unlike the privacy noise",
    Reason.SCORE: "score: passed every test, but others ranked higher",
    Reason.EVIDENCE: "evidence: over the rounds too far in one direction",
    Reason.DEPENDENT: "dependent: shares its noise with another upload",
    Reason.MISSING: "missing: did not arrive, which accuses nobody",
    Reason.LOST: "lost: the round was lost with its process, and nobody was judged",
}
"""The legend of the verdicts."""


def color_of(reason: Reason) -> str:
    """The color of a verdict."""
    return f"--{reason.word}"


def look_of(i: int) -> dict[str, Any]:
    """The color, dash and marker of line number `i`."""
    color = LINES[i % len(LINES)]
    return {
        "line": {"color": color, "dash": DASHES[i % len(DASHES)], "width": 2},
        "marker": {"color": color, "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8},
    }


def layout_of(x: str, y: str, x_range: list[float] | None = None, unit: bool = False) -> dict[str, Any]:
    """A layout with the titles of its axes. unit: whether the vertical axis goes from 0 to 1."""
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


def short(value: float) -> float | None:
    """`value` with five digits, which are more than a chart shows; None, a gap, if it is not finite."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
