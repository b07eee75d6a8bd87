"""What workers with false labels share, found where false labels lie, and held against the server's examples.

A false label moves an upload within the span of what the server's own examples would add with other labels. That span
has a hundredth of the model's dimensions, so that the noise of an average upload in it is small, and groups of workers
that disagree stand apart there. The *label direction* g is the first principal component of the own averages within it:
power iteration with g <- G' G D, where the rows of G are the server's examples with labels moved by one shift after the
other, and D is what the load of each worker along g makes of the own averages, less what the class mixes explain.

The server's examples have a part in g, so they cannot be asked along it. They are asked along D, in which they have
none: it is made of uploads alone. There all workers lie off by the server's error, mixed as each worker's classes are,
and by their place along g, which is known far better than their place along D. So the places are

    y = M c + b x,

with M the mixes and x the places along g; c and b are fitted. Of two groups the one that lies further off the server's
examples, for what the examples of its classes leave open, is the one to doubt.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.mixture import Mixture, regular_inverse
from noisegate.aggregators.fortified.moments import LEAST_LENGTH
from noisegate.aggregators.fortified.state import TINY, FortifiedState
from noisegate.views import ServerView

PLACE_SPEED = 0.02
"""The share of a new upload in the moving averages of places. They average over about 100 rounds."""

UNSURE = 0.03
"""Differences between mixes up to about this much, in the share of a class, may be errors of the mixes themselves."""

MIX_ERROR = 0.25
"""How far a worker's mix may be off, as a share of how far it is from equal shares."""

WIDTH = 2.0
"""How far apart chance may put two honest workers, in standard deviations of a place along g."""

SKEW = 0.03
"""How far a worker's own mean may lie off, in standard deviations of the examples: as in a sample of a hundred."""

FADE = 0.99
"""The share of a doubt that is left of it after a round in which there is less reason for it."""

SHARPER = 2.0
"""What a doubt is multiplied by. Of two groups that contradict each other one is honest: part of both serves neither."""

LEAST_MASS = 0.5
"""The share of the believed honest workers that must stand at least as near for a position to count as the nearest."""

DEBUG=None

class Explained(NamedTuple):
    """What mixes explain of something that each worker has. smoother: (n, n), the hat matrix of a ridge regression."""

    smoother: Tensor

    @classmethod
    def by(cls, mix: Tensor, counts: Tensor) -> "Explained":
        """mix: (n, C). counts: (n,) who takes part."""
        own = mix * counts[:, None]
        ridge = UNSURE**2 * counts.sum().clamp(min=1.0)
        inverse = regular_inverse(own.T @ own, ridge)
        return cls(mix @ inverse @ own.T)

    def of(self, values: Tensor) -> Tensor:
        """(n,) the explained part of (n,) values."""
        return self.smoother @ values


class LabelDoubt(NamedTuple):
    """doubt: (n,) in nats. places: (n, 2) and memory: (2,) as in the state, after the round."""

    doubt: Tensor
    places: Tensor
    started: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        mixture: Mixture,
        loads: Tensor,
        load_noise: Tensor,
        load_spread: Tensor,
        along: Tensor,
        of_examples: Tensor,
        turned: Tensor,
        counts: Tensor,
        passed: Tensor,
    ) -> "LabelDoubt":
        """along: (n, 2) where the uploads lie along g and D, unit vectors; of_examples: (A, 2) the server's examples.

        counts: (n,) whose upload passed the first tests. passed: (n,) whose places count.
        """
        mix = mixture.mix
        groups = of_examples.view(mix.shape[1], -1)
        # What was seen along an older direction counts as far as that one points the same way.
        kept = (1 - PLACE_SPEED) * turned.clamp(min=0.0)
        places = kept * state.places + PLACE_SPEED * (along - mix @ groups.mean(1))
        places = torch.where(counts, places, state.places)
        started = kept * state.started + PLACE_SPEED

        x = loads * passed
        off = (mix - mix.mean(1, keepdim=True)).square().sum(1)
        noise = load_noise + MIX_ERROR**2 * off * load_spread
        slope = (x @ places) / x.square().sum().clamp(min=TINY)
        shared = Explained.by(mix, passed.to(mix.dtype)).of((places - slope * x) * passed)
        found = shared + slope * x
        y = places

        within = _within(groups) / groups.shape[1]
        spread = SKEW**2 * of_examples.var() * mix.square().sum(1) * mix.shape[1]
        spread = spread + MIX_ERROR**2 * off * groups.mean(1).var()
        error = (mix.square() @ within + spread) * started.square() + slope.square() * noise
        alone = found.square() / (2 * error).clamp(min=LEAST_LENGTH)
        width = (2 * (WIDTH * slope).square() * noise).clamp(min=LEAST_LENGTH**2)[:, None]
        apart = slope * (x[:, None] - x)
        near = torch.where(passed, alone + apart.square() / width, torch.inf).amin(1)
        doubt = torch.minimum(alone, near)
        if DEBUG is not None: DEBUG.update(x=x,y=y,slope=slope,shared=shared,found=found,error=error,alone=alone,near=near,noise=noise,turned=turned,started=started,places=places,doubt=doubt)
        doubt = SHARPER * (doubt - _nearest(doubt, mixture.expected, passed, view)).clamp(min=0.0)
        doubt = torch.where(counts, torch.maximum(doubt, FADE * state.label_doubt), state.label_doubt)
        return cls(doubt, places, started)


def _within(groups: Tensor) -> Tensor:
    """(C,) the variance within each class, from so few the larger of its own and the mean of all; (C, each) examples.

    Where there is one example of each class, the variance of all examples stands in for it, which is no smaller.
    """
    if groups.shape[1] == 1:
        return groups.var(0).expand(len(groups))
    within = groups.var(1)
    return (within + within.mean()) / 2


def _nearest(doubt: Tensor, expected: Tensor, passed: Tensor, view: ServerView) -> Tensor:
    """() the doubt that is shared by LEAST_MASS of as many workers as are believed honest.

    Workers count by the examples that are expected of them: who sends next to nothing lies near everything.
    """
    ordered = torch.where(passed, doubt, torch.inf).sort()
    mass = (expected * passed)[ordered.indices].cumsum(0)
    enough = LEAST_MASS * torch.clamp(mass[-1], max=float(view.believed_honest))
    found = ordered.values[(mass < enough).sum().clamp(max=len(doubt) - 1)]
    return torch.where(found.isfinite(), found, 0.0)
