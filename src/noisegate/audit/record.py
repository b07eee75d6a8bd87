"""What an audit found."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from noisegate.audit.check import PARTS_LEVEL, WHOLE_LEVEL, Check
from noisegate.audit.claim import Claim
from noisegate.audit.whole import Whole

REFUTED, NOT_REFUTED, INCONCLUSIVE = "refuted", "not refuted", "inconclusive"

WEAKER = 0.8
"""The noise, as a share of the claimed one, that an audit with enough power must refute."""


@dataclass(frozen=True)
class Audit:
    """verdict: "refuted", "not refuted", or "inconclusive" if noise of .8 times the claimed would not be refuted.

    checks: of the parts. whole: what the membership trials found; power: the same with noise times .8. strength: of the
    canary, of 1 at most; None for signs. notes: what was left out, and what a reader must know.
    """

    verdict: str
    dataset: str
    model: str
    parameters: int
    claim: Claim
    secret: bool
    checks: tuple[Check, ...]
    whole: Whole
    power: Whole
    strength: float | None
    notes: tuple[str, ...]
    spec: dict[str, Any]
    seconds: float

    @property
    def refuted(self) -> bool:
        """Whether something contradicts the claim."""
        return self.verdict == REFUTED

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, ready for JSON."""
        claim = self.claim
        return {
            "verdict": self.verdict,
            "level": PARTS_LEVEL + WHOLE_LEVEL,
            "dataset": self.dataset,
            "model": self.model,
            "parameters": self.parameters,
            "claim": {
                "epsilon": claim.epsilon,
                "delta": claim.delta,
                "sigma": claim.sigma,
                "rounds": claim.rounds,
                "examples": claim.examples,
                "batch": claim.sampling.batch,
                "rate": claim.rate,
                "sampling": claim.sampling.name,
                "relation": claim.sampling.relation,
                "accountant": claim.accountant,
            },
            "secret": self.secret,
            "strength": self.strength,
            "checks": [asdict(check) for check in self.checks],
            "whole": asdict(self.whole),
            "power": asdict(self.power),
            "notes": list(self.notes),
            "spec": self.spec,
            "seconds": self.seconds,
        }


def decide(checks: Iterable[Check], power: Whole) -> str:
    """One word. Never that something is proved: an attack that fails proves nothing."""
    if any(check.refuted for check in checks):
        return REFUTED
    return NOT_REFUTED if power.refuted else INCONCLUSIVE
