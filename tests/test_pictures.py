"""Folders of pictures: every pixel comes in, and what is not a picture like the others is one line."""

import builtins
import sys

import numpy as np
import pytest
import torch

from noisegate import DataError
from noisegate.data import Columns, load

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(1)
GRAY = RNG.integers(0, 256, (24, 9, 7), dtype=np.uint8)
COLOR = RNG.integers(0, 256, (24, 9, 7, 3), dtype=np.uint8)


def save(folder, pixels, classes=("cat", "dog"), suffix=".png"):
    """Picture n in the folder of class n mod 2."""
    for number, one in enumerate(pixels):
        home = folder / classes[number % len(classes)]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(one).save(home / f"{number}{suffix}")
    return str(folder)


def rows(x):
    return sorted(map(tuple, x.flatten(1).tolist()))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".PNG"])
def test_every_pixel_of_gray_pictures_comes_in(tmp_path, suffix):
    data = load(save(tmp_path / "zoo", GRAY, suffix=suffix))
    assert (data.name, data.shape, data.class_names) == ("zoo", (1, 9, 7), ("cat", "dog"))
    assert rows(torch.cat((data.x, data.x_test))) == rows(torch.from_numpy(GRAY) / 255)
    label = {tuple(one): number % 2 for number, one in enumerate((torch.from_numpy(GRAY) / 255).flatten(1).tolist())}
    assert [label[tuple(one)] for one in data.x.flatten(1).tolist()] == data.y.tolist()
    assert (len(data.y_test), data.owner) == (4, None)
    assert data.notes[0] == "Pictures of bytes were divided by 255."


def test_color_pictures_have_their_channels_first(tmp_path):
    data = load(save(tmp_path / "zoo", COLOR))
    assert data.shape == (3, 9, 7)
    assert rows(torch.cat((data.x, data.x_test))) == rows(torch.from_numpy(COLOR).permute(0, 3, 1, 2) / 255)
    opaque = np.concatenate((COLOR, np.full((24, 9, 7, 1), 255, np.uint8)), -1)
    assert torch.equal(load(save(tmp_path / "opaque", opaque)).x, data.x)


def test_train_and_test_folders_stay_apart(tmp_path):
    save(tmp_path / "zoo" / "train", GRAY[:20])
    save(tmp_path / "zoo" / "test", GRAY[20:])
    data = load(str(tmp_path / "zoo"))
    assert rows(data.x) == rows(torch.from_numpy(GRAY[:20]) / 255)
    assert rows(data.x_test) == rows(torch.from_numpy(GRAY[20:]) / 255)


def test_a_folder_for_each_worker(tmp_path):
    for name, some in (("h10", GRAY[:14]), ("h9", GRAY[14:])):
        save(tmp_path / "zoos" / name, some)
    data = load(str(tmp_path / "zoos"))
    assert data.worker_names == ("h9", "h10")
    assert (data.owner.bincount().tolist(), data.owner_test.bincount().tolist()) == ([8, 12], [2, 2])
    for part in ("train", "test"):
        for name in ("a", "b"):
            save(tmp_path / "both" / part / name, GRAY)
    assert load(str(tmp_path / "both")).owner_test.bincount().tolist() == [24, 24]


def test_workers_of_one_part_alone_are_never_forgotten(tmp_path):
    save(tmp_path / "zoo" / "train" / "h1", GRAY[:8])
    save(tmp_path / "zoo" / "train" / "h2", GRAY[8:20])
    save(tmp_path / "zoo" / "test", GRAY[20:])
    data = load(str(tmp_path / "zoo"))
    assert (data.owner.bincount().tolist(), data.owner_test, data.worker_names) == ([8, 12], None, ("h1", "h2"))
    save(tmp_path / "odd" / "train", GRAY[:20])
    save(tmp_path / "odd" / "test" / "h1", GRAY[20:])
    with pytest.raises(DataError, match="test: has a folder for each worker, and train has none; give both or none"):
        load(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda home: Image.fromarray(COLOR[0]).save(home / "0.png"),
            r"2\.png: is 7 x 9 gray, and .*0\.png 7 x 9 color",
        ),
        (
            lambda home: Image.fromarray(GRAY[0].T).save(home / "4.png"),
            r"4\.png: is 9 x 7 gray, and .*0\.png 7 x 9 gray",
        ),
        (
            lambda home: (home / "notes.txt").write_text(""),
            r"notes\.txt: is no picture; a folder of a class holds \.png",
        ),
        (lambda home: (home / "0.png").write_text("no picture"), r"0\.png: cannot be read as a picture"),
        (lambda home: (home / "0.png").write_bytes((home / "0.png").read_bytes()[:60]), "cannot be read as a picture"),
        (lambda home: (home.parent / "empty").mkdir(), "empty: is an empty folder"),
        (lambda home: (home / "deeper").mkdir(), "holds no folders, and cat does; give folder/class/picture"),
        (lambda home: (home.parent / "list.csv").write_text("a"), "zoo: holds cat; a folder of data has one"),
        (
            lambda home: Image.fromarray(GRAY[0].astype(np.uint16)).save(home / "0.png"),
            "0.png: is of mode 'I.*8-bit gray",
        ),
        (
            lambda home: Image.fromarray(COLOR[0]).convert("RGBA").resize((7, 9)).rotate(45).save(home / "0.png"),
            r"0\.png: is transparent somewhere",
        ),
        (
            lambda home: Image.fromarray(GRAY[0]).save(
                home / "0.tif", save_all=True, append_images=[Image.fromarray(GRAY[1])]
            ),
            r"0\.tif: holds 2 pictures",
        ),
        (lambda home: Image.fromarray(np.zeros((5000, 5000), np.uint8)).save(home / "0.png"), "has 5000 x 5000 pixels"),
    ],
)
def test_a_wrong_folder_of_pictures_is_one_line(tmp_path, spoil, says):
    save(tmp_path / "zoo", GRAY)
    spoil(tmp_path / "zoo" / "cat")
    with pytest.raises(DataError, match=says) as caught:
        load(str(tmp_path / "zoo"))
    assert "\n" not in str(caught.value)


def test_damaged_pictures_never_raise_anything_else(tmp_path):
    folder = save(tmp_path / "zoo", GRAY)
    path = tmp_path / "zoo" / "cat" / "0.png"
    whole = path.read_bytes()
    for _ in range(100):
        damaged = bytearray(whole)
        for place in RNG.integers(0, len(damaged), 3):
            damaged[place] = RNG.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load(folder)
        except DataError as error:
            message = str(error)
            assert "0.png" in message


def test_columns_are_not_for_pictures(tmp_path):
    with pytest.raises(DataError, match="label_column = 'y': names a column of a table, and these are pictures"):
        load(save(tmp_path / "zoo", GRAY), columns=Columns("y"))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    folder, imported = save(tmp_path / "zoo", GRAY), builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.delitem(sys.modules, "PIL")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pictures need Pillow; install it with: pip install 'noisegate\[images\]'"):
        load(folder)


def test_a_run_on_pictures(cli, tmp_path):
    save(tmp_path / "zoo", np.concatenate([GRAY] * 4))
    found = cli(
        "run", "--data", "zoo", "--workers", 3, "--rounds", 2, "--sigma", 4, "--batch", 4, "--device", "cpu", "--json"
    )
    assert (found.status, found.json["dataset"], found.json["workers"]) == (0, "zoo", 3)
