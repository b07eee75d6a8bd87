"""The paper's figure of its non-iid partition: the classes that each worker holds, counted in the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate.compute import Compute
from noisegate.runs.setup import prepare
from noisegate.runs.spec import Spec

PRIVATE = "private: exact shares of labels in each worker's data, with no privacy at all; not to be published"
"""The warning that accompanies the figure and its numbers."""

WHERE = "Figure 5: simulated non-i.i.d. distribution of MNIST to 20 workers"
"""The figure's place in the paper."""


@dataclass(frozen=True)
class Distribution:
    """How the classes are distributed over the workers.

    shares: (workers, classes) the share of each class in a worker's examples. overall: (classes,) in all examples.
    """

    dataset: str
    shares: Tensor
    overall: Tensor

    @property
    def distance(self) -> float:
        """The mean total variation distance between a worker's classes and those of all; 0 if all are alike."""
        return float((self.shares - self.overall).abs().sum(1).mean() / 2)


def distribution(dataset: str, seed: int = 1, non_iid: bool = True) -> Distribution:
    """The classes that each honest worker of a run on this data set holds."""
    spec = Spec(dataset=dataset, sigma=0.0, byzantine=0.0, attack="none", aggregator="mean", non_iid=non_iid, seed=seed)
    federation = prepare(spec, Compute(device="cpu")).federation
    counts = torch.zeros(len(federation.workers.sizes), federation.adversary.classes)
    for worker, (held, size) in enumerate(
        zip(federation.workers.holdings, federation.workers.sizes.tolist(), strict=True)
    ):
        counts[worker] = torch.bincount(federation.workers.y[held[:size]], minlength=federation.adversary.classes)
    return Distribution(dataset, counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum())
