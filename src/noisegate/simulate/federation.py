"""Who takes part in a simulated run, and the state that a round takes in and gives out."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from noisegate.sampling import Batch, Sampling
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.views import Attack, Memory, Rule, Worker
from noisegate.workers import Sums, rounded_sensitivity


@dataclass(frozen=True)
class Federation:
    """Everything about a run that does not change from round to round.

    x, y: the training pool. holdings: (n, width) numbers of the examples that each worker holds, in the order of the
    workers' positions, padded; sizes: (n,) how many. byzantine: (n,) who lies; only the attack may know.
    name: of the run. Two runs with one seed share data and weights, but by their names neither noise nor batches: the
    difference of two uploads with the same noise would show a worker's gradients bare.
    """

    model: FlatModel
    sums: Sums
    worker: Worker
    sampling: Sampling
    attack: Attack
    rule: Rule
    x: Tensor
    y: Tensor
    holdings: Tensor
    sizes: Tensor
    byzantine: Tensor
    aux_x: Tensor
    aux_y: Tensor
    classes: int
    sigma: float
    batch: int
    rate: float
    believed_honest: int
    rounds: int
    seed: int
    name: str = ""

    @cached_property
    def everyone(self) -> Tensor:
        """(n,) every position."""
        return torch.arange(len(self.byzantine), device=self.byzantine.device)

    @cached_property
    def honest_rows(self) -> Tensor:
        """(H,) the positions of the honest workers."""
        return self.everyone[~self.byzantine]

    @cached_property
    def byzantine_rows(self) -> Tensor:
        """(M,) the positions of the Byzantine workers."""
        return self.everyone[self.byzantine]

    def stream(self, what: str, t: int) -> torch.Generator:
        """The generator of this run for `what` in round `t`."""
        return stream(self.seed, f"{what}/{self.name}" if self.name else what, t, self.byzantine.device)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each coordinate of an upload, s = sigma sensitivity / batch."""
        return self.sigma * rounded_sensitivity(self.worker, self.batch) / self.batch

    def examples(self, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, owner) of the drawn examples of the workers `rows`; `owner` numbers them 0.. in that order."""
        owner, slot = batch.real.nonzero(as_tuple=True)
        chosen = self.holdings[rows[owner], batch.index[owner, slot]]
        return self.x[chosen], self.y[chosen], owner


@dataclass(frozen=True)
class State:
    """What one round hands to the next.

    params: (d,) the model. uploads: (n, d) what everyone sent last (the workers' momentum). memory: the rule's own.
    """

    params: Tensor
    uploads: Tensor
    memory: Memory


def first_state(federation: Federation) -> State:
    """The state before the first round: the model as initialized, nobody has sent anything."""
    params = federation.model.initial()
    return State(params, params.new_zeros(len(federation.byzantine), len(params)), {})
