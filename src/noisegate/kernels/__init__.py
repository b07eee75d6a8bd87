"""Kernels of our own for CUDA devices, in Triton, which comes with torch there. Every one has a plain twin.

`lengths`              lengths and inner products of per-example gradients (twin: `workers.layers`)
`mixing`               lengths of gradients with momentum (twin: `workers.closed_form`)
`sums`                 weighted sums of per-example gradients (twin: `workers.layers`)
`outer`                what these three share
`images`               convolutions of few channels (twin: torch's own)
`convolution_weights`  the weights of such a convolution, in the order in which `images` reads them
`own_convolutions`     `images` in place of torch's convolutions
`convolution`          per-example gradients of convolutions (twin: `workers.example_gradients`)
`windows`              what the kernels of convolutions share
`rows`                 rows that are changed or left alone (twins: `masked_fill_`, `torch.where`)
`noise`                secret bits and noise on a grid (twins: `chacha`, `entropy`)
`counting`             the counts of the KS test (twin: `aggregators.ks_test`)

Those of the aggregator `fortified` are in `aggregators/fortified/kernels`, beside the code that they replace.

They exist because a round of a small model is a chain of some 200 tiny kernels, each of which costs more to start than
to run, and because unfolding the inputs of a convolution moves many times more memory than the gradients need.
"""

import functools
from importlib.util import find_spec

import torch
from torch import Tensor


@functools.cache
def available() -> bool:
    """Whether the kernels can be used here: there is Triton, and a CUDA device that it compiles for."""
    if find_spec("triton") is None or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def fused(like: Tensor) -> bool:
    """Whether kernels replace the many small operations on tensors like this one."""
    return like.is_cuda and available() and like.dtype == torch.float32
