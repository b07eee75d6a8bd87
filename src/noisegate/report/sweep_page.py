"""The page of a sweep: the settings that vary, the results, and the runs that are missing."""

import os
from pathlib import Path

from noisegate.report import sweep_charts
from noisegate.report.folders import number
from noisegate.report.page import Link, Page, bullets, extra_tables, headline, paragraph, table, text
from noisegate.report.sweeps import (
    MOST_CHARTS,
    STATUSES,
    Facet,
    Group,
    SweepRecord,
    axis_of,
    facets,
    flatten,
    mean,
    show,
)

MOST_RUNS = 300
"""The largest number of rows of the list of runs."""

MOST_GROUPS = 2000
"""The largest number of rows of the results."""

MOST_COURSES = 6
"""The largest number of charts of accuracy over the rounds."""

MOST_PROBLEMS = 20
"""The largest number of problems that are listed."""


def sweep_page(record: SweepRecord, out: Path) -> Page:
    """The page of a sweep folder. out: the file that it will be written to, which its links start from."""
    done, total = record.count("done"), len(record.cells)
    page = Page(f"Sweep: {record.path.resolve().name}", f"{total} runs, {done} of them done")
    problems = record.problems[:MOST_PROBLEMS]
    if len(record.problems) > MOST_PROBLEMS:
        problems.append(f"And {len(record.problems) - MOST_PROBLEMS} more.")
    extra_tables(record.path, page, problems)
    tables, page.pieces = page.pieces, []
    if done < total or problems:
        others = ", ".join(f"{record.count(status)} {status}" for status in STATUSES[1:] if record.count(status))
        words = f"Not every run is done: {others}." if others else ""
        page.section("Incomplete", paragraph(words), bullets(problems) if problems else "", kind="problems")
    page.section("Summary", headline(_headline(record)))
    page.pieces += tables
    _results(page, record)
    _charts(page, record)
    _failures(page, record)
    _runs(page, record, out)
    page.section(
        "Settings of all runs",
        table(["setting", "value"], [(key, show(value)) for key, value in record.common.items()], label="settings"),
    )
    return page


def _headline(record: SweepRecord) -> list[tuple[str, str, str]]:
    shown = [(status, f"{record.count(status)}", f"of {len(record.cells)} runs") for status in STATUSES]
    shown = [entry for entry in shown if entry[0] == "done" or entry[1] != "0"]
    found = [value for group in record.groups for value in group.accuracies]
    if found:
        shown.append(("lowest accuracy", f"{min(found):.3f}", "of all runs that are done"))
        shown.append(("highest accuracy", f"{max(found):.3f}", "of all runs that are done"))
    seeds = len(record.varying.get("seed", [0]))
    shown.append(("settings", f"{len(record.groups)}", f"{'one seed' if seeds == 1 else f'up to {seeds} seeds'} each"))
    return shown


def _results(page: Page, record: SweepRecord) -> None:
    keys = [key for key in record.varying if key != "seed"]
    clean = any(group.references for group in record.groups)
    more = _more_columns(record)
    names = ["mean accuracy", "lowest", "highest", *(["reference"] if clean else []), *more]
    columns = [*keys, *names, "runs done", "status"]
    rows = []
    for i, group in enumerate(record.groups[:MOST_GROUPS]):
        found = group.accuracies
        numbers = [f"{mean(found):.3f}", f"{min(found):.3f}", f"{max(found):.3f}"] if found else ["–"] * 3
        if clean:
            numbers.append(f"{mean(group.references):.3f}" if group.references else "–")
        numbers += [f"{mean(more[name][i]):.3f}" if more[name][i] else "–" for name in more]
        done = f"{group.count('done')} of {len(group.cells)}"
        rows.append([*(show(group.settings[key]) for key in keys), *numbers, done, _status(group)])
    note = "Accuracy after the last round, over the seeds that are done. Other runs are listed and not counted."
    note += " The other columns are means over them, too." if more else ""
    if len(rows) < len(record.groups):
        note += f" {len(record.groups) - len(rows)} more rows are left out."
    page.section("Results", table(columns, rows, label="results"), paragraph(note, "quiet"))


def _more_columns(record: SweepRecord) -> dict[str, list[list[float]]]:
    """The columns beside the accuracy that apply: for each, the values of every group."""
    fallbacks = [group.fallbacks for group in record.groups]
    names = dict.fromkeys(name for group in record.groups for name in group.beside)
    columns = {
        **{name: [group.beside.get(name, []) for group in record.groups] for name in names},
        "lowest recall of a class": [group.recalls for group in record.groups],
        "attack success": [group.successes for group in record.groups],
        "rounds fallen back": fallbacks if any(map(any, fallbacks)) else [],
    }
    return {name: groups for name, groups in columns.items() if any(groups)}


