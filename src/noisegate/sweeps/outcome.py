"""What came of one run, as the pool that ran it tells."""

from dataclasses import dataclass
from typing import Literal

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.runs.result import Result

Status = Literal["done", "skipped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What came of a run. skipped: what was asked for cannot exist, and `message` says why. failed: the run raised."""

    status: Status
    accuracy: float | None = None
    byzantine_selected: float | None = None
    honest_rejected: float | None = None
    message: str = ""
    recall: list[float | None] | None = None
    attack_success: float | None = None
    fallback: float = 0.0
    balanced_accuracy: float | None = None
    auc: float | None = None
    metrics: dict[str, float | None] | None = None
    worker_accuracy: dict[str, float | None] | None = None


def outcome_of(result: Result) -> Outcome:
    """The outcome of a run that ended with a result."""
    return Outcome(
        "done",
        result.accuracy,
        result.byzantine_selected,
        result.honest_rejected,
        recall=result.recall,
        attack_success=result.attack_success,
        fallback=result.fallback,
        balanced_accuracy=result.balanced_accuracy,
        auc=result.auc,
        metrics=result.metrics,
        worker_accuracy=result.worker_accuracy,
    )


def broken(error: BaseException) -> Outcome:
    """The outcome of a run that raised."""
    if isinstance(error, SpecError):
        return Outcome("skipped", message=checks.told(error))
    return Outcome("failed", message=f"{type(error).__name__}: {checks.told(error)}")
