"""How time and memory of a round grow with the workers and with the model.

    python benchmarks/scale.py                   # on a CPU, one thread; writes scale-cpu.csv
    python benchmarks/scale.py --device cuda     # writes scale-cuda.csv
    python benchmarks/scale.py --plot            # draws scale.svg from both files
    python benchmarks/scale.py --aggregator fortified --workers 200 --parameters 1000120   # prints, writes nothing

Each point is a process of its own, so that its peak memory is its own: the process's on a CPU, the allocator's on CUDA.
Two-stage, unless --aggregator says otherwise, under label-flip (everyone computes), momentum on, 20 honest workers,
random pictures of 28 x 28 dealt as Fashion is. A larger model is a wider layer: 784-h-10. Time is the median round,
without the first three.

"MiB of two buffers" is what a round cannot go without: what everyone sent last, and what everyone sends now, n x d
floats each. "MiB of rounds" is the peak less what was held before the first round, the data and torch itself. A cap
(--memory) is on what a round takes beside the two buffers.
"""

import argparse
import contextlib
import csv
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HONEST = 20
AGGREGATOR = "two-stage"
"""What the files are about."""

WORKERS = (50, 200, 1_000, 2_000, 5_000)
WIDTHS = {25_450: 32, 100_180: 126, 1_000_120: 1_258, 10_000_315: 12_579}
"""Parameters of a 784-h-10 network -> h."""

SMALLEST = min(WIDTHS)
FIXED_WORKERS = 100
VERSIONS = ["device", "noisegate", "torch", "threads"]
FIELDS = [*VERSIONS, "workers", "parameters", "rounds", "ms", "held", "peak", "cap", "why"]
"""Of a file. held: MiB before the first round; peak: the most from then on; cap: as given; why: it was not run."""

MEMORY = ("peak MiB", "MiB of rounds", "MiB of two buffers", "cap, MiB")
MIB = 2**20


def available(device: str) -> float:
    """MiB that a new process can have."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] / MIB
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def held() -> float:
    """MiB of this process now."""
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * resource.getpagesize() / MIB


def tidy() -> None:
    """Give back what set-up left behind, and let the process's peak start anew: both are not the rounds'."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as switch:
            switch.write("5")


