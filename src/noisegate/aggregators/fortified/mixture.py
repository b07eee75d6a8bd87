"""The class mix that each worker's uploads are made of, learned over the rounds.

Honest workers need not hold the same share of every class. The mean contribution of a worker is a mixture of the
classes' means, of which the server's own examples are a sample:

    E u_i = sum_c mix_ic m_c,   mix_ic >= 0,   sum_c mix_ic = e_i,

where e_i is the worker's expected batch over the public one. The mix is the least-squares fit of its uploads to the
class means of the server's examples, averaged over about a hundred rounds, among all mixes that exist. It starts from
equal shares, and leaves them only as far as the uploads say more than their noise.

BOBA (Bao, Wu and He, arXiv 2208.12932) uses the same geometry without noise.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.aggregators.fortified.state import TINY, FortifiedState
from noisegate.views import ServerView

MIX_ROUNDS = 100
"""The number of a worker's first uploads that its mix is learned from.

A worker's examples stay the same, so its mix does. Later rounds tell less of it: where the model already fits most
examples of a class, the mean of a few of them is that of one or two that it does not fit."""

USUAL_MIX = 0.3
"""The standard deviation of the share of a class, before anything is known of a worker."""

TILTS, MOST_TILT = 3, 3.0
"""Steps of proportional fitting in a round, and by how much they change a weight at most."""

SAME = 0.01
"""What lies within the span of the class means is taken out of a direction, down to this share of their mean square."""

INVERSIONS = 20
"""Newton-Schulz steps: enough for the ratios of eigenvalues that occur."""

CERTAIN = 2.0
"""How many times its noise the square of a mix's distance from equal shares must be before any of it is believed."""

STEPS = 2
"""Steps of projected gradient descent in a round: the fit changes more slowly than they converge."""


class ClassMeans(NamedTuple):
    """The class means of the server's examples, for C classes.

    means: (C, d). products: (C, C) their inner products. gram: (C, C) estimates of those of the workers' class means:
    where an example would meet itself, it is left out. So nothing in it grows with the error of the examples.
    """

    means: Tensor
    products: Tensor
    gram: Tensor

    @classmethod
    def of(cls, contributions: Tensor, strata: int) -> "ClassMeans":
        """contributions: (A, d). strata: the number of classes; 1 if classes are not known, and so no mix is."""
        each = len(contributions) // strata
        groups = contributions.view(strata, each, -1)
        means = groups.mean(1)
        products, own = means @ means.T, groups.square().sum((1, 2)) / each  # each example with itself
        # An example alone meets only itself.
        diagonal = (products.diagonal() * each - own) / (each - 1) if each > 1 else own / 2
        place = torch.eye(strata, dtype=torch.bool, device=products.device)
        return cls(means, products, torch.where(place, diagonal, products))

    def apart_from(self, direction: Tensor) -> Tensor:
        """(1, d) the direction without what lies within the span of the class means."""
        inverse = regular_inverse(self.products, SAME * self.products.diagonal().mean())
        return direction - (direction @ self.means.T) @ inverse @ self.means


class Mixture(NamedTuple):
    """mix: (n, C) everyone's mix before the round. gram, products, mix_after, seen: after it, as in the state.

    unknown: (n,) the variance of all shares of a mix together that noise leaves. classes: the class means of the round.
    along: (n, C) the inner products of the uploads with them. expected: (n,) what each mix adds up to.
    """

    mix: Tensor
    unknown: Tensor
    classes: ClassMeans
    along: Tensor
    expected: Tensor
    gram: Tensor
    products: Tensor
    mix_after: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, view: ServerView, classes: ClassMeans, along: Tensor, state: FortifiedState, counts: Tensor
    ) -> "Mixture":
        """along: (n, C) the inner products of the uploads with the class means. counts: (n,) whose upload passed the
        first tests; the mix of the others stays as it was.
        """
        expected = expected_of(view)
        counts = counts & (state.seen < MIX_ROUNDS)
        rounds = state.seen + counts
        share = counts.any() / (1 + state.seen.amax())
        gram = torch.lerp(state.gram, classes.products, share)
        learned = torch.lerp(state.products, along, 1 / rounds.clamp(min=1.0)[:, None])
        products = torch.where(counts[:, None], learned, state.products)
        variance = view.noise_std**2 + classes.products.diagonal().mean() / view.batch
        ridge = variance / (rounds.clamp(min=1.0) * USUAL_MIX**2)
        mix = fitted(state.mix, gram, products, ridge, expected)
        mix = torch.where(counts[:, None], mix, state.mix)
        usual = typical(state.mix, state.unrefuted, expected)
        doubtful = variance / state.seen.clamp(min=1.0) * spread_of_fit(gram, ridge.mean())
        unknown = left_unknown(usual, doubtful, expected, state.unrefuted)
        usual = believed(usual, doubtful)
        return cls(usual, unknown, classes, along, expected, gram, products, mix, rounds)


