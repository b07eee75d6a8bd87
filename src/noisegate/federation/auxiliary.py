"""The server's own examples. They are read here, used to judge, and sent to nobody."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.checks import plain
from noisegate.data.contents import archive
from noisegate.errors import NO_REGRESSION, DataError
from noisegate.features import Features, embed

Examples = tuple[Tensor, Tensor]


def read_auxiliary(
    path: Path, shape: tuple[int, ...], classes: int, features: Features | None = None
) -> tuple[Examples, Examples | None]:
    """((x, y), (x_test, y_test) or None) of an .npz archive, for a model of these inputs and classes.

    features: what takes the place of x and x_test, once they were read.
    """
    arrays = archive(path, ("x", "y", "x_test", "y_test"))
    own = _examples(path, arrays, "x", "y", shape, classes)
    if own is None:
        raise DataError(f"{plain(path)}: must have x and y, the server's own examples")
    test = _examples(path, arrays, "x_test", "y_test", shape, classes)
    if features is None:
        return own, test
    return (embed(features, own[0]), own[1]), test and (embed(features, test[0]), test[1])


def _examples(
    path: Path, arrays: dict[str, NDArray[Any]], x: str, y: str, shape: tuple[int, ...], classes: int
) -> Examples | None:
    where = plain(path)
    if x not in arrays or y not in arrays:
        return None
    if arrays[x].dtype.kind not in "buif" or arrays[y].dtype.kind not in "bui":
        why = f"; {NO_REGRESSION}" * (arrays[y].dtype.kind == "f")
        raise DataError(f"{where}: {x} must be real numbers and {y} whole ones{why}")
    values = torch.from_numpy(np.array(arrays[x], dtype=np.float32, order="C"))
    labels = torch.from_numpy(arrays[y].astype(np.int64))
    if labels.ndim != 1 or not 0 < len(labels) == len(values) or values.shape[1:] != shape:
        raise DataError(f"{where}: {x} must be of shape (N, {', '.join(map(str, shape))}) and {y} of shape (N,), N > 0")
    if not bool(values.isfinite().all()) or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise DataError(f"{where}: {x} must be finite, and {y} labels 0 to {classes - 1}")
    return values, labels
