"""What the rounds of a ledger cost an example, and how many more a budget allows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noisegate.checks import positive, refuse
from noisegate.entropy import slack
from noisegate.privacy import Cost, together
from noisegate.privacy.pricing import ask_of, legible, renyi
from noisegate.sampling import Poisson


@dataclass(frozen=True)
class Spending:
    """Rounds of one run. parameters: how many numbers leave the worker in each. planned: rounds that the run has."""

    cost: Cost
    parameters: int
    planned: int


def price(spent: Sequence[Spending], delta: float) -> float:
    """The epsilon of all these rounds at `delta`, by privacy loss distributions; inf if no bound is known.

    It holds for the noise as it is drawn, in floating point: what `entropy.slack` says of all numbers that left is
    taken from delta before, and added to epsilon after. The terms must be chosen without a look at earlier uploads.
    """
    more, left = _slack(spent, delta)
    if not left > 0:
        return math.inf
    return together([each.cost for each in spent], left) + more


def most_rounds(spent: Sequence[Spending], next_one: Spending, epsilon: float, delta: float) -> int:
    """The largest number of rounds of `next_one`, at most its planned ones, with a price of at most `epsilon` in all.

    The price of the number that is returned was computed, and found to be at most `epsilon`; no rounding can allow a
    round too many. The price grows with the rounds, and its square about evenly, so that few prices are enough.
    """
    positive(epsilon=epsilon)

    def price_of(rounds: int) -> float:
        return price([*spent, replace(next_one, cost=replace(next_one.cost, rounds=rounds))], delta)

    high = next_one.planned
    if (above := price_of(high)) <= epsilon:
        return high
    low = 0
    if (below := price_of(low)) > epsilon:
        return low
    for step in range(4 * high.bit_length() + 8):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if math.isfinite(above) and step % 4 < 3:  # a secant of the squares; halving bounds the worst case
            share = (epsilon - below) * (epsilon + below) / ((above - below) * (above + below))
            middle = low + math.floor((high - low) * share)
        middle = min(max(middle, low + 1), high - 1)
        if (found := price_of(middle)) <= epsilon:
            low, below = middle, found
        else:
            high, above = middle, found
    return low


def price_of_choices(spent: Sequence[Spending], delta: float) -> tuple[float, float]:
    """(epsilon, order): a price at one Renyi order that holds though later terms followed what came of earlier rounds.

    Feldman and Zrnic (2021): Renyi divergences of one order add up also where each mechanism is chosen by what the ones
    before it gave, as long as the sum stays below a budget set in advance. The order must be set in advance too: it is
    the best one for the whole first run, whose terms were made before anything was sent. Looser than `price`.
    """
    more, left = _slack(spent, delta)
    if not any(each.cost.rounds for each in spent):
        return 0.0, math.inf
    if not left > 0:
        return math.inf, math.inf
    asked = [
        (ask_of(cost.declared, cost.rounds, Poisson(cost.batch), left, "rdp"), cost.sigma)
        for cost in (each.cost for each in spent)
        if cost.rounds
    ]
    first = spent[0].cost
    whole = ask_of(first.declared, spent[0].planned, Poisson(first.batch), delta, "rdp"), first.sigma
    with legible("all runs together", min(sigma for _, sigma in asked)):
        _, order = renyi([whole]).get_epsilon_and_optimal_order(delta)
        return float(renyi(asked, [order]).get_epsilon(left)) + more, float(order)


def _slack(spent: Sequence[Spending], delta: float) -> tuple[float, float]:
    """(what floating point adds to epsilon, what it leaves of delta)."""
    if not 0 < delta < 1:
        raise refuse("delta", delta, "must be above 0 and below 1")
    numbers = sum(each.parameters * each.cost.rounds for each in spent)
    if not numbers:
        return 0.0, delta
    epsilon, lost = slack(numbers)
    return epsilon, delta - lost
