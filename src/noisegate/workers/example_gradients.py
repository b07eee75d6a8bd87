"""The gradient of every example at a layer that sees T > 1 positions of it, such as a convolution, or normalizes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from noisegate import kernels
from noisegate.workers.layers import Layer
from noisegate.workers.lookups import tables

BLOCK = {"cpu": 2**23, "cuda": 2**27}
"""Most floats that the inputs of one block of examples may take when unfolded: what fits a cache, or fills a GPU."""


def gradients(layer: Layer, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(Weight gradients (E, O*K), bias gradients (E, O)) where T > 1; (E, K) both of a normalization layer.

    In blocks, since unfolded inputs are larger.
    """
    if isinstance(layer.module, nn.GroupNorm | nn.LayerNorm):
        return _of_normalization(layer.module, a, delta)
    if isinstance(layer.module, nn.Embedding):
        return tables(layer, a, delta), delta.new_zeros(len(delta), 0)
    weight, bias = zip(*_blocks(layer, a, delta), strict=True)
    return (weight[0], bias[0]) if len(weight) == 1 else (torch.cat(weight), torch.cat(bias))


def _blocks(layer: Layer, a: Tensor, delta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(weight gradients (B, O*K), bias gradients (B, O)), a block of examples at a time."""
    module = layer.module
    by_kernel = a.is_cuda and a.dtype == delta.dtype == torch.float32 and kernels.available()
    if isinstance(module, nn.Conv2d) and by_kernel:
        yield _by_kernel(module, a, delta)
        return
    unfolded = delta[0].numel() // module.weight.shape[0] * module.weight[0].numel()  # floats of one example
    size = max(1, BLOCK[a.device.type] // unfolded)
    for some_a, some_delta in zip(a.split(size), delta.split(size), strict=True):
        yield _gradients(module, some_a, some_delta, by_convolution=not a.is_cuda)


def _of_normalization(module: nn.GroupNorm | nn.LayerNorm, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The output is the normalized input times the weight, plus the bias, at every position."""
    if isinstance(module, nn.GroupNorm):  # positions last
        normal = functional.group_norm(a, module.num_groups, eps=module.eps)
        delta, normal = delta.reshape(*a.shape[:2], -1), normal.reshape(*a.shape[:2], -1)
        return (delta * normal).sum(2), delta.sum(2)
    normal = functional.layer_norm(a, module.normalized_shape, eps=module.eps)
    size = torch.Size(module.normalized_shape).numel()
    delta, normal = delta.reshape(len(a), -1, size), normal.reshape(len(a), -1, size)
    return (delta * normal).sum(1), delta.sum(1)


def _by_kernel(module: nn.Conv2d, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """As `_gradients`, without unfolding anything."""
    from noisegate.kernels.convolution import weight_gradients

    if isinstance(module.padding, str):
        raise TypeError(f"no closed form for {module}")
    shape = (module.kernel_size, module.stride, module.padding, module.dilation)
    sizes = [(int(pair[0]), int(pair[1])) for pair in shape]
    return weight_gradients(a.contiguous(), delta, *sizes).flatten(1), delta.sum((2, 3))


def _gradients(module: nn.Module, a: Tensor, delta: Tensor, by_convolution: bool) -> tuple[Tensor, Tensor]:
    """(weight gradients (B, O*K), bias gradients (B, O)) of B examples.

    For a Conv2d there are two ways: a convolution with one group per example, fast on a CPU, and batched matrix
    products with unfolded inputs, fast on a GPU.
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
