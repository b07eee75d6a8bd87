"""Folders of pictures: `folder/class/*.png`, with `train/` and `test/` or one folder for each worker above, or not."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.checks import plain, told
from noisegate.data.arrays import Names, features_of, notes_of, numbered
from noisegate.data.contents import members
from noisegate.data.dataset import Dataset
from noisegate.data.own import Labeled, Words, assemble
from noisegate.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
"""What the files may hold, whatever they are called."""

PARTS = ("test", "train")
MOST_PIXELS, MOST_BYTES = 2**24, 2**34
"""The most pixels of one picture, and the most bytes of all."""

GRAY, COLOR = ("1", "L", "LA"), ("RGB", "P", "RGBA")
"""Modes of Pillow that are read: the first as one channel, the second as three. Any other one is refused."""

Held = list[tuple[str, Path]]
"""Pictures with the folder that they are in: class or worker."""


def read_pictures(path: Path, rng: torch.Generator) -> Dataset:
    """The data set in a folder of pictures. Examples are (1, height, width) or (3, height, width)."""
    parts = _parts(path)
    found = [(worker, label, file) for part in parts for worker, held in part for label, file in held]
    y, classes = numbered([label for _, label, _ in found])
    owner, workers = _owners(path, parts)
    pixels = _read([file for _, _, file in found])
    x, end = features_of(path, "x", pixels), sum(len(held) for _, held in parts[0])
    words = Words(classes, workers, notes=notes_of(pixels))
    train = Labeled(x[:end], y[:end], owner[0])
    test = Labeled(x[end:], y[end:], owner[1]) if len(parts) == 2 else None
    return assemble(path, train, test, words, rng)


Part = list[tuple[str | None, Held]]
"""The pictures of each worker; of None where the folder does not say."""


def _owners(path: Path, parts: list[Part]) -> tuple[tuple[Tensor | None, Tensor | None], Names]:
    """The worker of each picture of the training part and of the test part, and their names, where the folder says."""
    owned = [[worker for worker, held in part for _ in held if worker is not None] for part in parts]
    if not owned[0]:
        if any(owned):
            raise DataError(
                f"{plain(path / 'test')}: has a folder for each worker, and train has none; give both or none"
            )
        return (None, None), ()
    numbers, names = numbered([worker for part in owned for worker in part])
    tested = numbers[len(owned[0]) :]
    return (numbers[: len(owned[0])], tested if len(tested) else None), names


def _parts(path: Path) -> list[Part]:
    """The training part, and the test part if there is one."""
    names = [folder.name for folder in _folders(path)]
    if sorted(names) == list(PARTS):
        return [_workers(path / "train"), _workers(path / "test")]
    return [_workers(path)]


def _workers(path: Path) -> Part:
    """The pictures of a folder of classes, or of a folder of workers with a folder of classes each."""
    folders = _folders(path)
    deep = [any(entry.is_dir() for entry in members(folder)) for folder in folders]
    if not any(deep):
        return [(None, _held(folders))]
    if not all(deep):
        raise DataError(
            f"{plain(folders[deep.index(False)])}: holds no folders, and {plain(folders[deep.index(True)].name)} does; "
            "give folder/class/picture, or folder/worker/class/picture"
        )
    return [(folder.name, _held(_folders(folder))) for folder in folders]


def _held(classes: Sequence[Path]) -> Held:
    """The pictures of some folders of classes, in order."""
    found = []
    for folder in classes:
        for file in members(folder):
            if file.suffix.lower() not in SUFFIXES or not file.is_file():
                raise DataError(f"{plain(file)}: is no picture; a folder of a class holds {', '.join(SUFFIXES)} only")
            found.append((folder.name, file))
    return found


def _folders(path: Path) -> list[Path]:
    """The folders in a folder, which may hold nothing else."""
    entries = members(path)
    if file := next((entry for entry in entries if not entry.is_dir()), None):
        raise DataError(
            f"{plain(file)}: stands beside folders; a folder of pictures has one folder for each class only"
        )
    return entries


def _read(files: Sequence[Path]) -> NDArray[np.uint8]:
    """(N, channels, height, width) of bytes."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pictures need Pillow; install it with: pip install 'noisegate[images]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        first = _picture(Image, files[0])
        if first.size * len(files) > MOST_BYTES:
            raise DataError(
                f"{len(files):,} pictures of {_shape(first)} have {first.size * len(files):,} bytes; at most "
                f"{MOST_BYTES:,} are read: scale them down first"
            )
        pixels = np.empty((len(files), *first.shape), dtype=np.uint8)
        for place, file in enumerate(files):
            one = _picture(Image, file)
            if one.shape != first.shape:
                raise DataError(
                    f"{plain(file)}: is {_shape(one)}, and {plain(files[0])} {_shape(first)}; bring all pictures to "
                    "one size and one kind"
                )
            pixels[place] = one
    return pixels


def _picture(image: Any, file: Path) -> NDArray[np.uint8]:
    """(channels, height, width)."""
    try:
        with image.open(file, formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise DataError(f"{plain(file)}: has {opened.width} x {opened.height} pixels; scale it down first")
            if getattr(opened, "n_frames", 1) > 1:
                raise DataError(f"{plain(file)}: holds {opened.n_frames} pictures; give one in each file")
            if opened.mode not in GRAY + COLOR:
                raise DataError(f"{plain(file)}: is of mode {opened.mode!r}; save it as 8-bit gray or RGB")
            clear = opened.mode.endswith("A") and opened.getchannel("A").getextrema() != (255, 255)
            if clear or "transparency" in opened.info:
                raise DataError(f"{plain(file)}: is transparent somewhere; save it without transparency")
            gray = opened.mode in GRAY
            pixels = np.asarray(opened.convert("L" if gray else "RGB"), dtype=np.uint8)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  # a decoder may raise anything on a damaged file
        raise DataError(f"{plain(file)}: cannot be read as a picture ({told(error)})") from None
    return pixels[None] if gray else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _shape(pixels: NDArray[np.uint8]) -> str:
    channels, height, width = pixels.shape
    return f"{width} x {height} {'gray' if channels == 1 else 'color'}"
