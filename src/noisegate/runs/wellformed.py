"""Checks of what a file says about a run: types, ranges, and whether the numbers agree with each other."""

import dataclasses
import math
import typing
from itertools import pairwise
from typing import Any

from noisegate.catalog import typed
from noisegate.errors import SpecError, StoreError
from noisegate.files import count, number
from noisegate.views import Reason

SHARES = (
    *("accuracy", "best_accuracy", "byzantine", "honest_rejected", "byzantine_selected", "sampling_rate"),
    *("byzantine_weight", "missing", "attack_success", "fallback", "balanced_accuracy", "majority_share", "auc"),
)
"""The fields of a result that are numbers from 0 to 1."""

MOST_RATE = {"class_shares": math.inf, "class_rates": 1.0}
"""The largest entry of a list that is one for each class."""

AT_LEAST_ONE = ("rounds", "workers", "parameters", "declared", "copies")
"""The fields of a result that are 1 or more."""

SIGNED = ("seed",)
"""The fields of a result that may be below 0. All others are 0 or more."""

WORDS = frozenset(reason.word for reason in Reason)
"""The words for reasons in a line of a curve."""

DEEPEST = 32
"""The largest depth of nested values in a file."""


def fields_of(kind: type, found: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object. StoreError if one is missing, of another type or out of range.

    A field with a default may be missing: earlier versions did not write it.
    """
    hints = typing.get_type_hints(kind)
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in found]:
        raise StoreError(f"{where} lacks {', '.join(missing)}")
    values = {}
    for name, hint in hints.items():
        if name not in found:
            continue
        try:
            value = values[name] = typed(name, found[name], hint)
        except SpecError:
            raise StoreError(f"{where} is damaged ({name} is of another type)") from None
        if not _in_range(name, value):
            raise StoreError(f"{where} is damaged ({name} is out of range)")
    return values


def _in_range(name: str, value: Any) -> bool:
    if not finite(value):
        return False
    if not number(value):
        if name in ("class_shares", "class_rates"):
            return value is None or all(number(entry) and 0 <= entry <= MOST_RATE[name] for entry in value)
        if name == "recall":
            return value is None or all(entry is None or (number(entry) and 0 <= entry <= 1) for entry in value)
        if name == "worker_accuracy":
            shares = () if value is None else value.values()
            return all(entry is None or (number(entry) and 0 <= entry <= 1) for entry in shares)
        if name == "metrics":
            return value is None or all(entry is None or number(entry) for entry in value.values())
        if name == "confusion":
            return value is None or _is_confusion(value)
        return all(number(entry) and entry >= 0 for entry in value) if name == "worker_epsilons" else True
    if name in SHARES:
        return bool(0 <= value <= 1)
    return bool(value >= (1 if name in AT_LEAST_ONE else 0)) or name in SIGNED


def _is_confusion(value: list[Any]) -> bool:
    """Whether this is a square of counts, with an example in it."""
    square = all(isinstance(row, list) and len(row) == len(value) and all(map(count, row)) for row in value)
    return square and any(map(any, value))


def finite(value: Any, depth: int = 0) -> bool:
    """Whether all numbers in a value are finite and it is not nested deeper than DEEPEST."""
    if isinstance(value, dict):
        return depth < DEEPEST and all(finite(entry, depth + 1) for entry in value.values())
    if isinstance(value, list | tuple):
        return depth < DEEPEST and all(finite(entry, depth + 1) for entry in value)
    return number(value) or value is None or isinstance(value, str | bool)


def whole_line(line: Any) -> bool:
    """Whether a value is a valid line of a curve."""
    if not isinstance(line, dict) or not count(line.get("round")) or not number(line.get("accuracy")):
        return False
    rejected = line.get("rejected", {})
    if not isinstance(rejected, dict) or not rejected.keys() <= WORDS or not 0 <= line["accuracy"] <= 1:
        return False
    return finite(line) and all(
        isinstance(pair, dict) and all(count(pair.get(group, 0)) for group in ("honest", "byzantine"))
        for pair in (line.get("selected", {}), *rejected.values())
    )


def whole_curve(lines: Any, rounds: int) -> bool:
    """Whether these are valid lines of a curve, in the order of their rounds, none beyond `rounds`."""
    if not isinstance(lines, list | tuple) or not all(whole_line(line) for line in lines):
        return False
    return all(before < after for before, after in pairwise([0, *(line["round"] for line in lines), rounds + 1]))


def check_result(values: dict[str, Any], where: str) -> None:
    """Raise StoreError if the accuracies of a result are not those of its curve."""
    curve = values["curve"]
    if not curve or not whole_curve(curve, values["rounds"]):
        raise StoreError(f"{where} is damaged (its curve is none)")
    accuracies = [line["accuracy"] for line in curve]
    if (values["accuracy"], values["best_accuracy"]) != (accuracies[-1], max(accuracies)):
        raise StoreError(f"{where} is damaged (its accuracy is not that of its curve)")
