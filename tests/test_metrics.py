"""What accuracy hides: balanced accuracy, confusion, AUC, the majority share, and a model that predicts one class."""

import io
import json
import warnings
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from noisegate import Compute, Dataset, NoisegateError, Spec, SpecError, StoreError, metrics, run
from noisegate.cli import table as table_module
from noisegate.cli.findings import as_json, verdict
from noisegate.cli.table import show_result
from noisegate.errors import NoisegateWarning, OneClassWarning
from noisegate.redteam import red_team
from noisegate.redteam.objectives import Measure
from noisegate.redteam.trials import TrialFolder
from noisegate.report import report
from noisegate.report.redteam_page import redteam_page
from noisegate.runs import costs, imbalance
from noisegate.runs.measures import value_of
from noisegate.runs.result import Result, stored
from noisegate.runs.store import RunFolder
from noisegate.streams import stream
from noisegate.sweeps.outcome import Outcome
from test_report import Reader

CPU = Compute(device="cpu", threads=1)
GIVEN = {"sigma": 0.5, "sigma_base": 0.5, "accountant": "rdp", "batch": 16, "byzantine": 0.0, "rate": 1.0}
"""Little noise that is given, so that what is learned is seen."""


def rare(share: float = 0.05, size: int = 600, apart: float = 3.0) -> Dataset:
    """Two clouds, of which class 1 has this share, in a fixed order."""
    rng = stream(1, "rare")
    y = (torch.rand(2 * size, generator=rng) < share).long()
    x = torch.randn(2 * size, 4, generator=rng) + apart / 2 * (2 * y[:, None] - 1)
    return Dataset("rare", x[:size], y[:size], x[size:], y[size:], 2)


def plain_linear() -> nn.Module:
    """A linear layer from zeros."""
    linear = nn.Linear(4, 2)
    nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)
    return linear


class Constant(nn.Module):
    """It starts with the answer 0 for everything, whatever it sees."""

    def __init__(self, classes: int = 2):
        super().__init__()
        self.linear = nn.Linear(4, classes)
        nn.init.zeros_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias.zero_()[0] = 1000.0

    def forward(self, x):
        return self.linear(x)


# --- the numbers -----------------------------------------------------------------------------------------------------


def brute_auc(scores, y) -> float:
    """By all pairs."""
    margin = (scores[:, 1] - scores[:, 0]).tolist()
    ones, zeros = ([value for value, label in zip(margin, y.tolist(), strict=True) if label == each] for each in (1, 0))
    pairs = [(a, b) for a in ones for b in zeros]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_is_that_of_all_pairs_also_with_ties(levels):
    rng = stream(1, "auc")
    scores = torch.randint(levels, (80, 2), generator=rng).float()
    y = (torch.rand(80, generator=rng) < 0.2).long()
    assert metrics.auc(scores, y) == pytest.approx(brute_auc(scores, y), abs=1e-12)


def test_auc_is_unknown_where_it_means_nothing():
    scores, y = torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1])
    assert metrics.auc(scores, y) == 1.0
    assert metrics.auc(scores, 1 - y) == 0.0
    assert metrics.auc(scores, torch.tensor([1, 1])) is None
    assert metrics.auc(torch.zeros(2, 3), y) is None
    assert metrics.auc(torch.full((2, 2), torch.nan), y) is None
    assert metrics.auc(torch.tensor([[0.0, torch.inf], [0.0, -torch.inf]]), y) == 0.0


