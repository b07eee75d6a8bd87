"""One round in plain loops over workers and examples: Algorithms 1 to 3 of the paper, slowly and in full.

It plays what `noisegate.simulate.play` plays for workers of the kind `Normalized`, label flippers, and the aggregator
`TwoStage` with its defaults. `tests/test_protocol.py` holds the two against each other, round by round.
"""

import math
from dataclasses import dataclass, field

import torch
from scipy import stats
from torch import Tensor

from noisegate.simulate import Federation
from noisegate.workers.normalized import MARGIN
from noisegate.workers.sums import rounded_sensitivity


@dataclass
class Memory:
    """What a round hands to the next: the model, and for each worker its last upload and what stage two knows of it."""

    params: Tensor
    last: list[Tensor]
    earned: list[float] = field(default_factory=list)
    attended: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    allowance: list[float] = field(default_factory=list)

    def total(self, i: int) -> float:
        """What worker i earned, and its mean for the rounds that it missed, up to the allowance."""
        mean = self.earned[i] / max(1, self.attended[i])
        return self.earned[i] + min(mean * self.missed[i], self.allowance[i])


def play_plainly(federation: Federation, memory: Memory, t: int) -> list[str]:
    """Round t. `memory` is changed; given is what became of each upload: used, missing, norm, distribution or score."""
    mechanism, server, byzantine = federation.mechanism, federation.server, federation.adversary.byzantine.tolist()
    model, batch, n, d = mechanism.model, mechanism.batch, len(federation.workers), federation.d
    s = mechanism.sigma * rounded_sensitivity(mechanism.worker, batch) / batch
    beta, rate = mechanism.worker.momentum, batch / mechanism.declared

    # Algorithm 1, at every worker: draw, mix gradients with the last upload, scale them to length 1, add noise, divide.
    longest = int(federation.workers.sizes.max())
    uniform = torch.rand(n, longest, generator=federation.stream("batch", t), dtype=torch.float64)
    noise = torch.empty(n, d).normal_(0.0, s, generator=federation.stream("noise", t))
    uploads = []
    for i in range(n):
        total = torch.zeros(d, dtype=torch.float64)
        for j in range(int(federation.workers.sizes[i])):
            if uniform[i, j] < rate:
                number = federation.workers.holdings[i, j]
                x, y = federation.workers.x[number], federation.workers.y[number]
                if byzantine[i]:
                    y = federation.adversary.classes - 1 - y
                phi = (1 - beta) * gradient_of(model, memory.params, x, y) + beta * memory.last[i]
                if phi.norm() >= 1e-30:
                    total += MARGIN * phi.double() / phi.double().norm()
        uploads.append((total / batch + noise[i]).float())
    absent = torch.rand(n, generator=federation.stream("absent", t)) < federation.schedule.absent
    arrived = [i for i in range(n) if not (federation.schedule.absent and absent[i])]

    # Algorithm 2, at the server: the length of an upload, and the distribution of its coordinates, must be noise's.
    fate = ["missing"] * n
    for i in arrived:
        square, width = float(uploads[i].double().square().sum()), 3 * s**2 * math.sqrt(2 * d)
        if abs(square - s**2 * d) > width:
            fate[i] = "norm"
        elif stats.kstest(uploads[i].double().numpy() / s, "norm").pvalue < 0.05:
            fate[i] = "distribution"
        else:
            fate[i] = "used"

    # Algorithm 3: score uploads by the gradient of the server's own examples, add scores up, take the k highest totals.
    own = [gradient_of(model, memory.params, x, y) for x, y in zip(server.aux_x, server.aux_y, strict=True)]
    gradient = sum(own) / len(own)
    scores = [float(uploads[i].double() @ gradient.double()) if fate[i] == "used" else 0.0 for i in range(n)]
    k = math.ceil(server.believed_honest * len(arrived) / n)  # the believed share of those that arrived
    best = sorted((scores[i] for i in arrived), reverse=True)[:k]
    threshold = sum(best) / max(1, len(best))
    scores = [score if score >= threshold else 0.0 for score in scores]
    order = torch.randperm(n, generator=federation.stream("ties", t)).tolist()
    before = ranked(memory, order, arrived)[:k]
    usual = sum(scores[i] for i in before) / max(1, len(before))
    for i in range(n):
        memory.earned[i] += scores[i]
        memory.attended[i] += i in arrived
        memory.missed[i] += i not in arrived
        memory.allowance[i] += 0.0 if i in arrived else usual
    selected = ranked(memory, order, arrived)[:k]
    fate = ["score" if fate[i] == "used" and i not in selected else fate[i] for i in range(n)]

    # The model moves along the mean of the uploads that are used. Who sent something remembers it.
    used = [uploads[i] for i in range(n) if fate[i] == "used"]
    if used:
        memory.params = memory.params - server.rate * sum(used) / len(used)
    for i in arrived:
        memory.last[i] = uploads[i]
    return fate


def gradient_of(model, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one example's loss, by autograd."""
    leaf = params.clone().requires_grad_()
    return torch.autograd.grad(model.losses(leaf, x[None], y[None])[0], leaf)[0]


def ranked(memory: Memory, order: list[int], arrived: list[int]) -> list[int]:
    """Those whose upload arrived, from the highest total; equal ones in this order."""
    return sorted((i for i in order if i in arrived), key=lambda i: -memory.total(i))
