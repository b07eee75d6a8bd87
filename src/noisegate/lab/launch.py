"""Run a spec from beginning to end."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisegate.aggregators import Robust
from noisegate.checks import plain
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.errors import StoreError
from noisegate.lab.checkpoints import Identity
from noisegate.lab.key import fingerprint
from noisegate.lab.setup import Setup, SharedData, prepare
from noisegate.lab.spec import Spec
from noisegate.lab.store import RunFolder
from noisegate.lab.wellformed import check_result, fields_of
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
) -> Result:
    """Run `spec` and give its result; with `out`, leave a run folder that can be resumed.

    dataset, model, loss: your own, instead of those the spec names. watch: called after every round.
    """
    spec, compute = spec or Spec(), compute or Compute()
    if model is not None:
        check_module(model)
    folder = _folder(out, spec, dataset, model) if out is not None else None
    if folder and (found := _done(folder, spec, resume)) is not None:
        return found
    with compute.exact(), ExitStack() as held:
        setup = prepare(spec, compute, dataset, model, loss)
        progress = start(setup.federation)
        with compute.threads_for(floats=progress.state.uploads.numel()):
            if folder:
                held.enter_context(folder.held())
                if (found := _done(folder, spec, resume)) is not None:  # by another process, just now
                    return found
                folder.begin(spec, resume, setup.x_test.device)
                progress = folder.checkpoint(setup.federation) or progress
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
    places: Sequence[Path | None] = [None] * len(specs) if outs is None else outs
    if compute.resolve().type == "cpu":
        return [
            run(spec, compute=compute, dataset=dataset, out=out, resume=resume, watch=watch)
            for spec, out in zip(specs, places, strict=True)
        ]
    with compute.exact(), ExitStack() as held:
        shared = SharedData()
        folders = [
            _folder(out, spec, dataset, None) if out is not None else None
            for spec, out in zip(specs, places, strict=True)
        ]
        members = [
            _member(spec, folder, resume, compute, dataset, (shared, held))
            for spec, folder in zip(specs, folders, strict=True)
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
    spec: Spec,
    folder: RunFolder | None,
    resume: bool,
    compute: Compute,
    dataset: Dataset | None,
    common: tuple[SharedData, ExitStack],
) -> "_Member | Result":
    """A run that is ready to go on, or the result that is there already. common: data, and what holds the folders."""
    shared, held = common
    if folder and (found := _done(folder, spec, resume)) is not None:
        return found
    setup = prepare(spec, compute, dataset, shared=shared)
    progress = start(setup.federation)
    if folder:
        held.enter_context(folder.held())
        if (found := _done(folder, spec, resume)) is not None:
            return found
        folder.begin(spec, resume, setup.x_test.device)
        progress = folder.checkpoint(setup.federation) or progress
    return _Member(spec, setup, _training(setup, progress, compute.graph), folder, progress.seconds)


def _folder(out: Path | str, spec: Spec, dataset: Dataset | None, model: nn.Module | None) -> RunFolder:
    return RunFolder(Path(out), Identity.of(spec, fingerprint(spec, dataset, model)))


def _done(folder: RunFolder, spec: Spec, resume: bool) -> Result | None:
    """What the folder holds already, if that is wanted; StoreError if it holds something else."""
    folder.check(spec, resume)
    found = folder.result(spec) if resume else None
    return None if found is None else stored(found, folder)


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
    began = time.perf_counter() - progress.seconds

    def timed(progress: Progress) -> Progress:
        return replace(progress, seconds=time.perf_counter() - began)

    try:
        for now in training:
            if folder and len(now.curve) > saved:
                saved = len(now.curve)
                folder.save(timed(training.settled(wait=True)))
            if watch:
                watch(timed(now), training.federation.rounds)
    except KeyboardInterrupt:
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
        spec=spec.canonical(),
        seconds=progress.seconds,
        ms_per_round=1e3 * progress.seconds / federation.rounds,
    )


def stored(found: dict[str, Any], folder: RunFolder) -> Result:
    """The result that a folder holds, of which every field is checked."""
    where = f"{plain(folder.path)}: its result.json"
    try:
        values = fields_of(Result, found, where)
        check_result(values, where)
    except StoreError as error:
        raise StoreError(f"{error}; remove it, or run without --resume, to start afresh") from None
    return Result(**values)


def believed_byzantine(federation: Federation) -> int | None:
    """How many liars the rule reckons with; None for a rule that does not ask."""
    rule = federation.rule
    return rule.reckoned(len(federation.byzantine), federation.believed_honest) if isinstance(rule, Robust) else None


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))
