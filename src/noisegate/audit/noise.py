"""The noise in uploads: how much, of which law, whether it is everywhere, and whether any two numbers are related.

Every worker's sum is a vector that the adversary knows. What is left when it is taken away is the noise.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from noisegate.audit.canary import claimed_noise
from noisegate.audit.check import Check, judged, two_sided
from noisegate.audit.claim import Claim
from noisegate.audit.clones import company_of, stage, state_with
from noisegate.audit.witness import Constant
from noisegate.flips import flip_probability
from noisegate.runs.setup import Setup
from noisegate.simulate import play
from noisegate.streams import stream

NUMBERS = 2**20
FEWEST, MOST = 8, 24
"""Workers, and rounds."""

SHORTEST_LAGS = 16
"""Numbers that a lag within an upload must at least have in common."""

WATCHED = 2
"""Workers of the second pass, which plays all rounds."""

MOST_WATCHED = 2**27
"""Numbers of the second pass: seconds on a CPU. A run with more of them is watched in its first coordinates."""


@dataclass(frozen=True, eq=False)
class Scale:
    """How noise is measured: an amount for every number, whose sums have a known law.

    known: (d,) the sum of every worker. mean: of an amount. amounts: those in uploads (n, d), float64. tail: the chance
    that so many amounts have this sum or a smaller one.
    """

    known: Tensor
    mean: float
    amounts: Callable[[Tensor], Tensor]
    tail: Callable[[float, int], float]


@dataclass(frozen=True, eq=False)
class ObservedSums:
    """ObservedSums of so many amounts each."""

    scale: Scale
    sums: Tensor
    count: int

    def least(self) -> tuple[float, float, int]:
        """(the chance of the smallest sum or a smaller one, its share of what is claimed, of how many numbers)."""
        smallest = float(self.sums.min())
        return self.scale.tail(smallest, self.count), smallest / (self.count * self.scale.mean), self.count


def try_noise(setup: Setup, claim: Claim) -> tuple[list[Check], float]:
    """(checks, the standard deviation that was found in a mean)."""
    run = setup.federation
    side = max(FEWEST, min(MOST, math.isqrt(NUMBERS // run.mechanism.model.d)))
    claimed = claimed_noise(setup)
    scale = _scale(setup, run.mechanism.model.d, claimed)
    uploads = torch.stack(list(_uploads(setup, claim, scale.known, (min(side, run.schedule.rounds), side), "noise")))
    amounts = scale.amounts(uploads)
    if run.mechanism.worker.mechanism == "gaussian" and run.mechanism.worker.noisy:
        noise = uploads - (scale.known / run.mechanism.batch).double()
        std = float(noise.square().mean().sqrt())
        checks = gaussian_checks(noise / std, std / claimed)
    else:
        expected, std = scale.mean, claimed
        minus, total = int(amounts.sum()), uploads.numel()
        found = f"{minus / total:.4f} of the signs were turned by noise, of {expected:.4f} claimed"
        checks = [judged("noise: signs turned", found, scale.tail(minus, total))]
        turned = (amounts - expected) / math.sqrt(expected * (1 - expected))
        checks += independence(turned)
    return checks + _everywhere(setup, claim, scale, amounts, claimed), std


def _scale(setup: Setup, d: int, claimed: float) -> Scale:
    """How the noise in uploads of d coordinates is measured."""
    run = setup.federation
    if run.mechanism.worker.mechanism == "gaussian" and run.mechanism.worker.noisy:
        known = torch.randn(d, generator=stream(run.schedule.seed, "audit/known")).to(run.workers.x.device)
        known *= run.mechanism.worker.sensitivity * math.sqrt(run.mechanism.batch) / known.norm()
        return Scale(
            known,
            1.0,
            lambda uploads: ((uploads - (known / run.mechanism.batch).double()) / claimed).square(),
            lambda total, count: float(stats.chi2.cdf(total, count)),
        )
    # A sign: what it is made of is positive, so that a minus comes from the noise alone.
    signs = run.mechanism.worker.mechanism == "signs"
    level = float(run.mechanism.batch) if signs else claimed * run.mechanism.batch
    expected = flip_probability(run.mechanism.sigma, d) if signs else float(stats.norm.sf(1.0))
    return Scale(
        torch.full((d,), level, device=run.workers.x.device),
        expected,
        lambda uploads: (uploads < 0).double(),
        lambda total, count: float(stats.binom.cdf(total, count, expected)),
    )


def _everywhere(setup: Setup, claim: Claim, scale: Scale, amounts: Tensor, claimed: float) -> list[Check]:
    """Whether noise is missing somewhere. amounts: (rounds, n, d) of the first pass. A second pass plays all rounds.

    Noise that one coordinate or one round lacks is a drop in all numbers, but all of what is looked at here.
    """
    run = setup.federation
    rounds, n, d = amounts.shape
    width = max(1, min(d, MOST_WATCHED // (WATCHED * run.schedule.rounds)))
    watched = scale if width == d else _scale(setup, width, claimed)
    coordinates, sent = torch.zeros(width, dtype=torch.float64, device=amounts.device), []
    for upload in _uploads(setup, claim, watched.known, (run.schedule.rounds, WATCHED), "every round"):
        each = watched.amounts(upload)
        coordinates += each.sum(0)
        sent.append(each.sum(1))
    uploads = torch.stack(sent)
    first = ObservedSums(scale, amounts.sum((0, 1)), rounds * n)
    where = f", in {width} of {d} coordinates," if width < d else ""
    return [
        least("coordinate", [first, ObservedSums(watched, coordinates, WATCHED * run.schedule.rounds)]),
        least(
            "round",
            [ObservedSums(watched, uploads.sum(1), WATCHED * width), ObservedSums(watched, uploads, width)],
            where,
        ),
        least("worker", [ObservedSums(scale, amounts.sum((0, 2)), rounds * d)]),
    ]


def least(name: str, groups: list[ObservedSums], where: str = "") -> Check:
    """Whether one of many sums is too small. where: what to say of them."""
    looked = sum(group.sums.numel() for group in groups)
    p, share, count = min(group.least() for group in groups)
    found = f"the least of {looked} sums{where} is {share:.4f} of what is claimed, over {count} numbers"
    return judged(f"noise: every {name}", found, min(1.0, looked * p))


def gaussian_checks(noise: Tensor, share: float) -> list[Check]:
    """Checks of (rounds, n, d) numbers of variance 1, which were `share` times what is claimed."""
    total = noise.numel()
    p = float(stats.chi2.cdf(total * share**2, total))
    low, high = (share * math.sqrt(total / stats.chi2.ppf(level, total)) for level in (0.975, 0.025))
    deviation = judged(
        "noise: standard deviation", f"{share:.4f} of what is claimed, 95 % interval {low:.4f} to {high:.4f}", p
    )
    distance, p = stats.kstest(noise.flatten().cpu().numpy(), "norm")
    law = judged("noise: distribution", f"distance to a normal law {distance:.5f} in {total} numbers", float(p))
    return [deviation, law, *independence(noise)]


def independence(noise: Tensor) -> list[Check]:
    """Checks whether (rounds, n, d) numbers of variance 1 have to do with each other."""
    rounds, n, d = noise.shape
    checks = []
    for name, axis in (("workers", 1), ("rounds", 0)):
        ratio, p = _between(noise, axis)
        checks.append(
            judged(f"noise: shared by {name}", f"variance of the mean over {name} {ratio:.4f} of what it must be", p)
        )
    rows = noise.reshape(rounds * n, d)
    rows = rows / rows.norm(dim=1, keepdim=True)
    pairs = len(rows) * (len(rows) - 1) // 2
    largest = min(1.0, float((rows @ rows.T).fill_diagonal_(0.0).abs().max()))
    p = min(1.0, pairs * float(stats.beta.sf(largest**2, 0.5, (d - 1) / 2))) if d > 1 else 1.0
    checks.append(
        judged("noise: two uploads alike", f"largest correlation {largest:.4f} among {pairs} pairs of uploads", p)
    )
    largest, p = _within(noise.reshape(rounds * n, d))
    checks.append(judged("noise: repeated in an upload", f"largest correlation at a distance {largest:.5f}", p))
    return checks


def _between(noise: Tensor, axis: int) -> tuple[float, float]:
    """(variance between groups over that within, p-value): the analysis of variance, both tails."""
    k = noise.shape[axis]
    means = noise.mean(axis, keepdim=True)
    groups = means.numel()
    within = float((noise - means).square().sum()) / (groups * (k - 1))
    ratio = k * float(means.square().sum()) / groups / within
    law = stats.f(groups, groups * (k - 1))
    return ratio, two_sided(float(law.cdf(ratio)), float(law.sf(ratio)))


def _within(rows: Tensor) -> tuple[float, float]:
    """(largest correlation of numbers at one distance, p-value), over all distances and rows of variance 1."""
    count, d = rows.shape
    if d <= SHORTEST_LAGS + 1:
        return 0.0, 1.0
    spectrum = torch.fft.rfft(rows, n=2 * d).abs().square().sum(0)
    sums = torch.fft.irfft(spectrum, n=2 * d)[1 : d - SHORTEST_LAGS]
    common = count * (d - torch.arange(1, d - SHORTEST_LAGS, device=rows.device, dtype=torch.float64))
    z = float((sums / common.sqrt()).abs().max())
    return float((sums / common).abs().max()), min(1.0, len(sums) * 2 * float(stats.norm.sf(z)))


def _uploads(setup: Setup, claim: Claim, known: Tensor, shape: tuple[int, int], name: str) -> Iterator[Tensor]:
    """(n, d) float64 in each round: fresh uploads of workers whose sums are `known`, without what they carry along.

    shape: (rounds, n). Uploads are as wide as `known` is, whatever the model is.
    """
    run = setup.federation
    company = company_of(setup, claim)
    rounds, n = shape
    federation = stage(
        setup,
        sums=Constant(known),
        holdings=company.repeat(n, 1),
        sizes=torch.full((n,), len(company), device=company.device),
        byzantine=torch.zeros(n, dtype=torch.bool, device=company.device),
        name=f"{run.schedule.name}/audit/{name}",
    )
    carry = getattr(run.mechanism.worker, "carry", 0.0)
    state = state_with(torch.zeros_like(known), n)
    last = torch.zeros_like(state.uploads, dtype=torch.float64)
    for t in range(rounds):
        state, _ = play(federation, state, t)
        now = state.uploads.double()
        yield (now - carry * last) / (1 - carry)
        last = now
