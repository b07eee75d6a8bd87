"""The paper's seven claims, each with a verdict computed from runs."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from noisegate import paper
from noisegate.paper import SEEDS, label
from noisegate.paper.outcomes import CellOutcome
from noisegate.runs.spec import Spec

Found = Mapping[str, Sequence[CellOutcome]]
"""The outcomes of an experiment's cells, by the name of the experiment."""

USUAL = 0.5
"""The smallest epsilon that the paper does not call extreme."""

ALLOWED = 0.02
"""The accuracy, as a share of 1, by which a part of a claim may fall short and still hold."""


@dataclass(frozen=True)
class PaperClaim:
    """A claim of the paper and its verdict.

    verdict: "does not hold" if one part of it fails; otherwise "open" if runs are missing. why: the worst part.
    """

    number: int
    text: str
    verdict: Literal["holds", "does not hold", "open"]
    why: str


@dataclass(frozen=True)
class ClaimParts:
    """The parts that a claim consists of, as far as they were run.

    losses: for each part that was run, the accuracy that it falls short by (a share of 1), and its name.
    of: the number of all parts. allowed: the largest loss with which a part still holds.
    words: a sentence about the worst part; {points} is its loss, {lead} its gain, {what} its name.
    """

    losses: Sequence[tuple[float, str]]
    of: int
    words: str
    allowed: float = ALLOWED

    @property
    def worst(self) -> tuple[float, str]:
        """The part with the largest loss."""
        return max(self.losses, key=lambda pair: pair[0])


def claims(found: Found) -> list[PaperClaim]:
    """The seven claims with their verdicts."""
    return [_claim(number, text, judge(found)) for number, (text, judge) in enumerate(CLAIMS, 1)]


def _claim(number: int, text: str, parts: ClaimParts) -> PaperClaim:
    if not parts.losses:
        return PaperClaim(
            number, text, "open", f"none of its {parts.of} parts was run, with its reference and three seeds"
        )
    loss, what = parts.worst
    why, fails = parts.words.format(points=_points(loss), lead=_points(-loss), what=what), loss > parts.allowed
    if len(parts.losses) < parts.of:
        why = f"of {parts.of} parts {len(parts.losses)} were run: {why}"
        return PaperClaim(number, text, "does not hold" if fails else "open", why)
    return PaperClaim(number, text, "does not hold" if fails else "holds", why)


def _normalizing(found: Found) -> ClaimParts:
    """Claim 1. Normalized workers at one rate are compared with the best cell of a clipping grid, at each budget."""
    losses, groups = [], _groups("clipping", found, lambda spec: (spec.dataset, spec.epsilon))
    for (dataset, epsilon), here in groups.items():
        if not _whole(here):
            continue
        own = [one for one in here if one.cell.varies["worker"] == "normalized" and one.cell.varies["rate"] == 0.2]
        clipped = [one for one in here if one.cell.varies["worker"] != "normalized"]
        losses.append((max(map(_mean, clipped)) - _mean(own[0]), f"{dataset}, epsilon {label(epsilon)}"))
    return ClaimParts(losses, len(groups), "the best of a grid of clipping is up to {points} better ({what})")


def _rivals(found: Found) -> ClaimParts:
    """Claim 2. Our accuracy is compared with the numbers that the paper prints for other methods."""
    losses, of = [], 0
    for name in ("guerraoui", "zhu-ling"):
        of += sum(cell.rival is not None for cell in _cells(name))
        for one in _run(name, found):
            if one.cell.rival is not None:
                losses.append((one.cell.rival - _mean(one), named(one)))
    words = "ahead of the numbers that the paper prints for others by {lead} or more ({what})"
    return ClaimParts(losses, of, words, allowed=-1e-9)


def _side_effect(found: Found) -> ClaimParts:
    return _near_reference(found, "side-effect")


def _eradicates(found: Found) -> ClaimParts:
    return _near_reference(found, "attacks")


