"""Local model poisoning of Krum with full knowledge (Fang, Cao, Jia and Gong, 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.vectors import counting
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class FangKrum(Forger):
    """Send -lambda times the sign of the honest mean, with a lambda as large as Krum lets pass.

    Krum with n workers, f = M of them Byzantine, picks the upload with the smallest sum of squared distances to its
    n - M - 2 nearest others. M equal forged uploads have M - 1 others at distance 0. As their remaining n - 2M - 1
    neighbors are honest uploads h_i, and each is at least lambda |s| - max |h_i| away (s the signs, so |s| = sqrt(d)),
    a forged upload is picked only if (n - 2M - 1) (lambda |s| - max |h_i|)^2 is at most the smallest sum of an honest
    upload over honest neighbors. This bounds lambda: the authors' Theorem 1, with an upload of zeros for the model that
    was received. lambda is halved from there until a forged upload is picked. With a Byzantine majority the first is.

    halvings: how often, at most. Where even then no forged upload is picked, the last lambda is used.
    """

    halvings: int = 20

    def __post_init__(self) -> None:
        checks.count(halvings=self.halvings)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest.double()
        signs = honest.mean(0).sign()
        products = honest @ honest.T
        squares = products.diagonal()
        apart = squares[:, None] + squares[None, :] - 2 * products
        apart = apart.clamp(min=0.0).fill_diagonal_(-1.0).sort(dim=1).values[:, 1:]  # without itself
        along, length = honest @ signs, signs.abs().sum().clamp(min=1.0)

        bound = _upper_bound(squares, apart, length, view.workers)
        sizes = bound * torch.exp2(-counting(self.halvings + 1, honest.device).double())
        away = squares + 2 * sizes[:, None] * along + (sizes.square() * length)[:, None]
        size = torch.where(picked_by_krum(apart, away, view.workers), sizes, sizes[-1]).max()
        return (-size * signs).to(view.params.dtype).expand(view.workers, -1)


def _upper_bound(squares: Tensor, apart: Tensor, length: Tensor, byzantine: int) -> Tensor:
    """() where halving begins: no larger lambda is picked while n > 2M + 1. length: |s|^2."""
    honest = len(squares)
    smallest = apart[:, : max(honest - 2, 0)].sum(1).min()
    honest_neighbors = max(honest - byzantine - 1, 1)  # n - 2M - 1
    return (smallest / honest_neighbors / length).sqrt() + (squares.max() / length).sqrt()


def picked_by_krum(apart: Tensor, away: Tensor, byzantine: int) -> Tensor:
    """(k,) whether Krum would pick a forged upload, for each of k that all Byzantine workers send alike.

    apart: (H, H - 1) squared distances of each honest upload to the others, ascending.
    away: (k, H) squared distances of each forged upload to the honest ones.
    """
    neighbors = max(apart.shape[0] - 2, 0)  # n - M - 2
    # A forged upload: as many of the nearest honest ones as the other forged ones leave over.
    honest_neighbors = max(neighbors - (byzantine - 1), 0)
    of_forged = away.sort(dim=1).values[:, :honest_neighbors].sum(1)
    # An honest upload: its nearest neighbors are honest, then come the forged ones, then honest ones again. So `forged`
    # of its neighbors are forged, and the others are the nearest honest ones.
    nearer = torch.searchsorted(apart.contiguous(), away.T.contiguous())  # (H, k)
    forged = (neighbors - nearer).clamp(0, byzantine)
    sums = functional.pad(apart.cumsum(1), (1, 0))
    of_honest = sums.gather(1, neighbors - forged) + forged * away.T
    return of_forged <= of_honest.amin(0)
