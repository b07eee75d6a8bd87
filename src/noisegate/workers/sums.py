"""Which way to compute the workers' sums, and the noise that makes them private."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisegate import checks
from noisegate.capacity import Capacity
from noisegate.entropy import Randomness
from noisegate.errors import SpecError
from noisegate.examples import Examples
from noisegate.roles import Worker
from noisegate.streams import stream
from noisegate.vectors import FlatModel, check_outputs, counting, scores_of
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.company import Company, closed_form_if_sound
from noisegate.workers.direct import Direct, Sums, per_example_gradients
from noisegate.workers.not_private import NotPrivate
from noisegate.workers.owners import FAST, owners, why_untraceable
from noisegate.workers.sight import FAILURES, SUSPECT, differ, first_line

WAYS = ("auto", "closed-form", "direct")
ROUNDING = 2**-20
"""What one more contribution can add to the error of a sum in float32, relative to its length; measured: a third."""


TRIED_WEIGHTS = 16
"""How often the output of a model that should be a logit is looked at, each time at other weights."""


def choose_sums(
    model: FlatModel,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    way: str = "auto",
    chunk: int = 128,
    company: Company | None = None,
) -> Sums:
    """The closed form where the model has one, the direct way otherwise. SpecError if examples mix (`company.py`).

    PrivacyError if the model writes what it is called with into a buffer or a frozen parameter.

    x, y: real examples, of which some are drawn at random. A module that uses its layers in an unforeseen way goes the
    direct way.
    """
    checks.one_of(WAYS, sums=way)
    _check_one(model, params, x, y)
    closed = None if way == "direct" else ClosedForm.of(model, chunk)
    closed = closed_form_if_sound(model, params, x, y, company or Company(), closed)
    model.check_kept()
    if closed is None and way == "closed-form":
        raise SpecError(
            f"sums = 'closed-form': this model has none, since {why_not(model)}. Layers with one are {FAST}, each "
            "called once; use 'auto' or 'direct'"
        )
    return closed or Direct(model, chunk, why_not(model) if way == "auto" else "")


def why_not(model: FlatModel) -> str:
    """Why a model goes the direct way."""
    return owners(model)[1] or why_untraceable(model.module)


def _check_one(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> None:
    """SpecError if a batch of one has no output of its own, no gradient, or another loss the next time."""
    try:
        with torch.no_grad():
            before = x[:1].repeat(2, *(1 for _ in x.shape[1:]))
            pair = before.clone()
            one, two = model.outputs(params, pair[:1].clone()), model.outputs(params, pair)
        if not torch.equal(pair, before):
            raise SpecError("model: writes to its inputs, which are the data; look for an operation in place")
        if isinstance(one, Tensor) and isinstance(two, Tensor) and (len(two) != 2 or one.shape != (1, *two.shape[1:])):
            raise SpecError(
                f"model: gives outputs of shape {tuple(one.shape)} for one example and {tuple(two.shape)} for two; it "
                "must give one row per example, also in a batch of one (look for squeeze() without a dimension)"
            )
        check_outputs(two, 2, model.classes)
        classes, highest = scores_of(two).shape[1], int(y.max())
        if highest >= classes:
            raise SpecError(f"model: tells {classes} classes apart, but there is an example with the label {highest}")
        if two.numel() == 2:
            _check_logit(model, params, pair)
        with torch.no_grad():
            # Of one example alone: there the shape tells a loss of numbers from one of classes.
            model.losses(params, x[:1].clone(), y[:1].clone())
            once, again = (model.losses(params, x[:2].clone(), y[:2].clone()) for _ in range(2))
        if differ(once, again, SUSPECT):
            raise SpecError(
                "model or loss: gives other losses for the same examples when it is called again, so it keeps state or "
                "draws random numbers, and an example's gradient is not its own; remove that"
            )
        per_example_gradients(model, params, x[:1], y[:1])
    except FAILURES as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"model: its loss cannot be differentiated for one example of shape {tuple(x.shape[1:])} "
            f"({first_line(error)}); it must accept a batch of one and work under torch.func"
        ) from None


def _check_logit(model: FlatModel, params: Tensor, x: Tensor) -> None:
    """SpecError if what should be a logit is a probability, which is above 0 whatever the answer is."""
    rng = stream(0, "logit")
    for _ in range(TRIED_WEIGHTS):  # a logit leaves the range of a probability at some weights
        shaken = params + torch.randn(params.shape, generator=rng).to(params)
        with torch.no_grad():
            said = model.outputs(shaken, x.clone())
        if not bool(((said >= 0) & (said <= 1)).all()):
            return
    raise SpecError(
        "model: its one output is always from 0 to 1, as a probability is, but must be a logit, whose sign is the "
        "answer; leave the sigmoid out (the default loss has it, as binary_cross_entropy_with_logits has)"
    )


def rounded_sensitivity(worker: Worker, batch: float) -> float:
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
class Unit(NotPrivate):
    """Scales each gradient to length 1, with no margin for rounding. As private as `NotPrivate`."""

    def weights(self, norms: Tensor) -> Tensor:
        """1 / length."""
        return norms.reciprocal()


def mean_gradient(
    sums: Sums, params: Tensor, x: Tensor, y: Tensor, normalized: bool, capacity: Capacity | None = None
) -> Tensor:
    """(d,): the mean of the examples' gradients, each scaled to length 1 first if `normalized`.

    An example without a finite gradient counts as zeros, for it says nothing.
    """
    worker, mean = Unit() if normalized else NotPrivate(), params.new_zeros(1, len(params))
    sums.add(worker, params, Examples.of_one(x, y, capacity), mean, mean, 1 / len(x))  # no momentum: `last` is not read
    return mean[0]


@dataclass(frozen=True)
class MeanContribution(NotPrivate):
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
    sums: Sums, params: Tensor, x: Tensor, y: Tensor, worker: Worker, noise_std: float, capacity: Capacity | None = None
) -> Tensor:
    """(A, d) what each example would on average add to the sum of a worker that held it.

    The worker mixes gradients with its last upload, which is noise of length s sqrt(d) but for little: its direction
    says nothing, but the mix is longer for it.
    """
    each = params.new_zeros(len(x), len(params))
    alone = MeanContribution(worker=worker, last=noise_std * math.sqrt(len(params)))
    sums.add(alone, params, Examples(x, y, counting(len(x), x.device), 1, capacity), each, each)
    return each
