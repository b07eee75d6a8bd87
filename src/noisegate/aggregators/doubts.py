"""Doubt: how far off the server's examples a worker lies, where it could not be refused for that.

Evidence leaves room for the error of the server's few examples, since an honest worker must not be refused for it. But
that error is the same for all honest workers. So of two groups that both stay within the room, the one that lies
further off is less likely the honest one. For a worker that over some rounds lay at y on average, where the examples
lie at x with standard error e, the logarithm of the likelihood is lower than the best one by

    (y - x)^2 / (2 (e^2 + v^2)),

where v^2 is what noise and batches leave in y. Noise must not tell honest workers apart, so a worker is given the
smallest doubt of any position somebody is at, plus what it takes to be there by chance: (y - y')^2 / (2 (w v)^2).
Where server examples are as many of every class, classes add nothing to e.
"""

import torch
from torch import Tensor

from noisegate import kernels

SPEED = 0.02
"""Of the moving averages of how far workers lie off: over some 50 rounds."""

WIDTH = 2.0
"""w, a wide allowance: two honest positions differ by 1.1 v on average, and all the honest ones share a best one."""

SKEW = 0.1
"""A worker's own mean may lie this share of the examples' spread off, as in a sample of some hundred."""

MOST = 4.0
"""Doubt counts up to this much beyond the least: a factor of 55, just enough to be left out beside equals."""

FAR = 1e15
"""Deviations that anybody is apart at most, so that their square is finite."""

NEIGHBORS = 512
"""Workers, drawn at random, whose positions are compared with everyone's, so that time stays linear in the workers."""


def error_of_mean(own: Tensor, strata: int) -> Tensor:
    """(K,) the squared standard error of the mean of the server's (A, K) examples.

    strata: how many classes there are, all with as many examples, one class after the other; 1 if they are mixed.
    """
    each = len(own) // strata
    if each < 2:
        strata, each = 1, len(own)
    return own.view(strata, each, -1).var(1).sum(0) / (strata * len(own))


def doubts(off: Tensor, error: Tensor, spread: Tensor, noise: Tensor, passed: Tensor, ties: Tensor) -> Tensor:
    """(n,) the doubt about each worker beyond the least doubted: the largest over K directions, up to MOST.

    off: (n, K) how far they lay off on average. error, noise: (K,) variances e^2 and v^2. spread: (K,) of the examples.
    passed: (n,) whose positions count. ties: (n,) a random order.
    """
    if kernels.fused(off):
        from noisegate.kernels import judging

        given = (each.contiguous() for each in (off, error, spread, noise, passed, ties))
        return judging.doubts(*given, skew=SKEW, width=WIDTH, far=FAR, most=MOST, neighbors=NEIGHBORS)
    alone = (off / (2 * (error + (SKEW * spread).square() + noise)).sqrt()).clamp(-FAR, FAR).square()
    places = (off / (WIDTH * (2 * noise).sqrt())).clamp(-FAR, FAR)
    theirs, near = torch.where(passed[:, None], alone, torch.inf), places
    if len(off) > NEIGHBORS:
        theirs, near = theirs[ties[:NEIGHBORS]], near[ties[:NEIGHBORS]]
    found = torch.cat(
        [
            torch.minimum(own, (theirs + (place[:, None] - near).square()).amin(1)).amax(1)
            for own, place in zip(alone.split(NEIGHBORS), places.split(NEIGHBORS), strict=True)
        ]
    )
    return (found - torch.where(passed, found, torch.inf).amin()).clamp(0.0, MOST)
