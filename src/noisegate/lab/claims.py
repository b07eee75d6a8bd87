"""The paper's seven claims, each with a verdict computed from runs."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from noisegate.lab import paper
from noisegate.lab.outcomes import Outcome
from noisegate.lab.paper import label

Found = Mapping[str, Sequence[Outcome]]
"""Outcomes by experiment."""

USUAL = 0.5
"""The paper calls a smaller epsilon extreme."""

POINTS = 0.02
"""How far two accuracies may differ and still be called the same."""


@dataclass(frozen=True)
class Claim:
    """A claim and what runs say. verdict: "open" if a run that it needs is missing."""

    number: int
    text: str
    verdict: Literal["holds", "does not hold", "open"]
    why: str


def claims(found: Found) -> list[Claim]:
    """All seven."""
    return [_claim(number, text, judge, found) for number, (text, judge) in enumerate(CLAIMS, 1)]


Judge = Callable[[Found], tuple[bool, str] | None]
"""(holds, why) or None if runs are missing."""


def _claim(number: int, text: str, judge: Judge, found: Found) -> Claim:
    answer = judge(found)
    if answer is None:
        return Claim(number, text, "open", "it needs every cell of its experiments and of `reference`, and three seeds")
    return Claim(number, text, "holds" if answer[0] else "does not hold", answer[1])


def _normalizing(found: Found) -> tuple[bool, str] | None:
    """One rate for normalized workers, beside the best clipped ones of a grid, at each budget."""
    some = found.get("clipping", [])
    if not (_whole(some) and _asked_for_all(found, "clipping")):
        return None
    gaps = []
    for where in {(cell.specs[0].dataset, cell.specs[0].epsilon) for cell in (one.cell for one in some)}:
        here = [one for one in some if (one.cell.specs[0].dataset, one.cell.specs[0].epsilon) == where]
        own = [one for one in here if one.cell.varies["worker"] == "normalized" and one.cell.varies["rate"] == 0.2]
        clipped = [one for one in here if one.cell.varies["worker"] != "normalized"]
        gaps.append(max(_mean(one) for one in clipped) - _mean(own[0]))
    return max(gaps) <= POINTS, f"the best of a grid of clipping is up to {_points(max(gaps))} better"


def _rivals(found: Found) -> tuple[bool, str] | None:
    some = [*found.get("guerraoui", []), *found.get("zhu-ling", [])]
    if not (_whole(some) and _asked_for_all(found, "guerraoui", "zhu-ling")):
        return None
    leads = [_mean(one) - one.cell.rival for one in some if one.cell.rival is not None]
    return min(leads) > 0, f"ahead of the numbers that the paper prints for others by {_points(min(leads))} or more"


def _side_effect(found: Found) -> tuple[bool, str] | None:
    return _near_reference(found, "side-effect")


def _eradicates(found: Found) -> tuple[bool, str] | None:
    return _near_reference(found, "attacks")


def _majority(found: Found) -> tuple[bool, str] | None:
    return _near_reference(found, "majority")


def _one_rate(found: Found) -> tuple[bool, str] | None:
    """The rate that is best at epsilon 2 is within two points of the best at every other."""
    some = found.get("learning-rate", [])
    if not (_whole(some) and _asked_for_all(found, "learning-rate")):
        return None
    losses = []
    for where in {(one.cell.specs[0].dataset, str(one.cell.specs[0].attack)) for one in some}:
        here = [one for one in some if (one.cell.specs[0].dataset, str(one.cell.specs[0].attack)) == where]
        at = {
            epsilon: {one.cell.varies["rate"]: _mean(one) for one in here if one.cell.specs[0].epsilon == epsilon}
            for epsilon in {one.cell.specs[0].epsilon for one in here}
        }
        base = at[max(key for key in at if key is not None)]
        best = max(base, key=base.__getitem__)
        losses += [max(rates.values()) - rates[best] for rates in at.values()]
    return max(losses) <= POINTS, f"the best rate of the largest budget costs up to {_points(max(losses))} elsewhere"


def _waiting(found: Found) -> tuple[bool, str] | None:
    return _near_reference(found, "adaptive")


CLAIMS: tuple[tuple[str, Judge], ...] = (
    ("Normalizing with one rate is as good as the best of a grid of clipping thresholds and rates.", _normalizing),
    ("The protocol outperforms existing solutions.", _rivals),
    ("The protocol brings no side effect without an attack.", _side_effect),
    ("The protocol eradicates attacks if privacy is not extreme.", _eradicates),
    ("The protocol remains robust against a majority.", _majority),
    ("One learning rate serves all budgets.", _one_rate),
    ("The protocol is resilient against attackers that wait.", _waiting),
)


def _near_reference(found: Found, experiment: str) -> tuple[bool, str] | None:
    """Whether every cell at a usual budget is near our own Reference Accuracy."""
    some = [one for one in found.get(experiment, []) if _usual(one) and one.verdict != "impossible"]
    if not (_whole(some) and _asked_for_all(found, experiment)):
        return None
    losses = []
    for one in some:
        clean = _reference_of(one, found)
        if clean is None:
            return None
        losses.append((clean - _mean(one), one))
    worst, one = max(losses, key=lambda pair: pair[0])
    return worst <= POINTS, f"at worst {_points(worst)} below our reference: {named(one)}"


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


def _usual(one: Outcome) -> bool:
    epsilon = one.cell.specs[0].epsilon
    return epsilon is not None and epsilon >= USUAL


def _whole(some: Iterable[Outcome]) -> bool:
    """Whether there are any, and every seed of each ended."""
    listed = list(some)
    return bool(listed) and all(len(one.accuracies) == len(one.cell.specs) for one in listed)


def _asked_for_all(found: Found, *experiments: str) -> bool:
    """Whether no cell of these was left out, and no seed: a claim is about all of it."""
    return all(
        len(found.get(name, [])) == len(_cells(name))
        and all(len(one.cell.specs) >= len(paper.SEEDS) for one in found[name])
        for name in experiments
    )


@functools.cache
def _cells(experiment: str) -> tuple[paper.Cell, ...]:
    return paper.load(experiment).cells


def _mean(one: Outcome) -> float:
    return fmean(one.accuracies)


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"
