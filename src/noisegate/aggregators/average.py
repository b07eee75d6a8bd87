"""The mean of the kept uploads."""

import torch
from torch import Tensor


def average_of(uploads: Tensor, kept: Tensor, divisor: int | None = None) -> Tensor:
    """Mean of the kept rows, or their sum over `divisor`; zero if none is kept, so that the model stays."""
    weights = kept.to(uploads.dtype)
    total = weights.sum() if divisor is None else torch.full_like(weights[0], divisor)
    return (weights / total.clamp(min=1)) @ uploads
