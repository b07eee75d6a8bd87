"""The page of a sweep: the settings that vary, the results, and the runs that are missing."""

import os
from pathlib import Path

from noisegate.report import sweep_charts
from noisegate.report.facets import MOST_CHARTS, Facet, attack_maps, axes_of, facets
from noisegate.report.folders import number
from noisegate.report.page import Link, Page, Shade, bullets, extra_tables, headline, paragraph, table, text
from noisegate.report.sweeps import (
    STATUSES,
    Group,
    SweepRecord,
    flatten,
    mean,
    show,
)
from noisegate.report.words import of_sweep, verdict_section

MOST_RUNS = 300
"""The largest number of rows of the list of runs."""

MOST_GROUPS = 2000
"""The largest number of rows of the results."""

MOST_COURSES = 6
"""The largest number of charts of accuracy over the rounds."""

MOST_PROBLEMS = 20
"""The largest number of problems that are listed."""

BESIDE = {
    "reference": "Reference: the same private training, honest workers only, plain mean.",
    "no privacy": "No privacy: the runs of this sweep that add no noise.",
    "the paper, no attack": "The paper: what it prints for this data set, with its own workers and rounds.",
}
"""What is said of the lines that others are compared with."""


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
    verdict_section(page, of_sweep(record))
    page.section("Summary", headline(_headline(record)))
    page.pieces += tables
    _maps(page, record)
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
    clean = any(group.references and group.references != group.accuracies for group in record.groups)
    more = _more_columns(record)
    several = any(len(group.cells) > 1 for group in record.groups)
    whole = all(cell.status == "done" for cell in record.cells)
    names = ["mean accuracy", "lowest", "highest"] if several else ["accuracy"]
    names += [*(["reference"] if clean else []), *more]
    columns = [*keys, *names, *(["runs done"] if several else []), *([] if whole else ["status"])]
    rows = []
    for i, group in enumerate(record.groups[:MOST_GROUPS]):
        found = group.accuracies
        spread = (mean(found), min(found), max(found)) if several and found else tuple(found[:1])
        numbers = [f"{value:.3f}" for value in spread] or ["–"] * (3 if several else 1)
        if clean:
            numbers.append(f"{mean(group.references):.3f}" if group.references else "–")
        numbers += [f"{mean(more[name][i]):.3f}" if more[name][i] else "–" for name in more]
        numbers += [f"{group.count('done')} of {len(group.cells)}"] if several else []
        rows.append([*(_setting(group, key) for key in keys), *numbers, *([] if whole else [_status(group)])])
    note = "Accuracy after the last round"
    note += ", over the seeds that are done. Other runs are listed and not counted." if several else "."
    note += " The other columns are means over them, too." if more and several else ""
    if len(rows) < len(record.groups):
        note += f" {len(record.groups) - len(rows)} more rows are left out."
    page.section("Results", table(columns, rows, label="results"), paragraph(note, "quiet"))


def _setting(group: Group, key: str) -> str:
    """A setting in words; a dash for one that the group's attack or aggregator does not have."""
    value = group.settings[key]
    if key == "epsilon" and not group.private:
        return "none"
    return "–" if value is None and "." in key else show(value)


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
    for axis in axes_of(record):
        _against(page, record, axis)
    if not axes_of(record) and not attack_maps(record):
        _against(page, record, None)
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


def _against(page: Page, record: SweepRecord, axis: str | None) -> None:
    """The accuracy against a setting, or that of each setting where none is a number."""
    title = f"Accuracy against {axis}" if axis else "Accuracy"
    found = _with_results(facets(record, axis))
    pieces = []
    for facet in found[:MOST_CHARTS]:
        chart = sweep_charts.against(facet, axis) if axis else sweep_charts.ranges(facet)
        pieces.append(_framed(facet, page.chart(chart, _told(facet, title), "", _numbers(facet, axis))))
    words = "The axis goes from 0 to 1."
    if any(len(group.cells) > 1 for group in record.groups):
        words = f"Mean over the seeds that are done; a bar goes from the lowest to the highest. {words}"
    met = {name.partition(" of ")[0] for facet in found for name in facet.beside}
    words += "".join(f" {BESIDE[name]}" for name in BESIDE if name in met)
    page.section(title, _side_by_side(pieces), paragraph(words, "quiet"), paragraph(_rest(found, MOST_CHARTS), "quiet"))


def _numbers(facet: Facet, axis: str | None) -> str:
    """The numbers of a chart with lines beside its own, which the table of results does not have."""
    if axis is None or not facet.beside:
        return ""
    own = {
        name: [(float(group.settings[axis]), mean(group.accuracies)) for group in groups if group.accuracies]
        for name, groups in facet.lines.items()
    }
    lines = {name: dict(points) for name, points in (*own.items(), *facet.beside.items())}
    at = sorted({x for points in lines.values() for x in points})
    rows = [(f"{x:g}", *(f"{points[x]:.3f}" if x in points else "–" for points in lines.values())) for x in at]
    return table([axis, *lines], rows)


def _maps(page: Page, record: SweepRecord) -> None:
    """The accuracy by attack and aggregator."""
    maps = attack_maps(record)
    pieces = []
    for found in maps[:MOST_CHARTS]:
        rows = [
            (attack, *(_shade(found.values.get((attack, aggregator))) for aggregator in found.aggregators))
            for attack in found.attacks
        ]
        heading = f"<h3>{text(found.title)}</h3>" if found.title else ""
        label = "mean accuracy by attack and aggregator" + (f", {found.title}" if found.title else "")
        pieces.append(f"<div>{heading}{table(['attack', *found.aggregators], rows, label=label)}</div>")
    if pieces:
        words = "A row is an attack, a column an aggregator; the stronger the color, the higher the mean accuracy."
        page.section(
            "Attacks and aggregators",
            _side_by_side(pieces),
            paragraph(words, "quiet"),
            paragraph(f"{len(maps) - MOST_CHARTS} more maps are left out." if len(maps) > MOST_CHARTS else "", "quiet"),
        )


def _shade(value: float | None) -> Shade | str:
    return "–" if value is None else Shade(f"{value:.3f}", value)


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
