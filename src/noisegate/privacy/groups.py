"""What a run costs several examples of one worker together: all of them there, or none.

In a round the number of the k examples that are drawn is Binomial(k, q), and each moves the sum by at most 1. Nothing
tells more than noise around that number against noise around 0 (Ganesh, 2024, arXiv:2401.10294), which is a mixture of
Gaussians that dp-accounting composes. The bound is tight, and well below what follows from epsilon alone.
"""

import numpy as np

from noisegate.checks import count
from noisegate.errors import PrivacyError
from noisegate.privacy.losses import deviation
from noisegate.privacy.pricing import Ask, Delta, ask_of, check_noise, legible, rounds_of, spent_by
from noisegate.sampling import ADD_OR_REMOVE, Sampling

MOST = 64
"""The largest group; each example more costs time, and such groups have hardly any privacy left."""


def group_epsilon(
    group: int,
    sigma: float,
    *,
    examples: int,
    rounds: int,
    sampling: Sampling,
    delta: Delta = None,
    accountant: str = "pld",
    signs: int = 0,
) -> float:
    """The epsilon of `group` examples of one worker, added or removed together; of 1 the usual one."""
    count(group=group)
    noise = check_noise(sigma)
    ask = ask_of(examples, rounds, sampling, delta, accountant, signs)
    if group == 1 or rounds == 0:
        return spent_by(ask, noise)
    if group > MOST:
        raise PrivacyError(f"group = {group}: at most {MOST} examples are priced together; choose a smaller group")
    if sampling.relation != ADD_OR_REMOVE or accountant != "pld" or signs:
        raise PrivacyError(
            f"group = {group}: groups are priced with Gaussian noise, poisson sampling and accountant pld only, not "
            f"with {'flipped signs' if signs else 'noise'}, {sampling.name} and {accountant}; leave group out"
        )
    with legible(ask, noise):
        return _price(ask, noise, group)


def _price(ask: Ask, sigma: float, group: int) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.stats import binom

    rate, alone = rounds_of(ask, sigma).rate, spent_by(ask, sigma)
    drawn = np.arange(group + 1.0)
    chances = binom.pmf(drawn, group, rate)
    # As fine as the losses of a round ask for; but a thousandth of the answer is fine enough.
    interval = min(deviation(rate, sigma) / 10, max(1e-3 * group * alone, 1e-7))
    one = pld.from_mixture_gaussian_mechanism(
        sigma, drawn.tolist(), (chances / chances.sum()).tolist(), value_discretization_interval=interval
    )
    return float(one.self_compose(ask.rounds).get_epsilon_for_delta(ask.delta))
