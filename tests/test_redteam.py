"""The automatic adversary: what it searches, what it keeps, and what it says. Most runs here are made up."""

import json
import re
import signal
import time
import tomllib
import weakref
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from conftest import QUICK
from noisegate import Compute, Spec, SpecError, StoreError, run
from noisegate.attacks import ATTACKS
from noisegate.catalog import setting_types
from noisegate.cli.redteam import Evaluation
from noisegate.lab import crew as crew_module
from noisegate.lab import read_spec, red_team, reference
from noisegate.lab.crew import Crew, side_by_side
from noisegate.lab.plot import plot
from noisegate.lab.redteam import LATE, OWN_CLOCK, SETTINGS, SHARES, Outcome, Trial, _moved, _with
from noisegate.lab.trials import TrialFolder

FLAGS = [word for key, value in QUICK.items() if key != "sigma_base" for word in (f"--{key}", str(value))]
FLAGS += ["--accountant", "rdp", "--device", "cpu", "--jobs", "1"]


HOW = "--device cpu --threads 1"


def attack_of(spec: Spec) -> dict:
    return spec.canonical()["attack"]


class Pretend:
    """In place of runs: an accuracy by a formula. Keeps what it was asked for."""

    def __init__(self, formula):
        self.formula, self.asked = formula, []

    def __call__(self, specs, stage):
        self.asked += [(stage, spec) for spec in specs]
        return [self.outcome(spec) for spec in specs]

    def outcome(self, spec: Spec) -> Outcome:
        if spec.byzantine == 0:
            return Outcome("done", 0.9, 0.0, 0.05)
        found = self.formula(spec)
        return found if isinstance(found, Outcome) else Outcome("done", found, 0.5, 0.05)

    def searched(self) -> list[Spec]:
        return [spec for stage, spec in self.asked if stage not in ("reference", "seeds")]


def planted(spec: Spec) -> float:
    """Trojans are the worst, and worst with one pull, one strength, one drift, and one start."""
    attack = attack_of(spec)
    if attack["name"] != "trojan":
        return 0.8
    found = 0.7 - 0.1 * (attack.get("pull") == 0.6) - 0.1 * (attack.get("strength") == 0.25)
    return found - 0.1 * (attack.get("drift") == "weights") - 0.1 * (spec.attack_start == 0.5)


def test_the_table_names_what_exists():
    assert set(SETTINGS) <= set(ATTACKS)
    assert set(OWN_CLOCK) <= set(ATTACKS)
    for name, settings in SETTINGS.items():
        assert settings.keys() <= setting_types(ATTACKS[name]).keys(), name
        for setting, values in settings.items():
            for value in values:
                _with(Spec(attack=name), setting, value)  # raises if it does not exist


def test_it_finds_what_was_planted():
    pretend = Pretend(planted)
    found = red_team(Spec(), pretend, budget=300)
    assert attack_of(found.worst.spec) == {"name": "trojan", "pull": 0.6, "strength": 0.25, "drift": "weights"}
    assert found.worst.spec.attack_start == 0.5
    assert found.worst.accuracy == pytest.approx(0.3)
    assert not found.untried


def test_settings_that_only_work_together_are_found_in_a_second_pass():
    def formula(spec):
        attack = attack_of(spec)
        if attack["name"] != "score-banking":
            return 0.8
        valid = attack.get("form") == "valid"
        early = attack.get("turn") == 0.2
        return 0.7 - 0.1 * valid - 0.3 * (valid and early) + 0.05 * (early and not valid)

    found = red_team(Spec(), Pretend(formula), budget=300)
    assert attack_of(found.worst.spec) == {"name": "score-banking", "form": "valid", "turn": 0.2}


def test_every_attack_is_screened_early_and_late():
    pretend = Pretend(lambda spec: 0.5)
    red_team(Spec(), pretend, budget=2 * len(ATTACKS) * 2)
    screened = [(attack_of(spec)["name"], spec.attack_start) for stage, spec in pretend.asked if stage == "screen"]
    assert sorted(screened) == sorted(
        [(name, 0.0) for name in ATTACKS] + [(name, LATE) for name in ATTACKS if name not in OWN_CLOCK]
    )


