"""Milliseconds per call of every aggregator, beside ByzFL's same aggregator, on one thread.

    python benchmarks/aggregators.py
    python benchmarks/aggregators.py --aggregators median trimmed-mean --workers 50 --csv aggregators.csv
    python benchmarks/aggregators.py --linear

Uploads are random normal numbers in float32, and a fifth of the workers is taken for Byzantine. Ours and theirs take
turns in one process. Theirs is called twice, with torch tensors and with numpy arrays, since it works by other
functions then; `times` is the faster of the two over ours, by the fastest calls. Both have the same settings.
Aggregators that are left out bring workers of their own, and do on the server what another aggregator does.

--linear: for growing d, the time and how much memory the first call takes beside the uploads (Linux only).
"""

import argparse
import csv
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

import noisegate
from byzfl_golden import BYZFL, import_byzfl
from common import Step, clear, clock, shown, versions
from noisegate.aggregators import AGGREGATORS
from noisegate.catalog import build
from noisegate.protocol.intake import receive
from noisegate.views import ServerView

CPU = torch.device("cpu")
D = 25_450
AUXILIARY = 20
"""Examples of the server's own, for an aggregator that looks at each."""

LENGTHS = (25_000, 100_000, 400_000)
ABSENT = f"ByzFL is not installed: pip install --no-deps byzfl=={BYZFL}"

WEISZFELD = {"name": "geometric-median", "smoothing": 0.1, "iterations": 3, "tolerance": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "geometric-median": WEISZFELD,
    "centered-clipping": {"name": "centered-clipping", "radius": 100.0},
    "bucketing": {"name": "bucketing", "aggregator": WEISZFELD, "size": 2},
}
"""Ours where the defaults are not ByzFL's."""

THEIRS: dict[str, Callable[[Any, int], Callable[[Any], object]]] = {
    "mean": lambda byzfl, f: byzfl.Average(),
    "krum": lambda byzfl, f: byzfl.Krum(f),
    "multi-krum": lambda byzfl, f: byzfl.MultiKrum(f),
    "median": lambda byzfl, f: byzfl.Median(),
    "trimmed-mean": lambda byzfl, f: byzfl.TrMean(f),
    "geometric-median": lambda byzfl, f: byzfl.GeometricMedian(nu=0.1, T=3),
    "centered-clipping": lambda byzfl, f: lambda rows: byzfl.CenteredClipping(L=1, tau=100.0)(rows),
    "nnm": lambda byzfl, f: lambda rows: byzfl.TrMean(f)(byzfl.NNM(f)(rows)),
    "bucketing": lambda byzfl, f: lambda rows: byzfl.GeometricMedian(nu=0.1, T=3)(byzfl.Bucketing(2)(rows)),
}
"""MDA is not among them: ByzFL tries all sets of n - f uploads, of which there are 10^10 for n = 50."""

NNM_BYTES = 2**32
"""ByzFL's nnm copies n - f uploads for each of n; it is left out where that takes more than this."""


def choices() -> list[str]:
    """The aggregators that take any uploads."""
    return [name for name, aggregator in AGGREGATORS.items() if not aggregator().goes_with]


def ours(name: str, workers: int, d: int) -> Step:
    """A call of the aggregator on random uploads; its view knows nothing that depends on the uploads but their lengths.

    An aggregator that follows workers is asked for its second round: the first has no past to work on.
    """
    rng = noisegate.stream(0, "benchmark")
    uploads, gradient = torch.randn(workers, d, generator=rng), torch.randn(d, generator=rng)
    rows, norms, present, _ = receive(uploads, workers, d, uploads, in_place=True)
    honest, ties = workers - workers // 5, torch.randperm(workers, generator=rng)
    view = ServerView(rows, norms, present, 1.0, honest, lambda normalized: gradient, ties)
    aggregator = build("aggregator", SETTINGS.get(name, name), AGGREGATORS)
    if not aggregator.follows_workers:
        return partial(aggregator, view, {})
    own = torch.nn.functional.normalize(torch.randn(AUXILIARY, d, generator=rng))
    view = replace(view, contributions=lambda: own, last=torch.randn(workers, d, generator=rng))
    return partial(aggregator, view, aggregator(view, {}).state)


