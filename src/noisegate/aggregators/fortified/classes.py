"""How far each worker lies off what its mix says, along the class means of the server's examples.

Whoever teaches the wrong label for a class lies below what every mix explains, along the mean of this class.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.doubt import OFFSET_SPEED
from noisegate.aggregators.fortified.mixture import Mixture
from noisegate.aggregators.fortified.moments import LEAST_LENGTH, MIX_ERROR
from noisegate.aggregators.fortified.state import FortifiedState
from noisegate.views import ServerView


class ClassOffsets(NamedTuple):
    """offsets: (n, C) as in the state, after the round. noise: (n, C) the variance that noise, batches and what is not
    known of the mix leave in them. Both are in units of the standard error that all workers share."""

    offsets: Tensor
    noise: Tensor

    @classmethod
    def of(cls, view: ServerView, state: FortifiedState, mixture: Mixture, counts: Tensor) -> "ClassOffsets":
        mix, classes = mixture.mix, mixture.classes
        equal = mix.mean(1, keepdim=True)
        error = mix.square() @ classes.doubtful
        shared = torch.minimum(error, equal.square() * classes.doubtful.sum(0)).clamp(min=LEAST_LENGTH)
        unsure = (MIX_ERROR * (mix - equal)).square().sum(1, keepdim=True) * classes.gram.var(0)
        batches = view.noise_std**2 * classes.means.square().sum(1) + mix @ classes.squares / view.batch
        batches = batches * (OFFSET_SPEED / (2 - OFFSET_SPEED))
        found = (mixture.along - mix @ classes.gram) * shared.rsqrt()
        offsets = torch.where(counts[:, None], torch.lerp(state.class_offsets, found, OFFSET_SPEED), state.class_offsets)
        return cls(offsets, (batches + error - shared + unsure) / shared)
