"""The majority vote on signs (Bernstein, Zhao, Azizzadenesheli and Anandkumar, 2019)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from noisegate import checks
from noisegate.aggregators.ranks import columns_at_once
from noisegate.aggregators.robust import Robust, verdict_of
from noisegate.roles import Number
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class SignVote(Robust):
    """The sign of each coordinate that most uploads have, scaled to a vector of fixed length.

    A zero is no vote, and a tie moves nothing. f has no part in it: no upload has more than one vote per coordinate. It
    is no weighted mean of uploads: the weights are equal shares.

    length: of the update, if no coordinate is tied. The vote alone has the length sqrt(d), which would tie the learning
        rate to the size of the model. At 1 a step is as long as one along the mean of gradients that agree, each scaled
        to length 1, so that a rate that fits workers who do so fits here.
    """

    needs: ClassVar[str] = "n >= 2 f + 1"
    length: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(length=self.length)

    def most(self, workers: Number) -> Number:
        """(n - 1) / 2."""
        return (workers - 1) // 2

    def __call__(self, view: ServerView, state: State) -> Verdict:
        # A malformed or missing upload is a row of zeros, and so does not vote.
        blocks = view.uploads.split(columns_at_once(view.uploads, 1, view.scratch), dim=1)
        vote = torch.cat([block.sign().sum(0) for block in blocks]).sign_()
        return verdict_of(view, vote.mul_(self.length / math.sqrt(len(vote))))
