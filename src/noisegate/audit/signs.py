"""Membership trials for workers that flip signs at random.

The claim is the price of an example that turns all signs. So the adversary sends a model under which the canary does
that, and nothing else contributes: without the canary every sign is one that comes from zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisegate.audit.claim import Claim
from noisegate.audit.clones import COMPANY, Watch, groups, stage
from noisegate.flips import flip_probability, sign_bias
from noisegate.roles import Worker
from noisegate.runs.setup import Setup
from noisegate.simulate import Federation, first_state, play
from noisegate.vectors import FlatModel
from noisegate.workers import ClosedForm, Direct

CHUNK = 128
"""Examples at a time, should the model that the server chose have no closed form."""


@dataclass(frozen=True)
class ChosenLoss:
    """The output itself where the label is at least `from_label`, else nothing: so few examples have a gradient."""

    from_label: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] * (targets >= self.from_label)


def linear_model(width: int, from_label: int, device: torch.device) -> FlatModel:
    """A model whose gradient is the example itself, if its label is at least `from_label`, and else zero."""
    with torch.device("meta"):
        module = nn.Linear(width, 1, bias=False)
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        module.weight.zero_()
    return FlatModel(module, ChosenLoss(from_label), device)


def chances(worker: Worker, sigma: float, d: int, batch: int) -> tuple[float, float]:
    """The chance of a minus if the canary was not drawn, and if it was."""
    bound = getattr(worker, "bound", None)
    if bound is None:
        flip = flip_probability(sigma, d)
        return flip, 1 - flip
    return 0.5, 0.5 + sign_bias(sigma, d) / 2 * min(1.0, 1 / (batch * bound))


def attack_signs(
    setup: Setup, claim: Claim, trials: int, noise: float = 1.0, watch: Watch | None = None
) -> tuple[Tensor, Tensor]:
    """(trials,) each: who held the canary, and the log likelihood ratio over all uploads of all rounds."""
    coins, parts = groups(setup, trials, noise)
    losses = []
    for number, held in enumerate(parts):
        run = _clones(setup, claim, held, f"audit/{noise}/{number}")
        run = run.change(sigma=noise * setup.federation.mechanism.sigma)
        losses.append(_play(run, claim, watch))
    return coins, torch.cat(losses).cpu()


def _clones(setup: Setup, claim: Claim, held: Tensor, name: str) -> Federation:
    run, n, device = setup.federation, len(held), held.device
    model = linear_model(run.mechanism.model.d, 1, device)
    row = torch.full((1, run.mechanism.model.d), -1.0, device=device)
    company = min(COMPANY * run.mechanism.batch, claim.examples - 1)
    numbers = torch.tensor([0] * company + [1], device=device)
    return stage(
        setup,
        model=model,
        sums=ClosedForm.of(model, CHUNK) or Direct(model),
        x=row.expand(2, -1),
        y=torch.tensor([0, 1], device=device),
        aux_x=row,
        aux_y=torch.tensor([0], device=device),
        holdings=numbers.repeat(n, 1),
        sizes=company + held.long(),
        byzantine=torch.zeros(n, dtype=torch.bool, device=device),
        name=f"{run.schedule.name}/{name}",
    )


def _play(run: Federation, claim: Claim, watch: Watch | None) -> Tensor:
    """(n,) the log likelihood ratios after all rounds: in each, the number of minus signs is all that counts."""
    never, drawn = chances(run.mechanism.worker, run.mechanism.sigma, run.mechanism.model.d, run.mechanism.batch)
    minus, plus = math.log(drawn / never), math.log((1 - drawn) / (1 - never))
    state = first_state(run)
    total = torch.zeros(len(run.adversary.byzantine), dtype=torch.float64, device=run.workers.x.device)
    for t in range(run.schedule.rounds):
        state, _ = play(run, state, t)
        found = (state.uploads < 0).sum(1).double()
        loss = minus * found + plus * (run.mechanism.model.d - found) + math.log(claim.rate)
        total += torch.logaddexp(loss, torch.full_like(loss, math.log1p(-claim.rate)))
        if watch:
            watch(len(total))
    return total
