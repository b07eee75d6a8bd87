"""A plain function as an aggregator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate.aggregators.robust import verdict_of
from noisegate.checks import shown
from noisegate.errors import SpecError
from noisegate.roles import Aggregator
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class FromFunction(Aggregator):
    """What a function makes of the uploads that arrived well-formed, (m, d): a vector (d,), the direction of descent.

    It says nothing of single uploads, so all of them count alike in the verdict. Where none arrived it is not asked,
    and the model stays.
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, view: ServerView, state: State) -> Verdict:
        uploads = view.uploads[view.present]  # a copy, which the function may write to
        update = self.function(uploads) if len(uploads) else torch.zeros_like(view.uploads[0])
        wanted = view.uploads[0]
        if not isinstance(update, Tensor):
            found = type(update).__name__
        elif (update.shape, update.dtype, update.device) == (wanted.shape, wanted.dtype, wanted.device):
            return verdict_of(view, update.detach())
        else:
            found = f"shape {tuple(update.shape)}, {update.dtype}, on {update.device}"
        raise SpecError(
            f"aggregator: {shown(self.function)} must make a tensor of shape {tuple(wanted.shape)}, {wanted.dtype}, on "
            f"{wanted.device} of uploads of shape {tuple(uploads.shape)}; it gave {found}"
        )
