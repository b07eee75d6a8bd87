"""The page of one run."""

from typing import Any

import numpy as np

from noisegate.checks import rounded
from noisegate.report import run_charts
from noisegate.report.charts import GROUP_NAMES, MEANINGS
from noisegate.report.folders import RunRecord
from noisegate.report.numbers import GROUPS, Timeline, privacy_spent, shares_by_reason, timeline_of
from noisegate.report.page import Page, bullets, extra_tables, headline, paragraph, table, text
from noisegate.report.run_summary import ONE_SEED, summary
from noisegate.report.targets import (
    confusion_section,
    fallback_section,
    one_class_section,
    recall_section,
    worker_section,
    written,
)
from noisegate.report.words import of_run, verdict_section
from noisegate.views import TESTS, Reason

STATES = {
    "done": "",
    "unfinished": "This run is not finished: it is running, or was interrupted. The page shows its last evaluation.",
    "failed": "This run failed.",
    "skipped": "This run was skipped.",
}
"""The sentence that says how a run stands, by its status."""


def run_page(record: RunRecord) -> Page:
    """The page of a run folder, finished or not."""
    page = Page(f"Run: {record.title}", f"Folder {record.path.resolve().name}, {_size(record)}")
    problems = list(record.problems)
    extra_tables(record.path, page, problems)
    tables, page.pieces = page.pieces, []
    if record.status != "done" or problems:
        said = [word for word in (STATES[record.status], record.message) if word]
        page.section(
            "Incomplete", *(paragraph(word) for word in said), bullets(problems) if problems else "", kind="problems"
        )
    fallback_section(page, record)
    one_class_section(page, record)
    verdict_section(page, of_run(record))
    page.section("Summary", headline(summary(record)), paragraph(ONE_SEED, "quiet"))
    _accuracy(page, record)
    recall_section(page, record)
    confusion_section(page, record)
    worker_section(page, record)
    page.pieces += tables
    timeline = timeline_of(record.verdicts) if record.verdicts else None
    _verdicts(page, record, timeline)
    _unused(page, record)
    _byzantine_weight(page, timeline)
    _scores(page, record, timeline)
    _privacy(page, record)
    page.section("Settings", f"<pre><code>{text(record.spec_text)}</code></pre>")
    if record.environment:
        page.section("Environment", table(["what", "value"], _flat(record.environment), label="environment"))
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
    others = {
        word: {line["round"]: line["accuracy"] for line in result["curve"]}
        for word, result in sorted(record.beside.items())
    }
    rows = [
        (line["round"], f"{line['accuracy']:.4f}", *(written(found.get(line["round"])) for found in others.values()))
        for line in record.curve
    ]
    numbers = table(["round", "accuracy", *others], rows)
    missing = "" if "reference" in record.beside else " The reference was not run, or is not in this folder."
    caption = f"Accuracy on the test set, at each evaluation. The axis goes from 0 to 1.{missing}"
    page.section("Accuracy over the rounds", page.chart(run_charts.accuracy(record), label + beside, caption, numbers))


def _verdicts(page: Page, record: RunRecord, timeline: Timeline | None) -> None:
    if record.verdicts is None or timeline is None:
        why = "are written when a run is done" if record.status == "unfinished" else "are not known"
        page.section("Verdicts by worker and round", paragraph(f"The verdicts {why}."))
        return
    reasons, byzantine = record.verdicts.reasons, record.verdicts.byzantine
    met = [reason for reason in Reason if (reasons == reason).any()]
    legend = "".join(f'<li><span class="swatch {reason.word}"></span>{text(MEANINGS[reason])}</li>' for reason in met)
    counts = {"honest": reasons[:, ~byzantine], "byzantine": reasons[:, byzantine]}
    rows = [
        [reason.word, *(_share(counts[group], reason) for group in GROUPS), "yes" if reason in TESTS else "no"]
        for reason in met
    ]
    label = "Timeline of verdicts, a row for each worker and a column for each round. " + "; ".join(
        f"{reason.word}: {of_honest} of honest and {of_byzantine} of Byzantine uploads"
        for reason, (_, of_honest, of_byzantine, _) in zip(met, rows, strict=True)
    )
    page.section(
        "Verdicts by worker and round",
        page.chart(
            run_charts.verdicts(timeline),
            label,
            _how_small(timeline),
            table(["verdict", "honest uploads", "Byzantine uploads", "accuses"], rows),
            f'<ul class="legend">{legend}</ul>',
            printed=True,
        ),
    )


def _share(reasons: np.ndarray, reason: Reason) -> str:
    return f"{(reasons == reason).mean():.1%}" if reasons.size else "–"


def _how_small(timeline: Timeline) -> str:
    """The caption of the timeline, which says how it was made small enough."""
    said = ["A row is a worker, by its position. Honest workers are above, Byzantine workers below."]
    if timeline.binned:
        widths = timeline.rounds[:, 1] - timeline.rounds[:, 0] + 1
        wide = f"{widths.min()}" if widths.min() == widths.max() else f"{widths.min()} or {widths.max()}"
        said.append(
            f"A column is {wide} rounds and shows the most frequent verdict of them; of equally frequent ones a "
            "refusal. The table below counts every verdict."
        )
    else:
        said.append("A column is a round.")
    said += _left_out(timeline)
    return " ".join(said)


