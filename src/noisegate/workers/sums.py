"""Which way to compute the workers' sums, and the noise that makes them private."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from noisegate import checks
from noisegate.entropy import Randomness
from noisegate.errors import SpecError
from noisegate.room import Room
from noisegate.streams import stream
from noisegate.vectors import FlatModel, counting, zeros
from noisegate.views import Worker
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.direct import Direct, Sums, per_example_gradients
from noisegate.workers.private import Private

WAYS = ("auto", "closed-form", "direct")
ROUNDING = 2**-20
"""What one more contribution can add to the error of a sum in float32, relative to its length; measured: a third."""

PROBE_TOLERANCE = 1e-3
"""A closed form that is wrong for a model is wrong by far more than this; rounding stays far below."""


def choose_sums(model: FlatModel, params: Tensor, x: Tensor, y: Tensor, way: str = "auto", chunk: int = 128) -> Sums:
    """The closed form where the model has one, the direct way otherwise.

    x, y: a few real examples. The closed form is tried on them against the direct way, so that a module that uses its
    layers in an unforeseen way, or mixes examples, falls back to the direct way, which treats every example alone.
    """
    checks.one_of(WAYS, sums=way)
    try:
        per_example_gradients(model, params, x[:1], y[:1])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"model: its loss cannot be differentiated for one example of shape {tuple(x.shape[1:])} "
            f"({str(error).splitlines()[0]}); it must accept a batch of one and work under torch.func"
        ) from None

    if way == "direct":
        return Direct(model, chunk)
    closed = ClosedForm.of(model, chunk)
    # One example alone cannot show mixing. Torch's convolutions on both sides: where a model takes a maximum, rounding
    # another way may choose another one, and look like an error.
    if closed is not None and len(x) > 1 and _agrees(replace(closed, own_convolutions=False), params, x, y):
        return closed
    if way == "closed-form":
        raise SpecError(
            "sums = 'closed-form': this model has none (its parameters must belong to Linear and Conv2d layers that "
            "are each called once, and examples may not mix); use 'auto' or 'direct'"
        )
    return Direct(model, chunk)


def _agrees(closed: ClosedForm, params: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether the closed form gives what the direct way gives, on examples and weights shaken a little.

    Shaken, since equal examples do not show that they are mixed, and gradients of zero do not show anything.
    """
    rng = stream(0, "probe")
    x = x + torch.randn(x.shape, generator=rng).to(x) if x.is_floating_point() else x
    params = params + 0.01 * torch.randn(params.shape, generator=rng).to(params)
    if closed.trace(params, x, y) is None:
        return False
    apart = torch.arange(len(x), device=x.device)
    for owner in (apart, torch.zeros_like(apart)):  # every example its own worker, and all of one worker
        nothing = params.new_zeros(int(owner.max()) + 1, len(params))
        fast = closed(Plain(), params, x, y, owner, nothing)
        slow = closed.direct(Plain(), params, x, y, owner, nothing)
        for layer in closed.layers:
            off, size = (fast - slow)[:, layer.weight].norm(), slow[:, layer.weight].norm()
            if not bool((size > 0) & (off <= PROBE_TOLERANCE * size)):
                return False
        if not bool((fast - slow).norm() <= PROBE_TOLERANCE * slow.norm()):
            return False
    return True


def rounded_sensitivity(worker: Worker, batch: int) -> float:
    """How far one example can move a sum of about `batch` contributions, rounding in float32 included.

    The contributions' margin covers a sum of some 64; a larger one rounds more, which a hair more noise pays for.
    """
    return worker.sensitivity * (1 + batch * ROUNDING)


def fill_with_noise(uploads: Tensor, std: float, rng: Randomness) -> None:
    """Every number of (n, d) becomes N(0, std^2), in place: one draw for all workers and coordinates.

    Research noise: what leaves a machine needs that of `Source.add_noise`.
    """
    if std and isinstance(rng, torch.Generator):
        uploads.normal_(0.0, std, generator=rng)
    elif std:
        raise TypeError("secret noise is added to the sums, not the sums to it")
    else:
        uploads.zero_()


@dataclass(frozen=True)
class Plain(Private):
    """Adds gradients up as they are. Private to nobody: for the server's own examples, and for probes."""

    momentum: float = 0.0

    @property
    def sensitivity(self) -> float:
        """Without bound."""
        return float("inf")

    def weights(self, norms: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(norms)


@dataclass(frozen=True)
class Unit(Plain):
    """Scales each gradient to length 1, with no margin for rounding. As private as `Plain`."""

    def weights(self, norms: Tensor) -> Tensor:
        """1 / length."""
        return norms.reciprocal()


def mean_gradient(
    sums: Sums, params: Tensor, x: Tensor, y: Tensor, normalized: bool, room: Room | None = None
) -> Tensor:
    """(d,): the mean of the examples' gradients, each scaled to length 1 first if `normalized`.

    An example without a finite gradient counts as zeros, for it says nothing.
    """
    worker, mean = Unit() if normalized else Plain(), params.new_zeros(1, len(params))
    together = zeros(len(x), x.device)
    sums.add(worker, params, x, y, together, mean, mean, 1 / len(x), len(x), room)  # without momentum none is read
    return mean[0]


@dataclass(frozen=True)
class Alone(Plain):
    """What `worker` makes of a gradient if what it sent last is noise of this length, at right angles to it."""

    worker: Worker = field(default_factory=Unit)
    last: float = 0.0

    def weights(self, norms: Tensor) -> Tensor:
        """Its share of the mix, scaled as the mix is."""
        share = 1 - self.worker.momentum
        return share * self.worker.weights(
            torch.hypot(share * norms, torch.full_like(norms, self.worker.momentum * self.last))
        )


def contributions_of(
    sums: Sums, params: Tensor, x: Tensor, y: Tensor, worker: Worker, noise_std: float, room: Room | None = None
) -> Tensor:
    """(A, d) what each example would on average add to the sum of a worker that held it.

    The worker mixes gradients with its last upload, which is noise of length s sqrt(d) but for little: its direction
    says nothing, but the mix is longer for it.
    """
    each = params.new_zeros(len(x), len(params))
    alone = Alone(worker=worker, last=noise_std * math.sqrt(len(params)))
    sums.add(alone, params, x, y, counting(len(x), x.device), each, each, 1.0, 1, room)
    return each
