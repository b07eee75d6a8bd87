"""The charts of one run."""

from typing import Any

from noisegate.report.charts import (
    DASHES,
    GROUP_COLORS,
    GROUP_NAMES,
    LINES,
    SYMBOLS,
    Chart,
    color_of,
    layout_of,
    short,
)
from noisegate.report.folders import RunRecord
from noisegate.report.numbers import Spent, Timeline, shares_by_reason
from noisegate.views import Reason


def accuracy(record: RunRecord) -> Chart:
    """The accuracy over the rounds, with those of the runs it is compared with."""
    total = int(record.result["rounds"]) if record.result else max((line["round"] for line in record.curve), default=1)
    curves = {"this run": record.curve, **{word: result["curve"] for word, result in sorted(record.beside.items())}}
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": word,
            "x": [line["round"] for line in curve],
            "y": [line["accuracy"] for line in curve],
            "line": {"color": LINES[i], "dash": DASHES[i], "width": 2},
            "marker": {"color": LINES[i], "symbol": SYMBOLS[i], "size": 6 if i == 0 else 5},
            "hovertemplate": f"{word}, round %{{x}}: accuracy %{{y:.3f}}<extra></extra>",
        }
        for i, (word, curve) in enumerate(curves.items())
    ]
    return {"data": data, "layout": layout_of("round", "accuracy", x_range=[0, total * 1.02], unit=True)}


def verdicts(timeline: Timeline) -> Chart:
    """The verdicts: a row for each worker, a column for each bin of rounds, honest workers above Byzantine ones."""
    groups = [group for group in GROUP_NAMES if len(timeline.workers[group])]
    rows = {group: len(timeline.workers[group]) for group in groups}
    step = 1 / len(Reason)
    scale = [[edge, color_of(reason)] for i, reason in enumerate(Reason) for edge in (i * step, (i + 1) * step)]
    layout = layout_of("round", "")
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
                "x": _middles(timeline),
                "y": [f"{worker}" for worker in timeline.workers[group]],
                "z": timeline.reasons[group].tolist(),
                "yaxis": f"y{axis}",
                "zmin": -0.5,
                "zmax": len(Reason) - 0.5,
                "colorscale": scale,
                "showscale": False,
                "ygap": 1,
                "text": [[Reason(code).word for code in row] for row in timeline.reasons[group].tolist()],
                "customdata": [_spans(timeline)] * rows[group],
                "hovertemplate": f"{GROUP_NAMES[group]} worker %{{y}}, %{{customdata}}: %{{text}}<extra></extra>",
            }
        )
        top = bottom - gap
    layout["xaxis"] |= {"range": [0.5, int(timeline.rounds[-1, 1]) + 0.5], "showgrid": False}
    layout["height"] = min(900, 110 + 14 * sum(rows.values()) + 30 * len(groups))
    return {"data": data, "layout": layout}


def scores(timeline: Timeline) -> Chart:
    """The scores: a thin line for each worker, with one color and one dash for each group."""
    data = []
    middles, spans = _middles(timeline), _spans(timeline)
    for group, dash in (("honest", "solid"), ("byzantine", "dot")):
        x: list[Any] = []
        y: list[Any] = []
        text: list[str] = []
        for worker, row in zip(timeline.workers[group], timeline.scores[group], strict=True):
            x += [*middles, None]
            y += [*(short(value) for value in row), None]  # a gap, so that workers are not joined
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
    return {"data": data, "layout": layout_of("round", "score", x_range=[0, int(timeline.rounds[-1, 1]) * 1.02])}


def byzantine_weight(timeline: Timeline) -> Chart:
    """The weight of Byzantine uploads in the update over the rounds, and the Byzantine share of all workers."""
    last = int(timeline.rounds[-1, 1])
    found = [] if timeline.byzantine_weight is None else timeline.byzantine_weight.tolist()
    share = timeline.all_workers["byzantine"] / sum(timeline.all_workers.values())
    data = [
        {
            "type": "scatter",
            "mode": "lines" if len(found) > 1 else "markers",
            "name": "weight of Byzantine uploads",
            "x": _middles(timeline),
            "y": [short(value) for value in found],
            "text": _spans(timeline),
            "line": {"color": GROUP_COLORS["byzantine"], "width": 2},
            "marker": {"color": GROUP_COLORS["byzantine"]},
            "hovertemplate": "%{text}: weight %{y:.3f}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Byzantine share of the workers",
            "x": [0, last],
            "y": [short(share)] * 2,
            "line": {"color": LINES[4], "dash": DASHES[1], "width": 2},
            "hovertemplate": "Byzantine share of the workers %{y:.3f}<extra></extra>",
        },
    ]
    layout = layout_of("round", "weight", x_range=[0, last * 1.02], unit=True)
    layout["height"] = 260
    return {"data": data, "layout": layout}


def unused(curve: list[dict[str, Any]]) -> Chart:
    """The shares of uploads that were not used, by reason, in stacked bars as wide as the rounds they count.

    A group of which every upload was used has no panel.
    """
    ends = [int(line["round"]) for line in curve]
    starts = [0, *ends[:-1]]
    data = []
    layout = layout_of("round", "", x_range=[0, ends[-1] + 0.5])
    found = {group: shares for group, shares in shares_by_reason(curve).items() if shares}
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
        for reason in shares:
            data.append(
                {
                    "type": "bar",
                    "name": reason.word,
                    "legendgroup": reason.word,
                    "showlegend": reason not in shown,
                    "x": [(start + end) / 2 + 0.5 for start, end in zip(starts, ends, strict=True)],
                    "width": [end - start for start, end in zip(starts, ends, strict=True)],
                    "y": [short(share) for share in shares[reason]],
                    "yaxis": f"y{axis}",
                    "text": [f"rounds {start + 1} to {end}" for start, end in zip(starts, ends, strict=True)],
                    "textposition": "none",
                    "marker": {"color": color_of(reason), "line": {"width": 0}},
                    "hovertemplate": f"{GROUP_NAMES[group]}, %{{text}}: %{{y:.1%}} {reason.word}<extra></extra>",
                }
            )
            shown |= {reason}
    layout |= {"barmode": "stack", "bargap": 0, "height": 380 if len(found) > 1 else 280}
    return {"data": data, "layout": layout}


def privacy(spent: Spent) -> Chart:
    """The epsilon that was spent over the rounds."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "epsilon",
            "x": spent.rounds,
            "y": [short(value) for value in spent.epsilons],
            "line": {"color": LINES[0], "width": 2},
            "marker": {"color": LINES[0], "size": 5},
            "hovertemplate": "after %{x} rounds: epsilon %{y:.3f}<extra></extra>",
        }
    ]
    layout = layout_of("round", "epsilon", x_range=[0, spent.rounds[-1] * 1.02])
    layout["yaxis"] |= {"range": [0, max(spent.epsilons) * 1.08], "rangemode": "tozero"}
    layout["height"] = 260
    return {"data": data, "layout": layout}


def _middles(timeline: Timeline) -> list[float]:
    return [float(middle) for middle in timeline.rounds.mean(axis=1)]


def _spans(timeline: Timeline) -> list[str]:
    """The rounds of each column in words."""
    columns = timeline.rounds.tolist()
    return [f"round {first}" if first == last else f"rounds {first} to {last}" for first, last in columns]
