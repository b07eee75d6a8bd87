"""The automatic adversary: what it searches, what it keeps, and what it says. Most runs here are made up."""

import html
import io
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
import weakref
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conftest import QUICK
from noisegate import Compute, Spec, SpecError, StoreError, run
from noisegate import locks as locks_module
from noisegate.attacks import ATTACKS
from noisegate.catalog import setting_types
from noisegate.cli.findings import as_json, verdict
from noisegate.cli.redteam import Evaluation, _watched
from noisegate.files import seal
from noisegate.redteam import red_team
from noisegate.redteam.findings import Trial, by_chance
from noisegate.redteam.search import SHARES
from noisegate.redteam.settings import LATE, OWN_START, SETTINGS, behaved, variants, with_setting
from noisegate.redteam.trials import LOCK, TrialFolder
from noisegate.report import report
from noisegate.report.facets import MOST_LINES
from noisegate.report.redteam_page import redteam_page
from noisegate.runs import read_spec, reference
from noisegate.sweeps import pool as pool_module
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.pool import Pool, batches, left_of_part, side_by_side
from noisegate.version import __version__

FLAGS = [word for key, value in QUICK.items() if key != "sigma_base" for word in (f"--{key}", str(value))]
FLAGS += ["--accountant", "rdp", "--device", "cpu", "--jobs", "1"]


HOW = f"noisegate {__version__} --device cpu --threads 1"
REAL = sorted(set(ATTACKS) - {"none"})


def attack_of(spec: Spec) -> dict:
    return spec.canonical()["attack"]


PEACE = Outcome("done", 0.91, 0.6, 0.05)
"""What workers that behave leave, if nothing else is said."""


class Pretend:
    """In place of runs: an accuracy by a formula. Keeps what it was asked for."""

    def __init__(self, formula, peace: Outcome = PEACE):
        self.formula, self.asked, self.peace = formula, [], peace

    def __call__(self, specs, stage):
        self.asked += [(stage, spec) for spec in specs]
        return [self.outcome(spec) for spec in specs]

    def outcome(self, spec: Spec) -> Outcome:
        if spec.byzantine == 0:
            return Outcome("done", 0.9, 0.0, 0.05)
        if spec == behaved(spec):
            return self.peace
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


def goes(spec: Spec, setting: str, value) -> bool:
    """Whether a value of a setting goes with the other settings of a spec."""
    try:
        with_setting(spec, setting, value)
    except SpecError:
        return False
    return True


def test_the_table_names_what_exists():
    assert set(SETTINGS) <= set(ATTACKS)
    assert set(OWN_START) <= set(ATTACKS)
    for name, settings in SETTINGS.items():
        assert settings.keys() <= setting_types(ATTACKS[name]).keys(), name
        plain = Spec(attack=name)
        others = [plain, *(one for setting, values in settings.items() for one in variants(plain, setting, values))]
        for setting, values in settings.items():
            for value in values:
                assert any(goes(spec, setting, value) for spec in others), (name, setting, value)


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
        [(name, 0.0) for name in REAL] + [(name, LATE) for name in REAL if name not in OWN_START]
    )


def test_an_attack_that_the_table_does_not_know_comes_first_and_is_only_moved_in_time(monkeypatch):
    monkeypatch.delitem(SETTINGS, "gaussian")
    own = Spec(attack="zero", attack_start=0.1)
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


def test_the_budget_is_never_exceeded_and_nothing_is_run_twice():
    for formula in (planted, lambda spec: spec.byzantine / 2):
        for budget in (1, 5, 23, 40, 72, 150):
            pretend = Pretend(formula)
            found = red_team(Spec(), pretend, budget=budget)
            names = [spec.name() for _, spec in pretend.asked]
            assert len(names) == len(set(names))
            assert len(pretend.searched()) <= budget
            assert {spec.name() for _, spec in found.untried}.isdisjoint(names)
            if budget == 1:
                assert {attack_of(spec)["name"] for _, spec in found.untried} == set(REAL)


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
    assert found.cost is None
    assert not found.harmful(360)
    assert found.seeds == ()


def formula_where_behaving_would_be_the_worst(spec: Spec) -> float:
    return 0.1 if attack_of(spec)["name"] == "none" else 0.5


