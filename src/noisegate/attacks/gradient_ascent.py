"""Honest computation of the wrong problem: gradient ascent, run as the protocol wants it."""

from collections.abc import Hashable
from dataclasses import dataclass

from noisegate.attacks.honest import Honest


@dataclass(frozen=True)
class GradientAscent(Honest):
    """Run the whole protocol on the negated loss, with own data, momentum and noise.

    Each example's gradient is -g, is mixed with the worker's last upload, bounded, and hidden in noise, as always. It
    differs from the negative of an honest upload, in which the momentum would be turned around a second time.
    """

    def ascends(self, phase: Hashable) -> bool:
        """Ascends."""
        return True
