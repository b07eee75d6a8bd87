"""What the aggregator `fortified` carries from one round to the next."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.evidence import SHIFTS
from noisegate.aggregators.two_stage import CREDIT
from noisegate.errors import StoreError
from noisegate.views import ServerView, State

UPDATE_SPEEDS = (0.3, 0.05, 0.01)
"""The share of a new update in each moving average of updates. They average over about 3, 20 and 100 rounds."""

OWN_SPEED = 0.01
"""The share of a new upload in the moving average of its worker's uploads. It averages over about 100 rounds."""

COMMON = 1 + len(UPDATE_SPEEDS) + 1
"""The number of directions that are the same for all workers.

They are the server's gradient, the moving averages of updates, and the main difference between workers."""

PROBES = COMMON + 1
"""The number of directions along which an upload is measured: the common ones and its worker's own average."""

TINY = 1e-30
"""The length that stands in for a length of zero in a division."""


class FortifiedState(NamedTuple):
    """What is known after a round of n workers and d coordinates.

    While uploads of a worker are missing, nothing of what is known of this worker changes.

    evidence: (n, 2 PROBES, SHIFTS) the CUSUM statistics against each worker: log-likelihood ratios.
    trust: (n,) the logarithm of the odds that each worker has earned.
    agreement: (n,) the moving average of how far each worker's uploads lie along the server's gradient. It begins at 0.
    bias_correction: (n,) what a moving average of ones would be by now, over the rounds in which an upload arrived;
        `agreement` is divided by it.
    offsets: (n, COMMON - 1) the moving averages of how far each worker lies off the server's examples along the common
        directions but the first.
    places: (n,) the moving averages of how far each worker lies off what its mix says along the label difference. They
        begin at 0. started: () what a moving average of ones would be by now. label_doubt: (n,) what `labels` doubts.
    update_averages: (UPDATE_SPEEDS, d) the moving averages of the updates up to the last but one.
    last_update: (d,) the last update.
    largest_weights: (2,) the largest weight of an upload in the last update and in the one before.
    own_averages: (n, d) the moving average of each worker's uploads, without the last one received, in units of about
        the noise. Half precision is more than enough for something that is mostly noise.
    main_difference: (1, d) the first principal component of the own averages of those who are not suspected, as far as
        power iteration has found it. label_direction: (1, d) that within the span of false labels. label_loads: (n,) the
        loads along it, and label_difference: (1, d) what the own averages make of them, as `labels` explains it.
    gram: (C, C) the moving average of the inner products of class means, and products: (n, C) that of each worker's
        uploads with them. mix: (n, C) the class mix that is fitted to both. seen: (n,) the rounds in it.
    promised: () the moving average of what `agreement` should be for an honest worker with equal shares of the classes.
        It begins at 0.
    credit: (CREDIT, n) the accumulated scores, as `premise` reckons them.
    presence: (n,) the logarithm of the odds that each worker lost for not leaning on its own last upload.
    counted: (n,) whose last upload received passed the first tests, and may become part of its worker's own average.
    unrefuted: (n,) against whom there is no more evidence than is allowed.
    rounds: () int64, how many there were.
    """

    evidence: Tensor
    trust: Tensor
    agreement: Tensor
    bias_correction: Tensor
    offsets: Tensor
    places: Tensor
    started: Tensor
    label_doubt: Tensor
    update_averages: Tensor
    last_update: Tensor
    largest_weights: Tensor
    own_averages: Tensor
    main_difference: Tensor
    label_direction: Tensor
    label_difference: Tensor
    label_loads: Tensor
    gram: Tensor
    products: Tensor
    mix: Tensor
    seen: Tensor
    presence: Tensor
    promised: Tensor
    credit: Tensor
    counted: Tensor
    unrefuted: Tensor
    rounds: Tensor

    @classmethod
    def of(cls, state: State, view: ServerView) -> "FortifiedState":
        """What the last verdict left; before the first round, nothing is known of anybody."""
        if state:
            if state.keys() != set(cls._fields):
                raise StoreError("aggregator 'fortified': its state is that of another version; start the run anew")
            return cls(**{name: state[name] for name in cls._fields})
        n, d = view.uploads.shape
        new = view.uploads.new_zeros
        nobody = torch.zeros_like(view.present)
        return cls(
            evidence=new(n, 2 * PROBES, len(SHIFTS)),
            trust=new(n),
            agreement=new(n),
            bias_correction=new(n),
            offsets=new(n, COMMON - 1),
            places=new(n),
            started=new(()),
            label_doubt=new(n),
            update_averages=new(len(UPDATE_SPEEDS), d),
            last_update=new(d),
            largest_weights=new(2),
            own_averages=new(n, d, dtype=torch.float16),
            main_difference=new(1, d),
            label_direction=new(1, d),
            label_difference=new(1, d),
            label_loads=new(n),
            gram=new(view.strata, view.strata),
            products=new(n, view.strata),
            mix=new(n, view.strata) + (1 if view.expected is None else view.expected[:, None]) / view.strata,
            seen=new(n),
            presence=new(n),
            promised=new(()),
            credit=new(len(CREDIT), n),
            counted=nobody,
            unrefuted=nobody,
            rounds=new((), dtype=torch.int64),
        )


def unless_missing(view: ServerView, new: Tensor, old: Tensor) -> Tensor:
    """(n,) the new value of each worker, or the old one if its upload is missing."""
    return new if view.missing is None else torch.where(view.missing, old, new)


def update_speeds(like: Tensor) -> Tensor:
    """(UPDATE_SPEEDS, 1) the speeds in the type and on the device of `like`."""
    return _update_speeds_on(like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _update_speeds_on(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(UPDATE_SPEEDS, dtype=dtype, device=device)[:, None]
