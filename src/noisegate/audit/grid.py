"""The attack on noise that lies on a grid: was this example drawn, by the last bits of one upload alone?

On a CPU torch makes float32 normals by Box and Muller's way from uniforms of 24 bits, 16 at a time: numbers j and j + 8
of 16 are r cos(t) and r sin(t), with r^2 = -2 log(1 - k / 2^24) for a whole number k. So of every such pair
exp(-r^2 / 2) 2^24 is a whole number, but for rounding. In the tail that can be seen. If an upload less what the example
would have added has this property, the example was drawn; if the upload as it is has it, it was not. A number beyond
sqrt(-2 log 2^-24) = 5.77 standard deviations is never drawn at all.
"""

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from noisegate.audit.bounds import above, below
from noisegate.audit.claim import Claim
from noisegate.audit.clones import stage
from noisegate.audit.signs import CHUNK, linear_model
from noisegate.audit.witness import Recorder
from noisegate.runs.setup import Setup
from noisegate.simulate import Federation, first_state, play
from noisegate.streams import stream
from noisegate.workers import ClosedForm, Direct

BLOCK, HALF = 16, 8
BITS = 2.0**24
ULP = 2.0**-24
"""Relative error of one rounding in float32."""

OTHERWISE = 0.02
"""Share of pairs that need not obey: a generator fills the end of a tensor another way."""

CERTAIN = 12.0
"""Log of the odds at which the attack answers; a coin's answer reaches it once in 160,000 times."""

WIDTH = 2048
"""Parameters of the model that the server chooses."""

DRAWN, FEWEST, MOST = 40, 400, 8192
"""Uploads that should have the example, and how many uploads there are at least and at most to find so many."""

MOST_EXAMPLES = 2**22
"""Of all workers together."""

AT_ONCE = 256
"""Uploads that are looked at at the same time."""


