"""docs/federation.md says what the code says: settings and defaults, statuses, events, metrics, limits."""

import dataclasses
import re
from pathlib import Path

import pytest

from noisegate.federation import connections, logs, reception, streams, terms
from noisegate.federation.checkpoint import STATUSES, ServerCheckpoint, Totals
from noisegate.federation.metrics import text_of
from noisegate.federation.policy import Policy
from noisegate.federation.roster import MOST_WORKERS
from noisegate.federation.settings import ServerSettings
from noisegate.federation.wire import HEADER
from noisegate.federation.worker_folder import WorkerFolder

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "noisegate" / "federation"
REQUIRED = "must be given"


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table in a section, without its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def default_of(entry: dataclasses.Field) -> str:
    """A default as the page writes it."""
    if entry.default is dataclasses.MISSING:
        return REQUIRED
    if entry.default is None:
        return "none"
    if isinstance(entry.default, str):
        return f'"{entry.default}"'
    return "[]" if entry.default == () else repr(entry.default)


@pytest.mark.parametrize(
    ("file", "kind"), [("federation.toml", ServerSettings), ("worker.toml", WorkerFolder), ("policy.toml", Policy)]
)
def test_the_tables_of_settings_are_the_settings(file, kind):
    written = {row[0].strip("`"): row[1] for row in rows(file)}
    found = {entry.name: default_of(entry) for entry in dataclasses.fields(kind) if entry.name != "folder"}
    if kind is WorkerFolder:
        found["ledger"] = '"ledger"'  # read() fills it in: the field is a path
    assert written == found


def test_every_status_is_explained():
    assert tuple(row[0].strip("`") for row in rows("Statuses")) == STATUSES


def test_every_event_is_explained():
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py"))
    said = set(re.findall(r'\.say(?:_of_peer)?\(\s*"([^"]+)"', text))
    said |= set(re.findall(r'(?:now|self)\.tell\("(gather|collect|paused|done)"', text))
    assert {"started", "joined", "paused"} <= said
    written = {word for row in rows("Events in `log.jsonl`") for word in re.findall(r"`([^`]+)`", row[0])}
    assert written == said


def test_every_metric_is_explained():
    one = {**vars(ServerCheckpoint.first(0, None, 1).standings[0]), "rounds": Totals().rounds}  # type: ignore[arg-type]
    status = {
        **{"round": 1, "judged": 1, "rounds": 2, "connected": [], "state": "collect", "stall_left": 1.0},
        **{"seconds": 1.0, "accuracy": 0.5},
        "workers": {"w01": one | {"weight_total": 0.5, "connected": True}},
    }
    told = set(re.findall(r"^# TYPE (\w+)", text_of(status), re.MULTILINE))
    assert {row[0].strip("`") for row in rows("Metrics")} == told


def test_the_limits_are_those_of_the_code():
    limits = section("Limits")
    for number in (MOST_WORKERS, terms.MOST_ROUNDS, terms.MOST_PARAMETERS, reception.SLACK):
        assert f"{number:,}" in limits
    assert f"{HEADER.size} + 4 d + {reception.SLACK:,} bytes" in limits
    assert f"read in a round | {streams.MESSAGES}." in limits
    assert f"{streams.IN_FLIGHT // 2**20} MiB (or {streams.FEWEST} models)" in limits
    assert f"ends after {reception.HELLO_TIME:g} seconds" in limits
    assert f"{connections.MOST_CONNECTIONS:,}, or 4 n + 64" in limits
    assert f"{logs.BURST} lines at once and {logs.PER_SECOND:g} a second" in PAGE
