"""The numbers behind the charts of a run, the same for the page and for the figures."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from noisegate.errors import NoisegateError
from noisegate.privacy import epsilon
from noisegate.report.folders import RunRecord, Verdicts
from noisegate.runs.promise import STATED
from noisegate.runs.unbuilt import UnbuiltSpec
from noisegate.sampling import SAMPLINGS
from noisegate.views import Reason

MOST_COLUMNS = 200
"""Columns of the timeline; a longer run has several rounds in each."""

MOST_ROWS = 60
"""Workers of a group (honest, Byzantine) in the timeline and among the scores."""

PRIVACY_POINTS = 24
GROUPS = ("honest", "byzantine")


@dataclass(frozen=True)
class Grid:
    """Who was refused when. rounds: (columns, 2) first and last round of each column, from 1.

    workers: their positions by group. reasons: by group (workers, columns), the most frequent reason of the column;
    of equally frequent ones the refusal. scores: by group, their means, NaN where there is no finite one.
    all_workers: how many there are by group.
    """

    rounds: np.ndarray
    workers: dict[str, np.ndarray]
    reasons: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    all_workers: dict[str, int]

    @property
    def binned(self) -> bool:
        """Whether a column is more than one round."""
        return bool((self.rounds[:, 0] != self.rounds[:, 1]).any())


def timeline(verdicts: Verdicts, most_columns: int = MOST_COLUMNS, most_rows: int = MOST_ROWS) -> Grid:
    """Verdicts, made small enough to be seen: rounds in equal bins, of many workers evenly spaced ones."""
    total = len(verdicts.reasons)
    edges = np.linspace(0, total, min(total, most_columns) + 1).round().astype(int)
    places = {"honest": np.flatnonzero(~verdicts.byzantine), "byzantine": np.flatnonzero(verdicts.byzantine)}
    shown = {group: _evenly(place, most_rows) for group, place in places.items()}
    return Grid(
        rounds=np.stack([edges[:-1] + 1, edges[1:]], axis=1),
        workers=shown,
        reasons={group: _most_frequent(verdicts.reasons[:, place], edges) for group, place in shown.items()},
        scores={group: _means(verdicts.scores[:, place], edges) for group, place in shown.items()},
        all_workers={group: len(place) for group, place in places.items()},
    )


def _evenly(places: np.ndarray, most: int) -> np.ndarray:
    """At most so many of them, evenly spaced."""
    return (
        places[np.unique(np.linspace(0, len(places) - 1, most).round().astype(int))] if len(places) > most else places
    )


def _most_frequent(reasons: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(workers, bins)."""
    columns = []
    for start, end in pairwise(edges):
        counts = np.stack([(reasons[start:end] == reason).sum(0) for reason in Reason])
        columns.append(len(Reason) - 1 - counts[::-1].argmax(0))  # of equal counts the last, so never KEPT
    return np.stack(columns, axis=1).astype(np.uint8)


def _means(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(workers, bins)."""
    columns = []
    for start, end in pairwise(edges):
        block = scores[start:end].astype(np.float64)
        finite = np.isfinite(block)
        counts = finite.sum(0)
        sums = np.where(finite, block, 0.0).sum(0)
        columns.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    return np.stack(columns, axis=1)


def refused_shares(curve: list[dict[str, Any]]) -> dict[str, dict[Reason, list[float]]]:
    """By group and reason, the share of the group's uploads since the line before that was refused for it.

    Only reasons that occur at all. A group without uploads has none.
    """
    shares: dict[str, dict[Reason, list[float]]] = {}
    for group in GROUPS:
        counted = [{"kept": line.get("selected", {}), **line.get("rejected", {})} for line in curve]
        totals = [sum(pair.get(group, 0) for pair in pairs.values()) for pairs in counted]
        if not any(totals):
            continue
        shares[group] = {}
        for reason in Reason:
            counts = [pairs.get(reason.word, {}).get(group, 0) for pairs in counted]
            if reason is not Reason.KEPT and any(counts):
                shares[group][reason] = [
                    count / total if total else 0.0 for count, total in zip(counts, totals, strict=True)
                ]
    return shares


@dataclass(frozen=True)
class Spent:
    """What privacy cost after some of the rounds, and a sentence about it. No points if that cannot be said."""

    rounds: list[int]
    epsilons: list[float]
    note: str


def privacy_spent(record: RunRecord) -> Spent:
    """Epsilon over the rounds, of the honest worker that pays most."""
    result, spec = record.result, record.spec
    if result is None:
        return Spent([], [], "What a run spends is written when it is done.")
    if result["sigma"] == 0:
        return Spent([], [], "Nothing is private in this run: sigma is 0.")
    total, end = int(result["rounds"]), float(result["epsilon"])
    if result.get("accountant") == STATED:
        return Spent(
            [], [], f"Epsilon {end:.4g} is stated, not checked: dp-accounting was not installed where the run was made."
        )
    if spec is None:
        return Spent([], [], f"Epsilon {end:.4g} at the end; the spec cannot be built here, so not over the rounds.")
    if isinstance(spec, UnbuiltSpec):
        if "worker" in spec.plugins:  # whose mechanism only its own code can tell, and this command runs none
            return Spent([], [], f"Epsilon {end:.4g} at the end; its worker is a plugin's, so not over the rounds.")
        spec = spec.standin
    points = sorted({round(t) for t in np.linspace(0, total, PRIVACY_POINTS + 1)} | {0, min(1, total), total})
    try:
        signs = int(result["parameters"]) if spec.build_worker().mechanism == "signs" else 0
        asked = {
            "examples": round(spec.batch / float(result["sampling_rate"])),
            "sampling": SAMPLINGS[spec.sampling](spec.batch),
            "delta": float(result["delta"]),
            "accountant": spec.accountant,
            "signs": signs,
        }
        if not math.isclose(epsilon(result["sigma"], rounds=total, **asked), end, rel_tol=1e-3):  # type: ignore[arg-type]
            raise ValueError
        spent = [epsilon(result["sigma"], rounds=t, **asked) for t in points]  # type: ignore[arg-type]
    except (NoisegateError, ImportError, ValueError, LookupError):
        return Spent([], [], f"Epsilon {end:.4g} at the end; it could not be computed again here for fewer rounds.")
    return Spent(
        points,
        spent,
        f"Of an honest worker ({result['declared']} examples declared), computed again by {spec.accountant.upper()} "
        f"after {len(points)} numbers of rounds; delta {result['delta']:.3g}, noise multiplier {result['sigma']:.4g}.",
    )
