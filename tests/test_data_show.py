"""`noisegate data show`: what the program understood of a data set, in counts that can be checked."""

import csv
import re

import numpy as np
import pytest

from noisegate import Dataset
from noisegate.data import describe, load

RNG = np.random.default_rng(1)
X, Y, WHO = RNG.uniform(-1, 1, (100, 2)), np.arange(100) % 2, np.repeat([0, 1], [20, 80])


def test_every_count_is_that_of_the_examples():
    data = Dataset.of(X, np.array(["no", "yes"])[Y], worker=np.array(["b", "a"])[WHO], name="toy")
    found = describe(data)
    assert (found["name"], found["train"], found["test"], found["shape"]) == ("toy", 80, 20, [2])
    assert [entry["name"] for entry in found["classes"]] == ["no", "yes"]
    assert [entry["train"] + entry["test"] for entry in found["classes"]] == [50, 50]
    assert [(one["name"], one["train"], one["test"]) for one in found["workers"]] == [("a", 64, 16), ("b", 16, 4)]
    for number, worker in enumerate(found["workers"]):
        assert worker["classes"] == data.y[data.owner == number].bincount(minlength=2).tolist()
    assert found["range"] == [float(data.x.min()), float(data.x.max())]
    assert found["notes"] == ["A fifth of each worker's examples was split off as test examples."]
    assert found["warnings"] == []


def test_workers_without_training_examples_or_test_examples():
    found = describe(Dataset.of(X, Y, worker=WHO * 3, test=(X, Y)))
    assert [(one["name"], one["train"], one["test"]) for one in found["workers"]] == [("0", 20, None), ("3", 80, None)]
    assert describe(Dataset.of(X, Y))["workers"] == []


@pytest.mark.filterwarnings("ignore::noisegate.errors.NoisegateWarning")
@pytest.mark.parametrize(
    ("x", "y", "worker", "says"),
    [
        (X * 400, Y, WHO, "Feature 0 goes up to|Feature 1 goes up to"),
        (X, (np.arange(100) < 9) * 1, WHO, "Class 0 has 9.*of the examples: a model that always answers so"),
        (X, (np.arange(100) < 9) * 1, WHO, r"Classes with few training examples: 1 \(.\)"),
        (X, Y, np.repeat([0, 1], [9, 91]), r"Workers with fewer than 16 training examples, .*: 0 \(8\)\."),
        (X * [1, 0], Y, WHO, r"Features that are the same for all: 1\."),
    ],
)
def test_what_is_hardly_meant_is_told(x, y, worker, says):
    assert any(re.match(says, hint) for hint in describe(Dataset.of(x, y, worker=worker))["warnings"])


def test_pictures_are_told_to_be_scaled():
    found = describe(Dataset.of(RNG.integers(0, 256, (100, 4, 4), dtype=np.uint8), Y))
    assert found["notes"][0] == "Pictures of bytes were divided by 255."
    assert found["range"][1] <= 1


def test_it_is_shown_on_the_command_line(cli, tmp_path):
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["ill", "age", "dose", "ward"])
        out.writerows([("no", "yes")[y], *x, f"w{who}"] for x, y, who in zip(900 * X, Y, WHO, strict=True))
    flags = ("--label", "ill", "--worker-column", "ward")
    shown = cli("data", "show", "mine.csv", *flags)
    assert (shown.status, shown.err) == (0, "")
    for part in (
        "80 to train on, 20 to test on",
        "2 features: age, dose",
        "2, with 16 to 64 training examples",
        "warning: ",
    ):
        assert part in shown.out, part
    found = cli("data", "show", "mine.csv", *flags, "--json").json
    assert [worker["name"] for worker in found["workers"]] == ["w0", "w1"]
    assert cli("data", "show", "digits", "--json").json["classes"][3]["train"] == int((load("digits").y == 3).sum())
    wrong = cli("data", "show", "nosuch.csv")
    assert (wrong.status, wrong.err) == (2, "noisegate: nosuch.csv: no such file; give the path of a CSV file\n")
