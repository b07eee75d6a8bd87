"""About how long runs take on a device, from rounds measured elsewhere and a second of measuring here."""

import math
import time
from collections.abc import Iterable

from noisegate import data
from noisegate.compute import Compute
from noisegate.runs.setup import prepare
from noisegate.runs.spec import Spec, make_spec
from noisegate.simulate import first_state, play

CPU = {
    "digits": (2.3, 0.05),
    "fashion": (1.0, 0.28),
    "usps": (1.0, 0.28),
    "mnist": (25.0, 7.5),
    "colorectal": (0.0, 360.0),
}
CUDA = {
    "digits": (0.06, 0.0005),
    "fashion": (0.06, 0.0011),
    "usps": (0.05, 0.0012),
    "mnist": (0.2, 0.026),
    "colorectal": (0.0, 1.5),
}
"""Milliseconds of a round with two-stage: (at least, for each worker that computes), from benchmarks/README.md and
benchmarks/budget-cuda.csv; on CUDA with many runs at once."""

ROUNDS = {"digits": 267, "fashion": 1500, "mnist": 1500, "usps": 455, "colorectal": 287}
"""Rounds of a run unless it says otherwise, with batches of 16; with larger ones as much fewer."""

IDLE = ("gaussian", "local-poisoning", "a-little", "inner")
"""Attacks whose workers compute nothing."""

MEASURED = {"workers": 20, "batch": 16, "sigma": 3.0, "sigma_base": 3.0, "epsilon": 100.0, "aggregator": "two-stage"}
ANCHOR = 4.6
"""Milliseconds of a round on digits with 20 honest and 30 Byzantine workers, where the numbers for CPUs are from."""


def seconds(specs: Iterable[Spec], cuda: bool, slowness: float = 1.0) -> float | None:
    """About how long they take together; None if one of them is on data that nothing is known of."""
    total, per = 0.0, CUDA if cuda else CPU
    for spec in specs:
        if spec.dataset not in per:
            return None
        least, each = per[spec.dataset]
        honest = spec.workers or data.SOURCES[spec.dataset].workers
        attack = spec.canonical()["attack"]["name"]
        busy = honest + (0 if attack in IDLE else spec.count_byzantine(honest))
        rounds = spec.rounds or math.ceil(ROUNDS[spec.dataset] * 16 / spec.batch)
        total += rounds * (least + each * busy) / 1000
    return total * slowness


def slowness(compute: Compute) -> float:
    """How many times slower than the machine of the numbers above this one is; 1 for a CUDA device, not measured."""
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
    """For people."""
    if duration is None:
        return "not known"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if duration >= 1.5 * size:
            return f"{duration / size:.0f} {unit}" if duration >= 10 * size else f"{duration / size:.1f} {unit}"
    return f"{max(1.0, duration):.0f} s"
