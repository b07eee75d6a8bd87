"""Files of features: one tensor in the format of safetensors, whole or not there, and checked when it is read.

Nothing in such a file can make do anything. Its header says what lies in it and the digest of that. A file of features
is as private as the examples: only its owner can read it.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import StoreError

NAME, SUM = "features", "blake2b"
LENGTH = struct.Struct("<Q")
MOST_HEADER, MOST_DIMENSIONS = 2**12, 8
CHUNK = 2**24
"""Bytes of which the digest is taken at a time."""


def header_of(shape: tuple[int, ...], digest: str) -> bytes:
    """The header of a file, as safetensors has it: as long whatever the digest is."""
    about = {
        "__metadata__": {SUM: digest},
        NAME: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * math.prod(shape)]},
    }
    text = json.dumps(about).encode()
    return text + b" " * (-(LENGTH.size + len(text)) % 8)  # so that the numbers begin at a multiple of 8


@contextmanager
def writing(path: Path, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor to be filled, which becomes the file once the context ends without an error."""
    header = header_of(shape, "0" * 32)
    begin = LENGTH.size + len(header)
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            number = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with open(number, "r+b") as file:
                # Taken now, so that a full disk is an error here and not a signal when the map is written to.
                _take(file.fileno(), begin + 4 * math.prod(shape))
                mapped = np.memmap(file, dtype="<f4", mode="r+", offset=begin, shape=shape)
                yield torch.from_numpy(mapped)
                mapped.flush()
                file.seek(0)
                file.write(LENGTH.pack(len(header)) + header_of(shape, _digest(mapped)))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{plain(path)}: features cannot be kept there ({error.strerror}); make room, name another folder in "
            "$NOISEGATE_CACHE, or give it the word off"
        ) from None


def open_kept(path: Path, examples: int) -> Tensor | None:
    """The features in a file, mapped into memory; None if there is no such file. StoreError if it is damaged."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = LENGTH.unpack(file.read(LENGTH.size).ljust(LENGTH.size, b"\0"))
            header = file.read(min(length, MOST_HEADER))
            shape, digest = _read_header(header, path) if length == len(header) else ((), "")
            begin = LENGTH.size + length
            if not shape or shape[0] != examples or size != begin + 4 * math.prod(shape):
                raise _damaged(path, "its size is not what it should be")
            # Private: what is written to the tensor does not reach the file.
            mapped = np.memmap(file, dtype="<f4", mode="c", offset=begin, shape=shape)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be read ({error.strerror})") from None
    if _digest(mapped) != digest:
        raise _damaged(path, "its digest does not fit")
    return torch.from_numpy(mapped)


def _read_header(header: bytes, path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and digest; StoreError unless this is the very header that `header_of` makes of them."""
    try:
        about = json.loads(header)
        shape, digest = tuple(about[NAME]["shape"]), about["__metadata__"][SUM]
        sound = 2 <= len(shape) <= MOST_DIMENSIONS and all(type(size) is int and 0 < size < 2**40 for size in shape)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "it has no sound header") from None
    if not sound or not isinstance(digest, str) or header != header_of(shape, digest):
        raise _damaged(path, "it has no sound header")
    return shape, digest


def _digest(mapped: NDArray[np.float32]) -> str:
    found, flat = hashlib.blake2b(digest_size=16), mapped.reshape(-1)
    for first in range(0, len(flat), CHUNK // 4):
        found.update(flat[first : first + CHUNK // 4].tobytes())
    return found.hexdigest()


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{plain(path)}: is damaged ({why}); remove it, and the features are computed again")


def _take(number: int, size: int) -> None:
    """Make a file so large, with its room on the disk where the system can promise it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.truncate(number, size)
