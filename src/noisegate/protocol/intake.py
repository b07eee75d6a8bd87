"""What is readable of whatever arrived becomes rows. Nothing that anybody sends raises here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from noisegate.vectors import finite_rows

READABLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


class Late:
    """Stands for an upload that came after its round was judged. It is missing, and what it says is not read."""


LATE = Late()


class Received(NamedTuple):
    """What arrived in one round, in a form that an aggregator can be shown.

    uploads: (n, d), finite; zeros where an upload is malformed or missing. norms: (n,) their lengths. present: (n,)
    whose upload is d finite numbers. missing: (n,) from whom nothing arrived in time; None if something did from all.
    """

    uploads: Tensor
    norms: Tensor
    present: Tensor
    missing: Tensor | None = None


def receive(arrived: Any, workers: int, d: int, like: Tensor) -> Received:
    """One entry for each worker -> what can be read. Anything at all may stand there; None or LATE is missing.

    Read is a plain tensor of d real numbers; anything else is malformed, and so is an upload whose length overflows the
    floating-point type. Entries beyond `workers` are ignored; where entries lack, uploads are missing. like: a tensor
    of the type and on the device that the rows get.
    """
    missing = None
    if _is_row(arrived):
        arrived = [*arrived[:workers], *[None] * (workers - len(arrived))]
        there = [upload is not None and type(upload) is not Late for upload in arrived]
        missing = None if all(there) else ~torch.tensor(there, dtype=torch.bool, device=like.device)
    rows = as_rows(arrived, workers, d, like)
    borrowed = _is_tensor(arrived)  # and may not be written to
    return received(rows.clone() if borrowed else rows, missing)


def received(rows: Tensor, missing: Tensor | None = None) -> Received:
    """The same for (n, d) rows of any numbers, which are written to. missing: (n,) whose row means nothing."""
    if missing is not None:
        rows.masked_fill_(missing[:, None], 0.0)
    rows, norms, present = finite_rows(rows)
    return Received(rows, norms, present if missing is None else present & ~missing, missing)


def as_rows(uploads: Any, workers: int, d: int, like: Tensor) -> Tensor:
    """(workers, d) rows of `like`'s type on its device; what cannot be read is a row of NaN, never an exception.

    Read is a plain tensor of real numbers, and row by row a list or tuple of such. A subclass of these may answer as it
    likes, or raise, and is not asked; nor are methods that someone put on a tensor. What needs no change is not copied.
    """
    if _readable(uploads) and _as_it_is(uploads, (workers, d), like):
        return Tensor.detach(uploads)
    rows = torch.full((workers, d), torch.nan, dtype=like.dtype, device=like.device)
    if not _is_row(uploads) and not (_readable(uploads) and uploads.ndim):
        return rows
    try:
        each = Tensor.unbind(uploads[:workers]) if _is_tensor(uploads) else uploads
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
    if not _is_tensor(upload):
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


def _is_tensor(value: Any) -> bool:
    """Whether it is a plain tensor. By `is`: a sender's class may answer `==` as it likes, or raise."""
    return type(value) is Tensor or type(value) is nn.Parameter


def _is_row(value: Any) -> bool:
    """Whether it is a plain list or tuple."""
    return type(value) is list or type(value) is tuple