def grid_evidence(noise: Tensor, scale: Tensor) -> Tensor:
    """(n,) log odds that (n, d) standard normals are torch's own, given how large the numbers were that were rounded.

    noise: in standard deviations, float64. scale: (n, d) the largest magnitudes on the way, in the same unit.
    The rows must begin where a block of 16 begins: d is a multiple of 16, or there is one row.
    """
    n, d = noise.shape
    blocks = slice(0, d // BLOCK * BLOCK)
    first, second = noise[:, blocks].reshape(n, -1, 2, HALF).unbind(2)
    error, other = scale[:, blocks].reshape(n, -1, 2, HALF).unbind(2)
    squared = first**2 + second**2
    survival = torch.exp(-squared / 2)
    k = survival * BITS
    # What an error of each number does to k: roundings of the numbers as they were stored, and of the radius.
    spread = k * ULP * ((first * error) ** 2 + (second * other) ** 2 + squared**2 / 2 + 1.0).sqrt()
    off = (k - k.round()).abs()
    near = torch.exp(-((off / spread) ** 2) / 2) + torch.exp(-(((1 - off) / spread) ** 2) / 2)
    density = torch.where(spread < 0.5, near / (math.sqrt(2 * math.pi) * spread), 1.0)
    evidence = torch.log((1 - OTHERWISE) * density + OTHERWISE)
    return torch.where(k > 0.5, evidence, math.log(OTHERWISE)).sum((1, 2))


def grid_attack(uploads: Tensor, contribution: Tensor, std: float) -> Tensor:
    """(n,) 1 where the attack says that the example was drawn, 0 where it says that it was not, -1 where it is silent.

    uploads: (n, d) float32, of workers whose other examples contribute nothing. contribution: (d,) what the example
    adds to an upload. std: of the noise in a coordinate.
    """
    every = []
    for some in uploads.split(AT_ONCE):
        without, within = some.double() / std, (some.double() - contribution.double()) / std
        there = grid_evidence(within, torch.maximum(within.abs(), without.abs()))
        every.append(there - grid_evidence(without, without.abs()))
    odds = torch.cat(every)
    answer = torch.full((len(uploads),), -1, device=uploads.device)
    return answer.masked_fill_(odds > CERTAIN, 1).masked_fill_(odds < -CERTAIN, 0)


@dataclass(frozen=True)
class GridFinding:
    """Of so many uploads with and without the example: how many were told right, how many wrong."""

    drawn: int
    told_drawn: int
    not_drawn: int
    told_wrong: int

    def beats(self, sigma: float, level: float) -> bool:
        """Whether that is more than Gaussian noise of this multiplier allows, on the Gaussian trade-off curve."""
        if not self.drawn or not self.not_drawn:
            return False
        hit = above(self.told_drawn, self.drawn, level / 2)
        false = below(self.told_wrong, self.not_drawn, level / 2)
        return hit > float(stats.norm.cdf(stats.norm.ppf(false) + 1 / sigma))


def server_model(setup: Setup, claim: Claim, workers: int) -> tuple[Federation, Tensor]:
    """(a federation whose model the server chose so that one example of each worker contributes, that example).

    All examples have the same input, but labels of their own, by which one sees who drew what. The gradient of a
    worker's last one is that input, and the others have none.
    """
    run = setup.federation
    examples = (
        claim.examples if claim.sampling.relation == "replace-one" else min(claim.examples, 2 * run.mechanism.batch)
    )
    device = run.workers.x.device
    example = torch.randn(1, WIDTH, generator=stream(run.schedule.seed, "audit/grid")).to(device)
    numbers = torch.arange(workers * examples, device=device).view(workers, examples)
    y = numbers.flatten().clone()
    y[numbers[:, -1]] += y.numel()
    model = linear_model(WIDTH, y.numel(), device)
    federation = stage(
        setup,
        model=model,
        sums=ClosedForm.of(model, CHUNK) or Direct(model),
        x=example.expand(y.numel(), -1),  # which takes no memory
        y=y,
        aux_x=example,
        aux_y=y[:1],
        holdings=numbers,
        sizes=torch.full((workers,), examples, device=device),
        byzantine=torch.zeros(workers, dtype=torch.bool, device=device),
        name=f"{run.schedule.name}/audit/grid",
    )
    return federation, example


def enough(claim: Claim) -> int:
    """How many uploads it takes until some of them have the example."""
    examples = claim.examples if claim.sampling.relation == "replace-one" else 2 * claim.sampling.batch
    return max(1, min(MOST_EXAMPLES // examples, MOST, max(FEWEST, math.ceil(DRAWN / claim.rate))))


def try_grid(setup: Setup, claim: Claim, workers: int) -> GridFinding:
    """The attack on so many first-round uploads of the real path. What it knows of the generator holds on a CPU."""
    federation, example = server_model(setup, claim, workers)
    recorder = Recorder(federation.mechanism.sums)
    state, _ = play(federation.change(sums=recorder), first_state(federation), 0)
    nobody = torch.zeros(1, dtype=torch.int64, device=example.device)
    nothing = torch.zeros_like(state.params)[None]
    mechanism, label = federation.mechanism, federation.workers.y[-1:]
    known = mechanism.sums(mechanism.worker, state.params, example, label, nobody, nothing)
    sent = state.uploads / (1 - getattr(mechanism.worker, "carry", 0.0))  # nothing was carried into the first round
    answer = grid_attack(sent, known[0] / mechanism.batch, mechanism.added_noise)
    labels = recorder.labels()
    examples = federation.workers.holdings.shape[1]
    drawn = torch.zeros(workers, dtype=torch.bool, device=example.device)
    drawn[(labels[labels >= len(federation.workers.y)] - len(federation.workers.y)) // examples] = True
    told, wrong = (answer == 1) & drawn, (answer == 1) & ~drawn
    return GridFinding(int(drawn.sum()), int(told.sum()), int((~drawn).sum()), int(wrong.sum()))
