"""Randomness for uploads that leave a machine: the operating system's entropy, and noise that no upload gives away.

Why not torch's noise. Its float32 normals on a CPU are made of 24-bit uniforms, so they lie on a sparse grid. An upload
minus a candidate's contribution either lies on that grid or does not, which tells whether the candidate was drawn
(`noisegate audit` has the attack; Mironov, 2012, found its kind). And its generators are not cryptographic: an observer
of enough output knows the state.

What is done instead (`add_noise`).

1. Bits. On a CPU they come from OpenSSL's generator (`ssl.RAND_bytes`, AES-256 in counter mode, NIST SP 800-90A, seeded
   and reseeded by the operating system). On a CUDA device they come from ChaCha20 (RFC 8439) under a key of the
   operating system that is kept in the device's memory only. Nothing is kept from which they could be made again.
2. Noise. 63 bits give a length, 64 give an angle, one a sign (Box and Muller, 1958), all in float64. So the noise
   reaches 9.4 standard deviations, and what is missing beyond has probability 5e-20.
3. Grid. The sum in float64 is rounded to a multiple of `grid_of(std)`, a power of two near std / 4,096. Every upload of
   every data set lies on that one public grid. To round is to process what is private already, so it costs nothing,
   and the error it adds is at most 5e-9 of the noise's variance.

How exact it is. At every length that the noise can have, a cell of the grid holds at least 2^33 of its angles. So up to
7 standard deviations the probability of a cell misses that of a real Gaussian by less than one part in 2^32. Beyond,
lengths are sparser: up to 8.4 it misses by one part in 2,000, and 8.4 is exceeded with probability 5e-17. `slack` says
what that can cost over all numbers of a run. (Canonne, Kamath and Steinke, 2020, sample a discrete Gaussian exactly
instead. It takes a loop of rejections for every number, and time that depends on what was drawn.)
"""

import functools
import math
import os
import ssl
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from noisegate import kernels
from noisegate.chacha import KEY_WORDS, words
from noisegate.errors import PrivacyError

GRID_BITS = 12
"""The grid is the largest power of two that is at most the noise's standard deviation over 2 to this power."""

PAIRS_AT_ONCE = 2**14
"""Pairs of normal numbers that are made at the same time on a CPU: as much as its caches hold."""

LARGEST_LOG = 63 * math.log(2) + 2.0**-46
"""The logarithm of 2^63, and a hair more, so that rounding leaves no length below 0."""

RATIO_ERROR = 2.0**-32
"""By how much the logarithm of a cell's probability may differ from that under a real Gaussian, up to 7 deviations."""

FAR_ERROR = 1.4e-15
"""By how much the probability of all cells beyond 7 standard deviations may differ: 2.6e-12 / 2,000 + 5e-17."""

BATCH, NOISE, PUBLISH = "batch", "noise", "publish"
PRIVATE = (BATCH, NOISE, PUBLISH)
"""What a worker draws that must stay secret: which examples, the noise, and what its `publish` needs."""


def grid_of(std: float) -> float:
    """The spacing of the public grid that uploads with noise of this standard deviation are rounded to."""
    return 2.0 ** math.floor(math.log2(std) - GRID_BITS)


def slack(numbers: int, tail: float = 1e-12) -> tuple[float, float]:
    """What noise by `add_noise` in place of a real Gaussian can add at most to (epsilon, delta).

    numbers: how many leave a worker in all. The privacy loss of each differs from the ideal one by at most twice
    RATIO_ERROR, and not in a fixed direction, so that the sum is bounded by Azuma's inequality but for probability
    `tail`, with a drift of at most the square of that for each number beside it.
    """
    one = 2 * RATIO_ERROR
    return one * math.sqrt(2 * numbers * math.log(1 / tail)) + numbers * one * one, tail + numbers * FAR_ERROR