def test_to_behave_is_no_attack():
    for own in (Spec(), Spec(attack="none"), Spec(attack="none", attack_start=0.3)):
        pretend = Pretend(formula_where_behaving_would_be_the_worst, Outcome("done", 0.1, 0.6, 0.05))
        found = red_team(own, pretend, budget=40, seeds=[2])
        assert found.yardsticks.behaved.spec == behaved(own)
        assert found.yardsticks.behaved.accuracy == 0.1
        assert found.worst.accuracy == 0.5
        assert "none" not in {trial.attack for trial in found.trials}
        assert "none" not in {attack_of(spec)["name"] for spec in pretend.searched()}
        assert [again.yardsticks.behaved.spec for again in found.seeds] == [replace(behaved(own), seed=2)]


def test_what_behaving_did_not_end_in_is_told_and_not_measured_by():
    found = red_team(Spec(), Pretend(planted, Outcome("failed", message="ValueError: broke")), budget=30)
    assert found.unfinished() == [found.yardsticks.behaved]
    assert found.yardsticks.accuracy == 0.9


# Noise.


def test_noise_is_what_the_worst_of_many_equal_runs_seems_to_cost():
    for accuracy in (0.05, 0.5, 0.9):
        for runs in (1, 50):
            rng = np.random.default_rng(1)
            right = rng.binomial(360, accuracy, size=(20_000, runs + 1)) / 360
            seems = right[:, 0] - right[:, 1:].min(1)
            noise = by_chance(accuracy, 360, runs)
            assert (seems > noise).mean() < 0.055, (accuracy, runs)
            assert (seems > noise / 2).mean() > 0.15, "it is not simply large"


def test_an_accuracy_that_nothing_can_be_above_or_below_has_noise_too():
    assert by_chance(1.0, 360) == pytest.approx(by_chance(0.0, 360))
    assert 0.005 < by_chance(1.0, 360) < 0.02


def costing(points: float, elsewhere: float = 0.0):
    """Trojans cost so much on the spec's seed, and so much on others; nothing else costs anything."""

    def formula(spec):
        cost = points if spec.seed == 1 else elsewhere
        return 0.9 - (cost / 100 if attack_of(spec)["name"] == "trojan" else 0)

    return formula


def test_what_an_attack_cost_is_measured_by_the_lower_yardstick():
    assert red_team(Spec(), Pretend(costing(20)), budget=30).cost == pytest.approx(0.2)
    dear = red_team(Spec(), Pretend(costing(20), Outcome("done", 0.72)), budget=30)
    assert dear.cost == pytest.approx(0.02)
    assert not dear.harmful(360)


@pytest.mark.parametrize(
    ("points", "elsewhere", "seeds", "examples", "harmful"),
    [
        (3, 3, [], 360, False),
        (3, 3, [2, 3, 4], 360, False),  # other seeds do not make much of little
        (3, 3, [], 10_000, True),
        (20, 20, [], 360, True),
        (20, 20, [2, 3], 360, True),
        (20, 0, [2, 3], 360, False),
        (20, 0, [1], 360, True),  # the seed that it was chosen on says nothing
        (-1, 0, [], 10_000, False),
    ],
)
def test_harm_is_more_than_noise_there_and_on_other_seeds(points, elsewhere, seeds, examples, harmful):
    found = red_team(Spec(), Pretend(costing(points, elsewhere)), budget=25, seeds=seeds)
    assert found.harmful(examples) is harmful


@pytest.mark.parametrize(
    ("points", "elsewhere", "seeds", "says"),
    [
        (20, 0, [], r"the worst case cost 20.0 points \(trojan: accuracy 0.700 instead of 0.900\).*with --seeds"),
        (20, 15, [2, 3], r"the worst case cost 20.0 points .* not chosen on it cost 15.0 points on average$"),
        (20, 1, [2, 3], r"cost 20.0 points .*, but .* it cost 1.0 points on average, .* nothing was found that surely"),
        (2, 0, [], r"no attack cost more than 2.0 points \(trojan: .*\), and .* up to [6-9]\.. points .* nothing was"),
        (0, 0, [], r"no attack lowered the accuracy \(.*: accuracy 0.900 instead of 0.900\), and .* nothing was"),
    ],
)
def test_the_verdict_does_not_take_noise_for_harm(points, elsewhere, seeds, says):
    found = red_team(Spec(), Pretend(costing(points, elsewhere)), budget=25, seeds=seeds)
    assert re.search(says, verdict(found, 360))
    assert ("nothing was found" in verdict(found, 360)) is not found.harmful(360)