def typical(mix: Tensor, counts: Tensor, expected: Tensor) -> Tensor:
    """(n, C) the mixes, such that the usual one is of equal shares: what all share is the error of the examples."""
    equal = 1 / mix.shape[1]
    shares = mix / expected[:, None]
    usual = (shares * counts[:, None]).sum(0) / counts.sum().clamp(min=1) - equal
    usual = (usual * counts.any()).clamp(-equal / 2, equal / 2)
    return on_simplex(mix - usual * expected[:, None], expected)


def regular_inverse(matrix: Tensor, ridge: Tensor) -> Tensor:
    """(C, C) the inverse of the matrix, whose eigenvalues are not negative, plus `ridge`.

    By Newton-Schulz iteration: a device that records a round cannot ask a solver.
    """
    one = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    regular, two = matrix + ridge * one, 2 * one
    found = one / regular.abs().sum(1).amax().clamp(min=TINY)
    for _ in range(INVERSIONS):
        found = found @ torch.addmm(two, regular, found, alpha=-1.0)
    return found


def spread_of_fit(gram: Tensor, ridge: Tensor) -> Tensor:
    """() the variance of all shares of a fitted mix together, for products whose noise has `gram` as its covariance.

    The fit multiplies the products by R = (gram + ridge)^-1. So that is the trace of R gram R.
    """
    inverse = regular_inverse(gram, ridge)
    return (inverse.trace() - ridge * inverse.square().sum()).clamp(min=0.0)


def left_unknown(mix: Tensor, noise: Tensor, expected: Tensor, counts: Tensor) -> Tensor:
    """(n,) the variance of all shares of each mix together, given what noise leaves of them. noise: (n,) of all shares.

    How uneven a mix may be whose worker sends too little to tell, those of the others tell: for their size, it is as
    uneven as theirs are beyond their noise. Where workers are alike nothing is left.
    """
    apart = (mix - mix.mean(1, keepdim=True)).square().sum(1) - noise
    usual = (apart * counts).sum() / (expected.square() * counts).sum().clamp(min=TINY)
    before = usual.clamp(0.0, 1.0) * expected.square()
    return before * noise / (before + noise).clamp(min=TINY)


def believed(mix: Tensor, noise: Tensor) -> Tensor:
    """(n, C) the mixes, drawn to equal shares as far as noise explains that they differ. noise: (n,) of all shares."""
    equal = mix.mean(1, keepdim=True)
    apart = mix - equal
    return equal + apart * (1 - CERTAIN * noise / apart.square().sum(1).clamp(min=TINY)).clamp(min=0.0)[:, None]


def fitted(mix: Tensor, gram: Tensor, products: Tensor, ridge: Tensor, expected: Tensor) -> Tensor:
    """(n, C) `mix` after some steps towards the best fit among all mixes that exist.

    gram: (C, C). products: (n, C) of the uploads with the class means. ridge: (n,) the weight of equal shares.
    expected: (n,) what each row adds up to.
    """
    classes = mix.shape[1]
    equal = (expected / classes)[:, None]
    # No eigenvalue is larger than the largest row sum.
    curvature = gram.abs().sum(1).amax() + ridge
    for _ in range(STEPS):
        slope = mix @ gram - products + ridge[:, None] * (mix - equal)
        mix = on_simplex(mix - slope / curvature.clamp(min=TINY)[:, None], expected)
    return mix


def balanced(odds: Tensor, mixture: Mixture) -> Tensor:
    """(n,) the odds of uploads, tilted so that together they come nearer to equal shares of the classes.

    By steps of iterative proportional fitting. Where all mixes are alike nothing changes; where workers of one class
    have most of the weight, they lose it, by no more than MOST_TILT.
    """
    shares = mixture.mix / mixture.expected[:, None]
    tilt = torch.ones_like(odds)
    for _ in range(TILTS):
        together = (odds * tilt) @ mixture.mix
        together = together / together.mean().clamp(min=TINY)
        tilt = (tilt * (shares @ together.clamp(min=1 / MOST_TILT).reciprocal())).clamp(1 / MOST_TILT, MOST_TILT)
    return odds * tilt


def on_simplex(points: Tensor, total: Tensor) -> Tensor:
    """(n, C) the nearest points without negative coordinates whose coordinates add up to the (n,) total.

    Everything above a level counts, and the level is such that it adds up (Held, Wolfe and Crowder, 1974).
    """
    ordered = points.sort(1, descending=True).values
    levels = (ordered.cumsum(1) - total[:, None]) / _places(points.shape[1], points.dtype, points.device)
    level = levels.gather(1, ((ordered > levels).sum(1, keepdim=True) - 1).clamp(min=0))
    return (points - level).clamp(min=0.0)


@functools.lru_cache(maxsize=8)
def _places(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=dtype, device=device)


def expected_of(view: ServerView) -> Tensor:
    """(n,) how many examples each upload is expected to be made of, over the public batch."""
    return torch.ones_like(view.norms) if view.expected is None else view.expected
