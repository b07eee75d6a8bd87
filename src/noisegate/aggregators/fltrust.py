"""FLTrust (Cao, Fang, Liu and Gong, 2021)."""

from dataclasses import dataclass
from typing import Literal

import torch

from noisegate import checks
from noisegate.aggregators.distances import LONGEST
from noisegate.aggregators.robust import verdict_of
from noisegate.roles import Aggregator
from noisegate.views import ServerView, State, Verdict

SHORTEST = 1e-18
"""An upload that is not longer has no direction: the squares of its coordinates leave the range of float32."""


@dataclass(frozen=True)
class FLTrust(Aggregator):
    """Weigh uploads by their angle to the gradient of the server's own examples, and scale them to its length.

    The update is the mean of the scaled uploads, weighted by trust: the cosine of the angle, or 0 where that is
    negative. Any number of workers may be Byzantine.

    server_gradient: "plain" averages the gradients of the server's examples; "normalized" scales each to unit length
        first, which is what workers send.
    score: the trust.
    """

    server_gradient: Literal["plain", "normalized"] = "plain"

    def __post_init__(self) -> None:
        checks.one_of(("plain", "normalized"), server_gradient=self.server_gradient)

    def __call__(self, view: ServerView, state: State) -> Verdict:
        gradient = view.auxiliary(self.server_gradient == "normalized").nan_to_num(0.0, 0.0, 0.0)
        length = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        # By its direction alone, no product is longer than an upload: none overflows.
        direction = (gradient / length.clamp(min=SHORTEST)).to(view.uploads.dtype)
        norms, toward = view.norms.double(), (view.uploads @ direction).double()
        pointing = view.present & (norms > SHORTEST) & (length > SHORTEST)
        trust = torch.where(pointing, toward / norms.clamp(min=SHORTEST), 0.0).clamp(0.0, 1.0)
        # In float32, which the verdict is in: a trust that it cannot hold is none.
        trust = trust.to(view.norms.dtype)
        shares = trust / trust.sum().clamp(min=torch.finfo(trust.dtype).tiny)
        weights = (shares * length.clamp(max=LONGEST) / norms.clamp(min=SHORTEST)).to(view.uploads.dtype)
        return verdict_of(view, weights @ view.uploads, trust > 0, trust, weights=trust)