def largest() -> float:
    """MiB of this process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def point(workers: int, parameters: int, chosen: argparse.Namespace) -> dict[str, object]:
    """One measurement, in this process."""
    import torch
    from torch import nn

    import noisegate
    from common import WARM_UP, clock, out_of_memory, rounds_of, setup
    from noisegate import Compute

    torch.set_num_threads(chosen.threads)
    compute, device = Compute(chosen.device, chosen.threads, memory=chosen.memory), torch.device(chosen.device)
    cuda = device.type == "cuda"
    if not cuda:  # fail here rather than have the system end some other process
        most = int(0.9 * available("cpu") * MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    width, times = WIDTHS[parameters], list[float]()
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ELU(), nn.Linear(width, 10))
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "noisegate": noisegate.__version__,
        "torch": torch.__version__,
        "threads": "" if cuda else chosen.threads,
        "workers": workers,
        "parameters": parameters,
        "cap": compute.scratch() // MIB,
    }
    try:
        with compute.exact():
            ready = setup("fashion", HONEST, workers - HONEST, compute, aggregator=chosen.aggregator, module=module)
            tidy()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() / MIB if cuda else held()
            rounds = rounds_of(ready)
            first = [clock(rounds.step, 1, device) for _ in range(WARM_UP)][-1]
            seconds = 0.5 if chosen.quick else 5.0
            each = max(1, min(40, int(0.2 * seconds * 1e3 / first))) if cuda else 1
            ends = time.monotonic() + seconds
            while not times or (time.monotonic() < ends and len(times) < 30):
                times.append(clock(rounds.step, each, device))
            rounds.settled()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return result | {"why": f"out of memory: {available(chosen.device):,.0f} MiB were free"}
    peak = torch.cuda.max_memory_allocated() / MIB if cuda else largest()
    found = {"rounds": len(times) * each, "ms": f"{statistics.median(times):.6g}"}
    return result | found | {"held": f"{before:.0f}", "peak": f"{peak:.0f}"}


def buffers(workers: int, parameters: int) -> float:
    """MiB of two n x d buffers."""
    return 2 * workers * parameters * 4 / MIB


def measured(workers: int, parameters: int, chosen: argparse.Namespace) -> dict[str, object]:
    """One measurement in a fresh process, or why there is none."""
    blank = {"device": chosen.device, "workers": workers, "parameters": parameters, "cap": chosen.memory or ""}
    free, least = available(chosen.device), buffers(workers, parameters) + (chosen.memory or 0)
    if least > free:
        return blank | {"why": f"needs more than {least:,.0f} MiB, {free:,.0f} are free"}
    words = [sys.executable, __file__, "--point", str(workers), str(parameters), "--device", chosen.device]
    words += ["--aggregator", chosen.aggregator]
    words += ["--threads", str(chosen.threads), *(["--memory", str(chosen.memory)] if chosen.memory else [])]
    done = subprocess.run([*words, *(["--quick"] if chosen.quick else [])], stdout=subprocess.PIPE, text=True)
    if done.returncode < 0:
        return blank | {"why": f"ended by signal {-done.returncode}: out of memory, most likely"}
    done.check_returncode()
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(row: dict[str, object]) -> str:
    """A line of the table."""
    workers, parameters = int(str(row["workers"])), int(str(row["parameters"]))
    lead = f"| {workers:,} | {parameters:,} |"
    if row.get("why"):
        return f"{lead} not run: {row['why']} | | | | |"
    ms, rounds_only = float(str(row["ms"])), float(str(row["peak"])) - float(str(row["held"]))
    size = f"{float(str(row['peak'])):,.0f} | {rounds_only:,.0f} | {buffers(workers, parameters):,.0f}"
    pace = f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 3}f} | {ms / (workers * parameters / 1e6):.3g}"
    return f"{lead} {pace} | {size} | {row['cap']} |"


def table(chosen: argparse.Namespace) -> None:
    """Measure every point, print it, and write the file."""
    sweep = [(n, SMALLEST) for n in chosen.workers] + [(FIXED_WORKERS, d) for d in chosen.parameters]
    columns = ("workers", "parameters", "ms", "ms per million floats", *MEMORY)
    print("|", " | ".join(columns), "|\n|" + " ---: |" * len(columns))
    rows = []
    for n, d in dict.fromkeys(sweep):
        rows.append(measured(n, d, chosen))
        print(line(rows[-1]), flush=True)
    if not chosen.quick and chosen.aggregator == AGGREGATOR:
        with open(chosen.out / f"scale-{chosen.device}.csv", "w", newline="") as out:
            writer = csv.DictWriter(out, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def draw() -> None:
    """scale.svg from the files."""
    from scale_plot import svg

    series = {}
    for device in ("cpu", "cuda"):
        path = HERE / f"scale-{device}.csv"
        if path.exists():
            with open(path, newline="") as lines:
                rows = [row for row in csv.DictReader(lines) if row["ms"]]
            series[device] = [(float(row["workers"]), float(row["parameters"]), float(row["ms"])) for row in rows]
    if not series:
        raise SystemExit("--plot: neither scale-cpu.csv nor scale-cuda.csv is here; measure first")
    names = {"cpu": "CPU, one thread", "cuda": "CUDA"}
    by_workers = {names[key]: [(n, ms) for n, d, ms in rows if d == SMALLEST] for key, rows in series.items()}
    by_size = {names[key]: [(d, ms) for n, d, ms in rows if n == FIXED_WORKERS] for key, rows in series.items()}
    titles = f"workers (d = {SMALLEST:,})", f"parameters ({FIXED_WORKERS} workers)"
    (HERE / "scale.svg").write_text(svg({titles[0]: by_workers, titles[1]: by_size}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--aggregator", default=AGGREGATOR, help="another one is measured and printed, not written")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, metavar="MIB", help="cap of a round's memory beside the two buffers")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    parser.add_argument("--parameters", type=int, nargs="*", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the file")
    parser.add_argument("--quick", action="store_true", help="half a second a point, and no file is written")
    parser.add_argument("--plot", action="store_true", help="draw scale.svg from the files, measure nothing")
    parser.add_argument("--point", type=int, nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.plot:
        draw()
    elif chosen.point:
        workers, parameters = chosen.point
        print(json.dumps(point(workers, parameters, chosen)))
    else:
        table(chosen)


if __name__ == "__main__":
    main()
