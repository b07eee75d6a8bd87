"""Mimicry (Karimireddy, He and Jaggi, 2022)."""

from dataclasses import dataclass

from torch import Tensor

from noisegate import checks
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Mimic(Forger):
    """Copy one honest worker, always the same one.

    No test of a single upload can refuse it. One worker's data weigh too much, which harms where data differ between
    workers; and equal uploads look like agreement.

    worker: whom, by its place among the honest workers; counted on from the first one if there are fewer.
    """

    worker: int = 0

    def __post_init__(self) -> None:
        if not (type(self.worker) is int and self.worker >= 0):
            raise checks.refuse("worker", self.worker, "must be a whole number, 0 or more")

    def forge(self, view: AdversaryView) -> Tensor:
        """The same upload from everyone."""
        honest = view.honest
        return honest[self.worker % len(honest)].expand(view.workers, -1)