def _majority(found: Found) -> ClaimParts:
    return _near_reference(found, "majority")


def _one_rate(found: Found) -> ClaimParts:
    """Claim 6. The rate that is best at the largest epsilon is compared with the best rate at each other epsilon."""
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
    return ClaimParts(
        losses, len(groups), "the best rate of the largest budget costs up to {points} elsewhere ({what})"
    )


def _waiting(found: Found) -> ClaimParts:
    return _near_reference(found, "adaptive")


CLAIMS: tuple[tuple[str, Callable[[Found], ClaimParts]], ...] = (
    ("Normalizing with one rate is as good as the best of a grid of clipping thresholds and rates.", _normalizing),
    ("The protocol outperforms existing solutions.", _rivals),
    ("The protocol brings no side effect without an attack.", _side_effect),
    ("The protocol eradicates attacks if privacy is not extreme.", _eradicates),
    ("The protocol remains robust against a majority.", _majority),
    ("One learning rate serves all budgets.", _one_rate),
    ("The protocol is resilient against an adversary that waits.", _waiting),
)


def _near_reference(found: Found, experiment: str) -> ClaimParts:
    """Each cell with an epsilon of at least USUAL is compared with our own Reference Accuracy."""
    losses = []
    impossible = [one.cell.varies for one in found.get(experiment, []) if one.verdict == "impossible"]
    for one in _run(experiment, found):
        clean = _reference_of(one, found)
        if _usual(one.cell) and clean is not None:
            losses.append((clean - _mean(one), named(one)))
    of = sum(_usual(cell) and cell.varies not in impossible for cell in _cells(experiment))
    return ClaimParts(losses, of, "at worst {points} below our reference ({what})")


def _reference_of(one: CellOutcome, found: Found) -> float | None:
    """Our Reference Accuracy for the same data, budget and partition; None if not every seed of it ended."""
    spec = one.cell.specs[0]
    for other in found.get("reference", []):
        clean = other.cell.specs[0]
        if (clean.dataset, clean.epsilon, clean.non_iid) == (spec.dataset, spec.epsilon, spec.non_iid):
            return other.mean if _whole([other]) else None
    return None


def named(one: CellOutcome) -> str:
    """The settings that vary in a cell, in one line."""
    return ", ".join(f"{key} {label(value)}" for key, value in one.cell.varies.items())


def _usual(cell: paper.PaperCell) -> bool:
    epsilon = cell.specs[0].epsilon
    return epsilon is not None and epsilon >= USUAL


def _whole(some: Iterable[CellOutcome]) -> bool:
    """Whether there is at least one cell, and all of its seeds ended, three or more of them."""
    listed = list(some)
    return bool(listed) and all(len(SEEDS) <= len(one.cell.specs) == len(one.accuracies) for one in listed)


def _run(experiment: str, found: Found) -> list[CellOutcome]:
    """The cells of an experiment of which every seed ended."""
    return [one for one in found.get(experiment, []) if _whole([one])]


def _groups(experiment: str, found: Found, key: Callable[[Spec], Any]) -> dict[Any, list[CellOutcome]]:
    """The cells of an experiment by `key`. A group is empty unless all of its cells were asked for."""
    sizes = Counter(key(cell.specs[0]) for cell in _cells(experiment))
    groups: dict[Any, list[CellOutcome]] = {where: [] for where in sizes}
    for one in found.get(experiment, []):
        groups.get(key(one.cell.specs[0]), []).append(one)
    return {where: here if len(here) == sizes[where] else [] for where, here in groups.items()}


@functools.cache
def _cells(experiment: str) -> tuple[paper.PaperCell, ...]:
    return paper.load(experiment, seeds=SEEDS[:1]).cells  # what varies between cells is the same for every seed


def _mean(one: CellOutcome) -> float:
    return fmean(one.accuracies)


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"
