"""The paper's experiments as data: what is run, what the paper prints, what its authors logged.

experiments/*.toml  the settings that are fixed, those that vary, and the numbers that the paper prints
logs.csv            the authors' published logs: for each cell the mean over seeds
noise.toml          noise multipliers, so that the experiments run without dp-accounting
departures.toml     the cells that may be outside their tolerance, each with the reason
"""

import csv
import functools
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.runs.spec import Spec, make_spec
from noisegate.usual import PAPER_AGGREGATOR, PAPER_SEEDS

JudgedBy = Literal["reference", "attacked", "beside", "shown"]
"""What a cell is compared with.

reference: the paper's Reference Accuracy; the cell may be neither far below nor far above it.
attacked: the paper's accuracy under attack; the cell may not be far below it.
beside: the Reference Accuracy of our own runs; the cell may not be far below it.
shown: nothing.
"""

SEEDS = PAPER_SEEDS
"""The seeds of an experiment, unless others are asked for."""

LOGGED = ("experiment", "dataset", "epsilon", "setting", "attack", "byzantine", "attack_start", "rate")
"""The columns of logs.csv that identify a cell."""

QUICK = "quick"
"""The name of the small experiment on digits, which is not of the paper."""


@dataclass(frozen=True)
class Logged:
    """The accuracy of the last epoch in the authors' logs: its mean over the seeds, its lowest and its highest."""

    mean: float
    lowest: float
    highest: float
    seeds: int


@dataclass(frozen=True)
class PaperCell:
    """One number of a table of the paper.

    varies: the settings that tell it from the other cells. specs: one for each seed.
    printed, logged: its accuracy in the paper and in the authors' logs. rival: the paper's number for another method.
    reason, points: why it may be outside its tolerance, and by how many points; "" if it may not.
    """

    experiment: str
    judged: JudgedBy
    varies: Mapping[str, Any]
    specs: tuple[Spec, ...]
    printed: float | None
    logged: Logged | None
    rival: float | None
    reason: str
    points: float

    @property
    def expected(self) -> float | None:
        """The number that the paper prints, or that of the authors' logs if it prints none."""
        return self.printed if self.printed is not None else self.logged.mean if self.logged else None


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. rival: the method whose printed numbers stand beside it, if any."""

    name: str
    title: str
    paper: str
    about: str
    judged: JudgedBy
    cells: tuple[PaperCell, ...]
    rival: str = ""

    @property
    def specs(self) -> list[Spec]:
        """The specs of all cells and seeds."""
        return [spec for cell in self.cells for spec in cell.specs]


def names() -> list[str]:
    """The names of all experiments but `quick`, in the order of the paper's claims."""
    found = sorted(entry.name.removesuffix(".toml") for entry in (_here() / "experiments").iterdir())
    first = ["reference", "no-privacy", "clipping", "guerraoui", "zhu-ling", "side-effect", "attacks", "majority"]
    return [*first, *(name for name in found if name not in (*first, QUICK))]


def load(
    name: str,
    *,
    aggregator: Any = PAPER_AGGREGATOR,
    seeds: Sequence[int] = SEEDS,
    only: Mapping[str, Sequence[Any]] = {},
) -> Experiment:
    """Read an experiment, with `aggregator` in place of the paper's own.

    only: for a setting, the values to keep; cells with other values are left out.
    """
    if name not in (*names(), QUICK):
        raise SpecError(f"experiment {name!r}: unknown{checks.guess(name, names())}; choose from {', '.join(names())}")
    content = _read(f"experiments/{name}.toml")
    grids = content["sweep"] if isinstance(content["sweep"], list) else [content["sweep"]]
    cells = []
    for grid in grids:
        for values in itertools.product(*grid.values()):
            varies = dict(zip(grid, values, strict=True))
            settings = {"attack": "none", "aggregator": aggregator, **content["fixed"], **varies}
            usual = {"non_iid": False, "epsilon": None, **settings}
            if all(usual[key] in kept for key, kept in only.items()):
                cells.append(_cell(name, content, varies, settings, seeds))
    told = {key: content[key] for key in ("title", "paper", "about", "judged")}
    return Experiment(name, **told, cells=tuple(cells), rival=content.get("rival", {}).get("name", ""))


def _cell(
    name: str, content: Mapping[str, Any], varies: Mapping[str, Any], settings: dict[str, Any], seeds: Sequence[int]
) -> PaperCell:
    # The noise multipliers are those of the paper's delta and workers, so these are set, whatever the aggregator is.
    settings = {"accountant": "rdp", "delta": "paper", "worker": "normalized", "batch": 16, "rate": 0.2, **settings}
    if "epsilon" in settings:
        noise = _read("noise.toml")[settings["dataset"]]
        settings |= {"sigma": noise[f"{settings['epsilon']:g}"], "sigma_base": noise["2"]}
    known = {"experiment": name, **settings}
    return PaperCell(
        experiment=name,
        judged=content["judged"],
        varies=varies,
        specs=tuple(make_spec({**settings, "seed": seed}, f"experiment {name}") for seed in seeds),
        printed=_look_up(content.get("printed"), settings),
        logged=_logged(known | content.get("logs", {})),
        rival=_look_up(content.get("rival"), settings),
        **_departure(known),
    )


def _look_up(table: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> float | None:
    """The number in the row that has these settings; None if there is no such row."""
    wanted = [settings.get(key, False) for key in table["keys"]] if table else []
    found = [row[-1] for row in table["values"] if row[:-1] == wanted] if table else []
    return float(found[0]) if found else None


def _logged(known: Mapping[str, Any]) -> Logged | None:
    """The authors' numbers for a cell; None if they did not log its settings."""
    if (
        known.get("gamma") is not None
        or known.get("auxiliary_from")
        or known.get("worker", "normalized") != "normalized"
    ):
        return None
    usual = {"epsilon": None, "attack_start": 0.0, "rate": 0.2, **known}
    usual["setting"] = "non-iid" if known.get("non_iid") else "iid"
    return _logs().get(tuple(_text(usual[key]) for key in LOGGED))


def _departure(known: Mapping[str, Any]) -> dict[str, Any]:
    """The `reason` and `points` of a cell: why it may be outside its tolerance, and by how much."""
    for entry in _read("departures.toml")["departure"]:
        wanted = {key: value for key, value in entry.items() if key not in ("reason", "points")}
        if all(known.get(key) in (value if isinstance(value, list) else [value]) for key, value in wanted.items()):
            return {"reason": str(entry["reason"]), "points": float(entry["points"])}
    return {"reason": "", "points": 0.0}


@functools.cache
def _logs() -> dict[tuple[str, ...], Logged]:
    with (_here() / "logs.csv").open(newline="", encoding="utf-8") as file:
        return {
            tuple(row[key] for key in LOGGED): Logged(
                float(row["mean"]), float(row["lowest"]), float(row["highest"]), int(row["seeds"])
            )
            for row in csv.DictReader(file)
        }


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_here() / name).read_text(encoding="utf-8"))


def _here() -> Any:
    return files("noisegate.paper")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def label(value: Any) -> str:
    """A value as people write it. A table with a name and settings becomes `name (setting value, ...)`."""
    if isinstance(value, Mapping):
        chosen = ", ".join(f"{key} {label(entry)}" for key, entry in value.items() if key != "name")
        return f"{value['name']} ({chosen})" if chosen else str(value["name"])
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(value)
