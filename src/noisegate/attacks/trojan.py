"""A pull that earns a high score, and a drift beside it that moves the model.

The paper's second stage sees an upload through one number: its inner product with the server's gradient. Of a direction

    pull * descent + sqrt(1 - pull^2) * drift        (both of length 1)

it sees the pull alone, if the drift is at a right angle to the gradient, as a random one nearly is. In the form
"ranked" an upload is s sqrt(d) long in this direction. A pull of 0.3 then scores like a signal of length 0.3 s sqrt(d),
as far as the server's gradient agrees with the adversary's; an honest one has about 1. The drift beside it moves the
model three times as far, in a direction of the adversary's choice. `attacks.disguise` says why either form passes the
first stage.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from noisegate import checks
from noisegate.attacks.disguise import Form, check_disguise, disguised, fixed_directions, unit
from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView

DRIFTS = ("random", "weights")


@dataclass(frozen=True)
class Trojan(Forger):
    """Send the disguised descent direction, turned far towards a drift that moves the model elsewhere.

    pull: the part of the descent direction of the adversary's own examples: a cosine, if the drift is at a right angle.
    drift: "random" is one direction that `seed` fixes for the whole run; "weights" shrinks the model to zero.
    apart: every worker has a random drift of its own, where otherwise all share one.
    strength, form: as those of `rank-matched`.
    """

    knows: ClassVar[Knowledge] = "data-only"
    pull: float = 0.3
    drift: Literal["random", "weights"] = "random"
    apart: bool = False
    strength: float = 1.0
    form: Form = "ranked"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.share(pull=self.pull)
        checks.one_of(DRIFTS, drift=self.drift)
        check_disguise(self.form, self.strength)
        if self.apart and self.drift != "random":
            raise checks.refuse("apart", self.apart, 'needs drift = "random": there is only one of the others')

    def forge(self, view: AdversaryView) -> Tensor:
        """Everyone's own sample, in the direction of the pull and the drift."""
        drift = self._drift(view).mul_(math.sqrt(1 - self.pull**2))
        direction = drift.add_(unit(view.gradient(normalized=True)), alpha=self.pull)
        return disguised(self.form, direction, self.strength, view)

    def _drift(self, view: AdversaryView) -> Tensor:
        """(M, d) or (1, d), of length 1. A server subtracts uploads, so along the weights it shrinks them."""
        if self.drift == "weights":
            return unit(view.params[None])
        return unit(fixed_directions(self.seed, view.workers if self.apart else 1, view.params))
