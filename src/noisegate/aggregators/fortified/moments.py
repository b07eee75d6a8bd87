"""What the server's own examples show along directions: where a worker with a given class mix should lie."""

from typing import NamedTuple

import torch
from torch import Tensor

STANDARD_ERRORS = 3.0
"""How many standard errors the workers' mean may lie off the mean of the server's examples.

It lies beyond with a probability of 1 in 740 on either side, or 1 in 270 if the error is estimated from 20 examples."""

MIX_ERROR = 2.0
"""How far a worker's mix is taken to be off before it is refused for it, as a share of how far it is from equal shares.

A mix that was learned is off by a quarter of that distance at most, where it was measured; evidence adds up over all
rounds, and must not add up a wrong mix."""

LEAST_LENGTH = 1e-15
"""The length that stands in for a length of zero; its square is not zero in single precision either."""


class ExampleMoments(NamedTuple):
    """What the server's examples say of n workers along K directions: (n, K) each.

    mean: the mean of an upload of a worker with this mix. error: the variance of that estimate: the examples are few.
    shared_error: the part of it that all workers share.
    spread: the standard deviation of the examples of all classes, for a mix as uneven as this.
    own_reach: (n,) how much further along its own average a worker lies if its mix is not quite this one.
    variance: that of an honest upload around its mean: of a random batch and of the noise.
    """

    mean: Tensor
    error: Tensor
    shared_error: Tensor
    spread: Tensor
    own_reach: Tensor
    variance: Tensor

    @classmethod
    def of(
        cls, along: Tensor, own: Tensor, mix: Tensor, unknown: Tensor, reach: Tensor, noise: Tensor, batch: int
    ) -> "ExampleMoments":
        """along: (A, K - 1) the examples along the directions that all workers share. own: (A, n) along each worker's
        own, which comes last. mix: (n, C), and unknown: (n,), as in `Mixture`. noise: (n,) or () the variance of the
        noise along any direction.
        """
        shared, each_own = _by_class(along, mix.shape[1]), _by_class(own, mix.shape[1])
        squares = mix.square()
        of_shared = [mix @ shared[0], squares @ shared[1], mix @ shared[2]]
        of_own = [(mix * each_own[0].T).sum(1), (squares * each_own[1].T).sum(1), (mix * each_own[2].T).sum(1)]
        equal = mix.mean(1, keepdim=True)
        unsure = (MIX_ERROR * (mix - equal)).square().sum(1, keepdim=True) + unknown[:, None]
        of_shared[1] = of_shared[1] + unsure * shared[0].var(0, correction=0)
        of_own[1] = of_own[1] + unsure[:, 0] * each_own[0].var(0, correction=0)
        of_all = torch.cat([shared[1].sum(0).expand(len(mix), -1), each_own[1].sum(0)[:, None]], 1)
        mean, error, second = (torch.cat([s, o[:, None]], 1) for s, o in zip(of_shared, of_own, strict=True))
        spread = torch.cat([along.std(0).expand(len(mix), -1), own.std(0)[:, None]], 1)
        spread = spread * (squares.sum(1, keepdim=True) * mix.shape[1]).sqrt()
        furthest = (mix.sum(1) * reach - mean[:, -1]).clamp(min=0.0)
        shared_error = torch.minimum(error, equal.square() * of_all)
        variance = (second / batch + noise.expand(len(mix))[:, None]).clamp(min=LEAST_LENGTH**2)
        return cls(mean, error, shared_error, spread, furthest, variance)

    def allowance(self) -> Tensor:
        """(n, K) how far the mean may be off."""
        return STANDARD_ERRORS * self.error.sqrt()


def _by_class(along: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(C, K) each: the means of the (A, K) examples of each class, the variance of that mean, and their mean squares.

    The variance within a class, from so few, is the larger of its own and of the mean of all classes. Where there is
    one example of each class, the variance of all examples stands in for it, which is no smaller.
    """
    each = len(along) // classes
    groups = along.view(classes, each, -1)
    if each == 1:
        within = along.var(0).expand(classes, -1)
    else:
        within = groups.var(1)
        within = torch.maximum(within, within.mean(0))
    return groups.mean(1), within / each, groups.square().mean(1)
