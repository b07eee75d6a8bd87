"""Per-example gradients of single layers in closed form.

The gradient of example j at a layer with inputs a_j (T positions x K values, T = 1 for a plain Linear) and output
gradients delta_j (T x O) is delta_j' a_j, an O x K matrix. When T = 1 its length and its inner product with a matrix
are cheaper than the matrix itself, which is never made. When T > 1 the matrices of this layer are made, once
(`example_gradients`). So are the gradients of the weights by which normalization layers multiply: they are few. Those
of an embedding are mostly zeros (`lookups`).
"""

import itertools
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from noisegate.vectors import add_rows, counting

WIDTH = 1024
"""Most products that are added up in float32 where their sum decides a length."""

IN_RANGE = 1e-12, 1e12
"""Between these, no square that matters leaves the range of float32."""

LARGE_PRODUCT = 2**12
"""Numbers in a layer's matrix from which on a CPU takes longer to multiply than to be told to."""


@dataclass(frozen=True)
class Layer:
    """A module that owns parameters, and where they lie in the flat vector."""

    module: nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm | nn.Embedding
    weight: slice
    bias: slice | None

    @property
    def size(self) -> int:
        """How many parameters it owns."""
        return sum(int(place.stop - place.start) for place in (self.weight, self.bias) if place is not None)

    @property
    def begins(self) -> tuple[int, int | None]:
        """Where its weight and its bias begin."""
        return self.weight.start, None if self.bias is None else self.bias.start

    def never_made(self, a: Tensor) -> bool:
        """Whether the gradients for inputs `a` need not be made: of a Linear layer that sees one position."""
        return a.ndim == 2 and isinstance(self.module, nn.Linear)

    def matrix(self, vectors: Tensor) -> Tensor:
        """(n, O, K) views of the weight's place in (n, d) vectors."""
        views: Tensor = vectors[:, self.weight].unflatten(1, (self.module.weight.shape[0], -1))
        return views


@dataclass(frozen=True)
class Groups:
    """Which of E examples belong to which of n workers; those of a worker lie next to each other.

    owner: (E,) ascending, n for a place without an example. starts: (n + 1,) where each worker's begin.
    width: no worker has more.
    """

    owner: Tensor
    starts: Tensor
    width: int

    @classmethod
    def of(cls, owner: Tensor, workers: int, width: int | None = None) -> "Groups":
        """By bisection: no counting, so nothing to add up in any order. Without a width the host looks for it."""
        starts = torch.searchsorted(owner, counting(workers + 1, owner.device))
        return cls(owner, starts, width or max(1, int(starts.diff().max())))

    @cached_property
    def pieces(self) -> list[tuple[int, slice]]:
        """(worker, its examples) of those who have any. The host has to look for this."""
        starts = self.starts.tolist()
        return [(i, slice(a, b)) for i, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]

    @cached_property
    def _place(self) -> Tensor:
        """(n * width,) the examples of each worker, and any others beyond its own."""
        slots = self.starts[:-1, None] + counting(self.width, self.owner.device)
        return slots.clamp_(max=max(0, len(self.owner) - 1)).flatten()

    @cached_property
    def real(self) -> Tensor:
        """(n, width) which of `pad`'s are a worker's own."""
        return counting(self.width, self.owner.device) < self.starts.diff()[:, None]

    @cached_property
    def _slot(self) -> Tensor:
        """(E,) where each example is among those; the last for an empty place."""
        within = counting(len(self.owner), self.owner.device) - self.starts.index_select(0, self.owner)
        return (self.owner * self.width + within).clamp_(max=len(self._place) - 1)

    def pad(self, values: Tensor) -> Tensor:
        """(E, ...) -> (n, width, ...), with anything at all beyond a worker's own."""
        # index_select, since values[place] takes several times as long on a CPU
        padded: Tensor = values.index_select(0, self._place).unflatten(0, (-1, self.width))
        return padded

    def flat(self, values: Tensor) -> Tensor:
        """(n, width, ...) -> (E, ...), what `pad` was."""
        return values.flatten(0, 1).index_select(0, self._slot)

    def spread(self, values: Tensor) -> Tensor:
        """(n,) -> (E,): to every example what its worker has; to an empty place what the last one has."""
        return values.index_select(0, self.owner.clamp(max=len(values) - 1))

    def totals(self, values: Tensor) -> Tensor:
        """(E, ...) -> (n, ...): the sum over every worker's examples."""
        totals = values.new_zeros(len(self.starts), values[:1].numel())
        add_rows(totals, self.owner, values.flatten(1) if values.ndim > 1 else values[:, None])
        return totals[:-1].reshape(-1, *values.shape[1:])

    @property
    def one_each(self) -> bool:
        """Whether every worker has exactly one example, and no place is empty."""
        return self.width == 1 and self.sizes == [1] * len(self.starts[1:]) + [0]

    @cached_property
    def sizes(self) -> list[int]:
        """How many examples each worker has, and how many places are empty. The host has to look for this."""
        counts: list[int] = self.starts.diff().tolist()
        return [*counts, len(self.owner) - sum(counts)]


