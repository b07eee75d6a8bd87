"""The whole mechanism: how well the adversary told who held the canary, and what that refutes.

An event has probability p in one world and q in the other; the claim allows p <= e^epsilon q + delta(epsilon) for every
epsilon of its curve, in both directions. Three kinds of test, with all thresholds fixed beforehand:
* the ROC curve of the log likelihood ratio has no larger area than the region of all that is allowed;
* a guess by the sign of the ratio is right with probability at most (1 + delta(0)) / 2;
* the ratio is .75 or 1.5 of its standard deviations beyond its mean, by the claim, in either direction.
The first has half of the level, the second a quarter, the other four share the rest. What is reported beside that are
bounds of 95 %, from a threshold of 1.5 deviations: by computation about the best for some thousand trials.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from noisegate.audit import bounds
from noisegate.audit.check import WHOLE_LEVEL, Check
from noisegate.audit.claim import REFERENCE_DELTA, Claim

BEYOND = (0.75, 1.5)
"""Thresholds of the decision, in deviations."""

REPORTED = 1.5
"""Threshold of the lower bound that is reported, in both directions."""

FEWEST = 100
"""Trials with the canary, and without, below which no area is judged: it is not yet close to a normal law."""

CONFIDENCE = 0.95
GUESSED = 0.25
"""Share of the canaries that the one-run bound guesses: those whose ratio is farthest from 0."""

DRAWN_POINTS = 200
"""Points of a curve that is kept to be drawn."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """What is known of epsilon at one delta, each at 95 %.

    claimed: what it is at most, by the claim. measured: what it is at least, by counting. gaussian: the same if the
    mechanism is Gaussian with the mu that was found at least. one_run: by the bound of Steinke, Nasr and Jagielski.
    """

    delta: float
    claimed: float
    measured: float
    gaussian: float
    one_run: float


@dataclass(frozen=True)
class Whole:
    """What so many trials found.

    right: share of the guesses that were right; allowed: the largest that the claim allows. auc: area under the ROC
    curve. mu: of the Gaussian mechanism with this area, with a 95 % interval. claimed_auc, claimed_mu: the largest that
    the claim allows. curve: (false, true) shares at thresholds of the statistic, descending.
    """

    trials: int
    held: int
    right: float
    allowed: float
    auc: float
    claimed_auc: float
    mu: float
    mu_low: float
    mu_high: float
    claimed_mu: float
    bounds: tuple[Bound, ...]
    checks: tuple[Check, ...]
    curve: tuple[tuple[float, float], ...]

    @property
    def refuted(self) -> bool:
        """Whether one of the tests refutes the claim."""
        return any(check.refuted for check in self.checks)


def measure(held: NDArray[np.bool_], losses: Array, claim: Claim) -> Whole:
    """What the ratios of the trials say. held: who had the canary."""
    inside, outside = losses[held], losses[~held]
    auc, error = _area(inside, outside)
    margin = float(stats.norm.isf((1 - CONFIDENCE) / 2)) * error
    mu_low = bounds.mu_of(max(0.5, auc - margin))
    return Whole(
        trials=len(losses),
        held=len(inside),
        right=float(((losses > 0) == held).mean()),
        allowed=(1 + claim.delta_at(0.0)) / 2,
        auc=auc,
        claimed_auc=claim.area,
        mu=bounds.mu_of(max(0.5, auc)),
        mu_low=mu_low,
        mu_high=bounds.mu_of(max(0.5, auc + margin)),
        claimed_mu=bounds.mu_of(claim.area),
        bounds=tuple(
            _bound(inside, outside, claim, delta, mu_low) for delta in dict.fromkeys((claim.delta, REFERENCE_DELTA))
        ),
        checks=judge_trials(inside, outside, claim),
        curve=_curve(inside, outside),
    )


def judge_trials(inside: Array, outside: Array, claim: Claim) -> tuple[Check, ...]:
    """The tests that decide, on the ratios with the canary and without; together of level WHOLE_LEVEL."""
    auc, error = _area(inside, outside)
    if error < 1:  # no less than it is at the edge of the claim: few trials that are told apart well would have none
        error = max(error, bounds.area_error(claim.area, len(inside), len(outside)))
    p = float(stats.norm.sf((auc - claim.area) / error))
    found = f"area under the ROC curve {auc:.4f} (error {error:.4f}), of {claim.area:.4f} allowed (p = {p:.2g})"
    checks = [Check("whole: area", found, p < WHOLE_LEVEL / 2, p)]
    right, trials = int((inside > 0).sum() + (outside <= 0).sum()), len(inside) + len(outside)
    allowed = (1 + claim.delta_at(0.0)) / 2
    p = bounds.too_many(right, trials, allowed)
    found = f"{right} of {trials} guesses right, where the claim allows a share of {allowed:.4f} (p = {p:.2g})"
    checks.append(Check("whole: guesses", found, p < WHOLE_LEVEL / 4, p))
    level = WHOLE_LEVEL / 4 / (2 * len(BEYOND))
    for multiple in BEYOND:
        epsilon = _threshold(claim, multiple)
        delta = claim.delta_at(epsilon)
        for side, counts in _counts(inside, outside, epsilon).items():
            hits, of, false, others = counts
            refuted = bounds.violates(*counts, epsilon, delta, level)
            found = f"{hits} of {of} against {false} of {others}, for epsilon {epsilon:.3f} and delta {delta:.3g}"
            checks.append(Check(f"whole: {side}, beyond {epsilon:.3f}", found, refuted))
    return tuple(checks)


def _area(inside: Array, outside: Array) -> tuple[float, float]:
    """(area under the ROC curve, its error); where there are too few trials, nothing is known."""
    return bounds.area(inside, outside) if min(len(inside), len(outside)) >= FEWEST else (0.5, 1.0)


def _threshold(claim: Claim, deviations: float) -> float:
    """So many deviations beyond the mean of a ratio that is normal with mean mu^2 / 2 and deviation mu, as claimed."""
    mu = bounds.mu_of(claim.area)
    return mu * mu / 2 + deviations * mu


def _counts(inside: Array, outside: Array, threshold: float) -> dict[str, tuple[int, int, int, int]]:
    """(hits, of how many, false ones, of how many) of guessing that the canary is there, and that it is not."""
    there = int((inside > threshold).sum()), len(inside), int((outside > threshold).sum()), len(outside)
    absent = int((outside < -threshold).sum()), len(outside), int((inside < -threshold).sum()), len(inside)
    return {"there": there, "not there": absent}


def _bound(inside: Array, outside: Array, claim: Claim, delta: float, mu_low: float) -> Bound:
    sides = _counts(inside, outside, _threshold(claim, REPORTED)).values()
    measured = max(bounds.epsilon_above(*counts, delta, (1 - CONFIDENCE) / len(sides)) for counts in sides)
    losses = np.concatenate([inside, outside])
    held = np.arange(len(losses)) < len(inside)
    guesses = max(1, int(GUESSED * len(losses)))
    farthest = np.argsort(-np.abs(losses), kind="stable")[:guesses]
    right = int(((losses > 0) == held)[farthest].sum())
    return Bound(
        delta=delta,
        claimed=claim.epsilon if delta == claim.delta else claim.epsilon_at(delta),
        measured=measured,
        gaussian=bounds.gaussian_epsilon(mu_low, delta),
        one_run=bounds.one_run_above(len(losses), guesses, right, delta, 1 - CONFIDENCE),
    )


def _curve(inside: Array, outside: Array) -> tuple[tuple[float, float], ...]:
    if not len(inside) or not len(outside):
        return ()
    every = np.unique(np.concatenate([inside, outside]))[::-1]
    chosen = every[np.unique(np.linspace(0, len(every) - 1, DRAWN_POINTS).astype(int))]
    points = [(float((outside >= at).mean()), float((inside >= at).mean())) for at in chosen]
    return ((0.0, 0.0), *points)
