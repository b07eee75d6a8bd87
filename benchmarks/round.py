"""Milliseconds per round: every aggregator, beside the floor that no round can go below and what one would use instead.

    make bench
    python benchmarks/round.py --quick
    python benchmarks/round.py --datasets fashion --workers 20+30 --rounds 40
    python benchmarks/round.py --device cuda

The floor is what any private round must do at least: draw the noise of all uploads once, straight into a buffer, and
take one plain gradient of the same number of examples. Everyone computes (label-flip). All rows of a data set and a
number of workers are measured in turns in one process, so that their ratios survive a noisy machine; numbers are
medians, without the first rounds. Data are random: time does not depend on what the pictures show. Below the table is
what a round with `fortified` costs over one with `two-stage`, of the same rows.

On CUDA a round is the replay of its captured graph, timed over many rounds with one synchronization at the end; there
are rows of 2,000 workers, and a second table of many runs on one device at once.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.func import grad, vmap

import noisegate
from common import (
    BATCH,
    MOST_STEPS,
    PICTURES,
    WARM_UP,
    Step,
    clear,
    clock,
    flat_model,
    in_turns,
    out_of_memory,
    random_dataset,
    replayed,
    rounds_of,
    setup,
    shown,
    versions,
)
from noisegate import Compute
from noisegate.aggregators import AGGREGATORS
from noisegate.data import SOURCES
from noisegate.runs.setup import SharedData
from noisegate.vectors import FlatModel

FLOOR = "floor: noise + one plain gradient"
BY_VMAP = "vmap over all at once, then the mean"
BY_VMAP_SOME = "vmap over some workers at a time, then the mean"
BY_OPACUS = "Opacus, a loop over workers, then the mean"
BLOCK = {"mlp": 2**20, "cnn": 64, "residual": 16}
"""Examples at once in the floor's gradient on a CPU: what is fastest there. CUDA takes 64 times as many."""

TOGETHER = {"cpu": 8, "cuda": 64}
"""Workers whose per-example gradients `vmap` makes at once where it takes some at a time: what is fastest."""

AT_ONCE = {"mlp": 2**20, "cnn": 1000, "residual": 0}
"""Most examples whose gradients `vmap` can make at once in a few GiB."""

MOMENTUM, RATE, NOISE = 0.1, 0.2, 60.0 / BATCH
PROMISED = 0.7
"""Share of the time that the guesses may fill; the rest is for repeats, and for guesses that were too low."""

Group = tuple[str, int, int]
"""Data set, honest workers, Byzantine workers."""

Found = tuple[float, int] | str
"""Milliseconds and how many rounds they are the median of, or why there are none."""

COMPARED = "two-stage", "fortified"
"""The second is to cost at most 1.5 times the first on Fashion."""

BATCHED = {"fashion": 32, "mnist": 16, "usps": 16}


def floor(name: str, workers: int, device: torch.device) -> Step:
    """Noise for everyone, and one plain gradient of as many examples."""
    model, data = flat_model(name, device), random_dataset(name, 20)
    weights = model.initial().requires_grad_()
    noise = torch.empty(workers, model.d, device=device)
    pick = torch.arange(workers * BATCH) % len(data.y)
    x, y = data.x[pick].to(device), data.y[pick].to(device)
    block = BLOCK[SOURCES[name].model] * (64 if device.type == "cuda" else 1)

    def one() -> None:
        noise.normal_()
        total = torch.zeros_like(weights)
        for part_x, part_y in zip(x.split(block), y.split(block), strict=True):
            total += torch.autograd.grad(model.losses(weights, part_x, part_y).sum(), weights)[0]

    return replayed(one, device)


