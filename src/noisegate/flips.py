"""Signs that are flipped at random: one scale for workers, who flip them, and for accountants, who price them.

Randomized response (Warner, 1965) keeps a sign with probability p = e^r / (1 + e^r) and flips it otherwise; r is what
one sign alone costs. One example can turn all d signs. It then moves the mean of what is sent by 2 (2 p - 1) sqrt(d),
while each coordinate deviates from the mean by 2 sqrt(p (1 - p)). Their quotient

    sigma = sqrt(p (1 - p)) / ((2 p - 1) sqrt(d)) = 1 / (2 sqrt(d) sinh(r / 2))

is the noise multiplier of the Gaussian mechanism that d flipped signs come close to as d grows. A run states its noise
as this `sigma`; what it costs is computed from the flips themselves (`noisegate.privacy`), not from that Gaussian.
"""

import math

from noisegate import checks


def cost_of_sign(sigma: float, signs: int) -> float:
    """r: the epsilon of one sign alone, in one round without sampling. No promise to an example, which moves all."""
    _check(sigma, signs)
    return 2 * math.asinh(1 / (2 * sigma * math.sqrt(signs)))


def flip_probability(sigma: float, signs: int) -> float:
    """1 - p = 1 / (1 + e^r)."""
    rarely = math.exp(-cost_of_sign(sigma, signs))
    return rarely / (1 + rarely)


def sign_bias(sigma: float, signs: int) -> float:
    """2 p - 1 = tanh(r / 2): what is left of a sign on average."""
    _check(sigma, signs)
    return 1 / math.hypot(1, 2 * sigma * math.sqrt(signs))


def sigma_of(cost: float, signs: int) -> float:
    """The noise multiplier at which one sign alone costs `cost`: the inverse of `cost_of_sign`."""
    checks.positive(cost=cost)
    checks.count(signs=signs)
    if cost > 1400:
        raise checks.refuse("cost", cost, "must be at most 1400; a sign that costs more is never flipped")
    return 1 / (2 * math.sqrt(signs) * math.sinh(cost / 2))


def _check(sigma: float, signs: int) -> None:
    checks.positive(sigma=sigma)
    checks.count(signs=signs)
