"""What a worker's claimed size lets the server expect of its upload.

A worker may say how many examples it holds: its *claimed size*, a public number. Neither the sampling rate nor what
an example costs follows it. A server that judges how long a signal can be needs it: at one rate for all, a worker that
holds twice the declared number draws twice the batch on average, and its signal may be twice as long.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from noisegate import checks

MOST_CLAIMED = 6.0
"""Most times the declared size that a claim counts for. A claim is anyone's word, and each unit of it is room for a
signal as long as an honest batch's. So it has a bound, by a number that no claim moves: the declared size. A median of
the claims would be the adversary's own where most workers are. It is above what one of twenty honest workers with the
shares of Dirichlet(0.1) holds (tests/test_sizes.py)."""


Claims = Sequence[int | None]
"""The sizes that workers claim; None for who claims none."""


def expected_of(claims: Claims, declared: int, device: torch.device | None = None) -> Tensor | None:
    """(n,) how many examples each upload is expected to be made of, over b_c: claim / declared, at most MOST_CLAIMED.

    claims: one for each worker; None counts as the declared size. The answer is None, which means 1 for all, where
    every claim is the declared size up to rounding. So it depends on no other worker what a claim counts for.
    """
    checks.count(declared=declared)
    for claim in claims:
        if claim is not None:
            checks.count(size=claim)
    if all(claim is None or abs(claim - declared) <= 1 for claim in claims):
        return None
    ratios = [1.0 if claim is None else min(MOST_CLAIMED, claim / declared) for claim in claims]
    return torch.tensor(ratios, dtype=torch.float32, device=device)
