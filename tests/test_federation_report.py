"""`noisegate report` on a server folder: what the page says, and what it must not say."""

import json
import shutil
from dataclasses import replace

import plotly.offline
import pytest

from noisegate import Spec, SpecError, StoreError
from noisegate.deploy.init import make_trial
from noisegate.federation import Server
from noisegate.report import report
from noisegate.report.federation_charts import MOST_COLUMNS, binned
from noisegate.report.federation_page import counts_of, federation_page, read_server, weights_of
from test_report import Reader

SPEC = Spec(workers=2, byzantine=0.34, rounds=300, sigma=2.5, sigma_base=2.5, batch=16, aggregator="mean", rate=0.2)
FATES = {
    "w01": {"status": "used", "weight": 0.75},
    "w02": {"status": "refused", "reason": "norm"},
    "w03": {"status": "used", "weight": 0.25},
}


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    """A few bytes in place of plotly's 5 MB, which take most of the time."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "/* plotly */")


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A trial whose server left these rounds."""
    made = make_trial(SPEC, tmp_path_factory.mktemp("report") / "fed", 7443)
    state = made.server / "state"
    state.mkdir()
    write(state, [line(i) for i in range(300)])
    return made


def line(i, **changes):
    """A judged round."""
    own = {"round": i, "digest": "0" * 64, "workers": FATES, "ignored": {}, "seconds": {"wait": 0.5, "judge": 0.1}}
    if i % 50 == 49:
        own["accuracy"] = 0.5 + i / 1000
    return own | changes


def write(state, lines):
    (state / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def test_the_page_has_what_an_operator_asks_for(trial):
    page = Reader(report(trial.server))
    (hostile,) = trial.hostile
    assert "0.799" in page.text
    assert f"{hostile} (hostile)" in page.text
    assert "300 of 300 rounds, 3 workers" in page.text
    assert "After round 300 of 300 the model is right on 79.9% of the test examples." in page.text
    assert "Of 900 uploads that were due: 600 used, 300 refused." in page.text
    assert "epsilon" in page.text
    assert "norm 300" in page.text
    accuracy = page.chart("Accuracy over the rounds")["data"][0]
    assert accuracy["x"] == [50, 100, 150, 200, 250, 300]
    assert accuracy["y"][-1] == pytest.approx(0.799)
    weights = page.chart("Weight of each worker")["data"][0]
    assert len(weights["z"]) == 3
    assert len(weights["x"]) == MOST_COLUMNS
    assert set(weights["z"][0]) == {0.75}
    statuses = page.chart("What became of each worker's rounds")["data"]
    assert {one["name"]: one["x"] for one in statuses} == {"used": [300, 0, 300], "refused": [0, 300, 0]}
    waits = page.chart("Seconds that each round waited")["data"][0]
    assert set(waits["y"]) == {0.5}
    assert all(tag not in ("img", "link", "iframe") and "src" not in about for tag, about in page.tags)


def test_the_trials_folder_gives_the_same_page(trial):
    assert report(trial.folder) == report(trial.server)


def test_nobody_is_called_hostile_where_only_the_server_is_there(trial, tmp_path):
    for path in trial.server.rglob("*"):
        if path.is_file() and path.suffix != ".key":
            (tmp_path / path.relative_to(trial.server)).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / path.relative_to(trial.server)).write_bytes(path.read_bytes())
    assert "hostile" not in Reader(report(tmp_path)).text


def test_numbers_are_those_of_the_record(trial):
    record = read_server(trial.server)
    assert weights_of(record).mean(axis=1).tolist() == [0.75, 0.0, 0.25]
    assert counts_of(record)["w02"]["refused"] == 300
    means, spans = binned(weights_of(record), list(range(1, 301)))
    assert means.shape == (3, MOST_COLUMNS)
    assert spans[0] == (1, 2)
    assert spans[-1][1] == 300


def test_a_run_that_is_not_over_or_damaged_gives_a_page_that_says_so(trial, tmp_path):
    settings = (trial.server / "federation.toml").read_bytes()
    (tmp_path / "federation.toml").write_bytes(settings)
    assert "No round was judged yet" in Reader(report(tmp_path)).text
    (tmp_path / "state").mkdir()
    write(tmp_path / "state", [line(0), {"round": "x"}, line(1, workers={"<script>": {"status": "used"}})])
    for name in ("status.json", "result.json"):
        (tmp_path / "state" / name).write_text("{")
    page = Reader(report(tmp_path))
    assert "2 of 3 lines are left out" in page.text
    assert "status.json" in page.text
    assert "result.json" in page.text
    assert "is not over" in page.text
    assert "The accuracy was not taken yet" in page.text
    (tmp_path / "federation.toml").write_text("x = 1")
    with pytest.raises(StoreError, match="settings cannot be read"):
        report(tmp_path)


def test_it_says_in_how_many_rounds_the_aggregator_fell_back(trial, tmp_path):
    assert "fallen back" not in Reader(report(trial.server)).text
    (tmp_path / "federation.toml").write_bytes((trial.server / "federation.toml").read_bytes())
    (tmp_path / "state").mkdir()
    write(tmp_path / "state", [line(i, **({"fell_back": True} if i in (2, 3, 7) else {})) for i in range(9)])
    assert "rounds fallen back 3 in which the aggregator used a simpler rule" in Reader(report(tmp_path)).text


def test_what_a_title_says_is_shown_as_text(trial):
    record = read_server(trial.server)
    odd = replace(record, settings=replace(record.settings, title="<b>bold</b>"))
    page = federation_page(odd).html()
    assert "<b>bold</b>" not in page
    assert "<b>bold</b>" in Reader(page).text


def test_a_server_has_no_figures_and_is_not_watched(trial, cli, tmp_path):
    answer = cli("report", trial.server, "--out", tmp_path / "page.html", "--figures", tmp_path / "figures")
    assert (answer.status, "no figures" in answer.err) == (2, True), answer.err
    answer = cli("watch", trial.server, "--once")
    assert (answer.status, "federation status" in answer.err) == (2, True), answer.err


def test_no_code_is_loaded_that_a_folder_names(trial, tmp_path, monkeypatch):
    (tmp_path / "evil_report_plugin.py").write_text("raise SystemExit('evil code ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    copy = tmp_path / "fed"
    shutil.copytree(trial.folder, copy)
    settings = copy / "server" / "federation.toml"
    lines = [each for each in settings.read_text().splitlines() if not each.startswith("aggregator")]
    settings.write_text("\n".join([*lines, 'aggregator = "evil_report_plugin:Thing"', ""]))
    (copy / "spec.toml").write_text('attack = "evil_report_plugin:Thing"\n')
    assert "evil_report_plugin" in report(copy)
    with pytest.raises(SpecError, match="evil code ran"):  # the server itself does load it
        Server.of(copy / "server")
