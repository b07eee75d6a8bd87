"""An aggregator for workers with momentum and large batches (Guerraoui, Gupta, Pinot, Rouault and Stephan, 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from noisegate.aggregators.mda import MDA
from noisegate.aggregators.wrapper import INNER_NEEDS, Wrapper
from noisegate.roles import Aggregator
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class Guerraoui(Wrapper):
    """Any robust aggregator, on clipped gradients with momentum and large batches.

    The server does nothing beside the inner aggregator. From the paper are the workers and the settings that come with
    the name.

    aggregator: minimum diameter averaging unless given, as in the code of their first paper. It reckons with the same
        f. The batch is 64 of the 70 examples that each of 20 workers has of the smallest data set here; they had up to
        500. The rate is that of 0.5, 0.7, 1 and 1.4 with which it learned best on digits at epsilon 2, without
        Byzantine workers.
    """

    needs: ClassVar[str] = INNER_NEEDS
    goes_with: ClassVar[Mapping[str, Any]] = {"worker": "clipped-momentum", "batch": 64, "rate": 1.0}
    aggregator: Aggregator = field(default_factory=MDA)

    def __call__(self, view: ServerView, state: State) -> Verdict:
        workers = len(view.present)
        honest = workers - self.reckoned(workers, view.believed_honest)
        return self.aggregator(replace(view, believed_honest=honest), state)
