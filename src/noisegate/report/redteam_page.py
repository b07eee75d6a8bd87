"""The page of a red team's search: what the worst attack costs, and what every attack leaves at each share."""

import html
from pathlib import Path
from typing import Any

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import number, read_json, unseal
from noisegate.redteam.plot import WITHOUT
from noisegate.redteam.trials import FINDINGS
from noisegate.report.charts import LINES, Chart, layout_of, look_of, short
from noisegate.report.facets import MOST_LINES
from noisegate.report.page import Page, headline, paragraph, table
from noisegate.report.words import verdict_section

MOST_TRIALS = 500
"""The largest number of runs in the table of all runs."""

OTHERS = "other attacks"
"""The name of the attacks that share a color."""


def read_findings(path: Path) -> dict[str, Any]:
    """What a search left in its folder. StoreError if it is not over, or if the file is damaged."""
    try:
        return unseal(read_json(path / FINDINGS), path / FINDINGS)
    except FileNotFoundError:
        told = f"{plain(path)}: has no {FINDINGS}: the search is not over, or is of an earlier version"
        raise StoreError(f"{told}; the same `noisegate redteam` goes on from there") from None
    except OSError as error:
        raise StoreError(f"{plain(path / FINDINGS)}: cannot be read ({error.strerror})") from None


def redteam_page(found: dict[str, Any], where: str = FINDINGS) -> Page:
    """The page of the findings as `--json` prints them."""
    try:
        return _page(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StoreError(f"{where}: is damaged; the same `noisegate redteam` writes it again") from None


def _page(found: dict[str, Any]) -> Page:
    spec, word, trials = found["spec"], str(found["measure"]), found["trials"]
    page = Page(
        f"Red team: {spec['aggregator']['name']} on {spec['dataset']}",
        f"{found['runs']} attacks of a budget of {found['budget']}, seed {spec['seed']}",
    )
    first = "An attack" if found["harmful"] else "No attack that was tried"
    first += " harms this configuration by more than chance explains."
    told = str(found["verdict"])
    verdict_section(page, (first, [f"{told[:1].upper()}{told[1:]}."]))
    page.section("Summary", headline(_summary(found, word)))
    ended = [trial for trial in trials if number(trial["value"])]
    if ended:
        _chart(page, found, ended, word)
    _tables(page, found, word)
    rows = [(key, _flat(value)) for key, value in spec.items() if value is not None]
    page.section("Settings", table(["setting", "value"], rows, label="settings"))
    return page


def _summary(found: dict[str, Any], word: str) -> list[tuple[str, str, str]]:
    worst = found["worst"]
    shown = []
    if worst is not None:
        shown.append((f"worst {word}", _three(worst["value"]), str(worst["described"])))
    shown.append(("reference accuracy", _three(found["reference_accuracy"]), "same private training, no attackers"))
    shown.append((WITHOUT, _three(found["without_attack"]["accuracy"]), "accuracy where Byzantine workers behave"))
    if number(found["cost"]):
        cost = f"{100 * found['cost']:.1f} points"
        shown.append(("cost of the worst", cost, f"in {word}, from what is worse without an attack"))
    shown.append(("by chance", f"{100 * found['noise']:.1f} points", "what the worst may seem to cost"))
    return shown


def _chart(page: Page, found: dict[str, Any], ended: list[dict[str, Any]], word: str) -> None:
    """The worst case of each attack at each share. The trials come worst first."""
    lines: dict[str, dict[float, dict[str, Any]]] = {}
    for trial in ended:
        lines.setdefault(str(trial["attack"]["name"]), {}).setdefault(float(trial["byzantine"]), trial)
    shares = {share for by_share in lines.values() for share in by_share}
    worst = ended[0]
    title = f"{word[:1].upper()}{word[1:]}"
    label = f"{word} by attack: worst {_three(worst['value'])} by {worst['described']}"
    if len(shares) == 1:
        dots = _dots(
            [by_share[share] for by_share in lines.values() for share in shares], found["reference_value"], word
        )
        caption = f"The worst case of each attack, at {shares.pop():.0%} Byzantine workers. The line is the reference."
        page.section(f"{title} by attack", page.chart(dots, label, caption))
        return
    curves = _curves(lines, found["reference_value"], word)
    caption = f"The worst case of each attack at each share that was tried. The {MOST_LINES} worst have a color."
    page.section(f"{title} against the Byzantine share", page.chart(curves, label, caption))


def _dots(trials: list[dict[str, Any]], clean: Any, word: str) -> Chart:
    """A dot for each attack, worst first."""
    names = [plain(trial["described"]) for trial in trials]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [short(trial["value"]) for trial in trials],
            "y": [html.escape(name, quote=False) for name in names],
            "marker": {"color": LINES[0], "size": 9},
            "hovertemplate": f"%{{y}}: {word} %{{x:.3f}}<extra></extra>",
        }
    ]
    layout = layout_of(word, "", x_range=[0, 1])
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    layout |= {"height": 110 + 24 * len(names), "showlegend": False}
    if number(clean):
        edge = {"color": "--text", "dash": "dash", "width": 1.5}
        place = {"type": "line", "xref": "x", "yref": "paper", "x0": clean, "x1": clean, "y0": 0, "y1": 1}
        layout["shapes"] = [{**place, "line": edge}]
    return {"data": data, "layout": layout}


