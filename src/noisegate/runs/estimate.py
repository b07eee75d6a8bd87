"""Estimates of how long runs take on a device, from rounds measured elsewhere and a second of measuring here."""

import math
import time
from collections.abc import Iterable

from noisegate import data
from noisegate.catalog import is_own
from noisegate.compute import Compute
from noisegate.runs.setup import prepare
from noisegate.runs.spec import Spec, make_spec
from noisegate.simulate import first_state, play

CPU = {
    "digits": (2.3, 0.05, 0.01),
    "fashion": (1.0, 0.28, 0.12),
    "usps": (1.0, 0.28, 0.12),
    "mnist": (25.0, 7.5, 0.12),
    "colorectal": (0.0, 360.0, 0.2),
}
CUDA = {
    "digits": (0.06, 0.0005, 0.0001),
    "fashion": (0.06, 0.0011, 0.0008),
    "usps": (0.05, 0.0012, 0.0007),
    "mnist": (0.2, 0.026, 0.0009),
    "colorectal": (0.0, 1.5, 0.02),
}
"""Milliseconds that a round with two-stage takes: (in any case, for each worker that computes, for each other one). The
numbers are from benchmarks/README.md and benchmarks/budget-cuda.csv; those for CUDA are with many runs side by side."""

ROUNDS = {"digits": 267, "fashion": 1500, "mnist": 1500, "usps": 455, "colorectal": 287}
"""The default number of rounds with batches of 16. With larger batches it is as much smaller."""

IDLE = ("gaussian", "local-poisoning", "a-little", "inner")
"""The attacks whose workers compute no gradients."""

MEASURED = {"workers": 20, "batch": 16, "sigma": 3.0, "sigma_base": 3.0, "epsilon": 100.0, "aggregator": "two-stage"}
"""The settings of the run that is measured here."""

ANCHOR = 4.6
"""Milliseconds that a round of this run took on the machine that the numbers for CPUs are from."""


def seconds(specs: Iterable[Spec], cuda: bool, slowness: float = 1.0) -> float | None:
    """About how many seconds the runs take together; None if nothing was measured for the data or model of one."""
    total, per = 0.0, CUDA if cuda else CPU
    for spec in specs:
        if spec.dataset not in per or is_own(spec.model):
            return None
        least, each, idle = per[spec.dataset]
        honest = spec.workers or data.SOURCES[spec.dataset].workers
        attack = spec.canonical()["attack"]["name"]
        made_up = spec.count_byzantine(honest) if attack in IDLE else 0
        busy = honest + spec.count_byzantine(honest) - made_up
        rounds = spec.rounds or math.ceil(ROUNDS[spec.dataset] * 16 / spec.batch)
        total += rounds * (least + each * busy + idle * made_up) / 1000
    return total * slowness


def slowness(compute: Compute) -> float:
    """How many times slower this machine is than that of the numbers above. 1 for a CUDA device, without measuring."""
    if compute.resolve().type == "cuda":
        return 1.0
    federation = prepare(make_spec(MEASURED), compute).federation
    state, took = first_state(federation), []
    with compute.threads_for(floats=state.uploads.numel()):
        for t in range(12):
            began = time.perf_counter()
            state, _ = play(federation, state, t)
            took.append(1000 * (time.perf_counter() - began))
    return sorted(took[2:])[len(took[2:]) // 2] / ANCHOR


def shown(duration: float | None) -> str:
    """A duration in seconds as text."""
    if duration is None:
        return "not known"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if duration >= 1.5 * size:
            return f"{duration / size:.0f} {unit}" if duration >= 10 * size else f"{duration / size:.1f} {unit}"
    return f"{max(1.0, duration):.0f} s"
