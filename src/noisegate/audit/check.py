"""One thing that was tried, and what came of it."""

from dataclasses import dataclass

TESTED = 17
"""Tests of parts that have a p-value, all kinds of workers together: no audit makes more."""

PARTS_LEVEL, WHOLE_LEVEL = 0.005, 0.005
"""How often an honest product may be refuted by one of its parts, and by the whole; 1 % together."""


@dataclass(frozen=True)
class Check:
    """name: what was looked at. found: what there was, in words. p: the chance of that if all is well, where known."""

    name: str
    found: str
    refuted: bool
    p: float | None = None


def judged(name: str, found: str, p: float) -> Check:
    """A check that refutes if its p-value is small, considering how many there are."""
    return Check(name, f"{found} (p = {p:.2g})", p < PARTS_LEVEL / TESTED, p)


def two_sided(low: float, high: float) -> float:
    """P-value of a number by its two tails."""
    return min(1.0, 2 * min(low, high))
