"""How far along each direction an honest upload can be expected.

An honest upload is a signal, which is a mean over a random batch of the worker's examples, plus noise of standard
deviation s in every direction. Along a unit vector p that the upload's noise had no part in, it lies at

    <u, p> = (mean of the batch along p) + s N(0, 1).

What the mean of the batch is expected to be, the server's own examples tell: the classes' means along p, mixed as the
worker's classes are (`mixture`), within z standard errors of that estimate. The batch adds a variance of at most
(mean of squares) / b.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.mixture import expected_of
from noisegate.aggregators.fortified.moments import LEAST_LENGTH
from noisegate.aggregators.fortified.state import OWN_SPEED, TINY, FortifiedState, update_speeds
from noisegate.views import ServerView

SKEW = 0.15
"""How far a worker's own mean may lie off, in standard deviations of the examples, though its mix is known.

A worker's examples of a class need not be like the server's, and its mix is not known exactly."""

HARMLESS_SHIFT = 0.1
"""Shifts up to this many standard deviations of the noise in one upload are not looked for."""


class Interval(NamedTuple):
    """Where the mean of honest uploads is expected along K directions: (n, K) each."""

    low: Tensor
    high: Tensor

    def outside(self, found: Tensor, variance: Tensor) -> Tensor:
        """(n, 2 K) how many standard deviations the (n, K) `found` lie above `high` and below `low`."""
        return torch.cat([found - self.high, self.low - found], 1) * variance.rsqrt().repeat(1, 2)


def expected(view: ServerView, state: FortifiedState, projections: Projections) -> Interval:
    """Where each worker's uploads are expected along every direction: (n, PROBES) each.

    Along the server's mean a itself: the workers' mean e is not known, but a = e + (error), so that
    <e, a> >= |e|^2 - |e| z r / sqrt(A), which is never below -z^2 r^2 / (4 A), whatever |e| is. In the mean of the
    server's examples along a each of them meets itself, so it is too high, which is right for the upper end. At the
    lower end stands the smaller of that bound and of what the mix says where nobody meets itself.
    """
    moments = projections.moments
    allowance = moments.allowance()
    slack = moments.spread * SKEW + HARMLESS_SHIFT * view.noise_std
    low, high = moments.mean - allowance - slack, moments.mean + allowance + slack
    cancelling = allowance[:, 0].square() / projections.lengths[0].clamp(min=LEAST_LENGTH) / -4
    apart = projections.along_gradient - allowance[:, 0]
    low[:, 0] = torch.minimum(cancelling, apart) - slack[:, 0]
    high[:, 1:] += echoes(view, state, projections)
    high[:, -1] += moments.own_reach
    return Interval(low, high)


def echoes(view: ServerView, state: FortifiedState, projections: Projections) -> Tensor:
    """(n, PROBES - 1) how much further an upload may lie because of an older upload that it depends on."""
    echo = projections.momentum.echo[:, None]
    # What one upload can have added to the newest part of a moving average of updates.
    newest = state.largest_weights.amax() * update_speeds(state.update_averages)[:, 0]
    newest = echo * (newest / projections.lengths[1:-1].clamp(min=TINY))
    own = echo * OWN_SPEED / projections.own_lengths[:, None]
    # Older uploads are in the main difference as far as the worker's own average lies along it.
    main = own * projections.along_main.abs()[:, None]
    return torch.minimum(torch.cat([newest, main, own], 1), expected_of(view)[:, None])
