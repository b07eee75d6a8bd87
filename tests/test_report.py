"""`noisegate report`: what the page of a run or a sweep says, whole or not. What it looks like: test_browser.py."""

import builtins
import hashlib
import io
import json
import re
import tracemalloc
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.offline
import pytest

from conftest import sealed
from noisegate import Compute, Spec, SpecError, StoreError, reference, run, undefended
from noisegate.report import figures, numbers, report, write_report
from noisegate.report.charts import MEANINGS
from noisegate.report.facets import MOST_LINES, attack_maps, axes_of, facets
from noisegate.report.figures import write_figures
from noisegate.report.folders import Verdicts, read_run
from noisegate.report.numbers import privacy_spent, shares_by_reason, timeline_of
from noisegate.report.page import Page, table
from noisegate.report.run_page import run_page
from noisegate.report.sweeps import Group, SweepRecord, read_sweep_folder
from noisegate.report.words import of_run, of_sweep
from noisegate.runs.promise import STATED
from noisegate.sweeps.sweep import SweepFolder, sweep
from noisegate.views import Reason

ONE = Compute(device="cpu", threads=1)
SPEC = Spec(
    rounds=8, sigma=2.5, sigma_base=2.5, accountant="rdp", aggregator="two-stage", attack="gaussian", evaluate_every=2
)
PLOTLY = plotly.offline.get_plotlyjs
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """A page as its tags, words and data."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.data = [], [], [], {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, "every tag is closed in its turn"

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if attributes.get("type") == "application/json":
            self.data[attributes["id"]] = json.loads(data)
        elif tag not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]

    def chart(self, label: str) -> dict:
        """The data of the chart whose label begins so."""
        (found,) = [div["id"] for div in self.all("div") if div.get("aria-label", "").startswith(label) and "id" in div]
        return self.data[f"{found}-data"]


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    """A few bytes in place of plotly's 5 MB, which take most of the time."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "plotly.js v0")


def read(folder) -> Reader:
    return read_page(report(folder))


