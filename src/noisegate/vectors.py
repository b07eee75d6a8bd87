"""Model and flat vector: everything that travels between workers and server is one vector of d floats."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from noisegate import kernels
from noisegate.errors import SpecError

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One cross-entropy per example: the default loss."""
    return functional.cross_entropy(outputs, targets, reduction="none")


class FlatModel:
    """A module and a loss as functions of one flat parameter vector.

    The module is copied, so the caller's stays as it is, and it runs in evaluation mode. Parameters lie in the vector
    in the order of `named_parameters()`. The loss maps (outputs, targets) of B examples to B numbers.
    """

    def __init__(self, module: nn.Module, loss: Loss = cross_entropy, device: torch.device | str = "cpu") -> None:
        try:
            self.module = copy.deepcopy(module).to(device).eval().requires_grad_(False)
        except RuntimeError as error:
            raise SpecError(f"model: cannot be copied ({str(error).splitlines()[0]})") from None
        self.loss = loss
        self.names = [name for name, _ in self.module.named_parameters()]
        self.shapes = [tuple(value.shape) for _, value in self.module.named_parameters()]
        self.sizes = [value.numel() for _, value in self.module.named_parameters()]
        self.d = sum(self.sizes)
        self.shares = len(self.names) < sum(1 for _ in self.module.named_parameters(remove_duplicate=False))
        """Whether a parameter has several names, which are looked for in every call only where there are any."""

    def initial(self) -> Tensor:
        """The module's own parameters as one vector."""
        return torch.cat([value.detach().flatten() for _, value in self.module.named_parameters()])

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of `vector` in the shapes of the parameters; leading dimensions are kept."""
        parts = vector.split(self.sizes, dim=-1)
        lead = vector.shape[:-1]
        return {
            name: part.unflatten(-1, shape) if shape else part.reshape(lead)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        """What the module with the parameters `vector` says of the examples `x`."""
        result: Tensor = functional_call(self.module, self.tensors(vector), (x,), tie_weights=self.shares)
        return result

    def losses(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """One loss per example, shape (B,)."""
        return _one_each(self.loss(self.outputs(vector, x), y), len(x))

    def own_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss per row of `outputs`, of that row and its label alone: whatever the loss is, it cannot mix rows."""
        if self.loss is cross_entropy:  # which mixes nothing, and is faster for all at once
            return cross_entropy(outputs, y)

        def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
            return _one_each(self.loss(output[None], target[None]), 1)[0]

        losses: Tensor = vmap(loss_of_one)(outputs, y)
        return losses


def _one_each(losses: Tensor, count: int) -> Tensor:
    """The losses if there is one per example, else SpecError."""
    if losses.shape != (count,):
        raise SpecError(
            f"loss: must give one number per example, shape ({count},), but gave shape {tuple(losses.shape)}; "
            "use reduction='none'"
        )
    return losses


