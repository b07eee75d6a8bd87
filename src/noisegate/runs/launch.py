"""Run a spec from beginning to end."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from torch import nn

from noisegate.checks import plain
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.errors import NoisegateWarning, OneClassWarning, SlowWarning, SpecError, StoreError
from noisegate.features import Features
from noisegate.models import check_module
from noisegate.roles import trigger_of
from noisegate.runs import imbalance
from noisegate.runs.checkpoints import Identity
from noisegate.runs.key import Fingerprint, fingerprint
from noisegate.runs.measures import Metrics, functions_of
from noisegate.runs.result import Result, stored, summarize
from noisegate.runs.setup import Setup, SharedData, prepare
from noisegate.runs.slow import slow
from noisegate.runs.spec import Spec
from noisegate.runs.store import RunFolder
from noisegate.simulate import Progress, Training, side_by_side, start
from noisegate.vectors import Loss, cross_entropy
from noisegate.workers import ignored_weights

Watch = Callable[[Progress, int], None]
"""Called with the progress and the number of all rounds: after every round, on a CUDA device every so often."""


class InputArguments(TypedDict, total=False):
    """What a run may be given that is not in its spec."""

    dataset: Dataset | None
    model: nn.Module | None
    loss: Loss
    label: str | None
    features: Features | None
    metrics: Metrics | None


@dataclass(frozen=True)
class Inputs:
    """The same, with what is not given."""

    dataset: Dataset | None = None
    model: nn.Module | None = None
    loss: Loss = cross_entropy
    label: str | None = None
    features: Features | None = None
    metrics: Metrics | None = None


def run(
    spec: Spec | None = None,
    *,
    compute: Compute | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    **inputs: Unpack[InputArguments],
) -> Result:
    """Run `spec` and give its result; with `out`, leave a run folder that can be resumed.

    watch: called after every round. inputs: `dataset`, `model`, `loss`, `features`: your own, instead of those the
    spec names; and `label`, which stands for the code of model, loss and features where it cannot be read: runs with
    other code need another one, or they share noise; and `metrics`, which are measured in the end beside those of the
    spec: functions of (scores, labels) by their names, or a list of names. Warns (OneClassWarning) of a model that
    predicts nearly one class where its accuracy hides it, (SlowWarning) before a long run whose model is slow, and of a
    loss whose class weights the worker takes out again.
    """
    spec, compute = spec or Spec(), compute or Compute()
    given = Inputs(**inputs)
    module = given.model if given.model is not None else spec.given().get("model")
    if module is not None:
        check_module(module)
    own, functions = (given.dataset, given.model, given.loss), functions_of(spec.metrics, given.metrics)
    mine = functions, module, given.features
    made_of = fingerprint(spec, *own, given.label, given.features) if out is not None else None
    folder = _folder(out, spec, made_of) if out is not None else None
    if folder and (found := _done(folder, spec, resume, *mine)) is not None:
        return found
    with compute.exact(), ExitStack() as held:
        setup = prepare(spec, compute, *own, label=given.label, features=given.features).measuring(functions)
        progress = start(setup.federation)
        with compute.threads_for(floats=progress.state.uploads.numel()):
            if folder:
                held.enter_context(folder.held())
                if (found := _done(folder, spec, resume, *mine)) is not None:  # by another process, just now
                    return found
                folder.begin(spec, resume, setup.x_test.device)
                progress = (folder.checkpoint(setup.federation) or progress).skip_reserved()
            if line := _ignored(setup):
                warnings.warn(line, NoisegateWarning, stacklevel=2)
            if line := slow(setup.federation, setup.federation.schedule.rounds - progress.rounds):
                warnings.warn(line, SlowWarning, stacklevel=2)
            result = _play(spec, setup, progress, folder, watch, compute.graph)
    if misleading := imbalance.hidden(result.as_dict()):
        warnings.warn(misleading, OneClassWarning, stacklevel=2)
    return result


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
    if compute.resolve().type == "cpu" or any(spec.secret for spec in specs):  # which are saved as they go
        return [
            run(spec, compute=compute, dataset=dataset, out=out, resume=resume, watch=watch)
            for spec, out in zip(specs, places, strict=True)
        ]
    with compute.exact(), ExitStack() as held:
        shared = SharedData()
        folders = [
            _folder(out, spec, fingerprint(spec, dataset)) if out is not None else None
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
                side_by_side(going)
                behind = min(going, key=lambda training: training.played)
                if watch:
                    watch(behind.settled(), behind.federation.schedule.rounds)
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
        result = summarize(self.spec, self.setup, progress)
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
    setup = prepare(spec, compute, dataset, shared=shared).measuring(functions_of(spec.metrics, None))
    progress = start(setup.federation)
    if folder:
        held.enter_context(folder.held())
        if (found := _done(folder, spec, resume)) is not None:
            return found
        folder.begin(spec, resume, setup.x_test.device)
        progress = folder.checkpoint(setup.federation) or progress
    return _Member(spec, setup, _training(setup, progress, compute.graph), folder, progress.seconds)


def _ignored(setup: Setup) -> str | None:
    """The line that says that class weights of the loss do nothing, if they do."""
    mechanism = setup.federation.mechanism
    return ignored_weights(mechanism.model, mechanism.worker, setup.federation.workers.x)


def _folder(out: Path | str, spec: Spec, inputs: Fingerprint | None) -> RunFolder:
    return RunFolder(Path(out), Identity.of(spec, inputs))


def _done(
    folder: RunFolder,
    spec: Spec,
    resume: bool,
    metrics: Iterable[str] = (),
    module: nn.Module | None = None,
    features: Features | None = None,
) -> Result | None:
    """What the folder holds already, if that is wanted; StoreError if it holds something else, or lacks a metric."""
    folder.check(spec, resume)
    found = folder.result(spec) if resume else None
    if found is None:
        return None
    result = stored(found, folder, module, features)
    if missing := [name for name in metrics if name not in (result.metrics or {})]:
        raise StoreError(
            f"{plain(folder.path)}: its run is done, and {missing[0]!r} was not measured; run without resume, or leave "
            "it out"
        )
    return result


def reference(spec: Spec) -> Spec:
    """The same private training without attackers and without a filter: its accuracy is the Reference Accuracy."""
    # An attack with a trigger stays, with nobody to play it: how far the trigger works by itself is to be compared.
    attack = "none" if trigger_of(spec.build_attack()) is None else spec.attack
    return replace(spec, byzantine=0.0, attack=attack, attack_start=0.0, aggregator="mean", gamma=None)


def noiseless(spec: Spec) -> Spec:
    """The reference without noise, at the base rate: what it is more accurate by is the price of privacy.

    It keeps no promise to anyone, so a secret run has none.
    """
    if spec.secret:
        raise SpecError(
            "secret = true: the same training without noise keeps no promise; find its accuracy without secret"
        )
    if spec.build_worker().mechanism != "gaussian":
        raise SpecError(f"worker = {spec.canonical()['worker']['name']!r}: is made of noise; it has no run without any")
    return replace(reference(spec), epsilon=None, sigma=0.0)


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
                saved = len(now.curve)
                if spec.secret:
                    reserved = min(training.federation.schedule.rounds, training.played + setup.evaluate_every)
                folder.save(timed(now))
            side_by_side([training])
            if watch:
                watch(timed(training.settled()), training.federation.schedule.rounds)
    except KeyboardInterrupt:
        reserved = training.begun if spec.secret else 0
        if folder:
            folder.save(timed(training.settled(wait=True)))
        raise
    progress = timed(training.settled(wait=True))
    result = summarize(spec, setup, progress)
    if folder:
        folder.finish(setup.federation, progress, result.as_dict())
    return result