def test_the_verdict_on_nothing():
    found = red_team(Spec(), Pretend(lambda spec: Outcome("failed", message="broke")), budget=30)
    assert verdict(found, 360) == "no attack came to its end; see above"


def test_seeds_repeat_the_worst_case_beside_the_budget():
    pretend = Pretend(lambda spec: planted(spec) + spec.seed / 100)
    found = red_team(Spec(), pretend, budget=100, seeds=[1, 2, 3, 2])
    worst = [again.worst.spec for again in found.seeds]
    assert worst == [replace(found.worst.spec, seed=seed) for seed in (1, 2, 3)]
    assert [again.yardsticks.reference.spec for again in found.seeds] == [reference(spec) for spec in worst]
    assert [again.yardsticks.behaved.spec for again in found.seeds] == [behaved(spec) for spec in worst]
    assert [again.worst.spec.seed for again, _ in found.elsewhere()] == [2, 3]
    again = [spec for stage, spec in pretend.asked if stage == "seeds"]
    assert [spec.seed for spec in again] == [2, 3] * 3  # seed 1 was known


def test_a_default_is_left_out_so_that_equal_attacks_are_one_spec():
    spec = Spec(attack={"name": "trojan", "pull": 0.6})
    assert with_setting(spec, "pull", 0.3) == Spec(attack="trojan")
    assert with_setting(spec, "pull", None) == Spec(attack="trojan")
    assert with_setting(spec, "form", "ranked") == spec
    assert spec not in variants(spec, "pull", (0.1, 0.3, 0.6))


def test_a_setting_that_does_not_go_with_another_is_left_out():
    assert variants(Spec(attack={"name": "trojan", "drift": "weights"}), "apart", (False, True)) == []


def test_a_search_that_cannot_be_is_refused():
    for changes, settings, says in (
        ({"byzantine": 0.0}, {}, "there is no Byzantine worker to attack"),
        ({}, {"budget": 0}, "budget = 0"),
        ({}, {"shares": [1.0]}, "shares = 1.0"),
        ({}, {"shares": [0.0]}, "shares = 0.0"),
    ):
        with pytest.raises(SpecError, match=says):
            red_team(Spec(**changes), Pretend(planted), **settings)


# What is kept.


class Interrupting:
    """A pool of made-up runs that is interrupted after some."""

    def __init__(self, formula, until: float = float("inf")):
        self.pretend, self.until, self.played = Pretend(formula), until, 0

    def play(self, specs):
        for i in reversed(range(len(specs))):  # in another order than asked for
            if self.played >= self.until:
                raise KeyboardInterrupt
            self.played += 1
            yield i, self.pretend.outcome(specs[i])


def searched(path, pool, **settings):
    with TrialFolder(path, Spec(), HOW) as folder:
        return red_team(Spec(), Evaluation(pool, folder, lambda trial: None), **settings)


def kept(path, how=HOW) -> float | None:
    """The accuracy of the default spec that a search would find there."""
    with TrialFolder(path, Spec(), how) as folder:
        found = folder.find(Spec())
    return found.accuracy if found else None


def test_an_interrupted_search_goes_on_and_finds_the_same(tmp_path):
    whole = searched(tmp_path / "whole", Interrupting(planted), budget=40)
    assert searched(tmp_path / "whole", done := Interrupting(planted), budget=40) == whole
    assert done.played == 0
    for until in (0, 1, 15, 38):
        path = tmp_path / f"broken-{until}"
        with pytest.raises(KeyboardInterrupt):
            searched(path, Interrupting(planted, until), budget=40)
        pool = Interrupting(planted)
        assert searched(path, pool, budget=40) == whole
        assert pool.played == 40 + 2 - until, "and the two runs without an attack"


def test_a_failed_run_is_tried_again_and_a_skipped_one_is_not(tmp_path):
    with TrialFolder(tmp_path / "kept", Spec(), HOW) as folder:
        for attack, status in (("zero", "failed"), ("nan", "skipped"), ("inner", "done")):
            folder.add(Spec(attack=attack), "screen", Outcome(status, 0.5))
    with TrialFolder(tmp_path / "kept", Spec(), HOW) as again:
        assert [again.find(Spec(attack=attack)) is None for attack in ("zero", "nan", "inner", "mimic")] == [
            True,
            False,
            False,
            True,
        ]


