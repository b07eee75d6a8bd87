"""The file of a sweep: the settings of a spec, and under [sweep] a list of values for each setting that varies."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError, StoreError
from noisegate.runs.spec import FLAGS_ONLY, Spec, make_spec
from noisegate.runs.unbuilt import AnySpec, uses_plugins
from noisegate.settings import read_settings

MOST_RUNS = 100_000
"""The largest number of runs in one sweep."""


@dataclass(frozen=True)
class SweepGrid:
    """All combinations of the values in `axes`, with the settings that do not vary. where: the file, for messages."""

    settings: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    where: str = "sweep"

    def __post_init__(self) -> None:
        for key, value in self.settings.items():
            if isinstance(value, list):
                raise SpecError(
                    f"{self.where}: {key} = {value!r}: is a list outside of [sweep]; move it there, where lists belong"
                )
        known = [entry.name for entry in dataclasses.fields(Spec)]
        for key, values in self.axes.items():
            if key in FLAGS_ONLY:
                raise SpecError(f"{self.where}: sweep.{key}: does not change results; give the flag --{key}")
            if key not in known:
                raise SpecError(
                    f"{self.where}: sweep.{key} = {values!r}: unknown setting{checks.guess(key, known)}; "
                    f"choose from {', '.join(known)}"
                )
            if not isinstance(values, list) or not values:
                raise SpecError(f"{self.where}: sweep.{key} = {values!r}: must be a list of one or more values")
        if (runs := math.prod(len(values) for values in self.axes.values())) > MOST_RUNS:
            raise SpecError(f"{self.where}: [sweep] makes {runs} runs, more than {MOST_RUNS}; leave some values out")

    def specs(self) -> list[Spec]:
        """The distinct specs of the grid. The setting that is named last varies fastest."""
        found: dict[str, Spec] = {}
        for values in product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            try:
                spec = make_spec({**self.settings, **chosen}, self.where)
            except SpecError as error:
                told = str(error).removeprefix(f"{self.where}: ")
                picked = ", ".join(f"{key} = {value!r}" for key, value in chosen.items())
                raise SpecError(f"{self.where}: {told} (in the run with {picked})") from None
            found.setdefault(spec.name(), spec)
        return list(found.values())

    def varied(self) -> list[str]:
        """The settings with more than one value."""
        return [key for key, values in self.axes.items() if len(values) > 1]


def read_grid(path: Path) -> SweepGrid:
    """The sweep in a TOML file."""
    settings = read_settings(path)
    axes = settings.pop("sweep", None)
    if not isinstance(axes, dict) or not axes:
        raise SpecError(
            f"{path}: has no [sweep] with lists of the values to try, as `seed = [1, 2, 3]`; "
            "add one, or give the file to `noisegate run`"
        )
    return SweepGrid(settings, axes, str(path))


def read_sweep(path: Path) -> list[Spec]:
    """The distinct specs of a sweep in a TOML file. Only what is under [sweep] varies."""
    return read_grid(Path(path)).specs()


def unbuilt_specs(path: Path) -> list[AnySpec]:
    """The specs of a sweep in a TOML file, for commands that only show it. StoreError if it uses plugins."""
    grid = read_grid(path)
    if uses_plugins(grid.settings) or uses_plugins(grid.axes):
        raise StoreError(
            f"{path}: names a part of your own, and what is to be run with it is not listed in specs.json; "
            "`noisegate sweep` writes that file"
        )
    return list(grid.specs())
