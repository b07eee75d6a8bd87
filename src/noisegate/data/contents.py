"""Reading files and archives that may be damaged: what comes back is whole, anything else is a DataError."""

import gzip
import hashlib
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisegate.checks import plain
from noisegate.data.arrays import natural
from noisegate.data.source import File
from noisegate.errors import DataError

# What numpy, zipfile and the decompressors raise on bytes they cannot read.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)

MOST_FILES = 1_000_000
"""The most files of a folder that are looked at."""


def checked(path: Path, file: File) -> bytes:
    """The content of the file at `path`, decompressed if it is a .gz, once its sum agrees with `file`."""
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check the path and its permissions") from error
    found = hashlib.sha256(whole).hexdigest()
    if path.suffix != ".gz":
        if found != file.sha256 and (file.content is None or _arrays_sum(path) != file.content):
            raise _wrong(path, file.sha256, found)
        return whole
    try:
        content = gzip.decompress(whole)
    except UNREADABLE as error:
        raise _wrong(path, file.sha256, found) from error
    if found != file.sha256 and hashlib.sha256(content).hexdigest() != file.content:
        raise _wrong(path, file.sha256, found)
    return content


def archive(path: Path, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Those arrays of the .npz at `path` that are `wanted` and there. Never unpickles anything."""
    try:
        there = path.is_file()
    except OSError:  # a name that is too long, a folder that is locked
        there = False
    if not there:
        raise DataError(f"{path}: no such file; give the path of an .npz archive")
    try:
        # Read at once, so that no file stays open whatever numpy makes of it.
        loaded = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise DataError(
                f"{path}: holds one plain array, not an .npz archive; write it with numpy.savez(x=..., y=...)"
            )
        with loaded:
            return {key: loaded[key] for key in wanted if key in loaded.files}
    except UNREADABLE as error:
        raise DataError(
            f"{path}: not a readable .npz archive of plain arrays ({error}); write it with "
            "numpy.savez(x=..., y=...), without object arrays"
        ) from error


def members(path: Path) -> list[Path]:
    """What is in a folder but for hidden files, as people sort it. DataError if there is nothing."""
    try:
        found = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{plain(path)}: cannot be read ({error.strerror}); check the folder and its permissions"
        ) from None
    if not found:
        raise DataError(f"{plain(path)}: is an empty folder, which holds no data")
    if len(found) > MOST_FILES:
        raise DataError(f"{plain(path)}: holds {len(found):,} entries; at most {MOST_FILES:,} are read")
    return sorted(found, key=lambda entry: natural(entry.name))


def _arrays_sum(path: Path) -> str:
    arrays = archive(path, ("x", "y"))
    return hashlib.sha256(b"".join(arrays[key].tobytes() for key in ("x", "y") if key in arrays)).hexdigest()


def _wrong(path: Path, expected: str, found: str) -> DataError:
    return DataError(
        f"{path}: sha256 is {found}, expected {expected}; the file is damaged or another version: delete it "
        "and get it again (`noisegate data fetch`), or give data of your own as a path to an .npz"
    )
