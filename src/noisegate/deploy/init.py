"""Makes a federation from a spec: a server and its authority, and for a local trial its workers too.

A trial deals the same examples, noise multiplier and rate as the simulator does for the same spec; what differs is who
draws the noise. Its workers are enrolled by the same steps that people on different machines go through.
"""

import io
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from noisegate import data
from noisegate.checks import plain
from noisegate.compute import Compute
from noisegate.deploy import layout
from noisegate.deploy.enroll import accept, look_at, request, sign
from noisegate.deploy.members import renew_server, write_roster
from noisegate.deploy.trial import LocalTrial, check_of_catalog, check_trial
from noisegate.errors import SpecError, StoreError
from noisegate.features import catalog_features
from noisegate.federation.certificates import make_authority
from noisegate.federation.keys import SigningKey, write_private
from noisegate.federation.roster import Roster
from noisegate.federation.settings import ServerSettings
from noisegate.federation.spending import Spending, price
from noisegate.files import write_whole
from noisegate.models import build_model
from noisegate.runs.promise import BASE_EPSILON, PricedWorkers, Privacy, make_promise
from noisegate.runs.setup import DEFAULT_MODEL, DEFAULT_WORKERS, EVALUATIONS, Setup, prepare
from noisegate.runs.spec import Spec
from noisegate.sampling import Poisson
from noisegate.streams import stream

PRESENT = 0.7
"""The share of the honest workers that must be connected for a round to begin."""

GATHER = 120.0
"""Seconds that a trial's first round waits for all workers: many processes start on few cores."""

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class ServerPlan:
    """What a server is made of: its settings, its examples, and the hosts that workers reach it by."""

    settings: dict[str, Any]
    examples: Arrays
    hosts: tuple[str, ...]


def make_trial(spec: Spec, folder: Path, port: int) -> LocalTrial:
    """Make a local trial in a folder that does not exist yet, or is empty, or holds a trial that was never started."""
    check_trial(spec)
    if not _free(folder):
        raise StoreError(f"{plain(folder)}: is not empty; choose another folder, or remove it")
    setup = prepare(spec, Compute(device="cpu", threads=1))
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        layout.make_folder(part, private=True)
        hostile = _fill(part, spec, setup, port)
        trial = LocalTrial(part, spec, tuple(hostile))
        write_whole(part / layout.SPEC, spec.to_toml().encode())
        write_whole(part / layout.TRIAL, trial.to_toml())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
    except OSError as error:
        raise StoreError(f"{plain(folder)}: cannot be made ({error.strerror}); choose another place") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return replace(trial, folder=folder)


def make_server(spec: Spec, folder: Path, listen: str, hosts: Sequence[str]) -> ServerSettings:
    """Make an authority and a server for workers on other machines. Its roster is empty.

    The data set of the spec is the server's own: from it come its auxiliary examples and the test set. hosts: the names
    and addresses that workers reach the server by, the first of which they are told.
    """
    check_trial(replace(spec, attack="none", attack_start=0.0))
    if spec.declared is None or spec.rounds is None:
        raise SpecError("declared, rounds: must be given; both are public, and no worker's data are here to follow")
    if not hosts:
        raise SpecError("host: must be given, the name or address that workers reach the server by")
    for name in (layout.AUTHORITY, layout.SERVER):
        if (folder / name).exists():
            raise StoreError(f"{plain(folder / name)}: is there already; choose another folder")
    plan = _plan_of_server(spec, listen, tuple(hosts))
    _write_server(folder, plan)
    return ServerSettings.read(folder / layout.SERVER / layout.SETTINGS)


def new_run(server: Path) -> str:
    """Prepare a server folder for a new run: a new run id, and the old state put aside. Gives the id."""
    settings = ServerSettings.read(server / layout.SETTINGS)
    if settings.state.exists():
        aside = settings.state.with_name(f"state-{settings.run[:12]}")
        if aside.exists():
            raise StoreError(f"{plain(aside)}: is there already; move it away")
        try:
            settings.state.rename(aside)
        except OSError as error:
            raise StoreError(f"{plain(settings.state)}: cannot be put aside ({error.strerror})") from None
    run = secrets.token_hex(32)
    layout.change_setting(server / layout.SETTINGS, "run", run)
    return run


def _free(folder: Path) -> bool:
    """Whether a trial may be put there: nothing is there, or a trial that was never started."""
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return True
    except OSError as error:
        raise StoreError(f"{plain(folder)}: cannot be used ({error.strerror}); choose another folder") from None
    return (folder / layout.TRIAL).is_file() and not LocalTrial.read(folder).begun


def _fill(part: Path, spec: Spec, setup: Setup, port: int) -> list[str]:
    """Write authority, server and workers. Gives the names of the hostile ones."""
    run = setup.federation
    holdings, sizes = run.workers.holdings, run.workers.sizes.tolist()
    byzantine = run.adversary.byzantine.tolist()
    _write_server(part, _plan_of_trial(spec, setup, f"127.0.0.1:{port}"))
    server, authority = part / layout.SERVER, part / layout.AUTHORITY
    uneven = max(sizes) - min(sizes) > 1
    width = max(2, len(str(len(sizes))))
    given = setup.given[0].x  # every worker computes its own features
    names = [f"w{i:0{width}d}" for i in range(1, len(sizes) + 1)]
    for name, row, size in zip(names, holdings, sizes, strict=True):
        folder = layout.make_folder(part / layout.WORKERS / name, private=True)
        asked = look_at(server, request(folder, name).path)
        accept(folder, sign(server, asked, authority, size=size if uneven else None))
        own = row[:size]
        write_whole(folder / "data.npz", archive({"x": given[own], "y": run.workers.y[own]}))
    return [name for name, hostile in zip(names, byzantine, strict=True) if hostile]


