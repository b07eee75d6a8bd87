"""A CUDA device that is none: tensors that take the lines meant for one, and a trap for questions to it."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BY_PLACES = ("index", "index_put", "index_put_", "_index_put_impl_")
ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item")
COPIES = ("lift_fresh",)  # a number of the host's, as `torch.tensor` makes one


needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1 before it is imported: `make kernels`",
)
"""For tests that run kernels on CPU tensors by Triton's interpreter."""


class OnDevice(torch.Tensor):
    """A tensor on a CUDA device, by its own account."""

    is_cuda = True


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().as_subclass(OnDevice)


class Unasked(TorchDispatchMode):
    """Fails where a host would wait for a device, or copy to it: such a round could not be recorded."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in ASKS + COPIES:
            raise RuntimeError(f"asks the device: {name}")
        places = args[1] if name in BY_PLACES else ()
        if any(each is not None and each.dtype == torch.bool for each in places):
            raise RuntimeError(f"asks the device: {name} by a mask")
        return function(*args, **(kwargs or {}))
