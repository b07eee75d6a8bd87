"""Perturbations as large as the honest uploads' own spread hides (Shejwalkar and Houmansadr, 2021)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView

PERTURBATIONS = ("std", "unit", "sign")


@dataclass(frozen=True)
class Perturbed(Forger, ABC):
    """Send m + gamma p: m the mean of the honest uploads, p against it, gamma the largest that stays among them.

    The authors search for gamma by halving intervals; each of their conditions has a solution in closed form.
    """

    perturbation: Literal["std", "unit", "sign"] = "std"

    def __post_init__(self) -> None:
        checks.one_of(PERTURBATIONS, perturbation=self.perturbation)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest
        mean = honest.mean(0, dtype=torch.float64)
        away = self._away(honest, mean)
        length = away.norm()
        # Where there is no direction, as of the deviations of a single honest worker, the mean is sent.
        away = away / torch.where(length > 0, length, 1.0)
        gamma = self.reach(honest - mean, away)
        return (mean + gamma * away).to(honest.dtype).expand(view.workers, -1)

    def _away(self, honest: Tensor, mean: Tensor) -> Tensor:
        """(d,) the direction of p; gamma makes up for its length."""
        if self.perturbation == "std":
            return -honest.std(0, correction=0).double()
        return -mean.sign() if self.perturbation == "sign" else -mean

    @abstractmethod
    def reach(self, spread: Tensor, away: Tensor) -> Tensor:
        """() gamma, for the (H, d) honest uploads less their mean and the (d,) direction, of length 1 or 0."""


@dataclass(frozen=True)
class MinMax(Perturbed):
    """Send mean + gamma p, no further from any honest upload than two honest ones are from each other.

    With v_i = m - h_i and D the largest distance between two honest uploads, |m + gamma p - h_i| <= D says
    gamma^2 |p|^2 + 2 gamma <p, v_i> + |v_i|^2 - D^2 <= 0. As |v_i| <= D, it holds from 0 up to the larger root, and
    gamma is the smallest of these roots.

    perturbation: p, "std" for minus the deviation in each coordinate, "unit" for -m/|m|, "sign" for -sign(m).
    """

    def reach(self, spread: Tensor, away: Tensor) -> Tensor:
        """The smallest of the honest workers' roots."""
        products = spread @ spread.T
        squares = products.diagonal()
        widest = (squares[:, None] + squares[None, :] - 2 * products).max()
        along = -(spread @ away)  # <p, v_i>
        left = (widest - squares).clamp(min=0.0)  # below 0 only by rounding, where all are equal
        return ((along.square() + left).sqrt() - along).min()


@dataclass(frozen=True)
class MinSum(Perturbed):
    """Send mean + gamma p, whose squared distances to the honest uploads add up to what the furthest of these has.

    With v_i = m - h_i and V the sum of the |v_i|^2, the sum for m + gamma p is V + H gamma^2 |p|^2, since the v_i add
    up to 0; for an honest h_i it is V + H |v_i|^2. So gamma = max |v_i| / |p|.

    perturbation: p, "std" for minus the deviation in each coordinate, "unit" for -m/|m|, "sign" for -sign(m).
    """

    def reach(self, spread: Tensor, away: Tensor) -> Tensor:
        """The largest distance of an honest upload from their mean."""
        furthest: Tensor = spread.norm(dim=1).max()
        return furthest
