"""A little is enough (Baruch, Baruch and Goldberg, 2019)."""

import math
from dataclasses import dataclass

from scipy.special import ndtri
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView

NO_SOLUTION = 1.5
"""The deviation used where the attack's own formula has no solution, as with a Byzantine majority."""


def largest_deviation(honest: int, byzantine: int) -> float:
    """The attack's own z: Phi(z) = (n - M - s) / (n - M) with s = floor(n/2 + 1) - M supporters to be won.

    >>> round(largest_deviation(honest=40, byzantine=10), 3)
    0.253
    >>> largest_deviation(honest=20, byzantine=30)
    1.5
    """
    supporters = math.floor((honest + byzantine) / 2 + 1) - byzantine
    share = (honest - supporters) / honest
    return float(ndtri(share)) if 0 < share < 1 else NO_SOLUTION


@dataclass(frozen=True)
class ALittle(Forger):
    """Send mean - z std of the honest uploads, coordinate by coordinate.

    deviation: z; None takes the attack's own formula. With few Byzantine workers it is not positive, and the attack
        harmless.
    """

    deviation: float | None = None

    def __post_init__(self) -> None:
        if self.deviation is not None:
            checks.positive(deviation=self.deviation)

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest
        z = self.deviation if self.deviation is not None else largest_deviation(len(honest), view.workers)
        return (honest.mean(0) - z * honest.std(0, correction=0)).expand(view.workers, -1)
