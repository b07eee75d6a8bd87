"""The example that the adversary plants, the direction it looks along, and what an upload says about it.

The adversary knows the model, every example of the worker, the canary, the noise and the rate, and all uploads. It does
not know the batches or the noise. Any statistic gives a valid test: what is approximate here costs power, never truth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate.audit.claim import Claim
from noisegate.errors import SpecError
from noisegate.roles import Worker
from noisegate.runs.setup import Setup
from noisegate.streams import stream
from noisegate.workers import per_example_gradients

CANDIDATES, SCALES = 24, (1.0, 10.0, 100.0)
"""Inputs that are tried as canaries, and how much larger than they are: a longer gradient outweighs the momentum."""

SHORTEST = 1e-6
"""Length of a canary's gradient at least."""

AT_ONCE = 2**24
"""Floats of gradients that exist at the same time while a canary is chosen."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Lengths and projections of some examples' gradients: (k,) each."""

    lengths: Tensor
    along: Tensor

    def contribute(self, worker: Worker, last: "Last", cross: Tensor | float = 0.0) -> Tensor:
        """(n, k) what each would add to the sum of each clone, along the direction.

        cross: (n, k) inner products of gradients and last uploads; 0 where they are taken to be at right angles.
        """
        own, carried = 1 - worker.momentum, worker.momentum
        squared = (own * self.lengths) ** 2 + 2 * own * carried * cross + (carried * last.length[:, None]) ** 2
        weights = worker.weights(squared.clamp(min=1e-60).sqrt())
        added: Tensor = weights * (own * self.along + carried * last.along[:, None])
        return added


@dataclass(frozen=True, eq=False)
class Last:
    """What is known of the last upload of n clones: its length, and its products with the direction and the canaries.

    length, along: (n,). cross: (n, canaries).
    """

    length: Tensor
    along: Tensor
    cross: Tensor


@dataclass(frozen=True, eq=False)
class Canary:
    """One example for add-or-remove; two, of which a worker holds either, for replace-one.

    x, y: the examples. direction: (d,) of length 1. gradients: (canaries, d). noise: standard deviation in a sum.
    planted, company: what is known of them and of the worker's other examples.
    strength: how well one can be told from its absence in one upload that has it, of 1 at most.
    """

    x: Tensor
    y: Tensor
    direction: Tensor
    gradients: Tensor
    planted: Seen
    company: Seen
    strength: float
    worker: Worker
    rate: float
    noise: float

    @property
    def gain(self) -> float:
        """How far a sign of a noisy number leans on average, for each unit of that number; small numbers only."""
        return math.sqrt(2 / math.pi) / self.noise

    def first(self, clones: int) -> Last:
        """Before the first round: nothing was sent."""
        nothing = self.direction.new_zeros(clones, dtype=torch.float64)
        return Last(nothing, nothing, nothing[:, None].expand(clones, len(self.y)))

    def look(self, uploads: Tensor) -> Last:
        """What there is to know of (n, d) uploads."""
        products = (uploads @ torch.stack([self.direction, *self.gradients], 1)).double()
        length = torch.linalg.vector_norm(uploads, dim=1).double()
        return Last(length, products[:, 0], products[:, 1:])

    def loss(self, now: Last, last: Last, batch: int) -> Tensor:
        """(n,) the log likelihood ratio of one round: the first world against the second, given what was sent last."""
        carry = getattr(self.worker, "carry", 0.0)
        fresh = (now.along - carry * last.along) / (1 - carry)
        others = self.company.contribute(self.worker, last)
        signal = self.planted.contribute(self.worker, last, last.cross)
        if len(self.y) == 2:  # a batch has its size, so that a canary takes another's place
            mean, spread = batch * others.mean(1), batch * others.var(1)
            signal = signal - others.mean(1, keepdim=True)
        else:
            mean, spread = self.rate * others.sum(1), self.rate * (1 - self.rate) * (others**2).sum(1)
        if self.worker.noisy:
            seen, variance = batch * fresh - mean, self.noise**2 + spread
        else:  # a sign has variance 1, and leans by `gain` times what it is the sign of
            seen = now.along * math.sqrt(len(self.direction)) - self.gain * mean
            signal, variance = self.gain * signal, 1 + self.gain**2 * spread
        drawn = (seen[:, None] * signal - signal**2 / 2) / variance[:, None]
        losses = torch.logaddexp(drawn + math.log(self.rate), torch.full_like(drawn, math.log1p(-self.rate)))
        return losses[:, 0] - losses[:, 1] if losses.shape[1] == 2 else losses[:, 0]