def gradients_by_vmap(model: FlatModel) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(params, x, y) -> (B, d), as torch.func does it."""

    def loss_of_one(vector: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
        return model.losses(vector, one_x[None], one_y[None])[0]

    every: Callable[[Tensor, Tensor, Tensor], Tensor] = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
    return every


def gradients_by_opacus(model: FlatModel) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(params, x, y) -> (B, d), as Opacus' hooks make them."""
    import opacus

    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # its hooks need no input gradients
    hooked = opacus.GradSampleModule(model.module.requires_grad_().train(), loss_reduction="sum")
    loaded: Tensor | None = None

    def every(params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        nonlocal loaded
        if loaded is not params:
            torch.nn.utils.vector_to_parameters(params, hooked.parameters())
            loaded = params
        hooked.zero_grad(set_to_none=True)
        model.loss(hooked(x), y).sum().backward()
        return torch.cat([value.grad_sample.flatten(1) for value in hooked.parameters()], 1)

    return every


def by_hand(name: str, honest: int, byzantine: int, device: torch.device, way: str) -> Step:
    """A private round as one would write it, in float32: batches, per-example gradients, momentum, unit length, noise,
    the mean."""
    workers, data, model = honest + byzantine, random_dataset(name, 20), flat_model(name, device)
    gradients = gradients_by_opacus(model) if way == BY_OPACUS else gradients_by_vmap(model)
    together = {BY_VMAP: workers, BY_VMAP_SOME: TOGETHER[device.type], BY_OPACUS: 1}[way]
    pool_x, pool_y = data.x.to(device), data.y.to(device)
    lying = torch.arange(workers, device=device) >= honest
    uploads, params = torch.zeros(workers, model.d, device=device), model.initial()

    def one() -> None:
        nonlocal params
        pick = torch.randint(len(pool_y), (workers, BATCH), device=device)
        for rows in torch.arange(workers, device=device).split(together):
            flipped = torch.where(lying[rows, None], data.classes - 1 - pool_y[pick[rows]], pool_y[pick[rows]])
            found = gradients(params, pool_x[pick[rows].flatten()], flipped.flatten())
            mixed = (1 - MOMENTUM) * found.unflatten(0, (len(rows), BATCH)) + MOMENTUM * uploads[rows, None]
            uploads[rows] = (mixed / mixed.norm(dim=2, keepdim=True)).sum(1) / BATCH
        uploads.add_(torch.randn_like(uploads), alpha=NOISE)
        params = params - RATE * uploads.mean(0)

    return one


def ways_of(name: str, honest: int, byzantine: int, chosen: argparse.Namespace) -> dict[str, Callable[[], Step]]:
    """What there is to measure, not yet made."""
    compute = Compute(chosen.device, chosen.threads, memory=chosen.memory)
    device, workers = torch.device(chosen.device), honest + byzantine

    def played(aggregator: str) -> Callable[[], Step]:
        return lambda: rounds_of(setup(name, honest, byzantine, compute, aggregator=aggregator)).step

    ways: dict[str, Callable[[], Step]] = {FLOOR: lambda: floor(name, workers, device)}
    ways |= {aggregator: played(aggregator) for aggregator in chosen.aggregators or aggregators_for(name, chosen)}
    if chosen.baselines:
        by_hands = [BY_VMAP_SOME, BY_OPACUS]
        if workers * BATCH <= AT_ONCE[SOURCES[name].model]:
            by_hands.insert(0, BY_VMAP)
        ways |= {way: partial(by_hand, name, honest, byzantine, device, way) for way in by_hands}
    return ways


def guess(name: str, workers: int, device: torch.device) -> float:
    """Seconds of the floor, from a few examples: enough to know what to leave out."""
    if device.type == "cuda":
        return 0.0
    few = floor(name, 2, device)
    few()
    return clock(few, 1, device) / 1e3 * workers / 2


def plan(groups: list[Group], chosen: argparse.Namespace) -> tuple[dict[tuple[Group, str], str], float]:
    """(why a row is left out, for those that are; seconds that each other one may take for its repeats).

    A row needs a round to warm up and a round to measure. The cheapest are taken first, until most of the time is
    spoken for.
    """
    needs: dict[tuple[Group, str], float] = {}
    for name, honest, byzantine in groups:
        cost = guess(name, honest + byzantine, torch.device(chosen.device))
        for way in ways_of(name, honest, byzantine, chosen):
            needs[(name, honest, byzantine), way] = 2 * cost * (1 if way == FLOOR else 2)
    total, spent, left_out = 60 * chosen.minutes, 0.0, dict[tuple[Group, str], str]()
    for row, need in sorted(needs.items(), key=lambda entry: entry[1]):
        spent += need
        if spent > PROMISED * total:
            minutes = math.ceil(spent / PROMISED / 60)
            left_out[row] = f"skipped: about {shown(need / 2)} s a round; --minutes {minutes} runs it"
    taken = sum(need for row, need in needs.items() if row not in left_out)
    return left_out, (total - taken) / max(1, len(needs) - len(left_out))


def measure(
    group: Group, chosen: argparse.Namespace, left_out: dict[tuple[Group, str], str], seconds: float
) -> dict[str, Found]:
    """Milliseconds of each way, or why there are none. Each takes about `seconds` after it has warmed up."""
    device, found = torch.device(chosen.device), dict[str, Found]()
    steps, repeats = dict[str, Step](), dict[str, int]()
    for way, make in ways_of(*group, chosen).items():
        if (group, way) in left_out:
            found[way] = left_out[group, way]
        elif way == BY_OPACUS and find_spec("opacus") is None:
            found[way] = "not installed: it comes with the extra `bench`"
        else:
            try:
                step = make()
                took = clock(step, 1, device) / 1e3
                if device.type == "cuda" or took < seconds / 10:  # there the first rounds compile and record
                    took = [clock(step, 1, device) for _ in range(WARM_UP - 1)][-1] / 1e3
            except (noisegate.NoisegateError, ValueError) as error:
                found[way] = f"refused: {error}"
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                found[way] = "failed: out of memory"
            else:
                found[way] = "not measured"  # keeps the order of the rows
                steps[way], repeats[way] = step, max(1, min(chosen.rounds, int(seconds / max(took, 1e-6))))
    medians = in_turns(steps, repeats, device) if steps else {}
    return found | {way: (ms, repeats[way]) for way, ms in medians.items()}


def report(name: str, honest: int, byzantine: int, found: dict[str, Found]) -> None:
    """Lines of the table. A median of fewer than three says so."""
    base, parameters = found[FLOOR], flat_model(name, torch.device("cpu")).d
    lead = f"| {name} | {SOURCES[name].model} | {parameters:,} | {honest}+{byzantine} |"
    for way, value in found.items():
        if isinstance(value, str):
            print(f"{lead} {way} | {value} | |", flush=True)
        else:
            ms, times = value
            few = "" if times >= 3 else f" ({times} round{'s' * (times > 1)})"
            ratio = "" if isinstance(base, str) else f"{ms / base[0]:.2f}"
            print(f"{lead} {way} | {shown(ms)}{few} | {ratio} |", flush=True)


def report_compared(medians: dict[Group, dict[str, Found]]) -> None:
    """The table of what the stronger filter costs, from the rows of the other one."""
    print(f"\n| dataset | workers | {COMPARED[1]} / {COMPARED[0]}, a whole round |\n| --- | --- | ---: |")
    for (name, honest, byzantine), found in medians.items():
        cheap, dear = (found.get(way, "not asked for") for way in COMPARED)
        if not isinstance(cheap, str) and not isinstance(dear, str):
            print(f"| {name} | {honest}+{byzantine} | {dear[0] / cheap[0]:.2f} |", flush=True)


def batched(name: str, honest: int, byzantine: int, runs: int, chosen: argparse.Namespace) -> tuple[float, float]:
    """(ms per round alone, ms per round and run of `runs` at once), two-stage, all on one device."""
    compute, device = Compute(chosen.device, chosen.threads, memory=chosen.memory), torch.device(chosen.device)
    shared = SharedData()
    many = [rounds_of(setup(name, honest, byzantine, compute, seed=seed, shared=shared)) for seed in range(runs)]

    def all_of_them() -> None:
        for one in many:
            one.step()

    for _ in range(WARM_UP):
        all_of_them()
    found = in_turns({"alone": many[0].step, "batch": all_of_them}, {"alone": 200, "batch": 200}, device)
    for one in many:
        one.settled()
    return found["alone"], found["batch"] / runs


def report_batched(chosen: argparse.Namespace) -> None:
    """The table of many runs at once."""
    print("\n| dataset | workers | runs at once | ms per round alone | ms per round and run |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, most in BATCHED.items():
        if name in chosen.datasets:
            runs = min(most, 4) if chosen.quick else most
            alone, each = batched(name, 20, 30, runs, chosen)
            print(f"| {name} | 20+30 | {runs} | {shown(alone)} | {shown(each)} |", flush=True)
            clear()


def aggregators_for(name: str, chosen: argparse.Namespace) -> list[str]:
    """All, or three where the gradients take so long that an aggregator no longer matters: `aggregators.py` has its
    time alone.
    """
    slow = SOURCES[name].model != "mlp" and chosen.device == "cpu"
    return ["mean", *COMPARED] if slow or chosen.quick else list(AGGREGATORS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument(
        "--aggregators",
        nargs="+",
        choices=AGGREGATORS,
        help="default: all, or three where rounds take seconds",
    )
    parser.add_argument("--workers", nargs="+", metavar="HONEST+BYZANTINE", help="default: 20+30 20+180")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; small models are slower with more")
    parser.add_argument("--rounds", type=int, help="most rounds of a row; default: 20, on CUDA 200")
    parser.add_argument("--minutes", type=float, help="about how long it may take in all; default: 10")
    parser.add_argument("--memory", type=int, metavar="MIB", help="cap of a round's memory")
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True, help="vmap and Opacus")
    parser.add_argument("--quick", action="store_true", help="a minute: few rounds, and what is slow is skipped")
    chosen = parser.parse_args()
    if chosen.rounds is not None and not 1 <= chosen.rounds <= MOST_STEPS - WARM_UP:
        parser.error(f"--rounds {chosen.rounds}: must be 1 to {MOST_STEPS - WARM_UP}")
    chosen.minutes = chosen.minutes or (1 if chosen.quick else 10)
    chosen.rounds = chosen.rounds or (5 if chosen.quick else 20 if chosen.device == "cpu" else 200)
    return chosen


def crowd(text: str) -> tuple[int, int]:
    """Honest and Byzantine workers from "20+30"."""
    honest, byzantine = text.split("+")
    return int(honest), int(byzantine)


def main() -> None:
    chosen = arguments()
    device = torch.device(chosen.device)
    torch.set_num_threads(chosen.threads)
    crowds = [crowd(text) for text in chosen.workers or ("20+30", "20+180")]
    groups: list[Group] = [(name, honest, byzantine) for name in chosen.datasets for honest, byzantine in crowds]
    if chosen.device == "cuda" and not chosen.workers and "fashion" in chosen.datasets:
        groups.append(("fashion", 20, 1980))
    beside = f", Opacus {version('opacus')}" if chosen.baselines and find_spec("opacus") else ""
    print(f"{versions(device)}{beside}, {BATCH} examples per worker and round\n")
    print("| dataset | model | parameters | workers | what | ms | times the floor |")
    print("| --- | --- | ---: | --- | --- | ---: | ---: |")
    with Compute(chosen.device).exact():  # as in a real run
        left_out, seconds = plan(groups, chosen)
        medians = dict[Group, dict[str, Found]]()
        for group in groups:
            medians[group] = measure(group, chosen, left_out, seconds)
            report(*group, medians[group])
            clear()
        report_compared(medians)
        if device.type == "cuda":
            report_batched(chosen)


if __name__ == "__main__":
    main()