def read_page(page: str) -> Reader:
    reader = Reader(page)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with what is beside it."""
    out = tmp_path_factory.mktemp("made") / "run"
    run(SPEC, compute=ONE, out=out)
    run(reference(SPEC), compute=ONE, out=out / "reference")
    run(undefended(SPEC), compute=ONE, out=out / "undefended")
    return out


@pytest.fixture
def folder(made, tmp_path):
    """A copy that may be spoiled, without what is beside it."""
    (tmp_path / "run").mkdir()
    for file in made.iterdir():
        if file.is_file():
            (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "run"


# --- a run -----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_says_what_was_found(made):
    result = json.loads((made / "result.json").read_text())
    clean = json.loads((made / "reference" / "result.json").read_text())
    page = read(made)
    for words in (
        f"accuracy {result['accuracy']:.3f}",
        f"reference accuracy {clean['accuracy']:.3f}",
        f"epsilon {result['epsilon']:.3f}",
        f"honest uploads refused {result['honest_rejected']:.1%}",
        "8 rounds, 10 honest and 15 Byzantine workers, seed 1",
        'attack = { name = "gaussian" }',
        "packages torch",
        MEANINGS[Reason.DISTRIBUTION],
    ):
        assert words in page.text, words
    assert "Incomplete" not in page.text
    assert "Numbers" in page.text


def weighed(record, byzantine_weight=0.083):
    """The record with weights, a missing upload and a lost round. A Byzantine upload has a tenth of the weight."""
    found = record.verdicts
    reasons = found.reasons.copy()
    reasons[0, 0], reasons[3] = Reason.MISSING, Reason.LOST
    weights = np.where(reasons == Reason.KEPT, 1.0, 0.0) * np.where(found.byzantine, 0.1, 1.0)
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-9)
    verdicts = SimpleNamespace(reasons=reasons, scores=found.scores, byzantine=found.byzantine, weights=weights)
    counted = [{**line, "rejected": {**line["rejected"], "missing": {"honest": 1}}} for line in record.curve]
    result = {**record.result, "byzantine_weight": byzantine_weight, "byzantine_selected": 0.433, "missing": 0.1}
    return replace(record, verdicts=verdicts, curve=counted, result=result)


def test_the_weight_of_byzantine_uploads_comes_first_and_the_head_count_beside_it(made):
    record = weighed(read_run(made))
    page = read_page(run_page(record).html())
    assert (
        "weight of Byzantine uploads 8.3% of the model's updates; 43.3% of the uploads used, by head count" in page.text
    )
    assert "Byzantine uploads used" not in page.text
    weight, share = page.chart("Weight of Byzantine uploads")["data"]
    found = record.verdicts.weights[:, record.verdicts.byzantine].sum(1)
    assert weight["y"] == pytest.approx(found, abs=1e-5)
    assert share["y"] == [0.6, 0.6]


def test_a_result_without_weights_shows_the_head_count(made):
    record = read_run(made)
    old = {key: value for key, value in record.result.items() if key not in ("byzantine_weight", "missing")}
    verdicts = Verdicts(record.verdicts.reasons, record.verdicts.scores, record.verdicts.byzantine)
    page = read_page(run_page(replace(record, result=old, verdicts=verdicts)).html())
    assert f"Byzantine uploads used {old['byzantine_selected']:.1%} of the uploads used, by head count" in page.text
    assert "weight of Byzantine uploads" not in page.text.lower()


def test_a_missing_upload_and_a_lost_round_are_no_refusals(made):
    record = weighed(read_run(made))
    page = read_page(run_page(record).html())
    assert "uploads missing 10.0% did not arrive, which accuses nobody" in page.text
    assert "A missing upload did not arrive; it is not refused" in page.text
    assert MEANINGS[Reason.MISSING] in page.text
    assert MEANINGS[Reason.LOST] in page.text
    for word in ("missing", "lost"):
        assert re.search(rf"\b{word} [\d.]+% [\d.]+% no\b", page.text), "it accuses nobody"
    (bar,) = [trace for trace in page.chart("Uploads that were not used")["data"] if trace["name"] == "missing"]
    assert bar["marker"]["color"] == "--missing"


def test_every_verdict_has_a_color_in_both_themes_and_a_meaning():
    style = (resources.files("noisegate.report") / "style.css").read_text()
    for reason in Reason:
        assert len(re.findall(rf"--{reason.word}: #[0-9a-f]{{6}};", style)) == 2, reason
        assert f".swatch.{reason.word} {{ background: var(--{reason.word}); }}" in style, reason
    assert set(MEANINGS) == set(figures.REASON_COLORS) == set(Reason)
    assert len(set(figures.REASON_COLORS.values())) == len(Reason)


def test_the_page_loads_nothing_and_allows_nothing_else(made, monkeypatch):
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", PLOTLY)
    page = report(made)
    reader = Reader(page)
    assert [name for name in page.split("\n") if "plotly.js v" in name][1:] == [], "plotly is there once"
    for tag, attributes in reader.tags:
        for key in ("src", "href", "srcset", "action", "data", "poster"):
            assert key not in attributes, (tag, attributes)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(found["content"] for found in reader.all("meta") if "content" in found and "http-equiv" in found)
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[^']+' 'sha256-[^']+';", policy), "only the two scripts that stand here"


def test_the_page_can_be_read_by_anyone(made):
    reader = read(made)
    assert reader.all("html") == [{"lang": "en"}]
    assert len(reader.all("title")) == len(reader.all("h1")) == len(reader.all("main")) == 1
    assert any(found.get("name") == "viewport" for found in reader.all("meta"))
    charts = [found for found in reader.all("div") if found.get("class") == "plot"]
    assert len(charts) >= 5
    for chart in charts:
        assert chart["role"] == "img"
        assert len(chart["aria-label"]) > 20, "what it shows, in words"
        assert f"{chart['id']}-data" in reader.data
    assert all(found.get("scope") == "col" for found in reader.all("th"))
    assert all(
        found.get("aria-label") and found["tabindex"] == "0"
        for found in reader.all("div")
        if "role" in found and found["role"] == "region"
    )


def test_the_axes_are_honest(made):
    page = read(made)
    accuracy, privacy = page.chart("Accuracy over"), page.chart("Epsilon over")
    verdicts, unused = page.chart("Timeline"), page.chart("Uploads that were not used")
    assert accuracy["layout"]["yaxis"]["range"] == [0, 1.005]
    assert accuracy["layout"]["xaxis"]["range"][0] == 0
    assert [trace["name"] for trace in accuracy["data"]] == ["this run", "reference", "undefended"]
    assert unused["layout"]["yaxis"]["range"] == unused["layout"]["yaxis2"]["range"] == [0, 1]
    assert privacy["layout"]["yaxis"]["range"][0] == 0
    assert [trace["zmin"] for trace in verdicts["data"]] == [-0.5, -0.5]


def test_the_timeline_is_that_of_the_verdicts(made):
    with np.load(made / "verdicts.npz") as file:
        reasons, mask = file["reasons"], file["byzantine"]
    honest, byzantine = read(made).chart("Timeline")["data"]
    assert honest["z"] == reasons[:, ~mask].T.tolist()
    assert byzantine["z"] == reasons[:, mask].T.tolist()
    assert honest["y"] == [str(place) for place in np.flatnonzero(~mask)]
    assert honest["text"][0][0] == Reason(reasons[0, np.flatnonzero(~mask)[0]]).word


def test_a_long_run_of_many_is_shown_in_bins_by_what_is_most_frequent():
    rng = np.random.default_rng(0)
    reasons = rng.integers(0, len(Reason), (1003, 150)).astype(np.uint8)
    scores = rng.normal(size=reasons.shape).astype(np.float32)
    scores[3, :] = np.nan
    found = timeline_of(Verdicts(reasons, scores, np.arange(150) < 100), most_columns=50, most_rows=20)
    assert found.binned
    assert (found.rounds[0, 0], found.rounds[-1, 1], len(found.rounds)) == (1, 1003, 50)
    assert (found.rounds[1:, 0] == found.rounds[:-1, 1] + 1).all(), "every round is in one column"
    assert [len(found.workers[group]) for group in ("honest", "byzantine")] == [20, 20]
    assert found.all_workers == {"honest": 50, "byzantine": 100}
    for group in ("honest", "byzantine"):
        for row, worker in enumerate(found.workers[group]):
            for column, (first, last) in enumerate(found.rounds):
                block = reasons[first - 1 : last, worker].tolist()
                most = max(block.count(reason) for reason in Reason)
                equal = [reason for reason in Reason if block.count(reason) == most]
                refusals = [reason for reason in equal if reason not in (Reason.KEPT, Reason.MISSING, Reason.LOST)]
                assert found.reasons[group][row, column] == max(refusals or equal[1:] or equal)
    block = scores[:20, found.workers["honest"][0]]
    assert found.rounds[0, 1] == 20
    assert found.scores["honest"][0, 0] == pytest.approx(np.nanmean(block), abs=1e-6)


def test_the_page_says_how_the_timeline_was_made_small(folder):
    with np.load(folder / "verdicts.npz") as file:
        found = dict(file)
    long = {"reasons": np.tile(found["reasons"], (60, 1)), "scores": np.tile(found["scores"], (60, 1))}
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(sealed({**result, "rounds": 60 * result["rounds"]}))
    put_verdicts(folder, byzantine=found["byzantine"], **long)
    words = read(folder).text
    assert "A column is 2 or 3 rounds and shows the most frequent verdict" in words


def test_shares_are_of_the_uploads_since_the_line_before():
    curve = [
        {
            "round": 2,
            "accuracy": 0.1,
            "selected": {"honest": 6, "byzantine": 0},
            "rejected": {"norm": {"honest": 2, "byzantine": 4}},
        },
        {
            "round": 3,
            "accuracy": 0.1,
            "selected": {"honest": 4, "byzantine": 1},
            "rejected": {"score": {"honest": 0, "byzantine": 1}},
        },
    ]
    assert shares_by_reason(curve) == {
        "honest": {Reason.NORM: [0.25, 0.0]},
        "byzantine": {Reason.NORM: [1.0, 0.0], Reason.SCORE: [0.0, 0.5]},
    }
    curve[1]["rejected"] |= {"missing": {"honest": 4, "byzantine": 0}}
    assert shares_by_reason(curve)["honest"] == {Reason.NORM: [0.25, 0.0], Reason.MISSING: [0.0, 0.5]}
    alone = [{"round": 1, "accuracy": 0.1, "selected": {"honest": 3, "byzantine": 0}, "rejected": {}}]
    assert shares_by_reason(alone) == {"honest": {}}


def test_privacy_ends_where_the_result_says(tmp_path):
    for delta in (None, 1e-3):
        out = tmp_path / str(delta)
        result = run(replace(SPEC, delta=delta, byzantine=0.0, attack="none"), compute=ONE, out=out)
        spent = privacy_spent(read_run(out))
        assert spent.rounds == list(range(9))
        assert spent.epsilons[0] == 0
        assert spent.epsilons[-1] == pytest.approx(result.epsilon, rel=1e-3)
        assert spent.epsilons == sorted(spent.epsilons)
    assert "a declared size of 142 examples" in spent.note, "1437 examples less 20, for 10 workers"


def test_privacy_that_was_only_stated_is_not_drawn(folder):
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(sealed({**result, "accountant": STATED}))
    words = read(folder).text
    assert "is stated, not checked" in words
    assert "computed again" not in words


def test_a_run_without_noise_is_whole_and_says_that_nothing_is_private(tmp_path):
    spec = replace(SPEC, sigma=0.0, sigma_base=None, byzantine=0.0, attack="none", aggregator="mean")
    run(spec, compute=ONE, out=tmp_path / "run")
    record = read_run(tmp_path / "run")
    assert record.result is not None
    assert not record.problems
    assert "sigma is 0" in privacy_spent(record).note
    assert "nothing is private" in " ".join(read(tmp_path / "run").words)


def test_privacy_that_does_not_come_out_again_is_not_drawn(folder):
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(sealed({**result, "epsilon": 2 * result["epsilon"]}))
    assert privacy_spent(read_run(folder)).rounds == []
    assert "could not be computed again" in read(folder).text


def test_another_runs_reference_is_not_taken(made, folder):
    (folder / "reference").mkdir()
    for name in ("spec.toml", "result.json"):
        (folder / "reference" / name).write_bytes((made / "undefended" / name).read_bytes())
    page = read(folder)
    assert "reference accuracy" not in page.text
    assert "The reference was not run" in page.text


def test_the_reference_and_the_undefended_run_are_curves(made):
    for word, trace in zip(("reference", "undefended"), read(made).chart("Accuracy over")["data"][1:], strict=True):
        curve = json.loads((made / word / "result.json").read_text())["curve"]
        assert trace["x"] == [line["round"] for line in curve]
        assert trace["y"] == [line["accuracy"] for line in curve]


def test_a_group_of_which_nothing_was_refused_has_words_and_no_empty_panel(made):
    record = read_run(made)
    curve = [{**line, "rejected": {"norm": {"honest": 0, "byzantine": 3}}} for line in record.curve]
    page = read_page(run_page(replace(record, curve=curve)).html())
    assert "Honest workers: none refused." in page.text
    assert "yaxis2" not in page.chart("Uploads that were not used")["layout"]
    page = read_page(run_page(replace(record, curve=[{**line, "rejected": {}} for line in curve])).html())
    assert "None refused: every upload was used in every round." in page.text


def test_a_run_begins_with_a_verdict_in_plain_words(made):
    record = read_run(made)
    right = [[sum(map(sum, record.result["confusion"])), 0], [0, 0]]

    def lead(accuracy, clean=0.9, **changes):
        result = {**record.result, "accuracy": accuracy, "confusion": right, **changes}
        beside = {} if clean is None else {"reference": {**result, "accuracy": clean}}
        return of_run(replace(record, result=result, beside=beside))[0]

    assert lead(0.89) == "The attack did no harm to accuracy that could be told from chance."
    assert lead(0.5) == "The attack cost 40.0 points of accuracy."
    assert lead(0.5, clean=None).startswith("What the attack cost is not known")
    assert lead(0.5, majority_share=0.5).startswith("The model learned next to nothing")
    assert lead(0.5, attack="none") == "The model is right on 50.0% of the test examples; nobody attacked."
    assert of_run(replace(record, result=None)) == ("", [])
    page = read(made)
    assert page.text.index("In short") < page.text.index("Summary")
    assert "15 of 25 workers attacked (gaussian)" in page.text
    assert "Undefended it would be right on" in page.text


# --- what is not whole -----------------------------------------------------------------------------------------------


def test_an_unfinished_run_says_so(folder):
    for name in ("result.json", "verdicts.npz"):
        (folder / name).unlink()
    page = read(folder)
    assert "This run is not finished" in page.text
    assert "accuracy so far" in page.text
    assert "The verdicts are written when a run is done" in page.text
    assert len(page.data) == 2, "accuracy and reasons are known so far"
    (folder / "rounds.jsonl").unlink()
    assert "No round was evaluated yet" in read(folder).text


DAMAGE = [
    ("result.json", b'{"accuracy": 0.5', "result.json is damaged"),
    ("result.json", b"{}", "result.json is damaged"),
    ("result.json", b'{"accuracy": NaN}', "NaN is no number"),
    ("result.json", b"[" * 100_000, "nested too deeply"),
    ("result.json", b'{"rounds": ' + b"9" * 5000 + b"}", "result.json is damaged"),
    ("result.json", b"[1]", "result.json is damaged"),
    ("verdicts.npz", b"PK\x03\x04 no archive", "verdicts.npz is damaged"),
    ("verdicts.npz", None, "verdicts.npz is missing"),
    ("rounds.jsonl", b'{"round": 1, "accuracy": 0.5}\n', "rounds.jsonl is damaged"),
    ("rounds.jsonl", None, "taken from result.json"),
    ("environment.json", b"\xff\xfe", "environment.json is damaged"),
    ("environment.json", None, "environment.json is missing"),
    ("tables.json", b'[{"title": 1}]', "tables.json is damaged"),
    ("spec.toml", b"batch = 0\n", "The spec cannot be built here"),
    ("spec.toml", b'attack = "no.such:Attack"\n', "it is of another run"),
]


def test_what_is_damaged_is_said_and_left_out(folder):
    for name, content, says in DAMAGE:
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.unlink() if content is None else path.write_bytes(content)
        words = read(folder).text
        assert "Incomplete" in words, (name, says)
        assert says in words, (name, says)
        path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
    assert "Incomplete" not in read(folder).text


LINES = [
    b'{"round": 1, "accuracy": 0.5}\n{"round": 2, "acc\n',
    b'{"round": 2, "accuracy": 7}\n',
    b'{"round": 2, "accuracy": 0.5, "rejected": 3}\n',
    b'{"round": 2, "accuracy": 0.5, "rejected": {"nonsense": {"honest": 1}}}\n',
    b'{"round": 1.5, "accuracy": 0.5}\n',
    b'{"round": 2, "accuracy": 0.5, "selected": {"honest": -1}}\n',
    b"[" * 100_000 + b"\n",
]


def test_damaged_lines_of_an_unfinished_run_are_left_out(folder):
    (folder / "result.json").unlink()
    for content in LINES:
        (folder / "rounds.jsonl").write_bytes(content)
        record = read_run(folder)
        assert len(record.curve) == content.count(b"\n") - 1
        assert "rounds.jsonl is damaged: 1 of" in record.problems[-1]


def put_verdicts(folder, **arrays):
    """Other verdicts, with the checksums that go with them."""
    np.savez(folder / "verdicts.npz", **arrays)
    result = json.loads((folder / "result.json").read_text())
    result["files"]["verdicts.npz"] = hashlib.sha256((folder / "verdicts.npz").read_bytes()).hexdigest()
    (folder / "result.json").write_text(sealed(result))


def test_verdicts_that_do_not_fit_are_left_out(folder):
    with np.load(folder / "verdicts.npz") as file:
        found = dict(file)
    for spoiled in (
        {"reasons": found["reasons"] + 100},
        {"byzantine": found["byzantine"][:-1]},
        {"scores": found["scores"][:-1]},
        {"byzantine": found["byzantine"].astype(int)},
    ):
        put_verdicts(folder, **{**found, **spoiled})
        assert read_run(folder).verdicts is None
    put_verdicts(folder, **found)
    assert read_run(folder).verdicts is not None
    np.savez(folder / "verdicts.npz", **{**found, "reasons": np.zeros_like(found["reasons"])})
    assert "its checksum does not fit" in read_run(folder).problems[-1]


def test_a_bomb_in_the_verdicts_is_one_line(folder):
    with np.load(folder / "verdicts.npz") as file:
        found = dict(file)
    np.savez_compressed(folder / "verdicts.npz", **{**found, "scores": np.zeros(2**22, np.float32)})
    assert (folder / "verdicts.npz").stat().st_size < 2**15, "small on disk"
    tracemalloc.start()
    record = read_run(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.verdicts is None
    assert "verdicts.npz is damaged (larger than" in record.problems[-1]
    assert peak < 2**23, "nothing was unpacked"
    # A header that promises more than the file has, for which numpy would allocate memory first.
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(folder / "verdicts.npz", "w") as archive:
        for name, content in {"reasons": b"", "scores": head.getvalue(), "byzantine": b""}.items():
            archive.writestr(f"{name}.npy", content)
    assert "verdicts.npz is damaged" in read_run(folder).problems[-1]


def test_scores_of_any_size_are_drawn(folder):
    with np.load(folder / "verdicts.npz") as file:
        found = dict(file)
    found["scores"][:] = np.float32(3e38)
    found["scores"][0] = np.nan
    put_verdicts(folder, **found)
    chart = read(folder).chart("Score of each worker")
    assert chart["data"][0]["y"][0] is None
    assert chart["data"][0]["y"][1] == pytest.approx(3e38, rel=1e-4)


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="neither a run"):
        report(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(StoreError, match=r"its spec\.toml is missing"):
        report(tmp_path)


def test_the_command_and_its_errors(cli, folder, tmp_path):
    answer = cli("report", folder)
    assert (answer.status, answer.out.split()) == (0, [str(folder / "report.html")])
    assert cli("report", folder, "-o", tmp_path / "new" / "page.html").status == 0
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!DOCTYPE html>")
    for arguments, says in (
        ((tmp_path / "nowhere",), "no such folder"),
        ((folder, "-o", tmp_path), "cannot be written"),
        ((folder, "-o", folder / "spec.toml" / "x.html"), "cannot be made"),
    ):
        answer = cli("report", *arguments)
        assert (answer.status, answer.out) == (2, "")
        assert says in answer.err
        assert len(answer.err.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*.part")] == []
    (folder / "spec.toml").write_text("seed = [")
    assert "spec.toml is damaged" in cli("report", folder).err


# --- what users write ------------------------------------------------------------------------------------------------

EVIL = '</script><script>alert("x")</script><img src=x onerror=y>'


def test_what_users_write_is_text(folder):
    (folder / "tables.json").write_text(
        json.dumps([{"title": EVIL, "columns": [EVIL, "b"], "rows": [[EVIL], [1, 2, 3]], "notes": EVIL}])
    )
    (folder / "failed.json").write_text(sealed({"status": "failed", "message": EVIL}))
    (folder / "result.json").unlink()
    (folder / "environment.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    (folder / "spec.toml").write_text(f"attack = {{ name = {json.dumps(EVIL)} }}\naggregator = {{ }}\n")
    page = report(folder)
    reader = Reader(page)
    assert reader.open == []
    assert reader.all("img") == []
    assert len(reader.all("script")) == 2 + len(reader.data)
    assert reader.text.count(re.sub(r"\s+", " ", EVIL)) >= 8


def test_a_chart_holds_no_end_of_a_script():
    page = Page("t")
    inside = page.chart({"data": [{"name": EVIL}], "layout": {"height": 1}}, EVIL)
    assert inside.count("</script>") == 1
    assert Reader(inside).data["chart-1-data"]["data"][0]["name"] == EVIL


def test_numbers_stand_to_the_right():
    columns = Reader(table(["a", "b", "c"], [["1.5", "x", "3 %"], [2, "1", None]])).all("th")
    assert [found.get("class") for found in columns] == ["number", None, "number"]


# --- a sweep ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two aggregators, two shares, two seeds: one run failed, one was skipped, one is missing, and one is no part
    of it.
    """
    place = tmp_path_factory.mktemp("swept") / "sweep"
    base = Spec(rounds=2, sigma=2.5, sigma_base=2.5, accountant="rdp", evaluate_every=1)
    specs = [
        replace(base, aggregator=aggregator, byzantine=share, seed=seed)
        for aggregator in ("mean", "median")
        for share in (0.0, 0.4)
        for seed in (1, 2)
    ]
    sweep([*specs[:6], replace(base, seed=9)], place, compute=ONE, jobs=1)
    store = SweepFolder(place)
    for spec, status in ((specs[6], "failed"), (specs[4], "skipped")):
        out = store.run_path(spec)
        out.mkdir(exist_ok=True)
        (out / "result.json").unlink(missing_ok=True)
        (out / "spec.toml").write_text(spec.to_toml())
        (out / "failed.json").write_text(sealed({"status": status, "message": f"it {status} <b>badly</b>"}))
    lines = [
        *("rounds = 2", "sigma = 2.5", "sigma_base = 2.5", 'accountant = "rdp"', "evaluate_every = 1", "[sweep]"),
        *('aggregator = ["mean", "median"]', "byzantine = [0.0, 0.4]", "seed = [1, 2]"),
    ]
    (place / "sweep.toml").write_text("\n".join(lines))
    return place, specs


