"""The noise in uploads: how much, of which law, and whether any two numbers have to do with each other.

Every worker's sum is a vector that the adversary knows. What is left when it is taken away is the noise.
"""

import math
from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from noisegate.flips import flip_probability
from noisegate.lab.audit.canary import claimed_noise
from noisegate.lab.audit.check import Check, judged, two_sided
from noisegate.lab.audit.claim import Claim
from noisegate.lab.audit.clones import company_of, stage
from noisegate.lab.audit.witness import Constant
from noisegate.lab.setup import Setup
from noisegate.simulate import first_state, play
from noisegate.streams import stream

NUMBERS = 2**20
FEWEST, MOST = 8, 24
"""Workers, and rounds."""

SHORTEST_LAGS = 16
"""Numbers that a lag within an upload must at least have in common."""

Law = Callable[[float], float]


def try_noise(setup: Setup, claim: Claim) -> tuple[list[Check], float]:
    """(checks, the standard deviation that was found in a mean)."""
    run = setup.federation
    side = max(FEWEST, min(MOST, math.isqrt(NUMBERS // run.model.d)))
    claimed = claimed_noise(setup)
    if run.worker.mechanism == "gaussian" and run.worker.noisy:
        known = torch.randn(run.model.d, generator=stream(run.seed, "audit/known")).to(run.x.device)
        known *= run.worker.sensitivity * math.sqrt(run.batch) / known.norm()
        noise = _uploads(setup, claim, known, side) - (known / run.batch).double()
        std = float(noise.square().mean().sqrt())
        return gaussian_checks(noise / std, std / claimed), std
    # A sign: what it is made of is positive, so that a minus comes from the noise alone.
    signs = run.worker.mechanism == "signs"
    level = float(run.batch) if signs else claimed * run.batch
    uploads = _uploads(setup, claim, torch.full((run.model.d,), level, device=run.x.device), side)
    expected = flip_probability(run.sigma, run.model.d) if signs else float(stats.norm.sf(1.0))
    minus, total = int((uploads < 0).sum()), uploads.numel()
    p = float(stats.binom.cdf(minus, total, expected))
    found = f"{minus / total:.4f} of the signs were turned by noise, of {expected:.4f} claimed"
    checks = [judged("noise: signs turned", found, p)]
    turned = torch.where(uploads < 0, 1 - expected, -expected) / math.sqrt(expected * (1 - expected))
    return checks + independence(turned.double()), claimed


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


def _uploads(setup: Setup, claim: Claim, known: Tensor, side: int) -> Tensor:
    """(rounds, n, d) float64: fresh uploads of workers whose sums are `known`, without what they carry along."""
    run = setup.federation
    company = company_of(setup, claim)
    federation = stage(
        setup,
        sums=Constant(known),
        holdings=company.repeat(side, 1),
        sizes=torch.full((side,), len(company), device=company.device),
        byzantine=torch.zeros(side, dtype=torch.bool, device=company.device),
        name=f"{run.name}/audit/noise",
    )
    state, carry, found = first_state(federation), getattr(run.worker, "carry", 0.0), []
    last = torch.zeros_like(state.uploads, dtype=torch.float64)
    for t in range(min(side, run.rounds)):
        state, _ = play(federation, state, t)
        now = state.uploads.double()
        found.append((now - carry * last) / (1 - carry))
        last = now
    return torch.stack(found)
