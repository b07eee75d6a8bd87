"""From the bytes of published files to data sets. Nothing here touches a disk; the caller checks the sums."""

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.data.dataset import Dataset
from noisegate.errors import DataError
from noisegate.streams import stream

Payloads = Mapping[str, bytes]
Pixels = NDArray[np.uint8]

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"

# Mean and standard deviation over all pixels of scikit-learn's digits, scaled to 0..1.
DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3760


def idx_pair(name: str, mean: float, std: float) -> Callable[[Payloads], Dataset]:
    """A reader of the four IDX files that MNIST and Fashion-MNIST are published as."""

    def read(payloads: Payloads) -> Dataset:
        return Dataset(
            name=name,
            x=normalized(idx(payloads[TRAIN_IMAGES], (60_000, 28, 28))[:, None], (mean,), (std,)),
            y=labels(idx(payloads[TRAIN_LABELS], (60_000,))),
            x_test=normalized(idx(payloads[TEST_IMAGES], (10_000, 28, 28))[:, None], (mean,), (std,)),
            y_test=labels(idx(payloads[TEST_LABELS], (10_000,))),
            classes=10,
        )

    return read


def kmnist(payloads: Payloads) -> Dataset:
    """KMNIST's 10,000 test images, split 8,000 / 2,000 in a way that never changes."""
    pixels = idx(payloads[TEST_IMAGES], (10_000, 28, 28))[:, None]
    return split("kmnist", pixels, labels(idx(payloads[TEST_LABELS], (10_000,))), 2_000, (0.1846,), (0.3416,))


def colorectal(payloads: Payloads) -> Dataset:
    """5,000 tissue tiles of 3 x 64 x 64, split 4,600 / 400 in a way that never changes."""
    arrays = byte_arrays(payloads["colorectal64.npz"], {"x": (5_000, 64, 64, 3), "y": (5_000,)})
    pixels = np.ascontiguousarray(arrays["x"].transpose(0, 3, 1, 2))
    mean, std = (0.6499, 0.4723, 0.5844), (0.1511, 0.1592, 0.1381)
    return split("colorectal", pixels, labels(arrays["y"]), 400, mean, std)


def digits(_: Payloads) -> Dataset:
    """Scikit-learn's 1,797 digits of 1 x 8 x 8, split 1,437 / 360 in a way that never changes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    if found.images.shape != (1_797, 8, 8):
        raise DataError(f"digits: expected 1,797 images of 8 x 8 from scikit-learn, found shape {found.images.shape}")
    # Gray levels 0..16.
    pixels = found.images.astype(np.uint8)[:, None]
    return split("digits", pixels, labels(found.target), 360, (DIGITS_MEAN,), (DIGITS_STD,), white=16)


def split(
    name: str,
    pixels: Pixels,
    y: Tensor,
    tests: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    white: int = 255,
) -> Dataset:
    """Set `tests` images apart by a fixed permutation: equal on every machine and for every seed."""
    order = torch.randperm(len(y), generator=stream(0, f"{name}-split"))
    train, test = order[tests:], order[:tests]
    x, x_test = (normalized(pixels[part.numpy()], mean, std, white) for part in (train, test))
    return Dataset(name=name, x=x, y=y[train], x_test=x_test, y_test=y[test], classes=int(y.max()) + 1)


def normalized(pixels: Pixels, mean: tuple[float, ...], std: tuple[float, ...], white: int = 255) -> Tensor:
    """(N, channels, height, width) float32: pixels scaled to 0..1, then standardized per channel."""
    x = torch.from_numpy(pixels).to(torch.float32, copy=True).div_(white)
    return standardized_(x, mean, std)


def standardized_(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract `mean` and divide by `std` per channel, in place."""
    shape = (1, len(mean), 1, 1)
    return x.sub_(torch.tensor(mean).reshape(shape)).div_(torch.tensor(std).reshape(shape))


def labels(y: NDArray[Any]) -> Tensor:
    """Labels as torch counts them."""
    return torch.from_numpy(y.astype(np.int64))


def idx(payload: bytes, shape: tuple[int, ...]) -> Pixels:
    """The unsigned bytes of an IDX file, which must have exactly this shape."""
    header = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
    if payload[: len(header)] != header or len(payload) != len(header) + math.prod(shape):
        raise DataError(f"not an IDX file of unsigned bytes with shape {shape}: {len(payload)} bytes, wrong header")
    # A copy, because torch wants memory that may be written to.
    return np.frombuffer(payload, np.uint8, offset=len(header)).reshape(shape).copy()


def byte_arrays(payload: bytes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Pixels]:
    """The named arrays of an .npz, each of bytes and of exactly this shape."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in shapes}
    for key, array in arrays.items():
        if array.shape != shapes[key] or array.dtype != np.uint8:
            raise DataError(f"array {key!r}: expected uint8 {shapes[key]}, found {array.dtype} {array.shape}")
    return arrays
