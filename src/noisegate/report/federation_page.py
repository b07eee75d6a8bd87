"""The page of a server folder: what became of every worker's uploads. Who is hostile it knows of a trial alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from noisegate.checks import plain
from noisegate.deploy import layout
from noisegate.deploy.status import ServerStatus, read_record, read_result, read_status
from noisegate.deploy.trial import read_hostile
from noisegate.errors import NoisegateError, StoreError
from noisegate.federation.checkpoint import STATUSES
from noisegate.federation.settings import ServerSettings
from noisegate.federation.store import RECORD
from noisegate.redteam.plot import part
from noisegate.report import federation_charts as charts
from noisegate.report.page import Page, bullets, headline, paragraph, table
from noisegate.report.words import Verdict, verdict_section


@dataclass(frozen=True)
class ServerRecord:
    """A server folder as it was found. rounds: the lines of rounds.jsonl. hostile: None unless it is a trial's."""

    path: Path
    settings: ServerSettings
    names: list[str]
    rounds: list[dict[str, Any]]
    status: ServerStatus | None
    result: dict[str, Any] | None
    hostile: tuple[str, ...] | None
    problems: list[str] = field(default_factory=list)


def read_server(path: Path) -> ServerRecord:
    """Read a server folder, or the trial's above it. StoreError if its settings cannot be read."""
    server = layout.server_folder(path)
    problems: list[str] = []
    try:
        settings = ServerSettings.read(server / layout.SETTINGS)
    except NoisegateError as error:
        raise StoreError(f"{plain(server)}: its settings cannot be read ({plain(error)})") from None
    rounds, damaged = read_record(server / "state" / RECORD)
    if damaged:
        problems.append(f"{RECORD} is damaged: {damaged} of {len(rounds) + damaged} lines are left out.")
    status = _or_none(read_status, server, problems)
    result, hostile = _or_none(read_result, server, problems), None
    if home := layout.trial_of(server):
        try:
            hostile = read_hostile(home)
        except NoisegateError as error:
            problems.append(f"{layout.TRIAL} cannot be read: who is hostile is not known ({plain(error)[:100]}).")
    names = list(dict.fromkeys(name for line in rounds for name in line["workers"]))
    return ServerRecord(server, settings, names, rounds, status, result, hostile, problems)


Found = TypeVar("Found")


def _or_none(read: Callable[[Path], Found], server: Path, problems: list[str]) -> Found | None:
    """What is read, or None with a sentence on the page if it is damaged."""
    try:
        return read(server)
    except StoreError as error:
        problems.append(f"{plain(error)[:200]}; it is left out.")
        return None


def federation_page(record: ServerRecord) -> Page:
    """The page of a server, whether its run is over or not."""
    settings, status = record.settings, record.status
    judged = f"{len(record.rounds):,} of {settings.rounds:,} rounds, {len(record.names)} workers"
    page = Page(f"Federation: {settings.title or record.path.resolve().name}", judged)
    said = []
    if record.result is None:
        state = "is running" if status and status.running else "is not running"
        said.append(f"This run is not over; its server {state}.")
    elif record.result.get("why"):
        said.append(f"This run ended early: {plain(record.result['why'])}.")
    if said or record.problems:
        page.section("Incomplete", *map(paragraph, said), bullets(record.problems) if record.problems else "")
    verdict_section(page, _words(record))
    page.section("Summary", headline(_headline(record)))
    if not record.rounds:
        page.section("Rounds", paragraph("No round was judged yet."))
    else:
        _accuracy(page, record)
        _weights(page, record)
        _statuses(page, record)
        _waits(page, record)
        page.section("Workers", table(*_workers(record)))
    page.section("Privacy", *_privacy(record))
    page.section("Settings", table(["setting", "value"], _settings(settings), label="settings"))
    return page


def weights_of(record: ServerRecord) -> np.ndarray:
    """(workers, rounds) each worker's weight; 0 where its upload was not used."""
    found = np.zeros((len(record.names), len(record.rounds)))
    for column, line in enumerate(record.rounds):
        for row, name in enumerate(record.names):
            found[row, column] = line["workers"].get(name, {}).get("weight", 0.0)
    return found


