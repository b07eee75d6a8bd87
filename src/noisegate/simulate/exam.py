"""The last examination of a model: what it tells of each class, and how far a trigger works."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import metrics
from noisegate.errors import SpecError
from noisegate.roles import Triggered
from noisegate.simulate.train import EVALUATION_BLOCK
from noisegate.vectors import FlatModel


@dataclass(frozen=True)
class Exam:
    """What a model says of test examples: (N, classes) scores, and the labels (N,), on the CPU."""

    scores: Tensor
    y: Tensor

    @property
    def called(self) -> Tensor:
        """(N,) the class with the highest score for each example."""
        return self.scores.argmax(1)

    @property
    def confusion(self) -> Tensor:
        """(classes, classes): how many examples of the class of a row are called by the class of a column."""
        return metrics.confusion_of(self.called, self.y, self.scores.shape[1])


@torch.no_grad()
def examine(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Exam:
    """What the model says of these examples."""
    scores = torch.cat([model.scores(params, block) for block in x.split(EVALUATION_BLOCK)])
    return Exam(scores.cpu(), y.cpu())


def recall(model: FlatModel, params: Tensor, x: Tensor, y: Tensor, classes: int) -> list[float | None]:
    """Share of the examples of each class that are called by it; None for a class of which there are none."""
    found = examine(model, params, x, y)
    return metrics.recall_of(metrics.confusion_of(found.called, found.y, classes))


def attack_success(model: FlatModel, params: Tensor, x: Tensor, y: Tensor, trigger: Triggered) -> float | None:
    """Share of the examples of other classes that are called the target once they carry the trigger; None without any.

    Examples of the target are left out: that they are called so is no success of the attack.
    """
    others = y != trigger.target
    if not bool(others.any()):
        return None
    called = examine(model, params, marked(trigger, x[others]), y[others]).called == trigger.target
    return float(called.double().mean())


def marked(trigger: Triggered, x: Tensor) -> Tensor:
    """The examples with the trigger. SpecError if the trigger, which may be anyone's, gives no such examples back."""
    found = trigger.trigger(x.clone())
    if not isinstance(found, Tensor) or found.shape != x.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(f"attack: its trigger must give examples of shape {tuple(x.shape)} back, not {shape}")
    return found.to(x)