def test_a_confusion_matrix_has_a_row_for_each_class():
    y, called = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 1, 0])
    confusion = metrics.confusion_of(called, y, 4)
    assert confusion.tolist() == [[1, 2, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    recall = metrics.recall_of(confusion)
    assert recall == [pytest.approx(1 / 3), 1.0, 0.0, None]
    assert metrics.balanced_accuracy(recall) == pytest.approx(4 / 9)
    assert metrics.majority_share(confusion) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("confusion", "label"),
    [
        ([[95, 0], [5, 0]], 0),
        ([[95, 0], [4, 1]], None),  # one of five of the rare class is found
        ([[990, 0], [0, 10]], None),  # nearly all are called 0, and rightly
        ([[1, 94], [0, 5]], 1),
        ([[0, 95], [5, 0]], None),
        ([[30, 1, 0], [33, 0, 0], [35, 0, 1]], 0),
        ([[30, 3, 0], [33, 0, 0], [35, 0, 1]], None),
        ([[30, 0], [0, 0]], None),  # there is nothing else to call by another name
    ],
)
def test_nearly_one_class_means_that_others_are_called_so_too(confusion, label):
    assert metrics.one_class(confusion) == label


# --- in a result -----------------------------------------------------------------------------------------------------


def hidden_run(**changes) -> Result:
    with pytest.warns(OneClassWarning, match="calls 100.0% of the test examples class 0"):
        return run(Spec(**GIVEN, rounds=3, **changes), compute=CPU, dataset=rare(), model=Constant())


def test_a_result_has_them_and_a_warning_says_what_accuracy_hides():
    found = hidden_run()
    y = rare().y_test
    zeros, ones = int((y == 0).sum()), int((y == 1).sum())
    assert found.accuracy > 0.9
    assert found.balanced_accuracy == 0.5
    assert found.majority_share == found.accuracy == zeros / len(y)
    assert found.confusion == [[zeros, 0], [ones, 0]]
    assert found.recall == [1.0, 0.0]
    assert 0 <= found.auc <= 1


def test_a_sound_model_is_not_warned_of_and_its_numbers_agree():
    with warnings.catch_warnings():
        warnings.simplefilter("error", OneClassWarning)
        found = run(Spec(**GIVEN, rounds=60), compute=CPU, dataset=rare(share=0.3), model=nn.Linear(4, 2))
    (right, missed), (called, hits) = found.confusion
    assert (right + hits) / (right + missed + called + hits) == pytest.approx(found.accuracy)
    assert found.recall == [pytest.approx(right / (right + missed)), pytest.approx(hits / (called + hits))]
    assert found.balanced_accuracy == pytest.approx(sum(found.recall) / 2)
    assert found.auc > 0.95
    assert imbalance.told(found.as_dict()) == ""


def test_classes_that_are_even_and_many_have_no_auc():
    found = run(Spec(**GIVEN, rounds=2), compute=CPU)
    assert found.auc is None
    assert len(found.confusion) == 10
    assert not imbalance.uneven(found.as_dict()), "so that the table of digits does not grow"
    assert imbalance.columns(found.as_dict()) == {}


def test_a_confusion_matrix_of_very_many_classes_is_not_kept():
    many = metrics.MOST_CLASSES + 1
    y = torch.arange(4 * many) % many
    given = Dataset("many", torch.randn(4 * many, 4, generator=stream(1, "x")), y, torch.randn(many, 4), y[:many], many)
    found = run(Spec(**GIVEN, rounds=1, workers=2, auxiliary=1), compute=CPU, dataset=given, model=nn.Linear(4, many))
    assert found.confusion is None
    assert found.balanced_accuracy is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("confusion", [[1, 2], [3]]),
        ("confusion", [[1, -2], [3, 4]]),
        ("confusion", [[0, 0], [0, 0]]),
        ("confusion", [[1.5, 0], [0, 0]]),
        ("balanced_accuracy", 1.5),
        ("auc", -0.1),
        ("majority_share", "much"),
    ],
)
def test_a_damaged_number_is_refused_and_older_results_have_none(tmp_path, name, value):
    found = json.loads(json.dumps(hidden_run().as_dict()))
    with pytest.raises(StoreError, match=name):
        stored({**found, name: value}, RunFolder(tmp_path))
    new = ("balanced_accuracy", "majority_share", "confusion", "auc")
    older = stored({key: entry for key, entry in found.items() if key not in new}, RunFolder(tmp_path))
    assert [getattr(older, name) for name in new] == [None] * 4
    assert not imbalance.uneven(older.as_dict())
    assert imbalance.told(older.as_dict()) == ""


# --- for people ------------------------------------------------------------------------------------------------------


def shown(result: Result, monkeypatch, proportion=None) -> str:
    said = io.StringIO()
    monkeypatch.setattr(table_module, "Console", lambda: Console(file=said, width=160))
    show_result(result, proportion or {}, costs.bills([costs.training_of(result.as_dict())])[0], "out")
    return said.getvalue()


def test_the_table_shows_them_for_two_classes_only(monkeypatch):
    found = hidden_run()
    accuracies = {"reference_accuracy": 0.9, "undefended_accuracy": 0.9, "reference_balanced_accuracy": 0.75}
    told = shown(found, monkeypatch, accuracies)
    assert "balanced accuracy" in told
    assert "0.500  mean recall of the classes; 0.750 in the reference" in told
    assert "majority share" in told
    assert "called 1; class 1: 0 right" in told
    assert "AUC" in told
    even = replace(found, recall=[0.1] * 10, majority_share=0.12)
    assert "balanced accuracy" not in shown(even, monkeypatch)


