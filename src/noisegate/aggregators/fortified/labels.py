"""What workers with false labels share, found where false labels lie, and held against the server's examples.

A false label moves an upload within the span of what the server's own examples would add with other labels. That span
has a hundredth of the model's dimensions, so the noise of an average upload in it is small, and groups of workers that
disagree stand apart there. The *label direction* g is the first principal component of the own averages within it, by
one step of power iteration a round: g <- G' G D. The rows of G are the server's examples with labels that are moved by
one class after the other, and g is kept apart from the class means, along which workers with unlike mixes differ most.
The *label difference* D is the sum of the own averages, each times its load, which is how far it lies along g beyond
what its worker's class mix explains; no load counts for more than the mean of all.

The server's examples have a part in g, so they cannot be asked along it. They are asked along D, which is made of
uploads alone. There workers lie off by the server's error, mixed as their classes are, and by their load, which is
known far better than where their uploads lie along D. So where they lie is

    y = M c + b x,

with M the mixes and x the loads; c and b are fitted, and are as uncertain as noise makes them. Of two groups the one
that lies further off the server's examples, for the error that the examples of its classes have, is the one to doubt.

What a worker's own examples have in common, which is their chance as a sample, is in its own average and in its upload.
So its upload is measured without its own part in D.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.mixture import Mixture, regular_inverse
from noisegate.aggregators.fortified.moments import LEAST_LENGTH
from noisegate.aggregators.fortified.state import OWN_SPEED, TINY, FortifiedState
from noisegate.views import ServerView

PLACE_SPEED = 0.02
"""The share of a new upload in the moving average of where uploads lie along D. It averages over about 50 rounds."""

UNSURE = 0.03
"""What mixes explain with differences of up to about this much in the share of a class may be errors of the mixes."""

MIX_ERROR = 0.25
"""How far a worker's mix may be off, as a share of how far it is from equal shares."""

WIDTH = 2.0
"""How far apart chance may put two honest workers, in standard deviations of a load."""

SHARPER = 2.0
"""What a doubt is multiplied by. Where two groups contradict each other, half of each serves nobody."""

FADE = 0.99
"""The share of a doubt that is left after a round in which there is less reason for it."""

TOGETHER = 0.9
"""The share of the believed honest workers that must lie together before the others are doubted for lying apart."""

MOST_WITHIN = 0.98
"""The largest share of the workers that a stretch is taken to hold by chance: no normal variable is bounded."""

MOST_APART = 20.0
"""Doubt of who lies apart counts up to this much."""

LEAST_MASS = 0.5
"""The share of the believed honest workers that must have no more doubt than is taken for none."""


class Loads(NamedTuple):
    """x: (n,) how far the own average of each worker lies along g, beyond what its mix explains.

    noise: (n,) the variance that noise, and what is not known of the mix, leave in x.
    explained: (n, n) gives of something that each worker has what mixes explain: the hat matrix of a ridge regression.
    """

    x: Tensor
    noise: Tensor
    explained: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        mixture: Mixture,
        projections: Projections,
        unit: float,
        usual: Tensor,
    ) -> "Loads":
        """unit: that own averages are measured in. usual: (n,) who takes part."""
        mix, direction = mixture.mix, state.label_direction[0]
        groups = projections.examples_along.view(mix.shape[1], -1) / unit
        of_classes = groups.mean(1)
        begun = state.bias_correction  # own averages begin at zero
        own = mix * usual[:, None]
        explained = mix @ regular_inverse(own.T @ own, UNSURE**2 * usual.sum().clamp(min=1)) @ own.T
        x = (projections.label_loads - begun * (mix @ of_classes)) * usual
        x = (x - explained @ x) * usual
        noise = direction.square().sum() * (view.noise_std / unit) ** 2 * (begun * (2 - begun))
        noise = noise * (OWN_SPEED / (2 - OWN_SPEED))
        unsure = _unsure(mixture) * of_classes.var(correction=0) + _sampled(view, mixture, groups)
        return cls(x, noise + unsure * begun.square(), explained)

    def held(self) -> Tensor:
        """(n,) the loads, none of them above the mean of those that count.

        So the label difference is what groups of workers differ by, and not what one worker alone is far off by.
        """
        size = self.x.abs()
        most = size.sum() / (size > 0).sum().clamp(min=1)
        return torch.minimum(torch.maximum(self.x, -most), most)


