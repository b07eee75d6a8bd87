"""Arrays that a user brings, checked and turned into the tensors of a `Dataset`. `where`, `key`: for messages."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisegate.checks import plain, shown
from noisegate.errors import NO_REGRESSION, DataError

BYTE = 255
"""What pictures of bytes are divided by: a public constant, the same for every worker."""

MOST_CLASSES = 1000
"""The most classes that a table may name. A column with more of them is hardly one of labels."""

ONE_TEST_IN = 5
"""One of so many examples is split off as a test example, where data bring none of their own."""

WORKER = "worker"
"""The column of a table or a frame that says who holds the example, unless another is named."""

Names = tuple[str, ...]


def features_of(where: object, key: str, array: NDArray[Any]) -> Tensor:
    """Features as float32. Pictures of bytes, (N, height, width, ...) of uint8, come in 0 to 1; others as they are."""
    if array.dtype.kind not in "buif":
        raise DataError(f"{where}: {key} has dtype {array.dtype}; it must be real numbers")
    if array.ndim < 2:
        raise DataError(f"{where}: {key} has shape {array.shape}; it must have shape (N, ...), features last")
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which Dataset refuses
        found = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    return found / BYTE if is_bytes(array) else found


def is_bytes(array: NDArray[Any]) -> bool:
    """Whether these are pictures of bytes. By type and shape alone: what is public, and not by what is in them."""
    return array.dtype == np.uint8 and array.ndim >= 3


def notes_of(*arrays: NDArray[Any], split_off: bool = False, owned: bool = False) -> Names:
    """What is done to these features, and to the examples, on their way into a data set."""
    scaled = f"Pictures of bytes were divided by {BYTE}."
    whose = "each worker's" if owned else "the"
    split = f"A fifth of {whose} examples was split off as test examples."
    return (scaled,) * any(is_bytes(array) for array in arrays) + (split,) * split_off


def labels_of(where: object, key: str, array: NDArray[Any]) -> Tensor:
    """Labels as int64. DataError if they are not whole numbers of 0 or more."""
    if array.dtype.kind not in "buif":
        raise DataError(f"{where}: {key} has dtype {array.dtype}; labels must be whole numbers 0, 1, 2, ...")
    if array.ndim != 1:
        raise DataError(f"{where}: {key} has shape {array.shape}; labels must have shape (N,)")
    # Also false for NaN, and keeps what follows clear of numbers that int64 cannot hold.
    sound = (array >= 0) & (array < 2**31)
    if array.dtype.kind == "f":
        sound &= array == np.floor(array)
    if not bool(sound.all()):
        first = array[~sound][0]
        fraction = array.dtype.kind == "f" and bool(np.isfinite(first) and first != np.floor(first))
        why = f"; {NO_REGRESSION}" * (fraction and not key.startswith("worker"))
        raise DataError(f"{where}: {key} has the label {first}; labels must be whole numbers 0, 1, 2, ...{why}")
    return torch.from_numpy(array.astype(np.int64))


def classes_of(where: object, y: Tensor) -> int:
    """How many classes there are; refuses gaps, which would become outputs that no example ever trains."""
    present = torch.unique(y)
    missing = torch.nonzero(present != torch.arange(len(present)))
    if len(missing):
        why = f"; {NO_REGRESSION}" * (len(present) > MOST_CLASSES)
        raise DataError(
            f"{where}: no example has the label {int(missing[0])}, though there are larger ones; "
            f"number the {len(present)} classes 0..{len(present) - 1}{why}"
        )
    return len(present)


def is_frame(value: Any) -> bool:
    """Whether it is a table with named columns, such as a pandas frame."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy") and hasattr(value, "__getitem__")


def array_of(where: object, key: str, value: Any, columns: Names = ()) -> NDArray[Any]:
    """An array, a tensor, a list of numbers, or a frame or one of its columns, as a numpy array.

    columns: those of a frame that are taken, in this order; unless given all, as they stand.
    """
    if isinstance(value, Tensor):
        return _of_tensor(where, key, value)
    if is_frame(value):
        return _of_frame(where, key, value, columns)
    if np.ma.is_masked(value):
        raise DataError(f"{where}: {key} has masked values; fill in or drop missing values first")
    try:
        array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
        return _of_objects(array) if array.dtype.kind == "O" else array
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"{where}: {key} cannot be made an array ({plain(error)}); its rows must be equally long, of numbers that "
            "float64 can hold"
        ) from None


