"""Examples alone and in company: their losses and gradients, and those that the closed form gives."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from noisegate.vectors import FlatModel
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.direct import per_example_gradients
from noisegate.workers.not_private import NotPrivate

SUSPECT, CERTAIN, SHORT_OF_DIGITS = 1e-4, 1e-5, 1e-3
"""A relative difference above SUSPECT in float32 is looked at again: in float64, where rounding is far below CERTAIN,
or, if a model knows float32 only, at other weights, where rounding rarely turns a maximum another way again."""

NEXT_TO_LONGEST = 1e-3
"""Gradients shorter than this share of the longest are compared as if they had that length: they may be rounding."""

SHAKE = 0.01
"""Standard deviation of what is added to weights, so that no gradient is zero by the way they begin."""

CHOSEN = 32
"""Examples of a batch that are also looked at alone."""

BROKEN = 0.5
"""A larger share of examples without a finite loss and gradient is an error. They contribute nothing, as they must."""

FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""What torch raises for modules and losses that cannot do what they are asked to."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Examples in company. chosen: ascending, which of them to look at alone; signs: a random weight for each."""

    x: Tensor
    y: Tensor
    chosen: Tensor
    signs: Tensor

    def double(self) -> "Draw":
        """The same in float64."""
        return replace(self, x=as_in(self.x, self.signs.double()), signs=self.signs.double())


@dataclass(frozen=True, eq=False)
class Sight:
    """What one draw showed.

    mixes: whether losses or gradients differ from those alone. fits: whether the closed form's are those alone.
    broken: the share of examples without a finite loss and gradient. losses: of the chosen, (alone, in company).
    """

    mixes: bool
    fits: bool
    broken: float
    losses: tuple[Tensor, Tensor]


def as_in(x: Tensor, like: Tensor) -> Tensor:
    """Inputs of the type of `like`; whole numbers stay."""
    return x.to(like.dtype) if x.is_floating_point() else x


def by_themselves(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """((B, d) gradients, (B,) losses) of examples that are each in a batch of one."""

    def loss_of_one(vector: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
        return model.losses(vector, one_x[None], one_y[None])[0]

    gradients, losses = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0))(params, x, y)
    return gradients, losses.detach()


def look(model: FlatModel, closed: ClosedForm | None, params: Tensor, drawn: Draw, tolerance: float) -> Sight:
    """The chosen examples alone, in company by plain autograd, and in company by the closed form."""
    gradients, alone = by_themselves(model, params, drawn.x[drawn.chosen], drawn.y[drawn.chosen])
    sound = alone.isfinite() & gradients.isfinite().all(1)
    signs = drawn.signs.where(sound, 0.0).to(gradients.dtype)
    found, losses = _in_company(model, params, drawn, sound, signs)
    if not bool(found.isfinite().all()):  # in a sum, one example without a finite gradient hides all others'
        rest, kept = _without_broken(model, params, drawn)
        found, _ = _in_company(model, params, rest, sound[kept], signs[kept])
    wanted = signs @ gradients.where(sound[:, None], 0.0)
    scale = torch.linalg.vector_norm(signs * torch.linalg.vector_norm(gradients, dim=1).where(sound, 0.0))
    scale = torch.maximum(scale, torch.linalg.vector_norm(found))
    mixes = not bool(torch.linalg.vector_norm(found - wanted) <= tolerance * scale) or differ(alone, losses, tolerance)
    fits = closed is not None and _fits(closed, params, drawn, gradients, sound, tolerance)
    return Sight(mixes, fits, 1 - float(sound.double().mean()), (alone, losses))


def look_again(model: FlatModel, closed: ClosedForm | None, params: Tensor, drawn: Draw, rng: torch.Generator) -> Sight:
    """The same examples in float64, or at other weights if the model knows float32 only."""
    try:
        twin = doubled(model)
        twin_closed = ClosedForm.of(twin, closed.direct.chunk) if closed is not None else None
        return look(twin, twin_closed, params.double(), drawn.double(), CERTAIN)
    except FAILURES:
        at = params + SHAKE * torch.randn(params.shape, generator=rng, device=rng.device).to(params)
        return look(model, closed, at, drawn, SHORT_OF_DIGITS)


