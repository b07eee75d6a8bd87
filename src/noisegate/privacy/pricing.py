"""What a given noise costs. All numbers come from dp-accounting; this file asks the right question.

`pld` is a tight upper bound (`losses.py`). `rdp` is the looser bound of the literature and the only one that prices
`fixed`. Signs that are flipped at random (`signs.py`) are priced by `pld` and `poisson` only.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from noisegate.checks import count, one_of, positive, refuse
from noisegate.errors import PrivacyError
from noisegate.privacy.losses import EqualRounds, epsilon_of
from noisegate.sampling import ADD_OR_REMOVE, Sampling, accounting

ACCOUNTANTS = ("pld", "rdp")


LARGEST_DELTA = 1e-5
PAPER = "paper"
"""The word for the paper's delta."""

Delta = float | Literal["paper"] | None
"""A number, the paper's (`paper_delta`), or None for `default_delta`."""


def default_delta(examples: int) -> float:
    """min(1e-5, 1 / (10 examples)), so that delta times the number of examples is 0.1 at most."""
    count(examples=examples)
    return min(LARGEST_DELTA, 1 / (10 * examples))


def paper_delta(examples: int) -> float:
    """examples ** -1.1, which is 0.0043 for 141 examples: for comparisons with the paper only."""
    count(examples=examples)
    if examples == 1:
        raise refuse(
            "examples", 1, "the paper's delta = examples ** -1.1 is then 1, which promises nothing; give delta"
        )
    return float(examples**-1.1)


def delta_of(delta: Delta, examples: int) -> float:
    """The number that is meant. delta: as in a spec."""
    if delta is None:
        return default_delta(examples)
    if delta == PAPER:
        return paper_delta(examples)
    if isinstance(delta, bool | str) or not 0 < delta < 1:
        raise refuse("delta", delta, "must be above 0 and below 1, or 'paper' for examples ** -1.1")
    return float(delta)


MOST_NOISE = 1e6


def check_noise(sigma: float) -> float:
    """A noise multiplier that can be priced."""
    positive(sigma=sigma)
    if sigma > MOST_NOISE:
        raise refuse("sigma", sigma, f"must be at most {MOST_NOISE:g}; so much noise leaves nothing of a gradient")
    return float(sigma)


@dataclass(frozen=True)
class Ask:
    """A checked question to the accountant, but for the noise.

    examples: the number that the rate is made of; with `poisson` a declared constant that does not follow the data.
    signs: how many are flipped a round; 0 for Gaussian.
    """

    examples: int
    rounds: int
    sampling: Sampling
    delta: float
    accountant: str
    signs: int = 0

    def __str__(self) -> str:
        flipped = f" of {self.signs} signs" if self.signs else ""
        return (
            f"{self.rounds} rounds{flipped} of {self.sampling.name} sampling with batch {self.sampling.batch} of "
            f"{self.examples} examples, delta {self.delta:.3g}, accountant {self.accountant}"
        )


def ask_of(examples: int, rounds: int, sampling: Sampling, delta: Delta, accountant: str, signs: int = 0) -> Ask:
    """The question, or a SpecError or PrivacyError that says why it has no answer."""
    one_of(ACCOUNTANTS, accountant=accountant)
    if rounds != 0 or isinstance(rounds, bool):
        count(rounds=rounds)
    sampling.rate(examples)  # refuses a batch that does not fit
    if signs != 0 or isinstance(signs, bool):
        count(signs=signs)
        if accountant != "pld" or sampling.relation != ADD_OR_REMOVE:
            raise PrivacyError(
                f"signs = {signs}: a worker that flips signs (sign-randomized, ma-sign) is priced with "
                f'accountant = "pld" and sampling = "poisson" only, not with {accountant!r} and {sampling.name!r}; '
                "leave both out"
            )
    return Ask(examples, rounds, sampling, delta_of(delta, examples), accountant, signs)


@lru_cache(maxsize=4096)
def spent_by(ask: Ask, sigma: float, coarse: float = 1.0) -> float:
    """The epsilon of `ask` with noise `sigma`; inf where the accountant finds no bound."""
    if ask.rounds == 0:
        return 0.0
    with legible(ask, sigma):
        if ask.accountant == "rdp":
            return float(renyi([(ask, sigma)]).get_epsilon(ask.delta))
        return on_grid(ask, sigma, coarse)[0]


def renyi(asked: Sequence[tuple[Ask, float]], orders: Sequence[int] | None = None) -> Any:
    """dp-accounting's accountant of Renyi divergences after all of these; all must have one relation.

    By dp-accounting's own orders unless given, so that anyone can check.
    """
    dp = accounting()  # says what to do where it is missing
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders, asked[0][0].sampling.neighboring())
    for ask, sigma in asked:
        accountant.compose(dp.SelfComposedDpEvent(ask.sampling.event(ask.examples, sigma), ask.rounds))
    return accountant


def on_grid(ask: Ask, sigma: float, coarse: float = 1.0) -> tuple[float, float]:
    """(epsilon by privacy loss distributions, the width of the grid of losses).

    Losses are rounded up to the grid, so that coarser means more pessimistic. The width is 1e-4 for epsilon between
    0.1 and 10. Outside it follows epsilon: below 0.1 for accuracy (but a round's losses never get more than 10,000
    points), and above 10 to bound time. `coarse` widens it. The grid of flipped signs is that of the Gaussian they
    come close to.
    """
    if ask.sampling.relation != ADD_OR_REMOVE:
        raise PrivacyError(
            f"accountant = {ask.accountant!r} cannot price sampling = {ask.sampling.name!r}, whose neighbors "
            f'are {ask.sampling.relation}: use accountant = "rdp", or sampling = "poisson"'
        )
    parts = (rounds_of(ask, sigma),)
    interval = coarse * max(1e-4, 1e-5 * renyi([(ask, sigma)], range(2, 65)).get_epsilon(ask.delta))
    spent = epsilon_of(parts, interval, ask.delta)
    finest = farthest(parts[0].rate, sigma) / 10_000
    for _ in range(2):
        if spent < 0.1:
            interval = min(interval, max(1e-3 * coarse * spent, finest))
            spent = epsilon_of(parts, interval, ask.delta)
    return spent, interval


def rounds_of(ask: Ask, sigma: float) -> EqualRounds:
    """The rounds of `ask`, as their own DP event states them."""
    event = ask.sampling.event(ask.examples, sigma)
    return EqualRounds(event.sampling_probability, event.event.noise_multiplier, ask.signs, ask.rounds)


def farthest(rate: float, sigma: float) -> float:
    """The loss of one round that is exceeded by noise of 10 standard deviations."""
    loss = 10 / sigma + 1 / (2 * sigma**2)
    return math.log1p(rate * math.expm1(loss)) if loss < 700 else loss


@contextmanager
def legible(ask: Any, sigma: float) -> Iterator[None]:
    """What dp-accounting cannot compute is said in a sentence, and what it only warns of is not said.

    It warns of orders that it leaves out, which only makes its bound looser.
    """
    try:
        with _quiet():
            yield
    except (OverflowError, ZeroDivisionError) as error:
        raise PrivacyError(f"sigma = {sigma:g} is too little noise to be priced ({ask}); use more noise") from error


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
