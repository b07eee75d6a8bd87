"""The page of one run."""

from typing import Any

import numpy as np

from noisegate.report import charts
from noisegate.report.folders import RunRecord, number
from noisegate.report.numbers import GROUPS, Grid, privacy_spent, refused_shares, timeline
from noisegate.report.page import Page, bullets, extra_tables, headline, paragraph, table, text
from noisegate.runs.promise import STATED
from noisegate.views import TESTS, Reason

STATES = {
    "done": "",
    "unfinished": "This run is not finished: it is running, or was interrupted. What is shown is where it stood.",
    "failed": "This run failed.",
    "skipped": "This run was skipped.",
}


def run_page(record: RunRecord) -> Page:
    """Everything that a run folder says."""
    page = Page(f"Run: {record.title}", f"Folder {record.path.resolve().name}, {_size(record)}")
    problems = list(record.problems)
    extra_tables(record.path, page, problems)
    tables, page.pieces = page.pieces, []
    if record.status != "done" or problems:
        said = [word for word in (STATES[record.status], record.message) if word]
        page.section(
            "Not whole", *(paragraph(word) for word in said), bullets(problems) if problems else "", kind="problems"
        )
    page.section("In numbers", headline(_headline(record)), paragraph(_seeds(record), "quiet"))
    _accuracy(page, record)
    page.pieces += tables
    grid = timeline(record.verdicts) if record.verdicts else None
    _verdicts(page, record, grid)
    _refused(page, record)
    _scores(page, record, grid)
    _privacy(page, record)
    page.section("Settings", f"<pre><code>{text(record.spec_text)}</code></pre>")
    if record.environment:
        page.section("Where it ran", table(["what", "value"], _flat(record.environment), label="environment"))
    return page


def _size(record: RunRecord) -> str:
    result = record.result
    if result is None:
        last = record.curve[-1]["round"] if record.curve else 0
        total = record.spec.rounds if record.spec else None
        return f"evaluated last after round {last}" + (f" of {total}" if total else "")
    return (
        f"{result['rounds']:,} rounds, {result['workers']} honest and {result['byzantine_workers']} Byzantine workers, "
        f"seed {result.get('seed', '?')}"
    )


def _seeds(record: RunRecord) -> str:
    return "One run with one seed. Another seed gives another accuracy; a sweep over seeds says how far apart they lie."


def _headline(record: RunRecord) -> list[tuple[str, str, str]]:
    result = record.result
    if result is None:
        if not record.curve:
            return [("accuracy", "–", "not evaluated yet")]
        last = record.curve[-1]
        return [("accuracy so far", f"{last['accuracy']:.3f}", f"after round {last['round']}")]
    shown = [
        ("accuracy", f"{result['accuracy']:.3f}", f"after the last round; best seen {result['best_accuracy']:.3f}")
    ]
    if "reference" in record.beside:
        clean = record.beside["reference"]["accuracy"]
        shown.append(("reference accuracy", f"{clean:.3f}", "same private training, no attackers, plain mean"))
    if "undefended" in record.beside:
        bare = record.beside["undefended"]["accuracy"]
        shown.append(("undefended", f"{bare:.3f}", "plain mean under the same attack"))
    by = "stated, not checked" if result.get("accountant") == STATED else str(result.get("accountant", "?")).upper()
    if result["sigma"] == 0:
        shown.append(("epsilon", "none", "sigma 0: nothing is private"))
    else:
        shown.append(("epsilon", f"{result['epsilon']:.3f}", f"delta {result['delta']:.2g}, {by}"))
    for key, name, note in (
        ("honest_rejected", "honest uploads refused", "by a test, although honest"),
        ("byzantine_selected", "Byzantine uploads used", "of the uploads that made the model"),
    ):
        if number(result.get(key)):
            shown.append((name, f"{result[key]:.1%}", note))
    if number(result.get("seconds")) and number(result.get("ms_per_round")):
        shown.append(("time", f"{result['seconds']:.1f} s", f"{result['ms_per_round']:.1f} ms a round"))
    return shown


def _accuracy(page: Page, record: RunRecord) -> None:
    if not record.curve:
        page.section("Accuracy over the rounds", paragraph("No round was evaluated yet."))
        return
    first, last = record.curve[0], record.curve[-1]
    label = (
        f"Accuracy over the rounds: {first['accuracy']:.3f} after round {first['round']}, "
        f"{last['accuracy']:.3f} after round {last['round']}"
    )
    beside = "".join(f"; {word} {result['accuracy']:.3f}" for word, result in sorted(record.beside.items()))
    numbers = table(["round", "accuracy"], [(line["round"], f"{line['accuracy']:.4f}") for line in record.curve])
    missing = "" if "reference" in record.beside else " The reference was not run, or is not in this folder."
    caption = f"On the test set, every so many rounds. The axis goes from 0 to 1.{missing}"
    page.section("Accuracy over the rounds", page.chart(charts.accuracy(record), label + beside, caption, numbers))


