"""The paper's worker: every example contributes a vector of length one."""

from dataclasses import dataclass

from torch import Tensor

from noisegate import checks
from noisegate.workers.private import Private

MARGIN = 1 - 2**-14
"""Contributions are this long instead of 1, so that rounding in float32 cannot lift what one example does above 1."""


@dataclass(frozen=True)
class Normalized(Private):
    """Mix each example's gradient g with the worker's last upload m, and scale the mix to unit length (Algorithm 1).

    The mix is phi = (1 - momentum) g + momentum m. Since m was sent already, reusing it costs no privacy.

    Guarantee: before noise, adding or removing one example moves the sum by at most 1 in L2, whatever the examples'
    gradients and m are (sums of more than some 64 examples: `rounded_sensitivity`).

    ===============================  ==================================
    an example whose ...             contributes
    ===============================  ==================================
    phi is shorter than 1e-30        the zero vector
    phi has a NaN or inf             the zero vector
    anything else                    a vector of length 1 (less 2^-14)
    ===============================  ==================================
    """

    momentum: float = 0.1

    def __post_init__(self) -> None:
        checks.fraction(momentum=self.momentum)

    @property
    def sensitivity(self) -> float:
        """1: the length of one contribution."""
        return 1.0

    def weights(self, norms: Tensor) -> Tensor:
        """1 / length."""
        return MARGIN / norms
