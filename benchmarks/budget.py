"""What all runs that the paper's authors logged would take on this device: an estimate, cell by cell.

    python benchmarks/budget.py --device cuda            # writes budget-cuda.csv
    python benchmarks/budget.py --device cpu --quick     # a few small cells

logged_runs.csv counts the runs of every setting in the authors' public logs, 7,320 in all. Privacy budgets, seeds,
rates and partitions do not change what a round costs, so each distinct round is measured once, on random data of the
right shape:

* rounds: milliseconds per round and run, with as many runs at once on the device as fit its memory and can be set up
  in the time, 32 at most; on a CPU one. Fewer at once cost more each, so the estimate errs on the high side. An attack
  that begins late costs as a sleeping one until then (the authors' attacker copies honest uploads).
* set-up: seconds from a spec to the end of the second round: data dealt out, the model built and probed, the round
  recorded. Reading the data, bringing them to the device (once for runs that share them) and the accountant's search
  are not in it.
* evaluation: 20 times the test set.

    hours = runs x (set-up + evaluation + rounds x ms / 1000) / 3600
"""

import argparse
import csv
import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from common import (
    MOST_STEPS,
    WARM_UP,
    clear,
    clock,
    out_of_memory,
    random_dataset,
    rounds_of,
    setup,
    shown,
    versions,
    wait,
)
from noisegate import Compute
from noisegate.data import SOURCES
from noisegate.runs.setup import Setup, SharedData
from noisegate.simulate import Rounds, accuracy

HERE = Path(__file__).parent
LOGGED = 7_320
DATASETS = ["mnist", "fashion", "usps", "colorectal"]
FIELDS = [
    "dataset",
    "attack",
    "attack_start",
    "workers",
    "aggregator",
    "runs",
    "rounds",
    "ms",
    "once",
    "at_once",
    "hours",
]
"""Of the file that is written. ms: per round and run; once: seconds per run for set-up and evaluation."""

EVALUATIONS = 20
MOST_AT_ONCE = 32
SECONDS = 3.0
"""Most that the rounds of one measurement may take."""


@dataclass(frozen=True)
class Logged:
    """A line of logged_runs.csv."""

    dataset: str
    attack: str
    honest: int
    byzantine: int
    rounds: int
    defended: bool
    attack_start: float
    runs: int

    def kinds(self) -> dict["Kind", float]:
        """The kinds of rounds in such a run, and the share of each."""
        aggregator = "two-stage" if self.defended else "mean"
        asleep, awake = (
            Kind(self.dataset, what, self.honest, self.byzantine, aggregator) for what in (ASLEEP, self.attack)
        )
        shares = {asleep: self.attack_start, awake: 1 - self.attack_start}
        return {kind: share for kind, share in shares.items() if share > 0}


@dataclass(frozen=True)
class Kind:
    """All that the cost of a round depends on."""

    dataset: str
    attack: str
    honest: int
    byzantine: int
    aggregator: str


@dataclass(frozen=True)
class Cost:
    """ms: per round and run, `at_once` runs at a time. setup, evaluation: seconds per run."""

    ms: float
    at_once: int
    setup: float
    evaluation: float


ASLEEP = "asleep"
"""In place of an attack: an attacker that copies honest uploads."""


def logged() -> list[Logged]:
    """The table, checked against the number of all runs."""
    with open(HERE / "logged_runs.csv", newline="") as lines:
        rows = [
            Logged(
                dataset=row["dataset"],
                attack=row["attack"],
                honest=int(row["honest"]),
                byzantine=int(row["byzantine"]),
                rounds=int(row["rounds"]),
                defended=row["defended"] == "yes",
                attack_start=float(row["attack_start"]),
                runs=int(row["runs"]),
            )
            for row in csv.DictReader(lines)
        ]
    total = sum(row.runs for row in rows)
    if total != LOGGED:
        raise SystemExit(f"logged_runs.csv: has {total} runs, not {LOGGED}; it is not the table that was published")
    return rows