@dataclass(frozen=True)
class Plain:
    """T = 1: one pair of vectors per example; no gradient is made."""

    layer: Layer
    a: Tensor  # (E, K)
    delta: Tensor  # (E, O)
    groups: Groups

    def squares(self) -> Tensor:
        """(E,) in float64: the squared length of every example's gradient.

        float64, since one factor of a length may be too small for float32 where their product is not.
        """
        square = squared_lengths(self.a)
        if self.layer.bias is not None:
            square += 1
        return square.mul_(squared_lengths(self.delta))

    @cached_property
    def _inputs(self) -> Tensor:
        """(n, width, K)"""
        return self.groups.pad(self.a)

    @property
    def _one_by_one(self) -> bool:
        """Whether the workers' products are so large that it pays to take them one by one, and to pad nothing."""
        return not self.a.is_cuda and self.a.shape[1] * self.delta.shape[1] >= LARGE_PRODUCT

    def inner(self, vectors: Tensor) -> Tensor:
        """(E,) in float64: its inner product with the worker's vector, delta' M a."""
        if self._one_by_one:
            return self._inner_one_by_one(vectors)
        (a, *more_a), (first, *more) = self._inputs.split(WIDTH, 2), self.layer.matrix(vectors).split(WIDTH, 2)
        if self.layer.bias is None:
            through = torch.bmm(a, first.transpose(1, 2))
        else:
            through = torch.baddbmm(vectors[:, None, self.layer.bias], a, first.transpose(1, 2))
        # A long sum of products in float32 would lose too many digits.
        for inputs, matrix in zip(more_a, more, strict=True):
            through = through.double().add_(torch.bmm(inputs, matrix.transpose(1, 2)))
        return self.groups.flat(through).mul_(self.delta).sum(1, dtype=torch.float64)

    def _inner_one_by_one(self, vectors: Tensor) -> Tensor:
        sizes, found = self.groups.sizes, torch.zeros(len(self.delta), dtype=torch.float64)
        transposed = self.layer.matrix(vectors).transpose(1, 2)
        for a, matrices in zip(self.a.split(WIDTH, 1), transposed.split(WIDTH, 1), strict=True):
            through = torch.empty_like(self.delta)
            for own, matrix, out in zip(a.split(sizes), matrices.unbind(), through.split(sizes), strict=False):
                torch.mm(own, matrix, out=out)
            found += through.mul_(self.delta).sum(1, dtype=torch.float64)
        if self.layer.bias is not None:
            found += (self.groups.spread(vectors[:, self.layer.bias]) * self.delta).sum(1)
        return found

    def add(self, weights: Tensor, into: Tensor) -> None:
        """into (n, d) += the workers' weighted sums of gradients, by weights (E,)."""
        if self._one_by_one:
            weighted, sizes = self.delta * weights[:, None], self.groups.sizes
            if self.groups.one_each:
                self.layer.matrix(into).addcmul_(weighted[:, :, None], self.a[:, None, :])
                if self.layer.bias is not None:
                    into[:, self.layer.bias] += weighted
                return
            transposed, matrices = weighted.T.split(sizes, 1), self.layer.matrix(into).unbind()
            for delta, own, matrix in zip(transposed, self.a.split(sizes), matrices, strict=False):
                matrix.addmm_(delta, own)
            if self.layer.bias is not None:
                into[:, self.layer.bias] += self.groups.totals(weighted)
            return
        real = self.groups.real
        weighted = torch.where(real[..., None], self.groups.pad(self.delta * weights[:, None]), 0.0)
        self.layer.matrix(into).baddbmm_(weighted.transpose(1, 2), self._inputs)
        if self.layer.bias is not None:
            into[:, self.layer.bias].add_(weighted.sum(1))

    def without(self, keep: Tensor) -> "Plain":
        """Zeros in place of the examples (E,) that are not to be kept."""
        a, delta = (torch.where(keep[:, None], values, 0.0) for values in (self.a, self.delta))
        return Plain(self.layer, a, delta, self.groups)


