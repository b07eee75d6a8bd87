"""Where uploads lie along directions that the aggregator `fortified` fixed before the round."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noisegate import kernels
from noisegate.aggregators import probes
from noisegate.aggregators.doubts import error_of_mean
from noisegate.aggregators.known import COMMON, OWN_SPEED, TINY, Known
from noisegate.aggregators.probes import Seen, hoped_agreement
from noisegate.views import ServerView

LEAN = 1.5
"""Room for workers who lean on their last uploads more than the server's examples would."""

MOST_AGAIN = 0.95
"""Of a lean, that the next upload may repeat. More is next to no noise, and nothing to find."""

RESTART = 1e-12
"""Of the server's gradient, added to the rift when it is looked for: what to start from if there is none.

It is never a probe itself: in the mean of the server's examples along it each of them meets itself."""

ROWS = 16
"""Workers whose past is worked on at a time on a CPU, at most: more leave its caches."""


class Lean(NamedTuple):
    """What momentum does to an honest upload beside its signal: () each.

    echo: how far it may reach along the worker's upload of two rounds ago, times that one's length: l^2 if it leans by
    l on its last upload, and that one on the one before; and so on, each time by at most another largest / (length of
    the noise).
    noise: the variance along a direction that has nothing to do with it, that of the lean included.
    signals: the mean square of the lengths that the server's examples would add.
    """

    echo: Tensor
    noise: Tensor
    signals: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor) -> "Lean":
        """own: (A, d) what the server's examples would add; the lean is what lacks to the largest."""
        echo, spread = cls.scales(view)
        signals = own.norm().square() / len(own)
        lean = (view.largest**2 - signals).clamp(min=0.0)
        return cls(lean * echo, lean / spread + view.noise_std**2, signals)

    @staticmethod
    def scales(view: ServerView) -> tuple[float, float]:
        """What the lean is multiplied by for its echo, and divided by for its part of the variance."""
        d = view.uploads.shape[1]
        again = min(MOST_AGAIN, view.largest / (view.noise_std * math.sqrt(d) + TINY))
        return LEAN / (1 - again), d * (1 - again**2)


class Pasts(NamedTuple):
    """What there is to each worker's own past, and the past itself with the last uploads added.

    found, lengths: (n,) how far the upload lies along it, and its length. of_own: (A, n) the server's examples there.
    past, rift: as in `Known`.
    """

    found: Tensor
    lengths: Tensor
    of_own: Tensor
    past: Tensor
    rift: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor, known: Known, gradient: Tensor, unit: float) -> "Pasts":
        """unit: that a past is measured in: the noise, or what fits half precision. gradient: (1, d) a direction.

        The rift is the first principal component of the pasts, by one step of power iteration a round: pasts change
        more slowly than it converges. Where liars push and honest workers push back, no average shows either, but
        their difference does.
        """
        n, aim = len(view.uploads), torch.add(known.rift[0], gradient[0], alpha=RESTART)
        sums, loads = own.new_zeros(2, own.shape[1]), own.new_empty(2, n)
        found, lengths, of_own = own.new_empty(n), own.new_empty(n), own.new_empty(len(own), n)
        loads[1] = known.counted & known.clear
        past, speed = torch.empty_like(known.past), OWN_SPEED * known.counted[:, None].to(own.dtype)
        rows = max(1, view.scratch // (16 * own.shape[1]))
        rows = rows if own.is_cuda else min(rows, ROWS)
        for first in range(0, n, rows):
            here = slice(first, first + rows)
            average = known.past[here].to(own.dtype)
            torch.linalg.vecdot(view.uploads[here], average, out=found[here])
            torch.linalg.vector_norm(average, dim=1, out=lengths[here])
            of_own[:, here] = own @ average.T
            torch.mul(average @ aim, loads[1, here], out=loads[0, here])
            sums.addmm_(loads[:, here], average)
            if view.last is not None:  # in place, since fresh memory is slow; a speed of 0 leaves an average as it was
                average.lerp_(view.last[here] / unit, speed[here])
            past[here] = average
        lengths.clamp_(min=TINY)
        middle, many = loads.sum(1)
        rift = torch.addcmul(sums[:1], sums[1:], middle / many.clamp(min=1.0), value=-1.0)
        rift = functional.normalize(rift, eps=TINY)
        return cls(found / lengths, lengths * unit, of_own / lengths, past, rift)


class Probed(NamedTuple):
    """Where everything lies along the probes: the COMMON directions, and each worker's past.

    found: (n, PROBES) the uploads. seen: (COMMON + n,) each, the server's examples; error: (COMMON,) the squared
    standard error of their mean. lengths: (COMMON,) of the directions before they were made unit vectors, past_lengths:
    (n,) of the pasts. hoped: () how far along the server's gradient honest uploads should lie.
    lean: as momentum allows. past, rift: as in `Known`, with the last uploads.
    """

    found: Tensor
    seen: Seen
    error: Tensor
    lengths: Tensor
    past_lengths: Tensor
    hoped: Tensor
    lean: Lean
    past: Tensor
    rift: Tensor

    @classmethod
    def of(cls, view: ServerView, own: Tensor, known: Known, unit: float) -> "Probed":
        """own: (A, d) what the server's examples would add. unit: that a past is measured in."""
        if kernels.fused(own) and (at_once := cls._by_kernels(view, own, known, unit)):
            return at_once
        lean = Lean.of(view, own)
        # All directions at once: to read the uploads is what takes time.
        directions = torch.cat([own.mean(0, keepdim=True), known.ways, known.rift])
        lengths = directions.norm(dim=1)
        directions /= lengths.clamp(min=TINY)[:, None]  # one that is zero stays so
        pasts = Pasts.of(view, own, known, directions[:1], unit)
        found = torch.cat([view.uploads @ directions.T, pasts.found[:, None]], 1)
        of_own = torch.cat([own @ directions.T, pasts.of_own], 1)
        seen = Seen.of(of_own, lean.noise, view.batch)
        error = error_of_mean(of_own[:, :COMMON], view.strata)
        hoped = hoped_agreement(own, lengths[0], seen.spread[0], view.strata)
        return cls(found, seen, error, lengths, pasts.lengths, hoped, lean, pasts.past, pasts.rift)

    @classmethod
    def _by_kernels(cls, view: ServerView, own: Tensor, known: Known, unit: float) -> "Probed | None":
        """None if the server has too many examples for them."""
        from noisegate.kernels import probing

        if not probing.takes(own, view.strata):
            return None
        old = (known.ways, known.rift, known.past, known.counted, known.clear)
        echo, spread = Lean.scales(view)
        scales = probing.Scales(
            strata=view.strata,
            batch=view.batch,
            largest=view.largest,
            noise_variance=view.noise_std**2,
            echo=echo,
            spread=spread,
            unit=unit,
            speed=OWN_SPEED,
            restart=RESTART,
            tiny=TINY,
            least_length=probes.TINY,
            least_variance=probes.TINY**2,
        )
        new = probing.probed(probing.Round(view.uploads, view.last, own, *old), scales, view.scratch)
        seen, lean = Seen(new.mean, new.spread, new.variance), Lean(new.echo, new.noise, new.signals)
        return cls(new.found, seen, new.error, new.lengths, new.past_lengths, new.hoped, lean, new.past, new.rift)
