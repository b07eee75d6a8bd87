"""What a server asks of every worker in a run: model size, sampling, noise, bound. A worker checks all of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from noisegate import checks
from noisegate.catalog import build, settle, typed
from noisegate.errors import SpecError
from noisegate.federation.wire import HEADER, NUMBER
from noisegate.privacy import Cost
from noisegate.protocol import MOST_CLAIMED, Mechanism
from noisegate.roles import Worker as Bound
from noisegate.sampling import Poisson
from noisegate.vectors import FlatModel
from noisegate.workers import WORKERS

MOST_ROUNDS = 1_000_000
MOST_PARAMETERS = (2**31 - 1 - HEADER.size) // NUMBER.itemsize
"""gRPC carries no longer message."""

MOST_DECLARED = 2**32
"""A draw has 53 random bits: at a rate of 2^-32 it is off by at most one part in 2^21, and by more below that."""

MOST_TITLE = 100


@dataclass(frozen=True)
class Terms:
    """The terms of a run. They travel as JSON, so each value is checked as if a stranger had written it.

    run: 64 hexadecimal digits, never used for another run. title: for people. rounds: how many the run has. parameters:
    d, the size of the model. batch, declared: the sampling rate is batch / declared (Poisson). sigma: the noise
    multiplier. worker: the bound on a contribution, a name of `noisegate list workers` and its settings.
    """

    run: str
    title: str
    rounds: int
    parameters: int
    batch: int
    declared: int
    sigma: float
    worker: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "normalized"})

    def __post_init__(self) -> None:
        if len(self.run) != 64 or set(self.run) - set("0123456789abcdef"):
            raise checks.refuse("run", self.run, "must be 64 hexadecimal digits")
        if len(self.title) > MOST_TITLE or not self.title.isprintable():
            raise checks.refuse("title", self.title, f"must be at most {MOST_TITLE} printable characters")
        checks.count(rounds=self.rounds, parameters=self.parameters, batch=self.batch, declared=self.declared)
        for name, most in (("rounds", MOST_ROUNDS), ("parameters", MOST_PARAMETERS), ("declared", MOST_DECLARED)):
            if getattr(self, name) > most:
                raise checks.refuse(name, getattr(self, name), f"must be at most {most}")
        checks.moderate(sigma=self.sigma)
        Poisson(self.batch).rate(self.declared)
        bound = self.bound()
        checks.moderate(**{"worker.threshold": bound.sensitivity})  # else contributions round by more than they are
        if bound.mechanism != "gaussian" or not bound.noisy or not bound.fresh:
            raise checks.refuse(
                "worker", self.worker["name"], "needs fresh Gaussian noise; choose normalized or clipped"
            )

    @classmethod
    def of(cls, found: Any) -> "Terms":
        """The terms in a JSON object. SpecError if they are not well-formed."""
        if not isinstance(found, dict):
            raise SpecError(f"terms: must be a table, not {type(found).__name__}")
        known = {entry.name for entry in dataclasses.fields(cls)}
        if wrong := known.symmetric_difference(found):
            raise SpecError(f"terms: {checks.plain(', '.join(sorted(map(str, wrong)))[:200])} missing or unknown")
        kinds = {"run": str, "title": str, "sigma": float, "worker": dict}
        return cls(**{name: typed(name, value, kinds.get(name, int)) for name, value in found.items()})

    def as_dict(self) -> dict[str, Any]:
        """The terms as a JSON object."""
        return dataclasses.asdict(self)

    def bound(self) -> Bound:
        """How a contribution is bounded. Names come from the catalog only: a wire may not name code to be loaded."""
        name = self.worker.get("name")
        checks.one_of(WORKERS, worker=name)
        bound: Bound = build("worker", settle("worker", self.worker, WORKERS), WORKERS)
        return bound

    def mechanism(self, model: FlatModel, examples: tuple[Tensor, Tensor], size: int = 0) -> Mechanism:
        """How examples become a private upload under these terms. size: the public one of a worker, if it has one.

        The noise allows for the longest sums that a size counts for, at every worker, so that the server knows it. Only
        a worker that is larger still has a hair more.
        """
        most = max(MOST_CLAIMED, size / self.declared)
        return Mechanism.of(model, examples, self.bound(), Poisson(self.batch), self.sigma, self.declared, most)

    def cost(self, rounds: int) -> Cost:
        """What so many rounds cost an example."""
        return Cost(self.declared, self.batch, "poisson", self.sigma, rounds)
