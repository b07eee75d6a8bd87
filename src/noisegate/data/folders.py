"""Tables and folders of a user's own: one table, or a folder with one file for each worker, or of pictures."""

from collections.abc import Sequence
from pathlib import Path

import torch

from noisegate.checks import plain
from noisegate.data.arrays import features_of, labels_of, notes_of, numbered, same_scale
from noisegate.data.contents import archive, members
from noisegate.data.dataset import Dataset
from noisegate.data.own import Labeled, Words, assemble, joined_parts, named_labels
from noisegate.data.pictures import read_pictures
from noisegate.data.tables import SUFFIXES, Columns, Table, listed, read_table
from noisegate.errors import DataError

KINDS = "one .csv file, or one .npz, for each worker, or one folder of pictures for each class"


def read_single(path: Path, columns: Columns, rng: torch.Generator) -> Dataset:
    """The data set in one table, dealt out later unless a column says who holds each example."""
    table = read_table(path, columns)
    y, classes = named_labels(plain(path), table.labels)
    owner, workers = (None, ()) if table.workers is None else numbered(table.workers)
    return assemble(path, Labeled(table.x, y, owner), None, Words(classes, workers, table.features), rng)


def read_folder(path: Path, columns: Columns, rng: torch.Generator) -> Dataset:
    """The data set in a folder that has one file for each worker, called as the file; or in one of pictures."""
    files = members(path)
    if all(file.is_dir() for file in files):
        if said := columns.given():
            raise DataError(f"{plain(path)}: {said}: names a column of a table, and these are pictures; leave it out")
        return read_pictures(path, rng)
    if columns.worker is not None:
        raise DataError(f"{plain(path)}: a folder has one file for each worker; leave worker_column out")
    kinds = sorted({file.suffix.lower() for file in files})
    if not set(kinds) <= set(SUFFIXES) and kinds != [".npz"]:
        odd = next((file.name for file in files if file.suffix.lower() not in (".npz", *SUFFIXES)), " and ".join(kinds))
        raise DataError(f"{plain(path)}: holds {plain(odd)}; a folder of data has {KINDS}, and nothing else")
    if len({file.stem for file in files}) < len(files):
        raise DataError(f"{plain(path)}: two files have one name but for their suffix; there must be {KINDS}")
    return _archives(path, files, columns, rng) if kinds == [".npz"] else _tables(path, files, columns, rng)


def _tables(path: Path, files: Sequence[Path], columns: Columns, rng: torch.Generator) -> Dataset:
    tables: list[Table] = []
    for file in files:
        tables.append(read_table(file, columns))
        if tables[-1].workers is not None:
            raise DataError(f"{plain(file)}: has a column worker, and a folder has one file for each; drop the column")
        if (own := tables[-1].features) != (first := tables[0].features):
            raise DataError(
                f"{plain(file)}: has the features {listed(own)}, and {plain(files[0].name)} {listed(first)}; all files "
                "need the same, in the same order"
            )
    y, classes = named_labels(plain(path), [label for table in tables for label in table.labels])
    labels = y.split([len(table.labels) for table in tables])
    joined = joined_parts([plain(file) for file in files], [table.x for table in tables], labels, len(files))
    words = Words(classes, tuple(file.stem for file in files), tables[0].features)
    return assemble(path, *joined, words, rng)


def _archives(path: Path, files: Sequence[Path], columns: Columns, rng: torch.Generator) -> Dataset:
    if said := columns.given():
        raise DataError(f"{plain(path)}: {said}: names a column of a table, and these are .npz files; leave it out")
    read = [archive(file, ("x", "y", "x_test", "y_test", "worker")) for file in files]
    for file, arrays in zip(files, read, strict=True):
        missing = [key for key in ("x", "y") if key not in arrays]
        if missing or arrays.keys() != read[0].keys() or "worker" in arrays:
            raise DataError(
                f"{plain(file)}: has the arrays {listed(sorted(arrays))}, and {plain(files[0].name)} "
                f"{listed(sorted(read[0]))}; each file needs x and y, all or none x_test and y_test, and none worker"
            )
    keys = [("x", "y")] + ([("x_test", "y_test")] if "x_test" in read[0] or "y_test" in read[0] else [])
    if len(keys) == 2 and not {"x_test", "y_test"} <= read[0].keys():
        raise DataError(f"{plain(files[0])}: has only one of x_test and y_test; give both or neither")
    named = [(plain(file), arrays, *pair) for pair in keys for file, arrays in zip(files, read, strict=True)]
    same_scale([where for where, *_ in named], [arrays[key] for _, arrays, key, _ in named])
    features = [features_of(where, key, arrays[key]) for where, arrays, key, _ in named]
    labels = [labels_of(where, key, arrays[key]) for where, arrays, _, key in named]
    joined = joined_parts([where for where, *_ in named], features, labels, len(files))
    notes = notes_of(*(arrays[key] for _, arrays, key, _ in named))
    return assemble(path, *joined, Words(workers=tuple(file.stem for file in files), notes=notes), rng)
