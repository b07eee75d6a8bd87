"""What a worker allows, whatever a server asks."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.catalog import typed
from noisegate.errors import PolicyError, SpecError
from noisegate.federation.keys import public_key
from noisegate.federation.terms import Terms
from noisegate.settings import read_settings

MOST_HELD = 2
"""How many times the least declared number, or its own listed size, a worker may hold."""

SIZE_OFF = 0.1
"""By how much, as a share, a worker's examples may differ from its listed size before it is told. A listed size that
followed every example would not be public."""


@dataclass(frozen=True)
class Policy:
    """A worker's own limits. A server cannot change them, and does not learn them.

    epsilon, delta: the most that all runs together may cost an example of this data set. server: the public keys
    (64 hexadecimal digits each) of the servers whose terms, models and receipts are believed. sigma: the smallest noise
    multiplier. batch: the largest batch. declared: the smallest declared number of examples; a smaller one draws
    examples more often. parameters: the largest model. size: the public number of examples that the roster lists this
    worker with; 0 if it lists none. A larger one lets the worker hold more than the others, and pays for longer sums.
    """

    epsilon: float
    delta: float
    server: tuple[str, ...]
    sigma: float = 0.5
    batch: int = 1024
    declared: int = 1
    parameters: int = 10_000_000
    size: int = 0

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon, delta=self.delta)
        checks.moderate(sigma=self.sigma)
        checks.count(batch=self.batch, declared=self.declared, parameters=self.parameters)
        if self.size:
            checks.count(size=self.size)
        if not self.delta < 1:
            raise checks.refuse("delta", self.delta, "must be above 0 and below 1")
        if not self.server:
            raise checks.refuse("server", self.server, "must name the public key of at least one server")
        for key in self.server:
            public_key(key, "server")

    @classmethod
    def read(cls, path: Path | str) -> "Policy":
        """The policy in a TOML file."""
        found = read_settings(Path(path))
        known: dict[str, Any] = {entry.name: float for entry in fields(cls)}
        known |= {"server": list, "batch": int, "declared": int, "parameters": int, "size": int}
        for key in found:
            if key not in known:
                where = checks.plain(path)
                raise SpecError(
                    f"{where}: {checks.plain(key)}: unknown{checks.guess(key, known)}; choose from {', '.join(known)}"
                )
        for key in ("epsilon", "delta", "server"):
            if key not in found:
                raise SpecError(f"{checks.plain(path)}: {key}: is missing, and a policy must state it")
        given = {key: typed(key, value, known[key]) for key, value in found.items()}
        return cls(**given | {"server": tuple(given["server"])})

    def check(self, terms: Terms) -> None:
        """PolicyError if these terms ask for more than this worker allows. What they cost is the ledger's question."""
        for name, asked, allowed, most in (
            ("parameters", terms.parameters, self.parameters, True),
            ("batch", terms.batch, self.batch, True),
            ("sigma", terms.sigma, self.sigma, False),
            ("declared", terms.declared, self.declared, False),
        ):
            if asked > allowed if most else asked < allowed:
                word = "at most" if most else "at least"
                raise PolicyError(
                    f"{name} = {asked}: the server asks for it, and this worker's policy allows {word} {allowed}; "
                    "change the policy, or do not take part"
                )

    def check_data(self, held: int) -> None:
        """PolicyError if a worker with so many examples must not run under this policy, whoever asks.

        Sums are priced for about a batch of examples. A server that declares far fewer than there are draws far more,
        and their sum rounds by more than the noise allows for. This is not asked of terms: their answers would tell
        the number.
        """
        if held > MOST_HELD * max(self.declared, self.size):
            raise PolicyError(
                f"declared = {self.declared}: this worker holds more than {MOST_HELD} times as many examples; let its "
                "policy declare at least half of about as many as it holds, or state the size that it is listed with"
            )

    def doubts(self, held: int) -> list[str]:
        """What a worker with so many examples should be told. It is told here alone: answers would tell the number."""
        told = []
        if self.size and abs(held - self.size) > SIZE_OFF * self.size:
            told.append(
                f"it holds {held} examples and is listed with {self.size}; the server judges it by that number, so ask "
                "the operator to change it"
            )
        if self.delta * held > 1:
            told.append(
                f"its policy's delta, {self.delta:.3g}, is above 1 / {held}, which permits to hand out an example; "
                "choose a smaller one"
            )
        return told

    def trusts(self, key: bytes) -> bool:
        """Whether this is the public key of a server that is believed."""
        return key.hex() in self.server
