"""Whether features are of each example alone: the check that is made before any are computed.

Where one example's features depend on others, the change of one example changes many, and the bound on what one example
can do does not hold. So drawn examples are looked at in company, alone, in another order, and beside extreme company,
as models and losses are (docs/mixing.md). While features are computed, one example of every block is looked at again.
"""

import torch
from torch import Tensor, nn

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.features.naming import Features

DRAWN = 16
"""Examples that are looked at."""

TOLERANCE = 1e-4
"""How far the features of an example may be from those that it has alone, as a share of the largest: rounding."""

EXTREMES = (1e1, 1e3, 1e6)
"""What the inputs of extreme company are multiplied by."""

MIXES = (
    "mix the examples of a batch: an example in company does not have the features that it has alone, so one example "
    "could change what others are trained on, and epsilon would be wrong. Use features of each example by itself: no "
    "statistics over a batch, nothing that is fitted to what it is given"
)


def check_features(features: Features, x: Tensor, rng: torch.Generator) -> tuple[int, ...]:
    """The shape of the features of one example. SpecError if they are no features, or not of each example alone.

    x: real examples to draw from.
    """
    drawn = x[torch.randint(0, len(x), (DRAWN,), generator=rng).to(x.device)]
    before, state = drawn.clone(), _state(features)
    found = apply(features, drawn)
    if not torch.equal(drawn, before):
        raise SpecError("features: write to their inputs, which are the data; look for an operation in place")
    if differ(found, apply(features, drawn)):
        raise SpecError(
            "features: are not the same when they are computed again, so they draw random numbers or keep state; "
            "features are computed once, and must be a function of the example"
        )
    order = torch.randperm(DRAWN, generator=rng).to(x.device)
    alone = torch.cat([apply(features, one[None]) for one in drawn])
    if differ(found, alone) or differ(found[order], apply(features, drawn[order])):
        raise SpecError(f"features: {MIXES}")
    for factor in EXTREMES:
        for sign in (1.0, -1.0):
            beside = drawn.clone()
            beside[order[: DRAWN // 4]] *= sign * factor
            try:
                crowd = apply(features, beside, finite=False)
            except Exception:  # noqa: BLE001  # which inputs they refuse is their own affair
                continue
            rest = order[DRAWN // 4 :]
            if differ(found[rest], crowd[rest]):
                raise SpecError(f"features: {MIXES}")
    if any(not torch.equal(one, other) for one, other in zip(state, _state(features), strict=True)):
        raise SpecError("features: change as they are used, so they learn from what they are given; freeze them")
    return tuple(found.shape[1:])


def check_again(features: Features, x: Tensor, found: Tensor, place: int) -> None:
    """SpecError if the example at that place of a block does not have, alone, the features that it has there."""
    if differ(found[place : place + 1], apply(features, x[place : place + 1])):
        raise SpecError(f"features: {MIXES}")


@torch.no_grad()
def apply(features: Features, x: Tensor, finite: bool = True) -> Tensor:
    """The features of examples. SpecError if they are none that can be trained with."""
    try:
        found = features(x)
    except (SpecError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # anyone's code may raise anything
        raise SpecError(
            f"features: fail for {len(x)} examples of shape {tuple(x.shape[1:])} ({type(error).__name__}: "
            f"{checks.told(error)}); they must take a batch of any number"
        ) from None
    if not isinstance(found, Tensor) or found.dtype != torch.float32:
        kind = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(f"features: gave {kind}; they must be a float32 tensor, one row for each example")
    if found.dim() < 2 or len(found) != len(x) or not found[:1].numel():
        raise SpecError(
            f"features: gave shape {tuple(found.shape)} for {len(x)} examples; they must give (examples, ...), with "
            "at least one number for each"
        )
    if finite and not bool(torch.isfinite(found).all()):
        raise SpecError("features: are not finite for a real example; look for a division by zero, a logarithm or root")
    return found


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether rows are further apart than rounding."""
    if one.shape != other.shape:
        return True
    one, other = one.flatten(1), other.flatten(1)
    apart = (one - other).abs().amax(1)
    return not bool((apart <= TOLERANCE * one.abs().amax(1) + torch.finfo(one.dtype).tiny).all())


def _state(features: Features) -> list[Tensor]:
    """Copies of all numbers that a module holds."""
    if not isinstance(features, nn.Module):
        return []
    return [value.detach().clone() for value in features.state_dict().values() if isinstance(value, Tensor)]
