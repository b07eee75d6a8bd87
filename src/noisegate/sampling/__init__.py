"""Which examples a worker uses in a round, and what that choice means for its privacy.

Sampling is accounting: the object that draws the batch is the object that states the DP event of the round,
so nobody can draw one way and be charged for another. Symbols: batch b_c, examples |D_i|, noise sigma.

* `poisson`: each example by itself, with probability b_c over a *declared* number of examples. That number is public
  and one for all workers. It does not follow the data: were the rate b_c / |D_i|, one example more or less would change
  the rate of all others, and cost more than is priced (tests/test_adjacency.py). Who holds fewer examples than declared
  pads with nothing, so |D_i| stays private. Neighbors add or remove one example, which moves a sum of vectors of length
  at most 1 by at most 1.
* `equal`: as `poisson`, but with a declared number for each worker, its own public size, so that everyone expects the
  same batch. The smallest worker then has the highest rate, and its need sets the noise of all.
* `balanced`: as `poisson`, but every class has a public rate of its own, so that all are drawn equally often. The rate
  of the rarest class is priced.
* `fixed`: b_c examples of |D_i|, uniformly, without replacement. |D_i| is public. Neighbors replace one example, which
  moves that sum by up to 2: one vector out, another one in.

A batch can be drawn without dp-accounting; only `event` and `neighboring` need it.
"""

from noisegate.sampling.balanced import BALANCED, Balanced, settled_shares
from noisegate.sampling.schemes import (
    ADD_OR_REMOVE,
    EQUAL,
    REPLACE_ONE,
    Draw,
    EqualBatch,
    FixedSize,
    Poisson,
    Sampling,
    accounting,
)

__all__ = [
    "ADD_OR_REMOVE",
    "BALANCED",
    "EQUAL",
    "REPLACE_ONE",
    "SAMPLINGS",
    "Balanced",
    "Draw",
    "EqualBatch",
    "FixedSize",
    "Poisson",
    "Sampling",
    "accounting",
    "settled_shares",
]

SAMPLINGS: dict[str, type[Poisson] | type[FixedSize]] = {
    "poisson": Poisson,
    "equal": EqualBatch,
    "balanced": Balanced,
    "fixed": FixedSize,
}
