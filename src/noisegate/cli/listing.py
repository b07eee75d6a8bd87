"""`noisegate list`: what can be chosen."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from noisegate import checks, paper
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.cli.terminal import Console
from noisegate.data import SOURCES
from noisegate.features import FEATURES
from noisegate.models import MODELS
from noisegate.runs.usual import DEFAULTS, usual_of, usual_with
from noisegate.workers import WORKERS

Entry = dict[str, Any]
JSON_ONLY = ("goes_with",)
"""Keys of an entry that have no column of their own."""


def _datasets() -> list[Entry]:
    return [
        {
            "name": name,
            "model": source.model,
            "workers": source.workers,
            **{setting: (DEFAULTS | usual_of(name))[setting] for setting in ("batch", "rate")},
            "about": source.description,
        }
        for name, source in SOURCES.items()
    ]


def _models() -> list[Entry]:
    return [
        {"name": name, "goes_with": usual_with(name), "about": _first_line(builder)} for name, builder in MODELS.items()
    ]


def _features() -> list[Entry]:
    return [
        {"name": name, "settings": _settings(entry), "about": _first_line(entry)} for name, entry in FEATURES.items()
    ]


def _workers() -> list[Entry]:
    return [
        {"name": name, "settings": _settings(entry), "about": _first_line(entry)} for name, entry in WORKERS.items()
    ]


def _attacks() -> list[Entry]:
    return [
        {"name": name, "knows": entry().knows, "settings": _settings(entry), "about": _first_line(entry)}
        for name, entry in ATTACKS.items()
    ]


def _aggregators() -> list[Entry]:
    return [
        {
            "name": name,
            "needs": entry().needs,
            "goes_with": dict(entry().goes_with),
            "settings": _settings(entry),
            "about": _first_line(entry),
        }
        for name, entry in AGGREGATORS.items()
    ]


def _experiments() -> list[Entry]:
    found = [paper.load(name, seeds=(1,)) for name in (*paper.names(), paper.QUICK)]  # one seed, which is faster
    return [{"name": one.name, "paper": one.paper, "about": one.title} for one in found]


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "datasets": _datasets,
    "models": _models,
    "features": _features,
    "workers": _workers,
    "attacks": _attacks,
    "aggregators": _aggregators,
    "experiments": _experiments,
}


def show_list(kind: str, as_json: bool) -> None:
    """List what a run can be made of."""
    checks.one_of(KINDS, kind=kind)
    entries = KINDS[kind]()
    if as_json:
        print(json.dumps({kind: entries}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    columns = [name for name in entries[0] if name not in JSON_ONLY]
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for entry in entries:
        table.add_row(*(_text(entry[column]) for column in columns))
        if brings := entry.get("goes_with"):
            told = ", ".join(f"{key} {value}" for key, value in brings.items())
            table.add_row(*("" for _ in columns[:-1]), f"Brings {told}.")
    Console().print(table)


def _first_line(thing: Callable[..., Any]) -> str:
    return (inspect.getdoc(thing) or "").split("\n", 1)[0]


def _settings(kind: Callable[..., Any]) -> dict[str, Any]:
    """Settings and their defaults, as they would be written in a spec."""
    if not dataclasses.is_dataclass(kind):
        return {}
    return {field.name: _default(field) for field in dataclasses.fields(kind) if field.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    """A setting's default. If that is a part itself: its name."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    catalog = ATTACKS | AGGREGATORS
    return next(name for name, entry in catalog.items() if entry is field.default_factory)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{key}={'auto' if entry is None else entry}" for key, entry in value.items())
    return str(value)