def _verdicts(page: Page, record: RunRecord, grid: Grid | None) -> None:
    if record.verdicts is None or grid is None:
        why = "is written when a run is done" if record.status == "unfinished" else "is not known"
        page.section("Who was refused when", paragraph(f"Which worker was refused when, and why, {why}."))
        return
    reasons, lying = record.verdicts.reasons, record.verdicts.byzantine
    met = [reason for reason in Reason if (reasons == reason).any()]
    legend = "".join(
        f'<li><span class="swatch {reason.word}"></span>{text(charts.MEANINGS[reason])}</li>' for reason in met
    )
    counts = {"honest": reasons[:, ~lying], "byzantine": reasons[:, lying]}
    rows = [
        [reason.word, *(_share(counts[group], reason) for group in GROUPS), "yes" if reason in TESTS else "no"]
        for reason in met
    ]
    label = "Timeline of verdicts, a row for each worker and a column for each round. " + "; ".join(
        f"{reason.word}: {honest} of honest and {byzantine} of Byzantine uploads"
        for reason, (_, honest, byzantine, _) in zip(met, rows, strict=True)
    )
    page.section(
        "Who was refused when",
        page.chart(
            charts.verdicts(grid),
            label,
            _how_small(grid),
            table(["verdict", "honest uploads", "Byzantine uploads", "accuses"], rows),
            f'<ul class="legend">{legend}</ul>',
            printed=True,
        ),
    )


def _share(reasons: np.ndarray, reason: Reason) -> str:
    return f"{(reasons == reason).mean():.1%}" if reasons.size else "–"


def _how_small(grid: Grid) -> str:
    """What was done to make the timeline small enough to be seen."""
    said = ["A row is a worker by its position, honest ones above, Byzantine ones below."]
    if grid.binned:
        widths = grid.rounds[:, 1] - grid.rounds[:, 0] + 1
        wide = f"{widths.min()}" if widths.min() == widths.max() else f"{widths.min()} or {widths.max()}"
        said.append(
            f"A column is {wide} rounds and shows the most frequent verdict of them; of equally frequent ones a "
            "refusal. What is rarer within a column is not seen here, but counted below."
        )
    else:
        said.append("A column is a round.")
    said += _left_out(grid)
    return " ".join(said)


def _left_out(grid: Grid) -> list[str]:
    return [
        f"Of {grid.all_workers[group]} {charts.GROUP_NAMES[group]} workers {len(grid.workers[group])} are shown, "
        "evenly spaced by position."
        for group in GROUPS
        if len(grid.workers[group]) < grid.all_workers[group]
    ]


def _refused(page: Page, record: RunRecord) -> None:
    shares = refused_shares(record.curve)
    if not shares:
        return
    rows = [
        [charts.GROUP_NAMES[group], reason.word, f"{min(found):.1%}", f"{max(found):.1%}", f"{found[-1]:.1%}"]
        for group, reasons in shares.items()
        for reason, found in reasons.items()
    ]
    if not rows:
        page.section("Share of uploads refused", paragraph("Every upload was used in every round."))
        return
    label = "Share of uploads refused by reason over the rounds. " + "; ".join(
        f"{group}, {reason}: from {low} to {high}" for group, reason, low, high, _ in rows
    )
    caption = (
        "Of the uploads of each group between two evaluations, honest workers above, Byzantine ones below. "
        "The axis goes from 0 to 100 %."
    )
    numbers = table(["workers", "reason", "least", "most", "at the end"], rows)
    page.section("Share of uploads refused", page.chart(charts.refused(record.curve), label, caption, numbers))


def _scores(page: Page, record: RunRecord, grid: Grid | None) -> None:
    if record.verdicts is None or grid is None:
        return
    scores = record.verdicts.scores
    if not np.nan_to_num(scores, nan=0.0, posinf=1.0, neginf=1.0).any():
        page.section("Scores", paragraph("This aggregator ranks by nothing: every score is 0."))
        return
    said = ["What the aggregator ranks workers by; its scale is the aggregator's own and need not begin at 0."]
    if grid.binned:
        said.append("A point is the mean over the rounds of a column above.")
    with np.errstate(over="ignore"):
        rows = [
            [charts.GROUP_NAMES[group], *(f"{value:.4g}" for value in _three(scores[:, mask]))]
            for group, mask in zip(GROUPS, (~record.verdicts.byzantine, record.verdicts.byzantine), strict=True)
            if mask.any()
        ]
    label = "Score of each worker over the rounds. " + "; ".join(
        f"{group}: from {low} to {high}, median {middle}" for group, low, middle, high in rows
    )
    numbers = table(["workers", "least", "median", "most"], rows)
    page.section("Scores", page.chart(charts.scores(grid), label, " ".join(said + _left_out(grid)), numbers))


def _three(scores: np.ndarray) -> tuple[float, float, float]:
    finite = scores[np.isfinite(scores)].astype(np.float64)
    return (float(finite.min()), float(np.median(finite)), float(finite.max())) if finite.size else (np.nan,) * 3


def _privacy(page: Page, record: RunRecord) -> None:
    spent = privacy_spent(record)
    if not spent.rounds:
        page.section("Privacy spent", paragraph(spent.note))
        return
    numbers = table(
        ["rounds", "epsilon"], [(at, f"{cost:.4f}") for at, cost in zip(spent.rounds, spent.epsilons, strict=True)]
    )
    label = f"Epsilon over the rounds: 0 before the first, {spent.epsilons[-1]:.3f} after round {spent.rounds[-1]}"
    page.section("Privacy spent", page.chart(charts.privacy(spent), label, spent.note, numbers))


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        rows += _flat(value, f"{before}{key} ") if isinstance(value, dict) else [(f"{before}{key}", str(value))]
    return rows