def test_the_report_shows_the_confusion_and_warns(tmp_path):
    folder = tmp_path / "run"
    with pytest.warns(OneClassWarning):
        run(Spec(**GIVEN, rounds=3), compute=CPU, dataset=rare(), model=Constant(), out=folder, label="constant")
    text = Reader(report(folder)).text
    assert "The model predicts nearly one class" in text
    assert "balanced accuracy" in text
    assert "Confusion" in text


# --- metrics by name and of one's own --------------------------------------------------------------------------------


def share_of_ones(scores, y):
    """A metric: the share of examples that are called 1."""
    assert scores.shape == (len(y), 2)
    return (scores.argmax(1) == 1).float().mean()


SOUND = {**GIVEN, "rounds": 20}


def sound(spec: Spec | None = None, **inputs) -> Result:
    return run(spec or Spec(**SOUND), compute=CPU, dataset=rare(share=0.3), model=plain_linear(), **inputs)


def test_own_functions_are_called_with_scores_and_labels():
    found = sound(metrics={"ones": share_of_ones, "half": lambda scores, y: 0.5, "nothing": lambda *_: float("nan")})
    (zeros, wrong), (missed, ones) = found.confusion
    total = zeros + wrong + missed + ones
    assert found.metrics == {"ones": pytest.approx((wrong + ones) / total), "half": 0.5, "nothing": None}


def test_names_are_those_of_every_result_and_change_no_noise(tmp_path):
    (tmp_path / "mine.py").write_text("def ones(scores, y):\n    return (scores.argmax(1) == 1).double().mean()\n")
    path = f"{tmp_path / 'mine.py'}:ones"
    names = ["balanced_accuracy", "auc", "recall-1", "worst_recall", "accuracy", path]
    plain, found, python = sound(), sound(Spec(**SOUND, metrics=names)), sound(metrics=names)
    assert (plain.metrics, plain.accuracy, plain.auc) == (None, found.accuracy, found.auc)
    assert found.metrics == python.metrics
    assert list(found.metrics) == names
    assert found.metrics["recall-1"] == found.recall[1]
    assert found.metrics["worst_recall"] == min(found.recall)
    assert found.metrics["balanced_accuracy"] == found.balanced_accuracy
    assert found.metrics[path] > 0.1
    assert Spec(metrics=[]) == Spec()
    assert Spec(metrics=["auc", "auc"]).metrics == ["auc"]
    assert "metrics" not in Spec().canonical()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["balanced"], r"metrics = 'balanced': unknown \(did you mean 'balanced_accuracy'\?\); choose from accuracy"),
        ("auc", "must be a list of names"),
        (["recall-x"], "unknown"),
        ([3], "unknown"),
        (["no_such_file.py:f"], "cannot be loaded"),
        ({"auc": share_of_ones}, "give your function another name"),
        ({"f": 3}, "must be a function"),
        ({"f": lambda scores, y: scores}, "must give one number"),
        ({"f": lambda scores, y: "much"}, "must give one number"),
        ({"f": lambda scores: 1.0}, "cannot be computed"),
        ({"f": lambda scores, y: [][0]}, "cannot be computed .IndexError"),
    ],
)
def test_a_metric_that_is_none_is_refused_before_training(given, message):
    with pytest.raises(SpecError, match=message):
        run(Spec(**GIVEN, rounds=10**6), compute=CPU, dataset=rare(), model=nn.Linear(4, 2), metrics=given)


def test_a_metric_may_not_change_what_others_see_and_one_that_fails_in_the_end_costs_no_run():
    calls = []

    def destroys(scores, y):
        scores.zero_(), y.zero_()
        return 0.0

    def fails_later(scores, y):
        calls.append(1)
        return 1 / (2 - len(calls))

    with pytest.warns(NoisegateWarning, match="later.*ZeroDivisionError.*left out"):
        found = sound(metrics={"destroys": destroys, "later": fails_later, "ones": share_of_ones})
    assert found.metrics["later"] is None
    assert found.metrics["ones"] > 0.1


def test_a_finished_run_has_the_metrics_that_it_was_given(tmp_path):
    first = sound(out=tmp_path / "run", metrics={"ones": share_of_ones})
    again = sound(out=tmp_path / "run", metrics={"ones": share_of_ones}, resume=True)
    assert again.metrics == first.metrics
    assert again.seconds == first.seconds, "nothing was run"
    with pytest.raises(StoreError, match="'half' was not measured"):
        sound(out=tmp_path / "run", metrics={"half": lambda scores, y: 0.5}, resume=True)


@pytest.mark.parametrize("damage", [{"ones": "much"}, [], {"ones": float("nan")}])
def test_damaged_metrics_are_refused(tmp_path, damage):
    found = json.loads(json.dumps(sound(metrics={"ones": share_of_ones}).as_dict()))
    with pytest.raises(StoreError, match="metrics"):
        stored({**found, "metrics": damage}, RunFolder(tmp_path))


