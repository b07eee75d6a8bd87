import contextlib
import functools
import gzip
import hashlib
import http.server
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noisegate.data import SOURCES, Dataset, File, fetch, hold_out, load, locate, usps, verify
from noisegate.data.contents import checked
from noisegate.data.readers import TEST_LABELS, idx
from noisegate.errors import DataError, SpecError
from noisegate.models import MODELS
from noisegate.streams import stream

# Read once, before any test points the variable elsewhere.
REAL = Path(os.environ.get("NOISEGATE_DATA") or Path(__file__).parents[2] / "shared" / "data")

# name: shape, train, test, classes; one row for each data set of the catalog
EXPECTED = {
    "digits": ((1, 8, 8), 1_437, 360, 10),
    "mnist": ((1, 28, 28), 60_000, 10_000, 10),
    "fashion": ((1, 28, 28), 60_000, 10_000, 10),
    "usps": ((1, 28, 28), 7_291, 2_007, 10),
    "colorectal": ((3, 64, 64), 4_600, 400, 8),
    "kmnist": ((1, 28, 28), 8_000, 2_000, 10),
}


OWNER = torch.tensor([0, 0, 0, 1, 1, 1])


def real_files(name: str) -> Path:
    """The folder that holds the real data sets, or a skip that says which is missing."""
    if not (REAL / name).is_dir():
        pytest.skip(f"the files of {name} are neither in $NOISEGATE_DATA nor in ../shared/data")
    return REAL


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty $NOISEGATE_DATA, and a home without a cache."""
    monkeypatch.setenv("NOISEGATE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "data"


def make(**changes) -> Dataset:
    x, y = torch.zeros(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    parts = {"name": "toy", "x": x, "y": y, "x_test": x[:3], "y_test": y[:3], "classes": 3}
    return Dataset(**{**parts, **changes})


def save(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


# Dataset and hold_out


def test_a_sound_dataset_is_accepted():
    assert make().shape == (2,)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"y": torch.tensor([0, 1])}, "x has 6 examples, but y has 2 labels"),
        ({"y_test": torch.tensor([0, 1])}, "x_test has 3 examples, but y_test has 2 labels"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0, dtype=torch.int64)}, "at least one example"),
        ({"x": torch.zeros(6, 0)}, "one feature"),
        ({"x": torch.zeros(6)}, "must have shape"),
        ({"x": torch.zeros(6, 2, dtype=torch.float64)}, "must be float32"),
        ({"y": torch.zeros(6)}, "int64"),
        ({"y": torch.tensor([0, 1, 2, 3, 1, 2])}, r"labels 0..3, but they must lie in 0..2"),
        ({"y_test": torch.tensor([-1, 1, 2])}, r"labels -1..2"),
        ({"x": torch.full((6, 2), torch.nan)}, "NaN or infinite"),
        ({"x_test": torch.full((3, 2), torch.inf)}, "x_test has NaN or infinite"),
        ({"x_test": torch.zeros(3, 4)}, "same shape"),
        ({"classes": 1, "y": torch.zeros(6, dtype=torch.int64)}, "at least 2"),
        ({"owner_test": torch.zeros(3, dtype=torch.int64)}, "owner_test is given without owner"),
        ({"owner": OWNER, "owner_test": torch.zeros(2, dtype=torch.int64)}, "each example of x_test"),
        ({"owner": OWNER, "owner_test": torch.tensor([0, 1, 2])}, "worker 2, who holds no example of x"),
    ],
)
def test_an_unsound_dataset_is_one_sentence(changes, sentence):
    with pytest.raises(DataError, match=sentence):
        make(**changes)


def test_hold_out_takes_exactly_per_class_and_leaves_the_rest():
    y = torch.randint(4, (100,), generator=stream(1, "labels"))
    aux, pool = hold_out(y, 4, 2, stream(1, "aux"))
    assert torch.bincount(y[aux]).tolist() == [2, 2, 2, 2]
    assert torch.equal(torch.cat((aux, pool)).sort().values, torch.arange(100))
    assert torch.equal(aux, hold_out(y, 4, 2, stream(1, "aux"))[0])
    assert not torch.equal(aux, hold_out(y, 4, 2, stream(2, "aux"))[0])


def test_hold_out_names_the_class_that_is_short():
    with pytest.raises(DataError, match="class 1 has 1 training examples, but 2"):
        hold_out(torch.tensor([0, 0, 1, 2, 2]), 3, 2, stream(1, "aux"))


# the table


def test_sources_are_complete():
    assert list(SOURCES) == list(EXPECTED)
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.model in MODELS
        assert source.description
        assert source.license
        assert "\n" not in source.description
        assert all(len(file.sha256) == 64 for file in source.files.values())
        assert all(file.content for file_name, file in source.files.items() if file_name.endswith(".gz"))
        assert all(set(layout) <= set(source.files) for layout in source.layouts)


def test_an_unknown_name_names_the_choices():
    with pytest.raises(SpecError, match=rf"dataset = 'mnits'.*did you mean 'mnist'.*{', '.join(SOURCES)}, or .* \.npz"):
        load("mnits")
    for function in (fetch, verify):
        with pytest.raises(SpecError, match="dataset = 'mnits'"):
            function("mnits")


# reading the real data sets


@pytest.mark.parametrize("name", SOURCES)
def test_real_data(name, monkeypatch):
    if SOURCES[name].files:
        monkeypatch.setenv("NOISEGATE_DATA", str(real_files(name)))
    shape, train, test, classes = EXPECTED[name]
    data = load(name)
    assert (data.name, data.shape, data.classes) == (name, shape, classes)
    assert (len(data.x), len(data.x_test)) == (train, test)
    assert len(torch.unique(data.y)) == len(torch.unique(data.y_test)) == classes
    # Standardized with the constants of the whole, so the training part has mean 0 but for the split.
    assert float(data.x.mean(dim=(0, 2, 3)).abs().max()) < 0.03
    # The std that the benchmark uses for Colorectal is not that of its pixels.
    if name != "colorectal":
        assert float(data.x.std()) == pytest.approx(1, abs=0.03)
    assert all(status == "ok" for _, status in verify(name))


def test_usps_pixels_are_the_usual_ones():
    folder = real_files("usps") / "usps"
    x, y = usps.esl(gzip.decompress((folder / "zip.train.gz").read_bytes()), 7_291)
    # Mean, std and class counts usually quoted for USPS; without the blur they would be 0.2545 and 0.3846.
    assert (x / 255).mean() == pytest.approx(0.2469, abs=1e-4)
    assert (x / 255).std() == pytest.approx(0.2989, abs=1e-4)
    assert np.bincount(y).tolist() == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]


def test_digits_need_no_file(elsewhere):
    first, again = load("digits"), load("digits", stream(5, "other"))
    assert torch.equal(first.x, again.x)
    assert verify("digits") == fetch("digits") == []
    assert locate(SOURCES["digits"]) == {}


def test_usps_is_the_same_from_either_publication(elsewhere):
    folder = real_files("usps") / "usps"
    (elsewhere / "usps").mkdir(parents=True)
    for file in ("zip.train.gz", "zip.test.gz"):
        (elsewhere / "usps" / file).symlink_to(folder / file)
    assert [file for file, _ in verify("usps")] == ["zip.train.gz", "zip.test.gz"]
    derived = load("usps")
    (elsewhere / "usps" / "usps16.npz").symlink_to(folder / "usps16.npz")
    assert [file for file, _ in verify("usps")] == ["usps16.npz"]
    prepared = load("usps")
    assert torch.equal(derived.x, prepared.x)
    assert torch.equal(derived.y, prepared.y)
    assert torch.equal(derived.x_test, prepared.x_test)
    assert torch.equal(derived.y_test, prepared.y_test)


def test_another_gzip_header_is_accepted(elsewhere):
    folder = real_files("kmnist") / "kmnist"
    (elsewhere / "kmnist").mkdir(parents=True)
    for file in SOURCES["kmnist"].files:
        content = gzip.decompress((folder / file).read_bytes())
        (elsewhere / "kmnist" / file).write_bytes(gzip.compress(content, 1, mtime=0))
    assert [status for _, status in verify("kmnist")] == ["ok", "ok"]


def test_a_damaged_file_names_both_sums(elsewhere):
    folder = real_files("kmnist") / "kmnist"
    (elsewhere / "kmnist").mkdir(parents=True)
    for file in SOURCES["kmnist"].files:
        (elsewhere / "kmnist" / file).write_bytes((folder / file).read_bytes())
    labels = elsewhere / "kmnist" / TEST_LABELS
    whole = labels.read_bytes()
    other = gzip.compress(bytes(len(gzip.decompress(whole))))
    for damaged in (b"", whole[:-9], whole[:2000] + b"\0" * 50 + whole[2050:], b"<html>404</html>", other):
        labels.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            load("kmnist")
        assert str(labels) in str(caught.value)
        assert SOURCES["kmnist"].files[TEST_LABELS].sha256 in str(caught.value)
        assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
        assert verify("kmnist")[1][1].startswith(str(labels))


# an archive that someone else prepared


def test_npz_is_judged_by_its_arrays_where_the_table_says_so(tmp_path):
    x, y = np.zeros((3, 2), np.uint8), np.ones(3, np.uint8)
    path = Path(save(tmp_path / "a.npz", y=y, extra=y, x=x))
    content = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    assert checked(path, File("0" * 64, content)) == path.read_bytes()
    for file in (File("0" * 64, "1" * 64), File("0" * 64)):
        with pytest.raises(DataError, match="expected 0000"):
            checked(path, file)


# missing files


@pytest.mark.parametrize("name", ["mnist", "fashion", "usps", "kmnist"])
def test_a_missing_data_set_says_where_it_looked_and_what_to_do(name, elsewhere):
    with pytest.raises(DataError) as caught:
        load(name)
    message = str(caught.value)
    home = Path.home()
    for part in (str(elsewhere / name), str(home / ".cache/noisegate" / name), "NOISEGATE_DATA"):
        assert part in message
    assert f"noisegate data fetch {name}" in message
    assert ("/usr/share/datasets/fashion-mnist" in message) == (name == "fashion")
    assert {status for _, status in verify(name)} == {"missing"}


def test_colorectal_says_where_it_is_published(elsewhere):
    for function in (load, fetch):
        with pytest.raises(DataError, match=r"10\.5281/zenodo\.53169.*colorectal64\.npz"):
            function("colorectal")


def test_an_unset_or_empty_variable_means_the_cache(elsewhere, monkeypatch):
    source = replace(SOURCES["kmnist"], name="toy", files={"a": File("0" * 64)})
    cache = Path.home() / ".cache/noisegate/toy"
    cache.mkdir(parents=True)
    (cache / "a").write_text("")
    for value in (str(elsewhere), ""):
        monkeypatch.setenv("NOISEGATE_DATA", value)
        assert locate(source) == {"a": cache / "a"}
    monkeypatch.delenv("NOISEGATE_DATA")
    assert locate(source) == {"a": cache / "a"}


def test_half_of_the_files_is_not_a_data_set(elsewhere):
    (elsewhere / "kmnist").mkdir(parents=True)
    (elsewhere / "kmnist" / TEST_LABELS).write_text("")
    with pytest.raises(DataError, match="not found"):
        locate(SOURCES["kmnist"])
    statuses = [status for _, status in verify("kmnist")]
    assert statuses[0] == "missing"
    assert "sha256" in statuses[1]


def test_idx_refuses_what_it_does_not_expect():
    good = bytes((0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9))
    assert idx(good, (3,)).tolist() == [7, 8, 9]
    for bad in (good[:-1], good + b"\0", b"", good.replace(b"\x08\x01", b"\x09\x01")):
        with pytest.raises(DataError, match="IDX"):
            idx(bad, (3,))


def test_esl_refuses_a_wrong_count():
    with pytest.raises(DataError, match="expected 2 lines of 257"):
        usps.esl(b"1 2 3", 2)


# fetching


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A local web server and a data set 'toy' that is published there; yields (its folder, the content)."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder, content = tmp_path / "site", b"the published bytes"
    folder.mkdir()
    (folder / "toy.bin").write_bytes(content)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        file = File(hashlib.sha256(content).hexdigest(), url=f"http://127.0.0.1:{server.server_port}/toy.bin")
        monkeypatch.setitem(SOURCES, "toy", replace(SOURCES["kmnist"], name="toy", files={"toy.bin": file}))
        yield folder, content
        server.shutdown()
        thread.join()


def test_fetch_puts_checked_files_where_load_looks(site, elsewhere, capsys):
    _, content = site
    assert fetch("toy", progress=False) == [elsewhere / "toy" / "toy.bin"]
    assert locate(SOURCES["toy"])["toy.bin"].read_bytes() == content
    assert verify("toy") == [("toy.bin", "ok")]
    assert capsys.readouterr() == ("", "")


def test_fetch_into_a_folder_of_choice_tells_of_it_on_stderr(site, elsewhere, tmp_path, capsys):
    assert fetch("toy", tmp_path / "mine") == [tmp_path / "mine" / "toy" / "toy.bin"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fetching http://127.0.0.1")
    assert err.count("\n") == 1


def test_fetch_does_not_repeat_what_is_there_but_replaces_what_is_damaged(site, elsewhere):
    folder, content = site
    (path,) = fetch("toy", progress=False)
    path.write_bytes(b"damaged")
    assert "sha256" in verify("toy")[0][1]
    fetch("toy", progress=False)
    assert path.read_bytes() == content
    (folder / "toy.bin").unlink()
    assert fetch("toy", progress=False) == [path]


def test_a_wrong_download_leaves_nothing(site, elsewhere):
    folder, _ = site
    (folder / "toy.bin").write_bytes(b"something else")
    with pytest.raises(DataError, match="does not have the published sha256"):
        fetch("toy", progress=False)
    assert list((elsewhere / "toy").iterdir()) == []


def test_a_failed_download_is_one_sentence(site, elsewhere, tmp_path):
    folder, _ = site
    (folder / "toy.bin").unlink()
    with pytest.raises(DataError, match=r"could not be fetched.*404"):
        fetch("toy", progress=False)
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(DataError, match="could not be fetched into"):
        fetch("toy", tmp_path / "occupied", progress=False)


# a data set of one's own


def test_npz_with_test_arrays(tmp_path):
    x, y = np.arange(24).reshape(6, 2, 2), np.array([0.0, 1, 2, 0, 1, 2])
    data = load(save(tmp_path / "mine.npz", x=x, y=y, x_test=x[:3].astype(">f8"), y_test=y[:3].astype(np.uint8)))
    assert (data.name, data.shape, data.classes) == ("mine", (2, 2), 3)
    assert torch.equal(data.x, torch.arange(24.0).reshape(6, 2, 2))
    assert data.y_test.tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::noisegate.errors.NoisegateWarning")  # features of 0 to 200
def test_npz_says_who_holds_each_test_example(tmp_path):
    x, y = np.arange(100.0)[:, None], np.arange(100) % 2
    owner = np.arange(100) % 3
    given = load(save(tmp_path / "given.npz", x=x, y=y, x_test=x, y_test=y, worker=owner, worker_test=owner))
    assert given.owner_test.tolist() == owner.tolist()
    split = load(save(tmp_path / "split.npz", x=x, y=y, worker=owner))
    assert split.owner_test.tolist() == [int(value) % 3 for value in split.x_test.flatten()]
    assert load(save(tmp_path / "bare.npz", x=x, y=y, x_test=x, y_test=y, worker=owner)).owner_test is None
    with pytest.raises(DataError, match="has worker_test without x_test; give both"):
        load(save(tmp_path / "half.npz", x=x, y=y, worker=owner, worker_test=owner))
    with pytest.raises(DataError, match="one for each of x_test"):
        load(save(tmp_path / "short.npz", x=x, y=y, x_test=x[:4], y_test=y[:4], worker=owner, worker_test=owner))


@pytest.mark.filterwarnings("ignore::noisegate.errors.NoisegateWarning")  # features of 0 to 200
def test_npz_without_test_arrays_is_split_by_the_generator(tmp_path):
    path = save(tmp_path / "mine.npz", x=np.arange(103)[:, None], y=np.arange(103) % 2)
    one, same, two, fixed = (
        load(path, rng) for rng in (stream(1, "split"), stream(1, "split"), stream(2, "split"), None)
    )
    assert (len(one.x), len(one.x_test)) == (83, 20)
    assert torch.equal(torch.cat((one.x, one.x_test)).flatten().sort().values, torch.arange(103.0))
    assert torch.equal(one.x % 2, one.y[:, None].float())
    assert torch.equal(one.x, same.x)
    assert not torch.equal(one.x, two.x)
    assert torch.equal(fixed.x, load(path).x)


X, Y = np.zeros((10, 3)), np.arange(10) % 2


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": X}, "has no array 'y'"),
        ({"y": Y}, "has no array 'x'"),
        ({"x": X, "y": Y, "x_test": X}, "only one of x_test and y_test"),
        ({"x": X, "y": Y[:9]}, "x has 10 examples and y 9 labels"),
        ({"x": X[:4], "y": Y[:4]}, "needs at least 5"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:9]}, "x_test has 10 examples, but y_test has 9"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, "same shape"),
        ({"x": X[:, 0], "y": Y}, "must have shape"),
        ({"x": X[:, :0], "y": Y}, "one feature"),
        ({"x": X, "y": Y[:, None]}, r"labels must have shape \(N,\)"),
        ({"x": X + np.nan, "y": Y}, "NaN or infinite"),
        ({"x": X + 1e300, "y": Y}, "NaN or infinite"),
        ({"x": X + 1j, "y": Y}, "real numbers"),
        ({"x": X.astype(str), "y": Y}, "real numbers"),
        ({"x": X.astype(object), "y": Y}, "without object arrays"),
        ({"x": X, "y": Y + 0.5}, "the label 0.5"),
        ({"x": X, "y": Y - 1}, "the label -1"),
        ({"x": X, "y": Y * np.nan}, "the label nan"),
        ({"x": X, "y": Y.astype(np.uint64) + np.uint64(2**63)}, "the label 9223372036854775808"),
        ({"x": X, "y": Y.astype(str)}, "whole numbers"),
        ({"x": X, "y": Y * 2}, r"no example has the label 1.*0..1"),
        ({"x": X, "y": Y * 0}, "at least 2"),
        ({"x": np.zeros(()), "y": Y}, "must have shape"),
    ],
)
def test_a_bad_npz_is_one_sentence(tmp_path, arrays, sentence):
    with pytest.raises(DataError, match=sentence):
        load(save(tmp_path / "bad.npz", **arrays))


def test_a_file_that_is_no_npz_is_one_sentence(tmp_path):
    path = tmp_path / "bad.npz"
    with pytest.raises(DataError, match="no such file"):
        load(str(path))
    whole = Path(save(tmp_path / "good.npz", x=X, y=Y)).read_bytes()
    for content in (b"", b"hello", whole[:100], whole[:-30], whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.npz: not a readable \.npz"):
            load(str(path))
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match="one plain array"):
        load(str(path))


def test_no_damaged_byte_escapes_as_another_error(tmp_path):
    whole = bytearray(Path(save(tmp_path / "good.npz", x=X, y=Y)).read_bytes())
    path = tmp_path / "bad.npz"
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = whole.copy()
        for place in rng.integers(len(whole), size=3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):  # what is not hit, or hit where nothing reads, may load
            load(str(path))
