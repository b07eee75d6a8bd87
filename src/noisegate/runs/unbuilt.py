"""Specs that are read but not built, so that no plugin is imported. For commands that only show a folder.

A spec may name a plugin, `package.module:Name`, and building such a spec runs that module's code. A command that only
shows a folder must not do so. Here a spec that uses no plugin is read as an ordinary `Spec`. One that does is read as
an `UnbuiltSpec`: its other settings are checked as always, with a built-in part in place of each plugin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.errors import SpecError
from noisegate.runs.spec import PARTS, Spec, make_spec, name_of
from noisegate.settings import read_settings

STAND_INS = {"attack": "none", "aggregator": "mean", "worker": "normalized"}
"""The built-in part that takes the place of a plugin while the other settings are checked."""

DEEPEST = 16
"""The largest depth of a plugin's nested settings."""


@dataclass(frozen=True)
class UnbuiltSpec:
    """A spec that uses plugins and was not built. plugins: the settings of these parts. standin: the rest, built."""

    standin: Spec
    plugins: Mapping[str, Mapping[str, Any]]

    def canonical(self) -> dict[str, Any]:
        """The canonical form of the spec, given that its plugins' settings were written by `Spec.to_toml`."""
        return {**self.standin.canonical(), **{part: dict(entry) for part, entry in self.plugins.items()}}

    def name(self) -> str:
        """The run's name: the same as that of the spec when it is built."""
        return name_of(self.canonical())

    @property
    def rounds(self) -> int | None:
        """The setting `rounds` of the spec."""
        return self.standin.rounds


AnySpec = Spec | UnbuiltSpec


def unbuilt_spec(settings: Mapping[str, Any], where: str = "spec") -> AnySpec:
    """The spec with these settings: an UnbuiltSpec if it uses plugins, else a Spec. Imports no plugin."""
    plugins: dict[str, Mapping[str, Any]] = {}
    for part in PARTS:
        found = settings.get(part)
        if isinstance(found, str | Mapping) and _names_a_plugin(found):
            plugins[part] = {"name": found} if isinstance(found, str) else found
            _check(part, plugins[part], where)
    # Features, models and losses are not loaded before a run begins, so a spec with such of a user's own is read like
    # any other.
    spec = make_spec({**settings, **{part: STAND_INS[part] for part in plugins}}, where)
    return UnbuiltSpec(spec, plugins) if plugins else spec


def read_unbuilt(path: Path) -> AnySpec:
    """The spec in a TOML file, as of `unbuilt_spec`."""
    return unbuilt_spec(read_settings(path), str(path))


def uses_plugins(settings: Mapping[str, Any]) -> bool:
    """Whether a part, features, model, loss or a metric are a plugin, or wrap one. settings: of a spec, or lists."""
    return any(_names_a_plugin(settings.get(part)) for part in (*PARTS, "features", "model", "loss", "metrics"))


def _names_a_plugin(part: Any) -> bool:
    """Whether any text in a part is a plugin's path. No built-in part has a name or a setting with a colon."""
    return any(isinstance(entry, str) and ":" in entry for entry, _ in _entries(part))


def _entries(part: Any) -> Iterator[tuple[Any, int]]:
    """All values of a part at any depth, each with its depth."""
    waiting: list[tuple[Any, int]] = [(part, 0)]
    while waiting:
        entry, depth = waiting.pop()
        yield entry, depth
        if isinstance(entry, Mapping | list):
            inner = entry.values() if isinstance(entry, Mapping) else entry
            waiting += [(value, depth + 1) for value in inner]


def _check(part: str, entry: Mapping[str, Any], where: str) -> None:
    """Raise SpecError if a plugin's settings hold values that a spec cannot hold."""
    if not isinstance(entry.get("name"), str):
        raise SpecError(f"{where}: {part}: needs a name")
    for value, depth in _entries(entry):
        if depth > DEEPEST:
            raise SpecError(f"{where}: {part}: its settings are nested deeper than {DEEPEST}")
        if value is not None and not isinstance(value, str | bool | int | float | Mapping | list):
            raise SpecError(f"{where}: {part}: {value!r}: must be a text, a number, true or false, a list or a table")
