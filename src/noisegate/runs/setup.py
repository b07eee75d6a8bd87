"""From a spec to a federation: data dealt out, noise calibrated, everyone in place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from noisegate import data
from noisegate.aggregators import AGGREGATORS
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.entropy import Secret
from noisegate.errors import SpecError
from noisegate.features import Features
from noisegate.protocol import Mechanism, Server
from noisegate.roles import Aggregator, Attack, Worker, trigger_of
from noisegate.runs.dealing import Dealt, copies, count_honest, deal, held_by_byzantine, surrogate
from noisegate.runs.drawing import expected_draws, most_drawn, sampling_of
from noisegate.runs.features import RunFeatures, features_of
from noisegate.runs.identity import digest_data, digest_run
from noisegate.runs.measures import Metric, try_out
from noisegate.runs.modules import loss_of, model_of
from noisegate.runs.promise import PricedWorkers, Privacy, make_promise, signs_of
from noisegate.runs.spec import Spec
from noisegate.simulate import Adversary, Exam, Federation, Schedule, Workers, examine, marked
from noisegate.streams import stream
from noisegate.vectors import FlatModel, Loss, cross_entropy
from noisegate.workers import Company, choose_sums

DEFAULT_MODEL, DEFAULT_WORKERS, DEFAULT_EPOCHS = "mlp", 10, 10
"""For data that a user brings."""

GRADIENT_COPIES = 8
"""Floats per parameter that a gradient takes on the direct way: itself, mixed and scaled in float64, and the rest."""

MOST_WORKERS = 100_000
EVALUATIONS = 20
MOST_KNOWN = 256
"""Most examples by which an adversary estimates the gradient."""


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start.

    features: what its examples were turned into; empty if nothing. given: the workers' data set and the server's,
    before that; aux: (A,) which examples of the latter are the server's. make: makes the features, if there are any.
    metrics: what is measured in the end.
    """

    federation: Federation
    privacy: Privacy
    x_test: Tensor
    y_test: Tensor
    evaluate_every: int
    given: tuple[Dataset, Dataset]
    aux: Tensor
    dataset: str
    model: str
    features: str
    make: Features | None
    metrics: Mapping[str, Metric | None] = field(default_factory=dict)

    def examine(self, params: Tensor) -> Exam:
        """What a model with these parameters says of the test examples."""
        return examine(self.federation.mechanism.model, params, self.x_test, self.y_test)

    def measuring(self, functions: Mapping[str, Metric | None]) -> "Setup":
        """The same, with metrics. SpecError if one of a user's own fails on the model as it is now."""
        if any(functions.values()):
            try_out(functions, self.examine(self.federation.mechanism.model.initial()))
        return replace(self, metrics=functions)


class SharedData:
    """Data that several runs use, read once and brought to the device once."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], Dataset] = {}
        self._digests: dict[int, tuple[Dataset, str]] = {}
        self._moved: dict[tuple[int, torch.device], tuple[Dataset, tuple[Tensor, ...]]] = {}
        self._embedded: dict[tuple[int, str], tuple[Dataset, Dataset]] = {}

    def load(self, spec: Spec) -> Dataset:
        """The data of a spec. Those of a user's own file are split by the seed; the others are the same for all."""
        key = spec.dataset, spec.seed if data.own_path(spec.dataset) else 0, spec.columns
        if key not in self._read:
            self._read[key] = data.load(spec.dataset, stream(spec.seed, "test-split"), spec.columns)
        return self._read[key]

    def load_auxiliary(self, name: str) -> Dataset:
        """A data set of the catalog that the server's own examples are from."""
        if name not in data.SOURCES:
            raise SpecError(f"auxiliary_from = {name!r}: must be one of {', '.join(data.SOURCES)}")
        if (name, 0) not in self._read:
            self._read[name, 0] = data.load(name, stream(0, "test-split"))
        return self._read[name, 0]

    def digest(self, dataset: Dataset) -> str:
        """`digest_data` of it."""
        if id(dataset) not in self._digests:
            self._digests[id(dataset)] = dataset, digest_data(dataset)
        return self._digests[id(dataset)][1]

    def embed(self, dataset: Dataset, features: RunFeatures, device: torch.device, keep: bool) -> Dataset:
        """The data set with features in place of examples. keep: on the disk too, if anything is kept there."""
        key = id(dataset), features.digest
        if key not in self._embedded:
            self._embedded[key] = dataset, features.of(dataset, self.digest(dataset), device, keep)
        return self._embedded[key][1]

    def on(self, device: torch.device, dataset: Dataset) -> tuple[Tensor, ...]:
        """(x, y, x_test, y_test) there."""
        key = id(dataset), device  # the entry keeps the data set, so that its id stays its own
        if key not in self._moved:
            tensors = (dataset.x, dataset.y, dataset.x_test, dataset.y_test)
            self._moved[key] = dataset, tuple(tensor.to(device) for tensor in tensors)
        return self._moved[key][1]