def test_a_sweep_shows_every_cell(swept):
    place, specs = swept
    page = read(place)
    assert "8 runs, 5 of them done" in page.text
    assert "Not every run is done: 1 failed, 1 skipped, 1 waiting." in page.text
    assert "it failed <b>badly</b>" in page.text
    assert "1 more run folders below runs/ do not belong to this sweep" in page.text
    for spec in specs:
        assert spec.name() in page.text
    found = [SweepFolder(place).cell(spec).result["accuracy"] for spec in specs[:2]]
    row = f"mean {sum(found) / 2:.3f} {min(found):.3f} {max(found):.3f}"
    assert row in page.text
    assert "median – – –" in page.text, "what has no number has a row all the same"
    assert "1 done, 1 skipped" in page.text
    assert "1 failed, 1 waiting" in page.text


def test_a_sweep_is_drawn_against_what_varies(swept):
    place, _ = swept
    record = read_sweep_folder(place)
    assert list(record.varying) == ["byzantine", "aggregator", "seed"]
    assert axes_of(record) == ["byzantine"]
    against, courses = read(place).data.values()
    assert [trace["name"] for trace in against["data"]] == ["mean (undefended)", "median"]
    assert against["layout"]["legend"]["title"]["text"] == "aggregator", "said once, and not with every line"
    assert against["data"][0]["x"] == [0.0, 0.4]
    assert against["layout"]["yaxis"]["range"] == [0, 1.005]
    assert against["data"][0]["error_y"]["array"][0] >= 0
    assert courses["data"][0]["x"] == [1, 2]
    assert "attack" in record.common


