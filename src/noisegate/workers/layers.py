"""Per-example gradients of single layers in closed form.

The gradient of example j at a layer with inputs a_j (T positions x K values, T = 1 for a plain Linear) and output
gradients delta_j (T x O) is delta_j' a_j, an O x K matrix. Its length and its inner product with a matrix are cheaper
than the matrix itself when T = 1; when T > 1 the matrices of a few examples at a time are made, of this layer only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from noisegate.vectors import add_rows

BLOCK = {"cpu": 2**23, "cuda": 2**27}
"""Most floats that the inputs of one block of examples may take when unfolded: what fits a cache, or fills a GPU."""

WIDTH = 512
"""Most products that are added up in float32 where their sum decides a length."""


@dataclass(frozen=True)
class Layer:
    """A module that owns parameters, and where they lie in the flat vector."""

    module: nn.Linear | nn.Conv2d
    weight: slice
    bias: slice | None

    def matrix(self, vectors: Tensor) -> Tensor:
        """(n, O, K) views of the weight's place in (n, d) vectors."""
        views: Tensor = vectors[:, self.weight].unflatten(1, (self.module.weight.shape[0], -1))
        return views


@dataclass(frozen=True)
class Groups:
    """Which worker each example belongs to; examples of a worker lie next to each other."""

    owner: Tensor  # (E,) ascending
    slot: Tensor  # (E,) place among the worker's examples
    workers: int
    width: int  # most examples of one worker

    def pad(self, values: Tensor) -> Tensor:
        """(E, ...) -> (workers, width, ...), zeros where a worker has fewer examples."""
        padded = values.new_zeros((self.workers, self.width, *values.shape[1:]))
        padded[self.owner, self.slot] = values
        return padded


def plain_lengths(layer: Layer, a: Tensor, delta: Tensor, vectors: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """T = 1: (squared length, inner product with the worker's vector) of every example, no gradient made.

    Squares are float64: one factor of a length may be too small for float32 where their product is not.
    """
    square = _square(a)
    if layer.bias is not None:
        square = square + 1
    # delta' M a, one matrix product per worker. A long sum of products in float32 would lose too many digits.
    through = delta.new_zeros(delta.shape, dtype=torch.float64)
    for inputs, matrix in zip(groups.pad(a).split(WIDTH, 2), layer.matrix(vectors).split(WIDTH, 2), strict=True):
        through += torch.bmm(inputs, matrix.transpose(1, 2))[groups.owner, groups.slot]
    if layer.bias is not None:
        through += vectors[:, layer.bias][groups.owner]
    return square * _square(delta), (through * delta).sum(1)


def plain_sum(layer: Layer, a: Tensor, delta: Tensor, weights: Tensor, groups: Groups, sums: Tensor) -> None:
    """T = 1: write the workers' weighted sums of gradients into `sums` (n, d)."""
    weighted = groups.pad(delta * weights[:, None])
    layer.matrix(sums).copy_(torch.bmm(weighted.transpose(1, 2), groups.pad(a)))
    if layer.bias is not None:
        sums[:, layer.bias] = weighted.sum(1)


def spread_lengths(layer: Layer, a: Tensor, delta: Tensor, vectors: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """T > 1: the same as `plain_lengths`, by making this layer's gradients block by block."""
    squares, inners = [], []
    for part, gradients in _blocks(layer, a, delta):
        weight, bias = gradients
        rows = groups.owner[part]
        square = _square(weight)
        inner = (weight * vectors[:, layer.weight][rows]).sum(1)
        if layer.bias is not None:
            square = square + _square(bias)
            inner = inner + (bias * vectors[:, layer.bias][rows]).sum(1)
        squares.append(square)
        inners.append(inner.double())
    return torch.cat(squares), torch.cat(inners)


def spread_sum(layer: Layer, a: Tensor, delta: Tensor, weights: Tensor, groups: Groups, sums: Tensor) -> None:
    """T > 1: write the workers' weighted sums of gradients into `sums` (n, d).

    The same blocks as in `spread_lengths`, so the gradients that are added are the ones that were measured.
    """
    total = sums.new_zeros((groups.workers, layer.module.weight.numel()))
    total_bias = sums.new_zeros((groups.workers, layer.module.weight.shape[0]))
    for part, (weight, bias) in _blocks(layer, a, delta):
        rows, scale = groups.owner[part], weights[part][:, None]
        add_rows(total, rows, weight * scale)
        add_rows(total_bias, rows, bias * scale)
    sums[:, layer.weight] = total
    if layer.bias is not None:
        sums[:, layer.bias] = total_bias


def _square(vectors: Tensor) -> Tensor:
    """Squared length of every row, in float64."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return lengths.square()


def _blocks(layer: Layer, a: Tensor, delta: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """(which examples, (weight gradients (B, O*K), bias gradients (B, O))), a block of examples at a time."""
    outputs = layer.module.weight.shape[0]
    unfolded = delta[0].numel() // outputs * layer.module.weight[0].numel()  # floats of one example
    for part in torch.arange(len(a), device=a.device).split(max(1, BLOCK[a.device.type] // unfolded)):
        yield part, _gradients(layer.module, a[part], delta[part], by_convolution=not a.is_cuda)


def _gradients(module: nn.Module, a: Tensor, delta: Tensor, by_convolution: bool) -> tuple[Tensor, Tensor]:
    """(weight gradients (B, O*K), bias gradients (B, O)) of B examples.

    For a Conv2d there are two ways: a convolution with one group per example, fast on a CPU, and a batched matrix
    product with unfolded inputs, fast on a GPU.
    """
    if isinstance(module, nn.Linear):
        a, delta = a.flatten(1, -2), delta.flatten(1, -2)
        return torch.bmm(delta.transpose(1, 2), a).flatten(1), delta.sum(1)
    if not isinstance(module, nn.Conv2d):
        raise TypeError(f"no closed form for {module}")
    examples, bias = len(a), delta.sum((2, 3))
    if by_convolution:
        weight = conv2d_weight(
            a.reshape(1, -1, *a.shape[2:]),
            (examples * module.out_channels, *module.weight.shape[1:]),
            delta.reshape(1, -1, *delta.shape[2:]),
            module.stride,
            module.padding,
            module.dilation,
            groups=examples,
        )
        return weight.reshape(examples, -1), bias
    return torch.bmm(delta.flatten(2), _unfold(module, a).transpose(1, 2)).flatten(1), bias


def _unfold(module: nn.Conv2d, a: Tensor) -> Tensor:
    """(B, K, T): the inputs under the kernel at every position. One copy; functional.unfold goes example by example."""
    if isinstance(module.padding, str):
        raise TypeError(f"no closed form for {module}")
    (high, wide), (down, right) = module.padding, module.stride
    span = [gap * (size - 1) + 1 for gap, size in zip(module.dilation, module.kernel_size, strict=True)]
    windows = functional.pad(a, (wide, wide, high, high)).unfold(2, span[0], down).unfold(3, span[1], right)
    windows = windows[..., :: module.dilation[0], :: module.dilation[1]]
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def supported(module: nn.Module) -> bool:
    """Whether this module's own parameters have a closed form here."""
    if type(module) is nn.Linear:
        return True
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )
