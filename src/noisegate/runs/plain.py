"""A spec that is read, not built: nothing that it names is imported. For commands that only look.

A spec may name a plugin's class, `package.module:Name`, and to build such a spec runs that module's code. What only
shows a folder must not. Where a spec names none, it is an ordinary `Spec`. Where it does, it is a `PlainSpec`: the
other settings are checked as always, with a built-in part standing in for each plugin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.errors import SpecError
from noisegate.runs.spec import PARTS, Spec, make_spec, name_of, read_settings

STAND_INS = {"attack": "none", "aggregator": "mean", "worker": "normalized"}
DEEPEST = 16


@dataclass(frozen=True)
class PlainSpec:
    """A spec whose `plugins`, by part, are only text. standin: the same with built-in parts in their places."""

    standin: Spec
    plugins: Mapping[str, Mapping[str, Any]]

    def canonical(self) -> dict[str, Any]:
        """As of the spec itself: settings that were written by `to_toml` are in their one form already."""
        return {**self.standin.canonical(), **{part: dict(entry) for part, entry in self.plugins.items()}}

    def name(self) -> str:
        """The run's name, as of the spec itself."""
        return name_of(self.canonical())

    @property
    def rounds(self) -> int | None:
        """As it was asked for."""
        return self.standin.rounds


AnySpec = Spec | PlainSpec


def plain_spec(settings: Mapping[str, Any], where: str = "spec") -> AnySpec:
    """A spec from loose settings, nothing imported."""
    plugins: dict[str, Mapping[str, Any]] = {}
    for part in PARTS:
        found = settings.get(part)
        if isinstance(found, str | Mapping) and names_a_plugin(found):
            plugins[part] = {"name": found} if isinstance(found, str) else found
            _check(part, plugins[part], where)
    spec = make_spec({**settings, **{part: STAND_INS[part] for part in plugins}}, where)
    return PlainSpec(spec, plugins) if plugins else spec


def read_plain(path: Path) -> AnySpec:
    """The spec in a TOML file, nothing imported."""
    return plain_spec(read_settings(path), str(path))


def names_a_plugin(part: Any) -> bool:
    """Whether a part, or one that it wraps, is a plugin's class."""
    return any(isinstance(entry, str) and ":" in entry for entry, _ in _entries(part))


def _entries(part: Any) -> Iterator[tuple[Any, int]]:
    """All values of a part, however deep, and how deep."""
    waiting: list[tuple[Any, int]] = [(part, 0)]
    while waiting:
        entry, depth = waiting.pop()
        yield entry, depth
        if isinstance(entry, Mapping | list):
            inner = entry.values() if isinstance(entry, Mapping) else entry
            waiting += [(value, depth + 1) for value in inner]


def _check(part: str, entry: Mapping[str, Any], where: str) -> None:
    """A plugin's settings are its own, but they have to be such that a spec can hold."""
    if not isinstance(entry.get("name"), str):
        raise SpecError(f"{where}: {part}: needs a name")
    for value, depth in _entries(entry):
        if depth > DEEPEST:
            raise SpecError(f"{where}: {part}: its settings are nested deeper than {DEEPEST}")
        if value is not None and not isinstance(value, str | bool | int | float | Mapping | list):
            raise SpecError(f"{where}: {part}: {value!r}: must be a text, a number, true or false, a list or a table")
