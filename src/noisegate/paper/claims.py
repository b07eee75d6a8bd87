"""The paper's seven claims, each with a verdict computed from runs."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from noisegate import paper
from noisegate.paper import SEEDS, label
from noisegate.paper.outcomes import Outcome
from noisegate.runs.spec import Spec

Found = Mapping[str, Sequence[Outcome]]
"""Outcomes by experiment."""

USUAL = 0.5
"""The paper calls a smaller epsilon extreme."""

POINTS = 0.02
"""How far two accuracies may differ and still be called the same."""


@dataclass(frozen=True)
class Claim:
    """A claim and what runs say.

    verdict: a part that fails is enough for "does not hold"; if none does and runs are missing, it is "open".
    """

    number: int
    text: str
    verdict: Literal["holds", "does not hold", "open"]
    why: str


@dataclass(frozen=True)
class Known:
    """What runs say of the parts of a claim.

    losses: (how far each part that was run is off, what it is). of: the number of all parts.
    allowed: how far off a part may be. words: what the worst part says, with its points and its name.
    """

    losses: Sequence[tuple[float, str]]
    of: int
    words: str
    allowed: float = POINTS

    @property
    def worst(self) -> tuple[float, str]:
        """The part that is furthest off."""
        return max(self.losses, key=lambda pair: pair[0])


def claims(found: Found) -> list[Claim]:
    """All seven."""
    return [_claim(number, text, judge(found)) for number, (text, judge) in enumerate(CLAIMS, 1)]


def _claim(number: int, text: str, known: Known) -> Claim:
    if not known.losses:
        return Claim(number, text, "open", f"none of its {known.of} parts was run, with its reference and three seeds")
    loss, what = known.worst
    why, fails = known.words.format(points=_points(loss), lead=_points(-loss), what=what), loss > known.allowed
    if len(known.losses) < known.of:
        why = f"of {known.of} parts {len(known.losses)} were run: {why}"
        return Claim(number, text, "does not hold" if fails else "open", why)
    return Claim(number, text, "does not hold" if fails else "holds", why)


def _normalizing(found: Found) -> Known:
    """One rate for normalized workers, beside the best clipped ones of a grid, at each budget."""
    losses, groups = [], _groups("clipping", found, lambda spec: (spec.dataset, spec.epsilon))
    for (dataset, epsilon), here in groups.items():
        if not _whole(here):
            continue
        own = [one for one in here if one.cell.varies["worker"] == "normalized" and one.cell.varies["rate"] == 0.2]
        clipped = [one for one in here if one.cell.varies["worker"] != "normalized"]
        losses.append((max(map(_mean, clipped)) - _mean(own[0]), f"{dataset}, epsilon {label(epsilon)}"))
    return Known(losses, len(groups), "the best of a grid of clipping is up to {points} better ({what})")


def _rivals(found: Found) -> Known:
    losses, of = [], 0
    for name in ("guerraoui", "zhu-ling"):
        of += sum(cell.rival is not None for cell in _cells(name))
        for one in _run(name, found):
            if one.cell.rival is not None:
                losses.append((one.cell.rival - _mean(one), named(one)))
    words = "ahead of the numbers that the paper prints for others by {lead} or more ({what})"
    return Known(losses, of, words, allowed=-1e-9)


def _side_effect(found: Found) -> Known:
    return _near_reference(found, "side-effect")


def _eradicates(found: Found) -> Known:
    return _near_reference(found, "attacks")


def _majority(found: Found) -> Known:
    return _near_reference(found, "majority")


def _one_rate(found: Found) -> Known:
    """The rate that is best at epsilon 2 is within two points of the best at every other."""
    losses, groups = [], _groups("learning-rate", found, lambda spec: (spec.dataset, label(spec.attack)))
    for where, here in groups.items():
        if not _whole(here):
            continue
        at = {
            epsilon: {one.cell.varies["rate"]: _mean(one) for one in here if one.cell.specs[0].epsilon == epsilon}
            for epsilon in {one.cell.specs[0].epsilon for one in here}
        }
        base = at[max(key for key in at if key is not None)]
        best = max(base, key=base.__getitem__)
        losses.append((max(max(rates.values()) - rates[best] for rates in at.values()), ", ".join(where)))
    return Known(losses, len(groups), "the best rate of the largest budget costs up to {points} elsewhere ({what})")


def _waiting(found: Found) -> Known:
    return _near_reference(found, "adaptive")


CLAIMS: tuple[tuple[str, Callable[[Found], Known]], ...] = (
    ("Normalizing with one rate is as good as the best of a grid of clipping thresholds and rates.", _normalizing),
    ("The protocol outperforms existing solutions.", _rivals),
    ("The protocol brings no side effect without an attack.", _side_effect),
    ("The protocol eradicates attacks if privacy is not extreme.", _eradicates),
    ("The protocol remains robust against a majority.", _majority),
    ("One learning rate serves all budgets.", _one_rate),
    ("The protocol is resilient against attackers that wait.", _waiting),
)


def _near_reference(found: Found, experiment: str) -> Known:
    """Whether every cell at a usual budget is near our own Reference Accuracy."""
    losses = []
    impossible = [one.cell.varies for one in found.get(experiment, []) if one.verdict == "impossible"]
    for one in _run(experiment, found):
        clean = _reference_of(one, found)
        if _usual(one.cell) and clean is not None:
            losses.append((clean - _mean(one), named(one)))
    of = sum(_usual(cell) and cell.varies not in impossible for cell in _cells(experiment))
    return Known(losses, of, "at worst {points} below our reference ({what})")


def _reference_of(one: Outcome, found: Found) -> float | None:
    """Our Reference Accuracy of the same data, budget and partition."""
    spec = one.cell.specs[0]
    for other in found.get("reference", []):
        clean = other.cell.specs[0]
        if (clean.dataset, clean.epsilon, clean.non_iid) == (spec.dataset, spec.epsilon, spec.non_iid):
            return other.mean if _whole([other]) else None
    return None


def named(one: Outcome) -> str:
    """What varies in a cell, in a line."""
    return ", ".join(f"{key} {label(value)}" for key, value in one.cell.varies.items())


def _usual(cell: paper.Cell) -> bool:
    epsilon = cell.specs[0].epsilon
    return epsilon is not None and epsilon >= USUAL


def _whole(some: Iterable[Outcome]) -> bool:
    """Whether there are any, and every seed of each ended: three at least."""
    listed = list(some)
    return bool(listed) and all(len(SEEDS) <= len(one.cell.specs) == len(one.accuracies) for one in listed)


def _run(experiment: str, found: Found) -> list[Outcome]:
    """The cells of an experiment of which every seed ended."""
    return [one for one in found.get(experiment, []) if _whole([one])]


def _groups(experiment: str, found: Found, key: Callable[[Spec], Any]) -> dict[Any, list[Outcome]]:
    """The cells of an experiment by `key`; nobody's where not all of a group were asked for."""
    sizes = Counter(key(cell.specs[0]) for cell in _cells(experiment))
    groups: dict[Any, list[Outcome]] = {where: [] for where in sizes}
    for one in found.get(experiment, []):
        groups.get(key(one.cell.specs[0]), []).append(one)
    return {where: here if len(here) == sizes[where] else [] for where, here in groups.items()}


@functools.cache
def _cells(experiment: str) -> tuple[paper.Cell, ...]:
    return paper.load(experiment).cells


def _mean(one: Outcome) -> float:
    return fmean(one.accuracies)


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"
