"""`noisegate join`: take part in a federation with the workers of one or more folders."""

import asyncio
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import typer

from noisegate.checks import plain
from noisegate.errors import FederationError, NoisegateError, SpecError
from noisegate.federation.certificates import days_left, read_certificate
from noisegate.federation.client import WorkerOutcome
from noisegate.federation.worker import Worker
from noisegate.federation.worker_folder import CERTIFICATE, WorkerFolder
from noisegate.files import write_whole
from noisegate.vectors import FlatModel, cross_entropy

SOON = 30.0
"""Days before the end of a certificate from which on a worker says so."""

MODEL = "model.safetensors"
"""The last model of a run, in the worker's folder."""


def join_command(folders: list[Path], threads: int | None, as_json: bool) -> None:
    """Take part in a federation: agree to the server's terms if the folder's policy allows them, then answer models
    until the run is over or the budget is spent.

    A worker that is stopped, however, goes on with the same command. The last model is written to model.safetensors.
    """
    torch.set_num_threads(threads or 1)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SpecError("join: a folder is given twice; every worker has its own")
    places = [WorkerFolder.read(folder) for folder in folders]
    workers = [_worker(place) for place in places]
    try:
        found = asyncio.run(_together(workers, places, threads, quiet=as_json))
    except KeyboardInterrupt:
        print("interrupted: the ledger has what was sent; the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    told: dict[str, Any] = {}
    for worker, place, outcome in zip(workers, places, found, strict=True):
        if isinstance(outcome, WorkerOutcome):
            told[place.name] = _told(worker, place, outcome)
        elif not isinstance(outcome, NoisegateError):
            raise outcome
    if as_json:
        print(json.dumps({"workers": told}, indent=2))
    else:
        for name, one in told.items():
            ended = "the run is over" if one["ended"] == "done" else "its budget is spent"
            if one["ended"] != "done" and not one["rounds"]:
                ended = "it left, for one round costs more than is left of its budget"
            print(f"{name}: {ended}; {one['rounds']} rounds, epsilon {one['epsilon']} at delta {one['delta']:g}")
    if len(told) < len(places):
        raise typer.Exit(2)


def _worker(place: WorkerFolder) -> Worker:
    """The worker of a folder, once everything in it was checked."""
    path = place.folder / CERTIFICATE
    left = days_left(read_certificate(path))
    renew = f"renew it with `noisegate federation renew {plain(place.folder)}`"
    if left < 0:
        raise FederationError(f"{plain(path)}: has ended {-left:.0f} days ago; {renew}")
    if left < SOON:
        print(f"{place.name}: its certificate ends in {left:.0f} days; {renew}", file=sys.stderr)
    worker = Worker.of(place)
    place.check_labels(worker.data[1])
    return worker


async def _together(
    workers: list[Worker], places: list[WorkerFolder], threads: int | None, quiet: bool
) -> list[WorkerOutcome | BaseException]:
    """How taking part ended for each. A worker that cannot go on leaves the others alone."""

    async def one(worker: Worker, place: WorkerFolder) -> WorkerOutcome:
        def tell(event: str, /, **about: Any) -> None:
            said = ", ".join(f"{key} {value}" for key, value in about.items())
            if not quiet:
                print(plain(f"{place.name}: {event}{': ' if said else ''}{said}"), file=sys.stderr, flush=True)

        try:
            return await worker.take_part(place, tell, pool)
        except NoisegateError as error:
            print(plain(f"noisegate: {place.name}: {error}"), file=sys.stderr, flush=True)
            raise

    with ThreadPoolExecutor(min(len(workers), threads or os.cpu_count() or 1)) as pool:
        each = [one(worker, place) for worker, place in zip(workers, places, strict=True)]
        return await asyncio.gather(*each, return_exceptions=True)


def _told(worker: Worker, place: WorkerFolder, outcome: WorkerOutcome) -> dict[str, Any]:
    """What came of it for one worker. The last model is written to its folder."""
    if outcome.params is not None:
        from safetensors.torch import save

        tensors = FlatModel(worker.model, cross_entropy).state(outcome.params)
        write_whole(place.folder / MODEL, save({name: value.clone() for name, value in tensors.items()}))
    epsilon = math.ceil(outcome.epsilon * 1e4) / 1e4 if math.isfinite(outcome.epsilon) else None
    return {
        "ended": outcome.ended,
        "run": outcome.run,
        "rounds": outcome.rounds,
        "epsilon": epsilon,
        "delta": worker.policy.delta,
        "model": str(place.folder / MODEL) if outcome.params is not None else None,
    }