def test_an_attack_that_the_table_does_not_know_comes_first_and_is_only_moved_in_time(monkeypatch):
    monkeypatch.delitem(SETTINGS, "gaussian")
    own = Spec(attack="none")
    pretend = Pretend(lambda spec: 0.3 if attack_of(spec)["name"] == "gaussian" else 0.5)
    red_team(own, pretend, budget=200)
    tried = [spec for spec in pretend.searched() if attack_of(spec)["name"] == "gaussian" and spec.byzantine == 0.6]
    assert pretend.searched()[:2] == [own, Spec(attack="gaussian")]
    assert {json.dumps(attack_of(spec)) for spec in tried} == {'{"name": "gaussian"}'}
    assert {spec.attack_start for spec in tried} == {0.0, 0.2, 0.5, 0.9}


def test_the_attack_of_the_spec_is_tried_as_it_stands():
    own = Spec(attack={"name": "gaussian", "scale": 3.0}, attack_start=0.3)
    pretend = Pretend(lambda spec: 0.1 if spec == own else 0.5)
    assert red_team(own, pretend).worst.spec == own


@pytest.mark.parametrize("budget", [1, 5, 23, 40, 72, 150])
@pytest.mark.parametrize("formula", [planted, lambda spec: spec.byzantine / 2], ids=["planted", "flat"])
def test_the_budget_is_never_exceeded_and_nothing_is_run_twice(budget, formula):
    pretend = Pretend(formula)
    found = red_team(Spec(), pretend, budget=budget)
    names = [spec.name() for _, spec in pretend.asked]
    assert len(names) == len(set(names))
    assert len(pretend.searched()) <= budget
    assert {spec.name() for _, spec in found.untried}.isdisjoint(names)
    if budget == 1:
        assert {attack_of(spec)["name"] for _, spec in found.untried} == set(ATTACKS)


def test_a_small_budget_leaves_runs_for_settings_and_shares():
    pretend = Pretend(planted)
    red_team(Spec(), pretend, budget=40)
    stages = [stage for stage, _ in pretend.asked]
    assert stages.count("screen") == 2 * 40 // 3
    assert stages.count("shares") == 40 // 6
    assert stages.count("settings") == 40 - 2 * 40 // 3 - 40 // 6


def test_the_worst_are_tried_at_the_other_shares():
    found = red_team(Spec(), Pretend(planted), budget=300)
    assert found.shares() == sorted(SHARES)
    for share in SHARES:
        at_share = [trial for trial in found.worst_by_attack(share) if trial.attack == "trojan"]
        assert [attack_of(trial.spec) for trial in at_share] == [attack_of(found.worst.spec)]


def test_what_narrowing_made_the_worst_is_the_first_at_the_other_shares():
    def formula(spec):
        if attack_of(spec)["name"] == "trojan":
            return 0.6 - 0.5 * (spec.attack_start == 0.5)
        return 0.5 if attack_of(spec)["name"] == "rank-matched" else 0.8

    pretend = Pretend(formula)
    found = red_team(Spec(), pretend, budget=72)
    elsewhere = [spec for stage, spec in pretend.asked if stage == "shares"]
    assert elsewhere[:3] == [replace(found.worst.spec, byzantine=share) for share in (0.2, 0.4, 0.9)]
    assert attack_of(found.worst.spec)["name"] == "trojan"


def test_the_worst_case_is_that_of_the_share_that_was_asked_for():
    found = red_team(Spec(), Pretend(lambda spec: 1 - spec.byzantine), budget=200)
    assert 0.9 in found.shares()
    assert found.worst.spec.byzantine == 0.6


