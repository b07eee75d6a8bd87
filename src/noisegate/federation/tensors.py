"""Tensors in one file of the safetensors format, written from where they lie and read into their own memory.

The file is 8 bytes with the length of its header, a JSON header, then the tensors' bytes. A library would make a copy
of all of them first, which is as much memory again. The header's metadata holds a JSON object and the sha256 of the
file, taken with zeros in place of the sum. A checksum shows damage; it does not show a forgery (`noisegate.files`).
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import count, parse

ABOUT, SUM, NO_SUM = "noisegate", "sha256", "0" * 64
"""The metadata's two entries, and what stands for the sum while it is taken."""

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the types that can be saved."""

WORDS = {kind: word for word, kind in TYPES.items()}
MOST_HEADER = 2**26
AT_ONCE = 2**26
"""Bytes that are written, read and summed at a time."""

LOOKED_AT = 2**22
"""Numbers that are looked at for being finite at a time: the look takes memory of its own."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file that is whole once it exists, also after a power cut. An old one stays until then."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed; the folder is locked
        with part.open("xb", buffering=0) as file:
            _fill(file, tensors, about)
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StoreError(
            f"{plain(path)}: cannot be written ({error.strerror}); make room, then start the server again"
        ) from None


def _fill(file: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that each lies aligned
    header: dict[str, Any] = {"__metadata__": {SUM: NO_SUM, ABOUT: json.dumps(about)}}
    end = 0
    for name in order:
        value = tensors[name]
        if value.dtype not in WORDS:
            raise StoreError(f"{plain(name)}: is of type {value.dtype}, which cannot be saved")
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": WORDS[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    summed = hashlib.sha256(head)
    write_all(file.fileno(), memoryview(head))
    for name in order:
        for block in blocks(tensors[name]):
            summed.update(block)
            write_all(file.fileno(), block)
    os.pwrite(file.fileno(), head.replace(NO_SUM.encode(), summed.hexdigest().encode(), 1), 0)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in a file, and what it says of itself. StoreError if it is damaged; FileNotFoundError if missing."""
    try:
        with path.open("rb", buffering=0) as file:
            return _contents(file, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be read ({error.strerror})") from None


def _contents(file: BinaryIO, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MOST_HEADER, size - 8):
        raise damaged(path, "cut off")
    text = file.read(length)
    header = parse(text, path)
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    told = metadata.get(SUM) if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(ABOUT), str) or not isinstance(told, str):
        raise damaged(path, "it says nothing of itself")
    if len(told) != len(NO_SUM) or text.count(told.encode()) != 1:
        raise damaged(path, "it has no checksum")
    text = text.replace(told.encode(), NO_SUM.encode(), 1)
    summed = hashlib.sha256(length.to_bytes(8, "little") + text)
    tensors = {}
    for name, kind, shape in _forms(header, size - 8 - length, path):
        tensors[name] = value = torch.empty(shape, dtype=kind)
        for block in blocks(value):
            if not read_all(file, block):
                raise damaged(path, "cut off")
            summed.update(block)
    if summed.hexdigest() != told:
        raise damaged(path, "its checksum does not fit")
    about = parse(metadata[ABOUT].encode(), path)
    if not isinstance(about, dict):
        raise damaged(path, "it says nothing of itself")
    return tensors, about


def _forms(header: dict[str, Any], size: int, path: Path) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Name, type and shape of each tensor in the order of the file, which they fill without a gap."""
    end = 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            kind, shape, (begin, after) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = isinstance(shape, list) and all(map(count, shape)) and count(begin) and count(after)
            if not whole or begin != end or after - begin != math.prod(shape) * kind.itemsize or after > size:
                raise damaged(path, "its tensors have no place")
            end = after
            yield name, kind, shape
    except (LookupError, TypeError, ValueError):
        raise damaged(path, "its header is none") from None
    if end != size:
        raise damaged(path, "its tensors have no place")


def blocks(value: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor where they lie, in parts. A tensor that does not lie in one piece is copied."""
    flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    for begin in range(0, len(flat), AT_ONCE):
        yield memoryview(flat[begin : begin + AT_ONCE])


def write_all(number: int, content: memoryview, offset: int | None = None) -> None:
    """Write all of it to an open file, at the end or at an offset."""
    done = 0
    while done < len(content):
        rest = content[done:]
        done += os.write(number, rest) if offset is None else os.pwrite(number, rest, offset + done)


def read_all(file: BinaryIO, into: memoryview) -> bool:
    """Fill a part of memory from a file. False if the file ends before."""
    done = 0
    while done < len(into):
        got: int = file.readinto(into[done:])  # type: ignore[attr-defined]  # of an unbuffered file
        if not got:
            return False
        done += got
    return True


def finite(value: Tensor) -> bool:
    """Whether all numbers of a tensor are finite. It takes little memory beside the tensor."""
    if not value.is_floating_point():
        return True
    return all(bool(part.isfinite().all()) for part in value.reshape(-1).split(LOOKED_AT))


def sync_folder(folder: Path) -> None:
    """Write a renaming in this folder to the disk, on systems that can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def damaged(path: Path, why: str) -> StoreError:
    """The error for a file that cannot be gone on with."""
    return StoreError(
        f"{plain(path)}: is damaged ({why}); put back a copy of the whole state folder, or begin a new run with a new "
        "run id in an empty one"
    )
