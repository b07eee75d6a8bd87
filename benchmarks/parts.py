"""What a round is made of: milliseconds in each function, its callees in noisegate and torch not included.

    python benchmarks/parts.py
    python benchmarks/parts.py --aggregator fortified --rounds 400

Fashion, 20+30 workers, one thread, as in `round.py`. Every round is profiled by itself, and the number of a function is
its median over the rounds, in time of the CPU, so that a busy machine changes little. Calls into C count for the
function that makes them. The profiler itself costs some 0.5 microseconds for each call of a Python function: about a
tenth of a round.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from common import PICTURES, WARM_UP, rounds_of, setup, shown, versions
from noisegate import Compute
from noisegate.aggregators import AGGREGATORS

LEAST = 0.04
"""Milliseconds from which on a function has a line of its own."""

PACKAGES = "noisegate", "torch", "numpy"


def name_of(file: str, function: str) -> str:
    """Package and path without what lies above it; of Python's own, the function alone."""
    parts = Path(file).parts
    for package in PACKAGES:
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return f"{'/'.join(parts[last + (package == PACKAGES[0]) :])} `{function}`"
    return f"Python `{function}`"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=PICTURES, default="fashion")
    parser.add_argument("--aggregator", choices=AGGREGATORS, default="two-stage")
    parser.add_argument("--rounds", type=int, default=200)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    step = rounds_of(setup(chosen.dataset, 20, 30, Compute("cpu", 1), aggregator=chosen.aggregator)).step
    for _ in range(WARM_UP):
        step()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(chosen.rounds):
        profile = cProfile.Profile(time.thread_time, builtins=False)
        profile.runcall(step)
        own: Counter[str] = Counter()
        for (file, _, function), numbers in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            own[name_of(file, function)] += 1e3 * numbers[2]
        for name, ms in own.items():
            found[name].append(ms)
    medians = {
        name: statistics.median(values + [0.0] * (chosen.rounds - len(values))) for name, values in found.items()
    }
    print(f"{versions(torch.device('cpu'))}; {chosen.dataset}, 20+30, {chosen.aggregator}\n")
    print("| part | ms |\n| --- | ---: |")
    lines = {name: ms for name, ms in medians.items() if ms >= LEAST}
    for name, ms in sorted(lines.items(), key=lambda line: -line[1]):
        print(f"| {name} | {shown(ms)} |")
    few = {name: ms for name, ms in medians.items() if ms < LEAST}
    print(f"| {len(few)} functions of less than {LEAST} ms each | {shown(sum(few.values()))} |")
    print(f"| all | {shown(sum(medians.values()))} |")


if __name__ == "__main__":
    main()