def test_skipped_and_failed_runs_are_reported_and_skipped_ones_cost_nothing():
    def formula(spec):
        name = attack_of(spec)["name"]
        if name in ("inner", "mimic"):
            return Outcome("skipped", message="does not exist here")
        return Outcome("failed", message="ValueError: broke") if name == "zero" else 0.5

    pretend = Pretend(formula)
    found = red_team(Spec(), pretend, budget=60)
    told = {(trial.attack, trial.outcome.status, trial.outcome.message) for trial in found.unfinished()}
    assert told >= {("inner", "skipped", "does not exist here"), ("zero", "failed", "ValueError: broke")}
    assert len(pretend.searched()) - sum(trial.outcome.status == "skipped" for trial in found.trials) == 60


def test_nothing_that_ended_is_no_worst_case():
    found = red_team(Spec(), Pretend(lambda spec: Outcome("failed", message="broke")), budget=30, seeds=[1, 2])
    assert found.worst is None
    assert found.seeds == ()


def test_seeds_repeat_the_worst_case_beside_the_budget():
    pretend = Pretend(lambda spec: planted(spec) + spec.seed / 100)
    found = red_team(Spec(), pretend, budget=100, seeds=[1, 2, 3, 2])
    assert [trial.spec for trial, _ in found.seeds] == [replace(found.worst.spec, seed=seed) for seed in (1, 2, 3)]
    assert [clean.spec for _, clean in found.seeds] == [reference(trial.spec) for trial, _ in found.seeds]
    again = [spec for stage, spec in pretend.asked if stage == "seeds"]
    assert [spec.seed for spec in again] == [2, 3, 2, 3]  # seed 1 was known


def test_a_default_is_left_out_so_that_equal_attacks_are_one_spec():
    spec = Spec(attack={"name": "trojan", "pull": 0.6})
    assert _with(spec, "pull", 0.3) == Spec(attack="trojan")
    assert _with(spec, "pull", None) == Spec(attack="trojan")
    assert _with(spec, "form", "ranked") == spec
    assert spec not in _moved(spec, "pull", (0.1, 0.3, 0.6))


def test_a_setting_that_does_not_go_with_another_is_left_out():
    assert _moved(Spec(attack={"name": "trojan", "drift": "weights"}), "apart", (False, True)) == []


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"byzantine": 0.0}, {}, "nobody is left to attack"),
        ({}, {"budget": 0}, "budget = 0"),
        ({}, {"shares": [1.0]}, "shares = 1.0"),
        ({}, {"shares": [0.0]}, "shares = 0.0"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes, settings, says):
    with pytest.raises(SpecError, match=says):
        red_team(Spec(**changes), Pretend(planted), **settings)


# What is kept.


class Interrupting:
    """A crew of made-up runs that is interrupted after some."""

    def __init__(self, formula, until: float = float("inf")):
        self.pretend, self.until, self.played = Pretend(formula), until, 0

    def play(self, specs):
        for i in reversed(range(len(specs))):  # in another order than asked for
            if self.played >= self.until:
                raise KeyboardInterrupt
            self.played += 1
            yield i, self.pretend.outcome(specs[i])


def searched(folder, crew, **settings):
    return red_team(Spec(), Evaluation(crew, TrialFolder(folder, Spec(), HOW), lambda trial: None), **settings)


@pytest.mark.parametrize("until", [0, 1, 30, 60])
def test_an_interrupted_search_goes_on_and_finds_the_same(tmp_path, until):
    whole = searched(tmp_path / "whole", Interrupting(planted), budget=80)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "broken", Interrupting(planted, until), budget=80)
    crew = Interrupting(planted)
    resumed = searched(tmp_path / "broken", crew, budget=80)
    assert resumed == whole
    assert crew.played == 80 + 1 - until  # and the reference
    assert searched(tmp_path / "broken", done := Interrupting(planted), budget=80) == whole
    assert done.played == 0


