"""What the server's own examples show along directions: their moments, and how far fresh examples should agree."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STANDARD_ERRORS = 3.0
"""How many standard errors the workers' mean may lie off the mean of the server's examples.

It lies beyond with a probability of 1 in 740 on either side, or 1 in 270 if the error is estimated from 20 examples."""

LEAST_LENGTH = 1e-15
"""The length that stands in for a length of zero; its square is not zero in single precision either."""


class ExampleMoments(NamedTuple):
    """Moments of the server's A examples along K directions: (K,) each.

    mean, spread: the mean and the standard deviation of the examples.
    variance: that of an honest upload around its mean: of a random batch and of the noise.
    """

    mean: Tensor
    spread: Tensor
    variance: Tensor

    @classmethod
    def of(cls, along: Tensor, noise: Tensor, batch: int) -> "ExampleMoments":
        """along: (A, K) the examples along the directions. noise: () the variance of the noise along any of them."""
        variance, mean = torch.var_mean(along, 0)
        squares = torch.addcmul(variance * (1 - 1 / len(along)), mean, mean)
        return cls(mean, variance.sqrt(), (squares / batch + noise).clamp(min=LEAST_LENGTH**2))

    def error(self, examples: int) -> Tensor:
        """(K,) how far the mean of so many examples may be off."""
        return self.spread * (STANDARD_ERRORS / math.sqrt(examples))


def variance_of_mean(along: Tensor, strata: int) -> Tensor:
    """(K,) the squared standard error of the mean of the server's (A, K) examples.

    strata: the number of classes, if there are as many examples of each and one class follows the other; else 1.
    """
    each = len(along) // strata
    if each < 2:
        strata, each = 1, len(along)
    return along.view(strata, each, -1).var(1).sum(0) / (strata * len(along))


def agreement_of_examples(contributions: Tensor, length: Tensor, spread: Tensor, strata: int) -> Tensor:
    """() how far along the server's gradient honest uploads are expected: as far as fresh examples would lie.

    The server's (A, d) contributions tell: each example is compared with the others and never with itself. Where the
    result is not above its standard error, it is 0. This is so near the optimum, where the model fits the workers'
    examples better than the server's, which it never saw.
    length, spread: () of the mean, and of the examples along it. strata: as in `variance_of_mean`. A fresh example has
    the class of one in so many others; fewer of the server's other examples do.
    """
    examples = len(contributions)
    each, size = examples // strata, contributions.shape[1]
    # Sums of the inner products of all pairs, of those within a class, and of each with itself.
    within_classes = contributions.view(strata, each, size).sum(1).norm()
    sums = torch.stack([examples * length, within_classes, contributions.norm()]).square()
    pairs_between, pairs_within = examples * (examples - each), examples * (each - 1)
    between = (sums[0] - sums[1]) / max(1, pairs_between)
    within = (sums[1] - sums[2]) / max(1, pairs_within)
    found = (between * (1 - 1 / strata) + within / strata) / length.clamp(min=LEAST_LENGTH)
    return torch.where(found > spread / math.sqrt(examples), found, 0.0)
