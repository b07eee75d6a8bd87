"""Slow, obvious versions of what the package does fast. Loops, float64, torch.autograd, scipy; nothing shared."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

LENGTH = 1 - 2**-14
"""What the package makes contributions long instead of 1 (stated in the docstring of `Normalized`)."""


def gradient_of_one(module: nn.Module, params: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
    """(d,) float64 gradient of the cross-entropy of one example at `params`, by plain autograd."""
    module = copy.deepcopy(module).double().eval().requires_grad_(True)
    start = 0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(params[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
    one_x = one_x[None].double() if one_x.is_floating_point() else one_x[None]
    loss = functional.cross_entropy(module(one_x), one_y[None])
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, module.parameters(), strict=True)]
    return torch.cat([part.flatten() for part in parts])


def normalized(phi: Tensor) -> Tensor:
    """phi at unit length (less the package's margin); zero for the zero vector."""
    length = math.sqrt(sum(value**2 for value in phi.tolist()))
    return phi * (LENGTH / length) if length else torch.zeros_like(phi)


def clipped(threshold: float) -> Callable[[Tensor], Tensor]:
    """phi, shortened to `threshold` (less the package's margin) where longer."""

    def shorten(phi: Tensor) -> Tensor:
        length = math.sqrt(sum(value**2 for value in phi.tolist()))
        return phi if length <= threshold * LENGTH else phi * (threshold * LENGTH / length)

    return shorten


def sums(
    scale: Callable[[Tensor], Tensor],
    momentum: float,
    module: nn.Module,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    owner: Tensor,
    last_uploads: Tensor,
) -> Tensor:
    """(n, d) float64: for every worker and every example of it, mix, scale, add up."""
    total = torch.zeros_like(last_uploads, dtype=torch.float64)
    for worker in range(len(last_uploads)):
        for example in range(len(y)):
            if owner[example] == worker:
                g = gradient_of_one(module, params, x[example], y[example])
                phi = (1 - momentum) * g + momentum * last_uploads[worker].double()
                if bool(torch.isfinite(phi).all()):
                    total[worker] += scale(phi)
    return total


def ks_p_value(upload: Tensor, noise_std: float) -> float:
    """scipy's one-sample KS test against N(0, noise_std^2), exact distribution."""
    return float(stats.kstest(upload.double().numpy(), stats.norm(0, noise_std).cdf, method="exact").pvalue)


def ks_statistic(upload: Tensor, noise_std: float) -> float:
    """scipy's KS statistic against N(0, noise_std^2)."""
    return float(stats.kstest(upload.double().numpy(), stats.norm(0, noise_std).cdf).statistic)


def chi_square_interval(d: int, noise_std: float, outside: float) -> tuple[float, float]:
    """The lengths of N(0, s^2 I) outside of which lies probability `outside`, half on each side: exact."""
    low, high = stats.chi2.ppf([outside / 2, 1 - outside / 2], d)
    return noise_std * math.sqrt(low), noise_std * math.sqrt(high)


def first_agg(g: np.ndarray, s: float) -> np.ndarray:
    """Algorithm 2 as printed, on an upload g whose noise has standard deviation s."""
    d, length = len(g), math.sqrt(float((g**2).sum()))
    if length < math.sqrt(s**2 * d - 3 * s**2 * math.sqrt(2 * d)):
        return np.zeros(d)
    if length > math.sqrt(s**2 * d + 3 * s**2 * math.sqrt(2 * d)):
        return np.zeros(d)
    if ks_p_value(torch.from_numpy(g), s) < 0.05:
        return np.zeros(d)
    return g


@dataclass
class FilterGradient:
    """Algorithm 3 as printed, round after round, and what decisions 0004 and 0007 add where it is silent.

    Selected uploads that were rejected in this round are not used; ties are ranked by a given order. A missing worker
    is not ranked. For the rounds that a worker missed it is credited with its mean over those that it attended, or, if
    that is less, with the mean of what those got who had the highest scores before each.
    """

    s: float
    top: int  # ceil(gamma n)
    stages: object = "both"
    normalize: bool = False
    server_momentum: float = 0.0
    divide_by_all: bool = False
    scores: dict[int, float] = field(default_factory=dict)  # the list S
    gradient: np.ndarray | None = None
    attended: dict[int, list[float]] = field(default_factory=dict)  # what each worker scored, round after round
    missed: dict[int, list[float]] = field(default_factory=dict)  # what the best scored in the rounds that it missed

    def round(self, uploads: np.ndarray, present: list[bool], auxiliary: np.ndarray, ties: list[int], missing=()):
        """(update, kept, scores) of one round. missing: whose uploads did not arrive."""
        n, d = uploads.shape
        g, passed = [], []
        for i in range(n):
            tested = uploads[i] if self.stages == 2 else first_agg(uploads[i], self.s)
            ok = present[i] and (self.stages == 2 or bool(np.any(tested)))
            g.append(tested if ok else np.zeros(d))
            passed.append(ok)
        if self.stages == 1:
            return self._update(g, passed), passed, [0.0] * n

        g_s = np.zeros(d)
        for row in auxiliary:
            length = math.sqrt(float((row**2).sum()))
            g_s += row / length / len(auxiliary) if self.normalize else row / len(auxiliary)
        if self.gradient is not None:
            g_s = self.server_momentum * self.gradient + (1 - self.server_momentum) * g_s
        self.gradient = g_s

        now = [float(g[i] @ g_s) for i in range(n)]
        there = [i for i in range(n) if i not in missing]
        top = math.ceil(self.top * len(there) / n)
        best = sorted(there, key=lambda i: -now[i])[:top]
        mu = sum(now[i] for i in best) / max(1, len(best))
        for i in there:
            if now[i] < mu:
                now[i] = 0.0
        before = sorted(there, key=lambda i: (-self.scores.get(i, 0.0), ties.index(i)))[:top]
        usual = sum(now[i] for i in before) / max(1, len(before))
        for i in range(n):
            own, missed = self.attended.setdefault(i, []), self.missed.setdefault(i, [])
            missed.append(usual) if i in missing else own.append(now[i])
            mean = sum(own) / len(own) if own else 0.0
            self.scores[i] = sum(own) + min(mean * len(missed), sum(missed))
        ranked = sorted(there, key=lambda i: (-self.scores[i], ties.index(i)))
        kept = [passed[i] and i in ranked[:top] for i in range(n)]
        return self._update(g, kept), kept, [self.scores[i] for i in range(n)]

    def _update(self, g: list[np.ndarray], kept: list[bool]) -> np.ndarray:
        used = [row for row, keep in zip(g, kept, strict=True) if keep]
        if not used:
            return np.zeros_like(g[0])
        return sum(used) / (len(g) if self.divide_by_all else len(used))
