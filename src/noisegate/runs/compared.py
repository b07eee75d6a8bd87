"""Runs beside each other."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.checks import shown
from noisegate.errors import SpecError
from noisegate.runs.pictures import curve_figure
from noisegate.runs.result import Result, load
from noisegate.runs.tables import frame_of, rows_html, rows_text

MEASURES = ("accuracy", "balanced_accuracy", "attack_success", "byzantine_weight", "honest_rejected")
"""What a row tells of a run beside its privacy, as far as any of the runs has it."""


@dataclass(frozen=True)
class Comparison:
    """Results by name. It prints as a table, and a notebook shows it as one."""

    results: Mapping[str, Result]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run: its name, the settings in which the runs differ, what it found and what it promises."""
        fields = {name: result.as_dict() for name, result in self.results.items()}
        varied = differing([result["spec"] for result in fields.values()])
        told = [name for name in MEASURES if any(result[name] is not None for result in fields.values())]
        return [
            {"run": name}
            | {key: setting(result["spec"].get(key)) for key in varied}
            | {measure: result[measure] for measure in told}
            | {"epsilon": "none: not private" if result["epsilon"] is None else result["epsilon"]}
            for name, result in fields.items()
        ]

    def to_frame(self) -> Any:
        """The rows as a pandas frame."""
        return frame_of(self.rows, "Comparison.to_frame", "Comparison.rows")

    def plot(self) -> Any:
        """The accuracy of all runs over their rounds, as a plotly figure."""
        return curve_figure({name: result.as_dict() for name, result in self.results.items()})

    def __str__(self) -> str:
        return rows_text(self.rows)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return rows_html(self.rows)


def compare(runs: Iterable[Result | Path | str] | Mapping[str, Result | Path | str]) -> Comparison:
    """Results beside each other. runs: results or the folders of finished runs, or these by a name of your own.

    Without names they are called by the settings in which they differ, or else by their numbers.
    """
    if isinstance(runs, Result | str | Path):
        raise SpecError(f"compare: {shown(runs)[:60]} is one run; give a list of them")
    named = dict(runs.items()) if isinstance(runs, Mapping) else {str(i): run for i, run in enumerate(runs, 1)}
    found = {name: _result(run) for name, run in named.items()}
    if not found:
        raise SpecError("compare: there are no runs; give results, or folders of finished runs")
    if isinstance(runs, Mapping):
        return Comparison(found)
    specs = [result.spec for result in found.values()]
    varied = differing(specs)
    names = [", ".join(f"{key} {setting(spec.get(key))}" for key in varied) for spec in specs]
    if not varied or len(set(names)) < len(names):
        names = [f"run {number}" for number in found]
    return Comparison(dict(zip(names, found.values(), strict=True)))


def _result(run: Any) -> Result:
    if isinstance(run, str | Path):
        return load(run)
    if not isinstance(run, Result):
        raise SpecError(f"compare: {shown(run)[:60]} is neither a result nor the folder of a run")
    return run


def differing(specs: list[dict[str, Any]]) -> list[str]:
    """The settings in which specs differ, given as canonical tables."""
    keys = dict.fromkeys(key for spec in specs for key in spec)
    return [key for key in keys if len({json.dumps(spec.get(key), sort_keys=True) for spec in specs}) > 1]


def setting(value: Any) -> Any:
    """A setting in a cell: of a part its name, and its settings behind that."""
    if not isinstance(value, Mapping):
        return value
    more = ", ".join(f"{key}={setting(entry)}" for key, entry in value.items() if key != "name")
    return f"{value.get('name')}({more})" if more else value.get("name")
