"""Batches in which every class is drawn equally often, whatever its share of the data.

Class c, of which a worker is taken to hold declared * share_c examples, is drawn at the rate

    q_c = (batch / C) / (declared * share_c),

by `poisson` within the class. All three numbers are public, so no rate follows anyone's data: an example more or less
changes no other's chance (tests/test_balanced.py). An example of a class that is drawn at a lower rate pays for the
highest: a mechanism that samples at q is one that samples at a rate above it, of whose draws some are then left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from noisegate.checks import refuse
from noisegate.entropy import Randomness
from noisegate.marks import held_by, uniform_blocks
from noisegate.sampling.schemes import Draw, Poisson, check_tail, fits

BALANCED = "balanced"
"""The name of `Balanced`."""

MOST_OFTEN = 16.0
"""No class is drawn more than so many times as often as all would be together. A rarer one stays rarer: the noise of
all grows with the highest rate, about as fast as the share of its class in a batch does, so that more gains nothing."""


RULE = "must be numbers above 0, one for each class, of which only the proportions count, as 0.95, 0.05"


@dataclass(frozen=True)
class Balanced(Poisson):
    """Every example by itself, with the probability of its class: equally many of every class are expected.

    shares: of the classes, public, one for each; only their proportions count. A class without a share is never drawn.
    The default is one class, of which a draw is that of `poisson`.
    """

    shares: tuple[float, ...] = (1.0,)
    name: ClassVar[str] = BALANCED

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self.shares)
        object.__setattr__(self, "shares", tuple(self.shares))

    def rates(self, declared: int) -> tuple[float, ...]:
        """q_c for each class. What a class at the highest rate leaves of its part of the batch, the others share."""
        fits(self.batch, declared)
        total, most = math.fsum(self.shares), min(1.0, MOST_OFTEN * self.batch / declared)
        rates, left = [0.0] * len(self.shares), float(self.batch)
        rarest_first = sorted((share, label) for label, share in enumerate(self.shares) if share > 0)
        for place, (share, label) in enumerate(rarest_first):
            held = declared * (share / total)
            rates[label] = min(most, left / (len(rarest_first) - place) / held)
            left -= rates[label] * held
        return tuple(rates)

    def over(self, sizes: Tensor, declared: int, labels: Tensor | None = None) -> Draw:
        """As `Poisson`, each example at the rate of its class."""
        held, chances = held_by(sizes), self._chances(sizes, declared, labels)

        def draw(rng: Randomness) -> Tensor:
            return held.among([uniform < chances[block] for block, uniform in uniform_blocks(held, rng)])

        return draw

    def loads(self, sizes: Tensor, declared: int, labels: Tensor) -> Tensor:
        """By the classes that each worker holds, up to the next whole number."""
        chances = self._chances(sizes, declared, labels) * held_by(sizes).marks
        return (chances.sum(1) * (declared / self.batch) - 1e-9).ceil().to(torch.int64)

    def as_many(self, declared: int) -> int:
        """Few examples of a class leave its mean unsure, however often they are drawn."""
        total, rates = math.fsum(self.shares), self.rates(declared)
        parts = [(rate, declared * share / total) for rate, share in zip(rates, self.shares, strict=True) if share > 0]
        return max(1, round(self.batch**2 / math.fsum(rate**2 * held for rate, held in parts)))

    def rate(self, examples: int) -> float:
        """That of the class that is drawn most often, which is priced. examples: as many as were declared."""
        return max(self.rates(examples))

    def largest(self, examples: int, tail: float) -> int:
        """A Poisson quantile. examples: as many as were declared, of which each class has its share."""
        fits(self.batch, examples)
        return self.largest_sum(1, examples, examples, tail)

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """A Poisson quantile. held: the workers' `loads` together."""
        from scipy.stats import poisson

        check_tail(tail)
        return int(poisson.isf(tail, held * (self.batch / declared)))

    def _chances(self, sizes: Tensor, declared: int, labels: Tensor | None) -> Tensor:
        """(n, longest) float64: the rate of each example."""
        rates = torch.tensor(self.rates(declared), dtype=torch.float64, device=sizes.device)
        longest = int(sizes.max())
        if labels is None:
            if len(rates) > 1:
                raise ValueError("labels: are needed where every class has a rate of its own")
            return rates.expand(len(sizes), longest)
        if int(labels.max()) >= len(rates):
            raise refuse("class_shares", list(self.shares), f"has no share for class {int(labels.max())}; give one")
        return rates[labels[:, :longest]]


def settled_shares(given: object, sampling: str, secret: bool) -> list[float] | None:
    """The public shares of the classes that a run was given, as numbers; None if those of the data are taken.

    SpecError if they are none, or the sampling has no use for them, or a secret run would follow those of the data.
    """
    if given is not None and sampling != BALANCED:
        raise refuse("class_shares", given, f'are for sampling = "{BALANCED}"; give both, or neither')
    if given is None and sampling == BALANCED and secret:
        rule = "takes the shares of the classes from the data, and they are secret; give class_shares, public numbers"
        raise refuse("sampling", BALANCED, rule)
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise refuse("class_shares", given, RULE)
    check_shares(given, above=True)
    return [float(share) for share in given]


def check_shares(shares: Sequence[Any], above: bool = False) -> None:
    """SpecError unless these can be the shares of classes. above: each of them is above 0, and not just one."""

    def fine(share: Any) -> bool:
        number = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share)
        return bool(number and (share > 0 or (share == 0 and not above)))

    if not all(map(fine, shares)) or not any(shares):
        raise refuse("class_shares", list(shares), RULE)
