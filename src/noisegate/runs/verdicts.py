"""The file verdicts.npz: which upload was refused in which round, and why. Any program with numpy can read it."""

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import read_whole
from noisegate.views import Reason

HEADER = 4096
"""The bytes that an array in the file may take beside its numbers."""


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a run. reasons, scores, weights: (rounds, n). byzantine: (n,) whether a worker is Byzantine.

    fell_back: (rounds,) whether the aggregator fell back; None if it never did. Files of earlier versions have no
    weights.
    """

    reasons: np.ndarray
    scores: np.ndarray
    byzantine: np.ndarray
    weights: np.ndarray | None = None
    fell_back: np.ndarray | None = None


def pack(verdicts: Verdicts) -> bytes:
    """The bytes of verdicts.npz."""
    content = io.BytesIO()
    arrays = {name: value for name, value in vars(verdicts).items() if value is not None}
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def read_verdicts(path: Path, rounds: int, n: int) -> tuple[Verdicts, bytes]:
    """The verdicts of a run with that many rounds and workers, and the bytes of the file. StoreError if it is damaged.

    The size of each array is known beforehand, so a file that would unpack to more is refused before it is unpacked.
    """
    kinds: dict[str, tuple[type, tuple[int, ...]]] = {
        "reasons": (np.uint8, (rounds, n)),
        "scores": (np.float32, (rounds, n)),
        "weights": (np.float32, (rounds, n)),
        "byzantine": (np.bool_, (n,)),
        "fell_back": (np.bool_, (rounds,)),
    }
    sizes = {name: math.prod(shape) * np.dtype(kind).itemsize + HEADER for name, (kind, shape) in kinds.items()}
    content = read_whole(path, 2 * sum(sizes.values()))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            found = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            needed = kinds.keys() - {"weights", "fell_back"}
            if not needed <= found.keys() <= kinds.keys() or len(archive.infolist()) != len(found):
                raise ValueError("other arrays")
            if any(entry.file_size > sizes[name] for name, entry in found.items()):
                raise ValueError("larger than a run of that many rounds and workers makes it")
            arrays = {name: _array(archive, entry, *kinds[name]) for name, entry in found.items()}
        if rounds * n and int(arrays["reasons"].max()) >= len(Reason):
            raise ValueError("there is no such reason")
    except (OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{plain(path)}: is damaged ({plain(error)})") from None
    if "weights" not in arrays:  # an earlier version, in which 7 was the code of a lost round
        arrays["reasons"] = np.where(arrays["reasons"] == Reason.MISSING, np.uint8(Reason.LOST), arrays["reasons"])
    return Verdicts(**arrays), content


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, kind: type, shape: tuple[int, ...]) -> np.ndarray:
    """An array of that type and shape. Its header is checked before memory is taken for its numbers."""
    with archive.open(entry) as file:
        content = io.BytesIO(file.read(entry.file_size))
    version = np.lib.format.read_magic(content)
    if version != (1, 0):
        raise ValueError(f"{entry.filename}: unknown version")
    found, fortran, dtype = np.lib.format.read_array_header_1_0(content)
    if found != shape or fortran:
        raise ValueError(f"{entry.filename}: another shape")
    if dtype != kind:
        raise ValueError(f"{entry.filename}: another type")
    return np.frombuffer(content.read(), dtype=dtype).reshape(shape)
