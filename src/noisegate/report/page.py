"""An HTML page that loads nothing: pieces of escaped text, and the frame around them."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from noisegate.errors import StoreError
from noisegate.files import read_json
from noisegate.report.charts import Chart
from noisegate.report.folders import number
from noisegate.version import __version__


def text(value: Any) -> str:
    """`value` as text, escaped so that it is not markup."""
    return html.escape(str(value))


@dataclass
class Page:
    """A page to which sections are added. charts: the number of its charts so far."""

    title: str
    subtitle: str = ""
    pieces: list[str] = field(default_factory=list)
    charts: int = 0

    def section(self, heading: str, *pieces: str, kind: str = "") -> None:
        """Add a section with a heading."""
        inside = "\n".join(piece for piece in pieces if piece)
        attribute = f' class="{kind}"' if kind else ""
        self.pieces.append(f"<section{attribute}>\n<h2>{text(heading)}</h2>\n{inside}\n</section>")

    def chart(
        self, chart: Chart, label: str, caption: str = "", numbers: str = "", legend: str = "", printed: bool = False
    ) -> str:
        """The HTML of a chart. label: what it shows, in words. numbers: a folded table. printed: unfolded on paper."""
        self.charts += 1
        name = f"chart-{self.charts}"
        data = json.dumps(chart, allow_nan=False).replace("<", "\\u003c")  # so that no text ends the script
        kind = ' class="printed"' if printed else ""
        folded = f"<details{kind}><summary>Numbers</summary>{numbers}</details>" if numbers else ""
        said = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        height = chart["layout"]["height"]
        return (
            f'<figure>{legend}<div class="plot" id="{name}" role="img" aria-label="{text(label)}" '
            f'style="min-height:{height}px"></div>'
            f'<script type="application/json" id="{name}-data">{data}</script>{said}{folded}</figure>'
        )

    def html(self) -> str:
        """The whole page as HTML."""
        files = resources.files("noisegate.report")
        style = (files / "style.css").read_text(encoding="utf-8")
        scripts = [(files / "page.js").read_text(encoding="utf-8")]
        if self.charts:
            from plotly.offline import get_plotlyjs  # here, since only a page with charts needs it

            scripts = [get_plotlyjs(), *scripts]
        # Only the scripts that stand here may run, and nothing may be loaded: a second lock beside the escaping.
        allowed = " ".join(f"'{_digest(script)}'" for script in scripts)
        policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
        ending = "\n".join(f"<script>{script}</script>" for script in scripts)
        needs = "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>" if self.charts else ""
        body = "\n".join(self.pieces)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(self.title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{text(self.title)}</h1>
<p class="quiet">{text(self.subtitle)}</p>
{needs}</header>
{body}
<footer>Made by noisegate {text(__version__)}. This page loads nothing from anywhere.</footer>
</main>
{ending}
</body>
</html>
"""


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph; "" if there are no words."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{text(words)}</p>" if words else ""


def bullets(lines: Iterable[str]) -> str:
    """A bulleted list."""
    return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"


def headline(entries: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers. Each entry is (name, number, note)."""
    shown = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>"
        for name, value, note in entries
    )
    return f'<dl class="numbers">{shown}</dl>'


@dataclass(frozen=True)
class Link:
    """A cell of a table that links to another file."""

    words: str
    target: str


@dataclass(frozen=True)
class Shade:
    """A cell of a map: a number in words, and the share from 0 to 1 of the color behind it."""

    words: str
    share: float


MOST_UNBROKEN = 40
"""The largest number of characters of a cell that stays on one line."""


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    caption: str = "",
    label: str = "",
    sort: bool = True,
    dense: bool = False,
) -> str:
    """A table. Columns of numbers are aligned to the right.

    sort: whether people may sort it by a column. dense: whether it is a matrix of short numbers, close together.
    The page's script turns its rows into blocks of names and values where it does not fit; without the script it
    scrolls on its own.
    """
    rows = [list(row) for row in rows]
    right = [all(_like_number(row[i]) for row in rows if i < len(row)) and bool(rows) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_right(is_right)}>{text(column)}</th>'
        for column, is_right in zip(columns, right, strict=True)
    )
    names = [text(column) for column in columns]
    body = "".join(
        "<tr>"
        + "".join(
            _cell(value, names[i] if i < len(names) else "", i < len(right) and right[i]) for i, value in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    name = text(label or caption or ", ".join(columns))
    kinds = [*(["sortable"] if sort and len(rows) > 1 else []), *(["dense"] if dense else [])]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table{kind}>{said}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any, name: str, right: bool) -> str:
    """A cell. name: that of its column, escaped."""
    if isinstance(value, Link):
        return f'<td data-name="{name}"><a href="{text(value.target)}">{text(value.words)}</a></td>'
    if isinstance(value, Shade):
        share = max(0, min(100, round(100 * value.share)))
        return f'<td data-name="{name}" class="number shade" style="--share: {share}%">{text(value.words)}</td>'
    words = "" if value is None else str(value)
    kind = ' class="number"' if right else ' class="message"' if len(words) > MOST_UNBROKEN else ""
    return f'<td data-name="{name}"{kind}>{text(words)}</td>'


def _right(is_right: bool) -> str:
    return ' class="number"' if is_right else ""


def _like_number(value: Any) -> bool:
    if number(value) or isinstance(value, Shade):
        return True
    if not isinstance(value, str):
        return value is None
    bare = value.strip().removesuffix("%").replace(",", "").strip()
    return bare in ("", "-", "–") or bare.lstrip("+-±").replace(".", "", 1).replace("e-", "", 1).isdigit()


def extra_tables(folder: Path, page: Page, problems: list[str]) -> None:
    """Add the tables of the folder's tables.json, if it has one: a list of title, columns, rows and notes."""
    path = folder / "tables.json"
    if not path.exists():
        return
    try:
        found = read_json(path)
        entries = found if isinstance(found, list) else [found]
        for entry in entries:
            columns, rows = entry["columns"], entry["rows"]
            if not isinstance(columns, list) or not all(isinstance(row, list) for row in rows):
                raise TypeError
        for entry in entries:
            columns = [str(column) for column in entry["columns"]]
            rows = [[*row, *[None] * (len(columns) - len(row))][: len(columns)] for row in entry["rows"]]
            notes = entry.get("notes") or []
            said = notes if isinstance(notes, list) else [notes]
            title = str(entry.get("title") or "Table")
            page.section(title, table(columns, rows, label=title), *(paragraph(str(note), "quiet") for note in said))
    except (OSError, StoreError, ValueError, TypeError, LookupError, AttributeError):
        problems.append("tables.json is damaged and left out.")