@dataclass(frozen=True)
class Spread:
    """T > 1, or a normalization layer: this layer's gradients, made once."""

    layer: Layer
    weight: Tensor  # (E, O*K), or one number for each channel
    bias: Tensor  # (E, O)
    groups: Groups

    def squares(self) -> Tensor:
        """As those of `Plain`."""
        square = squared_lengths(self.weight)
        if self.layer.bias is not None:
            square += squared_lengths(self.bias)
        return square

    def inner(self, vectors: Tensor) -> Tensor:
        """As that of `Plain`."""
        inner = torch.zeros(len(self.weight), dtype=torch.float64, device=self.weight.device)
        for i, own in self.groups.pieces:
            # A product and a sum by halves: a matrix product would add one number after the other, and lose digits.
            inner[own] += (self.weight[own] * vectors[i, self.layer.weight]).sum(1)
            if self.layer.bias is not None:
                inner[own] += (self.bias[own] * vectors[i, self.layer.bias]).sum(1)
        return inner

    def add(self, weights: Tensor, into: Tensor) -> None:
        """As that of `Plain`. What is added is what was measured."""
        for i, own in self.groups.pieces:
            into[i, self.layer.weight].addmv_(self.weight[own].T, weights[own])
            if self.layer.bias is not None:
                into[i, self.layer.bias].addmv_(self.bias[own].T, weights[own])

    def without(self, keep: Tensor) -> "Spread":
        """As that of `Plain`."""
        weight, bias = (torch.where(keep[:, None], values, 0.0) for values in (self.weight, self.bias))
        return Spread(self.layer, weight, bias, self.groups)


def squared_lengths(vectors: Tensor) -> Tensor:
    """Squared length along the last dimension, in float64, right to some 1e-6 of itself, whatever the numbers are."""
    exact = partial(torch.linalg.vector_norm, vectors, dim=-1, dtype=torch.float64)
    square: Tensor
    if vectors.dtype != torch.float32 or vectors.is_cuda:
        square = exact().square_()
        return square
    # In float32 a CPU is many times faster, and as good where a look shows that no square leaves its range.
    whole = vectors.shape[-1] // WIDTH * WIDTH
    square = torch.linalg.vector_norm(vectors[..., whole:], dim=-1).double().square_()
    if whole:
        pieces = vectors[..., :whole].unflatten(-1, (-1, WIDTH))
        square += torch.linalg.vector_norm(pieces, dim=-1).double().square_().sum(-1)
    if square.numel():
        least, most = square.aminmax()
        if not (float(least) > IN_RANGE[0] ** 2 and float(most) < IN_RANGE[1] ** 2):
            square = exact().square_()
    return square


def supported(module: nn.Module) -> bool:
    """Whether this module's own parameters have a closed form here."""
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.Embedding:  # the others count over the batch, change the table as they look, or are sparse
        return not module.scale_grad_by_freq and module.max_norm is None and not module.sparse
    return type(module) in (nn.Linear, nn.GroupNorm, nn.LayerNorm)
