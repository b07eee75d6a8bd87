"""Whether a model and its loss treat every example by itself, whatever company it is in.

One example moves a worker's sum by at most its bound only if nobody else's gradient depends on it. So before a run
examples drawn at random are looked at twice: in the company of a whole forward pass, and alone. What differs is
refused, whichever way the sums are computed: on the direct way every example is alone, so the bound would hold, but
the training would not be that of the loss that was written. The closed form is tried on the same examples.

Mixing may show only beside an example that is unlike all others, and such a one is rarely drawn. So some of the company
is also made extreme.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisegate.capacity import CACHED
from noisegate.errors import SpecError
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.sight import (
    BROKEN,
    CHOSEN,
    FAILURES,
    SHAKE,
    SUSPECT,
    Draw,
    Sight,
    differ,
    first_line,
    look,
    look_again,
)

LABELS = "as they are", "shuffled", "random"

EXTREMES = 1e1, 1e2, 1e3, 1e4, 1e5, 1e6
"""What the inputs of extreme company are multiplied by, with either sign."""


@dataclass(frozen=True)
class Company:
    """How many examples share a forward pass: `batch` of every worker, of all `workers` that fit `scratch` (bytes)."""

    batch: int = 16
    workers: int = 1
    scratch: int = 2**30
    seed: int = 0

    def sizes(self, closed: ClosedForm | None, x: Tensor, y: Tensor) -> list[int]:
        """How many examples to look at: of one worker, and what a forward pass holds when batches are large."""
        whole = self.batch
        if closed is not None:  # else every worker's examples are by themselves
            floats = self.scratch // 4 if x.is_cuda else min(self.scratch // 4, CACHED)
            expected = self.batch * self.workers
            fitting = floats // closed.floats(x[:1], y[:1])
            whole = max(whole, min(fitting, expected + 4 * math.isqrt(expected)))
        return sorted({max(2, size) for size in (min(self.batch, CHOSEN), self.batch, whole)})


def closed_form_if_sound(
    model: FlatModel, params: Tensor, x: Tensor, y: Tensor, company: Company, closed: ClosedForm | None
) -> ClosedForm | None:
    """`closed` if it gives every example's own gradient, else None. SpecError if examples mix or have no loss.

    x, y: real examples to draw from.
    """
    rng, alone = stream(company.seed, "company"), _most_alone(closed)
    if closed is not None and closed.trace(params, x[:2], y[:2]) is None:
        closed = None
    sizes = company.sizes(closed, x, y)
    _check_as_it_is(model, params, draw(x, y, sizes[0], alone, rng), rng)
    for size in sizes:
        for labels in LABELS:
            drawn = _relabeled(draw(x, y, size, alone, rng), labels, int(y.max()) + 1, rng)
            at = params + SHAKE * torch.randn(params.shape, generator=rng).to(params)
            try:
                shaken = drawn if labels == LABELS[0] else replace(drawn, x=_shaken(drawn.x, rng))
                sight = _seen(model, closed, at, shaken, rng)
            except FAILURES:  # which inputs a module refuses is its own affair: real ones must do
                shaken = drawn
                sight = _seen(model, closed, at, shaken, rng)
            if sight.mixes:
                raise SpecError(_refusal(model, at, shaken, sight))
            closed = closed if sight.fits else None
    rng = stream(company.seed, "extreme company")
    for size in sizes:
        for factor in EXTREMES:
            drawn = beside_extremes(draw(x, y, size, alone, rng), factor, rng)
            at = params + SHAKE * torch.randn(params.shape, generator=rng).to(params)
            extreme = seen_beside_extremes(model, at, drawn, rng)
            if extreme is not None and extreme.mixes:
                raise SpecError(_refusal(model, at, drawn, extreme))
    return closed


def beside_extremes(drawn: Draw, factor: float, rng: torch.Generator) -> Draw:
    """With a quarter of the examples, at least one, made extreme, and as many chosen as before, of the others only.

    Inputs of a type of whole numbers stay.
    """
    size, device = len(drawn.y), drawn.y.device
    few = max(1, size // 4)
    order = torch.randperm(size, generator=rng, device=rng.device).to(device)
    extreme, chosen = order[:few], order[few:][: len(drawn.chosen)].sort().values
    x = drawn.x.clone()
    if x.is_floating_point():
        either = 1 - 2 * torch.randint(0, 2, (few,), generator=rng, device=rng.device).to(x)
        x[extreme] *= factor * either.view(-1, *(1 for _ in x.shape[1:]))
    return Draw(x, drawn.y, chosen, drawn.signs[: len(chosen)])


def seen_beside_extremes(model: FlatModel, params: Tensor, drawn: Draw, rng: torch.Generator) -> Sight | None:
    """What a draw with extremes shows. None if model or loss fail, for they need not take such inputs."""
    try:
        if drawn.x.is_cuda:  # there, an index out of range would end all work on the device: try it elsewhere first
            with torch.no_grad():
                FlatModel(model.module, model.loss).outputs(params.cpu(), drawn.x.cpu())
        return _seen(model, None, params, drawn, rng)
    except FAILURES:
        return None


def _check_as_it_is(model: FlatModel, params: Tensor, drawn: Draw, rng: torch.Generator) -> None:
    """Real examples at the real weights have a loss, and it is their own."""
    try:
        sight = _seen(model, None, params, drawn, rng)
    except FAILURES as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"model or loss: fails in a batch of {len(drawn.x)} examples ({first_line(error)}); it must take any number"
        ) from None
    if sight.mixes:
        raise SpecError(_refusal(model, params, drawn, sight))
    if sight.broken > BROKEN:
        raise SpecError(
            f"model or loss: gives no finite loss and gradient for {sight.broken:.0%} of {len(drawn.chosen)} examples "
            "drawn at random, at the initial weights; look for a division by zero, a logarithm or root of what may be "
            "zero or negative, or weights that are not finite"
        )


def _seen(model: FlatModel, closed: ClosedForm | None, params: Tensor, drawn: Draw, rng: torch.Generator) -> Sight:
    """What a draw shows when it is looked at again where there is doubt."""
    sight = look(model, closed, params, drawn, SUSPECT)
    doubtful = sight.mixes or (closed is not None and not sight.fits)
    return look_again(model, closed, params, drawn, rng) if doubtful else sight


def draw(x: Tensor, y: Tensor, size: int, alone: int, rng: torch.Generator) -> Draw:
    """So many real examples at random, at most `alone` of them chosen."""
    numbers = torch.randint(0, len(y), (size,), generator=rng).to(y.device)
    chosen = torch.randperm(size, generator=rng)[:alone].sort().values.to(y.device)
    signs = torch.randn(len(chosen), generator=rng).to(y.device)
    return Draw(x[numbers], y[numbers], chosen, signs)


def _most_alone(closed: ClosedForm | None) -> int:
    """Not more gradients than may exist at once."""
    return CHOSEN if closed is None else max(2, min(CHOSEN, closed.direct.chunk))


def _relabeled(drawn: Draw, labels: str, classes: int, rng: torch.Generator) -> Draw:
    """With labels of one kind of LABELS."""
    if labels == "shuffled":
        return replace(drawn, y=drawn.y[torch.randperm(len(drawn.y), generator=rng).to(drawn.y.device)])
    if labels == "random":
        return replace(drawn, y=torch.randint(0, classes, (len(drawn.y),), generator=rng).to(drawn.y))
    return drawn


def _shaken(x: Tensor, rng: torch.Generator) -> Tensor:
    """With noise, since equal examples do not show that they are mixed, but no value that is not between real ones.

    Whole numbers may be names: they stay.
    """
    if not x.is_floating_point() or bool((x == x.round()).all()):
        return x
    noise = torch.randn(x.shape, generator=rng).to(x)
    return (x + noise * x.std()).clamp(x.min(), x.max())


def _refusal(model: FlatModel, params: Tensor, drawn: Draw, sight: Sight) -> str:
    """Why examples in company do not give what they give alone."""
    alone, crowd = sight.losses
    few = drawn.chosen[:2]
    with torch.no_grad():
        pair = model.losses(params, drawn.x[few], drawn.y[few]).to(crowd)
    if len(drawn.x) > 2 and differ(alone[:2], pair, SUSPECT) and not differ(crowd[:2], pair, SUSPECT):
        return (
            "model or loss: treats a batch of one otherwise than the same example in a larger batch; look for "
            "squeeze() without a dimension, for shapes that broadcast, or for a branch on the number of examples"
        )
    return (
        f"model or loss: mixes the examples of a batch. In a batch of {len(drawn.x)} an example's gradient depends "
        "on the others, so one example could move a sum by more than its bound, and epsilon would be wrong: examples "
        "may not mix. Use a loss of each example's own output and label (no contrastive or ranking loss, no weights or "
        "counts from the batch's labels), and GroupNorm or LayerNorm in place of statistics over a batch"
    )
