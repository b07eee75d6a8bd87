"""What an honest worker does with its examples before anything leaves it."""

from collections.abc import Callable
from typing import Any

from noisegate.workers.clipped import Clipped
from noisegate.workers.direct import contributions, direct_sums, per_example_gradients
from noisegate.workers.normalized import Normalized
from noisegate.workers.sums import Sums, add_noise, choose_sums, rounded_sensitivity

WORKERS: dict[str, Callable[..., Any]] = {"normalized": Normalized, "clipped": Clipped}

__all__ = [
    "WORKERS",
    "Clipped",
    "Normalized",
    "Sums",
    "add_noise",
    "choose_sums",
    "contributions",
    "direct_sums",
    "per_example_gradients",
    "rounded_sensitivity",
]
