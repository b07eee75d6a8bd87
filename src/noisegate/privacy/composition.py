"""What several runs on the same data cost one example together."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from noisegate.checks import count, refuse
from noisegate.errors import PrivacyError
from noisegate.privacy.losses import epsilon_of, most_of, spread
from noisegate.privacy.pricing import ask_of, farthest, legible, renyi, rounds_of
from noisegate.sampling import ADD_OR_REMOVE, SAMPLINGS

FINE = 1e-4
"""Width of the grid of losses, as a share of about what all runs cost; at most."""

LONGEST = 2e-6
"""The same; at least, so that time is bounded."""


MOST_POINTS = 2e5
"""Points of the grid that the losses of one round may take; at most, so that memory is bounded."""


@dataclass(frozen=True)
class Cost:
    """What an example is exposed to: so many rounds of a run, `times` over.

    declared: the number of examples that the rate batch / declared is made of; the true one of the smallest worker
    where `sampling` is fixed or equal, and with `balanced` the number whose rate is that of the rarest class. signs:
    how many are flipped in a round; 0 for Gaussian noise.
    """

    declared: int
    batch: int
    sampling: str
    sigma: float
    rounds: int
    signs: int = 0
    times: int = 1

    def __post_init__(self) -> None:
        count(times=self.times)


def together(costs: Iterable[Cost], delta: float) -> float:
    """The epsilon of all these runs at `delta`; inf if one of them had no noise.

    A run may use what came of earlier ones, but its noise, rounds and rate must be chosen without them.

    By privacy loss distributions if all batches are Poisson's, and by Renyi divergences if all are fixed. An example
    that is added or removed and one that is replaced are different promises: such runs have no common price.
    """
    if not 0 < delta < 1:
        raise refuse("delta", delta, "must be above 0 and below 1")
    often: Counter[Cost] = Counter()
    for cost in costs:
        often[replace(cost, rounds=1, times=1)] += cost.rounds * cost.times
    often = +often  # without those of no rounds
    if not often:
        return 0.0
    if any(cost.sigma == 0 for cost in often):
        return math.inf
    kinds = {cost.sampling for cost in often}
    relations = {SAMPLINGS[kind].relation for kind in kinds}
    if len(relations) > 1:
        raise PrivacyError(
            f"sampling {' and '.join(sorted(kinds))}: an example that is added or removed and one that is replaced "
            "have no common price; look at the runs of each sampling alone"
        )
    accountant = "pld" if relations == {ADD_OR_REMOVE} else "rdp"
    asked = [
        (ask_of(cost.declared, rounds, SAMPLINGS[cost.sampling](cost.batch), delta, accountant, cost.signs), cost.sigma)
        for cost, rounds in sorted(often.items(), key=str)
    ]
    with legible("all runs together", min(sigma for _, sigma in asked)):
        if accountant == "rdp":
            return float(renyi(asked).get_epsilon(delta))
        parts = tuple(rounds_of(ask, sigma) for ask, sigma in asked)
        rough = min(float(renyi(asked, range(2, 65)).get_epsilon(delta)), most_of(parts))
        needed = min(spread(part) for part in parts) / 10
        widest = max(farthest(part.rate, part.sigma) for part in parts)  # anyone may have named the rates
        return epsilon_of(parts, max(LONGEST * rough, min(needed, FINE * rough), widest / MOST_POINTS), delta)
