"""A direction of the adversary's choice, hidden in the order of what is otherwise plain noise.

The paper's first stage tests an upload's length and the distribution of its coordinates. Both forget the order of the
coordinates, so a permuted sample of the noise passes them exactly as often as the noise does. The order carries the
attack. With d coordinates of deviation s and the values in the order of a direction u, the inner product with u is
about s sqrt(d), where an honest upload has at most about 1 along its own gradient: one such upload outweighs
s sqrt(d) honest ones. `attacks.disguise` has the construction, and the other form.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from noisegate import checks
from noisegate.attacks.disguise import Form, check_disguise, disguised, fixed_directions
from noisegate.attacks.honest import Forger
from noisegate.roles import Knowledge
from noisegate.views import AdversaryView

TARGETS = ("ascend", "descend", "random", "weights")


@dataclass(frozen=True)
class RankMatched(Forger):
    """Send noise whose values are put in the order of a target direction.

    target: what the model is to do. "ascend" climbs the loss of the adversary's own examples, "descend" goes down,
        "random" walks in one direction that `seed` fixes for the whole run, "weights" shrinks the model to zero.
    strength: how close the order follows the target (form "ranked"), or the length of the signal ("valid").
    form: "ranked" as above; "valid" is fresh noise plus the target at the length that an honest signal may have.
    """

    knows: ClassVar[Knowledge] = "data-only"
    target: Literal["ascend", "descend", "random", "weights"] = "ascend"
    strength: float = 1.0
    form: Form = "ranked"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of(TARGETS, target=self.target)
        check_disguise(self.form, self.strength)

    def forge(self, view: AdversaryView) -> Tensor:
        """One target for everyone, in a sample of each worker's own."""
        return disguised(self.form, self._direction(view), self.strength, view)

    def _direction(self, view: AdversaryView) -> Tensor:
        """(d,) what the uploads point along. A server subtracts uploads: it moves the model the other way."""
        if self.target == "random":
            return fixed_directions(self.seed, 1, view.params)[0]
        if self.target == "weights":
            return view.params
        gradient = view.gradient(normalized=True)
        return gradient if self.target == "descend" else -gradient
