"""How files are written and read: whole or not at all, and checked when they are read.

A checksum shows that a file was damaged, cut, or swapped with another one. It does not show a forgery: whoever can
write to a folder can compute the checksum anew. So nothing here runs code from a file, and every reader checks the type
and range of each value.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from noisegate.checks import plain
from noisegate.errors import StoreError

MOST_TEXT = 2**28
"""The largest JSON file that is read, in bytes."""

SUM = "sha256"
"""The key of the checksum in a JSON object."""


def write_whole(path: Path, content: bytes, part: str = "") -> None:
    """Write a file that is whole once it exists, also after a power cut. A full disk leaves an old file unchanged.

    part: the name of the file until it is whole; a random name unless given. No other process may use it.
    """
    unfinished = path.with_name(part or f".{path.name}.{uuid4().hex}.part")
    try:
        unfinished.unlink(missing_ok=True)  # left by a process that was killed
        try:
            with unfinished.open("xb") as file:  # never through a link of that name
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(
            f"{plain(path)}: cannot be written ({error.strerror}); make room or choose another place"
        ) from None
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Write the renaming itself to the disk, on systems that can."""
    with suppress(OSError):  # Windows cannot open a folder; the file is whole anyway
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_whole(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes. FileNotFoundError if there is none."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # for example a pipe, on which a reader would wait
            raise StoreError(f"{plain(path)}: is not a file")
        with path.open("rb") as file:
            content = file.read(min(about.st_size, most) + 1)  # the file may grow; the memory that is taken does not
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise StoreError(f"{plain(path)}: is damaged (larger than the {most} bytes that it can be)")
    return content


def parse(content: bytes, what: object) -> Any:
    """The value of a JSON text, all numbers finite; StoreError if it is anything else. what: the file, for messages."""
    try:
        return json.loads(content.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else plain(error)
        raise StoreError(f"{plain(what)}: is damaged ({why})") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def read_json(path: Path, most: int = MOST_TEXT) -> Any:
    """The value in a JSON file. FileNotFoundError if there is none."""
    return parse(read_whole(path, most), path)


def sum_of(value: Mapping[str, Any]) -> str:
    """The sha256 of a JSON object in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """A JSON object with its own checksum."""
    return (json.dumps({**value, SUM: sum_of(value)}, indent=indent) + "\n").encode()


def unseal(found: Any, what: object) -> dict[str, Any]:
    """The object that `seal` was given, from the JSON that it made; StoreError if the checksum does not fit."""
    if not isinstance(found, dict):
        raise StoreError(f"{plain(what)}: is damaged (not a JSON object)")
    if SUM not in found:
        raise StoreError(f"{plain(what)}: is damaged, or of an earlier version (it has no checksum)")
    value = {key: entry for key, entry in found.items() if key != SUM}
    if sum_of(value) != found[SUM]:
        raise StoreError(f"{plain(what)}: is damaged (its checksum does not fit)")
    return value


def number(value: Any) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def count(value: Any) -> bool:
    """Whether a value is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