def test_what_was_run_on_another_device_is_run_anew(tmp_path):
    with TrialFolder(tmp_path, Spec(), HOW) as folder:
        folder.add(Spec(), "screen", Outcome("done", 0.5))
    assert kept(tmp_path) == 0.5
    cuda = HOW.replace("cpu --threads 1", "cuda")
    with TrialFolder(tmp_path, Spec(), cuda) as other:
        assert other.find(Spec()) is None
        assert (len(other), other.strange) == (0, 1)
        other.add(Spec(), "screen", Outcome("done", 0.4))
    assert [kept(tmp_path, how) for how in (HOW, cuda)] == [0.5, 0.4]


def test_what_another_version_ran_is_run_anew(tmp_path, monkeypatch):
    pool = Pool(Compute(device="cpu"))
    now, flags = pool.how, pool.flags
    monkeypatch.setattr(pool_module, "__version__", "0.0.9")
    assert pool.how != now
    assert pool.flags == flags
    for how, accuracy in ((flags, 0.3), (pool.how, 0.4)):  # flags: what was kept before there was a version
        with TrialFolder(tmp_path, Spec(), how) as folder:
            folder.add(Spec(), "screen", Outcome("done", accuracy))
    assert kept(tmp_path, now) is None
    assert kept(tmp_path, pool.how) == 0.4


def test_a_folder_is_one_search_at_a_time(tmp_path):
    path = tmp_path / "kept"
    with TrialFolder(path, Spec(), HOW) as first:
        with pytest.raises(StoreError, match="kept: another process writes there; wait"):
            TrialFolder(path, Spec(), HOW)
        first.add(Spec(), "screen", Outcome("done", 0.5))
        with TrialFolder(tmp_path / "another", Spec(), HOW):
            pass
    assert kept(path) == 0.5
    with pytest.raises(ZeroDivisionError), TrialFolder(path, Spec(), HOW):
        1 / 0  # noqa: B018
    assert kept(path) == 0.5
    (path / "results.jsonl").write_text("{}\n")
    for _ in range(2):  # what cannot be read is not kept locked
        with pytest.raises(StoreError, match="no line of it is of a search"):
            TrialFolder(path, Spec(), HOW)


def test_a_process_that_is_killed_leaves_no_lock(tmp_path):
    with TrialFolder(tmp_path, Spec(), HOW):
        pass  # nothing but the lock is there, and still it is the folder of a search
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]
    holds = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, tmp_path / LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(StoreError, match="another process writes there"):
            TrialFolder(tmp_path, Spec(), HOW)
        process.kill()
    assert kept(tmp_path) is None


def test_a_search_goes_on_where_there_are_no_locks(tmp_path, monkeypatch):
    def without(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks_module.fcntl, "flock", without)
    assert kept(tmp_path) is None
    monkeypatch.setattr(locks_module, "fcntl", None)
    assert kept(tmp_path) is None


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    with TrialFolder(tmp_path / "kept", Spec(), HOW) as folder:
        folder.add(Spec(), "screen", Outcome("done", 0.5))
    results = tmp_path / "kept" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole + whole[:40])
    with TrialFolder(tmp_path / "kept", Spec(), HOW) as again:
        assert len(again) == 1
        again.add(Spec(seed=2), "screen", Outcome("done", 0.4))
    assert [json.loads(line)["accuracy"] for line in results.read_text().splitlines()] == [0.5, 0.4]


def test_a_damaged_line_and_a_foreign_folder_are_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="no line of it is of a search"):
        TrialFolder(tmp_path, Spec(), HOW)
    assert (tmp_path / "results.jsonl").read_text() == "{}\n", "what may be somebody else's is left alone"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    with pytest.raises(StoreError, match="holds no search"):
        TrialFolder(tmp_path / "foreign", Spec(), HOW)
    assert [entry.name for entry in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="cannot be written"):
        TrialFolder(tmp_path / "results.jsonl" / "below", Spec(), HOW)


# Real runs.


@pytest.fixture(scope="module")
def pair():
    """A pool of two processes, which take seconds to start."""
    with Pool(Compute(device="cpu"), jobs=2) as pool:
        yield pool


def test_a_pool_of_processes_gives_what_runs_alone_give(quick, pair):
    quick = partial(quick, accountant="rdp")  # which a new process is faster with
    specs = [quick(), quick(attack="local-poisoning", byzantine=0.1), quick(attack="zero"), quick(attack="inner")]
    together = dict(pair.play(specs))
    with Pool(Compute(device="cpu"), jobs=1) as single:
        assert dict(single.play(specs)) == together
    assert [together[i].status for i in range(4)] == ["done", "skipped", "done", "done"]
    assert "square root" in together[1].message
    assert together[0].accuracy == run(specs[0], compute=Compute(device="cpu", threads=1)).accuracy


