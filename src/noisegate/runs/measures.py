"""Metrics by name: those that every result has, and a user's own functions of (scores, labels)."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from noisegate import checks
from noisegate.catalog import is_own, load
from noisegate.errors import NoisegateWarning, SpecError
from noisegate.runs.recall import worst_class
from noisegate.simulate import Exam

Metric = Callable[[Tensor, Tensor], Any]
"""A number made of (N, classes) scores and (N,) labels, on the CPU; higher is better where a red team takes it."""

Metrics = Mapping[str, Metric] | Sequence[str]
"""Functions by the names that their numbers get, or names: of NAMES, recall-3, or the path of your own function."""

NAMES = ("accuracy", "balanced_accuracy", "auc", "worst_recall", "worst_worker")
"""The metrics that every result has by a name, beside RECALL and the number of a class."""

RECALL = "recall-"


def check_names(names: Any) -> list[str] | None:
    """Names of metrics, each once; None for none. SpecError for one that names nothing. No code is loaded."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise checks.refuse("metrics", names, 'must be a list of names, such as ["balanced_accuracy"]')
    found = list(names)
    for name in found:
        check_name("metrics", name)
    return list(dict.fromkeys(found)) or None


def check_name(what: str, name: Any, beside: Sequence[str] = ()) -> None:
    """SpecError if this names no metric. beside: other words that may stand there."""
    if is_own(name) or (isinstance(name, str) and class_of(name) is not None):
        return
    known = list(dict.fromkeys((*beside, *NAMES)))
    if name not in known:
        choices = f"{', '.join(known)}, recall-K for class K, or your own as file.py:name"
        raise checks.refuse(what, name, f"unknown{checks.guess(name, known)}; choose from {choices}")


def class_of(name: str) -> int | None:
    """The class whose recall a metric is; None for any other metric."""
    number = name.removeprefix(RECALL)
    return int(number) if number != name and number.isascii() and number.isdigit() and len(number) < 10 else None


def value_of(found: Mapping[str, Any], name: str) -> float | None:
    """The metric of that name of a result, as its fields; None if it has none."""
    value: Any
    if (label := class_of(name)) is not None:
        recall = found.get("recall") or ()
        value = recall[label] if label < len(recall) else None
    elif name == "worst_recall":
        worst = worst_class(found.get("recall"))
        value = None if worst is None else worst.recall
    elif name == "worst_worker":
        value = min((each for each in (found.get("worker_accuracy") or {}).values() if each is not None), default=None)
    else:
        value = found.get(name) if name in NAMES else (found.get("metrics") or {}).get(name)
    return None if value is None else float(value)


def functions_of(names: Sequence[str] | None, given: Metrics | None) -> dict[str, Metric | None]:
    """The metrics that are asked for, by name; None for those that every result has. A user's own are loaded here.

    names: of the spec. given: in Python, beside them.
    """
    own = given if isinstance(given, Mapping) else {}
    asked = check_names(given) if not isinstance(given, Mapping) else None
    found: dict[str, Metric | None] = {}
    for name in (*(names or ()), *(asked or ())):
        found[name] = load("metrics", name) if is_own(name) else None
    for name, mine in own.items():
        if not isinstance(name, str) or name in NAMES or class_of(name) is not None:
            raise checks.refuse("metrics", name, "names what every result has; give your function another name")
        found[name] = mine
    for name, function in found.items():
        if function is not None and not callable(function):
            raise checks.refuse(
                "metrics", name, f"must be a function of (scores, labels), not {checks.shown(function)}"
            )
    return found


def try_out(functions: Mapping[str, Metric | None], exam: Exam) -> None:
    """SpecError if one of a user's own fails, or gives no number, on what a model says before it is trained."""
    for name, function in functions.items():
        if function is not None:
            _called(name, function, exam)


def measured(
    functions: Mapping[str, Metric | None], exam: Exam, result: Mapping[str, Any]
) -> dict[str, float | None] | None:
    """The metrics by name, None for one that is no finite number; None if none was asked for.

    One that fails now, though it did not before training, is None too, and warned of: it costs no run that is over.
    """
    found: dict[str, float | None] = {}
    for name, function in functions.items():
        if function is None:
            found[name] = value_of(result, name)
            continue
        try:
            value = _called(name, function, exam)
        except SpecError as error:
            warnings.warn(f"{error}; it is left out", NoisegateWarning, stacklevel=2)
            value = torch.nan
        found[name] = value if abs(value) < torch.inf else None
    return found or None


def _called(name: str, function: Metric, exam: Exam) -> float:
    """What a user's own function says, which is a number, if not a finite one."""
    try:
        value = function(exam.scores.clone(), exam.y.clone())
        if not isinstance(value, bool | str | bytes) and getattr(value, "ndim", 0) == 0:
            return float(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # anyone's code may raise anything
        raise checks.refuse(
            "metrics", name, f"cannot be computed ({type(error).__name__}: {checks.told(error)})"
        ) from None
    raise checks.refuse("metrics", name, f"must give one number, not {checks.shown(value)}")
