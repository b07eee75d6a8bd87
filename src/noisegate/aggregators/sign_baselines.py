"""Aggregators of the private baselines whose workers send signs (Zhu and Ling, 2022; Ma, Sun, Wu, Liu, Chen and Dong,
2022).

Each brings its worker, and a batch and a rate: of those tried, the ones with which it learned best on digits at
epsilon 2 without Byzantine workers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from noisegate.aggregators.ranks import columns_at_once
from noisegate.aggregators.robust import verdict_of
from noisegate.aggregators.sign_vote import SignVote
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class SignSum(SignVote):
    """The mean of the uploads' signs, in which all uploads have the same weight (after RSA: Li et al., 2019).

    RSA's server takes the sum of the signs that it receives, and not the sign of that sum: where the uploads disagree
    it moves less. It multiplies the sum by a penalty and a step, and adds the gradient of a regularizer of its own.
    Here the sum is divided by the number of uploads, and there is no regularizer. Otherwise as `SignVote`.

    length: of an update on which all uploads agree.
    """

    def __call__(self, view: ServerView, state: State) -> Verdict:
        # A malformed or missing upload is a row of zeros, and so does not count.
        blocks = view.uploads.split(columns_at_once(view.uploads, 1, view.scratch), dim=1)
        total = torch.cat([block.sign().sum(0) for block in blocks])
        number = view.present.sum().clamp(min=1)
        return verdict_of(view, total.div_(number).mul_(self.length / math.sqrt(len(total))))


@dataclass(frozen=True)
class SignGaussianSum(SignSum):
    """The mean of signs that workers take of their noisy gradients (Zhu and Ling's sign-Gaussian)."""

    goes_with: ClassVar[Mapping[str, Any]] = {"worker": "sign-gaussian", "batch": 16, "rate": 3.0}


@dataclass(frozen=True)
class SignRandomizedSum(SignSum):
    """The mean of signs that workers flip at random (Zhu and Ling's sign-flipping).

    The batch is small, since a sign is flipped as often whether it stands for two examples or for many, but the fewer
    are drawn, the less often that has to be.
    """

    goes_with: ClassVar[Mapping[str, Any]] = {"worker": "sign-randomized", "batch": 2, "rate": 1.0}


@dataclass(frozen=True)
class MaSignVote(SignVote):
    """The majority vote on one-bit codes that workers flip at random (after Ma et al.).

    That the server votes is our choice: see the worker for what the published description settles.
    """

    goes_with: ClassVar[Mapping[str, Any]] = {"worker": "ma-sign", "batch": 2, "rate": 0.3}