def _left_out(timeline: Timeline) -> list[str]:
    return [
        f"Of {timeline.all_workers[group]} {GROUP_NAMES[group]} workers {len(timeline.workers[group])} are shown, "
        "evenly spaced by position."
        for group in GROUPS
        if len(timeline.workers[group]) < timeline.all_workers[group]
    ]


def _unused(page: Page, record: RunRecord) -> None:
    shares = shares_by_reason(record.curve)
    if not shares:
        return
    title = "Uploads that were not used, by reason"
    rows = [
        [GROUP_NAMES[group], reason.word, f"{min(found):.1%}", f"{max(found):.1%}", f"{found[-1]:.1%}"]
        for group, reasons in shares.items()
        for reason, found in reasons.items()
    ]
    whole = [group for group, reasons in shares.items() if not reasons]
    if not rows:
        page.section(title, paragraph("None refused: every upload was used in every round."))
        return
    label = f"{title}, over the rounds. " + "; ".join(
        f"{group}, {reason}: from {low} to {high}" for group, reason, low, high, _ in rows
    )
    caption = f"Share of {'the' if whole else 'each'} group's uploads between two evaluations. "
    caption += "" if whole or len(shares) == 1 else "Honest workers are above, Byzantine workers below. "
    caption += "The axis goes from 0 to 100 %."
    said = paragraph("".join(f"{GROUP_NAMES[group].capitalize()} workers: none refused." for group in whole))
    if any(Reason.MISSING in reasons for reasons in shares.values()):
        caption += " A missing upload did not arrive; it is not refused, and accuses nobody."
    numbers = table(["workers", "reason", "lowest", "highest", "last"], rows)
    page.section(title, said, page.chart(run_charts.unused(record.curve), label, caption, numbers))


def _byzantine_weight(page: Page, timeline: Timeline | None) -> None:
    if timeline is None or timeline.byzantine_weight is None or not timeline.all_workers["byzantine"]:
        return
    found = timeline.byzantine_weight
    numbers = table(
        ["", "weight"],
        [("lowest", f"{found.min():.4f}"), ("mean", f"{found.mean():.4f}"), ("highest", f"{found.max():.4f}")],
    )
    label = f"Weight of Byzantine uploads over the rounds: from {found.min():.3f} to {found.max():.3f}"
    caption = "The share of the update that came from Byzantine uploads. The axis goes from 0 to 1."
    if timeline.binned:
        caption += " A point is the mean over the rounds of a column of the verdicts."
    page.section(
        "Weight of Byzantine uploads", page.chart(run_charts.byzantine_weight(timeline), label, caption, numbers)
    )


def _scores(page: Page, record: RunRecord, timeline: Timeline | None) -> None:
    if record.verdicts is None or timeline is None:
        return
    scores = record.verdicts.scores
    if not np.nan_to_num(scores, nan=0.0, posinf=1.0, neginf=1.0).any():
        page.section("Scores", paragraph("This aggregator does not rank uploads: every score is 0."))
        return
    said = ["The score by which the aggregator ranks uploads. The scale is its own, and the axis need not begin at 0."]
    if timeline.binned:
        said.append("A point is the mean over the rounds of a column of the verdicts.")
    with np.errstate(over="ignore"):
        rows = [
            [GROUP_NAMES[group], *(f"{value:.4g}" for value in _low_median_high(scores[:, mask]))]
            for group, mask in zip(GROUPS, (~record.verdicts.byzantine, record.verdicts.byzantine), strict=True)
            if mask.any()
        ]
    label = "Score of each worker over the rounds. " + "; ".join(
        f"{group}: from {low} to {high}, median {middle}" for group, low, middle, high in rows
    )
    numbers = table(["workers", "lowest", "median", "highest"], rows)
    caption = " ".join(said + _left_out(timeline))
    page.section("Scores", page.chart(run_charts.scores(timeline), label, caption, numbers))


def _low_median_high(scores: np.ndarray) -> tuple[float, float, float]:
    finite = scores[np.isfinite(scores)].astype(np.float64)
    return (float(finite.min()), float(np.median(finite)), float(finite.max())) if finite.size else (np.nan,) * 3


def _privacy(page: Page, record: RunRecord) -> None:
    spent = privacy_spent(record)
    if not spent.rounds:
        page.section("Privacy spent", paragraph(spent.note))
        return
    numbers = table(
        ["rounds", "epsilon"], [(at, rounded(cost, 4)) for at, cost in zip(spent.rounds, spent.epsilons, strict=True)]
    )
    label = (
        f"Epsilon over the rounds: 0 before the first, {rounded(spent.epsilons[-1], 3)} after round {spent.rounds[-1]}"
    )
    page.section("Privacy spent", page.chart(run_charts.privacy(spent), label, spent.note, numbers))


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        rows += _flat(value, f"{before}{key} ") if isinstance(value, dict) else [(f"{before}{key}", str(value))]
    return rows
