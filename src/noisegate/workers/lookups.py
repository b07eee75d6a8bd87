"""Per-example gradients of embeddings, as the rows of the table that an example looked up: all others are zero.

The rows are made once, each with all that an example's positions add to it. So what is measured is what is added, also
where positions that look up one row cancel each other out.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from noisegate.workers.layers import Groups, Layer, squared_lengths


@dataclass(frozen=True)
class Lookup:
    """One row of gradient for each pair of an example and a row that it looked up, by example.

    values: (R, D). example, row: (R,) whose gradient it is, and where in the table.
    """

    layer: Layer
    values: Tensor
    example: Tensor
    row: Tensor
    groups: Groups

    @classmethod
    def of(cls, layer: Layer, a: Tensor, delta: Tensor, groups: Groups) -> "Lookup":
        """Of indices (E, ...) and output gradients (E, ..., D)."""
        indices, positions = a.reshape(len(a), -1), delta.reshape(len(a), -1, delta.shape[-1])
        example, place = _looked_up(layer.module, indices)
        keys = example * _rows(layer) + indices[example, place]
        distinct, inverse = keys.unique(return_inverse=True)
        values = delta.new_zeros(len(distinct), delta.shape[-1]).index_add_(0, inverse, positions[example, place])
        return cls(layer, values, distinct // _rows(layer), distinct % _rows(layer), groups)

    def squares(self) -> Tensor:
        """As those of `Plain`."""
        return self._by_example(squared_lengths(self.values))

    def inner(self, vectors: Tensor) -> Tensor:
        """As that of `Plain`."""
        table = self.layer.matrix(vectors)
        worker = self.groups.owner[self.example].clamp_(max=len(vectors) - 1)
        return self._by_example((self.values * table[worker, self.row]).sum(1, dtype=torch.float64))

    def add(self, weights: Tensor, into: Tensor) -> None:
        """As that of `Plain`. What is added is what was measured."""
        weighted = self.values * weights[self.example, None]
        begins = torch.searchsorted(self.example, self.groups.starts).tolist()
        for i, table in enumerate(self.layer.matrix(into).unbind()):
            own = slice(begins[i], begins[i + 1])
            table.index_add_(0, self.row[own], weighted[own])

    def without(self, keep: Tensor) -> "Lookup":
        """As that of `Plain`."""
        return replace(self, values=torch.where(keep[self.example, None], self.values, 0.0))

    def _by_example(self, values: Tensor) -> Tensor:
        """(R,) -> (E,): their sums."""
        return values.new_zeros(len(self.groups.owner)).index_add_(0, self.example, values)


def tables(layer: Layer, a: Tensor, delta: Tensor) -> Tensor:
    """(E, V*D): the same with all other rows, in a fixed order of addition on every device."""
    indices, positions = a.reshape(len(a), -1), delta.reshape(len(a), -1, delta.shape[-1])
    hit = nn.functional.one_hot(indices, _rows(layer)).to(delta.dtype)
    if isinstance(layer.module, nn.Embedding) and layer.module.padding_idx is not None:
        hit[..., layer.module.padding_idx] = 0
    return torch.bmm(hit.transpose(1, 2), positions).flatten(1)


def _rows(layer: Layer) -> int:
    return int(layer.module.weight.shape[0])


def _looked_up(module: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(example, position) of all that was looked up, but for padding, which has no gradient."""
    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
    real = torch.ones_like(indices, dtype=torch.bool) if padding is None else indices != padding
    example, place = real.nonzero(as_tuple=True)
    return example, place