def _status(group: Group) -> str:
    found = [(status, group.count(status)) for status in STATUSES if group.count(status)]
    return found[0][0] if len(found) == 1 else ", ".join(f"{count} {status}" for status, count in found)


def _charts(page: Page, record: SweepRecord) -> None:
    if not any(group.accuracies for group in record.groups):
        page.section("Accuracy", paragraph("No run is done yet."))
        return
    axis = axis_of(record)
    words = "Mean over the seeds that are done; a bar goes from the lowest to the highest. The axis goes from 0 to 1."
    title = f"Accuracy against {axis}" if axis else "Accuracy"
    found = _with_results(facets(record, axis))
    pieces = []
    for facet in found[:MOST_CHARTS]:
        chart = sweep_charts.against(facet, axis) if axis else sweep_charts.ranges(facet)
        pieces.append(_framed(facet, page.chart(chart, _told(facet, title))))
    page.section(title, _side_by_side(pieces), paragraph(words, "quiet"), paragraph(_rest(found, MOST_CHARTS), "quiet"))
    found = [facet for facet in facets(record, None) if any(group.curve for _, group in _pairs(facet))]
    if not found:
        return
    pieces = []
    title = "Accuracy over the rounds"
    for facet in found[:MOST_COURSES]:
        pieces.append(_framed(facet, page.chart(sweep_charts.courses(facet), _told(facet, title))))
    words = "The mean over the seeds that are done, at rounds at which all were evaluated. The axis goes from 0 to 1."
    rest = _rest(found, MOST_COURSES)
    page.section(title, _side_by_side(pieces), paragraph(words, "quiet"), paragraph(rest, "quiet"))


def _with_results(found: list[Facet]) -> list[Facet]:
    return [facet for facet in found if any(group.accuracies for _, group in _pairs(facet))]


def _pairs(facet: Facet) -> list[tuple[str, Group]]:
    return [(label, group) for label, groups in facet.lines.items() for group in groups]


def _framed(facet: Facet, chart: str) -> str:
    heading = f"<h3>{text(facet.title)}</h3>" if facet.title else ""
    return f"<div>{heading}{chart}</div>"


def _side_by_side(pieces: list[str]) -> str:
    return f'<div class="charts">{"".join(pieces)}</div>' if len(pieces) > 1 else "".join(pieces)


def _told(facet: Facet, title: str) -> str:
    lines = []
    for label, groups in facet.lines.items():
        values = [mean(group.accuracies) for group in groups if group.accuracies]
        if values:
            lines.append(f"{label}: {min(values):.3f} to {max(values):.3f}")
    where = f", {facet.title}" if facet.title else ""
    return f"{title}{where}. " + "; ".join(lines)


def _rest(found: list[Facet], most: int) -> str:
    left = len(found) - most
    return f"{left} more charts are left out; the table of results has their last points." if left > 0 else ""


def _failures(page: Page, record: SweepRecord) -> None:
    broken = [cell for cell in record.cells if cell.status in ("failed", "skipped")]
    if not broken:
        return
    rows = [[cell.spec.name(), cell.status, cell.message] for cell in broken[:MOST_RUNS]]
    left = len(broken) - len(rows)
    page.section(
        "Failed and skipped",
        table(["run", "status", "message"], rows, label="failed and skipped runs"),
        paragraph(f"{left} more are left out." if left else "", "quiet"),
    )


def _runs(page: Page, record: SweepRecord, out: Path) -> None:
    from noisegate.sweeps.sweep import SweepFolder

    folder = SweepFolder(record.path)
    rows: list[list[str | Link]] = []
    keys = list(record.varying)
    for group in record.groups:
        for cell in group.cells:
            if len(rows) == MOST_RUNS:
                break
            flat = flatten(cell.spec)
            settings = [show(flat.get(key)) for key in keys]
            result = cell.result or {}
            accuracy = f"{result['accuracy']:.3f}" if number(result.get("accuracy")) else "–"
            seconds = f"{result['seconds']:.1f}" if number(result.get("seconds")) else "–"
            report = folder.run_path(cell.spec) / "report.html"
            name = cell.spec.name()
            link = Link(name, _relative(report, out)) if report.exists() else name
            rows.append([link, *settings, accuracy, seconds, cell.status])
    left = len(record.cells) - len(rows)
    note = (
        "The verdicts, scores and privacy of a single run have a page of their own: `noisegate report` on its folder "
        "below runs/ makes it, and this list links to it from then on."
    )
    more = f" {left} more runs are left out of this list; the results above count all of them." if left else ""
    page.section(
        "Runs",
        table(["run", *keys, "accuracy", "seconds", "status"], rows, label="runs"),
        paragraph(note + more, "quiet"),
    )


def _relative(target: Path, out: Path) -> str:
    return Path(os.path.relpath(target.resolve(), out.resolve().parent)).as_posix()
