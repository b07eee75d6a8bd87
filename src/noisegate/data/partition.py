"""How the pool of training examples is dealt to the workers.

Every function returns one index tensor per worker. The tensors are disjoint, none is empty, and together they
are the pool: no example is dropped and none is given twice.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from noisegate import checks
from noisegate.errors import DataError

# A draw costs microseconds, and settings that fail this often will practically always fail.
REDRAWS = 200


def iid(y: Tensor, workers: int, rng: torch.Generator) -> list[Tensor]:
    """Shuffle and deal out evenly: sizes differ by at most one."""
    _check(y, workers, smallest=1)
    return list(torch.tensor_split(torch.randperm(len(y), generator=rng), workers))


def non_iid(y: Tensor, workers: int, rng: torch.Generator) -> list[Tensor]:
    """The paper's GetNonIID (its appendix): random shares of every class, then cuts of equal size.

    Each class is spread over the workers in proportion to normalized uniform numbers; the workers' parts are
    laid end to end and the line is cut into equal pieces, so a worker's classes are uneven but its size is
    not. Sizes differ by at most one: where the printed cut length, the size over the workers rounded up,
    would leave less (or nothing) to the last workers, the remainder is dealt to the first ones instead.
    """
    _check(y, workers, smallest=1)
    parts: list[list[Tensor]] = [[] for _ in range(workers)]
    for members in _shuffled_classes(y, rng):
        shares = torch.rand(workers, generator=rng, dtype=torch.float64)
        for part, piece in zip(parts, _cut(members, (shares / shares.sum()).numpy()), strict=True):
            part.append(piece)
    line = torch.cat(list(itertools.chain.from_iterable(parts)))
    return list(torch.tensor_split(line, workers))


def dirichlet(y: Tensor, workers: int, alpha: float, rng: torch.Generator, smallest: int = 16) -> list[Tensor]:
    """Spread each class over the workers by shares from Dirichlet(alpha): the lower alpha, the more uneven.

    Every worker gets at least `smallest` examples (by default the usual batch size: who holds less cannot
    fill a batch). Shares are redrawn until that holds, at most 200 times; then it is an error.
    """
    checks.positive(alpha=alpha)
    checks.count(smallest=smallest)
    _check(y, workers, smallest)
    if alpha > 1e6:
        raise checks.refuse("alpha", alpha, "must be at most 1e6; for an even spread deal i.i.d. instead")
    # One draw of `rng` seeds numpy's generator: torch has no public Dirichlet that takes a generator.
    shares_rng = np.random.default_rng(int(torch.randint(2**62, (), generator=rng)))
    classes = _shuffled_classes(y, rng)
    for _ in range(REDRAWS):
        pieces = [_cut(members, shares_rng.dirichlet(np.full(workers, alpha))) for members in classes]
        dealt = [torch.cat(mine) for mine in zip(*pieces, strict=True)]
        if min(map(len, dealt)) >= smallest:
            return dealt
    raise DataError(
        f"alpha = {alpha}: after {REDRAWS} draws some of the {workers} workers still has fewer than "
        f"{smallest} of the {len(y)} examples; raise alpha or lower workers"
    )


def given(owner: Tensor, workers: int) -> list[Tensor]:
    """By the workers that hold the examples, in the order of their numbers. owner: (N,) the worker of each example."""
    checks.count(workers=workers)
    found = owner.unique().tolist()
    if len(found) != workers:
        raise DataError(
            f"workers = {workers}: the data say who holds what, and name {len(found)} workers; give that number, or "
            "leave workers out"
        )
    return [torch.nonzero(owner == number).flatten() for number in found]


def _check(y: Tensor, workers: int, smallest: int) -> None:
    checks.count(workers=workers)
    if y.ndim != 1:
        raise DataError(f"labels must have shape (N,), got {tuple(y.shape)}")
    if len(y) < workers * smallest:
        raise DataError(
            f"{workers} workers need at least {workers * smallest} examples ({smallest} each), but the pool "
            f"has {len(y)}; lower workers or add examples"
        )


def _shuffled_classes(y: Tensor, rng: torch.Generator) -> list[Tensor]:
    """The indices of each class that occurs, in label order, shuffled within the class."""
    groups = [torch.nonzero(y == label).flatten() for label in torch.unique(y)]
    return [members[torch.randperm(len(members), generator=rng)] for members in groups]


def _cut(members: Tensor, shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[Tensor, ...]:
    """`members` in consecutive pieces whose sizes follow `shares`, each within one of its exact share."""
    # The last bound is the end by construction, so a sum of shares that is off by rounding loses nobody.
    bounds = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int).clip(0, len(members))
    return torch.tensor_split(members, bounds.tolist())
