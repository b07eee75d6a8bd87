"""What a run claims: the pairs (epsilon, delta) that hold for each example of a worker, all of them at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisegate import privacy
from noisegate.errors import SpecError
from noisegate.runs.setup import Setup
from noisegate.sampling import BALANCED, EQUAL, Sampling, accounting

Array = NDArray[np.float64]

REFERENCE_DELTA = 1e-5
"""The delta at which every audit states its numbers, beside the run's own."""

DELTAS = (1e-5, 1e-3, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
"""Where the curve is asked for, if the accountant gives an epsilon for a delta only."""

LARGEST, LINES = 2.5, 60
"""The region is bounded by lines of so many epsilons, from 0 to so many times the claimed one."""

STEPS = 2**14
"""Steps of the sum for its area."""

GRID = 1e-4
"""Width of the accountant's grid of losses. It rounds up, so the curve lies on the safe side."""


@dataclass(frozen=True)
class Claim:
    """The mechanism that an accountant priced.

    examples: the number by which the rate is set. signs: how many are flipped in a round; 0 for Gaussian noise.
    """

    epsilon: float
    delta: float
    sigma: float
    rounds: int
    examples: int
    sampling: Sampling
    accountant: str
    signs: int = 0

    @property
    def rate(self) -> float:
        """The chance q of an example to be in a batch."""
        return self.sampling.rate(self.examples)

    def epsilon_at(self, delta: float) -> float:
        """The epsilon that is claimed at another delta."""
        return privacy.epsilon(
            self.sigma,
            examples=self.examples,
            rounds=self.rounds,
            sampling=self.sampling,
            delta=delta,
            accountant=self.accountant,
            signs=self.signs,
        )

    def delta_at(self, epsilon: float) -> float:
        """The smallest delta that is claimed at this epsilon, or a little more."""
        return min(1.0, float(self._curve(epsilon)))

    def most_hits(self, false: Array) -> Array:
        """The largest share of hits that is allowed at each share of false ones, or a little more.

        Every pair (epsilon, delta) of the curve bounds it by two lines, one for each direction.
        """
        most = np.ones_like(false)
        for epsilon in np.linspace(0, LARGEST * self.epsilon, LINES):
            delta, factor = self.delta_at(float(epsilon)), math.exp(epsilon)
            most = np.minimum(most, np.minimum(factor * false + delta, 1 - (1 - delta - false) / factor))
        hits: Array = most.clip(0.0, 1.0)
        return hits

    @cached_property
    def area(self) -> float:
        """The largest area under an ROC curve that is allowed, or a little more: a sum from above."""
        return float(self.most_hits(np.arange(1, STEPS + 1) / STEPS).mean())

    @cached_property
    def _curve(self) -> Callable[[float], float]:
        if self.signs:
            points = {self.epsilon_at(delta): delta for delta in sorted(DELTAS, reverse=True)}  # the smallest of each
            x, y = np.array(sorted(points)), np.array([points[epsilon] for epsilon in sorted(points)])
            # The curve is convex, so a line between two of its points lies above it. Left of them nothing is known.
            return lambda epsilon: float(np.interp(epsilon, x, y, left=1.0))
        # A sampling is a frozen record, but its protocol does not say so.
        composed = _composed(self.accountant, self.sampling, self.examples, self.sigma, self.rounds)  # type: ignore[arg-type]
        return lambda epsilon: float(composed.get_delta(epsilon))


@lru_cache(maxsize=16)
def _composed(accountant: str, sampling: Sampling, examples: int, sigma: float, rounds: int) -> Any:
    """dp-accounting's accountant, told of all rounds."""
    accounting()  # says what to do where it is missing
    from dp_accounting import pld, rdp

    event = accounting().SelfComposedDpEvent(sampling.event(examples, sigma), rounds)
    if accountant == "rdp":
        return rdp.RdpAccountant(neighboring_relation=sampling.neighboring()).compose(event)
    return pld.PLDAccountant(sampling.neighboring(), GRID).compose(event)


def claim_of(setup: Setup) -> Claim:
    """What the setup of a run promises."""
    run, promise = setup.federation, setup.privacy
    if promise.epsilon is None:
        raise SpecError("sigma = 0.0: a run without noise claims nothing, so there is nothing to refute; give epsilon")
    if promise.accountant not in privacy.ACCOUNTANTS:
        raise SpecError(
            f"accountant = {promise.accountant!r}: the claim cannot be checked without dp-accounting; install it"
        )
    if run.mechanism.sampling.name == EQUAL:
        raise SpecError(
            f"sampling = {EQUAL!r}: has a claim for each size, and the clones of an audit are of one; audit sampling = "
            f"'poisson' with declared = {declared_of(setup)}, which is what the smallest worker is promised"
        )
    if run.mechanism.sampling.name == BALANCED:
        raise SpecError(
            f"sampling = {BALANCED!r}: draws classes at rates of their own, and the clones of an audit at one; audit "
            f"sampling = 'poisson' with declared = {math.floor(run.mechanism.batch / promise.sampling_rate + 1e-9)}, "
            "which is what the rarest class is promised"
        )
    return Claim(
        promise.epsilon,
        promise.delta,
        promise.sigma,
        run.schedule.rounds,
        declared_of(setup),
        run.mechanism.sampling,
        promise.accountant,
        run.mechanism.model.d if run.mechanism.worker.mechanism == "signs" else 0,
    )


def declared_of(setup: Setup) -> int:
    """The number of examples that the price is for; of the smallest worker, where it depends on the true numbers."""
    run = setup.federation
    return min(
        run.mechanism.sampling.priced(run.workers.sizes[run.adversary.honest_rows].tolist(), run.mechanism.declared)
    )
