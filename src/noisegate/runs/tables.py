"""Results as tables: for a notebook, for pandas, and as text. From the fields of results, as result.json has them."""

import html
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from noisegate.errors import NoisegateError

Fields = Mapping[str, Any]
"""The fields of a result by name."""

STYLE = "text-align:left;padding:2px 12px 2px 0"


def result_lines(result: Fields) -> list[tuple[str, str]]:
    """What a run found, in words and numbers: the few lines that a notebook shows."""
    total = result["workers"] + result["byzantine_workers"]
    lines = [
        ("accuracy", f"{result['accuracy']:.3f}"),
        ("aggregator", str(result["aggregator"])),
        ("attack", attackers(result)),
        ("privacy", privacy_of(result)),
        ("data, model", f"{result['dataset']}, {result['model']} ({result['parameters']:,} parameters)"),
        ("rounds", f"{result['rounds']} with {total} workers"),
    ]
    if result.get("balanced_accuracy") is not None:
        lines.insert(1, ("balanced accuracy", f"{result['balanced_accuracy']:.3f}"))
    return lines


def attackers(result: Fields) -> str:
    """Who attacks, in words."""
    byzantine, total = result["byzantine_workers"], result["workers"] + result["byzantine_workers"]
    if byzantine == 0 or result["attack"] == "none":
        return "nobody"
    return f"{result['attack']} by {byzantine} of {total} workers"


def privacy_of(result: Fields) -> str:
    """What a run promises each example, in words."""
    if result["epsilon"] is None:
        return "NOT PRIVATE: no noise"
    return f"epsilon {result['epsilon']:.3g}, delta {result['delta']:.2g} for each example of each worker"


def result_html(lines: Iterable[tuple[str, str]]) -> str:
    """Lines as a table of HTML. Every text is escaped."""
    rows = "".join(
        f'<tr><th style="{STYLE}">{html.escape(name)}</th><td style="{STYLE}">{html.escape(value)}</td></tr>'
        for name, value in lines
    )
    return f"<table>{rows}</table>"


def rows_html(rows: Sequence[Fields]) -> str:
    """Rows with the same columns as a table of HTML. Every text is escaped."""
    head = "".join(f'<th style="{STYLE}">{html.escape(name)}</th>' for name in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f'<td style="{STYLE}">{html.escape(said(value))}</td>' for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def rows_text(rows: Sequence[Fields]) -> str:
    """The same as plain text."""
    table = [list(rows[0]), *([said(value) for value in row.values()] for row in rows)] if rows else []
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def said(value: Any) -> str:
    """A value in a cell."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def curve_rows(curve: Sequence[Fields]) -> list[dict[str, Any]]:
    """A row for each evaluated round: accuracy, and the uploads that were used and refused since the row before."""
    rows = []
    for line in curve:
        row = {"round": line["round"], "accuracy": line["accuracy"]}
        refused = [pair for word, pair in line.get("rejected", {}).items() if word != "missing"]
        for group in ("honest", "byzantine"):
            row[f"{group}_used"] = line.get("selected", {}).get(group, 0)
            row[f"{group}_not_used"] = sum(pair.get(group, 0) for pair in refused)
            row[f"{group}_missing"] = line.get("rejected", {}).get("missing", {}).get(group, 0)
        rows.append(row)
    return rows


def frame_of(rows: Sequence[Fields], who: str, instead: str) -> Any:
    """Rows as a pandas frame. NoisegateError where there is no pandas; instead: what has the same."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise NoisegateError(f"{who}: needs pandas, which is not installed; install it, or use {instead}") from None
    return pandas.DataFrame([dict(row) for row in rows])
