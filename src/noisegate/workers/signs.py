"""Workers that send one sign per coordinate (Zhu and Ling, 2022; Ma, Sun, Wu, Liu, Chen and Dong, 2022).

Every upload has the length 1: its coordinates are 1 / sqrt(d) or -1 / sqrt(d). The sign of 0 is +, so that a worker
without examples sends as many signs as any other.

Zhu and Ling's workers keep models of their own, tied to the server's by an l1 penalty, and send the signs of the
difference. Here every worker starts a round at the server's model and takes one step, so that the difference is the
step times its mean gradient, and the penalty has nothing to tie. Each example is scaled to length 1 first.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from noisegate import checks
from noisegate.entropy import Randomness, uniforms
from noisegate.flips import flip_probability, sign_bias
from noisegate.workers.normalized import Normalized

DRAWN_AT_ONCE = 2**18
"""Coordinates whose uniforms exist at the same time. Part of what a seed means: not to be changed."""


@dataclass(frozen=True)
class SignGaussian(Normalized):
    """Add Gaussian noise to the mean of unit gradients, and send the signs of the sum (Zhu and Ling's sign-Gaussian).

    The signs are made of a mean that is private already, so the epsilon is that of the Gaussian mechanism. Their own
    noise grows with the coordinate it hides, and their claim of (epsilon, 0) is one for a coordinate in a round; here
    the noise is the same for all coordinates, and calibrated to the run.
    """

    noisy: ClassVar[bool] = False
    momentum: float = field(default=0.0, init=False)  # the last upload is signs, not a gradient

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """The signs, at length 1."""
        _send(sent, sent.ge_(0.0), sent.shape[1])

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """That of a sign that the noise decides alone."""
        return 1 / math.sqrt(d)


@dataclass(frozen=True)
class SignRandomized(Normalized):
    """Send the signs of the mean of unit gradients, each flipped at random (Zhu and Ling's sign-flipping).

    The probability of a flip comes from the run's `sigma` and the number of coordinates (`noisegate.flips`). Their
    claim of (epsilon, 0) holds for one coordinate in one round. One example can turn all d signs in every round that
    it is drawn for: what a run states is the price of that (`noisegate.privacy`).
    """

    mechanism: ClassVar[str] = "signs"
    noisy: ClassVar[bool] = False
    momentum: float = field(default=0.0, init=False)

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """The signs, some of them flipped."""
        d = sent.shape[1]
        flip = flip_probability(sigma, d)
        for part, uniform in _drawn(sent, stream()):
            _send(part, (part >= 0).logical_xor_(uniform < flip), d)

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """That of a sign whose flip is all that is random."""
        return math.sqrt((1 - sign_bias(sigma, d)) * (1 + sign_bias(sigma, d)) / d)


@dataclass(frozen=True)
class MaSign(SignRandomized):
    """Send each coordinate of the mean of unit gradients as one random bit, flipped at random (after Ma et al.).

    bound: coordinates are cut to bound / sqrt(d). A coordinate g then becomes + with probability 1/2 + g / (2 cut): a
        one-bit code that is right on average up to the cut. A small bound makes it the sign, as in `sign-randomized`.

    The published abstract settles that participants are made private one by one with the help of a shuffler, and that
    the server can bear Byzantine ones; not the code or the randomizer. The one-bit code and randomized response, a
    common pair for shuffled votes, are our choice. Nobody shuffles here: who sent which upload is known to all, so no
    privacy is gained by it, and none is claimed. The code's own randomness is not counted either: with it the two
    distributions of a bit lie between those of a flipped sign, so the price of `sign-randomized` holds.
    """

    bound: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(bound=self.bound)

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """That of a bit that is hardly anything but random."""
        return 1 / math.sqrt(d)

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """One draw for both: + with probability 1/2 + (2 p - 1) g / (2 cut), p being that of a sign that stays."""
        d = sent.shape[1]
        cut, half = self.bound / math.sqrt(d), sign_bias(sigma, d) / 2
        for part, uniform in _drawn(sent, stream()):
            tilt = part.double().nan_to_num_(0.0).div_(cut).clamp_(-1, 1).mul_(half)
            _send(part, uniform < tilt.add_(0.5), d)


def _send(part: Tensor, positive: Tensor, d: int) -> None:
    """part = 1 / sqrt(d) where `positive` is 1, -1 / sqrt(d) where it is 0."""
    unit = 1 / math.sqrt(d)
    part.copy_(positive).mul_(2 * unit).sub_(unit)


def _drawn(sent: Tensor, rng: Randomness) -> Iterator[tuple[Tensor, Tensor]]:
    """(some coordinates, a uniform for each), in fixed portions, whatever memory there is.

    In float64: a float32 would miss a probability by up to 6e-8, and where a sign hardly leans to its side that is no
    longer nothing. The accountant would not know.
    """
    for part in sent.view(-1).split(DRAWN_AT_ONCE):
        yield part, uniforms(rng, (len(part),), sent.device)