def _plan_of_trial(spec: Spec, setup: Setup, listen: str) -> ServerPlan:
    run = setup.federation
    honest = int((~run.adversary.byzantine).sum())
    settings = {
        **_common(spec, setup.privacy, run.schedule.rounds, honest, listen),
        "title": f"trial: {setup.dataset}"[:100],
        "batch": run.mechanism.batch,
        "rate": run.server.rate,
        "believed_honest": run.server.believed_honest,
        "model": setup.model,
        "shape": list(setup.given[0].shape),
        "classes": run.adversary.classes,
        "evaluate_every": setup.evaluate_every,
        "gather": GATHER,
        "seed": spec.seed,  # the first model is the simulator's; a real server draws one that nobody knows
    }
    held, source = setup.given
    own = {"x": source.x[setup.aux], "y": run.server.aux_y, "x_test": held.x_test, "y_test": setup.y_test}
    return _priced(ServerPlan(settings, own, ("127.0.0.1", "localhost")), spec, run.d)


def _plan_of_server(spec: Spec, listen: str, hosts: tuple[str, ...]) -> ServerPlan:
    check_of_catalog(spec)
    found = data.load(spec.dataset, stream(spec.seed, "test-split"), spec.columns)
    defaults = data.SOURCES.get(spec.dataset)
    honest = spec.workers or (defaults.workers if defaults else DEFAULT_WORKERS)
    workers, rounds, declared = honest + spec.count_byzantine(honest), spec.rounds or 1, spec.declared or 1
    spec.build_aggregator().check(workers)
    promise = make_promise(spec, Poisson(spec.batch), PricedWorkers([declared] * honest, declared, rounds))
    aux, _ = data.hold_out(found.y, found.classes, spec.auxiliary, stream(spec.seed, "auxiliary"))
    usual = defaults.model if defaults else DEFAULT_MODEL
    name = spec.head(usual) or usual
    believed = honest if spec.gamma is None else max(1, math.ceil(round(spec.gamma * workers, 9)))
    settings = {
        **_common(spec, promise, rounds, honest, listen),
        "title": found.name[:100],
        "batch": spec.batch,
        "rate": spec.rate * promise.sigma_base / promise.sigma,
        "believed_honest": believed,
        "model": name,
        "shape": list(found.shape),
        "classes": found.classes,
        "evaluate_every": spec.evaluate_every or max(1, rounds // EVALUATIONS),
    }
    own = {"x": found.x[aux], "y": found.y[aux], "x_test": found.x_test, "y_test": found.y_test}
    features = catalog_features(spec.features or "")
    shape = found.shape if features is None else tuple(features(found.x[:1]).shape[1:])
    module = build_model(name, shape, found.classes, stream(spec.seed, "weights"))
    return _priced(ServerPlan(settings, own, hosts), spec, sum(each.numel() for each in module.parameters()))


def _common(spec: Spec, promise: Privacy, rounds: int, honest: int, listen: str) -> dict[str, Any]:
    """What the settings of a server have in common, trial or not."""
    canonical = spec.canonical()
    return {
        "run": secrets.token_hex(32),
        "listen": listen,
        "rounds": rounds,
        "declared": promise.declared,
        "sigma": promise.sigma,
        "delta": promise.delta,
        "worker": canonical["worker"],
        "aggregator": canonical["aggregator"],
        "features": canonical.get("features"),
        "quorum": max(1, math.ceil(PRESENT * honest)),
    }


def _priced(plan: ServerPlan, spec: Spec, d: int) -> ServerPlan:
    """With the epsilon that a worker must allow to take part in every round, as its ledger reckons it."""
    known = {name: value for name, value in plan.settings.items() if value is not None}
    settings = ServerSettings(**known | {"shape": tuple(plan.settings["shape"])})
    terms = settings.terms(d)
    spent = price([Spending(terms.cost(terms.rounds), d, terms.rounds)], plan.settings["delta"])
    asked = spec.epsilon or (BASE_EPSILON if spec.sigma is None else 0.0)
    # A given sigma may cost a hair more by the ledger, which reckons with floating point.
    stated = asked if spent <= asked else math.ceil(spent * 1e4) / 1e4
    return replace(plan, settings=plan.settings | {"epsilon": stated})


def _write_server(folder: Path, plan: ServerPlan) -> None:
    """Write the authority and the server's folder, with an empty roster."""
    authority = layout.make_folder(folder / layout.AUTHORITY, private=True)
    server = layout.make_folder(folder / layout.SERVER, private=True)
    made = make_authority()
    write_private(authority / "ca.key", made.key)
    for home in (authority, server):
        write_whole(home / "ca.pem", made.certificate)
    SigningKey.generate().write(server / layout.SIGNING_KEY)
    renew_server(server, authority, list(plan.hosts))
    write_roster(server, Roster({}))
    write_whole(server / layout.EXAMPLES, archive(plan.examples))
    write_whole(server / layout.SETTINGS, layout.to_toml(plan.settings, "What this server runs: `noisegate serve`."))


def archive(arrays: Arrays) -> bytes:
    """Examples as an .npz file."""
    content = io.BytesIO()
    every: dict[str, Any] = {name: value.cpu().numpy() for name, value in arrays.items()}
    np.savez_compressed(content, **every)
    return content.getvalue()