def doubled(model: FlatModel) -> FlatModel:
    """The model in float64, and the loss if it is a module."""
    loss = copy.deepcopy(model.loss).double() if isinstance(model.loss, nn.Module) else model.loss
    device = next(model.module.parameters()).device
    return FlatModel(copy.deepcopy(model.module).double(), loss, device, model.classes)


def first_line(error: Exception) -> str:
    """What an error of somebody else's code says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether losses of the same examples are not the same: two that are not finite are."""
    both = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return True
    scale = torch.maximum(one[both].abs().mean(), other[both].abs().mean()) if bool(both.any()) else one.new_zeros(())
    return bool(((one - other)[both].abs() > tolerance * scale).any())


def _in_company(model: FlatModel, params: Tensor, drawn: Draw, sound: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the weighted sum of the sound chosen examples' losses, losses of all chosen) in company."""
    vector = params.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = model.losses(vector, drawn.x, drawn.y)[drawn.chosen]
        total = (losses[sound] * signs[sound].to(losses.dtype)).sum()
    gradient = torch.autograd.grad(total, vector, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(params) if gradient is None else gradient, losses.detach()


def _without_broken(model: FlatModel, params: Tensor, drawn: Draw) -> tuple[Draw, Tensor]:
    """(the draw without examples that have no finite gradient alone, which of the chosen are left)."""
    finite = torch.cat(
        [
            per_example_gradients(model, params, x, y).isfinite().all(1)
            for x, y in zip(drawn.x.split(CHOSEN), drawn.y.split(CHOSEN), strict=True)
        ]
    )
    kept = finite[drawn.chosen]
    places = finite.cumsum(0)[drawn.chosen[kept]] - 1
    return Draw(drawn.x[finite], drawn.y[finite], places, drawn.signs[kept]), kept


def _fits(closed: ClosedForm, params: Tensor, drawn: Draw, gradients: Tensor, sound: Tensor, tolerance: float) -> bool:
    """Whether the closed form gives the gradients of the chosen examples, each on its own and all together."""
    # Torch's convolutions on both sides: others round another way, and may choose another maximum.
    closed, wanted = replace(closed, own_convolutions=False), gradients.where(sound[:, None], 0.0)
    if closed.trace(params, drawn.x, drawn.y) is None:
        return False
    if not bool(sound.any()):  # shaken inputs may have no finite loss: they say nothing
        return True
    everyone = len(drawn.chosen) == len(drawn.x)
    for together in (False, True) if everyone else (False,):
        owner, rows = (torch.zeros_like(drawn.y), [0]) if together else _owners(drawn)
        nothing = params.new_zeros(int(owner.max()) + 1, len(params))
        found = closed(NotPrivate(), params, drawn.x, drawn.y, owner, nothing)[rows]
        target = wanted.sum(0, keepdim=True) if together else wanted
        for part in (slice(None), *(layer.weight for layer in closed.layers)):
            lengths = torch.linalg.vector_norm(target[:, part], dim=1)
            off = torch.linalg.vector_norm((found - target)[:, part], dim=1)
            limit = tolerance * torch.maximum(lengths, NEXT_TO_LONGEST * lengths.max())
            if not bool((lengths.max() > 0) & (off <= limit).all()):  # zeros do not show anything
                return False
    return True


def _owners(drawn: Draw) -> tuple[Tensor, Tensor]:
    """(a worker for each example, those of the chosen): each chosen one has its own, those between them another."""
    is_chosen = torch.zeros(len(drawn.x), dtype=torch.int64, device=drawn.y.device)
    is_chosen[drawn.chosen] = 1
    count = is_chosen.cumsum(0)
    owner = 2 * count - is_chosen  # 0 before the first chosen one, 1 for it, 2 up to the next, ...
    _, owner = owner.unique_consecutive(return_inverse=True)
    return owner, owner[drawn.chosen]
