"""Distances between uploads, from one matrix of inner products: no pair of uploads is ever subtracted."""

import torch
from torch import Tensor

from noisegate.vectors import counting
from noisegate.views import ServerView

LONGEST = 1e18
"""Lengths beyond this are taken for it, so that no square overflows. Between two such uploads only the angle counts."""

AT_ONCE = 4096
"""How many coordinates are multiplied and added in float32 before the sum goes on in float64. They fit a cache, and the
sum rounds less."""

ROUNDING = 2e-6
"""Squared distances below this share of the squared lengths are taken for rounding, and so for 0."""


def shortening(norms: Tensor) -> Tensor:
    """(n,) the factors that shorten uploads of these lengths to LONGEST; 1 for all that are not longer."""
    return LONGEST / norms.clamp(min=LONGEST)


def inner_products(uploads: Tensor, norms: Tensor) -> Tensor:
    """(n, n) in float64, of uploads shortened to LONGEST."""
    factors = shortening(norms)[:, None] if uploads.is_cuda or bool((norms > LONGEST).any()) else None
    products = uploads.new_zeros(len(uploads), len(uploads), dtype=torch.float64)
    group = max(50, -(-len(uploads) // 4))
    for part in uploads.split(AT_ONCE, dim=1):
        block = part if factors is None else part * factors
        for first in range(0, len(block), group):  # with those before them: the others are the same products
            products[first : first + group, : first + group] += block[first : first + group] @ block[: first + group].T
    for first in range(group, len(products), group):
        products[:first, first : first + group] = products[first : first + group, :first].T
    return (products + products.T) / 2  # a product may be rounded differently on the other side


def squared_distances(products: Tensor) -> Tensor:
    """(n, n) in float64, from inner products. Zero on the diagonal."""
    squares = products.diagonal()
    both = squares[:, None] + squares[None, :]
    apart = both - 2 * products
    apart = torch.where(apart < ROUNDING * both, 0.0, apart)
    return apart.fill_diagonal_(0.0)


def distances_of(view: ServerView) -> Tensor:
    """(n, n) squared distances in float64; a malformed or missing upload is infinitely far from all, itself included.

    Products are rounded differently in different places. So equal uploads get the distances of the first of them, by
    `ties`.
    """
    apart = squared_distances(inner_products(view.uploads, view.norms))
    n = len(apart)
    place = torch.empty_like(view.ties).scatter_(0, view.ties, counting(n, view.ties.device))
    first = view.ties[torch.where(apart == 0, place, n).amin(1)]
    absent = ~view.present
    return apart[first][:, first].masked_fill_(absent[:, None] | absent[None, :], torch.inf)


def ranking(score: Tensor, view: ServerView) -> Tensor:
    """(n,) the workers from the lowest score to the highest, malformed and missing ones last; equal ones by `ties`."""
    score = score.masked_fill(~view.present, torch.inf)
    return view.ties[torch.argsort(score[view.ties], stable=True)]


def lowest(score: Tensor, view: ServerView, count: int | Tensor) -> Tensor:
    """(n,) the `count` well-formed uploads with the lowest score; equal ones by `ties`, never by position."""
    order = ranking(score, view)
    place = torch.empty_like(order).scatter_(0, order, counting(len(order), order.device))
    return (place < count) & view.present