def _of_tensor(where: object, key: str, value: Tensor) -> NDArray[Any]:
    """The numbers of a tensor; those of bfloat16, which numpy does not have, as float32."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise DataError(f"{where}: {key} is no plain tensor of numbers; give a dense one")
    found = value.detach().cpu()
    return (found.float() if found.dtype == torch.bfloat16 else found).numpy()


def same_scale(wheres: Sequence[object], arrays: Sequence[NDArray[Any]]) -> None:
    """DataError where some arrays are pictures of bytes, which are divided, and others are not."""
    for where, array in zip(wheres, arrays, strict=False):
        if is_bytes(array) != is_bytes(arrays[0]):
            raise DataError(
                f"{where}: x is of {array.dtype}, and that of {wheres[0]} of {arrays[0].dtype}; only bytes are divided "
                f"by {BYTE}, so give all as one type"
            )


def _of_objects(array: NDArray[Any]) -> NDArray[Any]:
    """Texts, or Python's numbers, as numpy's. Other objects stay what they are, and are refused as such."""
    entries = array.ravel().tolist()
    if entries and all(isinstance(entry, str) for entry in entries):
        return array.astype(str)
    if all(isinstance(entry, bool | int | float) for entry in entries):
        return array.astype(np.float64)
    return array


def _of_frame(where: object, key: str, frame: Any, wanted: Names = ()) -> NDArray[Any]:
    """The features of a frame. DataError that names the column that is not numbers, has a hole, or is not there."""
    columns, names = [], list(frame.columns)
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise DataError(f"{where}: column {shown(twice)} of {key} is there twice; name every column once")
    known = {str(name): name for name in names}
    if missing := [name for name in wanted if name not in known]:
        raise DataError(f"{where}: {key} has no column {shown(missing[0])}, which the model was trained on; add it")
    names = [known[name] for name in wanted] or names
    for name in names:
        column = array_of(where, f"column {shown(name)} of {key}", frame[name])
        if column.dtype.kind not in "buif":
            odd = [entry for entry in column.tolist() if not isinstance(entry, int | float)] or [column.dtype]
            raise DataError(
                f"{where}: column {shown(name)} of {key} holds {shown(odd[0])}, which is no number; drop it or "
                "write it as numbers, one column of 0 and 1 for each value"
            )
        if column.dtype.kind == "f" and not bool((sound := np.isfinite(column)).all()):
            raise DataError(
                f"{where}: column {shown(name)} of {key} has {column[~sound][0]} in row {int(np.argmin(sound))}; fill "
                "in or drop missing values first"
            )
        columns.append(column.astype(np.float64))
    if not columns:
        raise DataError(f"{where}: {key} has no columns of features")
    return np.stack(columns, axis=1)


def numbered(texts: list[str]) -> tuple[Tensor, Names]:
    """The place of each text among the different ones, sorted: (N,) int64, and those."""
    names = sorted(set(texts), key=natural)
    place = {name: number for number, name in enumerate(names)}
    return torch.tensor([place[text] for text in texts], dtype=torch.int64), tuple(names)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key that sorts texts as people do: numbers in them by size, so that h2 comes before h10."""
    parts = enumerate(re.split("([0-9]+)", text))  # every second part is a number
    return [(odd == 0, len(part.lstrip("0")) if odd else 0, part) for place, part in parts for odd in [place % 2]]


def split(where: object, y: Tensor, owner: Tensor | None, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The numbers of the training examples and of the test examples, ascending.

    Of each worker's n examples floor(n / 5) become test examples, as many of each class as its share of them is, up to
    one: the examples stand in a line by class, shuffled within it, and from a random start every fifth is taken.
    """
    held = torch.zeros_like(y) if owner is None else owner
    test, sizes = torch.zeros(len(y), dtype=torch.bool), held.unique(return_counts=True)[1]
    for mine in torch.argsort(held, stable=True).split(sizes.tolist()):
        mine = mine[torch.randperm(len(mine), generator=rng)]
        line = mine[torch.argsort(y[mine], stable=True)]
        start, some = int(torch.randint(ONE_TEST_IN, (), generator=rng)), len(line) // ONE_TEST_IN
        test[line[start::ONE_TEST_IN][:some]] = True
    if not bool(test.any()):
        raise DataError(
            f"{where}: no worker has {ONE_TEST_IN} examples, of which one could be split off as a test example; bring "
            "test examples of your own, or more examples"
        )
    return torch.nonzero(~test).flatten(), torch.nonzero(test).flatten()