def prepare(
    spec: Spec,
    compute: Compute,
    dataset: Dataset | None = None,
    module: nn.Module | None = None,
    loss: Loss = cross_entropy,
    shared: "SharedData | None" = None,
    label: str | None = None,
    features: Features | None = None,
) -> Setup:
    """Everything a run needs. `dataset`, `module` and `features` take the place of the spec's names.

    label: stands for the code of module, loss and features, where it cannot be read (`noisegate.runs.identity`).
    shared: data that other runs brought to the device, and a place for those that this one brings.
    """
    shared, device, loss = shared or SharedData(), compute.resolve(), loss_of(spec, loss)
    defaults = data.SOURCES.get(spec.dataset) if dataset is None else None
    dataset = dataset or shared.load(spec)
    source = shared.load_auxiliary(spec.auxiliary_from) if spec.auxiliary_from else dataset
    given, made_of = (dataset, source), [shared.digest(dataset), shared.digest(source)]
    if (embedding := features_of(spec, features, label)) is not None:
        keep = not spec.secret or defaults is not None  # data of the catalog are public, whatever the run is
        dataset, source = (shared.embed(each, embedding, device, keep) for each in (dataset, source))
        made_of.append(embedding.digest)
    honest = count_honest(spec, dataset, defaults.workers if defaults else DEFAULT_WORKERS)
    parts = _build_parts(spec, honest)
    dealt = deal(spec, dataset, source, honest)
    declared = spec.declared or round(sum(dealt.honest_sizes()) / honest)
    sampling = sampling_of(spec, dealt, declared)
    rounds = spec.rounds or math.ceil((defaults.epochs if defaults else DEFAULT_EPOCHS) * declared / spec.batch)

    name, module = model_of(spec, dataset, module, defaults.model if defaults else DEFAULT_MODEL, features is not None)
    model = FlatModel(module, loss, device, dataset.classes)
    priced = PricedWorkers(dealt.honest_sizes(), declared, rounds, signs_of(parts.worker, model.d))
    promise = make_promise(spec, sampling, priced).with_copies(copies(spec, dealt))

    x, y, x_test, y_test = shared.on(device, dataset)
    if (trigger := trigger_of(parts.attack)) is not None:
        marked(trigger, x_test[:1])  # a trigger that cannot be put on is refused now, and not after the last round
    scratch = compute.scratch()
    chunk = max(1, min(compute.chunk, scratch // (4 * GRADIENT_COPIES * model.d)))
    company = Company(spec.batch, len(dealt.parts), scratch, spec.seed)
    sums = choose_sums(model, model.initial(), x, y, chunk=chunk, company=company)
    most = most_drawn(spec, sampling, dealt, declared)
    mechanism = Mechanism(model, sums, parts.worker, sampling, promise.sigma, declared, most)
    server = _server(spec, mechanism, parts, dealt, promise, scratch)
    digest = digest_run(tuple(made_of), module, loss, (parts.attack, parts.aggregator, parts.worker), label)
    # What a secret run draws by name (ties, attackers' numbers) must not follow from private data: it shows.
    named = replace(spec, metrics=None).name()  # what is measured changes no noise
    run_name = named if spec.secret else f"{named}/{digest}"
    holdings, sizes = (each.to(device) for each in dealt.padded())
    federation = Federation(
        workers=Workers(mechanism, x, y, holdings, sizes, scratch),
        server=server,
        adversary=_adversary(spec, parts.attack, server, dealt, (x, y)),
        schedule=Schedule(rounds, spec.seed, run_name, Secret(device) if spec.secret else None, spec.absent or 0.0),
    )
    every = spec.evaluate_every or max(1, rounds // EVALUATIONS)
    about = (dataset.name, name, embedding.name, embedding.make) if embedding else (dataset.name, name, "", None)
    return Setup(federation, promise, x_test, y_test, every, given, dealt.aux, *about)


class Parts(NamedTuple):
    """The three parts of a spec as objects."""

    attack: Attack
    aggregator: Aggregator
    worker: Worker


def _build_parts(spec: Spec, honest: int) -> Parts:
    """The parts of the spec. SpecError if they do not exist for so many workers, or do not fit each other."""
    byzantine = spec.count_byzantine(honest)
    if honest + byzantine > MOST_WORKERS:
        raise SpecError(
            f"byzantine = {spec.byzantine}: makes {byzantine} Byzantine workers beside {honest} honest ones, more than "
            f"{MOST_WORKERS} in all; lower byzantine or workers"
        )
    parts = Parts(spec.build_attack(), spec.build_aggregator(), spec.build_worker())
    parts.attack.check(honest, byzantine)
    _check_aggregator(spec, parts.aggregator, parts.worker, honest + byzantine)
    return parts


def _server(spec: Spec, mechanism: Mechanism, parts: Parts, dealt: Dealt, promise: Privacy, scratch: int) -> Server:
    """The server, with its examples on the model's device."""
    workers, device = len(dealt.parts), mechanism.model.initial().device
    believed = len(dealt.honest_sizes()) if spec.gamma is None else _ceil(spec.gamma * workers)
    return Server(
        mechanism=mechanism,
        aggregator=parts.aggregator,
        aux_x=dealt.source.x[dealt.aux].to(device),
        aux_y=dealt.source.y[dealt.aux].to(device),
        workers=workers,
        believed_honest=believed,
        rate=spec.rate * promise.sigma_base / promise.sigma if promise.sigma else spec.rate,
        scratch=scratch,
        expected=expected_draws(spec, mechanism.sampling, dealt, mechanism.declared, device),
    )


def _adversary(spec: Spec, attack: Attack, server: Server, dealt: Dealt, examples: tuple[Tensor, Tensor]) -> Adversary:
    """The adversary. examples: the training pool (x, y) on the device."""
    (x, y), device = examples, server.aux_x.device
    taken = surrogate(spec, dealt).to(device)
    known = held_by_byzantine(spec, dealt, "known")[:MOST_KNOWN].to(device)
    # Its examples may not be as many of every class.
    imagined = replace(server, aux_x=x[taken], aux_y=y[taken], balanced=False)
    return Adversary(attack, dealt.byzantine.to(device), dealt.dataset.classes, imagined, x[known], y[known])


def _check_aggregator(spec: Spec, aggregator: Aggregator, worker: Worker, workers: int) -> None:
    """SpecError if an aggregator does not exist for so many workers, or does not fit what these workers send."""
    if aggregator.tests_noise and not worker.noisy:
        name = spec.canonical()["worker"]["name"]
        raise SpecError(
            f"worker = {name!r}: sends no Gaussian noise, which aggregator "
            f"{spec.canonical()['aggregator']['name']!r} tests for; choose another aggregator"
            + (f", such as {name!r}" if name in AGGREGATORS else "")
        )
    if aggregator.tests_noise and spec.sigma == 0:
        raise SpecError(
            f"sigma = 0.0: leaves no noise, which aggregator {spec.canonical()['aggregator']['name']!r} tests for; "
            "choose another aggregator, such as 'mean'"
        )
    if aggregator.follows_workers and not worker.fresh:
        raise SpecError(
            f"worker = {spec.canonical()['worker']['name']!r}: its noise is not fresh in every round, which aggregator "
            f"{spec.canonical()['aggregator']['name']!r} tests for; choose another worker, such as 'clipped'"
        )
    try:
        aggregator.check(workers)
    except SpecError as error:
        raise SpecError(f"aggregator {spec.canonical()['aggregator']['name']!r}: {error}") from None


def _ceil(value: float) -> int:
    """Up to the next whole number, at least 1, without what floating point adds (0.07 * 100 is above 7)."""
    return max(1, math.ceil(round(value, 9)))
