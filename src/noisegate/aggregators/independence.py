"""Which uploads of a round depend on one another, and which of these to leave out.

Honest uploads have independent noise, so all that two of them can share is their signals.
"""

import torch
from scipy import stats
from torch import Tensor

GROUP = 512
"""Workers that are compared with one another. More are split at random, so that time and memory stay linear in them."""

TURNS = 4
"""Times that conflicts are settled. Nearly always the first settles all; what is left then is left out."""


def largest_product(noise_std: float, longest: float, signals: Tensor, chance: float, peers: int) -> Tensor:
    """() what the inner products of an honest upload with all its honest peers stay below, but for this chance.

    longest: of an upload that counts. signals: () most that the inner product of two honest signals can be; its root
    bounds the length of one.
    Given the one upload u, the noise of the other adds a normal variable of deviation s |u|; the signal of the other,
    in its product with the noise in u, one of at most s times that signal's length.
    """
    width = noise_std * float(stats.norm.isf(chance / (4 * max(1, peers))))
    return signals + width * (longest + signals.sqrt())


def dependent(uploads: Tensor, among: Tensor, limit: Tensor, ties: Tensor) -> Tensor:
    """(n,) whom to leave out so that no two of the rest have an inner product beyond `limit`, of those in `among`.

    Of workers who all conflict with one another, as copies do, the one stays that the others lean on most: whoever is
    imitated agrees more with the imitators than they do among themselves. In general those with the fewest conflicts
    stay first, so that a single upload made of many others' goes rather than they. Equal ones are ranked by `ties`.
    """
    out = torch.zeros_like(among)
    for members in ties.split(GROUP):
        here = uploads if len(members) == len(uploads) else uploads[members]
        order = members if len(members) == len(uploads) else None
        lost = _settled(here, among if order is not None else among[members], limit, order)
        if order is not None:
            return lost
        out[members] = lost
    return out


def _settled(uploads: Tensor, among: Tensor, limit: Tensor, order: Tensor | None) -> Tensor:
    """`dependent` within one group; order: (n,) the random order, if the rows are not in it already."""
    products = torch.where(among[:, None] & among[None, :], uploads @ uploads.T, 0.0).nan_to_num(torch.inf).abs()
    conflict = (products > limit).fill_diagonal_(False)
    conflict = conflict | conflict.T  # a product may be rounded differently on the other side
    if not uploads.is_cuda and not bool(conflict.any()):
        return torch.zeros_like(among)
    degree = conflict.sum(1)
    leaning = torch.where(conflict, products, 0.0).sum(1)
    order = torch.arange(len(among), device=among.device) if order is None else order
    order = order[torch.argsort(leaning[order], descending=True, stable=True)]
    order = order[torch.argsort(degree[order], stable=True)]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    out = torch.zeros_like(among)
    for _ in range(TURNS):
        rivals = torch.where(conflict, place[None, :], len(place)).amin(1)
        lost = (conflict & (place < rivals)[None, :]).any(1)  # next to one that comes before all its rivals
        out = out | lost
        conflict = conflict & ~lost[:, None] & ~lost[None, :]
    return out | conflict.any(1)
