"""The worker of Guerraoui, Gupta, Pinot, Rouault and Stephan (2021): DP-SGD whose private gradients have momentum."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from noisegate import checks
from noisegate.entropy import Randomness
from noisegate.workers.clipped import Clipped


@dataclass(frozen=True)
class ClippedMomentum(Clipped):
    """Clip each example's gradient, add noise to the mean, and send a moving average of these private gradients.

    carry: the share of the last upload in the next; upload = carry last + (1 - carry) fresh, the first last being zero.

    An average of what was made private already costs no privacy: the epsilon is that of `clipped`. It lowers the noise
    in an upload by sqrt((1 - carry) / (1 + carry)) once some 1 / (1 - carry) rounds are over; until then uploads are
    shorter.

    Theirs: clipping, Gaussian noise at every worker, a robust aggregator at the server, and the finding that the two go
    together only with settings chosen for it. Which settings we know from the code of their first paper on the matter
    alone: it clips the mean of a batch of up to 500 examples to 0.01, and has a momentum of 0.99, at the server, for
    1,000 rounds.
    Ours: each example is clipped, for that is what the accountant prices; the momentum lies at the workers, as in
    El Mhamdi, Guerraoui and Rouault (2021), where it lowers the noise that the aggregator has to see through; the
    values.
    """

    fresh: ClassVar[bool] = False
    momentum: float = field(default=0.0, init=False)  # none before clipping
    carry: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(carry=self.carry)

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """The moving average, in the place of the fresh gradients."""
        sent.mul_(1 - self.carry).add_(last, alpha=self.carry)

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """That of a moving average that has run for long."""
        return added * math.sqrt((1 - self.carry) / (1 + self.carry))
