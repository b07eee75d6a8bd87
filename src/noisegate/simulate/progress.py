"""Where a run stands, and what it found so far."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noisegate.simulate.federation import Federation, FederationState, first_state
from noisegate.views import TESTS, Reason


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is needed to go on, and everything that was found so far.

    rounds: how many are done. curve: one line per evaluated round. reasons, scores: (all rounds, n), filled so far.
    seconds: what the rounds took, kept by whoever plays them. reserved: the first round that nothing was drawn for yet,
    where that is more than the rounds that are done. A secret run may have drawn for rounds that were then lost, and
    must not draw for them again.
    """

    rounds: int
    state: FederationState
    curve: tuple[dict[str, Any], ...]
    reasons: Tensor
    scores: Tensor
    seconds: float = 0.0
    reserved: int = 0

    @property
    def lost(self) -> int:
        """Rounds that were drawn for and not finished."""
        return int((self.reasons[: self.rounds] == Reason.MISSING).all(1).sum())

    def skip_reserved(self) -> "Progress":
        """Go on behind the rounds that something was drawn for."""
        if self.reserved <= self.rounds:
            return self
        self.reasons[self.rounds : self.reserved] = Reason.MISSING
        return replace(self, rounds=self.reserved)


def start(federation: Federation) -> Progress:
    """A run before its first round."""
    shape = (federation.rounds, len(federation.byzantine))
    device = federation.byzantine.device
    reasons = torch.zeros(shape, dtype=torch.uint8, device=device)
    return Progress(0, first_state(federation), (), reasons, torch.zeros(shape, device=device))


def describe(federation: Federation, reasons: Tensor, since: int, until: int, accuracy: float) -> dict[str, Any]:
    """A line of the curve: accuracy after round `until`, uploads used and refused by reason since the line before."""
    counts = count_reasons(federation, reasons[since:until])
    rejected = {reason.word: counts[reason] for reason in Reason if reason is not Reason.KEPT and any(counts[reason])}
    return {
        "round": until,
        "accuracy": accuracy,
        "selected": _named(counts[Reason.KEPT]),
        "rejected": {word: _named(pair) for word, pair in rejected.items()},
    }


def _named(pair: tuple[int, int]) -> dict[str, int]:
    return {"honest": pair[0], "byzantine": pair[1]}


def count_reasons(federation: Federation, reasons: Tensor) -> dict[Reason, tuple[int, int]]:
    """How many (honest, Byzantine) uploads got each verdict."""
    lying, found = federation.byzantine.cpu(), reasons.cpu()
    honest, byzantine = (
        torch.bincount(found[:, group].flatten().long(), minlength=len(Reason)).tolist() for group in (~lying, lying)
    )
    return {reason: (honest[reason], byzantine[reason]) for reason in Reason}


def shares(federation: Federation, reasons: Tensor) -> tuple[float, float]:
    """(share of honest uploads refused by tests, share of the uploads used that were Byzantine)."""
    counts = count_reasons(federation, reasons)
    honest_uploads = reasons.shape[0] * int((~federation.byzantine).sum()) - counts[Reason.MISSING][0]
    refused = sum(counts[reason][0] for reason in TESTS)
    used = sum(counts[Reason.KEPT])
    return refused / max(1, honest_uploads), counts[Reason.KEPT][1] / max(1, used)
