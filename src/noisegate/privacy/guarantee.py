"""What training costs in privacy, and how much noise a budget asks for.

* Unit: one example of one worker. The event of a round and the neighboring relation are the sampling's own.
* `examples`: with `poisson` the declared number that the rate batch / examples is made of, the same whatever the worker
  holds; with `fixed` the number that it holds.
* `delta`: a number, "paper" for examples ** -1.1, or None for min(1e-5, 1 / (10 examples)).
* `signs`: 0 for the Gaussian mechanism. Above 0, that many signs a round are flipped at random, with the probability
  that `noisegate.flips` makes of `sigma`; the epsilon is that of an example which can turn them all.
* `calibrate` never overspends: `epsilon(calibrate(e, ...), ...) <= e`, by the same accountant. Nothing is
  capped and nothing falls back: a budget that cannot be met raises.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from noisegate.checks import count, positive, refuse
from noisegate.errors import PrivacyError
from noisegate.privacy.calibration import noise_for
from noisegate.privacy.pricing import Ask, Delta, ask_of, check_noise, spent_by
from noisegate.privacy.statement import statement
from noisegate.sampling import Sampling


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one worker over all rounds, and everything needed to check it again.

    epsilon_at_1e_5, mu: the same noise said in two other ways (`statement.py`); None if no finite number is known.
    """

    epsilon: float
    delta: float
    epsilon_at_1e_5: float | None
    mu: float | None
    sigma: float
    accountant: str
    relation: str
    sampling: str
    examples: int
    batch: int
    rate: float
    rounds: int
    signs: int = 0

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The fields by name, in order, ready for JSON."""
        return asdict(self)


def epsilon(
    sigma: float,
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    delta: Delta = None,
    accountant: str = "pld",
    signs: int = 0,
) -> float:
    """The epsilon that so many rounds with noise multiplier `sigma` cost a worker; no rounds cost nothing."""
    noise = check_noise(sigma)
    return _finite(ask_of(examples, rounds, sampling, delta, accountant, signs), noise)


def calibrate(
    epsilon: float,
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    delta: Delta = None,
    accountant: str = "pld",
    signs: int = 0,
) -> float:
    """The smallest noise multiplier found that keeps a worker within `epsilon`; it spends 99 % of it or more.

    Where the accountant's epsilon itself jumps over that last percent, as RDP's jumps to 0 for few rounds and
    a small budget, it is the edge of the jump: one millionth less noise would overspend.
    """
    positive(epsilon=epsilon)
    count(rounds=rounds)
    return noise_for(ask_of(examples, rounds, sampling, delta, accountant, signs), float(epsilon))


def guarantee(
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    sigma: float | None = None,
    epsilon: float | None = None,
    delta: Delta = None,
    accountant: str = "pld",
    signs: int = 0,
) -> Guarantee:
    """What a worker is promised with noise `sigma`, or with the noise that the budget `epsilon` asks for.

    The epsilon in the answer is the one that is spent, which is at most the budget.
    """
    ask = ask_of(examples, rounds, sampling, delta, accountant, signs)
    if (sigma is None) == (epsilon is None):
        raise refuse("sigma, epsilon", (sigma, epsilon), "give exactly one of them")
    if epsilon is not None:
        positive(epsilon=epsilon)
        count(rounds=rounds)
        sigma = noise_for(ask, float(epsilon))
    noise = check_noise(sigma)  # type: ignore[arg-type]
    spent, said = _finite(ask, noise), statement(ask, noise)
    return Guarantee(
        epsilon=spent,
        delta=ask.delta,
        epsilon_at_1e_5=said.epsilon_at_1e_5,
        mu=said.mu,
        sigma=noise,
        accountant=accountant,
        relation=sampling.relation,
        sampling=sampling.name,
        examples=examples,
        batch=sampling.batch,
        rate=sampling.rate(examples),
        rounds=rounds,
        signs=signs,
    )


def worst_sigma(
    epsilon: float,
    sizes: Sequence[int],
    *,
    rounds: int,
    sampling: Sampling,
    delta: Delta = None,
    accountant: str = "pld",
    signs: int = 0,
) -> tuple[float, dict[int, float]]:
    """The noise multiplier that serves workers of all `sizes`, and the epsilon of each distinct size at it.

    Uploads must share one noise, so the largest need aggregators. That is usually the smallest worker's, but a delta
    that is not given grows as a worker shrinks, so every size is priced: each epsilon returned is at most the budget.
    """
    positive(epsilon=epsilon)
    count(rounds=rounds)
    if len(sizes) == 0:
        raise refuse("sizes", list(sizes), "must name the number of examples of at least one worker")
    asks = {size: ask_of(size, rounds, sampling, delta, accountant, signs) for size in sorted(set(sizes))}
    sigma = noise_for(next(iter(asks.values())), float(epsilon))
    while True:
        own = {size: spent_by(ask, sigma) for size, ask in asks.items()}
        over = [asks[size] for size in own if own[size] > epsilon]
        if not over:
            return sigma, own
        sigma = max(1.0001 * sigma, *(noise_for(ask, float(epsilon)) for ask in over))


def _finite(ask: Ask, sigma: float) -> float:
    """What `sigma` spends; what cannot be bounded is no number to report."""
    spent = spent_by(ask, sigma)
    if not math.isfinite(spent):
        raise PrivacyError(
            f"sigma = {sigma:g}: no finite epsilon is known for it ({ask}); use more noise or a larger delta"
        )
    return spent
