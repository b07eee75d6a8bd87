"""The last examination of a model: what it recalls of each class, and how far a trigger works."""

import torch
from torch import Tensor

from noisegate.errors import SpecError
from noisegate.roles import Triggered
from noisegate.simulate.train import EVALUATION_BLOCK
from noisegate.vectors import FlatModel


@torch.no_grad()
def answers(model: FlatModel, params: Tensor, x: Tensor) -> Tensor:
    """(n,) the class with the highest output for each example."""
    return torch.cat([model.scores(params, block).argmax(1) for block in x.split(EVALUATION_BLOCK)])


def recall(model: FlatModel, params: Tensor, x: Tensor, y: Tensor, classes: int) -> list[float | None]:
    """Share of the examples of each class that are called by it; None for a class of which there are none."""
    right = answers(model, params, x) == y
    found = torch.bincount(y[right], minlength=classes).tolist()
    counts = torch.bincount(y, minlength=classes).tolist()
    return [hits / count if count else None for hits, count in zip(found, counts, strict=True)]


def attack_success(model: FlatModel, params: Tensor, x: Tensor, y: Tensor, trigger: Triggered) -> float | None:
    """Share of the examples of other classes that are called the target once they carry the trigger; None without any.

    Examples of the target are left out: that they are called so is no success of the attack.
    """
    others = x[y != trigger.target]
    if not len(others):
        return None
    called = answers(model, params, marked(trigger, others)) == trigger.target
    return float(called.double().mean())


def marked(trigger: Triggered, x: Tensor) -> Tensor:
    """The examples with the trigger. SpecError if the trigger, which may be anyone's, gives no such examples back."""
    found = trigger.trigger(x.clone())
    if not isinstance(found, Tensor) or found.shape != x.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(f"attack: its trigger must give examples of shape {tuple(x.shape)} back, not {shape}")
    return found.to(x)
