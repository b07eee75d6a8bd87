"""`load`: a data set by its name, or from a file or a folder of the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate import checks
from noisegate.data.arrays import ONE_TEST_IN, classes_of, features_of, labels_of, notes_of, same_scale, split
from noisegate.data.contents import archive, checked
from noisegate.data.dataset import Dataset
from noisegate.data.files import expanded, locate
from noisegate.data.folders import read_folder, read_single
from noisegate.data.hints import warn_of_scale
from noisegate.data.sources import SOURCES
from noisegate.data.tables import SUFFIXES, Columns
from noisegate.errors import DataError, SpecError
from noisegate.streams import stream


def load(name: str, rng: torch.Generator | None = None, columns: Columns | None = None) -> Dataset:
    """The data set `name`: a name in SOURCES, or a path that ends in .npz or .csv, or of a folder.

    Named data sets are checked against their published sums and are the same for every `rng`. An .npz holds
    `x` (N, ...) of any real dtype and `y` (N,) of whole numbers 0..classes-1, every class present, and may
    hold `x_test`, `y_test`; values are taken as they are, so scale them first. Without test arrays a fifth is
    split off by `rng`, or by a fixed stream if that is None. An array `worker` (N,) of whole numbers says which worker
    holds each example of `x`, and `worker_test` the same of `x_test`.

    A table (.csv, .tsv) has a header line, numbers, and a column of labels, which are names of classes; columns: which
    it is, and which says who holds the example. A folder has one such file, or one .npz, for each worker; or one folder
    of pictures for each class, alone or in `train` and `test`, or in a folder for each worker. A fifth of each worker's
    examples becomes the test part, where none is given.
    """
    if (path := own_path(name)) is not None:
        return _own(path, stream(0, "npz-split") if rng is None else rng, columns or Columns())
    if name not in SOURCES:
        known = ", ".join(SOURCES)
        rule = f"unknown{checks.guess(name, SOURCES)}; choose from {known}, or give a path that ends in .npz or .csv, "
        raise checks.refuse("dataset", name, f"{rule}or of a folder that is there")
    if columns and (said := columns.given()):
        raise SpecError(f"{said}: names a column of a table, and {name!r} is none; leave it out")
    source = SOURCES[name]
    payloads = {file: checked(path, source.files[file]) for file, path in locate(source).items()}
    return source.reader(payloads)


def own_path(name: str) -> Path | None:
    """The file or folder that `name` is, if it is a user's own data set and not a name in SOURCES."""
    if name in SOURCES:
        return None
    if name.lower().endswith((".npz", *SUFFIXES)):
        return expanded(name, "dataset")
    path = expanded(name, "dataset") if name else Path()
    try:
        return path if name and path.is_dir() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def own_files(path: Path) -> list[Path]:
    """The file, or all files in the folder and below, in an order that lasts; none if nothing is there."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _own(path: Path, rng: torch.Generator, columns: Columns) -> Dataset:
    if path.suffix.lower() in SUFFIXES:
        return read_single(path, columns, rng)
    if path.suffix.lower() != ".npz":
        return read_folder(path, columns, rng)
    if said := columns.given():
        raise DataError(f"{path}: {said}: names a column of a table, and this is an .npz; leave it out")
    return _archive(path, rng)


def _archive(path: Path, rng: torch.Generator) -> Dataset:
    arrays = archive(path, ("x", "y", "x_test", "y_test", "worker", "worker_test"))
    for key in ("x", "y"):
        if key not in arrays:
            raise DataError(f"{path}: has no array {key!r}; an .npz data set needs x and y")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: has only one of x_test and y_test; give both or neither")
    x, y = features_of(path, "x", arrays["x"]), labels_of(path, "y", arrays["y"])
    owner, owner_test = _owners(path, arrays, "worker", "x"), _owners(path, arrays, "worker_test", "x_test")
    if "x_test" in arrays:
        same_scale((f"{path}, x", f"{path}, x_test"), (arrays["x"], arrays["x_test"]))
        x_test, y_test = features_of(path, "x_test", arrays["x_test"]), labels_of(path, "y_test", arrays["y_test"])
    else:
        train, test = _split(path, x, y, owner, rng)
        x, y, x_test, y_test = x[train], y[train], x[test], y[test]
        if owner is not None:
            owner, owner_test = owner[train], owner[test]
    classes = classes_of(path, torch.cat((y, y_test)))
    notes = notes_of(arrays["x"], split_off="x_test" not in arrays, owned=owner is not None)
    dataset = Dataset(path.stem, x, y, x_test, y_test, classes, owner, owner_test, notes=notes)
    warn_of_scale(path, dataset)
    return dataset


def read_examples(path: Path, names: tuple[str, str] = ("x", "y")) -> tuple[Tensor, Tensor]:
    """The examples and labels of an .npz, all of them, whatever their classes; DataError if they are not sound."""
    arrays = archive(path, names)
    for key in names:
        if key not in arrays:
            raise DataError(f"{path}: has no array {key!r}; it needs {' and '.join(names)}")
    x, y = features_of(path, names[0], arrays[names[0]]), labels_of(path, names[1], arrays[names[1]])
    if len(x) != len(y) or not x.numel() or not bool(torch.isfinite(x).all()):
        raise DataError(f"{path}: {names[0]} must be finite, with at least one example, and a label for each")
    return x, y


def _owners(path: Path, arrays: Mapping[str, NDArray[Any]], key: str, of: str) -> Tensor | None:
    """Which worker holds each example; None if the file does not say so."""
    if key not in arrays:
        return None
    if of not in arrays:
        raise DataError(f"{path}: has {key} without {of}; give both, or leave it out")
    array, examples = arrays[key], len(arrays[of])
    if array.ndim != 1 or len(array) != examples:
        raise DataError(f"{path}: {key} has shape {array.shape}; it must be ({examples},), one for each of {of}")
    return labels_of(path, key, array)


def _split(path: Path, x: Tensor, y: Tensor, owner: Tensor | None, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The numbers of the training examples and of the test examples."""
    tests = len(y) // ONE_TEST_IN
    if len(x) != len(y) or tests == 0:
        raise DataError(
            f"{path}: x has {len(x)} examples and y {len(y)} labels; they must agree, and splitting off a "
            f"fifth as test examples needs at least {ONE_TEST_IN}"
        )
    if owner is not None:
        return split(path, y, owner, rng)
    order = torch.randperm(len(y), generator=rng)  # as earlier versions did, whose runs keep their data
    return order[tests:], order[:tests]
