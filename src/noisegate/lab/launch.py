"""Run a spec from beginning to end."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisegate.aggregators import Robust
from noisegate.compute import Compute
from noisegate.data import Dataset, own_path
from noisegate.errors import StoreError
from noisegate.lab.setup import Setup, SharedData, prepare
from noisegate.lab.spec import Spec
from noisegate.lab.store import RunFolder
from noisegate.models import check_module
from noisegate.simulate import Federation, Progress, Training, abreast, shares, start
from noisegate.vectors import Loss, cross_entropy

Watch = Callable[[Progress, int], None]
"""Called with the progress and the number of all rounds: after every round, on a CUDA device every so often."""


@dataclass(frozen=True)
class Result:
    """What a run found. Everything but `seconds` and `ms_per_round` is the same whenever the spec is.

    accuracy: of the last round; best_accuracy is the best of the evaluated ones, beside it and never instead of it.
    honest_rejected: share of honest uploads refused by tests. byzantine_selected: share of the uploads used that were
    Byzantine. epsilon: the largest of the honest workers' own (worker_epsilons, by position), None without any noise;
    accountant is "stated" if it could not be checked. believed_byzantine: how many liars the aggregator reckons with,
    if it asks.
    seconds: of all rounds, without pauses.
    """

    accuracy: float
    best_accuracy: float
    curve: list[dict[str, Any]]
    epsilon: float | None
    delta: float
    sigma: float
    rounds: int
    workers: int
    byzantine: float
    byzantine_workers: int
    attack: str
    aggregator: str
    believed_byzantine: int | None
    dataset: str
    model: str
    parameters: int
    seed: int
    honest_rejected: float
    byzantine_selected: float
    accountant: str
    worker_epsilons: list[float]
    relation: str
    declared: int
    sampling_rate: float
    epsilon_at_1e_5: float | None
    mu: float | None
    copies: int
    epsilon_with_copies: float | None
    secret: bool
    rounds_lost: int
    spec: dict[str, Any]
    seconds: float
    ms_per_round: float

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return asdict(self)


def run(
    spec: Spec | None = None,
    *,
    compute: Compute | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss = cross_entropy,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    label: str | None = None,
) -> Result:
    """Run `spec` and give its result; with `out`, leave a run folder that can be resumed.

    dataset, model, loss: your own, instead of those the spec names. watch: called after every round. label: stands for
    the code of model and loss where it cannot be read: runs with other code need another one, or they share noise.
    """
    spec, compute = spec or Spec(), compute or Compute()
    folder = RunFolder(Path(out)) if out is not None else None
    if model is not None:
        check_module(model)
    inputs = fingerprint(spec, dataset, model) if folder else ""
    if folder:
        folder.check(spec, resume, inputs)
        if resume and (found := folder.result()) is not None:
            return stored(found, folder)
    with compute.exact():
        setup = prepare(spec, compute, dataset, model, loss, label=label)
        progress = start(setup.federation)
        with compute.threads_for(floats=progress.state.uploads.numel()):
            if folder:
                folder.begin(spec, resume, inputs, setup.x_test.device)
                progress = (folder.checkpoint(setup.federation) or progress).skip_reserved()
            return _play(spec, setup, progress, folder, watch, compute.graph)


def run_together(
    specs: Sequence[Spec],
    *,
    compute: Compute | None = None,
    dataset: Dataset | None = None,
    outs: Sequence[Path] | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> list[Result]:
    """Run several specs on one device at the same time; the results are those of `run` one by one, to the byte.

    On a CUDA device their rounds fill it together, each on its own stream, and they share the data they have in common.
    What a spec needs there is its model, its uploads twice, and `compute.memory`. On a CPU they run one after the
    other. watch: called every so often with the progress of the run that is furthest behind. outs: a run folder for
    each, as `run` leaves it; with `resume` those that are there are finished. On a CUDA device they are written in the
    end and at a Ctrl-C, so that an error loses what all did since. `seconds` of a result is its share of the time that
    all took.
    """
    compute = compute or Compute()
    folders: list[RunFolder | None] = [None] * len(specs)
    if outs is not None:
        folders = [RunFolder(Path(out)) for out in outs]
    if compute.resolve().type == "cpu" or any(spec.secret for spec in specs):  # which are saved as they go
        return [
            run(spec, compute=compute, dataset=dataset, out=folder.path if folder else None, resume=resume, watch=watch)
            for spec, folder in zip(specs, folders, strict=True)
        ]
    with compute.exact():
        shared = SharedData()
        members = [
            _member(spec, folder, resume, compute, dataset, shared) for spec, folder in zip(specs, folders, strict=True)
        ]
        playing = [member for member in members if isinstance(member, _Member)]
        began = time.perf_counter()
        try:
            while going := [member.training for member in playing if not member.training.over]:
                abreast(going)
                behind = min(going, key=lambda training: training.played)
                if watch:
                    watch(behind.settled(), behind.federation.rounds)
        except KeyboardInterrupt:
            seconds = (time.perf_counter() - began) / len(playing)
            for member in playing:
                if member.folder:
                    member.folder.save(member.settled(seconds))
            raise
        seconds = (time.perf_counter() - began) / max(1, len(playing))
        return [member.finish(seconds) if isinstance(member, _Member) else member for member in members]


@dataclass(frozen=True)
class _Member:
    """One of several runs on a device. before: seconds that it took until it was interrupted."""

    spec: Spec
    setup: Setup
    training: Training
    folder: RunFolder | None
    before: float

    def settled(self, seconds: float) -> Progress:
        return replace(self.training.settled(wait=True), seconds=self.before + seconds)

    def finish(self, seconds: float) -> Result:
        progress = self.settled(seconds)
        result = _summarize(self.spec, self.setup, progress)
        if self.folder:
            self.folder.finish(self.setup.federation, progress, result.as_dict())
        return result


def _member(
    spec: Spec, folder: RunFolder | None, resume: bool, compute: Compute, dataset: Dataset | None, shared: SharedData
) -> "_Member | Result":
    """A run that is ready to go on, or the result that is there already."""
    inputs = fingerprint(spec, dataset, None) if folder else ""
    if folder:
        folder.check(spec, resume, inputs)
        if resume and (found := folder.result()) is not None:
            return stored(found, folder)
    setup = prepare(spec, compute, dataset, shared=shared)
    progress = start(setup.federation)
    if folder:
        folder.begin(spec, resume, inputs, setup.x_test.device)
        progress = folder.checkpoint(setup.federation) or progress
    return _Member(spec, setup, _training(setup, progress, compute.graph), folder, progress.seconds)


def fingerprint(spec: Spec, dataset: Dataset | None, model: nn.Module | None) -> str:
    """A sum over the data and the model that the spec does not determine; "" if it determines them all.

    A loss cannot be summed: resume with the one you started with.
    """
    tensors: list[Tensor] = []
    digest = hashlib.sha256()
    if dataset is not None:
        tensors += [dataset.x, dataset.y, dataset.x_test, dataset.y_test]
    elif (path := own_path(spec.dataset)) and path.is_file():
        digest.update(path.read_bytes())
    elif model is None:
        return ""
    if model is not None:
        digest.update(str(model).encode())
        tensors += model.state_dict().values()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def reference(spec: Spec) -> Spec:
    """The same private training without attackers and without a filter: its accuracy is the Reference Accuracy."""
    return replace(spec, byzantine=0.0, attack="none", attack_start=0.0, aggregator="mean", gamma=None)


def undefended(spec: Spec) -> Spec:
    """The same attack on a plain mean."""
    return replace(spec, aggregator="mean")


def _training(setup: Setup, progress: Progress, graph: bool) -> Training:
    return Training(setup.federation, progress, setup.x_test, setup.y_test, setup.evaluate_every, graph)


def _play(
    spec: Spec, setup: Setup, progress: Progress, folder: RunFolder | None, watch: Watch | None, graph: bool
) -> Result:
    """Play to the end. An interruption saves where the run stands, after the last whole round."""
    training, saved = _training(setup, progress, graph), len(progress.curve)
    began, reserved = time.perf_counter() - progress.seconds, 0

    def timed(progress: Progress) -> Progress:
        return replace(progress, seconds=time.perf_counter() - began, reserved=reserved)

    try:
        while not training.over:
            # A secret run says which rounds it draws for before it does, so that it never draws for one twice.
            reserve = spec.secret and training.played + training.stride() > reserved
            if folder and (reserve or len(training.settled().curve) > saved):
                now = training.settled(wait=True)
                saved, reserved = len(now.curve), training.played + setup.evaluate_every if spec.secret else 0
                folder.save(timed(now))
            abreast([training])
            if watch:
                watch(timed(training.settled()), training.federation.rounds)
    except KeyboardInterrupt:
        reserved = training.begun if spec.secret else 0
        if folder:
            folder.save(timed(training.settled(wait=True)))
        raise
    progress = timed(training.settled(wait=True))
    result = _summarize(spec, setup, progress)
    if folder:
        folder.finish(setup.federation, progress, result.as_dict())
    return result


def _summarize(spec: Spec, setup: Setup, progress: Progress) -> Result:
    federation, promise = setup.federation, setup.privacy
    rejected, selected = shares(federation, progress.reasons)
    curve = list(progress.curve)
    return Result(
        accuracy=curve[-1]["accuracy"],
        best_accuracy=max(line["accuracy"] for line in curve),
        curve=curve,
        epsilon=promise.epsilon,
        delta=promise.delta,
        sigma=promise.sigma,
        rounds=federation.rounds,
        workers=_count(~federation.byzantine),
        byzantine=_count(federation.byzantine) / len(federation.byzantine),
        byzantine_workers=_count(federation.byzantine),
        attack=spec.canonical()["attack"]["name"],
        aggregator=spec.canonical()["aggregator"]["name"],
        believed_byzantine=believed_byzantine(federation),
        dataset=setup.dataset,
        model=setup.model,
        parameters=federation.model.d,
        seed=spec.seed,
        honest_rejected=rejected,
        byzantine_selected=selected,
        accountant=promise.accountant,
        worker_epsilons=list(promise.worker_epsilons),
        relation=promise.relation,
        declared=promise.declared,
        sampling_rate=promise.sampling_rate,
        epsilon_at_1e_5=promise.epsilon_at_1e_5,
        mu=promise.mu,
        copies=promise.copies,
        epsilon_with_copies=promise.epsilon_with_copies,
        secret=spec.secret,
        rounds_lost=progress.lost,
        spec=spec.canonical(),
        seconds=progress.seconds,
        ms_per_round=1e3 * progress.seconds / federation.rounds,
    )


def stored(found: dict[str, Any], folder: RunFolder) -> Result:
    """The result that a folder holds."""
    if not isinstance(found, dict):
        raise StoreError(
            f"{folder.path}: its result.json is damaged; remove it, or run without --resume, to start afresh"
        )
    found.setdefault("believed_byzantine", None)  # which results of version 0.1.0 do not tell
    names = [entry.name for entry in fields(Result)]
    if missing := [name for name in names if name not in found]:
        raise StoreError(
            f"{folder.path}: its result.json lacks {', '.join(missing)}; "
            "remove it, or run without --resume, to start afresh"
        )
    return Result(**{name: found[name] for name in names})


def believed_byzantine(federation: Federation) -> int | None:
    """How many liars the rule reckons with; None for a rule that does not ask."""
    rule = federation.rule
    return rule.reckoned(len(federation.byzantine), federation.believed_honest) if isinstance(rule, Robust) else None


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))
