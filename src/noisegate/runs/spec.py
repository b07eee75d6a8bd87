"""What a run is: one flat, frozen record. From TOML, from flags, from Python; one canonical form, one name."""

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from noisegate import checks
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS, Dormant
from noisegate.attacks.dormant import ASLEEP
from noisegate.catalog import is_own, settle, typed
from noisegate.data import Columns
from noisegate.errors import SpecError
from noisegate.features import Features, build_features, check_request
from noisegate.privacy import ACCOUNTANTS, delta_of
from noisegate.roles import Aggregator, Attack, Worker
from noisegate.runs.measures import check_names
from noisegate.runs.objects import as_part, built, described, named_model
from noisegate.runs.usual import DEFAULTS, partner_of, usual_of, usual_with
from noisegate.sampling import EQUAL, SAMPLINGS, settled_shares
from noisegate.settings import read_settings, toml
from noisegate.workers import WORKERS

Part = str | Mapping[str, Any]
"""A name, or a table with `name` and settings."""

BEST, HEAD = "fortified", "linear"
"""The aggregator unless told otherwise, and the model where there are features."""

MOST_ROUNDS = 10_000_000
FLAGS_ONLY = ("device", "threads", "memory", "out", "resume", "json", "baselines")
LATER = (
    *("auxiliary_from", "declared", "secret", "absent", "redeal", "features", "loss"),
    *("label_column", "worker_column", "metrics", "class_shares"),
)
"""Settings that earlier versions did not have."""

PARTS = {"attack": ATTACKS, "aggregator": AGGREGATORS, "worker": WORKERS}
ROLES = {"attack": Attack, "aggregator": Aggregator, "worker": Worker}


