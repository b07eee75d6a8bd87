"""What accuracy hides: balanced accuracy, confusion, AUC, the majority share, and a model that predicts one class."""

import io
import json
import warnings
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from noisegate import Compute, Dataset, Spec, StoreError, metrics, run
from noisegate.cli import table as table_module
from noisegate.cli.table import show_result
from noisegate.errors import OneClassWarning
from noisegate.report import report
from noisegate.runs import costs, imbalance
from noisegate.runs.result import Result, stored
from noisegate.runs.store import RunFolder
from noisegate.streams import stream
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
