"""Uploads of a round that depend on one another: copies are left out, and partial copies share their weight.

Honest uploads have independent noise, so two of them share nothing but their signals. What is repeated must not count
twice. Let G be the matrix of inner products of uploads no longer than L, and r_i the sum of the positive ones in row
i beside the diagonal. With weights w_i = o_i / (1 + r_i / L^2), where 0 <= o_i <= 1,

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
"""The number of workers that are compared with one another. More are split into random groups: time and memory stay
linear in the workers."""

COPY_SHARE = 0.5
"""Two uploads whose inner product is more than this share of the longest squared length are copies; one is left out."""

TRUST_STEP = 2.0
"""The unit in which the trust of two copies is compared, as a logarithm of odds: a smaller difference is none."""

ROWS = 32
"""The number of uploads whose products with those before them a CPU makes at once; the rest follows by symmetry."""

TURNS = 2
"""How often conflicts are settled. Nearly always the first turn settles all; who is in conflict then is left out."""

MOST_WORKERS = 2**24
"""The number of workers up to which a rank among copies is exact in double precision."""


def largest_product(
    noise_std: float,
    longest: float | Tensor,
    signal: Tensor,
    chance: float,
    peers: int,
    expected: Tensor | None = None,
) -> Tensor:
    """() what the inner products of an honest upload with all its honest peers stay below, but for this chance.

    longest: the length of the longest upload that counts; or (n,), by the size of the worker. signal: () the largest
    inner product of two honest signals; its root bounds the length of one. expected: (n,) what uploads are expected to
    be made of, over the public batch; then there is one bound for each.

    Given one upload u, the noise of the other adds a normal variable of standard deviation s |u|; the signal of the
    other, in its product with the noise in u, adds one of at most s times that signal's length.
    """
    width = noise_std * _deviations(chance / (4 * max(1, peers)))
    if expected is None:
        return signal + width * (longest + signal.sqrt())
    # A signal is as much longer as its batch is larger. Of two uploads, what the mean of both allows is at least what
    # the shorter one needs; and who sends less than others is given what others are.
    more = expected.clamp(min=1.0)
    return signal * more.square() + width * (longest + signal.sqrt() * more)


@functools.lru_cache(maxsize=64)
def _deviations(chance: float) -> float:
    """How many standard deviations a normal variable exceeds with this chance."""
    return float(stats.norm.isf(chance))


class Dependence(NamedTuple):
    """What is to be done about uploads that depend on one another: (n,) each.

    copies: who is left out. repeats: how many further uploads the upload is as good as repeated by.
    """

    copies: Tensor
    repeats: Tensor


def find_copies(
    uploads: Tensor, candidates: Tensor, limit: Tensor, longest: float, score: Tensor, ties: Tensor
) -> Dependence:
    """Who of the candidates copies another, and how often the rest is repeated.

    limit: () what the inner product of two honest uploads stays below; or (n,) such that the mean of those of both is
    what it stays below. longest: the length of the longest candidate.
    Nothing shows which of two uploads depends on the other, so a Byzantine worker that mixes honest uploads into its
    own must not get them left out. Only of two uploads that are alike by half or more does one go: whoever displaces
    an honest upload that way carries half of it. Of others beyond `limit` both stay and share their weight: divided by
    1 + repeats, m uploads weigh together what m / (1 + repeats) independent ones do.
    """
    n = len(uploads)
    rank = torch.empty_like(ties).scatter_(0, ties, counting(n, ties.device))
    if n <= GROUP:
        return _within_group(_products(uploads), candidates, limit, longest, score, rank)
    copies, repeats = torch.zeros_like(candidates), uploads.new_zeros(n)
    for members in ties.split(GROUP):
        own = limit if limit.dim() == 0 else limit[members]
        parts = candidates[members], own, longest, score[members], rank[members]
        copies[members], found = _within_group(_products(uploads[members]), *parts)
        repeats[members] = found * ((n - 1) / max(1, len(members) - 1))  # of all, if these stand for them
    return Dependence(copies, repeats)


def _within_group(
    products: Tensor, candidates: Tensor, limit: Tensor, longest: float, score: Tensor, rank: Tensor
) -> Dependence:
    """`find_copies` within one group, from its inner products."""
    if kernels.fused(products) and limit.dim() == 0:
        from noisegate.aggregators.fortified.kernels import copies as by_kernels

        return by_kernels.within_group(products, candidates, limit, longest, score, rank)
    products = torch.where(candidates[:, None] & candidates, products, 0.0).fill_diagonal_(0.0)
    limit = limit if limit.dim() == 0 else (limit[:, None] + limit) / 2
    copies = _copies(products, limit.clamp(min=COPY_SHARE * longest**2), score, rank)
    repeated = (products > limit) & ~(copies[:, None] | copies)
    return Dependence(copies, torch.where(repeated, products, 0.0).sum(1) / longest**2)


def _copies(products: Tensor, limit: Tensor, score: Tensor, rank: Tensor) -> Tensor:
    """(n,) whom to leave out so that no two of the rest have an inner product beyond `limit`.

    The one with the higher score stays; `score` (n,) counts in steps of TRUST_STEP. Among equals, who conflicts with
    fewest stays first, so that one upload made of several others goes rather than they. Of copies that all conflict
    with one another, the one stays that has the largest products with the others: an original has more in common with
    its imitators than they have with one another. What is equal even then is ranked by `rank`.
    """
    conflict = products > limit
    if not conflict.is_cuda and not bool(conflict.any()):
        return torch.zeros_like(conflict[0])
    common = torch.where(conflict, products, 0.0).sum(1)
    common = (100 * common / common.amax()).nan_to_num(0.0).round()  # those of equal uploads may be rounded differently
    # One number that compares as all four in turn: to sort takes a device longer than all the rest. It is exact.
    order = (score / TRUST_STEP).round().double() * GROUP - conflict.sum(1)
    order = (order * 128 + common) * MOST_WORKERS - rank
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
        here, before = slice(first, first + ROWS), slice(first + ROWS)
        torch.mm(uploads[here], uploads[before].T, out=products[here, before])
        products[:first, here] = products[here, :first].T
    return products
