"""Doubt: how far off the server's examples a worker lies, where it could not be refused for that.

The evidence allows for the error of the server's few examples, since an honest worker must not be refused for it. But
that error is the same for all honest workers. So of two groups that both stay within it, the one that lies further off
is less likely the honest one. For a worker that over some rounds lay at y on average, where the examples lie at x with
standard error e, the log-likelihood is lower than the best one by

    (y - x)^2 / (2 (e^2 + v^2)),

where v^2 is the variance that noise and batches leave in y. Noise must not tell honest workers apart. So a worker is
given the smallest doubt of any position that a worker has, plus what it takes to be there by chance:
(y - y')^2 / (2 (w v)^2). Where the server has as many examples of every class, classes add nothing to e.
"""

import torch
from torch import Tensor

from noisegate import kernels

OFFSET_SPEED = 0.02
"""The share of a new round in the moving averages of offsets. They average over about 50 rounds."""

WIDTH = 2.0
"""w, in standard deviations v. Two honest positions differ by 1.1 v on average, so this allows for much more."""

OFFSET_SKEW = 0.1
"""How far a worker's own mean may lie off, in standard deviations of the examples: as in a sample of a hundred."""

MOST_DOUBT = 4.0
"""Doubt beyond the least doubt counts up to this much: a factor of 55, just enough to be left out beside equals."""

FAR = 1e15
"""Positions count as at most this many standard deviations apart, so that the square is finite."""

NEIGHBORS = 512
"""The number of workers, drawn at random, whose positions are compared with everyone's: time is linear in workers."""


def remaining_doubt(
    offsets: Tensor, error: Tensor, spread: Tensor, noise: Tensor, passed: Tensor, ties: Tensor
) -> Tensor:
    """(n,) the doubt about each worker beyond the least doubted: the largest over K directions, up to MOST_DOUBT.

    offsets: (n, K) how far they lay off on average. error, noise: (K,) the variances e^2 and v^2. spread: (K,) of the
    examples. passed: (n,) whose positions count. ties: (n,) a random order.
    """
    if kernels.fused(offsets):
        from noisegate.aggregators.fortified.kernels import doubt

        return doubt.remaining_doubt(*(each.contiguous() for each in (offsets, error, spread, noise, passed, ties)))
    alone = (offsets / (2 * (error + (OFFSET_SKEW * spread).square() + noise)).sqrt()).clamp(-FAR, FAR).square()
    places = (offsets / (WIDTH * (2 * noise).sqrt())).clamp(-FAR, FAR)
    theirs, near = torch.where(passed[:, None], alone, torch.inf), places
    if len(offsets) > NEIGHBORS:
        theirs, near = theirs[ties[:NEIGHBORS]], near[ties[:NEIGHBORS]]
    found = torch.cat(
        [
            torch.minimum(own, (theirs + (place[:, None] - near).square()).amin(1)).amax(1)
            for own, place in zip(alone.split(NEIGHBORS), places.split(NEIGHBORS), strict=True)
        ]
    )
    return (found - torch.where(passed, found, torch.inf).amin()).clamp(0.0, MOST_DOUBT)
