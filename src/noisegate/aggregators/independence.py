"""Which uploads of a round depend on one another, and which of these to leave out.

Honest uploads have independent noise, so all that two of them can share is their signals.
"""

import functools

import torch
from scipy import stats
from torch import Tensor

from noisegate.vectors import counting

GROUP = 512
"""Workers that are compared with one another. More are split at random, so that time and memory stay linear in them."""

STEP = 2.0
"""Less of a difference in the logarithm of trust is none."""

FEW = 64
"""Uploads of which all products are made at once: fewer are no faster in parts."""

TURNS = 4
"""Times that conflicts are settled. Nearly always the first settles all; what is left then is left out."""


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


def dependent(uploads: Tensor, among: Tensor, limit: Tensor, trust: Tensor, ties: Tensor) -> Tensor:
    """(n,) whom to leave out so that no two of the rest have an inner product beyond `limit`, of those in `among`.

    Who leans on whom cannot be seen: the more trusted of two stays, `trust` (n,) counting in steps of STEP. Among
    equals, who conflicts with fewest stays first, so that one upload made of many others' goes rather than they. Of
    copies, who all conflict with one another, the one stays that the others lean on most: whoever is imitated agrees
    more with the imitators than they do among themselves. What is equal even then is ranked by `ties`.
    """
    out = torch.zeros_like(among)
    for members in ties.split(GROUP):  # in the random order, so that it decides where nothing else does
        if len(members) == len(uploads):
            products = _products(uploads)[members][:, members]  # sooner sorted than the uploads
        else:
            products = _products(uploads[members])
        out[members] = _settled(products, among[members], limit, trust[members])
    return out


def _settled(products: Tensor, among: Tensor, limit: Tensor, trust: Tensor) -> Tensor:
    """`dependent` within one group, whose rows are in the order that decides between equals, from inner products."""
    products = torch.where(among[:, None] & among[None, :], products, 0.0).nan_to_num(torch.inf).abs()
    conflict = (products > limit).fill_diagonal_(False)
    conflict = conflict | conflict.T  # a product may be rounded differently on the other side
    if not conflict.is_cuda and not bool(conflict.any()):
        return torch.zeros_like(among)
    leaning = torch.where(conflict, products, 0.0).sum(1)
    leaning = (100 * leaning / leaning.amax()).round()  # of equal uploads products may be rounded differently
    order = torch.argsort(leaning, descending=True, stable=True)
    order = order[torch.argsort(conflict.sum(1)[order], stable=True)]
    order = order[torch.argsort((trust / STEP).round()[order], descending=True, stable=True)]
    place = torch.empty_like(order).scatter_(0, order, counting(len(order), order.device))
    out = torch.zeros_like(among)
    for _ in range(TURNS):
        rivals = torch.where(conflict, place[None, :], len(place)).amin(1)
        lost = (conflict & (place < rivals)[None, :]).any(1)  # next to one that comes before all its rivals
        out = out | lost
        conflict = conflict & ~lost[:, None] & ~lost[None, :]
    return out | conflict.any(1)


def _products(uploads: Tensor) -> Tensor:
    """(n, n) the inner products. Of many uploads those of one half with the other are made once, not twice."""
    half = len(uploads) // 2
    if half < FEW:
        return uploads @ uploads.T
    products = uploads.new_empty(len(uploads), len(uploads))
    torch.mm(uploads[:half], uploads[:half].T, out=products[:half, :half])
    torch.mm(uploads[half:], uploads.T, out=products[half:])
    products[:half, half:] = products[half:, :half].T
    return products
