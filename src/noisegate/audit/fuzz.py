"""The bound: neighbors with and without one example, through the product's own contribution code."""

import torch
from torch import Tensor

from noisegate.audit.check import Check
from noisegate.runs.setup import Setup
from noisegate.streams import stream
from noisegate.workers import contributions, rounded_sensitivity

SETTINGS = 200
WIDTHS = (1, 2, 17, 300, 3000)
FLOATS = 2**22
"""Most floats of random gradients at a time."""


def try_bound(setup: Setup) -> list[Check]:
    """How far one example moves a sum: of random gradients, and of the run's own model on its own data."""
    run = setup.federation
    allowed = rounded_sensitivity(run.mechanism.worker, run.mechanism.batch * run.mechanism.most)
    checks = []
    for name, move in (("random gradients", _random_move), ("the model", _model_move)):
        rng = stream(run.schedule.seed, f"audit/bound/{name}")
        farthest = max(move(setup, rng) for _ in range(SETTINGS))
        found = f"{farthest:.7f} in {SETTINGS} settings, of {allowed:.7f} allowed"
        checks.append(Check(f"bound: {name}", found, not farthest <= allowed))
    return checks


def _random_move(setup: Setup, rng: torch.Generator) -> float:
    """Of gradients and last uploads of any size, some of them opposed, zero, or not finite."""
    worker = setup.federation.mechanism.worker
    d = WIDTHS[_pick(len(WIDTHS), rng)]
    batch = 1 + _pick(min(2 * setup.federation.mechanism.batch, FLOATS // d), rng)
    gradients = torch.randn(batch, d, generator=rng) * _size(rng)
    last = torch.randn(1, d, generator=rng) * _size(rng)
    kind = _pick(6, rng)
    if kind == 0:  # the mix of the first is next to nothing
        last = -(1 - worker.momentum) / max(worker.momentum, 1e-3) * gradients[:1] * (1 + 1e-6)
    elif kind == 1:
        gradients[0] = 0.0
    elif kind == 2:
        gradients[_pick(batch, rng), _pick(d, rng)] = (torch.nan, torch.inf, -torch.inf)[_pick(3, rng)]
    elif kind == 3:
        gradients[1:] = gradients[0]
    owner = torch.zeros(batch, dtype=torch.int64)
    sums = [torch.zeros(1, d), torch.zeros(1, d)]
    each = contributions(worker, gradients, last.expand_as(gradients))
    without = _pick(batch, rng)
    sums[0].index_add_(0, owner, each)
    kept = torch.arange(batch) != without
    sums[1].index_add_(0, owner[kept], each[kept])
    return float((sums[0].double() - sums[1].double()).norm())


def _model_move(setup: Setup, rng: torch.Generator) -> float:
    """Of real examples, some of them stretched, with labels at random, under weights that the server may choose."""
    run = setup.federation
    batch = 1 + _pick(2 * run.mechanism.batch, rng)
    device = run.workers.x.device
    some = torch.randint(len(run.workers.y), (batch,), generator=rng).to(device)
    x, y = run.workers.x[some], run.workers.y[some]
    kind = _pick(4, rng)
    if kind == 1:
        x = x * _size(rng)
    elif kind == 2:
        x = x + _size(rng) * torch.randn(x.shape, generator=rng).to(x)
    if _pick(2, rng):
        y = torch.randint(run.adversary.classes, y.shape, generator=rng).to(device)
    params = run.mechanism.model.initial()
    if _pick(2, rng):
        params = params + 0.1 * _size(rng) * torch.randn(params.shape, generator=rng).to(params)
    last = (torch.randn(1, len(params), generator=rng) * _size(rng) * _pick(2, rng)).to(params)
    without = _pick(batch, rng)
    kept = torch.arange(batch, device=device) != without

    def total(x: Tensor, y: Tensor) -> Tensor:
        owner = torch.zeros(len(y), dtype=torch.int64, device=device)
        return run.mechanism.sums(run.mechanism.worker, params, x, y, owner, last)[0].double()

    return float((total(x, y) - total(x[kept], y[kept])).norm())


def _pick(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))


def _size(rng: torch.Generator) -> float:
    """A number between 1e-4 and 1e4, every order of magnitude alike."""
    return float(10.0 ** (8 * torch.rand((), generator=rng) - 4))
