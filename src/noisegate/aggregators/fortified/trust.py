"""Trust in a worker, earned by agreement with the server's examples over the rounds."""

import torch
from torch import Tensor

from noisegate import kernels
from noisegate.aggregators.fortified.state import TINY, FortifiedState

CAUTION = 0.5
"""The share of the expected agreement that is looked for in an honest worker, in case too much is expected."""

BEST_ONE_IN = 10
"""No more agreement is expected than the best one in so many workers has shown: the server's examples are few."""

AGREEMENT_SPEED = 0.01
"""The share of a new upload in the moving average of a worker's agreement. It averages over about 100 rounds."""

LUCK = 2.0
"""Agreement counts up to this many standard deviations above what is expected, so that nobody earns trust fast."""

MOST_TRUST = 7.0
"""Trust, the logarithm of odds, stays between minus this and this, so that it cannot be hoarded."""


def best_agreement(state: FortifiedState, believed_honest: int) -> Tensor:
    """() what the best tenth of the workers agree on average, or as many as are believed honest if those are fewer.

    A worker who is suspected, or whose last upload did not pass the first tests, counts as not agreeing at all.
    """
    n = len(state.agreement)
    place = max(1, min(believed_honest, -(-n // BEST_ONE_IN)))
    if kernels.fused(state.agreement):
        from noisegate.aggregators.fortified.kernels import trust

        if n <= trust.MANY:
            return trust.best_agreement(state, place)
    agreement = state.agreement / state.bias_correction.clamp(min=TINY)
    return torch.where(state.unrefuted & state.counted, agreement, 0.0).kthvalue(n + 1 - place).values


def earned(trust: Tensor, agreement: Tensor, expected: Tensor, variance: Tensor) -> Tensor:
    """(n,) trust after a round: plus a log-likelihood ratio, "honest" against "no signal at all".

    agreement: (n,) how far each upload lies along the server's gradient, with this () variance. expected: () how far
    that of an honest worker should; near the optimum nothing is expected, and nothing is learned.
    """
    looked_for = CAUTION * expected
    agreement = torch.minimum(agreement, expected + LUCK * variance.sqrt())
    return (trust + looked_for / variance * (agreement - looked_for / 2)).clamp(-MOST_TRUST, MOST_TRUST)