def counts_of(record: ServerRecord) -> dict[str, dict[str, int]]:
    """How many rounds of each worker had each status."""
    counts = {name: dict.fromkeys(STATUSES, 0) for name in record.names}
    for line in record.rounds:
        for name, fate in line["workers"].items():
            counts[name][fate["status"]] += 1
    return counts


def label_of(record: ServerRecord, name: str) -> str:
    """A worker's name, and that it is hostile where that is known."""
    return f"{name} (hostile)" if record.hostile and name in record.hostile else name


def _words(record: ServerRecord) -> Verdict:
    """How the run stands, and what became of the uploads."""
    taken = [(line["round"], line["accuracy"]) for line in record.rounds if line.get("accuracy") is not None]
    first = f"{len(record.rounds):,} of {record.settings.rounds:,} rounds are judged; the accuracy was not taken yet."
    if taken:
        at, accuracy = taken[-1]
        of = f"of {record.settings.rounds:,}"
        first = f"After round {at + 1} {of} the model is right on {accuracy:.1%} of the test examples."
    counts = counts_of(record)
    totals = {word: sum(found[word] for found in counts.values()) for word in STATUSES}
    due = sum(totals.values())
    told = [f"{totals[word]:,} {word}" for word in STATUSES if totals[word]]
    return first, [f"Of {due:,} uploads that were due: {', '.join(told)}."] if due else []


def _headline(record: ServerRecord) -> list[tuple[str, str, str]]:
    settings = record.settings
    taken = [(line["round"], line["accuracy"]) for line in record.rounds if line.get("accuracy") is not None]
    shown = [("accuracy", "–", "not taken yet")]
    if taken:
        shown = [("accuracy", f"{taken[-1][1]:.3f}", f"after round {taken[-1][0] + 1}")]
    if record.hostile and record.rounds:
        found = weights_of(record)
        total = float(found.sum())
        theirs = sum(float(found[row].sum()) for row, name in enumerate(record.names) if name in record.hostile)
        share = f"{theirs / total:.1%}" if total else "–"
        shown.append(("weight of hostile workers", share, f"{len(record.hostile)} of {len(record.names)} workers"))
    if settings.epsilon is not None and settings.delta is not None:
        shown.append(("epsilon", f"{settings.epsilon:g}", f"stated for all rounds, delta {settings.delta:.2g}"))
    if fallen := sum(line.get("fell_back") is True for line in record.rounds):
        shown.append(("rounds fallen back", f"{fallen:,}", "in which the aggregator used a simpler rule"))
    waits = [_second(line, "wait") for line in record.rounds]
    known = [wait for wait in waits if wait is not None]
    if known:
        shown.append(("waiting", f"{sum(known):.1f} s", f"for uploads, longest round {max(known):.2f} s"))
    return shown


def _accuracy(page: Page, record: ServerRecord) -> None:
    taken = [(line["round"] + 1, line["accuracy"]) for line in record.rounds if line.get("accuracy") is not None]
    if not taken:
        page.section("Accuracy over the rounds", paragraph("The accuracy was not taken yet."))
        return
    label = f"Accuracy over the rounds: {taken[0][1]:.3f} after round {taken[0][0]}, {taken[-1][1]:.3f} at the end"
    numbers = table(["round", "accuracy"], [(at, f"{value:.4f}") for at, value in taken])
    chart = charts.accuracy(taken, record.settings.rounds)
    page.section("Accuracy over the rounds", page.chart(chart, label, "The axis goes from 0 to 1.", numbers))


