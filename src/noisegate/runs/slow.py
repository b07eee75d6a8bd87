"""Before a long run whose model goes the slow way: one line on why that is, how long it takes, and what is fast."""

import time

import torch

from noisegate.examples import Examples
from noisegate.runs.estimate import shown
from noisegate.simulate import Federation
from noisegate.workers import FAST, Direct

LONG = 10.0
"""Seconds of a run from which a line is worth it."""

SAMPLE = 16
"""Examples that are measured, or as many as may exist at once."""


def slow(run: Federation, rounds: int) -> str | None:
    """The line, if the model goes the direct way without having been told to, and `rounds` of it take long."""
    sums = run.mechanism.sums
    if not isinstance(sums, Direct) or not sums.why or rounds < 1:
        return None
    each = seconds_per_round(run)
    if each * rounds < LONG:
        return None
    pace = f"{1000 * each:,.0f} ms" if each < 1 else shown(each)
    return (
        f"model: has no fast per-example gradients, since {sums.why}; so each is made by itself: some {pace} a round, "
        f"{shown(each * rounds)} in all. Fast are {FAST}, each called once; what is frozen (requires_grad=False) may "
        "be anything"
    )


def seconds_per_round(run: Federation) -> float:
    """About what the gradients of a round take, from those of a few examples here and now."""
    sums, params, x, y = run.mechanism.sums, run.mechanism.model.initial(), run.workers.x, run.workers.y
    few = min(SAMPLE, len(y), sums.chunk if isinstance(sums, Direct) else SAMPLE)
    last, took = params.new_zeros(1, len(params)), []
    for _ in range(2):  # the first warms up
        _wait(x.device)
        began = time.perf_counter()
        sums.add(run.mechanism.worker, params, Examples.of_one(x[:few], y[:few], None), last, torch.zeros_like(last))
        _wait(x.device)
        took.append(time.perf_counter() - began)
    return min(took) / few * run.mechanism.batch * len(run.workers)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
