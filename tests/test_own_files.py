"""Tables and folders of a user's own: what is in them is read whole, and what is wrong is one line with its place."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import noisegate
from noisegate import DataError, Dataset, Spec, SpecError
from noisegate.data import Columns, load, own_path
from noisegate.data.tables import read_table
from noisegate.streams import stream

RNG = np.random.default_rng(1)
N, SIZES = 90, (6, 24, 60)
X, ILL = RNG.uniform(-1, 1, (N, 3)).astype(np.float32), np.where(np.arange(N) % 3 > 0, "no", "yes")
WHO = np.array(["ward 10", "ward 9", "away"])[np.repeat([0, 1, 2], SIZES)]
HEADER = ["age", "dose", "rate", "ill"]


def write(path: Path, rows, header=HEADER, separator=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return str(path)


def rows(which=slice(None)):
    return [[*map(repr, map(float, x)), label] for x, label in zip(X[which], ILL[which], strict=True)]


@pytest.fixture
def clinics(tmp_path):
    """A folder of one table for each worker."""
    folder = tmp_path / "clinics"
    folder.mkdir()
    for number, where in zip((2, 10, 1), np.split(np.arange(N), np.cumsum(SIZES)[:-1]), strict=True):
        write(folder / f"clinic{number}.csv", rows(where))
    return folder


def sorted_rows(*parts):
    return sorted(map(tuple, torch.cat(parts).tolist()))


# One table


def test_a_table_is_read_whole(tmp_path):
    data = load(write(tmp_path / "mine.csv", rows()))
    assert (data.name, data.classes, data.class_names, data.feature_names) == (
        "mine",
        2,
        ("no", "yes"),
        ("age", "dose", "rate"),
    )
    assert sorted_rows(data.x, data.x_test) == sorted_rows(torch.from_numpy(X))
    label = {tuple(x): int(name == "yes") for x, name in zip(torch.from_numpy(X).tolist(), ILL, strict=True)}
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        assert [label[tuple(row)] for row in x.tolist()] == y.tolist()
    assert len(data.x_test) == N // 5
    assert data.owner is None
    again = Dataset.of(X, ILL, seed=3)
    assert torch.equal(load(str(tmp_path / "mine.csv"), stream(3, "test-split")).x, again.x), "as from Python"


def test_many_rows_are_read_in_parts(tmp_path):
    x = RNG.normal(size=(9000, 2)).astype(np.float32)
    table = [[float(a), float(b), n % 2] for n, (a, b) in enumerate(x)]
    found = read_table(Path(write(tmp_path / "long.csv", table, ["a", "b", "y"])), Columns())
    assert torch.equal(found.x, torch.from_numpy(x))
    table[8000][1] = "x"
    with pytest.raises(DataError, match=r"long\.csv, line 8002: column 'b': 'x' is no number"):
        read_table(Path(write(tmp_path / "long.csv", table, ["a", "b", "y"])), Columns())


def test_columns_say_label_and_worker(tmp_path):
    mixed = [[label, *x, who] for (*x, label), who in zip(rows(), WHO, strict=True)]
    path = write(tmp_path / "mine.csv", mixed, ["ill", "age", "dose", "rate", "ward"])
    data = load(path, columns=Columns("ill", "ward"))
    assert data.worker_names == ("away", "ward 9", "ward 10")
    assert (data.owner.bincount() + data.owner_test.bincount()).tolist() == [60, 24, 6]
    assert data.owner_test.bincount().tolist() == [12, 4, 1]
    held = {tuple(x): who for x, who in zip(torch.from_numpy(X).tolist(), WHO, strict=True)}
    assert [held[tuple(row)] for row in data.x.tolist()] == [data.worker_names[who] for who in data.owner]
    assert load(
        write(tmp_path / "moved.csv", [row[1:] + row[:1] for row in mixed], [*HEADER[:3], "ward", "ill"]),
        columns=Columns(worker="ward"),
    ).feature_names == ("age", "dose", "rate")


@pytest.mark.parametrize(("separator", "suffix"), [(";", ".csv"), ("\t", ".csv"), ("\t", ".tsv"), (",", ".CSV")])
def test_other_separators_blank_lines_and_spaces_are_read_the_same(tmp_path, separator, suffix):
    plain = load(write(tmp_path / "mine.csv", rows()))
    spaced = [[f" {cell} " for cell in row] for row in rows()]
    path = Path(write(tmp_path / f"other{suffix}", [*spaced[:5], [], *spaced[5:], []], separator=separator))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert torch.equal(load(str(path)).x, plain.x)
    assert load(str(path)).class_names == ("no", "yes")


GOOD = "a,b,y\n1,2,no\n3,4,yes\n"
WRONG = [
    ("", "line 0: is empty; the first line must name the columns"),
    ("a,b,y\n", "line 1: has no examples, only a header"),
    ("1,2,0\n3,4,1\n", "line 1: is all numbers; write the names of the columns"),
    (",b,y\n1,2,no\n", "line 1: column 1 has no name; .* index=False"),
    ("a,a,y\n1,2,no\n", "line 1: two columns are named 'a'"),
    ("a b y\n1 2 no\n", "line 1: no column is left for features beside the label; cells are separated by"),
    ("y\nno\n", "line 1: no column is left"),
    (GOOD + "5,6\n", "line 4: has 2 cells, but the header has 3 columns"),
    (GOOD + "\n5,6,no,7\n", "line 5: has 4 cells"),
    (GOOD + "5,,no\n", "line 4: column 'b': '' is no number; fill in or drop missing values"),
    (GOOD + "5,NA,no\n", "line 4: column 'b': 'NA' is no number"),
    (GOOD + "5,nan,no\n", "line 4: column 'b': 'nan' is no number"),
    (GOOD + "inf,6,no\n", "line 4: column 'a': 'inf' is no number"),
    (GOOD + "1e39,6,no\n", "line 4: column 'a': '1e39' is no number"),
    (GOOD + '5,"1,5",no\n', "line 4: column 'b': '1,5' is no number"),
    (GOOD + "5,6,\n", "line 4: column 'y' is empty; every example needs it"),
    (GOOD + '5,6,"no\n', "line 4: cannot be read as CSV"),
    (GOOD + "5,6\0,no\n", "line 4: "),
    (GOOD + f"5,{'6' * 200_000},no\n", "line 4: cannot be read as CSV .field larger"),
    ("a,b,y\n" + "1,2,no\n" * 9, "the labels are 1 different ones, such as 'no'"),
    ("a,b,y\n" + "".join(f"1,2,p{n}\n" for n in range(1001)), "the labels are 1001 different ones"),
    ("a,b,y\n1,2,0.5\n1,2,1\n", "the label '0.5' is no whole number; name another column as the label"),
    (GOOD, "no worker has 5 examples"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_wrong_table_is_one_line_with_its_place(tmp_path, text, says):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"bad\.csv(, |: ){says}") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_one_line(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"a,b,y\n1,2,caf\xe9\n" * 9)
    with pytest.raises(DataError, match=r"bad\.csv: is no UTF-8 text"):
        load(str(tmp_path / "bad.csv"))
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        load(str(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=r"folder\.csv: no such file"):
        load(str(tmp_path / "folder.csv"))


@pytest.mark.filterwarnings("ignore::noisegate.errors.NoisegateWarning")
def test_a_damaged_table_never_raises_anything_else(tmp_path):
    whole, path = Path(write(tmp_path / "good.csv", rows())).read_bytes(), tmp_path / "bad.csv"
    refused = []
    for _ in range(300):
        damaged = bytearray(whole[: RNG.integers(1, len(whole))])
        for place in RNG.integers(0, len(damaged), 3):
            damaged[place] = RNG.integers(0, 256)
        path.write_bytes(damaged)
        try:
            assert bool(torch.isfinite(load(str(path)).x).all())
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("bad" in message and "\n" not in message for message in refused)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            Columns("il"),
            r"line 1: label_column = 'il': is no column .did you mean 'ill'.*there are age, dose, rate, ill",
        ),
        (Columns(None, "ward"), "line 1: worker_column = 'ward': is no column"),
        (Columns("age", "age"), "label_column = 'age': is also the worker_column"),
    ],
)
def test_a_wrong_column_is_one_line(tmp_path, columns, says):
    with pytest.raises(DataError, match=says):
        load(write(tmp_path / "mine.csv", rows()), columns=columns)


def test_a_column_worker_says_who_holds_the_example(tmp_path):
    who = ["north" if n % 3 else "south" for n in range(60)]
    lines = [f"{n % 7},{n % 5},{word},{'yes' if n % 2 else 'no'}" for n, word in enumerate(who)]
    path = tmp_path / "mine.csv"
    for name, column in (("worker", None), ("ward", "ward")):
        path.write_text("\n".join([f"a,b,{name},ill", *lines]))
        data = load(str(path), columns=Columns(worker=column))
        assert data.worker_names == ("north", "south")
        assert data.feature_names == ("a", "b")
        held = data.owner.tolist() + data.owner_test.tolist()
        assert sorted(held) == sorted(int(word == "south") for word in who)
    with pytest.raises(DataError, match=r"column 'ward': 'south' is no number.*who holds the example, name it with"):
        load(str(path))
    path.write_text("\n".join(["a,b,worker,ill", *lines]))
    labels = load(str(path), columns=Columns(label="ill", worker="worker"))
    assert labels.class_names == ("no", "yes")
    path.write_text("\n".join(["a,b,worker", *(line.rsplit(",", 1)[0] for line in lines)]))
    assert load(str(path), columns=Columns(label="worker")).class_names == ("north", "south")
    folder = tmp_path / "wards"
    folder.mkdir()
    (folder / "one.csv").write_text("\n".join(["a,b,worker,ill", *lines]))
    with pytest.raises(DataError, match=r"one\.csv: has a column worker, and a folder has one file for each"):
        load(str(folder))


def test_columns_are_for_tables(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=np.arange(N) % 2)
    with pytest.raises(DataError, match=r"label_column = 'ill': names a column of a table, and this is an \.npz"):
        load(str(tmp_path / "mine.npz"), columns=Columns("ill"))
    with pytest.raises(SpecError, match="worker_column = 'ward': names a column of a table, and 'digits' is none"):
        load("digits", columns=Columns(worker="ward"))


# A folder of one file for each worker


def test_a_folder_of_tables_is_one_worker_for_each(clinics):
    data = load(str(clinics))
    assert (data.name, data.worker_names) == ("clinics", ("clinic1", "clinic2", "clinic10"))
    assert (data.owner.bincount() + data.owner_test.bincount()).tolist() == [60, 6, 24]
    assert data.owner_test.bincount().tolist() == [12, 1, 4]
    assert sorted_rows(data.x, data.x_test) == sorted_rows(torch.from_numpy(X))
    (clinics / ".hidden").write_text("not looked at")
    assert torch.equal(load(f"{clinics}/").x, data.x)


def test_a_worker_may_lack_a_class_that_others_have(clinics):
    write(clinics / "clinic0.csv", [[0, 0, 0, "maybe"]] * 10)
    data = load(str(clinics))
    assert data.class_names == ("maybe", "no", "yes")
    assert set(data.y[data.owner == 0].tolist()) == {0}


def test_a_folder_of_archives(tmp_path):
    folder, y = tmp_path / "clinics", np.arange(N) % 2
    folder.mkdir()
    for name, size in zip("ab", (30, 60), strict=True):
        np.savez(folder / f"{name}.npz", x=X[:size], y=y[:size])
    assert load(str(folder)).owner_test.bincount().tolist() == [6, 12]
    for name, size in zip("ab", (30, 60), strict=True):
        np.savez(folder / f"{name}.npz", x=X[:size], y=y[:size], x_test=X[size:], y_test=y[size:])
    data = load(str(folder))
    assert data.worker_names == ("a", "b")
    assert data.owner.bincount().tolist() == [30, 60]
    assert data.owner_test.bincount().tolist() == [60, 30]
    np.savez(folder / "a.npz", x=X, y=y)
    with pytest.raises(DataError, match=r"b\.npz: has the arrays .*x_test.*, and a\.npz x, y; each file needs"):
        load(str(folder))
    np.savez(folder / "b.npz", x=X, y=y + 0.5)
    with pytest.raises(DataError, match=r"b\.npz: y has the label 0\.5"):
        load(str(folder))
    np.savez(folder / "b.npz", x=X[:, :2], y=y)
    with pytest.raises(DataError, match=r"b\.npz: an example has shape \(2,\), but one of .*a\.npz has \(3,\)"):
        load(str(folder))
    with pytest.raises(DataError, match=r"label_column = 'y': names a column of a table, and these are \.npz"):
        load(str(folder), columns=Columns("y"))


def test_a_wrong_folder_is_one_line(clinics, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: is an empty folder, which holds no data"):
        load(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="one file for each worker; leave worker_column out"):
        load(str(clinics), columns=Columns(worker="ward"))
    write(clinics / "clinic3.csv", rows(), ["age", "rate", "dose", "ill"])
    with pytest.raises(
        DataError, match=r"clinic3\.csv: has the features age, rate, dose, and clinic1\.csv age, dose, rate"
    ):
        load(str(clinics))
    write(clinics / "clinic3.csv", [*rows(), [1, 2, "?", "no"]])
    with pytest.raises(DataError, match=r"clinic3\.csv, line 92: column 'rate': '\?' is no number"):
        load(str(clinics))
    (clinics / "clinic3.csv").rename(clinics / "notes.txt")
    with pytest.raises(
        DataError, match=r"holds notes\.txt; a folder of data has one \.csv file, or one \.npz, for each worker"
    ):
        load(str(clinics))
    (clinics / "notes.txt").rename(clinics / "clinic1.tsv")
    with pytest.raises(DataError, match="two files have one name but for their suffix"):
        load(str(clinics))


def test_a_name_of_the_catalog_is_never_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert own_path("digits") is None
    assert own_path("./digits") == Path("digits")
    assert own_path("nosuch") is None
    with pytest.raises(SpecError, match=r"dataset = 'nosuch': unknown; .*\.npz or \.csv, or of a folder"):
        load("nosuch")


# On the command line


def test_a_folder_on_the_command_line(cli, clinics):
    flags = ["--rounds", 2, "--sigma", 4, "--byzantine", 0, "--batch", 8, "--device", "cpu", "--json"]
    found = json.loads(cli("run", "--data", f"{clinics}/", *flags).out)
    assert (found["workers"], found["dataset"]) == (3, "clinics")
    table = [[*row, who] for row, who in zip(rows(), WHO, strict=True)]
    path = write(clinics.parent / "mine.csv", table, [*HEADER, "ward"])
    other = json.loads(cli("run", "--data", path, "--label", "ill", "--worker-column", "ward", *flags).out)
    assert (other["workers"], other["dataset"]) == (3, "mine")
    wrong = cli("run", "--data", path, "--label", "sick", *flags)
    assert wrong.status == 2
    assert "line 1: label_column = 'sick': is no column" in wrong.err


@pytest.mark.filterwarnings("ignore::noisegate.errors.NoisegateWarning")  # two rounds teach a model one class
def test_a_folder_that_changed_is_not_resumed(clinics, tmp_path):
    spec = Spec(dataset=str(clinics), rounds=2, sigma=4.0, sigma_base=4.0, accountant="rdp", batch=8, byzantine=0.0)
    noisegate.run(spec, out=tmp_path / "run")
    noisegate.run(spec, out=tmp_path / "run", resume=True)
    with (clinics / "clinic2.csv").open("a") as file:
        file.write("0,0,0,no\n")
    with pytest.raises(noisegate.StoreError, match="data"):
        noisegate.run(spec, out=tmp_path / "run", resume=True)


def test_columns_name_another_run_and_leave_the_names_of_others():
    assert Spec(label_column="ill").name() != Spec().name()
    assert "label_column" not in Spec().canonical()
