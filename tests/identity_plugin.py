"""Parts as docs/using.md teaches them, for test_identity.py: their digest must be the same in every process."""

import pathlib
from dataclasses import dataclass

import torch

from noisegate.aggregators import Robust
from noisegate.aggregators.robust import verdict_of
from noisegate.attacks.honest import Forger, Honest
from noisegate.views import AdversaryView, ServerView, State, Verdict

HERE = pathlib.Path("somewhere")


@dataclass(frozen=True)
class Quiet(Honest):
    """Follows the protocol."""

    scale: float = 1.0


@dataclass(frozen=True)
class Loud(Forger):
    """Makes uploads up."""

    def forge(self, view: AdversaryView) -> torch.Tensor:
        return torch.ones(view.workers, len(view.params)) if HERE else view.own


@dataclass(frozen=True)
class Aggregator(Robust):
    """Reckons with Byzantine workers."""

    needs = "n > 2 f"

    def most(self, workers: int) -> int:
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        return verdict_of(view, view.uploads.mean(0), view.present, view.norms)
