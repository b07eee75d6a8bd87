"""The paper's experiments as data: what is run, what the paper prints, what its authors logged.

experiments/*.toml  what is fixed and what varies, and the numbers printed in the paper
logs.csv            means over seeds of the authors' published logs, by cell
noise.toml          noise multipliers, so that dp-accounting need not be there
departures.toml     cells that may lie outside their tolerance, and why
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

Judged = Literal["reference", "attacked", "beside", "shown"]
"""By what a cell is judged: the paper's Reference Accuracy, on both sides; the paper, from below; the reference of our
own runs, from below; or nothing."""

SEEDS = (1, 2, 3)
PAPER_RULE = "two-stage"
LOGGED = ("experiment", "dataset", "epsilon", "setting", "attack", "byzantine", "attack_start", "rate")
QUICK = "quick"


@dataclass(frozen=True)
class Logged:
    """What the authors' logs say of a cell: the mean over seeds of the last epoch's accuracy, lowest and highest."""

    mean: float
    lowest: float
    highest: float
    seeds: int


@dataclass(frozen=True)
class Cell:
    """One number of a table: a spec for each seed, what varies in it, and what was printed or logged."""

    experiment: str
    judged: Judged
    varies: Mapping[str, Any]
    specs: tuple[Spec, ...]
    printed: float | None
    logged: Logged | None
    rival: float | None
    reason: str
    points: float

    @property
    def expected(self) -> float | None:
        """The paper's number, or the authors' where it prints none."""
        return self.printed if self.printed is not None else self.logged.mean if self.logged else None


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. rival: whose printed numbers stand beside it, if any."""

    name: str
    title: str
    paper: str
    about: str
    judged: Judged
    cells: tuple[Cell, ...]
    rival: str = ""

    @property
    def specs(self) -> list[Spec]:
        """Every run."""
        return [spec for cell in self.cells for spec in cell.specs]


def names() -> list[str]:
    """Every experiment, in the order of the paper's claims; `quick` is apart."""
    found = sorted(entry.name.removesuffix(".toml") for entry in (_here() / "experiments").iterdir())
    first = ["reference", "no-privacy", "clipping", "guerraoui", "zhu-ling", "side-effect", "attacks", "majority"]
    return [*first, *(name for name in found if name not in (*first, QUICK))]


def load(
    name: str, *, aggregator: Any = PAPER_RULE, seeds: Sequence[int] = SEEDS, only: Mapping[str, Sequence[Any]] = {}
) -> Experiment:
    """An experiment, with `aggregator` in place of the paper's filter.

    only: by setting, the values to keep.
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
) -> Cell:
    # The paper's delta and workers, whatever the aggregator goes with: so is the noise.
    settings = {"accountant": "rdp", "delta": "paper", "worker": "normalized", "batch": 16, "rate": 0.2, **settings}
    if "epsilon" in settings:
        noise = _read("noise.toml")[settings["dataset"]]
        settings |= {"sigma": noise[f"{settings['epsilon']:g}"], "sigma_base": noise["2"]}
    known = {"experiment": name, **settings}
    return Cell(
        experiment=name,
        judged=content["judged"],
        varies=varies,
        specs=tuple(make_spec({**settings, "seed": seed}, f"experiment {name}") for seed in seeds),
        printed=_among(content.get("printed"), settings),
        logged=_logged(known | content.get("logs", {})),
        rival=_among(content.get("rival"), settings),
        **_departure(known),
    )


def _among(table: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> float | None:
    """The last column of the row that has these settings."""
    wanted = [settings.get(key, False) for key in table["keys"]] if table else []
    found = [row[-1] for row in table["values"] if row[:-1] == wanted] if table else []
    return float(found[0]) if found else None


def _logged(known: Mapping[str, Any]) -> Logged | None:
    """The authors' numbers of a cell; None for a setting that they did not log."""
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
    """Why a cell may lie outside its tolerance, and how far; "" if it may not."""
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
    """A part's name and settings; anything else as people write it."""
    if isinstance(value, Mapping):
        chosen = ", ".join(f"{key} {label(entry)}" for key, entry in value.items() if key != "name")
        return f"{value['name']} ({chosen})" if chosen else str(value["name"])
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(value)
