"""What an honest worker does with its examples before anything leaves it."""

from collections.abc import Callable
from typing import Any

from noisegate.workers.class_weights import WORKS, ignored_weights
from noisegate.workers.clipped import Clipped
from noisegate.workers.closed_form import ClosedForm
from noisegate.workers.company import Company
from noisegate.workers.direct import Direct, Sums, contributions, per_example_gradients
from noisegate.workers.momentum import ClippedMomentum
from noisegate.workers.normalized import Normalized
from noisegate.workers.owners import FAST
from noisegate.workers.private import Private
from noisegate.workers.signs import MaSign, SignGaussian, SignRandomized
from noisegate.workers.sums import choose_sums, contributions_of, fill_with_noise, mean_gradient, rounded_sensitivity

WORKERS: dict[str, Callable[..., Any]] = {
    "normalized": Normalized,
    "clipped": Clipped,
    "clipped-momentum": ClippedMomentum,
    "sign-gaussian": SignGaussian,
    "sign-randomized": SignRandomized,
    "ma-sign": MaSign,
}

__all__ = [
    "FAST",
    "WORKERS",
    "WORKS",
    "Clipped",
    "ClippedMomentum",
    "ClosedForm",
    "Company",
    "Direct",
    "MaSign",
    "Normalized",
    "Private",
    "SignGaussian",
    "SignRandomized",
    "Sums",
    "choose_sums",
    "contributions",
    "contributions_of",
    "fill_with_noise",
    "ignored_weights",
    "mean_gradient",
    "per_example_gradients",
    "rounded_sensitivity",
]
