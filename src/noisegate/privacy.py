"""What training costs in privacy, and how much noise a budget asks for.

All numbers come from dp-accounting; this file asks the right question and rounds the answer toward privacy.

* Unit: one example of one worker. The event of a round and the neighboring relation are the sampling's own.
* `calibrate` never overspends: `epsilon(calibrate(e, ...), ...) <= e`, by the same accountant. Nothing is
  capped and nothing falls back: a budget that cannot be met raises.
* `pld` is a tight upper bound. `rdp` is the looser bound of the literature, and alone in pricing `fixed`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from noisegate.checks import count, one_of, positive, refuse
from noisegate.errors import PrivacyError
from noisegate.sampling import Sampling, accounting

ACCOUNTANTS = ("pld", "rdp")

SMALLEST, LARGEST = 0.05, 1e6  # the noise multipliers that calibration looks at
KEEP, AIM = 0.999, 0.9995  # calibration stops when this share of the budget is spent; what it aims at


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one worker over all rounds, and everything needed to check it again."""

    epsilon: float
    delta: float
    sigma: float
    accountant: str
    relation: str
    sampling: str
    examples: int
    batch: int
    rate: float
    rounds: int

    def as_dict(self) -> dict[str, float | int | str]:
        """The fields by name, in order, ready for JSON."""
        return asdict(self)


def default_delta(examples: int) -> float:
    """The paper's delta = |D_i|^-1.1, below 1 / |D_i|; a worker with one example must choose its own."""
    count(examples=examples)
    if examples == 1:
        raise refuse(
            "examples", 1, "the default delta = examples ** -1.1 is 1, which promises nothing; give delta"
        )
    return float(examples**-1.1)


def epsilon(
    sigma: float,
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    delta: float | None = None,
    accountant: str = "pld",
) -> float:
    """The epsilon that so many rounds with noise multiplier `sigma` cost a worker; no rounds cost nothing."""
    positive(sigma=sigma)
    return _spent(_ask(examples, rounds, sampling, delta, accountant), float(sigma))


