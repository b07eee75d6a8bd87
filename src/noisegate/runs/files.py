"""How every file of this package is written and read back: whole or not at all, and never believed unchecked.

A checksum tells a file that was damaged, cut, or put there for another one. It does not tell a file that somebody made
on purpose: whoever can write to a folder can compute the sum anew. So nothing here runs code from a file, and every
value is checked for type and range by whoever reads it.
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
"""Bytes of the largest JSON file that is read."""

SUM = "sha256"


def write_whole(path: Path, content: bytes, part: str = "") -> None:
    """A file that is whole once it exists, also after a power cut. A full disk leaves the old one as it was.

    part: its name until it is whole, which nobody else may use; a name of its own unless given.
    """
    unfinished = path.with_name(part or f".{path.name}.{uuid4().hex}.part")
    try:
        unfinished.unlink(missing_ok=True)  # of a process that was killed
        try:
            with unfinished.open("xb") as file:  # never through a link that lies there
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
            f"{plain(path)}: cannot be written ({error.strerror}); make room or choose another --out"
        ) from None
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Let the renaming itself reach the disk, on systems that can."""
    with suppress(OSError):  # a folder cannot be opened on Windows; the file is whole either way
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_whole(path: Path, most: int) -> bytes:
    """The bytes of a file that must be a plain one and no larger than `most`. FileNotFoundError if there is none."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe, say, on which a reader would wait
            raise StoreError(f"{plain(path)}: is not a file")
        with path.open("rb") as file:
            content = file.read(min(about.st_size, most) + 1)  # which takes so much memory, whatever there is to read
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise StoreError(f"{plain(path)}: is damaged (larger than the {most} bytes that it can be)")
    return content


def parse(content: bytes, what: object) -> Any:
    """JSON without numbers that are not finite, or a StoreError of one line. what: the file, for messages."""
    try:
        return json.loads(content.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else plain(error)
        raise StoreError(f"{plain(what)}: is damaged ({why})") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def read_json(path: Path, most: int = MOST_TEXT) -> Any:
    """The JSON in a file. FileNotFoundError if there is none."""
    return parse(read_whole(path, most), path)


def sum_of(value: Mapping[str, Any]) -> str:
    """The checksum of a JSON object: of its one canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """A JSON object with its own checksum."""
    return (json.dumps({**value, SUM: sum_of(value)}, indent=indent) + "\n").encode()


def unseal(found: Any, what: object) -> dict[str, Any]:
    """What `seal` was given, from the JSON it became; StoreError if it is anything else."""
    if not isinstance(found, dict):
        raise StoreError(f"{plain(what)}: is damaged (not a JSON object)")
    if SUM not in found:
        raise StoreError(f"{plain(what)}: is damaged, or of an earlier version (it has no checksum)")
    value = {key: entry for key, entry in found.items() if key != SUM}
    if sum_of(value) != found[SUM]:
        raise StoreError(f"{plain(what)}: is damaged (its checksum does not fit)")
    return value


def number(value: Any) -> bool:
    """Whether it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def count(value: Any) -> bool:
    """Whether it is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
