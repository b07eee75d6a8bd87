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

LEAN = 1.5
"""Room for workers who lean on their last uploads more than the server's examples would."""


class Expected(NamedTuple):
    """Where honest uploads are expected along K directions: (n or 1, K) each.

    low, high: of the mean. deviation: of an upload around its mean.
    """

    low: Tensor
    high: Tensor
    deviation: Tensor

    def outside(self, found: Tensor) -> Tensor:
        """(n, 2 K) how many deviations the (n, K) `found` lie above `high` and below `low`."""
        return torch.cat([(found - self.high) / self.deviation, (self.low - found) / self.deviation], 1)


def along_history(own: Tensor, noise_std: float | Tensor, batch: int, leans: Tensor) -> Expected:
    """For directions that the server's examples had no part in: own (A, K) are these examples along them.

    leans: (K,) what an upload may lie further along for having leaned on an older one.
    """
    mean, error = own.mean(0), CERTAINTY * own.std(0) / len(own) ** 0.5 + HARMLESS * noise_std
    deviation = (own.square().mean(0) / batch + noise_std**2).sqrt()
    return Expected((mean - error)[None], (mean + error + leans)[None], _positive(deviation)[None])


def along_gradient(own: Tensor, length: Tensor, noise_std: float | Tensor, batch: int) -> Expected:
    """For the direction of the server's mean a itself, of this `length`: own (A, 1) are its examples along it.

    The workers' mean e is not known, but a = e + (error), so that <e, a> >= |e|^2 - |e| z r / sqrt(A), which is never
    below -z^2 r^2 / (4 A), whatever |e| is. In the mean of the own examples along a each of them meets itself, so it is
    too high, which serves for the upper end.
    """
    spread = own.std(0)
    error = CERTAINTY * spread / len(own) ** 0.5
    slack = HARMLESS * noise_std + SKEW * spread
    low = -error.square() / 4 / _positive(length) - slack
    deviation = (own.square().mean(0) / batch + noise_std**2).sqrt()
    return Expected(low[None], (length + error + slack)[None], _positive(deviation)[None])


def hoped_agreement(own: Tensor, labels: Tensor | None) -> Tensor:
    """() how far along the server's mean honest uploads should lie: as far as fresh examples would.

    Its own (A, d) examples tell, each compared with the others and never with itself. Where that is not above its
    standard error, nothing is hoped for: 0. So it is near the optimum, where the model fits the workers' examples
    better than the server's, which it never saw.
    labels: (A,) if there are as many examples of every class as of any other. Then a fresh one shares its class with
    one of (number of classes), and of the other examples fewer do.
    """
    mean = own.mean(0)
    length = _positive(mean.norm())
    products = own @ own.T
    others = ~torch.eye(len(own), dtype=torch.bool, device=own.device)
    fresh = _mean_over(products, others)
    if labels is not None:
        same = labels[:, None] == labels[None, :]
        within, between = _mean_over(products, same & others), _mean_over(products, ~same)
        fresh = between + (within - between) / same.sum(1).reciprocal().sum()
    error = (products.mean(1) / length).std() / len(own) ** 0.5  # the mean of the products is that with the mean
    found = fresh / length
    return torch.where(found > error, found, 0.0)


def _mean_over(products: Tensor, pairs: Tensor) -> Tensor:
    return torch.where(pairs, products, 0.0).sum() / pairs.sum().clamp(min=1)


def _positive(lengths: Tensor) -> Tensor:
    return lengths.clamp(min=1e-15)  # whose square is not zero either