def test_a_process_that_is_killed_fails_its_run_only(quick, pair):
    # One of these would take minutes: its process is ended, and the pool takes a new one for what comes next.
    quick = partial(quick, accountant="rdp")
    endless = quick(rounds=200_000, sigma=200.0)
    playing = pair._play_in_processes([endless, quick()])
    index, outcome = next(playing)
    assert (index, outcome.status) == (1, "done")
    next(process for process in pair._processes.values()).kill()
    index, outcome = next(playing)
    assert (index, outcome.status) == (0, "failed")
    assert "ended from outside" in outcome.message
    assert [outcome.status for _, outcome in pair.play([quick(), quick(seed=2)])] == ["done", "done"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["digits", "usps"]), st.sampled_from([0.2, 0.6]), st.sampled_from(["inner", "zero"])),
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_every_run_is_in_one_batch_and_batches_are_full_of_alike_ones(settings, most):
    specs = [Spec(dataset=name, byzantine=share, attack=attack) for name, share, attack in settings]
    found = batches(specs, most)
    order = [i for batch in found for i in batch]
    assert sorted(order) == list(range(len(specs)))
    assert [len(batch) for batch in found[:-1]] == [most] * (len(found) - 1)
    assert [settings[i] for i in order] == sorted(settings)


def test_parts_make_up_all_runs_however_far_each_is():
    specs = [Spec(seed=seed, byzantine=share) for seed in range(20) for share in (0.2, 0.6)]
    parts = [left_of_part(specs, f"{part}/3", 4, set()) for part in (1, 2, 3)]
    names = [spec.name() for part in parts for spec in part]
    assert sorted(names) == sorted(spec.name() for spec in specs), "each of them once"
    for done in (0, 1, 9, 40):
        again = left_of_part(specs, "2/3", 4, {spec.name() for spec in parts[1][:done]})
        assert again == parts[1][done:]


def test_runs_side_by_side_are_split_where_one_breaks(quick, monkeypatch):
    asked = []

    def together(specs, compute):
        asked.append(len(specs))
        if any(spec.attack == "local-poisoning" for spec in specs):
            raise SpecError("not here")
        return [run(spec, compute=compute) for spec in specs]

    monkeypatch.setattr(pool_module, "run_together", together)
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

    monkeypatch.setattr(pool_module, "run_together", together)
    monkeypatch.setattr(pool_module, "alone", lambda spec, compute: Outcome("done", 0.5))
    assert side_by_side([quick(seed=seed) for seed in range(4)], Compute(device="cpu")) == [Outcome("done", 0.5)] * 4
    assert len(held) == 3


def test_a_pool_says_how_it_runs():
    for compute, flags in (
        (Compute(device="cpu"), "--device cpu --threads 1"),
        (Compute(device="cpu", threads=2, memory=64), "--device cpu --threads 2 --memory 64"),
    ):
        assert Pool(compute).flags == flags
        assert Pool(compute).how == f"noisegate {__version__} {flags}"