def test_tables_of_sweeps_have_a_column_for_each():
    even = {
        "recall": [0.1] * 10,
        "majority_share": 0.12,
        "balanced_accuracy": 0.8,
        "metrics": {"ones": 0.25, "no": None},
    }
    assert imbalance.columns(even) == {"ones": 0.25}
    two = {"recall": [0.9, 0.7], "majority_share": 0.95, "balanced_accuracy": 0.8, "auc": 0.9}
    assert imbalance.columns(two) == {"balanced": 0.8, "AUC": 0.9}
    assert imbalance.gathered([two, two, even]) == {"balanced": [0.8, 0.8], "AUC": [0.9, 0.9], "ones": [0.25]}


# --- as objective of a red team --------------------------------------------------------------------------------------


class Pretend:
    """In place of runs: every attack leaves the accuracy, and one of them harms the rare class."""

    def __init__(self, clean: Outcome, harmed: Outcome, name: str = "gaussian"):
        self.clean, self.harmed, self.name, self.asked = clean, harmed, name, []

    def __call__(self, specs, stage):
        self.asked += specs
        return [self.harmed if spec.canonical()["attack"]["name"] == self.name else self.clean for spec in specs]


CLEAN = Outcome("done", 0.95, recall=[0.97, 0.7], balanced_accuracy=0.835, auc=0.9, metrics={"m.py:f": 0.8})
HARMED = Outcome("done", 0.95, recall=[1.0, 0.0], balanced_accuracy=0.5, auc=0.5, metrics={"m.py:f": 0.3})
COUNTS = (3800, 200)


@pytest.mark.parametrize(
    ("objective", "cost"),
    [("balanced_accuracy", 0.335), ("auc", 0.4), ("recall-1", 0.7), ("worst_recall", 0.7), ("m.py:f", 0.5)],
)
def test_a_red_team_finds_what_lowers_a_metric_and_not_the_accuracy(objective, cost):
    pretend = Pretend(CLEAN, HARMED)
    found = red_team(Spec(), pretend, budget=60, objective=objective, counts=COUNTS)
    assert found.worst.attack == "gaussian"
    assert found.cost == pytest.approx(cost)
    assert found.harmful(4000)
    assert f"{objective} {HARMED_VALUES[objective]:.3f} instead of" in verdict(found, 4000)
    told = json.loads(json.dumps(as_json(found, 4000)))
    assert told["objective"] == objective
    assert told["worst"]["balanced_accuracy"] == 0.5
    assert objective in redteam_page(told).html()
    own = ["m.py:f"] if objective == "m.py:f" else None
    assert all(spec.metrics == own for spec in pretend.asked)
    plain = red_team(Spec(), pretend, budget=60)
    assert not plain.harmful(4000), "what the accuracy shows"


HARMED_VALUES = {"balanced_accuracy": 0.5, "auc": 0.5, "recall-1": 0.0, "worst_recall": 0.0, "m.py:f": 0.3}


def test_the_noise_of_a_metric_is_that_of_the_examples_it_rests_on():
    assert Measure("accuracy", (), COUNTS).measured_on(4000) == 4000
    assert Measure("recall-1", (), COUNTS).measured_on(4000) == 200
    assert Measure("auc", (), COUNTS).measured_on(4000) == 200
    assert Measure("balanced_accuracy", (), COUNTS).measured_on(4000) == 760
    assert Measure("balanced_accuracy", (), (100, 100)).measured_on(200) == 200
    rng = stream(1, "noise")  # by trying: the deviation of the mean of two recalls of 0.8
    draws = [(torch.rand(2000, count, generator=rng) < 0.8).double().mean(1) for count in COUNTS]
    deviation = float(((draws[0] + draws[1]) / 2).std())
    assert pytest.approx(deviation, rel=0.1) == (0.8 * 0.2 / 760) ** 0.5


@pytest.mark.parametrize(
    ("objective", "outcome", "message"),
    [
        ("auc", replace(CLEAN, auc=None), "'auc': the reference run has none"),
        ("recall-7", CLEAN, "'recall-7': the reference run has none"),
        ("m.py:f", replace(CLEAN, metrics={"m.py:f": -3.0}), "has -3, but it must be from 0 to 1"),
    ],
)
def test_an_objective_that_the_reference_has_not_is_refused(objective, outcome, message):
    with pytest.raises(NoisegateError, match=message):
        red_team(Spec(), Pretend(outcome, HARMED), objective=objective, counts=COUNTS)
    with pytest.raises(SpecError, match=r"objective = 'blanced_accuracy': unknown .did you mean 'balanced_accuracy'"):
        red_team(Spec(), Pretend(CLEAN, HARMED), objective="blanced_accuracy")