def calibrate(
    epsilon: float,
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    delta: float | None = None,
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier found that keeps a worker within `epsilon`; it spends 99 % of it or more.

    Where the accountant's epsilon itself jumps over that last percent, as RDP's does below 0.001, it is the
    smallest found on the safe side of the jump.
    """
    positive(epsilon=epsilon)
    count(rounds=rounds)
    return _calibrate(_ask(examples, rounds, sampling, delta, accountant), float(epsilon))


def guarantee(
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    sigma: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: str = "pld",
) -> Guarantee:
    """What a worker is promised with noise `sigma`, or with the noise that the budget `epsilon` asks for.

    The epsilon in the answer is the one that is spent, which is at most the budget.
    """
    ask = _ask(examples, rounds, sampling, delta, accountant)
    if (sigma is None) == (epsilon is None):
        raise refuse("sigma, epsilon", (sigma, epsilon), "give exactly one of them")
    if epsilon is not None:
        positive(epsilon=epsilon)
        count(rounds=rounds)
        sigma = _calibrate(ask, float(epsilon))
    positive(sigma=sigma)
    noise = float(sigma)  # type: ignore[arg-type]
    rate = sampling.rate(examples)
    return Guarantee(
        epsilon=_spent(ask, noise),
        delta=ask.delta,
        sigma=noise,
        accountant=accountant,
        relation=sampling.relation,
        sampling=sampling.name,
        examples=examples,
        batch=sampling.batch,
        rate=rate,
        rounds=rounds,
    )


def worst_sigma(
    epsilon: float,
    sizes: Sequence[int],
    *,
    rounds: int,
    sampling: Sampling,
    delta: float | None = None,
    accountant: str = "pld",
) -> tuple[float, dict[int, float]]:
    """The noise multiplier that serves workers of all `sizes`, and the epsilon of each distinct size at it.

    Uploads must share one noise, so the largest need rules. That is usually the smallest worker's, but delta
    grows as a worker shrinks, so every size is priced: each epsilon returned is at most the budget.
    """
    positive(epsilon=epsilon)
    count(rounds=rounds)
    if len(sizes) == 0:
        raise refuse("sizes", list(sizes), "must name the number of examples of at least one worker")
    asks = {size: _ask(size, rounds, sampling, delta, accountant) for size in sorted(set(sizes))}
    sigma = _calibrate(next(iter(asks.values())), float(epsilon))
    while True:
        own = {size: _spent(ask, sigma) for size, ask in asks.items()}
        over = [asks[size] for size in own if own[size] > epsilon]
        if not over:
            return sigma, own
        sigma = max(math.nextafter(sigma, math.inf), *(_calibrate(ask, float(epsilon)) for ask in over))


@dataclass(frozen=True)
class _Ask:
    """A checked question to the accountant, but for the noise."""

    examples: int
    rounds: int
    sampling: Sampling
    delta: float
    accountant: str

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds of {self.sampling.name} sampling with batch {self.sampling.batch} of "
            f"{self.examples} examples, delta {self.delta:.3g}, accountant {self.accountant}"
        )


def _ask(examples: int, rounds: int, sampling: Sampling, delta: float | None, accountant: str) -> _Ask:
    one_of(ACCOUNTANTS, accountant=accountant)
    if rounds != 0 or isinstance(rounds, bool):
        count(rounds=rounds)
    sampling.rate(examples)  # refuses a batch that does not fit
    if delta is None:
        delta = default_delta(examples)
    elif isinstance(delta, bool) or not 0 < delta < 1:
        raise refuse("delta", delta, "must be above 0 and below 1")
    return _Ask(examples, rounds, sampling, float(delta), accountant)


@lru_cache(maxsize=4096)
def _spent(ask: _Ask, sigma: float, coarse: float = 1.0) -> float:
    """The epsilon of `ask` with noise `sigma`; inf where the accountant finds no bound."""
    if ask.rounds == 0:
        return 0.0
    if ask.accountant == "rdp":
        return _rdp(ask, sigma)
    return _pld(ask, sigma, coarse)


def _rdp(ask: _Ask, sigma: float, orders: Sequence[int] | None = None) -> float:
    """By Renyi divergences, of dp-accounting's own orders unless given, so that anyone can check."""
    from dp_accounting import rdp

    return _price(rdp.RdpAccountant(orders, ask.sampling.neighboring()), ask, sigma)


def _pld(ask: _Ask, sigma: float, coarse: float) -> float:
    """By privacy loss distributions, rounded up to a grid of losses, so that coarser means more pessimistic.

    The grid is 1e-4 for epsilon between 0.1 and 10. Outside it follows epsilon: below 0.1 for accuracy (but a
    round's losses never get more than 10,000 points), and above 10 to bound time. `coarse` widens it.
    """
    from dp_accounting import pld

    def price(interval: float) -> float:
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


def _price(accountant: Any, ask: _Ask, sigma: float) -> float:
    composed = accounting().SelfComposedDpEvent(ask.sampling.event(ask.examples, sigma), ask.rounds)
    if not accountant.supports(composed):
        raise PrivacyError(
            f"accountant = {ask.accountant!r} cannot price sampling = {ask.sampling.name!r}, whose neighbors "
            f'are {ask.sampling.relation}: use accountant = "rdp", or sampling = "poisson"'
        )
    try:
        with _quiet():
            return float(accountant.compose(composed).get_epsilon(ask.delta))
    except OverflowError as error:
        raise PrivacyError(
            f"sigma = {sigma:g} is too little noise to be priced ({ask}); use more noise"
        ) from error


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


@lru_cache(maxsize=1024)
def _calibrate(ask: _Ask, budget: float) -> float:
    if ask.accountant == "rdp":
        return _solve(ask, budget, 1.0, coarse=1.0)
    return _solve(ask, budget, _solve(ask, budget, 1.0, coarse=10.0), coarse=1.0)


def _solve(ask: _Ask, budget: float, start: float, coarse: float) -> float:
    """A noise multiplier that spends between KEEP * budget and budget, sought from `start`, in logarithms.

    If epsilon jumps over that range, the smallest multiplier found on the safe side of the jump.
    """
    over: tuple[float, float] | None = None  # (log sigma, log epsilon) of the largest noise seen to overspend
    safe: tuple[float, float] | None = None  # and of the smallest seen not to
    x = math.log(start)
    for step in range(200):
        spent = _spent(ask, math.exp(x), coarse)
        if KEEP * budget <= spent <= budget:
            return math.exp(x)
        point = x, math.log(spent) if spent > 0 else -math.inf
        over, safe = (point, safe) if spent > budget else (over, point)
        if over is None and x <= math.log(SMALLEST):
            raise PrivacyError(
                f"epsilon = {budget:g} asks for no privacy: a noise multiplier of {SMALLEST:g} does not "
                f"spend it ({ask}). Ask for a smaller epsilon"
            )
        if safe is None and x >= math.log(LARGEST):
            raise PrivacyError(
                f"epsilon = {budget:g} cannot be met: a noise multiplier of {LARGEST:g} overspends it "
                f"({ask}). Allow a larger epsilon or delta, or fewer rounds"
            )
        if over and safe and safe[0] - over[0] < 1e-9:
            return math.exp(safe[0])
        x = _next(over, safe, math.log(AIM * budget), bisect=step % 4 == 3)
    raise PrivacyError(f"epsilon = {budget:g}: calibration did not settle ({ask}); ask for another epsilon")


def _next(
    over: tuple[float, float] | None, safe: tuple[float, float] | None, aim: float, bisect: bool
) -> float:
    """Where to look next: log epsilon falls almost linearly in log sigma, by 1 or more for 1.

    A secant inside the bracket, bisected now and then to bound the worst case; without a bracket a step that
    should reach the other side.
    """
    if over and safe:
        if bisect or math.isinf(over[1]) or math.isinf(safe[1]):
            return (over[0] + safe[0]) / 2
        return over[0] + (safe[0] - over[0]) * (over[1] - aim) / (over[1] - safe[1])
    x, spent = over or safe or (0.0, aim)
    wanted = x + max(-math.log(4), min(spent - aim, math.log(4)))
    return max(math.log(SMALLEST), min(wanted, math.log(LARGEST)))
