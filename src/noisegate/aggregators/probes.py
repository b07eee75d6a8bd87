"""Directions fixed before a round, and how far along each of them an honest upload can be expected.

An honest upload is a signal, which is a mean over a random batch of the worker's examples, plus noise of standard
deviation s in every direction. Along a unit vector p that the upload's noise had no part in, it lies at

    <u, p> = (mean of the batch along p) + s N(0, 1).

What the batch's mean is expected to be, the server's own examples tell, if they are drawn as the workers' are: A
numbers with mean x and standard deviation r give x +- z r / sqrt(A), and the batch adds a variance of at most
(mean of squares) / b.

Momentum makes an upload lean on the one before it, by up to l per unit vector, and through that one on the one before
that, by l^2 / (length of an upload). So a direction may contain nothing of the last round, and what an upload may lie
further along it for the round before is known.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

CERTAINTY = 3.0
"""Standard errors that an honest worker's mean may lie off that of the server's examples.

Beyond lies one in 740 on either side, or one in 270 if the error itself is known from 20 examples."""

SKEW = 0.15
"""A worker's own mean may lie this share of the examples' spread below the server's gradient: data may be uneven."""

HARMLESS = 0.1
"""Shifts up to this share of the noise in one upload are nothing to look for."""

TINY = 1e-15
"""Stands in for a length of zero; its square is not zero either."""


class Seen(NamedTuple):
    """What the server's A examples show along K directions: (K,) each.

    mean, spread: of the examples. variance: of an honest upload around its mean.
    """

    mean: Tensor
    spread: Tensor
    variance: Tensor

    @classmethod
    def of(cls, own: Tensor, noise: Tensor, batch: int) -> "Seen":
        """own: (A, K) the examples along the directions. noise: () the variance of the noise along any of them."""
        variance, mean = torch.var_mean(own, 0)
        squares = torch.addcmul(variance * (1 - 1 / len(own)), mean, mean)
        return cls(mean, variance.sqrt(), (squares / batch + noise).clamp(min=TINY**2))

    def error(self, count: int) -> Tensor:
        """(K,) how far the mean of `count` examples may be off."""
        return self.spread * (CERTAINTY / math.sqrt(count))


class Expected(NamedTuple):
    """Where the mean of honest uploads is expected along K directions: (K,) or (n, K) each."""

    low: Tensor
    high: Tensor

    def outside(self, found: Tensor, variance: Tensor) -> Tensor:
        """(n, 2 K) how many deviations the (n, K) `found` lie above `high` and below `low`."""
        return torch.cat([found - self.high, self.low - found], 1) * variance.rsqrt().repeat(1, 2)


def along_history(seen: Seen, count: int, noise_std: float, leans: Tensor) -> Expected:
    """For directions that the server's `count` examples had no part in.

    leans: (K,) what an upload may lie further along for having leaned on an older one.
    """
    error = seen.error(count) + HARMLESS * noise_std
    return Expected(seen.mean - error, seen.mean + error + leans)


def along_gradient(seen: Seen, count: int, noise_std: float) -> Expected:
    """For the direction of the server's mean a itself, along which the mean is its length.

    The workers' mean e is not known, but a = e + (error), so that <e, a> >= |e|^2 - |e| z r / sqrt(A), which is never
    below -z^2 r^2 / (4 A), whatever |e| is. In the mean of the own examples along a each of them meets itself, so it is
    too high, which serves for the upper end.
    """
    error, slack = seen.error(count), seen.spread * SKEW + HARMLESS * noise_std
    low = error.square() / seen.mean.clamp(min=TINY) / -4 - slack
    return Expected(low, seen.mean + error + slack)


def hoped_agreement(own: Tensor, along: Tensor, spread: Tensor, strata: int) -> Tensor:
    """() how far along the server's mean honest uploads should lie: as far as fresh examples would.

    The server's own (A, d) examples tell, each compared with the others and never with itself. Where that is not above
    its standard error, nothing is hoped for: 0. So it is near the optimum, where the model fits the workers' examples
    better than the server's, which it never saw.
    along, spread: () the length of the mean, and the spread of the examples along it. strata: how many classes there
    are, all with as many examples, one class after the other. A fresh one shares its class with one of so many, and of
    the other examples fewer do. 1 if they are mixed.
    """
    count = len(own)
    each, size = count // strata, own.shape[1]
    # Sums of the inner products of all pairs, of those within a class, and of each with itself.
    sums = torch.stack([count * along, own.view(strata, each, size).sum(1).norm(), own.norm()]).square()
    pairs_between, pairs_within = count * (count - each), count * (each - 1)
    between = (sums[0] - sums[1]) / max(1, pairs_between)
    within = (sums[1] - sums[2]) / max(1, pairs_within)
    found = (between * (1 - 1 / strata) + within / strata) / along.clamp(min=TINY)
    return torch.where(found > spread / math.sqrt(count), found, 0.0)
