"""How far along each direction an honest upload can be expected.

An honest upload is a signal, which is a mean over a random batch of the worker's examples, plus noise of standard
deviation s in every direction. Along a unit vector p that the upload's noise had no part in, it lies at

    <u, p> = (mean of the batch along p) + s N(0, 1).

What the mean of the batch is expected to be, the server's own examples tell, if they are drawn as the workers' are:
A numbers with mean x and standard deviation r give x +- z r / sqrt(A), and the batch adds a variance of at most
(mean of squares) / b.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.moments import LEAST_LENGTH, ExampleMoments
from noisegate.aggregators.fortified.state import COMMON, OWN_SPEED, TINY, UPDATE_SPEEDS, FortifiedState, update_speeds
from noisegate.views import ServerView

GRADIENT_SKEW = 0.15
"""How far a worker's own mean may lie off along the server's gradient, in standard deviations of the examples.

Data may be uneven."""

HARMLESS_SHIFT = 0.1
"""Shifts up to this many standard deviations of the noise in one upload are not looked for."""


class Interval(NamedTuple):
    """Where the mean of honest uploads is expected along K directions: (K,) or (n, K) each."""

    low: Tensor
    high: Tensor

    def outside(self, found: Tensor, variance: Tensor) -> Tensor:
        """(n, 2 K) how many standard deviations the (n, K) `found` lie above `high` and below `low`."""
        return torch.cat([found - self.high, self.low - found], 1) * variance.rsqrt().repeat(1, 2)


def along_history(moments: ExampleMoments, examples: int, noise_std: float, echoes: Tensor) -> Interval:
    """For directions that the server's examples had no part in.

    echoes: (K,) how much further an upload may lie along each because of an older upload that it depends on.
    """
    error = moments.error(examples) + HARMLESS_SHIFT * noise_std
    return Interval(moments.mean - error, moments.mean + error + echoes)


def along_gradient(moments: ExampleMoments, examples: int, noise_std: float) -> Interval:
    """For the direction of the server's mean a itself, along which the mean is its length.

    The workers' mean e is not known, but a = e + (error), so that <e, a> >= |e|^2 - |e| z r / sqrt(A), which is never
    below -z^2 r^2 / (4 A), whatever |e| is. In the mean of the server's examples along a each of them meets itself, so
    it is too high, which is right for the upper end.
    """
    error, slack = moments.error(examples), moments.spread * GRADIENT_SKEW + HARMLESS_SHIFT * noise_std
    low = error.square() / moments.mean.clamp(min=LEAST_LENGTH) / -4 - slack
    return Interval(low, moments.mean + error + slack)


def expected(
    view: ServerView, state: FortifiedState, projections: Projections, examples: int
) -> tuple[Interval, Tensor]:
    """Where each worker's uploads are expected along every direction, and their variance: (n, PROBES) each."""
    moments, echo = projections.moments, projections.momentum.echo
    # What one upload can have added to the newest part of a moving average of updates.
    newest = state.largest_weights.amax() * echo * update_speeds(state.update_averages)[:, 0]
    own = OWN_SPEED * echo / projections.own_lengths
    echoes = torch.cat([newest / projections.lengths[1:-1].clamp(min=TINY), own]).clamp(max=1.0)
    # The main difference is older than anything that an upload still depends on.
    updates = len(UPDATE_SPEEDS)
    echoes = torch.cat([echoes[:updates], torch.zeros_like(echoes[:1]), echoes[updates:]])
    gradient = along_gradient(ExampleMoments(*(each[:1] for each in moments)), examples, view.noise_std)
    history = along_history(ExampleMoments(*(each[1:] for each in moments)), examples, view.noise_std, echoes)
    every = torch.stack([*(torch.cat(both) for both in zip(gradient, history, strict=True)), moments.variance])
    common = every[:, None, :COMMON].expand(-1, len(view.uploads), -1)
    low, high, variance = torch.cat([common, every[:, COMMON:, None]], 2)
    return Interval(low, high), variance
