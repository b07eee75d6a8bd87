"""The worker of ordinary DP-SGD (Abadi et al., 2016), for comparison."""

from dataclasses import dataclass

from torch import Tensor

from noisegate import checks
from noisegate.workers.normalized import MARGIN
from noisegate.workers.private import Private


@dataclass(frozen=True)
class Clipped(Private):
    """Shorten each example's gradient to `threshold` where it is longer; noise grows with the threshold.

    Guarantee: before noise, adding or removing one example moves the sum by at most `threshold` in L2. A gradient
    with a NaN or inf contributes the zero vector. `momentum` mixes in the last upload before clipping, as
    `Normalized` does; ordinary DP-SGD has none.
    """

    threshold: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        checks.moderate(threshold=self.threshold)  # float32 must be able to carry what is shortened to it
        checks.fraction(momentum=self.momentum)

    @property
    def sensitivity(self) -> float:
        """The threshold: the greatest length of one contribution."""
        return self.threshold

    def weights(self, norms: Tensor) -> Tensor:
        """threshold / length, at most 1."""
        return (self.threshold * MARGIN / norms).clamp(max=1.0)
