"""Tables that compare our runs with the paper: as rows, as Markdown, and as a page of the documentation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from noisegate.paper import Experiment, label
from noisegate.paper.claims import PaperClaim
from noisegate.paper.outcomes import CellOutcome, CellVerdict, Record, needed, tolerance
from noisegate.runs import estimate


def columns(experiment: Experiment, found: Sequence[CellOutcome]) -> list[str]:
    """The names of a table's columns: the settings that vary, then the numbers."""
    keys = list(dict.fromkeys(key for outcome in found for key in outcome.cell.varies))
    known = {
        "reference": experiment.judged == "beside",
        "paper": any(outcome.cell.printed is not None for outcome in found),
        "authors' logs": any(outcome.cell.logged is not None for outcome in found),
        "rival": bool(experiment.rival),
    }
    return [*keys, *(name for name, there in known.items() if there), "ours", "difference", "verdict"]


def rows(experiment: Experiment, found: Sequence[CellOutcome]) -> list[list[str]]:
    """A table's rows, one for every cell, run or not."""
    return [[_entry(name, outcome) for name in columns(experiment, found)] for outcome in found]


def _entry(name: str, outcome: CellOutcome) -> str:
    cell = outcome.cell
    if name == "paper":
        return _number(cell.printed, 2)
    if name == "authors' logs":
        return f"{cell.logged.mean:.3f} ({cell.logged.lowest:.3f} to {cell.logged.highest:.3f})" if cell.logged else ""
    if name == "reference":
        return _number(outcome.beside, 3)
    if name == "rival":
        return _number(cell.rival, 2)
    if name == "ours":
        return _ours(outcome)
    if name == "difference":
        return "" if outcome.difference is None else f"{100 * outcome.difference:+.1f}"
    if name == "verdict":
        return _verdict(outcome)
    return label(cell.varies[name]) if name in cell.varies else ""


def _ours(outcome: CellOutcome) -> str:
    if outcome.mean is None:
        return ""
    spread = f" ({min(outcome.accuracies):.3f} to {max(outcome.accuracies):.3f})" if len(outcome.accuracies) > 1 else ""
    return f"{outcome.mean:.3f}{spread}"


def _verdict(outcome: CellOutcome) -> str:
    allowed, reference = tolerance(outcome.cell), outcome.cell.judged == "reference"
    if outcome.verdict == "within":
        above = not reference and outcome.difference is not None and 100 * outcome.difference > (allowed or 0.0)
        return "not below" if above else f"within {allowed:g}"
    if outcome.verdict in ("outside", "departs"):
        words = f"{outcome.verdict}: more than {allowed:g} {'off' if reference else 'below'}"
        return f"{words}; {outcome.note}" if outcome.note else words
    reason = f" ({outcome.cell.reason})" if outcome.verdict == "impossible" and outcome.cell.reason else ""
    return f"{outcome.verdict}: {outcome.note}{reason}" if outcome.note else outcome.verdict


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def markdown(experiment: Experiment, found: Sequence[CellOutcome]) -> str:
    """A table with its title and its place in the paper. Cells that were not run are in a folded table below it."""
    lines = [f"## {experiment.title}", "", f"{experiment.about} In the paper: {experiment.paper}."]
    if experiment.rival:
        lines.append(f"Rival: {experiment.rival}.")
    known = [outcome for outcome in found if not _not_run(outcome)]
    if known:
        lines += ["", *_grid(experiment, known)]
    if left := [outcome for outcome in found if _not_run(outcome)]:
        few = f"{len(left)} of {len(found)} cells are missing: not run yet"
        lines += ["", f"<details><summary>{few}</summary>", "", *_grid(experiment, left), "", "</details>"]
    return "\n".join(lines) + "\n"


def _not_run(outcome: CellOutcome) -> bool:
    return outcome.verdict == "missing" and not outcome.accuracies


def _grid(experiment: Experiment, found: Sequence[CellOutcome]) -> list[str]:
    """The lines of a Markdown table."""
    names = columns(experiment, found)
    lines = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    return lines + [f"| {' | '.join(map(_inline, row))} |" for row in rows(experiment, found)]


def _inline(text: str) -> str:
    """`text` in one line, with `|` escaped, as a cell of a Markdown table needs it."""
    return " ".join(text.split()).replace("|", "\\|")


def summary_markdown(chosen: Sequence[Experiment], found: Mapping[str, Sequence[CellOutcome]]) -> str:
    """A table that counts the cells of each experiment by their verdict."""
    counts = {one.name: Counter(outcome.verdict for outcome in found[one.name]) for one in chosen}
    every = [verdict for verdict in get_args(CellVerdict) if any(verdict in count for count in counts.values())]
    lines = ["## In short", "", f"| table | cells | {' | '.join(every)} |", "| --- |" + " ---: |" * (1 + len(every))]
    for one in chosen:
        numbers = [counts[one.name].total(), *(counts[one.name][verdict] for verdict in every)]
        lines.append(f"| {one.title} (`{one.name}`) | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"


def claims_markdown(found: Sequence[PaperClaim]) -> str:
    """A table of the claims."""
    lines = ["## The seven claims", "", "| | claim | verdict | why |", "| --- | --- | --- | --- |"]
    lines += [f"| {claim.number} | {claim.text} | {claim.verdict} | {claim.why} |" for claim in found]
    return "\n".join(lines) + "\n"


def as_table(experiment: Experiment, found: Sequence[CellOutcome]) -> dict[str, Any]:
    """The table as an entry of tables.json, which `noisegate report` shows."""
    return {
        "title": experiment.title,
        "columns": columns(experiment, found),
        "rows": rows(experiment, found),
        "notes": [f"{experiment.about} In the paper: {experiment.paper}."],
    }


HEAD = """# The paper, reproduced

Generated by `noisegate reproduce`, with `--docs` and the name of this file{source}. Every table is that of `noisegate
reproduce NAME`. All runs have the paper's delta, |D_i|^-1.1. Accuracy is that of the last round, mean over seeds
(lowest to highest). *Paper* is what its tables print, *authors' logs* the means over seeds of their published logs.
*Difference* is ours less the paper's, or less their logs' where it prints none, in points. A cell within its tolerance
is `within`, or `not below` if it is further above than it may be below; one outside it for a reason on the list of
departures `departs`; one that cannot exist, as an attack that needs more Byzantine workers than there are, is
`impossible`.
"""
"""The beginning of docs/reproducing.md."""


def page(
    chosen: Sequence[Experiment],
    found: Mapping[str, Sequence[CellOutcome]],
    verdicts: Sequence[PaperClaim],
    records: Mapping[str, Record],
    source: str = "",
) -> str:
    """The text of docs/reproducing.md. source: the file that the runs are from."""
    names = {spec.name() for one in chosen for spec in needed(one)}
    used = [record for record in records.values() if record.status == "done" and record.run in names]
    devices = sorted({f"{record.device} ({record.versions})" for record in used})
    head = HEAD.format(source=f", from the runs of `{source}` (`--from`)" if source else "")
    parts = [head, f"Runs: {len(used)}. Made on: {'; '.join(devices) or 'nothing yet'}.\n"]
    parts.append(summary_markdown(chosen, found))
    if verdicts:
        parts.append(claims_markdown(verdicts))
    for one in chosen:
        seconds = sum(records[spec.name()].seconds or 0.0 for spec in needed(one) if spec.name() in records)
        parts.append(markdown(one, found[one.name]))
        parts.append(f"`noisegate reproduce {one.name}`; its runs took {estimate.shown(seconds)} together.\n")
    return "\n".join(parts)
