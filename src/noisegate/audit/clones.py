"""Clones of one worker, half of which hold the canary by a fair coin, through the product's own rounds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noisegate.attacks import ATTACKS
from noisegate.audit.canary import Canary
from noisegate.audit.claim import Claim
from noisegate.entropy import Secret
from noisegate.protocol import ServerState
from noisegate.roles import Aggregator
from noisegate.runs.setup import Setup
from noisegate.simulate import Federation, FederationState, first_state, play
from noisegate.streams import stream
from noisegate.views import Reason, ServerView, State, Verdict

COMPANY = 2
"""Other examples of a clone, in batches. A worker with fewer than are declared has the same promise."""

AT_ONCE = 2**20
"""Uploaded floats of one round: as many clones at a time as a CPU's cache likes. A CUDA device takes 64 times that."""

Watch = Callable[[int], None]


@dataclass(frozen=True)
class Frozen(Aggregator):
    """The adversary's aggregator: the model stays where it is, so that every contribution is known beforehand."""

    def __call__(self, view: ServerView, state: State) -> Verdict:
        """Keeps all and moves nothing."""
        reason = torch.where(view.present, Reason.KEPT.value, Reason.MALFORMED.value)
        return Verdict(torch.zeros_like(view.uploads[0]), view.present, reason, view.norms, state)


def company_of(setup: Setup, claim: Claim) -> Tensor:
    """Numbers of a clone's examples beside the canary: the first of the first honest worker, again and again.

    The claim holds whatever a worker's examples are. So the adversary takes those that hide the canary least.
    """
    run = setup.federation
    exact = claim.sampling.relation == "replace-one"  # there the price depends on how many examples there are
    wanted = claim.examples - 1 if exact else min(COMPANY * run.mechanism.batch, claim.examples - 1)
    return run.workers.holdings[run.adversary.honest_rows[:1], 0].expand(wanted)


def stage(setup: Setup, **changes: Any) -> Federation:
    """The run's federation without Byzantine workers or a defense, for the adversary to fill: everyone in it is honest.

    A secret one gets a secret of its own. On a CUDA device noise is drawn by key and round, so federations of one key
    would all have the same noise.
    """
    run = setup.federation
    secret = Secret(run.workers.x.device) if run.schedule.secret else None
    return run.change(attack=ATTACKS["none"](), aggregator=Frozen(), secret=secret, absent=0.0, **changes)


def state_with(params: Tensor, workers: int) -> FederationState:
    """A state before the first round, with this model, however wide it is."""
    nothing = params.new_zeros(workers, len(params))
    return FederationState(ServerState(params, {}, nothing), torch.zeros_like(nothing))


def clones(setup: Setup, canary: Canary, company: Tensor, held: Tensor, name: str) -> Federation:
    """One clone for each entry of `held` (n,): True if it holds the (first) canary."""
    run, n = setup.federation, len(held)
    planted = len(run.workers.y) + torch.arange(len(canary.y), device=company.device)
    rows = torch.cat([company, planted[:1]]).repeat(n, 1)
    sizes = torch.full((n,), rows.shape[1], device=rows.device)
    if len(planted) == 2:
        rows[~held, -1] = planted[1]
    else:
        sizes = sizes - (~held).long()  # it is not there at all
    return stage(
        setup,
        x=torch.cat([run.workers.x, canary.x]),
        y=torch.cat([run.workers.y, canary.y]),
        holdings=rows,
        sizes=sizes,
        byzantine=torch.zeros(n, dtype=torch.bool, device=rows.device),
        name=f"{run.schedule.name}/{name}",
    )


def groups(setup: Setup, trials: int, noise: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(a fair coin for each trial, the same on the device in groups of clones that play together)."""
    run = setup.federation
    at_once = max(1, AT_ONCE * (64 if run.workers.x.is_cuda else 1) // run.mechanism.model.d)
    coins = torch.rand(trials, generator=stream(run.schedule.seed, f"audit/coins/{noise}")) < 0.5
    return coins, coins.to(run.workers.x.device).split(at_once)


def attack(
    setup: Setup,
    claim: Claim,
    canary: Canary,
    trials: int,
    noise: float = 1.0,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """(trials,) each: who held the canary, and the log likelihood ratio over all uploads of all rounds.

    noise: a factor on the product's noise, which the adversary knows. watch: told how many clones played a round.
    """
    company = company_of(setup, claim)
    coins, parts = groups(setup, trials, noise)
    losses = []
    for number, held in enumerate(parts):
        playing = clones(setup, canary, company, held, f"audit/{noise}/{number}")
        playing = playing.change(sigma=noise * setup.federation.mechanism.sigma)
        losses.append(_play(playing, replace(canary, noise=noise * canary.noise), watch))
    return coins, torch.cat(losses).cpu()


def _play(run: Federation, canary: Canary, watch: Watch | None) -> Tensor:
    """(n,) the log likelihood ratios after all rounds."""
    state: FederationState = first_state(run)
    total = torch.zeros(len(run.adversary.byzantine), dtype=torch.float64, device=run.workers.x.device)
    last = canary.first(len(total))
    for t in range(run.schedule.rounds):
        state, _ = play(run, state, t)
        now = canary.look(state.uploads)
        total += canary.loss(now, last, run.mechanism.batch)
        last = now
        if watch:
            watch(len(total))
    return total