class LabelDoubt(NamedTuple):
    """doubt, places: (n,), and memory: (2,), as in the state, after the round."""

    doubt: Tensor
    places: Tensor
    memory: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        state: FortifiedState,
        mixture: Mixture,
        projections: Projections,
        loads: Loads,
        counts: Tensor,
        passed: Tensor,
    ) -> "LabelDoubt":
        """counts: (n,) whose upload passed the first tests. passed: (n,) whose places count."""
        mix = mixture.mix
        groups = projections.labels_of_examples.view(mix.shape[1], -1)
        means = groups.mean(1)
        # What was seen along an older direction counts as far as that one points the same way.
        kept = (1 - PLACE_SPEED) * projections.turned.clamp(min=0.0)
        places = kept * state.places + PLACE_SPEED * (projections.along_labels - mix @ means)
        places = torch.where(counts, places, state.places)
        memory = torch.stack([kept, kept.square()]) * state.memory + _speeds(places.dtype, places.device)
        started, squares = memory.unbind()
        # What noise and batches leave in a place; then in what is fitted to all of them.
        chance = squares * (view.noise_std**2 + groups.square().mean() / view.batch)
        x = loads.x * passed
        power = x.square().sum().clamp(min=TINY)
        fitted = chance * (loads.explained.diagonal() + x.square() / power)

        slope = (x @ places) / power
        found = loads.explained @ ((places - slope * x) * passed) + slope * loads.x

        error = mix.square() @ (_within(groups) / groups.shape[1])
        error = error + _sampled(view, mixture, groups) + _unsure(mixture) * means.var(correction=0)
        noise = slope.square() * loads.noise
        alone = found.square() / (2 * (error * started.square() + noise + fitted)).clamp(min=LEAST_LENGTH)
        apart = (loads.x[:, None] - loads.x).square()
        unsure = 2 * WIDTH**2 * (noise[:, None] + apart * (chance / power))
        steps = slope.square() * apart / unsure.clamp(min=LEAST_LENGTH**2)
        near = torch.where(passed, alone + steps, torch.inf).amin(1)
        doubt = torch.minimum(alone, near)
        doubt = SHARPER * (doubt - _none(doubt, mixture.expected, passed, view)).clamp(min=0.0)
        doubt = torch.maximum(doubt, apart_from_most(loads.x, loads.noise, passed, view.believed_honest))
        doubt = torch.where(counts, torch.maximum(doubt, FADE * state.label_doubt), state.label_doubt)
        return cls(doubt, places, memory)


def apart_from_most(x: Tensor, noise: Tensor, passed: Tensor, believed_honest: int) -> Tensor:
    """(n,) the doubt about who has another load than most workers, where most workers are believed honest.

    Nine tenths of those who are believed honest must lie together, and be more than half of all. Then the server's
    examples need not be asked. It is the log-likelihood of lying that far off, by Student's distribution, less that of
    the furthest of so many. How far chance puts honest workers, the shortest stretch tells that holds so many: the
    label direction follows their noise, so that it is more than the noise of one load. Where two groups share the
    workers evenly that stretch holds both, and nobody lies far off.

    x, noise: (n,) as in `Loads`. passed: (n,) who counts.
    """
    n, many = len(x), math.ceil(TOGETHER * believed_honest)
    if 2 * many <= n:
        return torch.zeros_like(x)
    ordered = torch.where(passed, x, torch.inf).sort().values
    lengths = (ordered[many - 1 :] - ordered[: n - many + 1]).nan_to_num(torch.inf, torch.inf)
    length, first = lengths.min(0)
    middle = (ordered.gather(0, first[None]) + length / 2)[0]
    within = (many / passed.sum().clamp(min=many)).clamp(max=MOST_WITHIN)
    scatter = length / (2 * torch.special.ndtri((1 + within) / 2))
    usual = (noise * passed).sum() / passed.sum().clamp(min=1)
    variance = noise * (scatter.square() / usual.clamp(min=LEAST_LENGTH**2)).clamp(min=1.0)
    square = (x - middle).square() / variance.clamp(min=LEAST_LENGTH**2)
    far = many / 2 * torch.log1p(square / many) - math.log(n)
    return torch.where(passed & length.isfinite(), far.clamp(0.0, MOST_APART), 0.0)


@functools.lru_cache(maxsize=8)
def _speeds(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The share of a round in the places, and its square."""
    return torch.tensor([PLACE_SPEED, PLACE_SPEED**2], dtype=dtype, device=device)


def _unsure(mixture: Mixture) -> Tensor:
    """(n,) the variance of all shares of each mix together."""
    apart = mixture.mix - mixture.mix.mean(1, keepdim=True)
    return MIX_ERROR**2 * apart.square().sum(1) + mixture.unknown


def _sampled(view: ServerView, mixture: Mixture, groups: Tensor) -> Tensor:
    """(n,) the variance of a worker's mean upload that its own examples leave, as a sample of so many."""
    return mixture.expected * (_within(groups).mean() / view.declared)


def _within(groups: Tensor) -> Tensor:
    """(C,) the variance of examples within each class, from so few the mean of its own and that of all. (C, each).

    Where there is one example of each class, the variance of all examples stands in for it, which is no smaller.
    """
    if groups.shape[1] == 1:
        return groups.var(0).expand(len(groups))
    within = groups.var(1)
    return (within + within.mean()) / 2


def _none(doubt: Tensor, expected: Tensor, passed: Tensor, view: ServerView) -> Tensor:
    """() the doubt up to which LEAST_MASS of as many workers lie as are believed honest: it is taken for none.

    Workers count by the examples that are expected of them: who sends next to nothing lies near everything.
    """
    ordered = torch.where(passed, doubt, torch.inf).sort()
    mass = (expected * passed)[ordered.indices].cumsum(0)
    enough = LEAST_MASS * torch.clamp(mass[-1], max=float(view.believed_honest))
    found = ordered.values.gather(0, (mass < enough).sum().clamp(max=len(doubt) - 1)[None])[0]
    return torch.where(found.isfinite(), found, 0.0)