def choose(setup: Setup, claim: Claim, company: Tensor, std: float) -> Canary:
    """The strongest of some candidates: inputs of the test set and random ones, also longer, with labels at random.

    company: numbers of the worker's other examples. std: of the noise in a mean, as it was found to be.
    """
    run, pair = setup.federation, claim.sampling.relation == "replace-one"
    params, d = run.mechanism.model.initial(), run.mechanism.model.d
    number = max(2, min(CANDIDATES, AT_ONCE // (4 * 2 * len(SCALES) * d)))
    rng = stream(run.schedule.seed, "audit/canary")
    inputs = setup.x_test[:number]
    inputs = torch.cat([inputs, inputs.std() * torch.randn(inputs.shape, generator=rng).to(inputs)])
    x = torch.cat([scale * inputs for scale in SCALES])
    y = torch.randint(run.adversary.classes, (len(x),), generator=rng).to(x.device)
    tried = per_example_gradients(run.mechanism.model, params, x, y)
    others = torch.cat([
        per_example_gradients(run.mechanism.model, params, run.workers.x[some], run.workers.y[some])
        for some in company.split(max(1, AT_ONCE // (4 * d)))
    ])  # fmt: skip
    noise, length = run.mechanism.batch * std, std * math.sqrt(d)  # in a sum; of what was sent last
    known, contributed = (_alone(run.mechanism.worker, gradients, length) for gradients in (tried, others))
    usable = known.isfinite().all(1) & (tried.norm(dim=1) >= SHORTEST)
    if not bool(usable.any()):
        raise SpecError(
            f"model: no example tried as a canary has a finite gradient of length {SHORTEST}; check the loss"
        )
    known = torch.where(usable[:, None], known, 0.0)
    whiten = _whitened(known, contributed, claim.rate * (1 - claim.rate), noise)
    best = int((known * whiten).sum(1).argmax())
    chosen, direction = [best], whiten[best]
    power = float((known[best] * direction).sum())
    if pair:
        apart = ((known[best] - known) * (whiten[best] - whiten)).sum(1)
        chosen.append(int(apart.argmax()))
        direction, power = whiten[best] - whiten[chosen[1]], float(apart.max())
    direction = direction / direction.norm()
    largest = claim.sampling.sensitivity * run.mechanism.worker.sensitivity
    return Canary(
        x[chosen],
        y[chosen],
        direction,
        tried[chosen],
        _seen(tried[chosen], direction),
        _seen(others.nan_to_num(0.0, 0.0, 0.0), direction),
        noise * math.sqrt(max(power, 0.0)) / largest,
        run.mechanism.worker,
        claim.rate,
        noise,
    )


def claimed_noise(setup: Setup) -> float:
    """The least standard deviation of the noise in a mean that the claim needs: sigma sensitivity / batch."""
    return setup.privacy.sigma * setup.federation.mechanism.worker.sensitivity / setup.federation.mechanism.batch


def _alone(worker: Worker, gradients: Tensor, last: float) -> Tensor:
    """(k, d) what the gradients contribute beside a last upload of this length at right angles, without that upload."""
    own = 1 - worker.momentum
    norms = torch.hypot(own * gradients.norm(dim=1), torch.tensor(worker.momentum * last, device=gradients.device))
    return gradients * (own * worker.weights(norms.clamp(min=SHORTEST)))[:, None]


def _whitened(known: Tensor, others: Tensor, variance: float, noise: float) -> Tensor:
    """(k, d) the inverse covariance of an upload times each: where to look for it (Fisher's discriminant)."""
    others = others.nan_to_num(0.0, 0.0, 0.0)
    gram = others @ others.T + torch.eye(len(others), device=others.device) * (noise**2 / variance)
    solved = torch.linalg.solve(gram.double(), (others @ known.T).double()).to(known.dtype)
    looked_for: Tensor = (known - solved.T @ others) / noise**2
    return looked_for


def _seen(gradients: Tensor, direction: Tensor) -> Seen:
    return Seen(gradients.norm(dim=1).double(), (gradients @ direction).double())
