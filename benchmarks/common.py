"""What the benchmarks share: random data in the shapes of the real ones, federations of them, a clock, the versions.

Time does not depend on what pictures show, so no file is needed.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

import noisegate
from noisegate.data import SOURCES
from noisegate.models import build_model
from noisegate.runs.setup import Setup, SharedData, prepare
from noisegate.simulate import Rounds, start
from noisegate.vectors import FlatModel

Step = Callable[[], object]

BATCH = 16
WARM_UP = 3
"""Rounds before a measurement: on CUDA a graph is recorded by the second, and the third is its first replay."""

MOST_STEPS = 1500
"""Rounds of a run here, as in a real one; a benchmark plays fewer. A run keeps a line of verdicts for each."""


@dataclass(frozen=True)
class Pictures:
    """What a data set looks like from outside."""

    shape: tuple[int, ...]
    train: int
    test: int
    classes: int


PICTURES = {
    "digits": Pictures((1, 8, 8), 1_437, 360, 10),
    "fashion": Pictures((1, 28, 28), 60_000, 10_000, 10),
    "mnist": Pictures((1, 28, 28), 60_000, 10_000, 10),
    "usps": Pictures((1, 28, 28), 7_291, 2_007, 10),
    "colorectal": Pictures((3, 64, 64), 4_600, 400, 8),
}


@lru_cache(maxsize=1)
def random_dataset(name: str, honest: int) -> noisegate.Dataset:
    """Random pictures: each of `honest` workers gets as many as with the data set's own number of workers."""
    kind, auxiliary = PICTURES[name], 2
    count = honest * (kind.train // SOURCES[name].workers) + auxiliary * kind.classes

    def repeated(many: int) -> tuple[Tensor, Tensor]:
        few = torch.randn(256, *kind.shape, generator=noisegate.stream(0, "benchmark"))
        return few.repeat(-(-many // 256), *[1] * len(kind.shape))[:many], torch.arange(many) % kind.classes

    return noisegate.Dataset("random", *repeated(count), *repeated(kind.test), kind.classes)


def flat_model(name: str, device: torch.device) -> FlatModel:
    """The paper's network for a data set."""
    kind = PICTURES[name]
    module = build_model(SOURCES[name].model, kind.shape, kind.classes, noisegate.stream(0, "weights"))
    return FlatModel(module, device=device)


def setup(
    name: str,
    honest: int,
    byzantine: int,
    compute: noisegate.Compute,
    *,
    aggregator: str = "two-stage",
    attack: str = "label-flip",
    attack_start: float = 0.0,
    seed: int = 1,
    module: nn.Module | None = None,
    shared: SharedData | None = None,
) -> Setup:
    """A run on random pictures, ready to start. Its noise is given: an accountant's answer is of no interest here."""
    spec = noisegate.Spec(
        model=SOURCES[name].model,
        workers=honest,
        byzantine=byzantine / (honest + byzantine),
        attack=attack,
        attack_start=attack_start,
        attack_asleep="copy",
        aggregator=aggregator,
        rounds=MOST_STEPS,
        batch=BATCH,
        sigma=0.8,
        sigma_base=0.8,
        epsilon=1e4,
        accountant="rdp",  # which is the faster one, and all the same here
        seed=seed,
    )
    if spec.build_worker().mechanism != "gaussian":
        spec = replace(spec, accountant="pld")
    return prepare(spec, compute, random_dataset(name, honest), module, shared=shared)


def rounds_of(ready: Setup) -> Rounds:
    """A run's rounds: `step()` plays the next one, on CUDA it queues a replay of the captured graph."""
    return Rounds(ready.federation, start(ready.federation), graph=True)


def replayed(step: Step, device: torch.device) -> Step:
    """`step` itself on a CPU, the replay of its captured graph on CUDA."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def again() -> None:
        graph.replay()

    again.reads = step  # type: ignore[attr-defined]  # a graph does not keep the tensors that it reads
    return again


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock(step: Step, times: int, device: torch.device) -> float:
    """Milliseconds for each of `times` steps in a row, with one synchronization at the end."""
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        step()
    wait(device)
    return 1e3 * (time.perf_counter() - began) / times


def in_turns(ways: dict[str, Step], repeats: dict[str, int], device: torch.device) -> dict[str, float]:
    """Median milliseconds of every way. The ways take turns, so that all see the same noise of the machine.

    A turn is one step on a CPU, and on CUDA a fifth of the repeats in a row: a queue that runs dry is no measurement.
    """
    each = {name: max(1, count // 5) if device.type == "cuda" else 1 for name, count in repeats.items()}
    turns = {name: max(1, repeats[name] // each[name]) for name in ways}
    longest = max(turns.values())
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(longest):
        for name, step in ways.items():
            if (turn + 1) * turns[name] // longest > turn * turns[name] // longest:  # spread the few over the many
                found[name].append(clock(step, each[name], device))
    return {name: statistics.median(values) for name, values in found.items()}


def clear() -> None:
    """Give memory back before the next measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(error: Exception) -> bool:
    """Whether torch failed for want of memory; on a CPU it has no type of its own for that."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error).lower())


def shown(value: float) -> str:
    """Three digits, no exponent: 0.0512, 1.23, 45.6, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def versions(device: torch.device) -> str:
    """What was measured, and where."""
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"
    return f"noisegate {noisegate.__version__}, torch {torch.__version__}, {where}"