def measure(kind: Kind, chosen: argparse.Namespace, seconds: float) -> Cost:
    """One kind of round; takes about `seconds`, set-ups included."""
    device, compute = torch.device(chosen.device), Compute(chosen.device, chosen.threads, memory=chosen.memory)
    random_dataset(kind.dataset, kind.honest)  # made once for all runs, so not a part of the set-up
    shared = SharedData()
    many: list[Rounds] = []
    setups: list[float] = []
    asleep = kind.attack == ASLEEP
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    ends, reserve = time.monotonic() + seconds, min(SECONDS, seconds / 2)
    most = MOST_AT_ONCE if device.type == "cuda" else 1
    while len(many) < most:
        began = time.monotonic()
        ready = setup(
            *(kind.dataset, kind.honest, kind.byzantine, compute),
            aggregator=kind.aggregator,
            attack="label-flip" if asleep else kind.attack,
            attack_start=float(asleep),
            seed=len(many),
            shared=shared,
        )
        run = rounds_of(ready)
        for _ in range(WARM_UP - 1):  # by then its graph is recorded
            run.step()
        wait(device)
        setups.append(time.monotonic() - began)
        if not many:
            evaluation = evaluate(ready, device)
        many.append(run)
        if device.type == "cuda" and len(many) == 1:
            used = max(1, free - torch.cuda.mem_get_info()[0])
            most = max(1, min(most, int(0.8 * free / used)))
        if time.monotonic() + setups[-1] > ends - reserve:
            break

    def everyone() -> None:
        for run in many:
            run.step()

    everyone()
    took = clock(everyone, 1, device) / 1e3
    times = max(1, min(MOST_STEPS // 10, int(reserve / max(took, 1e-6) / 5)))
    found = [clock(everyone, times, device) for _ in range(1 if took > SECONDS else 5)]
    for run in many:
        run.settled()
    return Cost(statistics.median(found) / len(many), len(many), statistics.median(setups), evaluation)


def evaluate(ready: Setup, device: torch.device) -> float:
    """Seconds of all evaluations of a run."""
    model = ready.federation.model
    params = model.initial()
    accuracy(model, params, ready.x_test[:64], ready.y_test[:64])
    return EVALUATIONS * clock(lambda: accuracy(model, params, ready.x_test, ready.y_test), 1, device) / 1e3


def hours(row: Logged, costs: dict[Kind, Cost]) -> tuple[float, float, float]:
    """(hours of all runs of a line, ms per round, seconds of set-up and evaluation per run)."""
    shares = row.kinds()
    ms = sum(share * costs[kind].ms for kind, share in shares.items())
    once = max(costs[kind].setup + costs[kind].evaluation for kind in shares)
    return row.runs * (once + row.rounds * ms / 1e3) / 3600, ms, once


def choose(rows: list[Logged], chosen: argparse.Namespace) -> list[Logged]:
    """The lines to estimate: all, or for a quick look three small ones."""
    rows = [row for row in rows if row.dataset in chosen.datasets]
    small = [row for row in rows if row.honest + row.byzantine <= 16 and SOURCES[row.dataset].model == "mlp"]
    return small[:3] if chosen.quick else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--minutes", type=float, default=7.5, help="about how long the measurement may take")
    parser.add_argument("--memory", type=int, metavar="MIB", help="cap of a round's memory")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the file")
    parser.add_argument("--quick", action="store_true", help="three small cells, and no file is written")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(chosen.threads)
    rows = choose(logged(), chosen)
    runs: Counter[Kind] = Counter()
    for row in rows:
        runs.update(dict.fromkeys(row.kinds(), row.runs))
    kinds = sorted(runs, key=lambda kind: (kind.dataset, kind.byzantine))
    ends, costs = time.monotonic() + 60 * (0.5 if chosen.quick else chosen.minutes), dict[Kind, Cost]()
    print(f"{versions(device)}\n")
    print("| dataset | attack | workers | aggregator | ms per round and run | at once | set-up, s | evaluation, s |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    with Compute(chosen.device).exact():
        measure(Kind("digits", "label-flip", 4, 6, "two-stage"), chosen, 1.0)  # libraries are loaded once for all runs
        for place, kind in enumerate(kinds):
            share = math.sqrt(runs[kind]) / sum(math.sqrt(runs[other]) for other in kinds[place:])
            lead = f"| {kind.dataset} | {kind.attack} | {kind.honest}+{kind.byzantine} | {kind.aggregator} |"
            try:
                cost = measure(kind, chosen, max(1.0, share * (ends - time.monotonic())))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                print(f"{lead} failed: out of memory | | | |", flush=True)
            else:
                costs[kind] = cost
                words = f"{shown(cost.ms)} | {cost.at_once} | {shown(cost.setup)} | {shown(cost.evaluation)} |"
                print(f"{lead} {words}", flush=True)
            clear()
    write_up(rows, costs, chosen)


def write_up(rows: list[Logged], costs: dict[Kind, Cost], chosen: argparse.Namespace) -> None:
    """The estimate of every line and the total, printed and written."""
    print(
        "\n| dataset | attack | from | workers | aggregator | runs | rounds | ms | set-up and evaluation, s | hours |"
    )
    print("| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    totals, left_out, lines = dict.fromkeys((row.dataset for row in rows), 0.0), 0, list[tuple[object, ...]]()
    for row in rows:
        aggregator, where = "two-stage" if row.defended else "mean", f"{row.honest}+{row.byzantine}"
        lead = (row.dataset, row.attack, f"{row.attack_start:g}", where, aggregator, row.runs, row.rounds)
        if all(kind in costs for kind in row.kinds()):
            spent, ms, once = hours(row, costs)
            totals[row.dataset] += spent
            at_once = min(costs[kind].at_once for kind in row.kinds())
            lines.append((*lead, f"{ms:.4g}", f"{once:.4g}", at_once, f"{spent:.4g}"))
            print("|", " | ".join(map(str, (*lead, shown(ms), shown(once), shown(spent)))), "|")
        else:
            left_out += row.runs
            lines.append((*lead, "", "", "", ""))
            print("|", " | ".join(map(str, (*lead, "not measured", "", ""))), "|")
    counted, total = sum(row.runs for row in rows) - left_out, sum(totals.values())
    print("\n" + ", ".join(f"{name} {shown(spent)}" for name, spent in totals.items()) + " hours")
    print(f"{counted:,} of {LOGGED:,} runs: {shown(total)} hours, {shown(3600 * total / max(1, counted))} s a run")
    if left_out:
        print(f"{left_out:,} runs were not measured: out of memory")
    if not chosen.quick and counted + left_out == LOGGED:
        with open(chosen.out / f"budget-{chosen.device}.csv", "w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(FIELDS)
            writer.writerows(lines)


if __name__ == "__main__":
    main()
