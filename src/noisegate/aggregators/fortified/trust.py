"""Trust in a worker: earned by agreement with the server's examples over the rounds, lost by sending noise alone."""

import math

import torch
from torch import Tensor

from noisegate.aggregators.fortified.mixture import Mixture
from noisegate.aggregators.fortified.moments import LEAST_LENGTH
from noisegate.aggregators.fortified.state import TINY, FortifiedState
from noisegate.views import ServerView

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
    agreement = state.agreement / state.bias_correction.clamp(min=TINY)
    return torch.where(state.unrefuted & state.counted, agreement, 0.0).kthvalue(n + 1 - place).values


def agreement_of(mixture: Mixture, error: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) how far each upload lies along what its worker's mix says it should be, and how far it should.

    That is as far as fresh examples of the same mix would lie. Where it is not above its standard error it is 0. This
    is so near the optimum, where the model fits the workers' examples better than the server's, which it never saw.
    error: (n,) the variance of the server's examples along its gradient, for each mix.
    """
    mix = mixture.mix
    length = ((mix @ mixture.classes.products) * mix).sum(1).clamp(min=0.0).sqrt().clamp(min=LEAST_LENGTH)
    found = (mix * mixture.along).sum(1) / length
    should = ((mix @ mixture.classes.gram) * mix).sum(1) / length
    return found, torch.where(should > error.sqrt(), should, 0.0)


def promised_by(mixture: Mixture, error: Tensor) -> Tensor:
    """() how far a worker with equal shares of the classes should agree. error: as in `agreement_of`."""
    means, gram = mixture.classes.means, mixture.classes.gram
    found = gram.mean() / torch.linalg.vector_norm(means.mean(0)).clamp(min=LEAST_LENGTH)
    return torch.where(found > error.sqrt().amin(), found, 0.0)


def earned(trust: Tensor, agreement: Tensor, expected: Tensor, variance: Tensor) -> Tensor:
    """(n,) trust after a round: plus a log-likelihood ratio, "honest" against "no signal at all".

    agreement: (n,) how far each upload lies along the expected one, with this variance. expected: (n,) how far that of
    an honest worker should; near the optimum nothing is expected, and nothing is learned.
    """
    return (trust + likelihood_ratio(agreement, expected, variance)).clamp(-MOST_TRUST, MOST_TRUST)


def likelihood_ratio(found: Tensor, expected: Tensor, variance: Tensor) -> Tensor:
    """(n,) of "at least a share of what is expected" against "nothing", as a logarithm."""
    looked_for = CAUTION * expected
    found = torch.minimum(found, expected + LUCK * variance.sqrt())
    return looked_for / variance * (found - looked_for / 2)


def along_last(uploads: Tensor, last: Tensor) -> Tensor:
    """(n,) how far each upload lies along the last one of its worker; NaN where that is zero."""
    lengths = torch.linalg.vector_norm(last, dim=1)
    found: Tensor = torch.linalg.vecdot(uploads, last) / lengths.clamp(min=TINY)
    return found.masked_fill_(lengths == 0, torch.nan)


def leaning(view: ServerView, contributions: Tensor, mix: Tensor, variance: float, found: Tensor) -> Tensor:
    """(n,) the log-likelihood ratio of "leans on its own last upload, as momentum makes it" against "does not".

    An honest worker mixes its last upload into every example before that is scaled, so that its next upload lies along
    the last one by what the scaled gradient lacks to the full length. Whoever sends fresh noise alone does not. The
    server's examples tell how far: no further than momentum times the length of an upload.

    found: (n,) how far each upload lies along the last one of its worker (`along_last`); NaN tells nothing.
    """
    if not view.momentum:
        return torch.zeros_like(view.norms)
    length = view.momentum * view.noise_std * math.sqrt(view.uploads.shape[1])
    lean = (view.largest**2 - contributions.square().sum(1)).clamp(min=0.0).sqrt().clamp(max=length)
    expected = mix @ lean.view(mix.shape[1], -1).mean(1)
    ratio = likelihood_ratio(found, expected, variance + expected.square() / view.batch)
    return torch.where(found.isnan(), 0.0, ratio)
