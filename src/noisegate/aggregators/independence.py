"""Which uploads of a round depend on one another, and what to do about it.

Honest uploads have independent noise, so all that two of them can share is their signals. What is said twice must not
count twice: let G be the matrix of inner products, of uploads no longer than L, and r_i the sum of the positive ones
in row i beside the diagonal. With weights w_i = o_i / (1 + r_i / L^2), where 0 <= o_i <= 1,

    |sum_i w_i u_i|^2 = w' G w <= L^2 sum_i w_i,

since G with its negative entries set to zero, divided by these rows, has row sums of at most L^2, and so has no larger
eigenvalue. So the weighted mean is no longer than that of sum_i w_i independent uploads, whoever sent how many copies.
"""

import functools
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor

from noisegate import kernels
from noisegate.vectors import counting

GROUP = 512
"""Workers that are compared with one another. More are split at random, so that time and memory stay linear in them."""

ALIKE = 0.5
"""Of an upload's squared length: two that share more are copies, and one of them goes."""

STEP = 2.0
"""Less of a difference in the logarithm of trust is none."""

ROWS = 32
"""Uploads whose products with those before them a CPU makes at once: the rest of the matrix is the same once more."""

TURNS = 2
"""Times that conflicts are settled. Nearly always the first settles all; what is left then is left out."""

MOST_WORKERS = 2**24
"""Whose order still is a whole number that a double holds exactly."""


def largest_product(noise_std: float, longest: float, signals: Tensor, chance: float, peers: int) -> Tensor:
    """() what the inner products of an honest upload with all its honest peers stay below, but for this chance.

    longest: of an upload that counts. signals: () most that the inner product of two honest signals can be; its root
    bounds the length of one.
    Given the one upload u, the noise of the other adds a normal variable of deviation s |u|; the signal of the other,
    in its product with the noise in u, one of at most s times that signal's length.
    """
    width = noise_std * _deviations(chance / (4 * max(1, peers)))
    return signals + width * (longest + signals.sqrt())


@functools.lru_cache(maxsize=64)
def _deviations(chance: float) -> float:
    """How many standard deviations a normal variable exceeds with this chance."""
    return float(stats.norm.isf(chance))


class Shared(NamedTuple):
    """What is to be done about uploads that depend on one another: (n,) each.

    copies: to be left out. others: how many further uploads it is as good as repeated by.
    """

    copies: Tensor
    others: Tensor


def shared(uploads: Tensor, among: Tensor, limit: Tensor, longest: float, trust: Tensor, ties: Tensor) -> Shared:
    """Who of those in `among` copies another, and how much of what is left is said more than once.

    limit: that the inner product of two honest uploads stays below. longest: of an upload in `among`.
    Who leans on whom cannot be seen, so that to lean on honest uploads must not get them left out. Only where two
    are alike by half or more does one go: whoever displaces an honest upload that way carries half of it. Beyond
    `limit` both stay and share their weight: divided by 1 + others, m uploads weigh together what m / (1 + others)
    independent ones do.
    """
    n = len(uploads)
    rank = torch.empty_like(ties).scatter_(0, ties, counting(n, ties.device))
    if n <= GROUP:
        return _shared(_products(uploads), among, limit, longest, trust, rank)
    copies, others = torch.zeros_like(among), uploads.new_zeros(n)
    for members in ties.split(GROUP):
        parts = among[members], limit, longest, trust[members], rank[members]
        copies[members], found = _shared(_products(uploads[members]), *parts)
        others[members] = found * ((n - 1) / max(1, len(members) - 1))  # of all, if these stand for them
    return Shared(copies, others)


def _shared(products: Tensor, among: Tensor, limit: Tensor, longest: float, trust: Tensor, rank: Tensor) -> Shared:
    """`shared` within one group, from its inner products."""
    if kernels.fused(products):
        from noisegate.kernels import sharing

        limits = sharing.Sharing(ALIKE, STEP, GROUP, MOST_WORKERS, TURNS)
        return Shared(*sharing.shared(products, among, limit, longest, trust, rank, limits))
    products = torch.where(among[:, None] & among, products, 0.0).fill_diagonal_(0.0)
    copies = _copies(products, limit.clamp(min=ALIKE * longest**2), trust, rank)
    repeated = (products > limit) & ~(copies[:, None] | copies)
    return Shared(copies, torch.where(repeated, products, 0.0).sum(1) / longest**2)


def _copies(products: Tensor, limit: Tensor, trust: Tensor, rank: Tensor) -> Tensor:
    """(n,) whom to leave out so that no two of the rest have an inner product beyond `limit`.

    The more trusted of two stays, `trust` (n,) counting in steps of STEP. Among equals, who conflicts with fewest stays
    first, so that one upload made of others' goes rather than they. Of copies that all conflict with one another, the
    one stays that the others lean on most: whoever is imitated agrees more with the imitators than they do among
    themselves. What is equal even then is ranked by `rank`.
    """
    conflict = products > limit
    if not conflict.is_cuda and not bool(conflict.any()):
        return torch.zeros_like(conflict[0])
    leaning = torch.where(conflict, products, 0.0).sum(1)
    leaning = (100 * leaning / leaning.amax()).nan_to_num(0.0).round()  # equal uploads' may be rounded differently
    # One number that compares as all four in turn: to sort takes a device longer than all the rest. It is exact.
    order = (trust / STEP).round().double() * GROUP - conflict.sum(1)
    order = (order * 128 + leaning) * MOST_WORKERS - rank
    out = torch.zeros_like(conflict[0])
    for _ in range(TURNS):
        rivals = torch.where(conflict, order, -torch.inf).amax(1)
        lost = (conflict & (order > rivals)).any(1)  # next to one that comes before all its rivals
        out = out | lost
        conflict = conflict & ~(lost[:, None] | lost)
    return out | conflict.any(1)


def _products(uploads: Tensor) -> Tensor:
    """(n, n) the inner products. A GPU makes all of them, a CPU half."""
    if uploads.is_cuda:
        return uploads @ uploads.T
    products = uploads.new_empty(len(uploads), len(uploads))
    for first in range(0, len(uploads), ROWS):
        here, known = slice(first, first + ROWS), slice(first + ROWS)
        torch.mm(uploads[here], uploads[known].T, out=products[here, known])
        products[:first, here] = products[here, :first].T
    return products
