"""Computes the features of many examples, block by block, and keeps them in a file."""

import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from noisegate.errors import SpecError
from noisegate.features.checking import apply, check_again, check_features
from noisegate.features.keeping import open_kept, writing
from noisegate.features.naming import Features
from noisegate.streams import stream

Tell = Callable[[int, int], None]

TELL: ContextVar[Tell | None] = ContextVar("TELL", default=None)
"""Called with how many examples have features, and how many will have them."""

BLOCK = {"cpu": 64, "cuda": 1024}
"""Examples that are computed at a time, unless each is large."""

BLOCK_FLOATS = {"cpu": 2**20, "cuda": 2**26}
"""Most numbers in the features of a block. What is computed on the way is some ten times as large."""


@dataclass(frozen=True)
class Kept:
    """Where features are kept. key: of examples and features, such that others have another one."""

    folder: Path
    key: str


def embed(features: Features, x: Tensor, device: torch.device | str = "cpu", kept: Kept | None = None) -> Tensor:
    """The features of all examples, on the CPU. SpecError if they are not of each example alone.

    device: where they are computed. kept: the file that they are read from, or written to; then they are a map of it
    into memory, whose pages the system can take back.
    """
    path = None if kept is None else kept.folder / f"{kept.key}.safetensors"
    if path is not None and (found := open_kept(path, len(x))) is not None:
        return found
    device = torch.device(device)
    if isinstance(features, torch.nn.Module):
        features = features.to(device)
    shape = check_features(features, x[: 4 * BLOCK["cuda"]].to(device), stream(0, "features"))
    work = getattr(features, "work", None)  # what is made on the way, where that is more than what is left
    floats = max(1, torch.Size(shape).numel(), work(tuple(x.shape[1:])) if work else 0)
    block = max(1, min(BLOCK[device.type], BLOCK_FLOATS[device.type] // floats))
    if path is None:
        into = torch.empty(len(x), *shape)
        _fill(into, features, x, device, block)
        return into
    with writing(path, (len(x), *shape)) as part:
        _fill(part, features, x, device, block)
    written = open_kept(path, len(x))
    if written is None:
        raise SpecError(f"features: {path} is gone again; give another folder in $NOISEGATE_CACHE")
    return written


def _fill(into: Tensor, features: Features, x: Tensor, device: torch.device, block: int) -> None:
    """Compute all features, in blocks. One example of every block is looked at alone."""
    rng = stream(0, "features looked at again")
    for first in range(0, len(x), block):
        here = x[first : first + block].to(device)
        found = apply(features, here)
        check_again(features, here, found, int(torch.randint(0, len(here), (), generator=rng)))
        into[first : first + len(here)] = found.cpu()
        if tell := TELL.get():
            tell(first + len(here), len(x))


def cache_folder() -> Path | None:
    """Where features are kept: $NOISEGATE_CACHE, or features/ in the cache folder; None where that says `off`."""
    given = os.environ.get("NOISEGATE_CACHE", "")
    if given == "off":
        return None
    with suppress(RuntimeError):  # nobody knows where home is
        return Path(given).expanduser() if given else Path("~/.cache/noisegate/features").expanduser()
    return None