def theirs(name: str, workers: int, d: int, byzfl: Any) -> dict[str, Step]:
    """Calls of ByzFL's aggregator, if there is one, by what it is given."""
    f = workers // 5
    if byzfl is None or name not in THEIRS or (name == "nnm" and 4 * workers * (workers - f) * d > NNM_BYTES):
        return {}
    aggregator, uploads = THEIRS[name](byzfl, f), torch.randn(workers, d, generator=noisegate.stream(0, "benchmark"))
    return {"torch": partial(aggregator, uploads), "numpy": partial(aggregator, uploads.numpy())}


def measure(steps: dict[str, Step], seconds: float) -> dict[str, tuple[float, float]]:
    """The fastest and the median call of each, in ms; they take turns for about so long, three at least."""
    took = sum(clock(step, 1, CPU) for step in steps.values()) / 1e3
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(max(3, min(50, int(seconds / took)))):
        for name, step in steps.items():
            found[name].append(clock(step, 1, CPU))
    return {name: (min(values), statistics.median(values)) for name, values in found.items()}


def compare(chosen: argparse.Namespace, byzfl: Any) -> list[list[str]]:
    """The table of ours and theirs."""
    table = [["aggregator", "n", "ms", "median", "ByzFL torch", "median", "ByzFL numpy", "median", "times"]]
    show(table)
    for workers in chosen.workers:
        for name in chosen.aggregators:
            steps = {"ours": ours(name, workers, D), **theirs(name, workers, D, byzfl)}
            found = measure(steps, chosen.seconds)
            cells = [shown(ms) for way in ("ours", "torch", "numpy") for ms in found.get(way, ())]
            least = [found[way][0] for way in ("torch", "numpy") if way in found]
            times = [shown(min(least) / found["ours"][0])] if least else []
            table.append([name, str(workers), *(cells + times if times else cells + [""] * 5)])
            show(table[-1:])
            clear()
    return table


def high_water(reset: bool) -> int:
    """Bytes of memory that this process has had at most since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def one_length(name: str, workers: int, d: int, seconds: float) -> tuple[float, int]:
    """(ms, bytes beside the uploads of the first call). For a process of its own, where nothing was freed before."""
    ours(name, workers, 1000)()  # what is loaded or made once
    step = ours(name, workers, d)
    before = high_water(reset=True)
    step()
    extra = high_water(reset=False) - before
    return measure({"ours": step}, seconds)["ours"][0], extra


def grow(chosen: argparse.Namespace) -> list[list[str]]:
    """The table of growing d."""
    table = [["aggregator", "n", "d", "ms", "us per 1,000 coordinates", "MiB", "copies of the uploads"]]
    show(table)
    for workers in chosen.workers:
        for name in chosen.aggregators:
            for d in LENGTHS:
                with multiprocessing.get_context("fork").Pool(1) as process:
                    ms, extra = process.apply(one_length, (name, workers, d, chosen.seconds))
                shares = (shown(1e6 * ms / d), shown(extra / 2**20), f"{extra / (4 * workers * d):.2f}")
                table.append([name, str(workers), str(d), shown(ms), *shares])
                show(table[-1:])
    return table


def show(rows: list[list[str]]) -> None:
    """Lines of a table; the first one is followed by an aggregator."""
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
        if row[0] == "aggregator":
            print("| --- |" + " ---: |" * (len(row) - 1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aggregators", nargs="+", choices=choices(), default=choices())
    parser.add_argument("--workers", nargs="+", type=int, help="default: 50 200; with --linear 50")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to repeat the calls of a row")
    parser.add_argument("--linear", action="store_true", help="time and memory for growing d")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there too")
    chosen = parser.parse_args()
    chosen.workers = chosen.workers or ([50] if chosen.linear else [50, 200])
    torch.set_num_threads(1)
    try:
        byzfl = None if chosen.linear else import_byzfl()
    except ImportError:
        byzfl = None
    beside = "" if chosen.linear else f"; {ABSENT}" if byzfl is None else f", ByzFL {BYZFL}"
    print(f"{versions(CPU)}{beside}\n")
    with threadpool_limits(1):  # numpy's, which torch does not set
        table = grow(chosen) if chosen.linear else compare(chosen, byzfl)
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