def test_a_failed_run_is_tried_again_and_a_skipped_one_is_not(tmp_path):
    folder = TrialFolder(tmp_path / "kept", Spec(), HOW)
    for attack, status in (("zero", "failed"), ("nan", "skipped"), ("inner", "done")):
        folder.add(Spec(attack=attack), "screen", Outcome(status, 0.5))
    again = TrialFolder(tmp_path / "kept", Spec(), HOW)
    assert [again.find(Spec(attack=attack)) is None for attack in ("zero", "nan", "inner", "mimic")] == [
        True,
        False,
        False,
        True,
    ]


def test_what_was_run_on_another_device_is_run_anew(tmp_path):
    TrialFolder(tmp_path, Spec(), HOW).add(Spec(), "screen", Outcome("done", 0.5))
    assert TrialFolder(tmp_path, Spec(), HOW).find(Spec()) == Outcome("done", 0.5)
    other = TrialFolder(tmp_path, Spec(), "--device cuda")
    assert other.find(Spec()) is None
    other.add(Spec(), "screen", Outcome("done", 0.4))
    assert [TrialFolder(tmp_path, Spec(), how).find(Spec()).accuracy for how in (HOW, "--device cuda")] == [0.5, 0.4]


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    folder = TrialFolder(tmp_path / "kept", Spec(), HOW)
    folder.add(Spec(), "screen", Outcome("done", 0.5))
    results = tmp_path / "kept" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole + whole[:40])
    again = TrialFolder(tmp_path / "kept", Spec(), HOW)
    assert len(again) == 1
    again.add(Spec(seed=2), "screen", Outcome("done", 0.4))
    assert [json.loads(line)["accuracy"] for line in results.read_text().splitlines()] == [0.5, 0.4]


def test_a_damaged_line_and_a_foreign_folder_are_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="line 1 is damaged"):
        TrialFolder(tmp_path, Spec(), HOW)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    with pytest.raises(StoreError, match="holds no search"):
        TrialFolder(tmp_path / "foreign", Spec(), HOW)
    with pytest.raises(StoreError, match="cannot be used"):
        TrialFolder(tmp_path / "results.jsonl" / "below", Spec(), HOW)


# Real runs.


def test_a_crew_of_processes_gives_what_runs_alone_give(quick):
    specs = [quick(), quick(attack="local-poisoning", byzantine=0.1), quick(attack="zero"), quick(attack="inner")]
    compute = Compute(device="cpu")
    with Crew(compute, jobs=2) as pair:
        together = dict(pair.play(specs))
    with Crew(compute, jobs=1) as single:
        assert dict(single.play(specs)) == together
    assert [together[i].status for i in range(4)] == ["done", "skipped", "done", "done"]
    assert "square root" in together[1].message
    assert together[0].accuracy == run(specs[0], compute=Compute(device="cpu", threads=1)).accuracy


def test_a_process_that_is_killed_fails_its_run_only(quick):
    with Crew(Compute(device="cpu"), jobs=2) as crew:
        # Two runs that would take minutes: the first one's process is ended, the crew takes a new one for the last.
        endless = quick(rounds=200_000, accountant="rdp", sigma=200.0)
        playing = crew._share_out([endless, quick()])
        index, outcome = next(playing)
        assert (index, outcome.status) == (1, "done")
        next(process for process in crew._hands.values()).kill()
        index, outcome = next(playing)
        assert (index, outcome.status) == (0, "failed")
        assert "ended from outside" in outcome.message
        assert [outcome.status for _, outcome in crew.play([quick(), quick(seed=2)])] == ["done", "done"]


def test_runs_side_by_side_are_split_where_one_breaks(quick, monkeypatch):
    asked = []

    def together(specs, compute):
        asked.append(len(specs))
        if any(spec.attack == "local-poisoning" for spec in specs):
            raise SpecError("not here")
        return [run(spec, compute=compute) for spec in specs]

    monkeypatch.setattr(crew_module, "run_together", together)
    specs = [quick(), quick(attack="local-poisoning", byzantine=0.1), quick(attack="zero"), quick(attack="inner")]
    outcomes = side_by_side(specs, Compute(device="cpu", threads=1))
    assert [outcome.status for outcome in outcomes] == ["done", "skipped", "done", "done"]
    assert asked == [4, 2, 2]