def test_the_reference_of_a_sweep_is_found_in_it(swept):
    place, specs = swept
    clean = replace(reference(specs[0]), seed=1)
    sweep([clean, replace(specs[2], attack="gaussian")], place.parent / "clean", compute=ONE, jobs=1)
    record = read_sweep_folder(place.parent / "clean")
    accuracy = SweepFolder(place.parent / "clean").cell(clean).result["accuracy"]
    assert [group.references for group in record.groups if group.settings["byzantine"] == 0.4] == [[accuracy]]


def group(settings, accuracy, **more):
    """A group of one run that is done."""
    return Group(settings, [SimpleNamespace(status="done")], [accuracy], [], [{1: accuracy}], **more)


def sweep_of(groups, **common):
    """A record of these groups."""
    keys = list(dict.fromkeys(key for each in groups for key in each.settings))
    varying = {key: list({each.settings[key]: 0 for each in groups}) for key in keys}
    return SweepRecord(Path("sweep"), [], groups, varying, common)


def test_a_sweep_of_attacks_and_aggregators_has_a_map_and_says_what_is_worst():
    cells = {("inner", "median"): 0.3, ("inner", "krum"): 0.6, ("zero", "median"): 0.8, ("zero", "krum"): 0.7}
    groups = [group({"attack": a, "aggregator": b}, value) for (a, b), value in cells.items()]
    clean = group({"attack": "none", "aggregator": "mean"}, 0.9, role="reference")
    (found,) = attack_maps(sweep_of([*groups, clean]))
    assert (found.title, found.attacks, found.aggregators) == ("", ["inner", "zero"], ["median", "krum"])
    assert found.values == cells, "and not the reference"
    assert found.worst("median") == (0.3, "inner")
    first, more = of_sweep(sweep_of([*groups, clean]))
    assert first == "krum withstands these attacks best: at worst 0.600 (inner)."
    assert more[0] == "median falls to 0.300 (inner)."
    assert attack_maps(sweep_of(groups[:2])) == [], "one attack is no map"
    twice = [group({**each.settings, "epsilon": e}, each.accuracies[0]) for each in groups for e in (1.0, 2.0)]
    assert [each.title for each in attack_maps(sweep_of(twice))] == ["epsilon 1", "epsilon 2"]


