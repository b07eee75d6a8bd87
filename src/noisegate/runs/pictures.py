"""Results as plotly figures."""

import html
import importlib
from collections.abc import Mapping
from typing import Any

from noisegate.errors import NoisegateError
from noisegate.runs.tables import privacy_of

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of lines: they can be told apart by people who see few colors, and on light and dark pages."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def curve_figure(results: Mapping[str, Mapping[str, Any]]) -> Any:
    """The accuracy of runs over their rounds, as a plotly figure. results: their fields, by what the legend says."""
    try:
        graphs = importlib.import_module("plotly.graph_objects")
    except ImportError:
        raise NoisegateError("plot: needs plotly, which is not installed; install it, or use Result.curve") from None
    figure = graphs.Figure()
    for i, (name, result) in enumerate(results.items()):
        private = "" if result["epsilon"] is not None else " (not private)"
        figure.add_scatter(
            x=[line["round"] for line in result["curve"]],
            y=[line["accuracy"] for line in result["curve"]],
            name=html.escape(name) + private,
            mode="lines+markers",
            line={"color": COLORS[i % len(COLORS)], "dash": DASHES[i // len(COLORS) % len(DASHES)]},
            hovertemplate=f"round %{{x}}: accuracy %{{y:.3f}}<br>{html.escape(privacy_of(result))}<extra></extra>",
        )
    figure.update_layout(
        xaxis={"title": {"text": "round"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "accuracy"}, "range": [0, 1.005]},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
    )
    return figure
