"""Reading tables: CSV files with a header line. What comes back is whole; anything else names file, line and column."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.checks import guess, plain, shown, told
from noisegate.data.arrays import WORKER, Names
from noisegate.errors import DataError

SUFFIXES = (".csv", ".tsv")
SEPARATORS = ",;\t"
"""What may stand between cells: the first of these that is in the header line."""

MOST_BYTES = 2**33
MOST_COLUMNS = 100_000
MOST_HEADER = 2**24
"""Characters of the header line that are read."""

ROWS = 4096
"""Rows that are turned into numbers at a time."""

LARGEST = float(np.finfo(np.float32).max)

NO_NUMBER = "is no number; fill in or drop missing values, and write words as numbers, one column of 0 and 1 for each"

HOLDER = "if the column says who holds the example, name it with worker_column (--worker-column)"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table say what. label: unless given, the last one. worker: who holds the example; unless
    given, the one named `worker`, if there is one.
    """

    label: str | None = None
    worker: str | None = None

    def given(self) -> str | None:
        """One of them as it was set, for messages; None if neither was."""
        for name, value in (("label_column", self.label), ("worker_column", self.worker)):
            if value is not None:
                return f"{name} = {shown(value)}"
        return None


@dataclass(frozen=True)
class Table:
    """The examples of one file. x: (N, features) float32. labels, workers: (N,) texts; None without a worker column."""

    path: Path
    features: Names
    x: Tensor
    labels: list[str]
    workers: list[str] | None


def read_table(path: Path, columns: Columns) -> Table:
    """The table in a file. DataError with file and line if there is anything else than numbers, labels and workers."""
    try:
        if not path.is_file():
            raise DataError(f"{plain(path)}: no such file; give the path of a CSV file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise DataError(f"{plain(path)}: has {size:,} bytes; at most {MOST_BYTES:,} are read from one file")
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(MOST_HEADER)
            file.seek(0)
            separator = next((mark for mark in SEPARATORS if mark in first), ",")
            return _Rows(path, columns, csv.reader(file, delimiter=separator, strict=True)).table()
    except UnicodeDecodeError as error:
        raise DataError(f"{plain(path)}: is no UTF-8 text ({told(error)}); save it as CSV in UTF-8") from None
    except OSError as error:
        raise DataError(f"{plain(path)}: cannot be read ({error.strerror})") from None


class _Rows:
    """Reads the rows of a file, from its header to its end."""

    def __init__(self, path: Path, columns: Columns, rows: "Iterator[list[str]]") -> None:
        self.path, self.rows = path, rows
        self.names = self._header()
        worker = columns.worker or (WORKER if WORKER in self.names and columns.label != WORKER else None)
        self.worker = None if worker is None else self._place("worker_column", worker)
        left = [place for place in range(len(self.names)) if place != self.worker]
        self.label = left[-1] if columns.label is None else self._place("label_column", columns.label)
        if self.label == self.worker:
            raise self._wrong(f"{columns.given()}: is also the worker_column; name two columns")
        self.kept = [place for place in left if place != self.label]
        if not self.kept:
            raise self._wrong("no column is left for features beside the label; cells are separated by , or ; or tabs")

    def table(self) -> Table:
        """All rows."""
        labels: list[str] = []
        workers: list[str] = []
        parts, cells, lines = [], list[list[str]](), list[int]()
        while row := self._next():
            if len(row) != len(self.names):
                raise self._wrong(f"has {len(row)} cells, but the header has {len(self.names)} columns")
            labels.append(self._word(row, self.label))
            if self.worker is not None:
                workers.append(self._word(row, self.worker))
            cells.append([row[place] for place in self.kept])
            lines.append(self._line())
            if len(cells) == ROWS:
                parts.append(self._numbers(cells, lines))
                cells, lines = [], []
        if cells:
            parts.append(self._numbers(cells, lines))
        if not parts:
            raise self._wrong("has no examples, only a header")
        x = torch.from_numpy(np.concatenate(parts))
        features = tuple(self.names[place] for place in self.kept)
        return Table(self.path, features, x, labels, None if self.worker is None else workers)

    def _next(self) -> list[str] | None:
        """The next row that is not blank; None at the end."""
        try:
            return next((row for row in self.rows if row), None)
        except csv.Error as error:
            raise self._wrong(f"cannot be read as CSV ({told(error)})") from None

    def _header(self) -> list[str]:
        names = [name.strip() for name in self._next() or []]
        if not names:
            raise self._wrong("is empty; the first line must name the columns")
        if len(names) > MOST_COLUMNS:
            raise self._wrong(f"has {len(names)} columns; at most {MOST_COLUMNS} are read")
        if all(_is_number(name) for name in names):
            raise self._wrong("is all numbers; write the names of the columns into a first line")
        if "" in names:
            raise self._wrong(
                f"column {names.index('') + 1} has no name; give it one, or drop it (pandas writes its index so, "
                "unless index=False)"
            )
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise self._wrong(f"two columns are named {shown(twice)}; name every column once")
        return names

    def _place(self, setting: str, name: str) -> int:
        if name not in self.names:
            raise self._wrong(
                f"{setting} = {shown(name)}: is no column{guess(name, self.names)}; there are {listed(self.names)}"
            )
        return self.names.index(name)

    def _word(self, row: list[str], place: int) -> str:
        if not (word := row[place].strip()):
            raise self._wrong(f"column {shown(self.names[place])} is empty; every example needs it")
        return word

    def _numbers(self, cells: list[list[str]], lines: list[int]) -> NDArray[np.float32]:
        """Rows of cells as numbers. DataError that names the first that is none."""
        try:
            with np.errstate(over="ignore"):
                found = np.array(cells, dtype=np.float64).astype(np.float32)
            if bool(np.isfinite(found).all()):
                return found
        except ValueError:  # which cell it was is looked for below
            pass
        for row, line in zip(cells, lines, strict=True):
            for place, cell in zip(self.kept, row, strict=True):
                if not _is_number(cell) or abs(float(cell)) > LARGEST:
                    who = f"; {HOLDER}" if self.worker is None and _is_word(cell) else ""
                    raise self._wrong(f"column {shown(self.names[place])}: {shown(cell)} {NO_NUMBER}{who}", line)
        raise self._wrong("holds numbers that cannot be read")

    def _line(self) -> int:
        return int(self.rows.line_num)  # type: ignore[attr-defined]  # of what csv.reader gives

    def _wrong(self, rule: str, line: int | None = None) -> DataError:
        return DataError(f"{plain(self.path)}, line {self._line() if line is None else line}: {rule}")


def _is_word(cell: str) -> bool:
    """Whether it is neither a number, nor what programs write for no value."""
    written = cell.strip().lower().lstrip("+-")
    return written[:1].isalpha() and written not in ("na", "n/a", "nan", "none", "null", "inf", "infinity")


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def listed(names: Sequence[object], most: int = 20) -> str:
    """Names for a message, the first ones if there are many."""
    return ", ".join(plain(name) for name in names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )
