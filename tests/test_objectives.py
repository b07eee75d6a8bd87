"""What the red team can be told to harm: accuracy, the recall of a class, or a trigger. Most runs here are made up."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from noisegate import NoisegateError, Spec, SpecError, StoreError
from noisegate.attacks import ATTACKS
from noisegate.cli import findings as findings_module
from noisegate.cli.findings import as_json, show_findings, verdict
from noisegate.cli.redteam import _bills
from noisegate.redteam import red_team
from noisegate.redteam.findings import by_chance
from noisegate.redteam.objectives import OBJECTIVES, Measure, lower
from noisegate.redteam.search import SHARES
from noisegate.redteam.settings import SETTINGS, behaved, candidates, fits
from noisegate.redteam.trials import RESULTS, TrialFolder
from noisegate.report.redteam_page import redteam_page
from noisegate.runs import costs, reference
from noisegate.sweeps.outcome import Outcome
from test_redteam import FLAGS, HOW, REAL, attack_of

CLEAN = [0.9, 0.95, 0.9, 0.4, 0.9]
"""The recall of each class without an attack. Class 3 is hard."""

COUNTS = (40, 40, 100, 20, 10)
"""The test examples of each class."""


class Pretend:
    """In place of runs: outcomes by a function. Keeps what it was asked for."""

    def __init__(self, outcome, clean: Outcome | None = None, peace: Outcome | None = None):
        self.outcome, self.asked = outcome, []
        self.clean = clean or Outcome("done", 0.9, recall=CLEAN)
        self.peace = peace or Outcome("done", 0.9, recall=CLEAN)

    def __call__(self, specs, stage):
        self.asked += [(stage, spec) for spec in specs]
        return [self.one(spec) for spec in specs]

    def one(self, spec: Spec) -> Outcome:
        if spec.byzantine == 0:
            return self.clean(spec) if callable(self.clean) else self.clean
        return self.peace if spec == behaved(spec) else self.outcome(spec)

    def attacks(self) -> set[str]:
        return {attack_of(spec)["name"] for stage, spec in self.asked if stage not in ("reference", "seeds")}


def hiding(spec: Spec) -> Outcome:
    """Class 3 is recognized least whatever happens; the class that is hidden, if it is called 2, falls most."""
    attack, left = attack_of(spec), list(CLEAN)
    left[3] = 0.3
    accuracy = 0.85
    if attack["name"] == "gaussian":
        accuracy = 0.5  # which harms every class a little
        left = [value - 0.2 for value in CLEAN]
    if attack["name"] == "class-hide":
        hidden = attack.get("hidden", 0)
        if hidden < 5:
            left[hidden] = CLEAN[hidden] - (0.5 if attack.get("shown", 1) == 2 else 0.3) - 0.05 * (hidden == 4)
    return Outcome("done", accuracy, recall=left)


# --- the search ------------------------------------------------------------------------------------------------------


def test_recall_finds_the_class_that_falls_most_and_not_the_lowest():
    found = red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=COUNTS)
    assert attack_of(found.worst.spec) == {"name": "class-hide", "hidden": 4, "shown": 2}
    assert found.victim == 4
    assert found.cost == pytest.approx(0.55)
    plain = red_team(Spec(), Pretend(hiding), budget=300)
    assert plain.worst.attack == "gaussian", "which the accuracy is lowest under"
    assert plain.victim is None


def test_recall_is_measured_by_the_lower_of_the_two_runs_without_an_attack():
    peace = Outcome("done", 0.8, recall=[0.9, 0.95, 0.9, 0.4, 0.2])  # the aggregator by itself costs class 4 most of it
    found = red_team(Spec(), Pretend(hiding, peace=peace), budget=300, objective="recall", counts=COUNTS)
    assert found.victim != 4
    assert found.cost == pytest.approx(0.5)
    assert found.measure.recall == [0.9, 0.95, 0.9, 0.4, 0.2]


def test_every_attack_serves_recall_and_those_with_a_trigger_serve_backdoor():
    assert sorted(candidates("accuracy")) == sorted(candidates("recall")) == REAL
    assert candidates("backdoor") == ["backdoor"]
    pretend = Pretend(hiding)
    red_team(Spec(), pretend, budget=100, objective="recall")
    assert pretend.attacks() == set(REAL)
    late = {"name": "dormant", "attack": "backdoor"}
    assert fits(Spec(attack=late), "backdoor")
    assert fits(Spec(attack="backdoor", attack_start=0.9), "backdoor")
    assert not fits(Spec(attack="on-off"), "backdoor")


def opening(spec: Spec) -> Outcome:
    """The trigger of one target works best, with one share and one size."""
    attack = attack_of(spec)
    works = (
        0.3 + 0.3 * (attack.get("target") == 7) + 0.1 * (attack.get("share") == 0.5) + 0.1 * (attack.get("size") == 5)
    )
    return Outcome("done", 0.9, recall=CLEAN, attack_success=works - 0.1 * (spec.byzantine < 0.5))


def by_itself(spec: Spec) -> Outcome:
    """How far a trigger works in the reference, which depends on its target."""
    success = None if spec.attack == "none" else 0.25 if attack_of(spec).get("target") == 7 else 0.01
    return Outcome("done", 0.9, recall=CLEAN, attack_success=success)


def test_backdoor_finds_the_trigger_that_works_best_and_measures_it_by_itself():
    pretend = Pretend(opening, clean=by_itself)
    found = red_team(Spec(attack="zero"), pretend, budget=100, objective="backdoor", counts=[36] * 10)
    assert attack_of(found.worst.spec) == {"name": "backdoor", "target": 7, "share": 0.5, "size": 5}
    assert pretend.attacks() == {"backdoor"}, "not even the attack of the spec"
    assert found.yardsticks.reference.spec == reference(found.worst.spec)
    assert found.yardsticks.level(found.measure) == 0.25
    assert found.cost == pytest.approx(0.8 - 0.25)
    assert found.shares() == sorted(SHARES)
    (other,) = found.also
    assert other.spec == reference(Spec(attack="backdoor"))


def test_backdoor_takes_the_attack_of_the_spec_if_it_has_a_trigger_and_keeps_one():
    own = Spec(attack={"name": "on-off", "attack": {"name": "backdoor", "target": 3}})

    def formula(spec):
        return replace(opening(spec), attack_success=0.9 if attack_of(spec)["name"] == "on-off" else 0.2)

    pretend = Pretend(formula, clean=by_itself)
    found = red_team(own, pretend, budget=60, objective="backdoor")
    assert next(spec for stage, spec in pretend.asked if stage == "screen") == own
    assert pretend.asked[0] == ("reference", reference(own))
    assert found.worst.spec == own
    assert all(fits(spec, "backdoor") for stage, spec in pretend.asked if stage == "settings")


def test_what_both_references_cost_is_billed(monkeypatch):
    found = red_team(Spec(), Pretend(opening, clean=by_itself), budget=30, shares=(), objective="backdoor")
    billed = []
    monkeypatch.setattr(costs, "without_copies", lambda terms: terms)
    monkeypatch.setattr(costs, "bills", lambda runs: billed.extend(runs))
    _bills(found, {1: "what one run costs"})
    assert found.also[0].spec != found.yardsticks.reference.spec
    asked = len(found.trials) + 3
    assert billed == ["what one run costs"] * asked, "with workers that behave, and two references"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_worst_attacks_are_listed_by_what_is_to_be_harmed(objective):
    def formula(spec):
        number = sorted(ATTACKS).index(attack_of(spec)["name"]) / 100
        recall = [0.9, 0.95 - number, 0.9, 0.4, 0.9]
        return Outcome("done", 0.9 - abs(number - 0.1), recall=recall, attack_success=number)

    found = red_team(Spec(), Pretend(formula, clean=by_itself), budget=50, shares=(), objective=objective)
    listed = found.worst_by_attack(0.6)
    numbers = [found.measure.value(trial.outcome) for trial in listed]
    assert numbers == sorted(numbers, reverse=objective != "accuracy")
    assert listed[0] is found.worst or found.rank(listed[0]) == found.rank(found.worst)


def test_runs_that_cannot_be_measured_are_never_the_worst():
    def formula(spec):
        return Outcome("done", 0.1) if attack_of(spec)["name"] == "zero" else hiding(spec)

    found = red_team(Spec(), Pretend(formula), budget=60, objective="recall")
    assert found.worst.attack == "class-hide"
    assert [trial.attack for trial in found.worst_by_attack(0.6)][-1] == "zero"
    failing = Pretend(lambda spec: Outcome("failed", message="broke"), clean=by_itself)
    none = red_team(Spec(), failing, budget=9, objective="backdoor")
    assert (none.worst, none.cost) == (None, None)
    assert verdict(none, 360) == "no attack came to its end; see above"


def test_an_objective_that_is_none_is_refused(cli, tmp_path):
    with pytest.raises(SpecError, match=r"objective = 'speed': unknown; choose from accuracy, recall, backdoor"):
        red_team(Spec(), Pretend(hiding), objective="speed")
    answer = cli("redteam", *FLAGS, "--objective", "speed")
    assert answer.status == 2
    assert "objective = 'speed': unknown; choose from accuracy, recall, backdoor, balanced_accuracy" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_reference_that_does_not_end_ends_the_search():
    def broken(spec):
        return Outcome("failed", message="out of luck") if attack_of(spec).get("target") == 7 else by_itself(spec)

    with pytest.raises(NoisegateError, match="the reference run did not end: out of luck"):
        red_team(Spec(), Pretend(opening, clean=broken), budget=60, objective="backdoor")


def test_the_settings_reach_every_class_of_ten():
    assert {*SETTINGS["class-hide"]["hidden"]} == {*SETTINGS["class-hide"]["shown"]} == {*range(10)}
    assert {*SETTINGS["backdoor"]["target"]} == {*range(10)}
    swapped = {
        number for pairs in SETTINGS["class-swap"]["pairs"] for pair in pairs.split(",") for number in pair.split("-")
    }
    assert swapped == {str(label) for label in range(10)}


def test_the_lower_recall_of_two():
    assert lower([0.5, None, 0.3], [0.4, 0.2, None]) == [0.4, 0.2, 0.3]
    assert lower([None], [None]) == [None]
    assert lower(None, [0.4]) == lower([0.4], None) == lower([0.4], []) == [0.4]
    assert lower(None, None) == ()


# --- noise and other seeds -------------------------------------------------------------------------------------------


def test_noise_is_that_of_the_examples_that_count():
    found = red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=COUNTS)
    assert found.measured_on(210) == 10
    tried = sum(trial.spec.byzantine == 0.6 for trial in found.trials)
    assert found.noise(210) == by_chance(0.9, 10, tried * 5), "the class was chosen as well"
    assert found.harmful(210) is (found.cost > found.noise(210))
    assert red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=[4000] * 5).harmful(20_000)
    opened = red_team(
        Spec(), Pretend(opening, clean=by_itself), budget=100, objective="backdoor", counts=[36] * 7 + [8] * 3
    )
    assert opened.measured_on(276) == 276 - 8
    tried = sum(trial.spec.byzantine == 0.6 for trial in opened.trials)
    assert opened.noise(276) == by_chance(0.25, 268, tried)
    unknown = red_team(Spec(), Pretend(hiding), budget=300, objective="recall")
    assert unknown.measured_on(210) == 210


def elsewhere(spec: Spec) -> Outcome:
    """On other seeds another class falls most."""
    if spec.seed == 1:
        return hiding(spec)
    return Outcome("done", 0.85, recall=[0.1, 0.95, 0.9, 0.4, 0.8])


def test_on_other_seeds_the_class_is_that_of_the_worst_case():
    found = red_team(Spec(), Pretend(elsewhere), budget=300, objective="recall", counts=[4000] * 5, seeds=[1, 2])
    assert [cost for _, cost in found.elsewhere()] == pytest.approx([0.1])
    ours, other = as_json(found, 20_000)["seeds"]["trials"]
    assert (ours["class"], ours["recall_drop"], ours["cost"]) == (4, *[pytest.approx(0.55)] * 2)
    assert (other["class"], other["recall_drop"], other["cost"]) == (4, *[pytest.approx(0.1)] * 2)


def test_on_other_seeds_a_trigger_is_measured_by_that_seeds_reference():
    def clean(spec):
        return replace(by_itself(spec), attack_success=0.78 if spec.seed == 2 else 0.25)

    found = red_team(Spec(), Pretend(opening, clean=clean), budget=100, objective="backdoor", seeds=[2])
    assert [cost for _, cost in found.elsewhere()] == pytest.approx([0.02])
    assert not found.harmful(360)
    (again,) = found.seeds
    assert again.yardsticks.reference.spec == reference(again.worst.spec)


# --- what it says ----------------------------------------------------------------------------------------------------


def said(found, monkeypatch, examples: int = 210) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(findings_module, "Console", lambda **_: Console(file=out, width=300, highlight=False))
    show_findings(found, examples, {})
    return out.getvalue().splitlines()


def test_the_table_has_the_drop_and_its_class(monkeypatch):
    found = red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=COUNTS, seeds=[2])
    lines = said(found, monkeypatch)
    assert lines[0].split()[:4] == ["drop", "class", "accuracy", "below"]
    assert lines[1].split()[:6] == ["0.550", "4", "0.850", "0.050", "class-hide", "(hidden"]
    behaving = next(line for line in lines if "without an attack" in line)
    assert behaving.split()[:3] == ["0.000", "0", "0.900"]
    text = "\n".join(lines)
    assert "drop: by how much the recall of the class that is harmed most fell" in text
    assert "a drop counts from the lower recall of a class in these two runs" in text
    repeated = "worst case on seed 2: 0.850, reference 0.900, without an attack 0.900; "
    assert repeated + "recall of class 4 0.350 instead of 0.900" in text


def test_the_table_has_the_success(monkeypatch):
    found = red_team(Spec(), Pretend(opening, clean=by_itself), budget=100, objective="backdoor", seeds=[2])
    lines = said(found, monkeypatch)
    assert lines[0].split()[:3] == ["success", "accuracy", "below"]
    assert lines[1].split()[:4] == ["0.800", "0.900", "0.000", "backdoor"]
    assert next(line for line in lines if "without an attack" in line).split()[0] == "–"
    text = "\n".join(lines)
    assert "called the target once they carry the trigger" in text
    assert "a cost counts from the success of the same trigger in the reference" in text
    assert "attack success 0.800 instead of 0.250" in text


def test_the_verdict_names_what_was_harmed():
    harmed = red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=[4000] * 5)
    case = r"the worst case cost 55.0 points (class-hide (hidden 4, shown 2): recall of class 4 0.350 instead of 0.900)"
    assert verdict(harmed, 20_000).startswith(case)
    assert "on 4000 test examples" in verdict(harmed, 20_000)
    opened = red_team(Spec(), Pretend(opening, clean=by_itself), budget=100, objective="backdoor", counts=[1000] * 10)
    assert "attack success 0.800 instead of 0.250" in verdict(opened, 10_000)
    assert verdict(opened, 10_000).startswith("the worst case cost 55.0 points (backdoor (")
    same = Outcome("done", 0.9, recall=CLEAN, attack_success=0.01)
    for objective, words in (
        ("recall", "no attack lowered the recall of a class ("),
        ("backdoor", "no trigger worked better than in the reference ("),
    ):
        none = red_team(Spec(), Pretend(lambda spec: same, clean=by_itself), budget=9, objective=objective)
        assert verdict(none, 360).startswith(words)
        assert "nothing was found that surely harms" in verdict(none, 360)


def test_json_has_everything():
    found = red_team(Spec(), Pretend(opening, clean=by_itself), budget=100, objective="backdoor", counts=[36] * 10)
    told = as_json(found, 360)
    assert (told["objective"], told["reference_attack_success"], told["reference_recall"]) == ("backdoor", 0.25, CLEAN)
    assert (told["worst"]["attack_success"], told["worst"]["recall"]) == (pytest.approx(0.8), CLEAN)
    assert (told["worst"]["class"], told["worst"]["recall_drop"], told["worst"]["fallback"]) == (None, None, 0.0)
    assert told["without_attack"]["attack_success"] is None
    successes = [trial["attack_success"] for trial in told["trials"]]
    assert successes == sorted(successes, reverse=True)
    recalled = as_json(red_team(Spec(), Pretend(hiding), budget=300, objective="recall", counts=COUNTS), 210)
    assert (recalled["worst"]["class"], recalled["worst"]["recall_drop"]) == (4, pytest.approx(0.55))
    drops = [trial["recall_drop"] for trial in recalled["trials"]]
    assert drops == sorted(drops, reverse=True)
    json.dumps(told)


@pytest.mark.parametrize(
    ("objective", "title", "line"),
    [
        ("accuracy", "Accuracy against the Byzantine share", 0.9),
        ("recall", "Drop in recall against the Byzantine share", None),
        ("backdoor", "Attack success against the Byzantine share", 0.25),
    ],
)
def test_the_page_is_of_the_objective(objective, title, line):
    found = red_team(Spec(), Pretend(opening, clean=by_itself), budget=80, objective=objective)
    page = redteam_page(as_json(found, 360)).html()
    assert title in page
    (chart,) = re.findall(r'id="chart-1-data">(.*?)</script>', page)
    drawn = [each["y"] for each in json.loads(chart)["data"] if each["name"] == "reference"]
    assert drawn == ([] if line is None else [[line, line]])


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_what_an_earlier_version_kept_is_run_again_only_where_it_lacks_something(tmp_path):
    with TrialFolder(tmp_path, Spec(), HOW) as folder:
        folder.add(Spec(), "screen", Outcome("done", 0.5))
        folder.add(Spec(attack="zero"), "screen", Outcome("done", 0.5, recall=CLEAN))
        folder.add(Spec(attack="nan"), "screen", Outcome("skipped", message="not here"))
    for objective in OBJECTIVES:
        with TrialFolder(tmp_path, Spec(), HOW, objective) as again:
            assert (again.find(Spec()) is None) is (objective != "accuracy")
            assert again.find(Spec(attack="zero")).recall == CLEAN
            assert again.find(Spec(attack="nan")).status == "skipped"


@pytest.mark.parametrize(
    "wrong", [{"recall": [2.0]}, {"recall": "low"}, {"attack_success": -1.0}, {"fallback": "often"}]
)
def test_a_line_with_numbers_that_cannot_be_is_dropped(tmp_path, wrong):
    with TrialFolder(tmp_path, Spec(), HOW) as folder:
        folder.add(Spec(), "screen", Outcome("done", 0.5, recall=CLEAN))
        folder.add(Spec(attack="zero"), "screen", replace(Outcome("done", 0.4, recall=CLEAN), **wrong))
    with TrialFolder(tmp_path, Spec(), HOW) as again:
        assert (len(again), again.damaged) == (1, 1)
        assert again.find(Spec()).recall == CLEAN
    lines = (tmp_path / RESULTS).read_text().splitlines()
    (tmp_path / RESULTS).write_text("{}\n")
    assert len(lines) == 1
    with pytest.raises(StoreError, match="no line of it is of a search"):
        TrialFolder(tmp_path, Spec(), HOW)


def test_an_outcome_without_them_is_that_of_an_earlier_version():
    assert Measure("recall", CLEAN).value(Outcome("done", 0.5)) is None
    assert Measure("backdoor").value(Outcome("done", 0.5)) is None
    assert Measure("backdoor").rank(Outcome("done", 0.5)) == float("inf")


# --- real runs -------------------------------------------------------------------------------------------------------


def test_a_real_search_for_a_backdoor(cli, tmp_path):
    command = ("redteam", *FLAGS, "--aggregator", "mean", "--objective", "backdoor", "--budget", "2", "--out", "found")
    found = cli(*command, "--json").json
    assert {trial["attack"]["name"] for trial in found["trials"]} == {"backdoor"}
    assert found["cost"] == pytest.approx(found["worst"]["attack_success"] - found["reference_attack_success"])
    assert found["trainings"] == 2 + 2
    head = (tmp_path / "found" / "worst.toml").read_text().splitlines()[0]
    assert f"attack success {found['worst']['attack_success']!r} with noisegate" in head
    again = cli("run", "found/worst.toml", "--device", "cpu", "--threads", "1", "--json").json
    assert again["attack_success"] == found["worst"]["attack_success"]
    table = cli(*command)
    assert table.status == 0, table.err
    assert table.out.split()[:2] == ["success", "accuracy"]


def test_a_real_search_for_a_class(cli):
    command = (
        "redteam",
        *FLAGS,
        "--aggregator",
        "mean",
        "--attack",
        "class-hide",
        "--objective",
        "recall",
        "--budget",
        "1",
    )
    answer = cli(*command)
    assert answer.status == 0, answer.err
    assert "kept in runs/redteam-recall-digits-" in answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert rows[0][:3] == ["drop", "class", "accuracy"]
    assert rows[1][4] == "class-hide"
    found = cli(*command, "--json").json
    victim = found["worst"]["class"]
    clean = min(found["reference_recall"][victim], found["without_attack"]["recall"][victim])
    assert found["cost"] == pytest.approx(clean - found["worst"]["recall"][victim])
    assert found["worst"]["recall_drop"] == pytest.approx(found["cost"])
