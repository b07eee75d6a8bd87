"""The directions that `fortified` fixed before the round, and where uploads and examples lie along them.

The directions are the mean contribution of the server's examples (the server's gradient), moving averages of past
updates, the main difference between workers, and for each worker the moving average of its own uploads.

Momentum makes an upload depend on the worker's last upload, by up to l times its unit vector, and through that one on
the one before, by l^2 / (length of an upload). So a direction contains nothing of the last round, and what an upload
may lie further along it because of the round before is known (`MomentumTerm`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noisegate.aggregators.fortified.mixture import Mixture, expected_of
from noisegate.aggregators.fortified.moments import ExampleMoments
from noisegate.aggregators.fortified.state import COMMON, OWN_SPEED, TINY, FortifiedState
from noisegate.aggregators.fortified.trust import along_last
from noisegate.views import ServerView

MOMENTUM_MARGIN = 1.5
"""The factor by which workers may depend on their last uploads more than the server's examples would."""

MOST_REPEATED = 0.95
"""The largest share of a momentum term that the next upload is taken to repeat.

With more there would be next to no noise, and nothing to find."""

RESTART_SHARE = 1e-12
"""The share of the server's gradient that is added to the main difference before a step of power iteration.

It is what to start from if there is no difference yet. The gradient is never used as that direction itself: in the mean
of the server's examples along it each of them meets itself."""

ROWS = 16
"""The largest number of workers whose own averages a CPU works on at once: more leave its caches."""


class MomentumTerm(NamedTuple):
    """What momentum does to an honest upload beside its signal: (n,) each, but for the signal.

    A worker that sends e times the usual signal depends on its last upload by e l, where one that sends the usual
    signal depends on it by l. Of an upload as long as noise and signal together it repeats no more than

        r = e largest / sqrt(e^2 largest^2 + s^2 d).

    echo: how far the upload may reach along its worker's upload of two rounds ago, times the length of that one. It is
        e^2 l^2 if an upload depends on the last by e l, and that one on the one before; each older one adds at most r
        times as much.
    variance: that of an upload along an unrelated direction: of the noise and of the momentum term.
    signal: () the mean square of the lengths that the server's examples would add.
    """

    echo: Tensor
    variance: Tensor
    signal: Tensor

    @classmethod
    def of(cls, view: ServerView, contributions: Tensor) -> "MomentumTerm":
        """contributions: (A, d) what the server's examples would add; what their squares lack to the largest is l^2."""
        d, expected = view.uploads.shape[1], expected_of(view)
        signal = contributions.norm().square() / len(contributions)
        square = (view.largest**2 - signal).clamp(min=0.0) * expected.square()
        longest = (view.largest * expected).square()
        repeated = longest / (longest + view.noise_std**2 * d).clamp(min=TINY)  # r^2
        echo = square * (MOMENTUM_MARGIN / (1 - repeated.sqrt().clamp(max=MOST_REPEATED)))
        shared = d * (1 - repeated.clamp(max=MOST_REPEATED**2))
        return cls(echo, square / shared + view.noise_std**2, signal)


class Common(NamedTuple):
    """The rows that all uploads are held against, from before the round.

    rows: the class means, the COMMON directions and the label difference, and the label direction, which is for the
    examples alone. lengths: (COMMON,) of the directions before they became unit vectors. classes: how many means.
    """

    rows: Tensor
    lengths: Tensor
    classes: int

    @classmethod
    def of(cls, contributions: Tensor, means: Tensor, state: FortifiedState) -> "Common":
        """contributions: (A, d) of the server's examples. means: (C, d) of their classes."""
        gradient = contributions.mean(0, keepdim=True)
        known = state.update_averages, state.main_difference, state.label_difference, state.label_direction
        rows = torch.cat([means, gradient, *known])
        directions = rows[len(means) : len(means) + COMMON]
        lengths = torch.linalg.vector_norm(directions, dim=1)
        directions /= lengths.clamp(min=TINY)[:, None]  # one that is zero stays so
        return cls(rows, lengths, len(means))

    @property
    def gradient(self) -> Tensor:
        """(1, d) a unit vector: the direction of the server's gradient."""
        return self.rows[self.classes : self.classes + 1]