def test_a_kept_run_without_the_metric_is_run_again(tmp_path):
    with TrialFolder(tmp_path / "search", Spec(), "how") as folder:
        folder.add(Spec(), "screen", replace(CLEAN, auc=None))
    for objective, known in (("auc", False), ("balanced_accuracy", True), ("recall-1", True), ("accuracy", True)):
        with TrialFolder(tmp_path / "search", Spec(), "how", objective) as folder:
            assert (folder.find(Spec()) is not None) == known


def test_the_command_searches_by_a_metric(cli, tmp_path):
    few = ("--budget", 2, "--rounds", 2, "--shares", 0.5, "--byzantine", 0.5, "--jobs", 1, "--device", "cpu")
    answer = cli("redteam", "--objective", "balanced_accuracy", *few, "--out", tmp_path / "search")
    assert answer.status == 0
    assert "balanced_accuracy" in answer.out
    assert "a cost counts from the lower balanced_accuracy of these two runs" in " ".join(answer.out.split())
    refused = cli("redteam", "--objective", "recal-1")
    assert (refused.status, refused.err.count("\n")) == (2, 1)


def test_run_takes_metrics_by_flag(cli, tmp_path):
    few = ("--rounds", 2, "--device", "cpu", "--json", "--out", tmp_path / "run")
    answer = cli("run", "--metric", "recall-3", "--metric", "worst_recall", *few)
    found = json.loads(answer.out)
    assert found["metrics"] == {"recall-3": found["recall"][3], "worst_recall": min(found["recall"])}


# --- by worker -------------------------------------------------------------------------------------------------------


def hospitals(**changes) -> Dataset:
    """Workers 2, 5 and 9; the test labels of worker 5 are turned around, and worker 9 has no test examples."""
    given = rare(share=0.5, size=600)
    owner = torch.tensor([2, 5, 9]).repeat(200)
    owner_test = torch.tensor([2, 5]).repeat(300)
    y_test = torch.where(owner_test == 5, 1 - given.y_test, given.y_test)
    return replace(given, y_test=y_test, owner=owner, owner_test=owner_test, **changes)


def by_worker(dataset: Dataset, **changes) -> Result:
    return run(Spec(**SOUND, **changes), compute=CPU, dataset=dataset, model=plain_linear())


def test_each_worker_has_the_accuracy_of_its_own_test_examples():
    found = by_worker(hospitals())
    assert list(found.worker_accuracy) == ["2", "5", "9"]
    assert found.worker_accuracy["9"] is None
    assert found.worker_accuracy["2"] > 0.9
    assert found.worker_accuracy["5"] < 0.1
    assert (found.worker_accuracy["2"] + found.worker_accuracy["5"]) / 2 == pytest.approx(found.accuracy)
    worst = imbalance.worst_worker(found.as_dict())
    assert (worst.name, worst.accuracy, worst.workers) == ("5", found.worker_accuracy["5"], 2)
    assert worst.median == pytest.approx(found.accuracy)
    assert imbalance.columns(found.as_dict())["worst worker"] == worst.accuracy
    assert value_of(found.as_dict(), "worst_worker") == worst.accuracy


def test_workers_are_called_by_their_names():
    names = tuple(f"ward {letter}" for letter in "abcdefghij")
    assert list(by_worker(hospitals(worker_names=names)).worker_accuracy) == ["ward c", "ward f", "ward j"]


def test_where_nobody_knows_whose_the_test_examples_are_there_is_none():
    assert by_worker(replace(hospitals(), owner_test=None)).worker_accuracy is None
    assert by_worker(hospitals(), redeal=True, workers=3).worker_accuracy is None, "who holds what is dealt anew"
    assert imbalance.worst_worker(by_worker(rare(0.5), workers=3).as_dict()) is None


def test_people_are_told_of_the_worst_worker(monkeypatch, tmp_path):
    found = by_worker(hospitals())
    told = shown(found, monkeypatch)
    assert "on the test examples of worker 5 alone; median of 2 workers" in told
    run(Spec(**SOUND), compute=CPU, dataset=hospitals(), model=plain_linear(), out=tmp_path / "run")
    assert "Accuracy by worker" in Reader(report(tmp_path / "run")).text
    damaged = json.loads(json.dumps(found.as_dict())) | {"worker_accuracy": {"2": 1.5}}
    with pytest.raises(StoreError, match="worker_accuracy"):
        stored(damaged, RunFolder(tmp_path))
