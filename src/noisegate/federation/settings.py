"""What a server is told: the run, its rounds, whom to wait for and how long. The file is `federation.toml`."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from noisegate import checks
from noisegate.aggregators import AGGREGATORS
from noisegate.catalog import build, settle, typed
from noisegate.errors import SpecError
from noisegate.features import catalog_features
from noisegate.federation.terms import Terms
from noisegate.models import MODELS
from noisegate.roles import Aggregator
from noisegate.settings import read_settings

LONGEST = 7 * 24 * 3600.0
"""The longest time that a setting can be, in seconds."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one run at the server.

    run: 64 hexadecimal digits, new for each run. rounds: how many round numbers the run has; one that is lost to a
    crash is not used again. batch, declared, sigma, worker: the terms (`federation.terms`). believed_honest: how many
    workers the server believes honest. quorum: how many must be connected for a round to begin. An adversary that is
    left out must not be able to break it, so it is at most the number of honest workers.

    features: of the catalog, which everyone computes of their own examples; without a name there are none. rate,
    aggregator: of a step. title, epsilon, delta: for people. listen: "host:port". model, shape, classes: of the
    catalog's model; a program may bring its own module instead. gather: seconds that the first round waits for all
    workers; then a quorum is enough. deadline: seconds that a round waits at most. least: seconds that every round may
    take, so choose it above what an honest worker needs. stall: seconds beyond `least` that all rounds together may
    take. So workers can hold up a run by at most stall + rounds * least. evaluate_every: rounds between two looks at
    the accuracy. seed: of ties and first weights; from the operating system unless given. metrics: a local port for
    Prometheus, 0 for none. folder: where the file was; keys, certificates, roster and state are beside it.
    """

    run: str
    rounds: int
    batch: int
    declared: int
    sigma: float
    believed_honest: int
    quorum: int
    rate: float = 0.2
    title: str = ""
    listen: str = "127.0.0.1:7443"
    model: str = "mlp"
    shape: tuple[int, ...] = ()
    classes: int = 0
    epsilon: float | None = None
    delta: float | None = None
    worker: str | dict[str, Any] = "normalized"
    aggregator: str | dict[str, Any] = "fortified"
    gather: float = 60.0
    deadline: float = 30.0
    least: float = 3.0
    stall: float = 600.0
    evaluate_every: int = 10
    seed: int | None = None
    metrics: int = 0
    features: str | dict[str, Any] = ""
    folder: Path = field(default=Path("."), compare=False)

    def __post_init__(self) -> None:
        self.terms(parameters=1)
        checks.count(believed_honest=self.believed_honest, quorum=self.quorum, evaluate_every=self.evaluate_every)
        checks.moderate(rate=self.rate)
        checks.positive(deadline=self.deadline, least=self.least)
        for name, seconds in (("gather", self.gather), ("deadline", self.deadline), ("stall", self.stall)):
            if not 0 <= seconds <= LONGEST:
                raise checks.refuse(name, seconds, f"must be 0 to {LONGEST:g} seconds")
        if self.least > self.deadline:
            raise checks.refuse("least", self.least, f"must be at most the deadline, {self.deadline:g}")
        if self.metrics and not 1024 <= self.metrics <= 65535:
            raise checks.refuse("metrics", self.metrics, "must be a port from 1024 to 65535, or 0 for none")
        if self.seed is not None and not 0 <= self.seed <= checks.LARGEST:
            raise checks.refuse("seed", self.seed, f"must be 0 to {checks.LARGEST}")
        checks.one_of(MODELS, model=self.model)
        catalog_features(self.features)
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if value is not None:
                checks.positive(**{name: value})
        self.address()
        named = self.aggregator if isinstance(self.aggregator, str) else self.aggregator.get("name")
        if ":" not in str(named):  # code of others is loaded by the server alone, not by who reads its folder
            self.build_aggregator()

    @classmethod
    def read(cls, path: Path) -> "ServerSettings":
        """The settings in a TOML file. SpecError if one is unknown, missing or out of range."""
        found, where = read_settings(path), checks.plain(path)
        hints = typing.get_type_hints(cls)
        known = {entry.name: entry for entry in dataclasses.fields(cls) if entry.name != "folder"}
        for key in found:
            if key not in known:
                choices = ", ".join(known)
                raise SpecError(
                    f"{where}: {checks.plain(key)}: unknown{checks.guess(key, known)}; choose from {choices}"
                )
        for key, entry in known.items():
            if key not in found and entry.default is dataclasses.MISSING:
                raise SpecError(f"{where}: {key}: is missing, and a server must be told")
        given = {key: typed(key, value, hints[key]) for key, value in found.items() if key != "shape"}
        shape = typed("shape", found.get("shape", []), list)
        return cls(**given, shape=tuple(typed("shape", size, int) for size in shape), folder=path.parent)

    def terms(self, parameters: int) -> Terms:
        """What is asked of every worker, for a model of that size."""
        worker = {"name": self.worker} if isinstance(self.worker, str) else dict(self.worker)
        asked = (self.run, self.title, self.rounds, parameters, self.batch, self.declared, self.sigma)
        return Terms(*asked, worker=worker)

    def model_shape(self) -> tuple[int, ...]:
        """The shape of what the model is given: of examples, or of their features."""
        features = catalog_features(self.features)
        return self.shape if features is None else tuple(features(torch.zeros(1, *self.shape)).shape[1:])

    def build_aggregator(self) -> Aggregator:
        """What judges uploads."""
        aggregator: Aggregator = build("aggregator", self.aggregator, AGGREGATORS)
        return aggregator

    def settled_aggregator(self) -> dict[str, Any]:
        """The aggregator's name and settings in one form for equal ones."""
        return settle("aggregator", self.aggregator, AGGREGATORS)

    def address(self) -> tuple[str, int]:
        """Host and port to listen on. Port 0 takes any free one."""
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) < 2**16 and host.isprintable()):
            raise checks.refuse("listen", self.listen, 'must be "host:port", such as "0.0.0.0:7443"')
        return host, int(port)

    @property
    def state(self) -> Path:
        """The folder that the server writes to."""
        return self.folder / "state"
