"""What a round of a federation costs beside compute: real processes on loopback, mutual TLS, ledgers, checkpoints.

    python benchmarks/federation.py --workers 50 --parameters 25450 --rounds 100
    python benchmarks/federation.py --workers 200 --parameters 1000000 --rounds 6 --aggregator fortified

Workers compute nothing: each sends one and the same noise of the agreed size in every round, and signs it, keeps it in
its outbox and charges it to its ledger, as a real one does. A few processes carry all of them, so on one disk their
ledgers wait for one another, as they would not on machines of their own; --folder on a memory disk shows the rest.
Printed is what the server measured: a round in all, of which the judging; and the server's largest memory.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

from noisegate.entropy import Secret
from noisegate.federation import Policy, Server, Worker
from noisegate.federation.certificates import make_authority, make_request, sign_request
from noisegate.federation.keys import SigningKey, write_private
from noisegate.federation.roster import Roster
from noisegate.federation.settings import ServerSettings
from noisegate.federation.worker_folder import WorkerFolder

CLASSES = 10
SKIPPED = 3
"""First rounds, in which everything is new, that are left out."""


def main() -> None:
    """Make a federation, run it, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=25_450, help="a multiple of 10")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--aggregator", default="mean")
    parser.add_argument("--processes", type=int, default=2, help="that carry the workers")
    parser.add_argument("--folder", type=Path, default=None, help="where ledgers and state are written; a new one")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="federation-", dir=given.folder))
    context = multiprocessing.get_context("spawn")
    try:
        names = make(folder, given)
        port, told = context.Value("i", 0), context.Queue()
        server = context.Process(target=serve, args=(folder, given, port, told))
        server.start()
        while not port.value and server.is_alive():
            time.sleep(0.05)
        carriers = [
            context.Process(target=carry, args=(folder, names[i :: given.processes], given.parameters, port.value))
            for i in range(given.processes)
        ]
        for carrier in carriers:
            carrier.start()
        found = told.get(timeout=3600)
        for process in (server, *carriers):
            process.join(60)
        show(folder, given, found)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def module(parameters: int) -> nn.Module:
    """One linear layer of that size."""
    return nn.Linear(parameters // CLASSES - 1, CLASSES)


def make(folder: Path, given: argparse.Namespace) -> list[str]:
    """Certificates, keys and files of everyone; the workers' names."""
    authority, names = make_authority(), [f"w{i:03}" for i in range(given.workers)]
    server, key = folder / "server", SigningKey.generate()
    server.mkdir()
    private, request = make_request("server", key.public, ["127.0.0.1"])
    (server / "server.pem").write_bytes(sign_request(authority, request, server=True))
    (server / "ca.pem").write_bytes(authority.certificate)
    write_private(server / "server.key", private)
    key.write(server / "signing.key")
    keys = {}
    for name in names:
        place, own = folder / name, SigningKey.generate()
        place.mkdir()
        private, request = make_request(name, own.public)
        write_private(place / "worker.key", private)
        (place / "worker.pem").write_bytes(sign_request(authority, request))
        (place / "ca.pem").write_bytes(authority.certificate)
        own.write(place / "signing.key")
        policy = f'epsilon = 1000.0\ndelta = 1e-5\ndeclared = 1000\nserver = ["{key.public.hex()}"]\n'
        (place / "policy.toml").write_text(policy)
        keys[name] = own.public
    (server / "roster.toml").write_text(Roster(keys).to_toml())
    return names


def serve(folder: Path, given: argparse.Namespace, port: object, told: multiprocessing.Queue) -> None:
    """The server's process."""
    torch.set_num_threads(1)
    features = given.parameters // CLASSES - 1
    generator = torch.Generator().manual_seed(1)
    auxiliary = torch.randn(2 * CLASSES, features, generator=generator), torch.arange(CLASSES).repeat_interleave(2)
    settings = ServerSettings(
        run=os.urandom(32).hex(),
        rounds=given.rounds,
        batch=16,
        declared=1000,
        sigma=1.0,
        believed_honest=given.workers,
        quorum=given.workers,
        aggregator=given.aggregator,
        listen="127.0.0.1:0",
        gather=600.0,
        deadline=300.0,
        stall=36000.0,
        folder=folder / "server",
    )
    server, times = Server(module(given.parameters), auxiliary, settings), []
    server.watch = lambda line: times.append((time.perf_counter(), time.process_time()))

    async def run() -> None:
        task = asyncio.ensure_future(server.run())
        while not server.port and not task.done():
            await asyncio.sleep(0.01)
        port.value = server.port
        await task

    asyncio.run(run())
    told.put((times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))


def carry(folder: Path, names: list[str], parameters: int, port: int) -> None:
    """A process with some of the workers."""
    torch.set_num_threads(1)
    net, data = module(parameters), (torch.zeros(16, parameters // CLASSES - 1), torch.zeros(16, dtype=torch.int64))

    async def run() -> None:
        with ThreadPoolExecutor(8) as pool:
            await asyncio.gather(*(one(name, pool) for name in names))

    async def one(name: str, pool: ThreadPoolExecutor) -> None:
        place = folder / name
        (place / "worker.toml").write_text(f'name = "{name}"\nserver = "127.0.0.1:{port}"\n')
        worker = Worker(net, data, Policy.read(place / "policy.toml"), make=lambda holder: SameNoise())
        await worker.take_part(WorkerFolder.read(place), executor=pool)

    asyncio.run(run())


class SameNoise:
    """Uploads without a signal, drawn once: what is measured is what they cost beside compute."""

    def __init__(self) -> None:
        self.drawn: torch.Tensor | None = None

    def __call__(self, mechanism: object, round: int, params: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """The upload of a round."""
        if self.drawn is None:
            secret = Secret(torch.device("cpu"))
            secret.begin(round)
            sums = torch.zeros(1, len(params))
            secret.source("noise").add_noise(sums, mechanism.added_noise)
            self.drawn = sums[0]
        return self.drawn


def show(folder: Path, given: argparse.Namespace, found: tuple[list[tuple[float, float]], float]) -> None:
    """Print the numbers as one line of JSON."""
    times, memory = found
    lines = [json.loads(line) for line in (folder / "server" / "state" / "rounds.jsonl").read_text().splitlines()]
    rounds = 1000 * np.diff([at for at, _ in times])[SKIPPED:]
    busy = 1000 * np.diff([at for _, at in times])[SKIPPED:]
    part = {
        name: 1000 * np.array([line["seconds"][name] for line in lines])[SKIPPED + 1 :]
        for name in ("wait", "judge", "checkpoint")
    }
    used = min(sum(each["status"] == "used" for each in line["workers"].values()) for line in lines)
    print(
        json.dumps(
            {
                "workers": given.workers,
                "parameters": given.parameters,
                "aggregator": given.aggregator,
                "rounds": len(rounds),
                "ms_per_round": round(float(np.median(rounds)), 1),
                "p90": round(float(np.quantile(rounds, 0.9)), 1),
                **{f"{name}_ms": round(float(np.median(each)), 1) for name, each in part.items()},
                "beside_judging_ms": round(float(np.median(rounds - part["judge"])), 1),
                "server_cpu_ms": round(float(np.median(busy)), 1),
                "server_memory_gib": round(memory, 2),
                "fewest_used": used,
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