@dataclass(frozen=True)
class Spec:
    """A run, but for where and how fast it computes. None means: the data set's default, or computed.

    dataset: a name of `noisegate list datasets` or a path: of an .npz, a .csv, or a folder with one for each worker.
    label_column, worker_column: of a .csv; unless given, the last column and `worker`. model: a name of `noisegate list
    models`, a torch module, or your own: `package.module:build` or `file.py:build`. loss: your own likewise; the cross
    entropy unless given. attack, aggregator, worker: a name, a table with `name` and settings, or an object. An
    aggregator may also be a function of the uploads (m, d) that gives a vector (d,). Of an object that those
    cannot tell, a file says only that it was given.
    epsilon, delta: the budget of every worker; 2 unless given, and 1e-5 or 1 / (10 declared), if that is less.
    delta = "paper" is the paper's, declared^-1.1. declared: the public number of examples that every worker is taken to
    hold, from which the sampling rate comes; the honest workers' mean unless given. sigma: noise multiplier, instead of
    epsilon or beside it. sigma_base: the multiplier of epsilon 2, by which the rate scales. rate: the base rate eta_b.
    workers: honest ones. byzantine: their share of all workers. attack_start: share of the run before the attack
    begins; attack_asleep: what it does until then. gamma: the share the server believes honest. non_iid: the paper's
    partition; dirichlet: the concentration of another. auxiliary: the server's examples per class; auxiliary_from: the
    data set that they are from, if not the workers'. A sigma of 0 is no noise and no privacy.
    secret: noise and batches come from the operating system, and nobody can draw them again: for what is published.
    absent: the probability that a worker misses a round. Its batch is drawn and paid for, but its upload is missing.
    batch, worker, rate: 16, "normalized" and 0.2, unless the data set has others (digits), or the aggregator goes with
    others (`guerraoui` and its like), which come first. batch = "equal" is sampling = "equal" with the usual batch.
    sampling: "poisson" draws at one rate for all, so that who holds more draws more; "equal" gives every worker the
    same expected batch, at a rate of its own; "balanced" draws every class equally often, by its public share in
    class_shares (the data's unless given; a secret run must give them). redeal: deal the examples anew although the
    data say who holds what.
    features: what examples are turned into first, a name of `noisegate list features` or the path of your own; the
    model is then `linear` unless given. It has a worker and a rate of its own, as data sets and aggregators have.
    metrics: what is measured in the end beside the accuracy: names of metrics, or paths of your own.
    """

    dataset: str = "digits"
    model: str | nn.Module | None = None
    epsilon: float | None = None
    delta: float | Literal["paper"] | None = None
    sigma: float | None = None
    sigma_base: float | None = None
    accountant: str = "pld"
    sampling: str = "poisson"
    batch: int = None  # type: ignore[assignment]
    worker: Part | Worker = None  # type: ignore[assignment]
    rate: float = None  # type: ignore[assignment]
    workers: int | None = None
    byzantine: float = 0.6
    attack: Part | Attack = "label-flip"
    attack_start: float = 0.0
    attack_asleep: str = "behave"
    aggregator: Part | Aggregator | Callable[[Tensor], Tensor] = BEST
    gamma: float | None = None
    rounds: int | None = None
    non_iid: bool = False
    dirichlet: float | None = None
    auxiliary: int = 2
    evaluate_every: int | None = None
    seed: int = 1
    auxiliary_from: str | None = None
    declared: int | None = None
    secret: bool = False
    absent: float | None = None
    redeal: bool = False
    features: Part | None = None
    loss: str | None = None
    label_column: str | None = None
    worker_column: str | None = None
    metrics: list[str] | None = None
    class_shares: list[float] | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Spec)
        object.__setattr__(self, "metrics", check_names(self.metrics))
        self._settle_batch()
        for name, table in PARTS.items():
            object.__setattr__(self, name, as_part(name, getattr(self, name), table, ROLES[name]))
        usual = DEFAULTS | usual_with(self.head()) | usual_of(self.dataset) | partner_of(self.aggregator)
        for name in DEFAULTS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual[name])
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, typed(name, getattr(self, name), hints[name]))
        for name, table in PARTS.items():  # one form for each part, so that equal specs compare equal
            if isinstance(part := getattr(self, name), str | Mapping):
                object.__setattr__(self, name, _shortest(settle(name, part, table)))
        if self.features is not None:
            object.__setattr__(self, "features", _shortest(check_request(self.features)))
        if self.loss is not None and not is_own(self.loss):
            raise checks.refuse("loss", self.loss, "is no path of your own loss; write file.py:name")
        checks.one_of(ASLEEP, attack_asleep=self.attack_asleep)
        if self.attack_start == 0:
            object.__setattr__(self, "attack_asleep", "behave")  # it never sleeps
        for name in ("epsilon", "dirichlet"):
            _optional(checks.positive, name, getattr(self, name))
        _optional(checks.moderate, "sigma_base", self.sigma_base)
        if self.sigma == 0 and self.secret:
            raise checks.refuse("secret", True, "needs noise, and sigma = 0 is none; leave one of them out")
        if self.sampling == EQUAL and self.secret:
            raise checks.refuse("sampling", EQUAL, "draws at rates that follow the data; a secret run uses poisson")
        if self.sigma != 0:
            _optional(checks.moderate, "sigma", self.sigma)
        elif self.epsilon is not None:
            raise checks.refuse("epsilon", self.epsilon, "cannot be kept with sigma = 0; leave one of them out")
        for name in ("workers", "rounds", "evaluate_every", "declared"):
            _optional(checks.count, name, getattr(self, name))
        if self.rounds is not None and self.rounds > MOST_ROUNDS:
            raise checks.refuse("rounds", self.rounds, f"must be at most {MOST_ROUNDS}")
        if self.sampling == "fixed" and self.accountant == "pld":
            raise checks.refuse("accountant", "pld", 'cannot price sampling = "fixed"; use accountant = "rdp"')
        delta_of(self.delta, self.declared or 2)
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise checks.refuse("gamma", self.gamma, f"must be above 0 and at most 1{checks.as_share(self.gamma)}")
        checks.one_of(ACCOUNTANTS, accountant=self.accountant)
        checks.one_of(SAMPLINGS, sampling=self.sampling)
        shares = settled_shares(self.class_shares, self.sampling, self.secret)
        object.__setattr__(self, "class_shares", shares)
        checks.count(batch=self.batch, auxiliary=self.auxiliary)
        checks.moderate(rate=self.rate)
        checks.fraction(byzantine=self.byzantine)
        checks.share(attack_start=self.attack_start)
        _optional(checks.fraction, "absent", self.absent)
        if self.absent == 0:
            object.__setattr__(self, "absent", None)  # the same run
        if self.non_iid and self.dirichlet is not None:
            raise SpecError(f"dirichlet = {self.dirichlet}: cannot be combined with non_iid; choose one partition")
        self.build_attack(), self.build_aggregator(), self.build_worker()

    def _settle_batch(self) -> None:
        """The word `equal` for a batch names a sampling, and leaves its size at the usual one."""
        asked: Any = self.batch
        if asked != EQUAL:
            return
        if self.sampling not in ("poisson", EQUAL):
            raise checks.refuse("batch", EQUAL, f"is drawn by poisson, not {self.sampling!r}; leave one of them out")
        object.__setattr__(self, "sampling", EQUAL)
        object.__setattr__(self, "batch", None)

    def build_attack(self) -> Attack:
        """The attack as an object, asleep until `attack_start` if that is above 0."""
        attack: Attack = self._build("attack")
        if self.attack_start > 0:
            return Dormant(attack, self.attack_start, self.attack_asleep)  # type: ignore[arg-type]
        return attack

    def build_aggregator(self) -> Aggregator:
        """The aggregator as an object."""
        aggregator: Aggregator = self._build("aggregator")
        return aggregator

    def build_worker(self) -> Worker:
        """The worker as an object."""
        worker: Worker = self._build("worker")
        return worker

    def build_features(self) -> Features | None:
        """The features as a function; None if examples are taken as they are. A user's own code is loaded here."""
        return None if self.features is None else build_features(self.features)

    @property
    def columns(self) -> Columns:
        """What the columns of a table are."""
        return Columns(self.label_column, self.worker_column)

    def head(self, usual: str | None = None) -> str | None:
        """The name of the model. usual: of the data set."""
        return named_model(self.model) or (usual if self.features is None else HEAD)

    def _build(self, what: str) -> Any:
        return built(what, getattr(self, what), PARTS[what], ROLES[what])

    def given(self) -> dict[str, Any]:
        """The objects that no file can hold, by the names of their settings: parts, and a module with its weights."""
        parts = {name: getattr(self, name) for name in PARTS}
        found = {name: part for name, part in parts.items() if not isinstance(part, str | Mapping)}
        return found | ({"model": self.model} if isinstance(self.model, nn.Module) else {})

    def count_byzantine(self, honest: int) -> int:
        """M = floor(H p / (1 - p) + 1/2)."""
        return math.floor(honest * self.byzantine / (1 - self.byzantine) + 0.5)

    def canonical(self) -> dict[str, Any]:
        """Every setting; parts as tables. Equal specs have equal canonical forms."""
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in LATER:
            if settings[name] in (None, False, 0.0):  # a run's name is what it was before there was such a setting
                del settings[name]
        for name in (*PARTS, *(("features",) if "features" in settings else ())):
            part = settings[name]
            settings[name] = (
                {"name": part}
                if isinstance(part, str)
                else dict(part)
                if isinstance(part, Mapping)
                else described(part)
            )
        settings["model"] = named_model(self.model)
        return settings

    def name(self) -> str:
        """Data set and the first 12 digits of the canonical form's sha256: the run's default folder."""
        return name_of(self.canonical())

    def to_toml(self) -> str:
        """The spec as a file that `read_spec` reads back."""
        settings = {key: value for key, value in self.canonical().items() if value is not None}
        return "".join(f"{key} = {toml(value)}\n" for key, value in settings.items())


