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

from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.state import COMMON

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


def doubt_along(projections: Projections, offsets: Tensor, passed: Tensor, ties: Tensor) -> Tensor:
    """(n,) the doubt along all common directions but the server's gradient, in which workers cannot be compared.

    offsets: (n, COMMON - 1) how far workers lay off on average. passed: (n,) whose positions count. ties: (n,) a random
    order.
    """
    moments, here = projections.moments, slice(1, COMMON)
    batches = moments.variance * (OFFSET_SPEED / (2 - OFFSET_SPEED))
    shared = moments.shared_error + (OFFSET_SKEW * moments.spread).square()
    own = batches + moments.error - moments.shared_error
    return remaining_doubt(offsets, shared[:, here], own[:, here], passed, ties)


def remaining_doubt(offsets: Tensor, error: Tensor, noise: Tensor, passed: Tensor, ties: Tensor) -> Tensor:
    """(n,) the doubt about each worker beyond the least doubted: the largest over K directions, up to MOST_DOUBT.

    offsets: (n, K) how far they lay off on average. error, noise: (n, K) the variances e^2 and v^2. passed: (n,) whose
    positions count. ties: (n,) a random order.
    """
    alone = (offsets / (2 * (error + noise)).sqrt()).clamp(-FAR, FAR).square()
    scale = (WIDTH * (2 * noise).sqrt()).reciprocal()
    theirs, near = torch.where(passed[:, None], alone, torch.inf), offsets
    if len(offsets) > NEIGHBORS:
        theirs, near = theirs[ties[:NEIGHBORS]], near[ties[:NEIGHBORS]]
    found = []
    parts = zip(alone.split(NEIGHBORS), offsets.split(NEIGHBORS), scale.split(NEIGHBORS), strict=True)
    for own, place, each in parts:
        there = theirs + ((place[:, None] - near) * each[:, None]).clamp(-FAR, FAR).square()
        found.append(torch.minimum(own, there.amin(1)))
    doubt = torch.cat(found)
    doubt = doubt - torch.where(passed[:, None], doubt, torch.inf).amin(0)
    return doubt.amax(1).clamp(0.0, MOST_DOUBT)
