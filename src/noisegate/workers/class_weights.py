"""Whether a loss weighs classes, and whether a worker lets such weights through.

A loss weighs classes if what it says of one class is a fixed multiple of what it says of another in the same place: if
outputs that are swapped between two classes have the swapped gradient, but for one factor. A worker that scales every
contribution to one length takes this factor out again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from noisegate.roles import Worker
from noisegate.streams import stream
from noisegate.vectors import FlatModel, cross_entropy, scores_of
from noisegate.workers.sight import FAILURES

TRIED, MOST_CLASSES = 4, 100
"""Examples and weights of the model that are tried, and classes that are looked at."""

CLOSE = 1e-3
"""What two factors may differ by relative to one another and still be one: float32 carries seven digits of each."""

LENGTHS = 1e-3, 1.0, 1e3
"""Lengths of a gradient for which a worker that scales to one length gives the same."""

WORKS = "a worker that clips, such as 'clipped', whose threshold the gradients stay below"
BALANCED_WORKS = f"sampling = 'balanced', which draws every class equally often, or {WORKS}"


def ignored_weights(model: FlatModel, worker: Worker, x: Tensor, works: str = BALANCED_WORKS) -> str | None:
    """The line that says that a loss weighs classes and the worker takes it out again; None where it is not so.

    x: some examples, to see what the model's outputs are like. works: what to do instead.
    """
    if model.loss is cross_entropy or not scales_to_one_length(worker):
        return None
    factors = class_factors(model, x[:TRIED])
    if factors is None or max(factors) <= (1 + CLOSE) * min(factors):
        return None
    return (
        f"loss: weighs some classes {max(factors) / min(factors):.3g} times as much as others, and that does nothing: "
        f"{type(worker).__name__} brings the contributions of all examples to one length; what works is {works}"
    )


def scales_to_one_length(worker: Worker) -> bool:
    """Whether what an example contributes is equally long for every gradient that is not zero."""
    lengths = torch.tensor(LENGTHS)
    found = worker.weights(lengths) * lengths
    return bool((found - found[0]).abs().max() <= CLOSE * found[0])


def class_factors(model: FlatModel, x: Tensor) -> list[float] | None:
    """How much each class counts in the loss, where class 0 counts 1; None if classes differ by more than a factor."""
    outputs = _outputs(model, x)
    classes = min(scores_of(outputs).shape[1], MOST_CLASSES)
    if (first := _gradients(model, outputs, 0)) is None:
        return None
    factors = [1.0]
    for label in range(1, classes):
        there = _gradients(model, _swapped(outputs, label), label)
        if there is None:
            return None
        back = _swapped(there, label)
        factor = float((back * first).sum() / first.square().sum())
        if not factor > 0 or float((back - factor * first).norm()) > CLOSE * float(back.norm()):
            return None
        factors.append(factor)
    return factors


def _outputs(model: FlatModel, x: Tensor) -> Tensor:
    """What the model says of these examples, at its first weights and at others near them."""
    rng, params = stream(0, "class-weights"), model.initial()
    found = []
    with torch.no_grad():
        for spread in torch.linspace(0, 0.3, TRIED).tolist():
            shaken = params + spread * torch.randn(params.shape, generator=rng).to(params)
            found.append(model.outputs(shaken, x))
    return torch.cat(found)


def _gradients(model: FlatModel, outputs: Tensor, label: int) -> Tensor | None:
    """The gradient of the loss in the outputs, if all these examples are of one class; None if there is none."""
    at = outputs.detach().clone().requires_grad_()
    try:
        losses = model.own_losses(at, torch.full((len(at),), label, device=at.device))
        (found,) = torch.autograd.grad(losses.sum(), at)
    except FAILURES:  # a loss that does not take them is told of elsewhere
        return None
    return found if bool(found.isfinite().all()) and bool(found.any()) else None


def _swapped(outputs: Tensor, label: int) -> Tensor:
    """Classes 0 and `label` change places; where one logit stands for two, it changes its sign."""
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return -outputs
    order: Sequence[int] = [
        label if place == 0 else 0 if place == label else place for place in range(outputs.shape[1])
    ]
    return outputs[:, order]
