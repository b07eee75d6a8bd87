"""There is no regression, and every way in says so in the same words."""

import numpy as np
import pytest
import torch
from torch import nn

import noisegate
from noisegate import Compute, DataError, Dataset, Spec, SpecError
from noisegate.errors import NO_REGRESSION
from noisegate.federation import Worker
from noisegate.federation.auxiliary import read_auxiliary
from noisegate.federation.policy import Policy

X = np.random.default_rng(0).uniform(-1, 1, (40, 3))
Y = X @ [1.0, -2.0, 0.5]


def of_arrays(folder):
    Dataset.of(X, Y)


def of_tensors(folder):
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
    Dataset("mine", x, y, x, y, classes=2)


def of_lists(folder):
    Dataset.of(X.tolist(), Y.tolist())


def of_workers(folder):
    Dataset.of_workers([(X, Y), (X, Y)])


def of_a_frame(folder):
    pandas = pytest.importorskip("pandas")
    Dataset.of(pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y}))


def of_an_npz(folder):
    np.savez(folder / "mine.npz", x=X, y=Y)
    noisegate.run(Spec(dataset=str(folder / "mine.npz")))


def of_many_whole_numbers(folder):
    y = np.arange(4000) * 3
    np.savez(folder / "mine.npz", x=np.zeros((4000, 2)), y=y)
    noisegate.run(Spec(dataset=str(folder / "mine.npz")))


def table(path, y):
    rows = [f"{a},{b},{label}" for (a, b, _), label in zip(X, y, strict=False)]
    path.write_text("\n".join(["a,b,y", *rows]))


def of_a_csv(folder):
    table(folder / "mine.csv", Y)
    noisegate.run(Spec(dataset=str(folder / "mine.csv")))


def of_a_csv_of_whole_numbers(folder):
    rows = [f"0.1,{number / 3000},{number * 3}" for number in range(3000)]
    (folder / "mine.csv").write_text("\n".join(["a,b,y", *rows]))
    noisegate.run(Spec(dataset=str(folder / "mine.csv")))


def of_a_folder_of_tables(folder):
    for name in ("a.csv", "b.csv"):
        table(folder / name, Y)
    noisegate.run(Spec(dataset=str(folder)))


def of_a_folder_of_archives(folder):
    for name in ("a.npz", "b.npz"):
        np.savez(folder / name, x=X, y=Y)
    noisegate.run(Spec(dataset=str(folder)))


def of_a_worker(folder):
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
    Worker(nn.Linear(3, 2), (x, y), object.__new__(Policy))


def of_a_servers_examples(folder):
    np.savez(folder / "mine.npz", x=X, y=Y)
    read_auxiliary(folder / "mine.npz", (3,), 2)


@pytest.mark.parametrize(
    "way",
    [
        of_arrays,
        of_tensors,
        of_lists,
        of_workers,
        of_a_frame,
        of_an_npz,
        of_many_whole_numbers,
        of_a_csv,
        of_a_csv_of_whole_numbers,
        of_a_folder_of_tables,
        of_a_folder_of_archives,
        of_a_worker,
        of_a_servers_examples,
    ],
)
def test_labels_that_are_no_classes_are_refused(way, tmp_path):
    with pytest.raises(DataError) as caught:
        way(tmp_path)
    assert str(caught.value).endswith(NO_REGRESSION)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), None),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.MSELoss(reduction="none")),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.L1Loss(reduction="none")),
    ],
    ids=["one output", "squared error", "absolute error"],
)
def test_models_and_losses_of_regression_are_refused(model, loss):
    given = {} if loss is None else {"loss": loss}
    with pytest.raises(SpecError) as caught:
        noisegate.run(Spec(rounds=1), compute=Compute(device="cpu"), model=model, **given)
    assert NO_REGRESSION in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_line_on_the_command_line(cli, tmp_path):
    table(tmp_path / "mine.csv", Y)
    answer = cli("run", "--data", "mine.csv")
    assert answer.status == 2
    assert answer.err.strip().endswith(NO_REGRESSION)
    assert answer.err.count("\n") == 1