@dataclass(eq=False)
class Secret:
    """The randomness of one secret run on one device. Nothing of it can be saved, and two never draw the same.

    A CUDA device draws by (key, round, purpose, call, place), so that a round which has to be played again there draws
    what it drew before. On a CPU no round is played twice.
    """

    device: torch.device
    key: Tensor | None = field(default=None, repr=False)
    round: Tensor | None = field(default=None, repr=False)
    calls: dict[int, int] = field(default_factory=dict, repr=False)
    """How often numbers were drawn for each purpose in this round."""
    begun: int = field(default=-1, repr=False)
    """The last round that was begun; -1 for none."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while a call is counted: two threads may not draw by one number."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            own = np.frombuffer(bytearray(os.urandom(4 * KEY_WORDS)), dtype=np.int32)
            self.key = torch.from_numpy(own).to(self.device)
            self.round = torch.zeros(1, dtype=torch.int32, device=self.device)

    def begin(self, t: int, again: bool = False) -> None:
        """What is drawn from now on is for round `t`, a later one than before.

        again: it may be one that was begun already. With a key that repeats what was drawn for it: two uploads of one
        round would then have the same noise, and their difference none. For a round that left no trace, and only that.
        """
        if type(t) is not int or t < 0:
            raise PrivacyError(f"round = {t!r}: must be a whole number, 0 or more")
        if t <= self.begun and not again:
            raise PrivacyError(
                f"round = {t}: numbers were drawn for round {self.begun} already, and none are drawn twice; send the "
                "upload of that round again, or go on to a later one"
            )
        self.begun = max(t, self.begun)
        self.calls.clear()
        if self.round is not None:
            self.round.fill_(t)

    def source(self, what: str) -> "Source":
        """Where the numbers for one of `PRIVATE` come from, in the round that was begun."""
        return Source(self, PRIVATE.index(what))

    def __reduce__(self) -> str:
        raise TypeError("a secret run's randomness cannot be saved or sent")


@dataclass(eq=False)
class Source:
    """Secret numbers for one purpose in one round."""

    secret: Secret
    purpose: int

    def uniform(self, *shape: int) -> Tensor:
        """float64 numbers in [0, 1), of 53 random bits each."""
        bits = self._bits(math.prod(shape)).reshape(shape)
        return (bits >> 11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)

    def add_noise(self, sums: Tensor, std: float) -> None:
        """sums = the multiple of `grid_of(std)` nearest to sums + N(0, std^2), for every number of (n, d), in place."""
        flat = sums.view(-1)
        if self.secret.key is None:
            _add_noise(flat, std)
        elif kernels.fused(flat):
            from noisegate.kernels.noise import add_noise

            add_noise(flat, constants(std, flat.device), self._stream())
        else:
            pairs = joined(words(*self._stream(), -(-len(flat) // 8)))
            noise = normals(pairs[0::2], pairs[1::2]).flatten()[: len(flat)]
            size, _, inverse, grid = constants(std, flat.device)
            flat.copy_(noise.mul_(size).add_(flat.double().mul_(inverse)).round_().mul_(grid))

    def _bits(self, count: int) -> Tensor:
        """(count,) int64: random bits."""
        if self.secret.key is None:
            return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * max(1, count))), dtype=torch.int64)[:count]
        if kernels.available():
            from noisegate.kernels.noise import bits

            return bits(count, self._stream())
        return joined(words(*self._stream(), -(-max(1, count) // 8))).flatten()[:count]

    def _stream(self) -> tuple[Tensor, Tensor, int, int]:
        """(key, round, purpose, call): no two calls of a run share all four, unless a round begins again."""
        if self.secret.key is None or self.secret.round is None:
            raise TypeError("a CPU's bits have no key")
        with self.secret.lock:
            call = self.secret.calls.get(self.purpose, 0)
            self.secret.calls[self.purpose] = call + 1
        return self.secret.key, self.secret.round, self.purpose, call


Randomness = torch.Generator | Source
"""Where numbers come from: a generator that can be set again, for research, or a secret source."""


def uniforms(rng: Randomness, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float64 numbers in [0, 1) on `device`."""
    if isinstance(rng, Source):
        return rng.uniform(*shape)
    return torch.rand(shape, generator=rng, dtype=torch.float64, device=device)


def joined(words_of: Tensor) -> Tensor:
    """(8, blocks) int64, each of two of the (blocks, 16) words; the low one first."""
    low, high = words_of.T.reshape(8, 2, -1).unbind(1)
    return low | (high << 32)


def normals(radius: Tensor, angle: Tensor) -> Tensor:
    """(2 k, blocks) normal numbers in float64 from (k, blocks) random bits each: all first ones, then all second ones.

    The sign of `radius` turns both, so that an angle of half the circle is enough.
    """
    length = ((radius.double().abs() + 0.5) * 2.0**-63).log().mul(-2.0).sqrt() * torch.where(radius < 0, -1.0, 1.0)
    turn = angle.double() * (math.pi * 2.0**-64)
    return torch.cat([length * turn.sin(), length * turn.cos()])


@functools.lru_cache(maxsize=64)
def constants(std: float, device: torch.device) -> Tensor:
    """(4,) float64: noise over grid, pi / 2^64, 1 / grid, grid. One tensor for all who ask: nobody may write to it."""
    grid = grid_of(std)
    return torch.tensor([std / grid, math.pi * 2.0**-64, 1 / grid, grid], dtype=torch.float64, device=device)


def _add_noise(flat: Tensor, std: float) -> None:
    """`Source.add_noise` on a CPU: `normals` by numpy, whose logarithm and tangent are several times faster there.

    With t the tangent of the angle, cos = 1 / sqrt(1 + t^2) and sin = t cos, so that one square root serves both.
    """
    grid = grid_of(std)
    pairs = min(PAIRS_AT_ONCE, -(-len(flat) // 2))
    length, tangent, both, sums = np.empty(pairs), np.empty(pairs), np.empty(2 * pairs), np.empty(2 * pairs)
    first, second = both[:pairs], both[pairs:]
    sums_of, both_of = torch.from_numpy(sums), torch.from_numpy(both)
    for part in flat.split(2 * pairs):
        bits = np.frombuffer(ssl.RAND_bytes(16 * pairs), dtype=np.int64)
        np.multiply(bits[:pairs], math.pi * 2.0**-64, out=tangent)
        np.tan(tangent, out=tangent)
        np.copyto(second, bits[pairs:], casting="same_kind")
        np.abs(second, out=length)
        length += 0.5
        np.log(length, out=length)
        np.subtract(LARGEST_LOG, length, out=length)
        length *= 2 * (std / grid) ** 2
        np.square(tangent, out=first)
        first += 1.0
        length /= first
        np.sqrt(length, out=length)
        np.copysign(length, second, out=second)
        np.multiply(tangent, second, out=first)
        noisy = both[: len(part)]
        own = sums[: len(part)]
        sums_of[: len(part)].copy_(part)
        own *= 1 / grid
        noisy += own
        np.rint(noisy, out=noisy)
        noisy *= grid
        part.copy_(both_of[: len(part)])
