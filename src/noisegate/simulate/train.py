"""Rounds after rounds: the loop of a simulated run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noisegate.simulate.federation import Federation, State, first_state
from noisegate.simulate.round import play
from noisegate.vectors import FlatModel
from noisegate.views import TESTS, Reason

EVALUATION_BLOCK = 2048


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is needed to go on, and everything that was found so far.

    rounds: how many are done. curve: one line per evaluated round. reasons, scores: (all rounds, n), filled so far.
    seconds: what the rounds took, kept by whoever plays them.
    """

    rounds: int
    state: State
    curve: tuple[dict[str, Any], ...]
    reasons: Tensor
    scores: Tensor
    seconds: float = 0.0


def start(federation: Federation) -> Progress:
    """A run before its first round."""
    shape = (federation.rounds, len(federation.byzantine))
    device = federation.byzantine.device
    reasons = torch.zeros(shape, dtype=torch.uint8, device=device)
    return Progress(0, first_state(federation), (), reasons, torch.zeros(shape, device=device))


def train(
    federation: Federation, progress: Progress, x_test: Tensor, y_test: Tensor, evaluate_every: int
) -> Iterator[Progress]:
    """Play the remaining rounds, giving the progress after each. Accuracy is taken every so often and at the end."""
    while progress.rounds < federation.rounds:
        t = progress.rounds
        state, verdict = play(federation, progress.state, t)
        progress.reasons[t] = verdict.reason
        progress.scores[t] = verdict.score
        progress = replace(progress, rounds=t + 1, state=state)
        if (t + 1) % evaluate_every == 0 or t + 1 == federation.rounds:
            score = accuracy(federation.model, state.params, x_test, y_test)
            progress = replace(progress, curve=(*progress.curve, _line(federation, progress, score)))
        yield progress


@torch.no_grad()
def accuracy(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> float:
    """Share of the examples whose highest output is that of their label."""
    right = [
        (model.outputs(params, block).argmax(1) == labels).sum()
        for block, labels in zip(x.split(EVALUATION_BLOCK), y.split(EVALUATION_BLOCK), strict=True)
    ]
    return float(torch.stack(right).sum()) / len(y)


def _line(federation: Federation, progress: Progress, score: float) -> dict[str, Any]:
    """What happened since the line before: accuracy now, uploads used and refused by reason, of either kind."""
    since = progress.curve[-1]["round"] if progress.curve else 0
    counts = count_reasons(federation, progress.reasons[since : progress.rounds])
    rejected = {reason.word: counts[reason] for reason in Reason if reason is not Reason.KEPT and any(counts[reason])}
    return {
        "round": progress.rounds,
        "accuracy": score,
        "selected": _named(counts[Reason.KEPT]),
        "rejected": {word: _named(pair) for word, pair in rejected.items()},
    }


def _named(pair: tuple[int, int]) -> dict[str, int]:
    return {"honest": pair[0], "byzantine": pair[1]}


def count_reasons(federation: Federation, reasons: Tensor) -> dict[Reason, tuple[int, int]]:
    """How many (honest, Byzantine) uploads got each verdict."""
    lying = federation.byzantine
    return {
        reason: (
            int((reasons[:, ~lying] == reason.value).sum()),
            int((reasons[:, lying] == reason.value).sum()),
        )
        for reason in Reason
    }


def shares(federation: Federation, reasons: Tensor) -> tuple[float, float]:
    """(share of honest uploads refused by tests, share of the uploads used that were Byzantine)."""
    counts = count_reasons(federation, reasons)
    honest_uploads = reasons.shape[0] * int((~federation.byzantine).sum())
    refused = sum(counts[reason][0] for reason in TESTS)
    used = sum(counts[Reason.KEPT])
    return refused / max(1, honest_uploads), counts[Reason.KEPT][1] / max(1, used)
