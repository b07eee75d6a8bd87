"""An accountant of its own, to check the product's: densities on a grid, losses rounded, composed by FFT. numpy only.

Rounding moves the loss of a round by a random amount of mean 0 (the mean is corrected), of known variance and largest
size. So by Bernstein's inequality it moves the sum over all rounds by more than `error` with probability RARE at most.
A density is taken for constant between two points, which changes probabilities by less than 2e-7 of themselves in a
round, and by less than SLACK in 5,000. So the true epsilon at delta lies between `low` and `high`.
"""

from dataclasses import dataclass

import numpy as np

RARE = 1e-9
"""What the stated error may be exceeded with; negligible beside the deltas that are asked for."""

SLACK = 1e-3
POINTS = 160_001
REACH = 13.0
"""Standard deviations of noise that are looked at: what lies beyond has a probability below 1e-37."""


@dataclass(frozen=True)
class Round:
    """The loss log(p / q) where p and q are densities on the points `x`, seen under p."""

    x: np.ndarray
    p: np.ndarray
    q: np.ndarray

    def reversed(self) -> "Round":
        return Round(self.x, self.q, self.p)


def normal(x, mean, sigma):
    return np.exp(-(((x - mean) / sigma) ** 2) / 2) / (sigma * np.sqrt(2 * np.pi))


def points(low: float, high: float, sigma: float) -> np.ndarray:
    return np.linspace(low - REACH * sigma, high + REACH * sigma, POINTS)


def poisson_gaussian(rate: float, sigma: float, group: int = 1) -> Round:
    """Each of `group` examples is drawn with this rate and moves the sum by 1; against none of them."""
    from math import comb

    x = points(0.0, group, sigma)
    chances = [comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(group + 1)]
    return Round(x, sum(chance * normal(x, k, sigma) for k, chance in enumerate(chances)), normal(x, 0.0, sigma))


def bounds(rounds: list[tuple[Round, int]], delta: float, guess: float) -> tuple[float, float]:
    """(low, high) around the true epsilon of so many of each round. guess: about what is expected, for the grid."""
    step = guess / 100_000
    reach = max(8 * guess, *(1.05 * np.abs(_losses(one)).max() for one, _ in rounds))
    size = 2 ** int(np.ceil(np.log2(2 * reach / step)))
    spectrum, shift, variance, largest = 1.0, 0.0, 0.0, 0.0
    for one, count in rounds:
        loss, mass = _losses(one), one.p * (one.x[1] - one.x[0])
        assert abs(mass.sum() - 1) < 1e-9
        index = np.rint(loss / step).astype(np.int64)
        on_grid = np.bincount(index % size, mass, size)
        spectrum = spectrum * np.fft.rfft(on_grid) ** count
        shift += count * float((mass * (loss - step * index)).sum())
        jumps = np.abs(np.diff(loss, prepend=loss[0], append=loss[-1]))
        moved = (step + np.maximum(jumps[1:], jumps[:-1])) / 2
        variance += count * float((mass * moved**2).sum())
        largest = max(largest, float(moved.max()))
    composed = np.fft.fftshift(np.fft.irfft(spectrum, size))
    grid = step * (np.arange(size) - size // 2) + shift
    edge = size // 50
    assert composed[:edge].sum() + composed[-edge:].sum() < RARE, "the grid is too short: losses came around"
    rare = float(np.log(2 / RARE))
    error = np.sqrt(2 * variance * rare) + largest * rare / 3 + step
    low = _epsilon(grid, composed, delta * (1 + SLACK) + RARE) - error
    return low, _epsilon(grid, composed, delta * (1 - SLACK) - RARE) + error


def worse_of_both(rounds: list[tuple[Round, int]], delta: float, guess: float) -> tuple[float, float]:
    """The example is removed, or it is added: whichever tells more."""
    one, other = (bounds(some, delta, guess) for some in (rounds, [(r.reversed(), n) for r, n in rounds]))
    return max(one[0], other[0]), max(one[1], other[1])


def _losses(one: Round) -> np.ndarray:
    """Where a density is too small for floating point, the loss is that of its neighbor: nothing happens there."""
    known = (one.p > 1e-290) & (one.q > 1e-290)
    loss = np.log(one.p[known] / one.q[known])
    return np.interp(one.x, one.x[known], loss)


def _epsilon(grid: np.ndarray, mass: np.ndarray, delta: float) -> float:
    """The smallest point of the grid, 0 or above, at which delta(epsilon) is small enough."""
    part = grid >= -1e-12
    losses, mass = grid[part], np.clip(mass[part], 0.0, None)
    above = np.cumsum(mass[::-1])[::-1]
    below = np.cumsum((mass * np.exp(-losses))[::-1])[::-1]
    deltas = above - np.exp(losses) * below
    return float(losses[np.argmax(deltas <= delta)])
