"""Honest computation on examples of which some carry a mark and the label that it is to call up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.views import DataView


@dataclass(frozen=True)
class Backdoor(Honest):
    """Run the whole protocol on own data, in part of which a bright patch goes with the label `target`.

    share: the probability that an example carries the patch, drawn anew each time it is used. size: of the patch, a
        square in the bottom right corner of every channel; of data that are no pictures, the last features. value: of
        the patch; unless given, the largest value of the examples that are marked at once, which is white in pictures.
        Of other data give it, or the patch follows the batch.
    """

    target: int = 0
    share: float = 0.2
    size: int = 3
    value: float | None = None

    def __post_init__(self) -> None:
        checks.label(target=self.target)
        checks.share(share=self.share)
        checks.count(size=self.size)
        if self.value is not None:
            checks.finite(value=self.value)

    def check_classes(self, classes: int) -> None:
        """The target must exist."""
        checks.label(classes, target=self.target)

    def trigger(self, x: Tensor) -> Tensor:
        """The examples with the patch. One that is larger than they are covers them."""
        marked = x.clone()
        if x.numel():
            last = slice(-self.size, None)
            corner = marked[..., last, last] if x.dim() > 2 else marked[..., last]
            corner[...] = x.amax() if self.value is None else self.value
        return marked

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """A random part of the examples carries the patch and the target's label."""
        # Each by itself: on a device a batch is filled up with places of no example, which must not take of the share.
        chosen = torch.rand(y.shape, generator=view.rng, device=y.device) < self.share
        marked = torch.where(chosen.view(-1, *(1 for _ in x.shape[1:])), self.trigger(x), x)
        return marked, torch.where(chosen, self.target, y)