def _curves(lines: dict[str, dict[float, dict[str, Any]]], clean: Any, word: str) -> Chart:
    """A line for each attack, worst first."""
    data = []
    for i, (name, by_share) in enumerate(lines.items()):
        at = sorted(by_share)
        told = i < MOST_LINES
        gray = {"line": {"color": "--quiet", "width": 1}, "marker": {"color": "--quiet", "size": 5}, "opacity": 0.6}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": html.escape(name, quote=False) if told else OTHERS,
                "legendgroup": name if told else OTHERS,
                "showlegend": i <= MOST_LINES,
                "x": at,
                "y": [short(by_share[share]["value"]) for share in at],
                "text": [html.escape(plain(by_share[share]["described"]), quote=False) for share in at],
                "hovertemplate": f"%{{text}}<br>share %{{x:.0%}}, {word} %{{y:.3f}}<extra></extra>",
                **(look_of(i) if told else gray),
            }
        )
    if number(clean):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "reference",
                "x": [0, 1],
                "y": [short(clean)] * 2,
                "line": {"color": "--text", "dash": "dash", "width": 1.5},
                "hovertemplate": "reference %{y:.3f}<extra></extra>",
            }
        )
    layout = layout_of("Byzantine share of all workers", word, x_range=[0, 1], unit=True)
    layout["xaxis"]["tickformat"] = ".0%"
    layout["height"] = 420
    layout["margin"]["r"] = 28
    return {"data": data, "layout": layout}


def _tables(page: Page, found: dict[str, Any], word: str) -> None:
    trials = found["trials"]
    own = [] if word == "accuracy" else [word]
    done = [trial for trial in trials if trial["status"] == "done"]
    columns = ["attack", "share", *own, "accuracy", "below reference", "Byzantine used", "honest refused", "stage"]
    rows = [
        (
            trial["described"],
            f"{float(trial['byzantine']):.0%}",
            *([_three(trial["value"])] if own else []),
            *(_three(trial[name]) for name in ("accuracy", "below_reference")),
            *(_share(trial[name]) for name in ("byzantine_selected", "honest_rejected")),
            trial["stage"],
        )
        for trial in done[:MOST_TRIALS]
    ]
    left = len(done) - len(rows)
    words = "Worst first. The reference is the same private training without attackers, with a plain mean."
    words += f" {left} more runs are left out." if left > 0 else ""
    page.section("Every attack that was tried", table(columns, rows, label="attacks"), paragraph(words, "quiet"))
    names = ("accuracy", "reference_accuracy", "without_attack_accuracy", "cost")
    again = [(seed["seed"], *(_three(seed[name]) for name in names)) for seed in found["seeds"]["trials"]]
    if again:
        columns = ["seed", "accuracy", "reference", WITHOUT, "cost"]
        page.section("The worst case on other seeds", table(columns, again, label="seeds"))
    broken = [(trial["described"], trial["status"], trial["message"]) for trial in trials if trial["status"] != "done"]
    if broken:
        page.section("Failed and skipped", table(["attack", "status", "message"], broken, label="failed and skipped"))
    if untried := found["untried"]:
        attacks = dict.fromkeys(str(entry["attack"]["name"]) for entry in untried)
        words = f"{len(untried)} runs, of {', '.join(attacks)}. A larger budget tries them."
        page.section("Not tried for want of budget", paragraph(words))


def _three(value: Any) -> str:
    return f"{value:.3f}" if number(value) else "–"


def _share(value: Any) -> str:
    return f"{value:.1%}" if number(value) else "–"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(str(entry) if key == "name" else f"{key} {entry}" for key, entry in value.items())
    return str(value)
