"""What became of each worker in a round, in one word, and the lines that say so."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from noisegate.federation.checkpoint import Totals
from noisegate.federation.collect import Collection
from noisegate.federation.patience import Attendance
from noisegate.views import Reason, Verdict

Fate = dict[str, Any]
"""The status of a worker in a round: {"status": word} with "weight", "reason" or "detail" where there is one."""


def fates(
    collection: Collection, verdict: Verdict, connected: Callable[[int], bool], standings: Sequence[Attendance]
) -> list[Fate]:
    """The status of each worker in a judged round: exactly one of `checkpoint.STATUSES`."""
    reasons, weights = verdict.reason.tolist(), verdict.weights.tolist()
    return [
        _judged(reasons[row], weights[row])
        if (answer := collection.answers.get(row)) is not None and answer.word == "upload"
        else _unjudged(collection, row, connected(row), standings[row].left)
        for row in range(len(standings))
    ]


def _judged(reason: int, weight: float) -> Fate:
    if reason == Reason.KEPT:
        return {"status": "used", "weight": weight}
    if reason == Reason.MALFORMED:
        return {"status": "malformed", "detail": "not finite"}
    return {"status": "refused", "reason": Reason(reason).word}


def _unjudged(collection: Collection, row: int, connected: bool, left: str) -> Fate:
    """Of a worker without a valid upload."""
    answer = collection.answers.get(row)
    if answer is not None and answer.word in ("malformed", "forged"):
        return {"status": answer.word, "detail": answer.detail}
    if left:
        return {"status": "missing", "detail": f"left: {left}"}
    if answer is not None:
        return {"status": "missing", "detail": f"{answer.word}: {answer.detail}"}
    if row in collection.asked and connected:
        return {"status": "late"}
    return {"status": "missing", "detail": "went away" if row in collection.asked else "not connected"}


def add_up(totals: Sequence[Totals], each: Sequence[Fate]) -> None:
    """Add a round to what workers' rounds add up to."""
    for total, fate in zip(totals, each, strict=True):
        total.rounds[fate["status"]] += 1
        total.weight += fate.get("weight", 0.0)


def line_of(
    collection: Collection, names: Sequence[str], each: Sequence[Fate], ignored: Mapping[str, int], **more: Any
) -> dict[str, Any]:
    """The line of a judged round in rounds.jsonl. more: seconds, accuracy, and what else there is to say."""
    return {
        "round": collection.round,
        "digest": collection.digest.hex(),
        "workers": dict(zip(names, each, strict=True)),
        "ignored": {word: times for word, times in ignored.items() if times},
        **{key: value for key, value in more.items() if value is not None},
    }