def test_a_run_that_breaks_is_reported(quick, monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(pool_module, "run", breaks)
    with Pool(Compute(device="cpu"), jobs=1) as pool:
        assert dict(pool.play([quick()])) == {0: Outcome("failed", message="RuntimeError: out of luck")}


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
    assert found["without_attack"]["attack"] == {"name": "none"}
    assert {"name": "none"} not in [trial["attack"] for trial in (*found["trials"], *found["untried"])]
    clean = min(found["reference_accuracy"], found["without_attack"]["accuracy"])
    assert found["cost"] == clean - found["worst"]["accuracy"]
    assert found["test_examples"] == 360
    assert found["noise"] == by_chance(clean, 360, 4)
    assert found["harmful"] is False  # nothing is learned in three rounds
    assert len(found["untried"]) > 40
    assert [trial["seed"] for trial in found["seeds"]["trials"]] == [1, 2]
    assert found["seeds"]["min"] <= found["seeds"]["mean"] <= found["seeds"]["max"]
    assert found["seeds"]["cost_on_other_seeds"]["mean"] == found["seeds"]["trials"][1]["cost"]

    worst = tmp_path / found["worst_spec"]
    assert read_spec(worst).canonical()["attack"] == found["worst"]["attack"]
    head = worst.read_text().splitlines()[0]
    assert __version__ in head
    again = cli(*head.partition("noisegate run ")[2].replace("worst.toml", f"run {worst}").split(), "--json").json
    assert again["accuracy"] == found["worst"]["accuracy"]
    assert again["byzantine_selected"] == found["worst"]["byzantine_selected"]


def test_a_finished_search_runs_nothing_again(cli, tmp_path, monkeypatch):
    line = ("redteam", *FLAGS, "--budget", "3", "--out", "found")
    first = cli(*line)
    assert first.status == 0, first.err
    files = {
        name: (tmp_path / "found" / name).read_bytes()
        for name in ("results.jsonl", "worst.toml", "findings.json", "plot.html")
    }
    monkeypatch.setattr(pool_module, "run", None)  # cannot be called
    assert cli(*line).out == first.out
    assert files == {name: (tmp_path / "found" / name).read_bytes() for name in files}


def test_the_table_for_people_has_the_worst_first(cli):
    answer = cli("redteam", *FLAGS, "--budget", "3")
    assert answer.status == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert rows[0][:3] == ["accuracy", "below", "attack"]
    accuracies = [float(row[0]) for row in rows[1:4]]
    assert accuracies == sorted(accuracies)
    assert rows[4][2:5] == ["without", "an", "attack"]
    assert "not tried for want of budget" in answer.out
    assert re.search(r"all of [\w-]+, ", answer.out)
    assert "nothing was found that surely harms this configuration" in answer.out
    assert "redteam: at most 3 runs, 1 at a time, kept in runs/redteam-digits-" in answer.err
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


def test_bad_input_is_one_readable_line(cli, tmp_path):
    for line, says in (
        ("--dataset nosuch", "dataset = 'nosuch'"),
        ("--byzantine 0", "there is no Byzantine worker to attack"),
        ("--shares 0.2,x", "shares = '0.2,x': must be numbers with commas between them"),
        ("--shares 2", "shares = 2.0"),
        ("--seeds 1.5", "seeds = '1.5'"),
        ("--budget 0", "budget = 0"),
        ("--byzantine 0.02", "byzantine = 0.02: makes no Byzantine worker beside the honest ones (10)"),
        ("--shares 0.02", "shares = 0.02: makes no Byzantine worker"),
        ("--jobs 0", "jobs = 0"),
        ("--workers 1000", "batch = 16"),
        ("--attack labelflip", "did you mean 'label-flip'?"),
        ("nosuch.toml", "nosuch.toml: cannot be read"),
    ):
        answer = cli("redteam", *FLAGS, *line.split())
        assert answer.status == 2, line
        assert not (tmp_path / "runs").exists(), line
        assert answer.out == ""
        assert len(answer.err.strip().splitlines()) == 1, line
        assert says in answer.err, line


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(spawn, cli, tmp_path):
    """In one process; tests/test_sweep.py interrupts a pool of processes."""
    line = ["redteam", *FLAGS, "--budget", "30", "--rounds", "50", "--out", "kept"]
    process = spawn(*line)
    results = tmp_path / "kept" / "results.jsonl"
    waited = time.monotonic() + 120

    def wait_until(happened) -> None:
        while not happened():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < waited
            time.sleep(0.05)

    wait_until((tmp_path / "kept" / LOCK).exists)
    second = cli(*line)
    assert second.status == 2
    told = "noisegate: kept: another process writes there; wait until it is done, or choose another --out\n"
    assert second.err == told
    wait_until(lambda: results.exists() and b"\n" in results.read_bytes())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "kept in kept; the same command goes on from there" in err.replace("\n", " ")
    assert "Traceback" not in err
    before = results.read_bytes()
    assert before.endswith(b"\n")
    assert cli(*line, "--budget", "2").status == 0
    assert results.read_bytes().startswith(before)
    keys = [json.loads(found)["key"] for found in results.read_text().splitlines()]
    assert len(keys) == len(set(keys))  # nothing was run again


def test_the_worst_so_far_is_that_of_attacks_at_the_share_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("noisegate.cli.bar.SILENCE", -1.0)  # a line for every run
    lines = io.StringIO()
    with _watched(Console(file=lines, width=80), 9, 0.6) as watch:
        watch(Trial(reference(Spec()), "reference", Outcome("done", 0.1)))
        watch(Trial(behaved(Spec()), "reference", Outcome("done", 0.2)))
        watch(Trial(Spec(attack="zero"), "screen", Outcome("done", 0.5)))
        watch(Trial(Spec(attack="mimic"), "screen", Outcome("skipped", message="not here")))
        watch(Trial(Spec(attack="zero", byzantine=0.9), "shares", Outcome("done", 0.3)))
        watch(Trial(Spec(attack="zero", seed=2), "seeds", Outcome("done", 0.4)))
    assert lines.getvalue().splitlines() == [
        "redteam: 0 of at most 9 runs; reference 0.100",
        "redteam: 0 of at most 9 runs; without an attack 0.200",
        "redteam: 1 of at most 9 runs; worst so far 0.500; screen: zero 0.500",
        "redteam: 1 of at most 9 runs; worst so far 0.500; screen: mimic skipped",
        "redteam: 2 of at most 9 runs; worst so far 0.500; shares: zero at 90% 0.300",
        "redteam: 2 of at most 9 runs; worst so far 0.500; seeds: zero on seed 2 0.400",
    ]


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


def lines_of(page):
    """The lines of the chart of a page."""
    return json.loads(re.search(r'id="chart-1-data">(.*?)</script>', page)[1])["data"]


def test_the_page_loads_nothing_and_has_a_line_for_each_attack():
    found = red_team(Spec(), Pretend(planted), budget=200)
    page = redteam_page(as_json(found, 360)).html()
    loaded = Loaded(page)
    assert loaded.found == []
    assert "script" in loaded.tags
    assert "link" not in loaded.tags
    assert "iframe" not in loaded.tags
    assert "@import" not in page.partition("<body>")[0]
    *lines, clean = lines_of(page)
    assert len(lines) == len(REAL)
    assert lines[0]["name"] == "trojan", "the worst comes first"
    assert [line["name"] for line in lines[MOST_LINES:]] == ["other attacks"] * (len(REAL) - MOST_LINES)
    assert sum(line["showlegend"] for line in lines) == MOST_LINES + 1
    assert (clean["name"], clean["y"]) == ("reference", [0.9, 0.9])
    assert verdict(found, 360)[1:] in html.unescape(page), "the sentence of the terminal"
    assert Loaded('<script src="https://x.org/a.js">').found == ["https://x.org/a.js"]


def test_a_page_of_one_share_has_dots():
    page = redteam_page(as_json(red_team(Spec(), Pretend(planted), budget=5), 360)).html()
    (dots,) = lines_of(page)
    assert "rank-matched" in dots["y"]
    assert dots["x"] == sorted(dots["x"]), "worst first"
    assert "Not tried for want of budget" in page


def test_the_page_of_a_folder_is_that_of_the_search(tmp_path):
    found = as_json(red_team(Spec(), Pretend(planted), budget=5), 360)
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(StoreError, match="the search is not over"):
        report(tmp_path)
    (tmp_path / "findings.json").write_bytes(seal(found))
    assert report(tmp_path) == redteam_page(found).html()
    evil = "</script><img src=x onerror=alert(1)>"
    found["trials"][0] |= {"described": evil, "attack": {"name": evil}}
    (tmp_path / "findings.json").write_bytes(seal({**found, "verdict": evil}))
    assert "img" not in Loaded(report(tmp_path)).tags
    for wrong in ({}, {**found, "trials": 3}, {**found, "spec": None}, {**found, "trials": [{"attack": 1}]}):
        (tmp_path / "findings.json").write_bytes(seal(wrong))
        with pytest.raises(StoreError, match="is damaged"):
            report(tmp_path)
    (tmp_path / "findings.json").write_text('{"trials": []}')
    with pytest.raises(StoreError, match="is damaged"):
        report(tmp_path)


def test_the_worst_spec_is_toml(tmp_path):
    spec = Spec(attack={"name": "trojan", "pull": 0.6}, attack_start=0.5)
    with TrialFolder(tmp_path / "kept", spec, HOW) as folder:
        folder.write("worst.toml", "# how\n" + spec.to_toml())
    assert tomllib.loads((tmp_path / "kept" / "worst.toml").read_text())["attack"]["pull"] == 0.6
    assert read_spec(tmp_path / "kept" / "worst.toml") == spec
    assert Trial(spec, "screen", Outcome("done", 0.5)).attack == "trojan"