def test_a_map_is_a_table_of_shades(tmp_path, swept):
    _, specs = swept
    grid = [replace(specs[2], aggregator=b, attack=a) for a in ("gaussian", "zero") for b in ("mean", "median")]
    sweep(grid, tmp_path, compute=ONE, jobs=1)
    page = read(tmp_path)
    assert "Attacks and aggregators" in page.text
    shades = {found["style"] for found in page.all("td") if found.get("class") == "number shade"}
    accuracies = [SweepFolder(tmp_path).cell(spec).result["accuracy"] for spec in grid]
    assert shades == {f"--share: {round(100 * value)}%" for value in accuracies}
    assert "withstands these attacks best" in page.text


def test_against_epsilon_stand_the_reference_no_privacy_and_the_paper():
    models = ("cnn", "linear")
    groups = [
        replace(group({"epsilon": e, "sigma": None, "model": m}, 0.5 + e / 8), references=[0.6 + e / 8])
        for m in models
        for e in (0.125, 2.0)
    ]
    groups += [group({"epsilon": None, "sigma": 0.0, "model": m}, 0.9, private=False) for m in models]
    record = sweep_of(groups, dataset="fashion", non_iid=False)
    assert axes_of(record) == ["epsilon"]
    (facet,) = facets(record, "epsilon")
    assert (facet.legend, list(facet.lines)) == ("model", ["cnn", "linear"])
    assert facet.beside["reference"] == [(0.125, 0.615625), (2.0, 0.85)]
    assert facet.beside["no privacy"] == [(0.125, 0.9), (2.0, 0.9)]
    assert facet.beside["the paper, no attack"] == [(0.125, 0.7), (0.25, 0.75), (0.5, 0.78), (1.0, 0.79), (2.0, 0.8)]
    assert facet.beside["the paper, no privacy"] == [(0.125, 0.88), (2.0, 0.88)]
    (elsewhere,) = facets(sweep_of(groups, dataset="digits"), "epsilon")
    assert set(elsewhere.beside) == {"reference", "no privacy"}, "the paper has no numbers of it"


