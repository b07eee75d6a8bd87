"""Minimum diameter averaging (El Mhamdi, Guerraoui, Guirguis, Hoang and Rouault, 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from noisegate.aggregators.average import average_of
from noisegate.aggregators.distances import distances_of, ranking
from noisegate.aggregators.krum import krum_scores
from noisegate.aggregators.robust import Robust, lower, verdict_of
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict

MOST = 24
"""The largest f. With noise the search takes milliseconds, but Byzantine workers may choose their distances to make it
long: one of some 70 decisions took up to 25 ms for this f, and 280 ms for 40."""


@dataclass(frozen=True)
class MDA(Robust):
    """The mean of the n - f uploads whose largest distance from each other is smallest.

    Exact: at diameter D the dropped uploads are those that touch every pair further apart than D, f of them at most (a
    vertex cover), and the smallest such D is found by bisection. Of all sets with that diameter, the one is kept from
    which upload after upload is dropped by score, the highest first, as long as the diameter stays within reach.

    score: the sum of the squared distances to the n - f - 1 nearest others, which counts against an upload.
    On a CUDA device the host waits for the distances in every round.
    """

    needs: ClassVar[str] = f"n > 2 f and f <= {MOST}"

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2, but at most MOST."""
        return lower((workers - 1) // 2, workers * 0 + MOST)

    def __call__(self, view: ServerView, state: State) -> Verdict:
        n, f = (int(number) for number in self.counts(view))
        apart = distances_of(view)
        score = krum_scores(apart, n - f - 1)
        by_score = ranking(score, view)[:n]
        far_first = by_score.flip(0).cpu()
        dropped = smallest_diameter(apart.cpu()[far_first][:, far_first].numpy(), f)
        kept = torch.zeros_like(view.present)
        kept[by_score.flip(0)] = ~torch.from_numpy(dropped).to(kept.device)
        return verdict_of(view, average_of(view.uploads, kept), kept, score)


def smallest_diameter(apart: NDArray[np.float64], f: int) -> NDArray[np.bool_]:
    """(n,) which f of n points to drop so that those left have the smallest diameter; if in doubt, the first ones.

    Sets of points are the bits of an int.
    """
    diameters = np.unique(np.append(apart, 0.0))
    low, high = 0, len(diameters) - 1  # dropping nobody reaches the last
    everyone = (1 << len(apart)) - 1
    while low < high:
        middle = (low + high) // 2
        if coverable(_further(apart, diameters[middle]), everyone, f):
            high = middle
        else:
            low = middle + 1
    far = _further(apart, diameters[low])
    left, spare = everyone, True
    for point, others in enumerate(far):
        # Once one point could not be dropped, no point can that is close to all others.
        if (spare or others & left) and f and coverable(far, left ^ 1 << point, f - 1):
            left, f = left ^ 1 << point, f - 1
        else:
            spare = False
    return np.array([not left >> point & 1 for point in range(len(far))], bool)


def _further(apart: NDArray[np.float64], than: float) -> list[int]:
    """For each point the others that are further away."""
    packed = np.packbits(apart > than, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def coverable(far: list[int], left: int, budget: int) -> bool:
    """Whether `budget` points touch every pair of `left` that is far apart. far: for each point, those far from it."""
    while True:
        left, budget, widest = reduced(far, left, budget)
        if budget < 0 or not left:
            return budget >= 0
        if lower_bound(far, left) > budget:
            return False
        part = component(far, left)
        if part != left:  # what lies apart is covered apart
            needed = next((size for size in range(1, budget + 1) if coverable(far, part, size)), budget + 1)
            left, budget = left & ~part, budget - needed
            continue
        # Either without the one that is far from most, or without all those that are far from it.
        if coverable(far, left & ~widest, budget - 1):
            return True
        others = far[widest.bit_length() - 1] & left
        left, budget = left & ~(widest | others), budget - others.bit_count()


def reduced(far: list[int], left: int, budget: int) -> tuple[int, int, int]:
    """(points, budget, the point far from most of them) when all that is plain has been decided."""
    while True:
        rest, before, widest, most = left, budget, 0, 0
        while rest and budget >= 0:
            point = rest & -rest
            rest ^= point
            others = far[point.bit_length() - 1] & left
            degree = others.bit_count()
            if degree == 0:
                left ^= point
            elif degree == 1:  # the other one touches this pair, and maybe more
                left &= ~(point | others)
                rest &= ~others
                budget -= 1
            elif degree > budget:  # not to take it would mean to take all the others
                left ^= point
                budget -= 1
            elif degree > most:
                widest, most = point, degree
        if budget == before or budget < 0:
            return left, budget, widest


def lower_bound(far: list[int], left: int) -> int:
    """So many points at least: of a group in which all are far from each other, all but one."""
    needed = 0
    while left:
        group = left & -left
        left ^= group
        friends = far[group.bit_length() - 1] & left
        while friends:
            point = friends & -friends
            left ^= point
            friends &= far[point.bit_length() - 1] & left
            needed += 1
    return needed


def component(far: list[int], left: int) -> int:
    """The points of `left` that can be reached from its first one by steps between points that are far apart."""
    part, new = 0, left & -left
    while new:
        part |= new
        point = new & -new
        new = (new ^ point) | far[point.bit_length() - 1] & left & ~part
    return part
