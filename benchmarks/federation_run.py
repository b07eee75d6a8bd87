"""A whole run between real workers beside the same run of the simulator: how far their accuracies are apart.

    NOISEGATE_DATA=... python benchmarks/federation_run.py --dataset fashion --workers 20 --byzantine 0.6

Every worker has its own certificate, stream, outbox and ledger, and draws its noise from the operating system. A few
processes carry all of them. The simulator's runs are secret ones of the same spec, so that theirs is fresh too.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

import noisegate
from noisegate import Compute, Spec
from noisegate.deploy.attacker import hostile_worker
from noisegate.deploy.init import make_trial
from noisegate.deploy.trial import Trial
from noisegate.federation import Server, Worker
from noisegate.federation.worker_folder import WorkerFolder


def main() -> None:
    """Run both, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--byzantine", type=float, default=0.6)
    parser.add_argument("--attack", default="label-flip")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--simulated", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that carry the workers")
    parser.add_argument("--folder", type=Path, default=None, help="where everything is written; a new one")
    given = parser.parse_args()
    spec = Spec(
        dataset=given.dataset,
        workers=given.workers,
        byzantine=given.byzantine,
        attack=given.attack,
        rounds=given.rounds,
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result, seconds, weight = federate(spec, Path(folder) / "trial", given.processes)
    simulated = [noisegate.run(replace(spec, secret=True), compute=Compute(threads=1)) for _ in range(given.simulated)]
    accuracies = [round(each.accuracy, 4) for each in simulated]
    print(
        json.dumps(
            {
                "spec": spec.name(),
                "rounds": result["judged"],
                "accuracy": round(result["accuracy"], 4),
                "simulated": accuracies,
                "difference": round(result["accuracy"] - statistics.mean(accuracies), 4),
                "hostile_weight": round(weight, 4),
                "simulated_hostile_weight": round(statistics.mean(each.byzantine_weight for each in simulated), 4),
                "ms_per_round": round(1000 * seconds / result["judged"], 1),
            }
        )
    )


def federate(spec: Spec, folder: Path, processes: int) -> tuple[dict, float, float]:
    """(result, seconds from the first round to the last, the weight of the hostile workers)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trial = make_trial(spec, folder, port)
    names = sorted(each.name for each in (folder / "workers").iterdir())
    context = multiprocessing.get_context("spawn")
    carriers = [context.Process(target=carry, args=(folder, names[i::processes])) for i in range(processes)]
    for carrier in carriers:
        carrier.start()
    try:
        torch.set_num_threads(1)
        server, times = Server.of(folder / "server"), []

        def watch(line: dict) -> None:
            times.append(time.perf_counter())
            if "accuracy" in line:
                print(
                    f"round {line['round']}: accuracy {line['accuracy']:.4f}, {times[-1] - times[0]:.0f} s", flush=True
                )

        server.watch = watch
        result = asyncio.run(server.run())
        for carrier in carriers:
            carrier.join(60)
    finally:
        for carrier in carriers:
            carrier.kill()
    weight = sum(result["workers"][name]["weight"] for name in trial.hostile)
    return result, times[-1] - times[0], weight


def carry(folder: Path, names: list[str]) -> None:
    """A process with some of the workers."""
    torch.set_num_threads(1)
    trial = Trial.read(folder)

    async def one(name: str, pool: ThreadPoolExecutor) -> None:
        if name in trial.hostile:
            worker, place = hostile_worker(trial, name)
        else:
            place = WorkerFolder.read(folder / "workers" / name)
            worker = Worker.of(place)
        await worker.take_part(place, executor=pool)

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            await asyncio.gather(*(one(name, pool) for name in names))

    asyncio.run(run())


if __name__ == "__main__":
    main()
