"""Whether what an aggregator answers is an answer: it may be anyone's, and a wrong shape would be a wrong model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from noisegate.checks import shown
from noisegate.errors import SpecError
from noisegate.views import Reason, ServerView, Verdict

WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""The types of reasons."""


def check_verdict(aggregator: Any, verdict: Any, view: ServerView) -> None:
    """SpecError unless the verdict has the shapes and types that `Verdict` states. Asks a CUDA device for nothing."""
    who = shown(aggregator)
    if not isinstance(verdict, Verdict):
        raise SpecError(f"aggregator: must answer with a Verdict, but {who} gave {form_of(verdict)}")
    n, d = view.uploads.shape
    floats = (torch.float32, torch.float64)
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "update": ((d,), (view.uploads.dtype,)),
        "kept": ((n,), (torch.bool,)),
        "reason": ((n,), WHOLE),
        "score": ((n,), floats),
        "weights": ((n,), floats),
    }
    for name, (shape, kinds) in wanted.items():
        _check(who, name, getattr(verdict, name), shape, kinds, view.uploads.device)
    if verdict.fell_back is not None:
        kinds = (torch.bool, *WHOLE)
        _check(who, "fell_back", verdict.fell_back, (), kinds, view.uploads.device, ", or None")
    if not isinstance(verdict.state, Mapping) or not all(isinstance(each, Tensor) for each in verdict.state.values()):
        raise SpecError(f"aggregator: its state must hold tensors only, so that it can be saved; {who} keeps more")
    if not view.uploads.is_cuda and not torch.equal(verdict.kept, verdict.reason == Reason.KEPT.value):
        raise SpecError(
            f"aggregator: kept and reason of its verdict differ; {who} must give the reason KEPT exactly where kept "
            "is True"
        )


def _check(
    who: str,
    name: str,
    value: Any,
    shape: tuple[int, ...],
    kinds: tuple[torch.dtype, ...],
    device: torch.device,
    otherwise: str = "",
) -> None:
    fits = isinstance(value, Tensor) and value.shape == shape and value.dtype in kinds and value.device == device
    if not fits:
        raise SpecError(
            f"aggregator: the {name} of its verdict must be a tensor of shape {shape}, {_named(kinds[0])} on "
            f"{device}{otherwise}; {who} gave {form_of(value)}"
        )


def form_of(value: Any) -> str:
    """What a value is, in a message: of a tensor its shape, type and device."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {tuple(value.shape)}, {_named(value.dtype)} on {value.device}"


def _named(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
