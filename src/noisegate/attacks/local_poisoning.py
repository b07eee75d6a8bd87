"""Optimized local model poisoning (Fang et al., 2020) as the paper turns it against this very protocol."""

import math
from dataclasses import dataclass

from torch import Tensor

from noisegate.attacks.honest import Forger
from noisegate.errors import SpecError
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class LocalPoisoning(Forger):
    """Send -(1 + lambda)/M times the sum of the B honest uploads, with lambda = M/sqrt(B) - 1.

    The factor is -1/sqrt(B), so the upload has the variance of the noise of a single honest one and passes the first
    stage, and the sum over everyone is -lambda times the honest sum. lambda is positive only if M > sqrt(B).
    """

    def check(self, honest: int, byzantine: int) -> None:
        """Refuse M <= sqrt(B), where the attack does not turn the sum around."""
        if 0 < byzantine <= math.sqrt(honest):
            raise SpecError(
                f"attack = 'local-poisoning': needs more Byzantine workers than the square root of the honest ones, "
                f"got {byzantine} against {honest} (square root {math.sqrt(honest):.2f}); raise byzantine"
            )

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest
        return (honest.sum(0) / -math.sqrt(len(honest))).expand(view.workers, -1)