@functools.lru_cache(maxsize=256)
def counting(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... count - 1: one tensor for all who ask, so nobody may write to it."""
    return torch.arange(count, device=device)


@functools.lru_cache(maxsize=256)
def zeros(count: int, device: torch.device) -> Tensor:
    """0, 0, 0, ... in int64: one tensor for all who ask, so nobody may write to it."""
    return torch.zeros(count, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=256)
def ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1, 1, 1, ...: one tensor for all who ask, so nobody may write to it."""
    return torch.ones(count, dtype=dtype, device=device)


def clear_rows(rows: Tensor, absent: Tensor) -> Tensor:
    """Zeros in the rows of (n, d) that `absent` (n,) marks, in place. On a CUDA device nobody looks."""
    if kernels.fused(rows) and rows.stride(-1) == 1:
        from noisegate.kernels.rows import clear_rows as clear

        clear(rows, absent)
        return rows
    return rows.masked_fill_(absent[:, None], 0.0)


def copy_if(going: Tensor, value: Tensor, into: Tensor) -> None:
    """into = value if `going`, () bool on the device, holds."""
    plain = value.is_contiguous() and into.is_contiguous() and value.dtype == into.dtype == torch.float32
    if into.is_cuda and kernels.available() and plain and value.numel() >= 2**16:
        from noisegate.kernels.rows import copy_if as copy

        copy(going, value, into)
    else:
        torch.where(going, value, into, out=into)


def add_rows(sums: Tensor, owner: Tensor, values: Tensor) -> None:
    """sums[owner[i]] += values[i] for every i, always in the same order. `values` must be finite."""
    if sums.is_cuda:  # index_add_ adds in no fixed order there; a matrix product does
        sums += torch.nn.functional.one_hot(owner, len(sums)).to(values.dtype).T @ values
    else:
        sums.index_add_(0, owner, values)


def receive(uploads: Any, workers: int, d: int, like: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Anything at all -> (uploads, norms, present): finite rows, their lengths, and which of them were well formed.

    An upload whose length overflows the floating-point type counts as malformed, and becomes a row of zeros.
    in_place: `uploads` is a (workers, d) tensor of the caller's own making, and may be written to.
    """
    rows = uploads if in_place else as_rows(uploads, workers, d, like)
    norms = torch.linalg.vector_norm(rows, dim=1)
    present = norms < torch.inf  # nor is NaN
    if rows.is_cuda or not bool(present.all()):  # to look would make the host wait for the device
        absent = ~present
        rows = clear_rows(rows if in_place else rows.clone(), absent)
        norms.masked_fill_(absent, 0.0)
    return rows, norms, present


READABLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def as_rows(uploads: Any, workers: int, d: int, like: Tensor) -> Tensor:
    """(workers, d) rows of `like`'s type on its device; what cannot be read is a row of NaN, never an exception.

    Read is a plain tensor of real numbers, and row by row a list or tuple of such. A subclass of these may answer as it
    likes, or raise, and is not asked; nor are methods that someone put on a tensor. What needs no change is not copied.
    """
    if _readable(uploads) and _as_it_is(uploads, (workers, d), like):
        return Tensor.detach(uploads)
    rows = torch.full((workers, d), torch.nan, dtype=like.dtype, device=like.device)
    if type(uploads) not in (list, tuple) and not (_readable(uploads) and uploads.ndim):
        return rows
    try:
        each = Tensor.unbind(uploads[:workers]) if isinstance(uploads, Tensor) else uploads
    except RuntimeError:  # without numbers, nothing told that it escaped from a transform of torch.func
        return rows
    for row, upload in zip(rows, each, strict=False):
        if _readable(upload) and upload.shape == (d,):
            try:
                row.copy_(Tensor.detach(upload))
            except RuntimeError:  # on a device that nothing can be copied from
                row.fill_(torch.nan)
    return rows


def _as_it_is(uploads: Tensor, shape: tuple[int, int], like: Tensor) -> bool:
    """Whether a readable tensor can be used without a copy."""
    same = uploads.shape == shape and uploads.dtype == like.dtype and uploads.device == like.device
    return same and Tensor.is_contiguous(uploads) and not Tensor.is_neg(uploads) and not Tensor.is_inference(uploads)


def _readable(upload: Any) -> bool:
    """Whether it is a tensor that holds plain real numbers, all of them in memory.

    A tensor that escaped from a transform of torch.func, or whose storage was taken away, has none.
    """
    if type(upload) not in (Tensor, nn.Parameter):
        return False
    try:
        if upload.is_nested or upload.is_meta or upload.is_quantized or any(getattr(upload, "names", ())):
            return False
        if upload.layout is not torch.strided or upload.dtype not in READABLE:
            return False
        last = sum((size - 1) * stride for size, stride in zip(upload.shape, Tensor.stride(upload), strict=True))
        end = (Tensor.storage_offset(upload) + last + 1) * upload.itemsize
        return not Tensor.numel(upload) or Tensor.untyped_storage(upload).nbytes() >= end
    except RuntimeError:  # what is no tensor any more
        return False