def test_a_legend_has_only_what_varies_and_does_not_follow():
    """The worker follows from the model, and a setting of one attack is no setting of another."""
    both = [("mlp", "normalized"), ("linear", "clipped")]
    record = sweep_of([group({"epsilon": e, "model": m, "worker": w}, 0.5) for m, w in both for e in (1.0, 2.0)])
    assert [(found.legend, list(found.lines)) for found in facets(record, "epsilon")] == [("model", ["mlp", "linear"])]
    attacks = [group({"attack": "inner", "attack.scale": s, "rate": 0.1}, 0.5) for s in (1.0, 2.0)]
    attacks.append(group({"attack": "zero", "attack.scale": None, "rate": 0.2}, 0.5))
    (found,) = facets(sweep_of(attacks), None)
    assert list(found.lines) == ["attack inner, attack.scale 1", "attack inner, attack.scale 2", "attack zero"]


def test_many_lines_are_dealt_to_several_charts(swept):
    place, _ = swept
    record = read_sweep_folder(place)
    group = record.groups[0]
    values = {"attack": list("abcdefgh"), "worker": list("xyz")}
    many = [replace(group, settings={"attack": a, "worker": w}) for a in values["attack"] for w in values["worker"]]
    found = facets(replace(record, groups=many, varying=values), None)
    assert [facet.title for facet in found] == [f"attack {letter}" for letter in values["attack"]]
    assert all(len(facet.lines) == 3 <= MOST_LINES for facet in found)
    assert sum(len(groups) for facet in found for groups in facet.lines.values()) == len(many), "nobody is lost"


