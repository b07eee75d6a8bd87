"""Batches: how often each example is drawn, and whether any two draws have to do with each other.

A sampler that repeats nine batches has the right rate, and fools every test of one round. The accountant's price needs
independent draws.
"""

from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from noisegate.audit.check import Check, judged, two_sided
from noisegate.audit.claim import Claim
from noisegate.audit.clones import stage, state_with
from noisegate.audit.witness import Recorder
from noisegate.runs.setup import Setup
from noisegate.simulate import play

WORKERS = 8
MOST_BITS = 2**24
"""Examples times workers times rounds."""

COMPARED = 1024
"""Batches that are compared with each other one by one."""


def try_sampling(setup: Setup, claim: Claim) -> list[Check]:
    """Checks of the batches that the product's rounds draw."""
    rounds = max(2, min(claim.rounds, MOST_BITS // (WORKERS * claim.examples)))
    return sampling_checks(drawn_batches(setup, claim, rounds), claim)


def drawn_batches(setup: Setup, claim: Claim, rounds: int) -> Tensor:
    """(rounds, workers, examples) bool: which example each worker used in each round."""
    run, device = setup.federation, setup.federation.workers.x.device
    numbers = torch.arange(WORKERS * claim.examples, device=device).view(WORKERS, claim.examples)
    recorder = Recorder()
    federation = stage(
        setup,
        sums=recorder,
        x=torch.zeros(1, 1, device=device).expand(numbers.numel(), 1),
        y=numbers.flatten(),  # an example's label is its number
        holdings=numbers,
        sizes=torch.full((WORKERS,), claim.examples, device=device),
        byzantine=torch.zeros(WORKERS, dtype=torch.bool, device=device),
        name=f"{run.schedule.name}/audit/sampling",
    )
    state = state_with(torch.zeros(1, device=device), WORKERS)
    found = torch.zeros(rounds, numbers.numel(), dtype=torch.bool, device=device)
    for t in range(rounds):
        state, _ = play(federation, state, t)
        found[t, recorder.labels().to(device)] = True
    return found.view(rounds, *numbers.shape)


@dataclass(frozen=True)
class Counts:
    """Binomial counts: of so many chances each, with this probability."""

    chances: int
    rate: float

    def spread(self, counts: Tensor) -> tuple[float, float]:
        """(their mean squared deviation over what it must be, p-value of both tails)."""
        variance = self.chances * self.rate * (1 - self.rate)
        ratio = float((counts.double() - self.chances * self.rate).square().mean()) / variance
        excess = (1 - 6 * self.rate * (1 - self.rate)) / variance
        z = (ratio - 1) * (counts.numel() / (2 + excess)) ** 0.5
        return ratio, two_sided(float(stats.norm.cdf(z)), float(stats.norm.sf(z)))


def sampling_checks(drawn: Tensor, claim: Claim) -> list[Check]:
    """Checks of (rounds, workers, examples) bool against independent draws at the claimed rate."""
    rounds, workers, examples = drawn.shape
    q, fixed = claim.rate, claim.sampling.relation == "replace-one"
    total, cells = int(drawn.sum()), drawn.numel()
    often = float(stats.binom.sf(total - 1, cells, q))
    checks = [judged("sampling: rate", f"{total / cells:.5f} a round, of {q:.5f} claimed", often)]
    counts = drawn.sum(0)
    most = int(counts.max())
    p = min(1.0, counts.numel() * float(stats.binom.sf(most - 1, rounds, q)))
    checks.append(judged("sampling: one example", f"one was drawn in {most} of {rounds} rounds", p))
    ratio, p = Counts(rounds, q).spread(counts)
    checks.append(judged("sampling: spread of counts", f"{ratio:.3f} of what independent rounds give", p))
    ratio, p = Counts(workers, q).spread(drawn.sum(1))
    checks.append(judged("sampling: shared by workers", f"spread {ratio:.3f} of what independent workers give", p))
    sizes = drawn.sum(2)
    if fixed:
        wrong = int((sizes != claim.sampling.batch).sum())
        checks.append(Check("sampling: batch sizes", f"{wrong} of {sizes.numel()} are not the batch size", wrong > 0))
    elif q < 1:
        ratio, p = Counts(examples, q).spread(sizes)
        checks.append(judged("sampling: batch sizes", f"spread {ratio:.3f} of what independent examples give", p))
    if q < 1:
        checks += [_alike(drawn, claim), _lagged(drawn, q)]
    return checks


def _alike(drawn: Tensor, claim: Claim) -> Check:
    """The two batches that have the most examples in common, by position, of any workers and rounds."""
    rows = drawn.flatten(0, 1)[:COMPARED].float()
    common = int((rows @ rows.T).fill_diagonal_(0.0).max())
    examples, q = drawn.shape[2], claim.rate
    law: Any = stats.binom(examples, q * q)
    if claim.sampling.relation == "replace-one":
        law = stats.hypergeom(examples, claim.sampling.batch, claim.sampling.batch)
    pairs = len(rows) * (len(rows) - 1) // 2
    p = min(1.0, pairs * float(law.sf(common - 1)))
    return judged("sampling: two batches alike", f"two of {len(rows)} batches have {common} examples in common", p)


def _lagged(drawn: Tensor, q: float) -> Check:
    """Whether batches have more, or fewer, examples in common with those some rounds earlier."""
    rounds = len(drawn)
    centered = (drawn.flatten(1).float() - q) / (q * (1 - q)) ** 0.5
    products = (centered @ centered.T).double()
    sums = torch.stack([products.diagonal(lag).sum() for lag in range(1, rounds)])
    chances = drawn[0].numel() * torch.arange(rounds - 1, 0, -1, device=drawn.device).double()
    z = (sums / chances.sqrt()).abs()
    p = min(1.0, len(z) * 2 * float(stats.norm.sf(float(z.max()))))
    lag = int(z.argmax()) + 1
    return judged("sampling: lags", f"strongest tie at a distance of {lag} rounds, z = {float(z.max()):.2f}", p)