def test_what_broke_together_leaves_its_memory_to_the_halves(quick, monkeypatch):
    held = []

    def together(specs, compute):
        assert all(reference() is None for reference in held)
        on_device = torch.zeros(1)
        held.append(weakref.ref(on_device))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(crew_module, "run_together", together)
    monkeypatch.setattr(crew_module, "alone", lambda spec, compute: Outcome("done", 0.5))
    assert side_by_side([quick(seed=seed) for seed in range(4)], Compute(device="cpu")) == [Outcome("done", 0.5)] * 4
    assert len(held) == 3


@pytest.mark.parametrize(
    ("compute", "how"),
    [
        (Compute(device="cpu"), HOW),
        (Compute(device="cpu", threads=2, memory=64), "--device cpu --threads 2 --memory 64"),
    ],
)
def test_a_crew_says_how_it_runs(compute, how):
    assert Crew(compute).how == how


def test_a_run_that_breaks_is_reported(quick, monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(crew_module, "run", breaks)
    with Crew(Compute(device="cpu"), jobs=1) as crew:
        assert dict(crew.play([quick()])) == {0: Outcome("failed", message="RuntimeError: out of luck")}


# The command.


def test_json_is_one_object_and_the_worst_case_can_be_run(cli, tmp_path):
    answer = cli(
        "redteam", *FLAGS, "--budget", "4", "--seeds", "1,2", "--shares", "0.2,0.6", "--out", "found", "--json"
    )
    assert answer.status == 0, answer.err
    found = answer.json
    assert answer.err == ""
    assert found["budget"] == found["runs"] == 4
    assert len(found["trials"]) == 4
    accuracies = [trial["accuracy"] for trial in found["trials"]]
    assert accuracies == sorted(accuracies)
    assert found["worst"]["accuracy"] == accuracies[0]
    assert found["worst"]["below_reference"] == found["reference_accuracy"] - accuracies[0]
    assert {"attack", "attack_start", "byzantine", "byzantine_selected", "honest_rejected"} <= found["worst"].keys()
    assert len(found["untried"]) > 40
    assert [trial["seed"] for trial in found["seeds"]["trials"]] == [1, 2]
    assert found["seeds"]["min"] <= found["seeds"]["mean"] <= found["seeds"]["max"]

    worst = tmp_path / found["worst_spec"]
    assert read_spec(worst).canonical()["attack"] == found["worst"]["attack"]
    again = cli("run", worst, "--device", "cpu", "--threads", "1", "--json").json
    assert again["accuracy"] == found["worst"]["accuracy"]
    assert again["byzantine_selected"] == found["worst"]["byzantine_selected"]


def test_a_finished_search_runs_nothing_again(cli, tmp_path, monkeypatch):
    line = ("redteam", *FLAGS, "--budget", "3", "--out", "found")
    first = cli(*line)
    assert first.status == 0, first.err
    files = {name: (tmp_path / "found" / name).read_bytes() for name in ("results.jsonl", "worst.toml", "plot.html")}
    monkeypatch.setattr(crew_module, "run", None)  # cannot be called
    assert cli(*line).out == first.out
    assert files == {name: (tmp_path / "found" / name).read_bytes() for name in files}


def test_the_table_for_people_has_the_worst_first(cli):
    answer = cli("redteam", *FLAGS, "--budget", "3")
    assert answer.status == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert rows[0][:3] == ["accuracy", "below", "attack"]
    accuracies = [float(row[0]) for row in rows[1:4]]
    assert accuracies == sorted(accuracies)
    assert "not tried for want of budget" in answer.out
    assert "runs/redteam-digits-" in answer.out.replace("\n", "")


def test_it_takes_a_file_flags_and_set_as_run_does(cli, tmp_path):
    (tmp_path / "mine.toml").write_text('attack = "zero"\nseed = 5\n')
    line = ("redteam", "mine.toml", *FLAGS, "--budget", "1", "--set", "aggregator.stage_one=false", "--json")
    bad = cli(*line)
    assert bad.status == 2
    assert "stage_one" in bad.err
    assert bad.out == ""
    found = cli(
        "redteam", "mine.toml", *FLAGS, "--budget", "1", "--byzantine", "0.4", "--aggregator", "mean", "--json"
    ).json
    assert found["spec"]["seed"] == 5
    assert found["spec"]["byzantine"] == 0.4
    assert found["spec"]["aggregator"] == {"name": "mean"}
    assert found["trials"][0]["attack"] == {"name": "zero"}  # the spec's own is the first


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--dataset nosuch", "dataset = 'nosuch'"),
        ("--byzantine 0", "nobody is left to attack"),
        ("--shares 0.2,x", "shares = '0.2,x': must be numbers with commas between them"),
        ("--shares 2", "shares = 2.0"),
        ("--seeds 1.5", "seeds = '1.5'"),
        ("--budget 0", "budget = 0"),
        ("--jobs 0", "jobs = 0"),
        ("--workers 1000", "batch = 16"),
        ("--attack labelflip", "did you mean 'label-flip'?"),
        ("nosuch.toml", "nosuch.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_readable_line(cli, line, says):
    answer = cli("redteam", *FLAGS, *line.split())
    assert answer.status == 2
    assert answer.out == ""
    assert len(answer.err.strip().splitlines()) == 1
    assert says in answer.err


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(spawn, cli, tmp_path):
    line = ["redteam", *FLAGS, "--jobs", "2", "--budget", "30", "--rounds", "50", "--out", "kept"]
    process = spawn(*line)
    results = tmp_path / "kept" / "results.jsonl"
    waited = time.monotonic() + 120
    while not (results.exists() and results.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < waited
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "runs kept in kept; the same command goes on from there" in err.replace("\n", " ")
    assert "Traceback" not in err
    before = results.read_bytes()
    assert before.endswith(b"\n")
    assert cli(*line, "--budget", "2").status == 0
    assert results.read_bytes().startswith(before)
    keys = [json.loads(found)["key"] for found in results.read_text().splitlines()]
    assert len(keys) == len(set(keys))  # nothing was run again


class Loaded(HTMLParser):
    """What a page would load."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "data", "srcset", "poster")]


def test_the_plot_loads_nothing_and_has_a_line_for_each_attack():
    found = red_team(Spec(), Pretend(planted), budget=200)
    page = plot(found)
    loaded = Loaded(page)
    assert loaded.found == []
    assert "script" in loaded.tags
    assert "link" not in loaded.tags
    assert "iframe" not in loaded.tags
    assert "@import" not in page.partition("<body>")[0]
    shown = re.findall(r'"name":"([a-z-]+)"', page.replace(" ", ""))
    assert sorted(shown) == sorted(ATTACKS)
    assert shown[0] == "trojan"  # the worst
    assert "Reference Accuracy 0.900" in page
    assert Loaded('<script src="https://x.org/a.js">').found == ["https://x.org/a.js"]


def test_a_plot_of_one_share_has_dots():
    page = plot(red_team(Spec(), Pretend(planted), budget=5))
    assert '"name":"rank-matched"' in page.replace(" ", "")


def test_the_worst_spec_is_toml(tmp_path):
    spec = Spec(attack={"name": "trojan", "pull": 0.6}, attack_start=0.5)
    folder = TrialFolder(tmp_path / "kept", spec, HOW)
    folder.write("worst.toml", "# how\n" + spec.to_toml())
    assert tomllib.loads((tmp_path / "kept" / "worst.toml").read_text())["attack"]["pull"] == 0.6
    assert read_spec(tmp_path / "kept" / "worst.toml") == spec
    assert Trial(spec, "screen", Outcome("done", 0.5)).attack == "trojan"
