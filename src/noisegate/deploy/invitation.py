"""What comes back to a worker that asked to take part: its certificate, where the server is, what the run asks for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.catalog import typed
from noisegate.checks import plain
from noisegate.deploy.fingerprints import server_fingerprint
from noisegate.deploy.layout import to_toml
from noisegate.errors import SpecError
from noisegate.features import catalog_features
from noisegate.federation.keys import public_key
from noisegate.federation.roster import checked_size
from noisegate.federation.spending import Spending, price
from noisegate.privacy import Cost
from noisegate.settings import read_settings

MARGIN = 1e-6
"""By how much, as a share, a policy's smallest sigma lies below what the terms say."""

KINDS: dict[str, Any] = {
    **dict.fromkeys(("name", "server", "key", "title", "model", "certificate", "authority"), str),
    **dict.fromkeys(("classes", "rounds", "batch", "declared", "parameters"), int),
    **dict.fromkeys(("sigma", "epsilon", "delta"), float),
}

OPTIONAL: dict[str, Any] = {"size": int, "features": str | dict}
"""What an invitation may have beside that."""


@dataclass(frozen=True)
class Invitation:
    """What comes back for a request. key: the server's public key, in hexadecimal. The rest is what its run asks.

    size: the public number of examples that the roster lists the worker with; 0 if it lists none.
    features: what the worker turns its own examples into; empty if nothing.
    """

    name: str
    server: str
    key: str
    title: str
    model: str
    classes: int
    rounds: int
    batch: int
    declared: int
    parameters: int
    sigma: float
    epsilon: float
    delta: float
    certificate: str
    authority: str
    size: int = 0
    features: str | dict[str, Any] = ""

    def cost(self) -> float:
        """The epsilon of all its rounds, as a ledger reckons it, whatever the invitation states."""
        each = Cost(self.declared, self.batch, "poisson", self.sigma, self.rounds)
        return price([Spending(each, self.parameters, self.rounds)], self.delta)

    @classmethod
    def read(cls, path: Path) -> "Invitation":
        """The invitation in a file. SpecError if it is none."""
        found, where = read_settings(path), plain(path)
        if wrong := set(KINDS).symmetric_difference(set(found) - set(OPTIONAL)):
            said = plain(", ".join(sorted(wrong)))[: checks.MOST_SHOWN]
            raise SpecError(f"{where}: is not an invitation ({said} missing or unknown); ask the operator for one")
        kinds = KINDS | OPTIONAL
        made = cls(**{key: typed(f"{where}: {key}", value, kinds[key]) for key, value in found.items()})
        if made.size:
            checked_size(made.size, f"{where}: size")
        catalog_features(made.features, where)
        public_key(made.key, f"{where}: key")
        return made

    def fingerprint(self) -> str:
        """The server's fingerprint: of its key and of the authority."""
        return server_fingerprint(bytes.fromhex(self.key), self.authority.encode())

    def policy(self) -> bytes:
        """A policy that allows what this run asks for, and no more, as a file."""
        asked = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "server": [self.key],
            "sigma": self.sigma * (1 - MARGIN),
            "batch": self.batch,
            "declared": self.declared,
            "parameters": self.parameters,
            **({"size": self.size} if self.size else {}),
        }
        comment = "What this worker allows, whatever a server asks: epsilon and delta hold for all runs together.\n"
        return to_toml(asked, comment + "Made of what one run asks for; change it to what you allow.")

    def to_toml(self) -> bytes:
        """The invitation as a file."""
        comment = (
            f"For the worker {self.name}: noisegate federation accept DIR THIS-FILE\n"
            f"Nothing here is secret. Compare the server's fingerprint by telephone: {self.fingerprint()}"
        )
        names = [*KINDS, *(name for name in OPTIONAL if getattr(self, name))]
        return to_toml({key: getattr(self, key) for key in names}, comment)
