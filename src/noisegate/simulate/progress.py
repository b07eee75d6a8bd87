"""Where a run stands, and what it found so far."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noisegate.simulate.federation import Federation, FederationState, first_state
from noisegate.views import TESTS, Reason, Verdict


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is needed to go on, and everything that was found so far.

    rounds: how many are done. curve: one line per evaluated round. reasons, scores, weights: (all rounds, n), what the
    verdicts said, filled so far. seconds: what the rounds took, kept by whoever plays them. reserved: the first round
    that nothing was drawn for yet, where that is more than the rounds that are done. A secret run may have drawn for
    rounds that were then lost, and must not draw for them again. fell_back: (all rounds,) 1 where the aggregator fell
    back.
    """

    rounds: int
    state: FederationState
    curve: tuple[dict[str, Any], ...]
    reasons: Tensor
    scores: Tensor
    weights: Tensor
    seconds: float = 0.0
    reserved: int = 0
    fell_back: Tensor | None = None

    @property
    def lost(self) -> int:
        """Rounds that were drawn for and not finished."""
        return int((self.reasons[: self.rounds] == Reason.LOST).all(1).sum())

    def note(self, t: int | Tensor, verdict: Verdict) -> None:
        """Write down the verdict of round `t`, which a device may hold as (1,)."""
        found = [(self.reasons, verdict.reason), (self.scores, verdict.score), (self.weights, verdict.weights)]
        if self.fell_back is not None and verdict.fell_back is not None:
            found.append((self.fell_back, verdict.fell_back))
        for rows, value in found:
            if isinstance(t, Tensor):
                rows.index_copy_(0, t, value[None].to(rows))
            else:
                rows[t] = value

    def skip_reserved(self) -> "Progress":
        """Go on behind the rounds that something was drawn for."""
        if self.reserved <= self.rounds:
            return self
        self.reasons[self.rounds : self.reserved] = Reason.LOST
        return replace(self, rounds=self.reserved)


def start(federation: Federation) -> Progress:
    """A run before its first round."""
    shape, device = (federation.schedule.rounds, len(federation.workers)), federation.device
    reasons = torch.zeros(shape, dtype=torch.uint8, device=device)
    scores, weights = (torch.zeros(shape, device=device) for _ in range(2))
    fell_back = torch.zeros(shape[0], dtype=torch.uint8, device=device)
    return Progress(0, first_state(federation), (), reasons, scores, weights, fell_back=fell_back)


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
    mask, found = federation.adversary.byzantine.cpu(), reasons.cpu()
    honest, byzantine = (
        torch.bincount(found[:, group].flatten().long(), minlength=len(Reason)).tolist() for group in (~mask, mask)
    )
    return {reason: (honest[reason], byzantine[reason]) for reason in Reason}


class Shares(NamedTuple):
    """What came of the uploads of a run.

    honest_rejected: share of the honest uploads that arrived which a test refused. byzantine_selected: share of the
    uploads used that were Byzantine. byzantine_weight: the weight of Byzantine uploads in all updates together, of the
    weight of all uploads. missing: share of the uploads that did not arrive. fallback: share of the rounds that were
    judged in which the aggregator fell back.
    """

    honest_rejected: float
    byzantine_selected: float
    byzantine_weight: float
    missing: float
    fallback: float


def shares(federation: Federation, progress: Progress) -> Shares:
    """Over the rounds that are done."""
    reasons, weights = progress.reasons[: progress.rounds], progress.weights[: progress.rounds].double()
    counts, byzantine = count_reasons(federation, reasons), federation.adversary.byzantine
    honest = len(reasons) * int((~byzantine).sum()) - counts[Reason.MISSING][0] - counts[Reason.LOST][0]
    refused = sum(counts[reason][0] for reason in TESTS)
    used, sent = sum(counts[Reason.KEPT]), reasons.numel() - sum(counts[Reason.LOST])
    total = float(weights.sum())
    fallen = 0 if progress.fell_back is None else int(progress.fell_back[: progress.rounds].sum())
    return Shares(
        refused / max(1, honest),
        counts[Reason.KEPT][1] / max(1, used),
        float(weights[:, byzantine].sum()) / total if total else 0.0,
        sum(counts[Reason.MISSING]) / max(1, sent),
        fallen / max(1, progress.rounds - progress.lost),
    )
