"""Data sets of torch: anything that gives (x, y) for each number below its length."""

from typing import Any

import torch
from torch import Tensor

from noisegate.checks import shown, told
from noisegate.data.arrays import array_of
from noisegate.errors import DataError


def examples_of(where: str, part: "torch.utils.data.Dataset[Any]") -> tuple[Tensor, list[Any]]:
    """The examples (N, ...) and the labels, whole numbers or texts. DataError if they are no such."""
    try:
        pairs = [(one, label) for one, label in (part[number] for number in range(len(part)))]  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  # anyone's code may raise anything
        raise DataError(f"{where}: does not give (x, y) for each example ({told(error)})") from None
    if not pairs:
        raise DataError(f"{where}: holds no examples; leave it out, or give some")
    try:
        x = torch.stack([torch.as_tensor(one) for one, _ in pairs])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: its examples are no tensors of one shape ({told(error)}); transform them, such as with ToTensor"
        ) from None
    return x, [_label(where, label) for _, label in pairs]


def _label(where: str, label: Any) -> Any:
    """A label as Python's number or text. A broken number stays one, and is refused later, not rounded."""
    found = array_of(where, "a label", label)
    value = found.reshape(()).item() if found.size == 1 else None
    if not isinstance(value, bool | int | float | str):
        raise DataError(f"{where}: has the label {shown(label)}; labels must be whole numbers 0, 1, 2, ... or texts")
    return value