class OwnProjections(NamedTuple):
    """All that is asked of the uploads, the last ones and the workers' own averages, in one pass: to read is slow.

    along_means: (n, C) the inner products of the uploads with the class means. along: (n, COMMON + 1) how far they lie
    along the common directions and the label difference. along_last: (n,) along the last one of the same worker.

    of_uploads, lengths: (n,) how far each upload lies along its worker's own average, and the length of that average.
    of_examples: (A, n) the server's examples along each. own_averages, main_difference, label_difference: as in
    `FortifiedState`. label_loads: (n,) how far the own averages lie along the label direction; label_shares: (n,) of
    each in the label difference; products: (n,) the inner products of the uploads with them. All are in their unit.
    along_main: (n,) the cosines of the angles between own averages and the main difference.
    """

    along_means: Tensor
    along: Tensor
    along_last: Tensor
    of_uploads: Tensor
    lengths: Tensor
    of_examples: Tensor
    own_averages: Tensor
    main_difference: Tensor
    label_difference: Tensor
    label_loads: Tensor
    label_shares: Tensor
    products: Tensor
    along_main: Tensor

    @classmethod
    def of(
        cls, view: ServerView, contributions: Tensor, state: FortifiedState, common: Common, unit: float
    ) -> "OwnProjections":
        """unit: that own averages are measured in: about the noise.

        The last upload received joins its worker's own average when the next one is received: so the average that an
        upload is measured along never contains the upload that it depends on, and it takes each upload once.

        The main difference is the first principal component of the own averages, by one step of power iteration
        a round: the averages change more slowly than it converges. Where Byzantine workers push and honest workers push
        back, the average of all shows neither, but their difference does.
        """
        n, size = view.uploads.shape
        start = torch.add(state.main_difference, common.gradient, alpha=RESTART_SHARE)
        against = torch.cat([start, state.label_direction, contributions])
        new, held = contributions.new_empty, common.rows[:-1]
        products, own_products, leans = new(len(held), n), new(len(against), n), new(n)
        sums, loads = contributions.new_zeros(3, size), new(3, n)
        of_uploads, lengths = new(n), new(n)
        loads[1], loads[2] = state.counted & state.unrefuted, state.label_loads
        joins = state.counted if view.missing is None else state.counted & ~view.missing
        averages, speed = torch.empty_like(state.own_averages), OWN_SPEED * joins[:, None].to(contributions.dtype)
        rows = max(1, view.scratch // (16 * size))
        rows = rows if contributions.is_cuda else min(rows, ROWS)
        for first in range(0, n, rows):
            here = slice(first, first + rows)
            uploads, average = view.uploads[here], state.own_averages[here].to(contributions.dtype)
            torch.linalg.vecdot(uploads, average, out=of_uploads[here])
            torch.linalg.vector_norm(average, dim=1, out=lengths[here])
            torch.mm(held, uploads.T, out=products[:, here])  # few rows first: a CPU takes half the time
            torch.mm(against, average.T, out=own_products[:, here])
            torch.mul(own_products[0, here], loads[1, here], out=loads[0, here])
            sums.addmm_(loads[:, here], average)
            if view.last is None:
                leans[here] = torch.nan
            else:  # in place, since fresh memory is slow; a speed of 0 leaves an average as it was
                leans[here] = along_last(uploads, view.last[here])
                average.lerp_(view.last[here] / unit, speed[here])
            averages[here] = average
        lengths.clamp_(min=TINY)
        load, many = loads[:2].sum(1)
        difference = torch.addcmul(sums[:1], sums[1:2], load / many.clamp(min=1.0), value=-1.0)
        difference = functional.normalize(difference, eps=TINY)
        length = torch.linalg.vector_norm(sums[2]).clamp(min=TINY)
        along = products.T.contiguous()
        return cls(
            along_means=along[:, : common.classes],
            along=along[:, common.classes :],
            along_last=leans,
            of_uploads=of_uploads / lengths,
            lengths=lengths * unit,
            of_examples=own_products[2:] / lengths,
            own_averages=averages,
            main_difference=difference,
            label_difference=sums[2:] / length,
            label_shares=loads[2] / length,
            products=of_uploads,
            label_loads=own_products[1],
            along_main=own_products[0] / lengths,
        )


class Projections(NamedTuple):
    """Where everything lies along the directions: the COMMON ones first, then each worker's own average.

    of_uploads: (n, PROBES) the uploads. moments: (n, PROBES) each, of the server's examples.
    along_gradient: (n,) where the mix of each worker puts it along the server's gradient, if no example meets itself.
    lengths: (COMMON,) of the directions before they became unit vectors. own_lengths: (n,) of the own averages.
    along_labels: (n,) the uploads along the label difference, and labels_of_examples: (A,) the server's examples.
    examples_along: (A,) these along the label direction, times its length.
    label_direction: as in `FortifiedState`, after the round; turned: () the cosine of the angle that it turned by.
    momentum: what momentum may add. along_main, along_last, own_averages, main_difference, label_difference,
    label_loads, label_shares: as in `OwnProjections`.
    """

    of_uploads: Tensor
    moments: ExampleMoments
    along_gradient: Tensor
    lengths: Tensor
    own_lengths: Tensor
    momentum: MomentumTerm
    along_main: Tensor
    along_last: Tensor
    along_labels: Tensor
    labels_of_examples: Tensor
    examples_along: Tensor
    label_direction: Tensor
    turned: Tensor
    label_difference: Tensor
    label_loads: Tensor
    label_shares: Tensor
    own_averages: Tensor
    main_difference: Tensor

    @classmethod
    def of(
        cls,
        view: ServerView,
        both: tuple[Tensor, Tensor],
        state: FortifiedState,
        common: Common,
        own: OwnProjections,
        mixture: Mixture,
    ) -> "Projections":
        """both: (A, d) what the server's examples would add, and what they would with false labels."""
        contributions, false = both
        momentum, lengths = MomentumTerm.of(view, contributions), common.lengths
        of_examples = (common.rows[common.classes :] @ contributions.T).T
        of_uploads = torch.cat([own.along[:, :COMMON], own.of_uploads[:, None]], 1)
        start = torch.add(own.label_difference, own.main_difference, alpha=RESTART_SHARE)
        moved = torch.lerp(state.label_direction, (start @ false.T) @ false, 1 / max(1, view.labels - 1))
        moved = mixture.classes.apart_from(moved)
        moments = ExampleMoments.of(
            of_examples[:, :COMMON],
            own.of_examples,
            mixture.mix,
            mixture.unknown,
            longest_mean(contributions, mixture),
            momentum.variance,
            view.batch,
        )
        return cls(
            of_uploads=of_uploads,
            moments=moments,
            along_gradient=mixture.mix @ mixture.classes.gram.mean(1) / lengths[0].clamp(min=TINY),
            lengths=lengths,
            own_lengths=own.lengths,
            momentum=momentum,
            along_main=own.along_main,
            along_last=own.along_last,
            # Without the worker's own part in the label difference: its examples are in both, however honest it is.
            along_labels=own.along[:, COMMON] - state.label_shares * own.products,
            labels_of_examples=of_examples[:, COMMON],
            examples_along=of_examples[:, COMMON + 1],
            label_direction=moved,
            turned=functional.cosine_similarity(state.label_direction, moved, eps=TINY)[0],
            label_difference=own.label_difference,
            label_loads=own.label_loads,
            label_shares=own.label_shares,
            own_averages=own.own_averages,
            main_difference=own.main_difference,
        )


def longest_mean(contributions: Tensor, mixture: Mixture) -> Tensor:
    """() the largest mean length of the contributions of a class: no mean of a worker's examples is longer."""
    lengths: Tensor = torch.linalg.vector_norm(contributions, dim=1)
    return lengths.view(mixture.mix.shape[1], -1).mean(1).amax()
