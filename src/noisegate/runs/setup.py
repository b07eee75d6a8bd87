"""From a spec to a federation: data dealt out, noise calibrated, everyone in place."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from noisegate import data
from noisegate.aggregators import AGGREGATORS
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.entropy import Secret
from noisegate.errors import DataError, SpecError
from noisegate.models import build_model, check_module
from noisegate.protocol import Mechanism, Server
from noisegate.roles import Aggregator, Worker
from noisegate.runs.identity import digest_data, digest_run
from noisegate.runs.promise import Privacy, Roster, make_promise, signs_of
from noisegate.runs.spec import Spec
from noisegate.sampling import SAMPLINGS, Sampling
from noisegate.simulate import Adversary, Federation, Schedule, Workers
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
    """A run that is ready to start."""

    federation: Federation
    privacy: Privacy
    x_test: Tensor
    y_test: Tensor
    evaluate_every: int
    dataset: str
    model: str


class SharedData:
    """Data that several runs use, read once and brought to the device once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, int], Dataset] = {}
        self._digests: dict[int, tuple[Dataset, str]] = {}
        self._moved: dict[tuple[int, torch.device], tuple[Dataset, tuple[Tensor, ...]]] = {}

    def load(self, spec: Spec) -> Dataset:
        """The data of a spec. Those of a user's own file are split by the seed; the others are the same for all."""
        key = spec.dataset, spec.seed if data.own_path(spec.dataset) else 0
        if key not in self._read:
            self._read[key] = data.load(spec.dataset, stream(spec.seed, "test-split"))
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
) -> Setup:
    """Everything a run needs. `dataset` and `module` take the place of the spec's names.

    label: stands for the code of module and loss, where it cannot be read (`noisegate.runs.identity`).

    shared: data that other runs brought to the device, and a place for those that this one brings.
    """
    shared = shared or SharedData()
    device = compute.resolve()
    defaults = data.SOURCES.get(spec.dataset) if dataset is None else None
    dataset = dataset or shared.load(spec)
    honest = spec.workers or (defaults.workers if defaults else DEFAULT_WORKERS)
    byzantine = spec.count_byzantine(honest)
    if honest + byzantine > MOST_WORKERS:
        raise SpecError(
            f"byzantine = {spec.byzantine}: makes {byzantine} Byzantine workers beside {honest} honest ones, more than "
            f"{MOST_WORKERS} in all; lower byzantine or workers"
        )
    attack = spec.build_attack()
    attack.check(honest, byzantine)
    aggregator = spec.build_aggregator()
    believed = honest if spec.gamma is None else _ceil(spec.gamma * (honest + byzantine))
    worker = spec.build_worker()
    _check_aggregator(spec, aggregator, worker, honest + byzantine)

    # The server's examples are in no worker's data and not in the test set.
    source = shared.load_auxiliary(spec.auxiliary_from) if spec.auxiliary_from else dataset
    if source.shape != dataset.shape or source.classes < dataset.classes:
        raise SpecError(
            f"auxiliary_from = {spec.auxiliary_from!r}: has examples of shape {source.shape} in {source.classes} "
            f"classes, and {dataset.name!r} {dataset.shape} in {dataset.classes}; choose a data set like it"
        )
    aux, pool = data.hold_out(source.y, dataset.classes, spec.auxiliary, stream(spec.seed, "auxiliary"))
    pool = pool if source is dataset else torch.arange(len(dataset.y))
    parts, lying = _deal(spec, pool, dataset.y[pool], honest, byzantine)
    sizes = [len(part) for part, lies in zip(parts, lying.tolist(), strict=True) if not lies]
    declared = spec.declared or round(sum(sizes) / honest)
    sampling: Sampling = SAMPLINGS[spec.sampling](spec.batch)
    if (fewest := min(sampling.priced(sizes, declared))) < spec.batch:
        raise DataError(
            f"batch = {spec.batch}: the smallest of {honest} workers has only {fewest} examples; lower batch or workers"
        )
    epochs = defaults.epochs if defaults else DEFAULT_EPOCHS
    rounds = spec.rounds or math.ceil(epochs * declared / spec.batch)

    if module is None:
        name = spec.model or (defaults.model if defaults else DEFAULT_MODEL)
        module = build_model(name, dataset.shape, dataset.classes, stream(spec.seed, "weights"))
    else:
        name = type(module).__name__
        check_module(module)
    model = FlatModel(module, loss, device)
    promise = make_promise(spec, sampling, Roster(sizes, declared, rounds, signs_of(worker, model.d)))
    promise = promise.with_copies(_copies(spec, parts, lying))
    examples = shared.digest(dataset), shared.digest(source)
    made_of = digest_run(examples, module, loss, (attack, aggregator, worker), label)
    x, y, x_test, y_test = shared.on(device, dataset)
    surrogate = _surrogate(spec, parts, lying, dataset).to(device)
    known = _held_by_liars(spec, parts, lying, "known")[:MOST_KNOWN].to(device)
    scratch = compute.scratch()
    chunk = max(1, min(compute.chunk, scratch // (4 * GRADIENT_COPIES * model.d)))
    company = Company(spec.batch, honest + byzantine, scratch, spec.seed)
    mechanism = Mechanism(
        model=model,
        sums=choose_sums(model, model.initial(), x, y, chunk=chunk, company=company),
        worker=worker,
        sampling=sampling,
        sigma=promise.sigma,
        declared=declared,
    )
    server = Server(
        mechanism=mechanism,
        aggregator=aggregator,
        aux_x=source.x[aux].to(device),
        aux_y=source.y[aux].to(device),
        workers=honest + byzantine,
        believed_honest=believed,
        rate=spec.rate * promise.sigma_base / promise.sigma if promise.sigma else spec.rate,
        scratch=scratch,
    )
    # An adversary's examples may not be as many of every class.
    imagined = replace(server, aux_x=x[surrogate], aux_y=y[surrogate], balanced=False)
    holdings = nn.utils.rnn.pad_sequence(parts, batch_first=True).to(device)
    sizes_of_all = torch.tensor([len(part) for part in parts], device=device)
    # What a secret run draws by name (ties, attackers' numbers) must not follow from private data: it shows.
    run_name = spec.name() if spec.secret else f"{spec.name()}/{made_of}"
    federation = Federation(
        workers=Workers(mechanism, x, y, holdings, sizes_of_all, scratch),
        server=server,
        adversary=Adversary(attack, lying.to(device), dataset.classes, imagined, x[known], y[known]),
        schedule=Schedule(rounds, spec.seed, run_name, Secret(device) if spec.secret else None, spec.absent or 0.0),
    )
    every = spec.evaluate_every or max(1, rounds // EVALUATIONS)
    return Setup(federation, promise, x_test, y_test, every, dataset.name, name)


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


def _deal(spec: Spec, pool: Tensor, y: Tensor, honest: int, byzantine: int) -> tuple[list[Tensor], Tensor]:
    """(each worker's examples, who lies), by position. Positions are shuffled: no aggregator may profit from an order.

    Honest workers share the pool. Byzantine ones hold as much as an honest one, drawn from the whole pool.
    """
    parts = [pool[part] for part in _partition(spec, y, honest)]
    rng = stream(spec.seed, "byzantine-data")
    parts += [pool[torch.randperm(len(pool), generator=rng)[: len(pool) // honest]] for _ in range(byzantine)]
    places = torch.randperm(len(parts), generator=stream(spec.seed, "positions"))
    return [parts[place] for place in places.tolist()], places >= honest


def _surrogate(spec: Spec, parts: list[Tensor], lying: Tensor, dataset: Dataset) -> Tensor:
    """Which examples an adversary takes for the server's: as many of each class, of those that its workers hold."""
    pool = _held_by_liars(spec, parts, lying, "surrogate")
    return torch.cat([pool[dataset.y[pool] == label][: spec.auxiliary] for label in range(dataset.classes)])


def _held_by_liars(spec: Spec, parts: list[Tensor], lying: Tensor, name: str) -> Tensor:
    """Every example that a Byzantine worker holds, once, in the random order of that name; none if nobody lies."""
    held = [part for part, lies in zip(parts, lying.tolist(), strict=True) if lies]
    pool: Tensor = torch.cat([torch.zeros(0, dtype=torch.int64), *held]).unique()
    return pool[torch.randperm(len(pool), generator=stream(spec.seed, name))]


def _partition(spec: Spec, y: Tensor, honest: int) -> list[Tensor]:
    rng = stream(spec.seed, "partition")
    if spec.dirichlet is not None:
        return data.dirichlet(y, honest, spec.dirichlet, rng, smallest=spec.batch)
    return data.non_iid(y, honest, rng) if spec.non_iid else data.iid(y, honest, rng)


def _copies(spec: Spec, parts: list[Tensor], lying: Tensor) -> int:
    """How many workers that follow the protocol hold the same example, at most.

    Byzantine workers hold examples drawn from the whole pool. Where nobody attacks they are honest workers more.
    """
    honest = spec.canonical()["attack"]["name"] == "none"
    held = [part for part, lies in zip(parts, lying.tolist(), strict=True) if honest or not lies]
    return int(torch.cat(held).bincount().max())


def _ceil(value: float) -> int:
    """Up to the next whole number, at least 1, without what floating point adds (0.07 * 100 is above 7)."""
    return max(1, math.ceil(round(value, 9)))