def name_of(canonical: Mapping[str, Any]) -> str:
    """The name of the run with this canonical form.

    Runs of the paper's delta keep their names: before there was a choice, no delta meant the paper's.
    """
    delta = canonical.get("delta")
    settings = {**canonical, "delta": "default" if delta is None else None if delta == "paper" else delta}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{Path(canonical['dataset']).stem[:60]}-{digest[:12]}"  # a system's names have an end


def make_spec(settings: Mapping[str, Any], where: str = "spec") -> Spec:
    """A Spec from loose settings; an unknown key is an error that names it."""
    known = [entry.name for entry in dataclasses.fields(Spec)]
    for key, value in settings.items():
        if key in FLAGS_ONLY:
            raise SpecError(f"{where}: {key} = {value!r}: does not belong in a spec; give the flag --{key}")
        if key not in known:
            raise SpecError(
                f"{where}: {key} = {value!r}: unknown setting{checks.guess(key, known)}; choose from {', '.join(known)}"
            )
    return Spec(**settings)


def read_spec(path: Path) -> Spec:
    """The spec in a TOML file."""
    return make_spec(read_settings(path), str(path))


def _shortest(part: dict[str, Any]) -> Part:
    """A part without settings is its name."""
    return str(part["name"]) if len(part) == 1 else part


def _optional(check: Any, name: str, value: Any) -> None:
    if value is not None:
        check(**{name: value})
