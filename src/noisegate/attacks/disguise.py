"""Uploads with a direction of the adversary's own that look like honest ones to any test of a single upload.

An honest upload is N(0, s^2) noise in d coordinates plus a signal that is short beside it: about 1 against s sqrt(d).

ranked  The upload is a fresh sample of that noise, in an order of the adversary's choice: its largest value where the
        direction is largest, its second largest where that is second largest, and so on. As a multiset it is the
        noise, so every test that forgets the order (the length, the KS test) sees noise. By its order it points along
        the direction: of length s sqrt(d) all of it, where an honest upload has a signal of length 1.
valid   The upload is fresh noise plus the direction at a length that an honest signal can have. No test whatsoever of
        one upload tells it from that of an honest worker whose examples all agree on this direction. Those of real
        workers agree less, so that a signal of length 1 may be refused a little more often; one of 0.5 is not.
"""

import math
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from noisegate import checks
from noisegate.views import AdversaryView

Form = Literal["ranked", "valid"]
FORMS = ("ranked", "valid")

CHANCE = 1e-3
"""The least weight of chance in an order. It orders equal values, such as the zeros of a gradient, and leaves the
cosine as it is."""


def check_disguise(form: str, strength: float) -> None:
    """SpecError unless there is such a form, and the strength is above 0 and at most 1."""
    checks.one_of(FORMS, form=form)
    checks.positive(strength=strength)
    checks.share(strength=strength)


def disguised(form: Form, directions: Tensor, strength: float, view: AdversaryView) -> Tensor:
    """(M, d) uploads that point along (d,) one direction or (M, d) one for each worker, as far as their form allows.

    strength: the closeness of what is ranked, the length of the signal in what is valid.
    """
    each = directions.expand(view.workers, -1)
    make = ranked if form == "ranked" else valid
    return make(each, strength, view.noise_std, view.rng)


def ranked(targets: Tensor, closeness: float, noise_std: float, rng: torch.Generator) -> Tensor:
    """(..., d) fresh N(0, noise_std^2) samples, each put in the order of its target mixed with chance.

    The order is that of `closeness` sqrt(d) unit(target) + sqrt(1 - closeness^2) N(0, 1): of a target whose coordinates
    are like a normal sample, the cosine with the upload is about `closeness`. A target of zeros gives a random order.
    """
    chance = max(CHANCE, math.sqrt(1 - closeness**2))
    order = unit(targets).mul_(closeness * math.sqrt(targets.shape[-1]))
    sample = torch.empty_like(order)
    order.add_(sample.normal_(generator=rng), alpha=chance)
    sample.normal_(0.0, noise_std, generator=rng)
    if order.is_cuda:
        return sample.scatter(-1, order.argsort(-1), sample.sort(-1).values)
    # On a CPU numpy sorts several times faster than torch.
    places, values = np.argsort(order.numpy()), np.sort(sample.numpy())
    return sample.scatter_(-1, torch.from_numpy(places), torch.from_numpy(values))


def valid(targets: Tensor, length: float, noise_std: float, rng: torch.Generator) -> Tensor:
    """(..., d) fresh N(0, noise_std^2) noise, each with its target at this length; a target of zeros adds nothing."""
    signal = unit(targets).mul_(length)
    return torch.empty_like(signal).normal_(0.0, noise_std, generator=rng).add_(signal)


def unit(vectors: Tensor) -> Tensor:
    """(..., d) new vectors of length 1 in the same directions, whatever their size; zeros stay zeros.

    Coordinates that are not finite count as zeros.
    """
    scaled = vectors.nan_to_num(0.0, 0.0, 0.0)
    largest = scaled.abs().amax(-1, keepdim=True)
    scaled.div_(largest.masked_fill_(largest == 0, 1.0))  # so that no square overflows; now every length is 0 or >= 1
    return scaled.div_(torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp_(min=1.0))


def fixed_directions(seed: int, count: int, like: Tensor) -> Tensor:
    """(count, d) normal numbers that depend on the seed, the row and the column alone: the same in every round.

    Computed and not drawn, since a generator cannot be made anew in a round that is recorded.
    """
    rows = torch.arange(count, device=like.device)[:, None]
    columns = torch.arange(len(like), device=like.device)
    bits = _mixed(_mixed(columns) + _mixed(rows + _mixed(seed)))
    high, low = (part.to(like.dtype).add_(0.5).div_(2**16) for part in (bits >> 16, bits & (2**16 - 1)))
    return high.log_().mul_(-2.0).sqrt_().mul_(low.mul_(2 * math.pi).cos_())  # Box and Muller, 1958


Bits = TypeVar("Bits", int, Tensor)


def _mixed(bits: Bits) -> Bits:
    """Any whole numbers to 32 bits each, equal ones to equal ones and others to unrelated ones.

    Shifts carry downwards, products with odd numbers upwards; these are below 2^31, so that nothing overflows int64.
    """
    bits = bits & (2**32 - 1)
    for odd in (0x5BD1E995, 0x2C1B3C6D, 0x297A2D39):
        bits = ((bits ^ (bits >> 15)) * odd) & (2**32 - 1)
    return bits ^ (bits >> 16)
