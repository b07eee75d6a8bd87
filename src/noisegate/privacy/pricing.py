"""What a given noise costs. All numbers come from dp-accounting; this file asks the right question.

`pld` is a tight upper bound. `rdp` is the looser bound of the literature and the only one that prices `fixed`.
Signs that are flipped at random (`signs.py`) are priced by `pld` and `poisson` only.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from noisegate.checks import count, one_of, refuse
from noisegate.errors import PrivacyError
from noisegate.privacy.signs import price_signs
from noisegate.sampling import Sampling, accounting

ACCOUNTANTS = ("pld", "rdp")


PAPER_DELTA: Literal["paper"] = "paper"
"""In place of a delta: the one of Xiang et al. (SIGMOD 2023)."""


def default_delta(examples: int) -> float:
    """1e-5, and no more than a tenth of one in so many examples."""
    count(examples=examples)
    return min(1e-5, 0.1 / examples)


def paper_delta(examples: int) -> float:
    """examples^-1.1; a worker with one example must choose its own."""
    count(examples=examples)
    if examples == 1:
        raise refuse("examples", 1, "the paper's delta = examples ** -1.1 is 1, which promises nothing; give delta")
    return float(examples**-1.1)


@dataclass(frozen=True)
class Ask:
    """A checked question to the accountant, but for the noise. signs: how many are flipped a round; 0 for Gaussian."""

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


def ask_of(examples: int, rounds: int, sampling: Sampling, delta: float | None, accountant: str, signs: int = 0) -> Ask:
    one_of(ACCOUNTANTS, accountant=accountant)
    if rounds != 0 or isinstance(rounds, bool):
        count(rounds=rounds)
    sampling.rate(examples)  # refuses a batch that does not fit
    if delta is None:
        delta = default_delta(examples)
    elif isinstance(delta, bool) or not 0 < delta < 1:
        raise refuse("delta", delta, "must be above 0 and below 1")
    if signs != 0 or isinstance(signs, bool):
        count(signs=signs)
        if accountant != "pld" or sampling.name != "poisson":
            raise PrivacyError(
                f"signs = {signs}: a worker that flips signs (sign-randomized, ma-sign) is priced with "
                f'accountant = "pld" and sampling = "poisson" only, not with {accountant!r} and {sampling.name!r}; '
                "leave both out"
            )
    return Ask(examples, rounds, sampling, float(delta), accountant, signs)


@lru_cache(maxsize=4096)
def spent_by(ask: Ask, sigma: float, coarse: float = 1.0) -> float:
    """The epsilon of `ask` with noise `sigma`; inf where the accountant finds no bound."""
    if ask.rounds == 0:
        return 0.0
    if ask.accountant == "rdp":
        return _rdp(ask, sigma)
    return _pld(ask, sigma, coarse)


def _rdp(ask: Ask, sigma: float, orders: Sequence[int] | None = None) -> float:
    """By Renyi divergences, of dp-accounting's own orders unless given, so that anyone can check."""
    accounting()  # says what to do where it is missing
    from dp_accounting import rdp

    return _price(rdp.RdpAccountant(orders, ask.sampling.neighboring()), ask, sigma)


def _pld(ask: Ask, sigma: float, coarse: float) -> float:
    """By privacy loss distributions, rounded up to a grid of losses, so that coarser means more pessimistic.

    The grid is 1e-4 for epsilon between 0.1 and 10. Outside it follows epsilon: below 0.1 for accuracy (but a
    round's losses never get more than 10,000 points), and above 10 to bound time. `coarse` widens it.
    The grid of flipped signs is that of the Gaussian they come close to.
    """
    accounting()
    from dp_accounting import pld

    def price(interval: float) -> float:
        if ask.signs:
            rate = ask.sampling.rate(ask.examples)
            return price_signs(sigma, ask.signs, rate, ask.rounds, ask.delta, interval)
        return _price(pld.PLDAccountant(ask.sampling.neighboring(), interval), ask, sigma)

    interval = coarse * max(1e-4, 1e-5 * _rdp(ask, sigma, range(2, 65)))
    spent = price(interval)
    finest = _spread(ask.sampling.rate(ask.examples), sigma) / 10_000
    for _ in range(2):
        if spent < 0.1:
            interval = min(interval, max(1e-3 * coarse * spent, finest))
            spent = price(interval)
    return spent


def _spread(rate: float, sigma: float) -> float:
    """The loss of one round that is exceeded by noise of 10 standard deviations."""
    loss = 10 / sigma + 1 / (2 * sigma**2)
    return math.log1p(rate * math.expm1(loss)) if loss < 700 else loss


def _price(accountant: Any, ask: Ask, sigma: float) -> float:
    composed = accounting().SelfComposedDpEvent(ask.sampling.event(ask.examples, sigma), ask.rounds)
    if not accountant.supports(composed):
        raise PrivacyError(
            f"accountant = {ask.accountant!r} cannot price sampling = {ask.sampling.name!r}, whose neighbors "
            f'are {ask.sampling.relation}: use accountant = "rdp", or sampling = "poisson"'
        )
    try:
        with _quiet():
            return float(accountant.compose(composed).get_epsilon(ask.delta))
    except (OverflowError, ZeroDivisionError) as error:
        raise PrivacyError(f"sigma = {sigma:g} is too little noise to be priced ({ask}); use more noise") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without dp-accounting's warnings of orders that it leaves out, which only makes its bound looser."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
