"""`images` in place of torch's own convolutions, while `OwnConvolutions` is entered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from noisegate.kernels.images import convolve, input_gradient
from noisegate.kernels.windows import Pair, Window

CHANNEL_LIMIT = 64
"""Most channels of a convolution that `OwnConvolutions` takes over. Libraries are good at more."""


class Convolve(torch.autograd.Function):
    """`convolve` for autograd: differentiable in the images only, weights and bias are constants."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.rest = a.shape, window
        return convolve(a, weight, bias, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (weight,) = ctx.saved_tensors
        return input_gradient(delta, weight, *ctx.rest), None, None, None


def _pair(value: Any) -> Pair | None:
    """One or two whole numbers as two; None for anything else, such as padding="same"."""
    values = (value, value) if isinstance(value, int) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(x, int) for x in values):
        return None
    return (values[0], values[-1]) if len(values) in (1, 2) else None


def _arguments(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Window] | None:
    """The arguments of `conv2d` as `Convolve` takes them, or None if it does not."""
    tensors = [x for x in (input, weight, bias) if x is not None]
    if not all(isinstance(x, Tensor) and x.dtype == torch.float32 and x.is_cuda for x in tensors):
        return None
    if input.ndim != 4 or weight.ndim != 4 or groups != 1 or not 0 < max(weight.shape[:2]) <= CHANNEL_LIMIT:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors[1:]):
        return None
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):  # inside vmap or grad
        return None
    strides, paddings, dilations = _pair(stride), _pair(padding), _pair(dilation)
    if strides is None or paddings is None or dilations is None:
        return None
    # What is wrong is left to torch, which says so in its own words.
    if input.shape[1] != weight.shape[1] or min(*strides, *dilations) < 1 or min(paddings) < 0:
        return None
    return input, weight, bias, Window((weight.shape[2], weight.shape[3]), strides, paddings, dilations)


class OwnConvolutions(TorchFunctionMode):
    """While it is entered, `conv2d` on a device with few channels and constant weights goes through `Convolve`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d or func is torch.nn.functional.conv2d:
            arguments = _arguments(*args, **kwargs)
            if arguments is not None:
                return Convolve.apply(*arguments)
        return func(*args, **kwargs)
