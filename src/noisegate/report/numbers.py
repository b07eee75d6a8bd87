"""The numbers that the charts of a run show, on the page and in the figures."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from noisegate.errors import NoisegateError
from noisegate.privacy import epsilon
from noisegate.report.folders import RunRecord, Verdicts
from noisegate.runs.drawing import priced_draws
from noisegate.runs.promise import STATED
from noisegate.runs.unbuilt import UnbuiltSpec
from noisegate.views import Reason

MOST_COLUMNS = 200
"""The largest number of columns of a timeline. A longer run has several rounds in each column."""

MOST_ROWS = 60
"""The largest number of workers of a group (honest, Byzantine) that a timeline shows."""

PRIVACY_POINTS = 24
"""The number of points, beside the first, at which the epsilon that was spent is computed."""

GROUPS = ("honest", "byzantine")
"""The two groups of workers, as files name them."""

NOT_REFUSED = (Reason.KEPT, Reason.MISSING, Reason.LOST)
"""The reasons that refuse nothing: the upload was used, did not arrive, or was in a round that was lost."""

BY_RANK = (*NOT_REFUSED, *(reason for reason in Reason if reason not in NOT_REFUSED))
"""The reasons by rank. Of equally frequent reasons of a column, the one with the highest rank is shown."""


@dataclass(frozen=True)
class Timeline:
    """The verdicts of a run, in columns of one round or several.

    rounds: (columns, 2) the first and the last round of each column, from 1.
    workers: by group, the positions of the workers that are shown. all_workers: by group, the number of workers.
    reasons: by group (workers, columns), the most frequent reason of each column; of equally frequent ones a refusal.
    scores: by group (workers, columns), the mean score; NaN where no score is finite.
    byzantine_weight: (columns,) the mean weight of all Byzantine uploads together in the update; None if not known.
    """

    rounds: np.ndarray
    workers: dict[str, np.ndarray]
    all_workers: dict[str, int]
    reasons: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    byzantine_weight: np.ndarray | None

    @property
    def binned(self) -> bool:
        """Whether some column holds more than one round."""
        return bool((self.rounds[:, 0] != self.rounds[:, 1]).any())


def timeline_of(verdicts: Verdicts, most_columns: int = MOST_COLUMNS, most_rows: int = MOST_ROWS) -> Timeline:
    """The timeline of a run. Its columns are equal bins of rounds; of too many workers evenly spaced ones are shown."""
    total = len(verdicts.reasons)
    edges = np.linspace(0, total, min(total, most_columns) + 1).round().astype(int)
    places = {"honest": np.flatnonzero(~verdicts.byzantine), "byzantine": np.flatnonzero(verdicts.byzantine)}
    shown = {group: _evenly(place, most_rows) for group, place in places.items()}
    weights = verdicts.weights  # which the files of earlier versions do not have
    byzantine = None if weights is None else weights[:, verdicts.byzantine].sum(1, keepdims=True)
    return Timeline(
        rounds=np.stack([edges[:-1] + 1, edges[1:]], axis=1),
        workers=shown,
        all_workers={group: len(place) for group, place in places.items()},
        reasons={group: _most_frequent(verdicts.reasons[:, place], edges) for group, place in shown.items()},
        scores={group: _means(verdicts.scores[:, place], edges) for group, place in shown.items()},
        byzantine_weight=None if byzantine is None else _means(byzantine, edges)[0],
    )


def _evenly(places: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the places, evenly spaced."""
    return (
        places[np.unique(np.linspace(0, len(places) - 1, most).round().astype(int))] if len(places) > most else places
    )


def _most_frequent(reasons: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(workers, bins) the most frequent reason of each bin; of equally frequent ones the last in BY_RANK."""
    ranked = np.array(BY_RANK[::-1], dtype=np.uint8)
    columns = []
    for start, end in pairwise(edges):
        counts = np.stack([(reasons[start:end] == reason).sum(0) for reason in ranked])
        columns.append(ranked[counts.argmax(0)])  # argmax gives the first of equals
    return np.stack(columns, axis=1)


def _means(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(workers, bins) the mean of the finite scores of each bin; NaN if there are none."""
    columns = []
    for start, end in pairwise(edges):
        block = scores[start:end].astype(np.float64)
        finite = np.isfinite(block)
        counts = finite.sum(0)
        sums = np.where(finite, block, 0.0).sum(0)
        columns.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    return np.stack(columns, axis=1)


def shares_by_reason(curve: list[dict[str, Any]]) -> dict[str, dict[Reason, list[float]]]:
    """By group and reason, the share of the group's uploads that were not used, at each line of the curve.

    A line counts the rounds since the line before it. All uploads that were due count, missing ones too. Reasons that
    never occur are left out, and so is a group without workers.
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
    """The epsilon that was spent after some of the rounds, and a sentence about it. No points if it is not known."""

    rounds: list[int]
    epsilons: list[float]
    note: str


def privacy_spent(record: RunRecord) -> Spent:
    """The epsilon over the rounds, of the honest worker with the largest epsilon."""
    result, spec = record.result, record.spec
    if result is None:
        return Spent([], [], "The epsilon of a run is written when the run is done.")
    if result["sigma"] == 0:
        return Spent([], [], "This run is not private: sigma is 0.")
    total, end = int(result["rounds"]), float(result["epsilon"])
    if result.get("accountant") == STATED:
        return Spent(
            [], [], f"Epsilon {end:.4g} is stated, not checked: dp-accounting was not installed where the run was made."
        )
    if spec is None:
        return Spent([], [], f"Epsilon is {end:.4g} at the end. It is not drawn, since the spec cannot be built here.")
    if isinstance(spec, UnbuiltSpec):
        if "worker" in spec.plugins:  # whose mechanism only its own code can tell, and this command runs none
            return Spent([], [], f"Epsilon is {end:.4g} at the end. It is not drawn, since the worker is a plugin.")
        spec = spec.standin
    points = sorted({round(t) for t in np.linspace(0, total, PRIVACY_POINTS + 1)} | {0, min(1, total), total})
    try:
        signs = int(result["parameters"]) if spec.build_worker().mechanism == "signs" else 0
        asked = {
            **priced_draws(spec, result),
            "delta": float(result["delta"]),
            "accountant": spec.accountant,
            "signs": signs,
        }
        if not math.isclose(epsilon(result["sigma"], rounds=total, **asked), end, rel_tol=1e-3):
            raise ValueError
        spent = [epsilon(result["sigma"], rounds=t, **asked) for t in points]
    except (NoisegateError, ImportError, ValueError, LookupError):
        return Spent([], [], f"Epsilon is {end:.4g} at the end. It could not be computed again for fewer rounds.")
    return Spent(
        points,
        spent,
        f"The epsilon of an honest worker with a declared size of {result['declared']} examples, computed again by "
        f"{spec.accountant.upper()} at {len(points)} points. Delta is {result['delta']:.3g}, the noise multiplier "
        f"{result['sigma']:.4g}.",
    )
