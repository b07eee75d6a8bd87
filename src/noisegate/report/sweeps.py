"""Reads a sweep folder: its runs, the settings that vary between them, and their results in groups of seeds."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from noisegate.errors import NoisegateError, StoreError
from noisegate.redteam.plot import part
from noisegate.report.folders import beside, number, read_run
from noisegate.report.targets import recalls_of, share_of
from noisegate.runs import imbalance
from noisegate.runs.recall import worst_class
from noisegate.runs.spec import PARTS
from noisegate.runs.unbuilt import AnySpec

if TYPE_CHECKING:
    from noisegate.sweeps.sweep import SweepCell

SHOWN = ("attack_success", "fallback")
"""What the results show beside the accuracy, where it applies."""

STATUSES = ("done", "running", "failed", "skipped", "waiting")
"""The statuses of a run of a sweep, in the order in which they are listed."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    settings: those that vary between groups. accuracies, curves: of its runs that are done. references: the accuracies
    of its reference runs that are done. recalls, successes, fallbacks: the lowest recall of a class, the attack success
    and the share of rounds fallen back, of its runs that are done and have one. beside: by the name of a column, what
    else is shown of them. role: what its runs are to other groups of the sweep, if they are their reference or
    undefended runs. private: whether its runs add noise.
    """

    settings: dict[str, Any]
    cells: "list[SweepCell]"
    accuracies: list[float]
    references: list[float]
    curves: list[dict[int, float]]
    recalls: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    fallbacks: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)
    role: Literal["", "reference", "undefended"] = ""
    private: bool = True

    @property
    def label(self) -> str:
        """The group's settings in one line."""
        return ", ".join(f"{key} {show(value)}" for key, value in self.settings.items()) or "all runs"

    def count(self, status: str) -> int:
        """The number of its runs that have this status."""
        return sum(cell.status == status for cell in self.cells)

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(round, mean accuracy) for the rounds at which all of its runs were evaluated."""
        if not self.curves:
            return []
        common = sorted(set.intersection(*(set(curve) for curve in self.curves)))
        return [(at, mean([curve[at] for curve in self.curves])) for at in common]


@dataclass(frozen=True)
class SweepRecord:
    """A sweep folder as it was found.

    varying: the settings that differ between runs, with their values. common: the settings that all runs share.
    problems: a sentence for each file that is missing or damaged.
    """

    path: Path
    cells: "list[SweepCell]"
    groups: list[Group]
    varying: dict[str, list[Any]]
    common: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        """The number of runs that have this status."""
        return sum(cell.status == status for cell in self.cells)


def read_sweep_folder(path: Path) -> SweepRecord:
    """Read a sweep folder, finished or not. StoreError if the list of its runs is empty or cannot be read."""
    from noisegate.sweeps.sweep import SweepFolder

    problems: list[str] = []
    folder = SweepFolder(path)
    try:
        specs = folder.specs()
    except NoisegateError as error:
        raise StoreError(f"{path}: the list of its runs cannot be read ({error})") from None
    if not specs:
        raise StoreError(f"{path}: holds no run yet")
    cells = folder.cells(specs)
    by_name = {cell.spec.name(): cell for cell in cells}
    flat = [flatten(cell.spec) for cell in cells]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    values = {key: list({hashable(s.get(key)): s.get(key) for s in flat}.values()) for key in keys}
    varying = {key: found for key, found in values.items() if len(found) > 1}
    rows: dict[Any, list[SweepCell]] = {}
    for cell, settings in zip(cells, flat, strict=True):
        rows.setdefault(tuple(hashable(settings.get(key)) for key in varying if key != "seed"), []).append(cell)
    groups = []
    for members in rows.values():
        settings = {key: flatten(members[0].spec).get(key) for key in varying if key != "seed"}
        groups.append(_group(folder, settings, members, by_name, problems))
    groups = _with_roles(groups)
    others = sum(found.parent.name not in by_name for found in (path / "runs").glob("[!.]*/spec.toml"))
    if others:
        problems.append(f"{others} more run folders below runs/ do not belong to this sweep; they are left out.")
    common = {key: found[0] for key, found in values.items() if key not in varying}
    return SweepRecord(path, cells, groups, varying, common, problems)


def _group(
    folder: Any,
    settings: dict[str, Any],
    members: "list[SweepCell]",
    by_name: "dict[str, SweepCell]",
    problems: list[str],
) -> Group:
    accuracies, references, curves = [], [], []
    for cell in members:
        if cell.status == "done":
            if cell.result is None or not number(cell.result.get("accuracy")):
                problems.append(f"{cell.spec.name()}: its result.json is damaged; its numbers are left out.")
                continue
            accuracies.append(float(cell.result["accuracy"]))
        clean = next((by_name[name] for name in _names_beside(cell.spec, "reference") if name in by_name), None)
        if clean and clean.status == "done" and clean.result and number(clean.result.get("accuracy")):
            references.append(float(clean.result["accuracy"]))
        if cell.status == "done":
            record = read_run(folder.run_path(cell.spec), beside=False)
            curves.append({int(line["round"]): float(line["accuracy"]) for line in record.curve})
            problems += [f"{cell.spec.name()}: {problem}" for problem in record.problems]
    done = [cell.result for cell in members if cell.status == "done" and cell.result]
    worst = [found.recall for result in done if (found := worst_class(recalls_of(result)))]
    successes, fallbacks = ([each for result in done if (each := share_of(result, name)) is not None] for name in SHOWN)
    others = imbalance.gathered(done)
    whole = [curve for curve in curves if curve]
    private = members[0].spec.canonical().get("sigma") != 0
    return Group(settings, members, accuracies, references, whole, worst, successes, fallbacks, others, private=private)


def _names_beside(spec: AnySpec, word: str) -> list[str]:
    """What the reference or undefended run of a run may be called. Whether a plugin has a trigger is not known."""
    try:
        return [beside(spec, word, triggered=triggered).name() for triggered in (False, True)]
    except NoisegateError:
        return []


def _with_roles(groups: list[Group]) -> list[Group]:
    """The groups, with what each is to the others."""
    roles: dict[str, Literal["reference", "undefended"]] = {}
    for word in ("undefended", "reference"):
        for group in groups:
            own = {cell.spec.name() for cell in group.cells}
            names = {name for cell in group.cells for name in _names_beside(cell.spec, word)}
            roles |= dict.fromkeys(names - own, word)
    found = []
    for group in groups:
        of_cells = {roles.get(cell.spec.name(), "") for cell in group.cells}
        found.append(replace(group, role=of_cells.pop()) if len(of_cells) == 1 else group)  # type: ignore[arg-type]
    return found


def flatten(spec: AnySpec) -> dict[str, Any]:
    """All settings in one table; those of an attack, aggregator or worker are named as `attack.to`."""
    flat: dict[str, Any] = {}
    for key, value in spec.canonical().items():
        if key in PARTS or key == "features":
            flat[key] = value["name"]
            flat |= {f"{key}.{name}": entry for name, entry in value.items() if name != "name"}
        else:
            flat[key] = value
    return flat


def show(value: Any) -> str:
    """The value of a setting as people write it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else part(value)


def mean(values: list[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def hashable(value: Any) -> str:
    """A setting's value as something that can be compared and looked up."""
    return repr(value)