def test_runs_link_to_their_own_pages(swept, tmp_path):
    place, specs = swept
    write_report(SweepFolder(place).run_path(specs[0]))
    links = [found["href"] for found in Reader(report(place)).all("a")]
    assert links == [f"runs/{specs[0].name()}/report.html"]
    page = Reader(write_report(place, tmp_path / "page.html").read_text())
    assert (tmp_path / page.all("a")[0]["href"]).exists()


def test_a_sweep_without_runs_is_an_error(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(StoreError, match="holds no run yet"):
        report(tmp_path)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figures_are_whole(cli, made, tmp_path):
    pytest.importorskip("matplotlib")
    answer = cli("report", made, "-o", tmp_path / "page.html", "--figures", tmp_path / "figures")
    assert answer.status == 0, answer.err
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    charts = {"accuracy", "recall", "unused", "verdicts", "scores", "privacy"}
    if timeline_of(read_run(made).verdicts).byzantine_weight is not None:
        charts |= {"byzantine-weight"}
    assert names == {f"{name}.{form}" for name in charts for form in ("png", "svg")}
    assert {line.split("/")[-1] for line in answer.out.split()} == names | {"page.html"}
    for name in names:
        content = (tmp_path / "figures" / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    again = figures._accuracy(read_run(made))
    assert again.axes[0].get_ylim() == (0, 1)


def test_figures_of_a_sweep_are_the_same_again(swept, tmp_path):
    pytest.importorskip("matplotlib")
    written = write_figures(swept[0], tmp_path)
    assert [path.name for path in written] == ["accuracy.png", "accuracy.svg"]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_figures(swept[0], tmp_path)] == before


def test_figures_without_matplotlib_name_the_extra(folder, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SpecError, match=r"noisegate\[figures\]"):
        write_figures(folder, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
    assert numbers.PRIVACY_POINTS >= 24
