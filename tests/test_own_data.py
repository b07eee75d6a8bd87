"""Data that users bring: arrays, frames and one part per worker become a sound `Dataset`, or one sentence."""

import warnings

import numpy as np
import pytest
import torch

from noisegate import DataError, Dataset
from noisegate.data import load
from noisegate.data.arrays import natural, split
from noisegate.errors import NoisegateWarning
from noisegate.streams import stream

RNG = np.random.default_rng(1)
X, Y = RNG.uniform(-1, 1, (60, 3)), np.arange(60) % 3
SIZES = (5, 12, 43)
WHO = np.repeat([0, 1, 2], SIZES)


class Column:
    """What pandas calls a series: as much of it as is asked for."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return np.array(self.values, dtype=object if isinstance(self.values[0], str) else None)


class Frame:
    """What pandas calls a frame: as much of it as is asked for."""

    def __init__(self, table):
        self.table = table
        self.columns = list(table)

    def __getitem__(self, key):
        return Frame({name: self.table[name] for name in key}) if isinstance(key, list) else Column(self.table[key])

    def to_numpy(self):
        return np.stack(list(self.table.values()), axis=1)


def frame(**changes):
    table = {
        "a": X[:, 0],
        "b": X[:, 1],
        "clinic": [f"c{n}" for n in WHO],
        "ill": [("no", "yes")[n % 2] for n in range(60)],
    }
    return Frame({name: values for name, values in {**table, **changes}.items() if values is not None})


def everything(data):
    return torch.cat((data.x, data.x_test)), torch.cat((data.y, data.y_test))


# The test part


def slow_split(y, owner, rng):
    """The same, example by example."""
    test = set()
    for worker in sorted(set(owner)):
        mine = [n for n in range(len(y)) if owner[n] == worker]
        order = [mine[place] for place in torch.randperm(len(mine), generator=rng).tolist()]
        line = [n for label in sorted(set(y)) for n in order if y[n] == label]
        start = int(torch.randint(5, (), generator=rng))
        places = [place for place in range(len(line)) if place % 5 == start]
        test |= {line[place] for place in places[: len(line) // 5]}
    return test


def test_a_fifth_of_each_worker_is_split_off_with_its_classes():
    y, owner = (
        torch.from_numpy(RNG.integers(0, 4, 400)),
        torch.from_numpy(RNG.permutation(np.repeat([0, 3, 4], [4, 96, 300]))),
    )
    train, test = split("toy", y, owner, stream(3, "s"))
    assert set(test.tolist()) == slow_split(y.tolist(), owner.tolist(), stream(3, "s"))
    assert torch.equal(torch.cat((train, test)).sort().values, torch.arange(400))
    assert [int((owner[test] == worker).sum()) for worker in (0, 3, 4)] == [0, 19, 60]
    for worker in (3, 4):
        mine = owner == worker
        for label in range(4):
            share = int((y[mine] == label).sum()) / 5
            assert abs(int((y[test][owner[test] == worker] == label).sum()) - share) <= 1


def test_the_test_part_follows_the_seed_alone():
    one, same, other = (Dataset.of(X, Y, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.x_test, same.x_test)
    assert not torch.equal(one.x_test, other.x_test)


def test_too_few_examples_to_split_is_one_sentence():
    with pytest.raises(DataError, match="no worker has 5 examples"):
        Dataset.of(X[:8], np.arange(8) % 2, worker=np.arange(8) // 2)


# Arrays


def test_arrays_become_a_data_set_with_nothing_lost():
    data = Dataset.of(X, Y, worker=WHO, name="toy")
    assert (data.name, data.classes, data.shape) == ("toy", 3, (3,))
    x, y = everything(data)
    assert torch.equal(x.sort(0).values, torch.from_numpy(X).float().sort(0).values)
    assert sorted(y.tolist()) == sorted(Y.tolist())
    held = {tuple(row): who for row, who in zip(torch.from_numpy(X).float().tolist(), WHO.tolist(), strict=True)}
    assert [held[tuple(row)] for row in data.x.tolist()] == data.owner.tolist()
    assert [held[tuple(row)] for row in data.x_test.tolist()] == data.owner_test.tolist()


def test_lists_and_tensors_are_as_good():
    for x, y in ((X.tolist(), Y.tolist()), (torch.from_numpy(X), torch.from_numpy(Y))):
        assert torch.equal(Dataset.of(x, y).x, Dataset.of(X, Y).x)


def test_texts_are_numbered_in_sorted_order_and_named():
    data = Dataset.of(
        X, np.array(["sick", "fine", "dead"])[Y], worker=[f"h{n + 9}" for n in WHO], test=(X, ["fine"] * 60)
    )
    assert data.class_names == ("dead", "fine", "sick")
    assert data.worker_names == ("h9", "h10", "h11"), "as people sort them"
    assert data.y.tolist() == [(2, 1, 0)[n] for n in Y]
    assert data.y_test.tolist() == [1] * 60
    assert data.owner.tolist() == WHO.tolist()
    assert data.owner_test is None


def test_a_test_part_that_is_given_stays():
    data = Dataset.of(X, Y, worker=WHO, test=(X[:6], Y[:6], WHO[:6]))
    assert (len(data.x), len(data.x_test)) == (60, 6)
    assert data.owner_test.tolist() == WHO[:6].tolist()


def test_pictures_of_bytes_are_divided_by_255_and_nothing_else_is(tmp_path):
    pictures = RNG.integers(0, 256, (60, 4, 4), dtype=np.uint8)
    assert torch.equal(
        everything(Dataset.of(pictures, Y))[0].flatten(1).sum(1).sort().values,
        (torch.from_numpy(pictures).float() / 255).flatten(1).sum(1).sort().values,
    )
    np.savez(tmp_path / "p.npz", x=pictures, y=Y, x_test=pictures, y_test=Y)
    assert torch.equal(load(str(tmp_path / "p.npz")).x, torch.from_numpy(pictures).float() / 255)
    columns = RNG.integers(0, 9, (60, 4), dtype=np.uint8)
    assert torch.equal(Dataset.of(columns, Y, test=(columns, Y)).x, torch.from_numpy(columns).float())


def test_bytes_that_are_divided_do_not_stand_beside_numbers_that_are_not(tmp_path):
    pictures = RNG.integers(0, 256, (60, 4, 4), dtype=np.uint8)
    other = pictures.astype(np.float32)
    with pytest.raises(DataError, match="own, test: x is of float32, and that of own of uint8; only bytes are divided"):
        Dataset.of(pictures, Y, test=(other, Y))
    with pytest.raises(DataError, match="worker 1: x is of float32, and that of own, worker 0 of uint8"):
        Dataset.of_workers([(pictures, Y), (other, Y)])
    np.savez(tmp_path / "p.npz", x=pictures, y=Y, x_test=other, y_test=Y)
    with pytest.raises(DataError, match="x_test: x is of float32"):
        load(str(tmp_path / "p.npz"))
    home = tmp_path / "clinics"
    home.mkdir()
    np.savez(home / "a.npz", x=pictures, y=Y)
    np.savez(home / "b.npz", x=other, y=Y)
    with pytest.raises(DataError, match=r"b\.npz: x is of float32"):
        load(str(home))


def test_numbers_that_numpy_does_not_have_are_read():
    x = torch.from_numpy(X).to(torch.bfloat16)
    assert torch.equal(everything(Dataset.of(x, Y))[0], everything(Dataset.of(x.float(), Y))[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.from_numpy(X).to_sparse(), Y), "x is no plain tensor of numbers; give a dense one"),
        ((np.ma.masked_array(X, mask=X > 0.5), Y), "x has masked values; fill in or drop missing values first"),
        (([[10**400]] * 60, Y), "x cannot be made an array .*that float64 can hold"),
        ((X, Y + 1), "no example has the label 0, though there are larger ones; number the 3 classes 0..2"),
        ((X, Y - 1), "y has the label -1; labels must be whole numbers"),
        ((X, Y / 2), "y has the label 0.5"),
        ((X, Y[:9]), "there are 60 examples and 9 labels"),
        ((X[:, 0], Y), r"x has shape \(60,\); it must have shape \(N, ...\)"),
        ((X.astype(str), Y), "x has dtype <U"),
        ((X + 1j, Y), "x has dtype complex128; it must be real numbers"),
        ((X * np.nan, Y), "x has NaN or infinite values"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "x cannot be made an array"),
        ((X, None), "y is missing; give the labels"),
        ((X, "ill"), "y = 'ill' names a column, but x is no frame"),
        ((X, np.array(["a"] * 60)), "the labels are 1 different ones, such as 'a'"),
        ((X, np.array(["a", "b"] * 30)[:, None]), r"y has shape \(60, 1\)"),
        ((X, [None] * 60), "y has dtype object"),
        (([], []), r"x has shape \(0,\)"),
        ((np.zeros((0, 3)), np.zeros(0)), "there are 0 examples and 0 labels"),
    ],
)
def test_wrong_arrays_are_one_sentence(arguments, sentence):
    with pytest.raises(DataError, match=f"^own: .*{sentence}") as caught:
        Dataset.of(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"worker": WHO[:9]}, "worker has 9 entries; it must have one for each of 60"),
        ({"worker": WHO - 1}, "worker has the label -1"),
        ({"worker": "clinic"}, "worker = 'clinic' names a column, but x is no frame"),
        ({"test": X}, r"test must be \(x, y\)"),
        ({"test": (X, Y, ["a"] * 60), "worker": WHO}, "texts in both parts or in none"),
        ({"test": (X[:, :2], Y)}, "same shape"),
        ({"test": (X, ["a"] * 60)}, "texts in one part and numbers in another"),
        ({"test": frame()}, r"test must be \(x, y\)"),
    ],
)
def test_wrong_companions_are_one_sentence(more, sentence):
    with pytest.raises(DataError, match=sentence):
        Dataset.of(X, Y, **more)


# Frames


def test_a_frame_has_labels_in_its_last_column_or_the_one_named():
    data = Dataset.of(frame(), worker="clinic")
    assert data.class_names == ("no", "yes")
    assert data.worker_names == ("c0", "c1", "c2")
    assert data.feature_names == ("a", "b")
    assert sorted(data.owner.tolist() + data.owner_test.tolist()) == WHO.tolist()
    moved = Dataset.of(Frame(dict(reversed(frame(clinic=None).table.items()))), "ill")
    assert moved.feature_names == ("b", "a")
    apart = Dataset.of(frame()[["a", "b"]], Column(frame().table["ill"]))
    assert torch.equal(apart.y, Dataset.of(frame(clinic=None)).y)


def test_a_column_worker_of_a_frame_says_who_holds_the_example():
    renamed = {{"clinic": "worker"}.get(name, name): values for name, values in frame().table.items()}
    found, same = Dataset.of(Frame(renamed)), Dataset.of(frame(), worker="clinic")
    assert torch.equal(found.x, same.x)
    assert torch.equal(found.owner, same.owner)
    assert found.worker_names == same.worker_names
    whole = Dataset.of(Frame({name: renamed[name] for name in ("a", "b", "worker")}), "worker")
    assert whole.class_names == ("c0", "c1", "c2")
    assert whole.owner is None
    with pytest.raises(DataError, match="worker 0: has a column worker, and each part is one worker's; drop"):
        Dataset.of_workers([Frame(renamed)])


def test_numbers_in_a_label_column_are_names_sorted_by_size():
    data = Dataset.of(frame(clinic=None, ill=np.array([10.0, 9.0, -1.0])[Y]), test=frame(clinic=None, ill=[9] * 60))
    assert data.class_names == ("-1", "9", "10")
    assert data.y.tolist() == [(2, 1, 0)[n] for n in Y]
    assert data.y_test.tolist() == [1] * 60


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({}, (), "column 'clinic' of x holds 'c0', which is no number; drop it or"),
        ({"clinic": None}, ("sick",), "y = 'sick': is no column; there are a, b, ill"),
        ({"clinic": None}, ("il",), "did you mean 'ill'"),
        ({"clinic": None, "a": [np.nan if n == 7 else 0.0 for n in range(60)]}, (), "column 'a' of x has nan in row 7"),
        ({"clinic": None, "ill": X[:, 2]}, (), "is no whole number; name another column as the label"),
        ({"clinic": None, "a": None, "b": None}, (), "no column is left for features"),
        (
            {"clinic": None, "ill": ["no", *[np.nan] * 59]},
            (),
            "column 'ill' has dtype object; it must be texts or numbers, without",
        ),
    ],
)
def test_a_wrong_frame_is_one_sentence(changes, arguments, sentence):
    with pytest.raises(DataError, match=sentence):
        Dataset.of(frame(**changes), *arguments)


def test_pandas_frames_come_in_as_they_are():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(frame().table)
    mine, its = Dataset.of(frame(), worker="clinic"), Dataset.of(table, worker="clinic")
    assert torch.equal(mine.x, its.x)
    assert torch.equal(mine.y, its.y)
    assert torch.equal(mine.owner, its.owner)


# One part per worker


def parts(count=3):
    return [(X[n == WHO], Y[n == WHO]) for n in range(count)]


def test_one_part_per_worker():
    listed, named = Dataset.of_workers(parts()), Dataset.of_workers(dict(zip("abc", parts(), strict=True)), name="toy")
    assert named.worker_names == ("a", "b", "c")
    assert listed.owner.bincount().tolist() == [size - size // 5 for size in SIZES]
    assert listed.owner_test.bincount().tolist() == [size // 5 for size in SIZES]
    assert torch.equal(listed.x, Dataset.of(X, Y, worker=WHO).x), "as one array with a worker of each"


def test_a_worker_may_lack_classes_and_names_are_of_all():
    data = Dataset.of_workers([(X[:9], ["b"] * 9), (X, ["c", "a"] * 30)])
    assert data.class_names == ("a", "b", "c")
    assert set(data.y[data.owner == 0].tolist()) == {1}


def test_parts_that_bring_test_examples_keep_them():
    data = Dataset.of_workers([(X[:9], Y[:9], X[:2], Y[:2]), (X, Y, X, Y)])
    assert data.owner.bincount().tolist() == [9, 60]
    assert data.owner_test.bincount().tolist() == [2, 60]
    sets = [Dataset.of(X[:30], Y[:30]), Dataset.of(X, Y)]
    data = Dataset.of_workers(sets)
    assert torch.equal(data.x, torch.cat([one.x for one in sets]))
    assert torch.equal(data.x_test, torch.cat([one.x_test for one in sets]))


def test_features_of_data_sets_keep_their_names_and_are_never_mixed():
    one = Dataset.of(frame(clinic=None))
    assert Dataset.of_workers([one, one]).feature_names == ("a", "b")
    other = Dataset.of(Frame({"b": X[:, 1], "a": X[:, 0], "ill": Y % 2}))
    with pytest.raises(DataError, match="own, worker 1: has the columns b, a, and own, worker 0 a, b; give"):
        Dataset.of_workers([one, other])


def test_frames_and_torch_data_sets_are_parts_too():
    frames = Dataset.of_workers([frame(clinic=None), frame(clinic=None, ill=["yes"] * 60)])
    assert frames.class_names == ("no", "yes")
    assert frames.feature_names == ("a", "b")
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y))
    some = torch.utils.data.Subset(pairs, range(12))
    assert Dataset.of_workers([pairs, some]).owner.bincount().tolist() == [48, 10]


class Pairs(torch.utils.data.Dataset):
    """A torch data set of what is made for each number."""

    def __init__(self, make, length=20):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return self.make(number)


def test_labels_of_torch_data_sets_may_be_texts():
    data = Dataset.of_workers([Pairs(lambda n: (torch.ones(2), "ab"[n % 2])), Pairs(lambda n: (torch.ones(2), "b"))])
    assert data.class_names == ("a", "b")
    one = Pairs(lambda n: (torch.ones(2), torch.tensor([n % 2])))
    assert Dataset.of_workers([one, one]).classes == 2


@pytest.mark.parametrize(
    ("make", "length", "sentence"),
    [
        (lambda n: (torch.ones(2), n % 2 + 0.7), 20, "y has the label 0.7"),
        (lambda n: (torch.ones(2), torch.tensor([1, 2])), 20, r"worker 0: has the label tensor\(\[1, 2\]\)"),
        (lambda n: (torch.ones(2), None), 20, "worker 0: has the label None"),
        (lambda n: (torch.ones(2 + n % 2), n % 2), 20, "worker 0: its examples are no tensors of one shape"),
        (lambda n: ("a picture", n % 2), 20, "worker 0: its examples are no tensors of one shape"),
        (lambda n: torch.ones(3), 20, r"worker 0: does not give \(x, y\)"),
        (lambda n: {}["no such file"], 20, r"worker 0: does not give \(x, y\)"),
        (lambda n: (torch.ones(2), n % 2), 0, "worker 0: holds no examples"),
    ],
)
def test_odd_torch_data_sets_are_one_sentence(make, length, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        Dataset.of_workers([Pairs(make, length), Pairs(make, length)])
    assert "\n" not in str(caught.value)


class Twice(Frame):
    """A frame with two columns of one name, which gives both when it is asked for one."""

    def __init__(self):
        super().__init__({"a": X[:, 0]})
        self.columns = ["a", "a"]

    def __getitem__(self, key):
        return self


def test_a_column_that_is_there_twice_is_one_sentence():
    for given in ([(Twice(), Y)] * 2, [(X, Twice())] * 2):
        with pytest.raises(DataError, match=r"column 'a' of [xy] is there twice; name every column once"):
            Dataset.of_workers(given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "there are no parts"),
        ([(X, Y), (X[:, :2], Y)], r"own, worker 1: an example has shape \(2,\), but one of own, worker 0 has \(3,\)"),
        ([(X, Y), (X, Y[:3])], "own, worker 1: there are 60 examples and 3 labels"),
        ([(X, Y, X, Y), (X, Y)], "worker 0 brings test examples and worker 1 none"),
        ([(X, Y), X], "worker 1: is a ndarray; give"),
        ([(X, Y), (X, ["a"] * 60)], "texts in one part and numbers in another"),
        ([(X, Y), (np.zeros((0, 3)), np.zeros(0))], "worker 1: there are 0 examples"),
        (
            [frame(clinic=None), frame()],
            "own, worker 1: has the columns a, b, clinic, and own, worker 0 a, b; give",
        ),
        ([(X, Y * 0), (X, Y * 0 + 2)], "no example has the label 1"),
    ],
)
def test_wrong_parts_are_one_sentence(given, sentence):
    with pytest.raises(DataError, match=sentence):
        Dataset.of_workers(given)


# Hints


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (X * [1, 1, 400], "feature 2 goes up to .*: features learn badly so; .*means and deviations of the data"),
        (X * [1, 1, 1e-4], "spreads over .*, and feature 2 over .*, which will hardly be learned from"),
        (np.abs(X).reshape(60, 3, 1) * 255, "x has values up to 25"),
    ],
)
def test_features_far_from_one_are_hinted_at(x, says):
    with pytest.warns(NoisegateWarning, match=says):
        Dataset.of(x, Y)


def test_usual_features_are_not_hinted_at():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.of(np.concatenate((X, 6 * RNG.normal(size=(60, 2)), np.ones((60, 1))), 1), Y)


@pytest.mark.parametrize(("key", "count"), [("class_names", 2), ("worker_names", 2), ("feature_names", 4)])
def test_names_must_be_as_many_as_there_are_to_name(key, count):
    data = Dataset.of(X, Y, worker=WHO)
    fields = (data.name, data.x, data.y, data.x_test, data.y_test, data.classes, data.owner)
    assert Dataset(*fields, **{key: ("a", "b", "c")}).classes == 3
    with pytest.raises(DataError, match=f"own: {key} has {count} names, but there are 3 to name"):
        Dataset(*fields, **{key: ("a",) * count})


def test_natural_order():
    assert sorted(["h10", "h9", "H1", "", "h09", "1" * 5000, "2"], key=natural) == [
        "",
        "2",
        "1" * 5000,
        "H1",
        "h09",
        "h9",
        "h10",
    ]
