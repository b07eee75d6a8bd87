"""Privacy loss distributions of rounds with Poisson batches, composed by dp-accounting. Always the pessimistic ones."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from noisegate.privacy.signs import largest_loss, signs_of_one_round
from noisegate.sampling import accounting


@dataclass(frozen=True)
class EqualRounds:
    """Some rounds with the same sampling rate and noise. signs: how many are flipped in each; 0 for Gaussian noise."""

    rate: float
    sigma: float
    signs: int
    count: int


def epsilon_of(parts: tuple[EqualRounds, ...], interval: float, delta: float) -> float:
    """Of all these rounds together, on a grid of losses of this width; inf where none is found."""
    # With few signs the grid, made for a Gaussian, may be coarse.
    return min(float(composed(parts, interval).get_epsilon_for_delta(delta)), most_of(parts))


def most_of(parts: tuple[EqualRounds, ...]) -> float:
    """What no delta exceeds: no round loses more than when all signs turn. inf where there is Gaussian noise."""
    if not all(part.signs for part in parts):
        return math.inf
    return sum(part.count * largest_loss(part.sigma, part.signs, part.rate) for part in parts)


@lru_cache(maxsize=2)
def composed(parts: tuple[EqualRounds, ...], interval: float) -> Any:
    """dp-accounting's distribution of the loss over all these rounds."""
    accounting()  # says what to do where it is missing
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = pld.identity(interval)
    for part in parts:
        if part.signs:
            one = signs_of_one_round(part.sigma, part.signs, part.rate, interval)
        else:
            one = pld.from_gaussian_mechanism(
                part.sigma, value_discretization_interval=interval, sampling_prob=part.rate
            )
        total = total.compose(one.self_compose(part.count))
    return total


def spread(part: EqualRounds) -> float:
    """About how far the losses of one round lie apart: what a grid has to tell."""
    most = largest_loss(part.sigma, part.signs, part.rate) if part.signs else math.inf
    return min(deviation(part.rate, part.sigma), most)


def deviation(rate: float, sigma: float) -> float:
    """About the standard deviation of the loss of one round, if it is small: q sqrt(e^(1 / sigma^2) - 1)."""
    return rate * math.sqrt(math.expm1(min(sigma**-2, 700.0)))