def _weights(page: Page, record: ServerRecord) -> None:
    found, at = weights_of(record), [line["round"] + 1 for line in record.rounds]
    names = [label_of(record, name) for name in record.names]
    binned, spans = charts.binned(found, at)
    means = [f"{name} {row.mean():.3f}" for name, row in zip(names, found, strict=True)]
    caption = "A row is a worker; the stronger the color, the more its uploads weigh in the model."
    if len(spans) < len(at):
        caption += " A column is the mean over some rounds."
    rows = [(name, f"{row.mean():.4f}") for name, row in zip(names, found, strict=True)]
    numbers = table(["worker", "mean weight"], rows)
    label = f"Weight of each worker over the rounds. Means: {', '.join(means[:50])}"
    page.section("Weights", page.chart(charts.weights(names, binned, spans), label, caption, numbers))


def _statuses(page: Page, record: ServerRecord) -> None:
    counts = counts_of(record)
    names = [label_of(record, name) for name in record.names]
    shares = {word: [counts[name][word] for name in record.names] for word in STATUSES}
    met = {word: found for word, found in shares.items() if any(found)}
    label = "What became of each worker's rounds: " + "; ".join(f"{word} {sum(found)}" for word, found in met.items())
    numbers = table(["worker", *met], [(name, *(met[word][row] for word in met)) for row, name in enumerate(names)])
    caption = "A missing upload did not arrive, and a late one came too late; neither accuses anybody."
    page.section("Statuses", page.chart(charts.statuses(names, met), label, caption, numbers))


def _waits(page: Page, record: ServerRecord) -> None:
    known = [(line["round"] + 1, wait) for line in record.rounds if (wait := _second(line, "wait")) is not None]
    if not known:
        return
    waits = np.array([wait for _, wait in known])
    label = f"Seconds that each round waited for uploads: median {np.median(waits):.3f}, longest {waits.max():.3f}"
    rows = [(word, f"{value:.3f}") for word, value in (("median", np.median(waits)), ("longest", waits.max()))]
    cap = record.settings.stall + record.settings.rounds * record.settings.least
    caption = f"Workers can hold the whole run up by at most {cap:g} s (stall + rounds * least)."
    page.section("Waits", page.chart(charts.waits(known), label, caption, table(["", "seconds"], rows)))


def _workers(record: ServerRecord) -> tuple[list[str], list[list[Any]]]:
    counts, found = counts_of(record), weights_of(record)
    rows = []
    for row, name in enumerate(record.names):
        reasons: dict[str, int] = {}
        for line in record.rounds:
            if (why := line["workers"].get(name, {}).get("reason")) is not None:
                reasons[str(why)] = reasons.get(str(why), 0) + 1
        why = ", ".join(f"{plain(word)} {times}" for word, times in sorted(reasons.items()))
        told = [counts[name][word] for word in STATUSES]
        rows.append([label_of(record, name), f"{found[row].mean():.4f}", *told, why])
    return ["worker", "mean weight", *STATUSES, "refused for"], rows


def _privacy(record: ServerRecord) -> list[str]:
    settings = record.settings
    noise = (
        f"In every round a worker draws each of its examples with a rate of {settings.batch} in {settings.declared} "
        f"(Poisson), and adds Gaussian noise with multiplier {settings.sigma:.6g} before anything leaves it."
    )
    stated = "The server states no price."
    if settings.epsilon is not None and settings.delta is not None:
        up = math.ceil(settings.epsilon * 1e4) / 1e4
        stated = (
            f"For all {settings.rounds:,} rounds it states a price of epsilon {up:g} at delta {settings.delta:g} for "
            "one example of one worker (add or remove). What a worker has spent, in this run and in others, stands in "
            "its own ledger alone: `noisegate ledger show`."
        )
    beside = "This page, the verdicts and the accuracy are the operator's. They are not covered by that promise."
    return [paragraph(words) for words in (noise, stated, beside)]


def _settings(settings: ServerSettings) -> list[tuple[str, str]]:
    shown = {name: value for name, value in vars(settings).items() if name != "folder"}
    told = {
        name: part(value) if isinstance(value, dict) and "name" in value else value for name, value in shown.items()
    }
    return [(name, plain(value)) for name, value in told.items() if value not in (None, "")]


def _second(line: dict[str, Any], name: str) -> float | None:
    value = line.get("seconds", {}).get(name)
    return float(value) if value is not None else None
