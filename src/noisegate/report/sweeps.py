"""Reads a sweep folder: its runs, the settings that vary between them, and their results in groups of seeds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

MOST_LINES = 6
"""The largest number of lines in a chart."""

MOST_CHARTS = 12
"""The largest number of charts of accuracy against a setting."""

SHOWN = ("attack_success", "fallback")
"""What the results show beside the accuracy, where it applies."""

STATUSES = ("done", "running", "failed", "skipped", "missing")
"""The statuses of a run of a sweep, in the order in which they are listed."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    settings: those that vary between groups. accuracies, curves: of its runs that are done. references: the accuracies
    of its reference runs that are done. recalls, successes, fallbacks: the lowest recall of a class, the attack success
    and the share of rounds fallen back, of its runs that are done and have one. beside: by the name of a column, what
    else is shown of them.
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
    values = {key: list({_hashable(s.get(key)): s.get(key) for s in flat}.values()) for key in keys}
    varying = {key: found for key, found in values.items() if len(found) > 1}
    rows: dict[Any, list[SweepCell]] = {}
    for cell, settings in zip(cells, flat, strict=True):
        rows.setdefault(tuple(_hashable(settings.get(key)) for key in varying if key != "seed"), []).append(cell)
    groups = []
    for members in rows.values():
        settings = {key: flatten(members[0].spec).get(key) for key in varying if key != "seed"}
        groups.append(_group(folder, settings, members, by_name, problems))
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
        clean = next((by_name[name] for name in _reference_names(cell.spec) if name in by_name), None)
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
    return Group(settings, members, accuracies, references, whole, worst, successes, fallbacks, others)


def _reference_names(spec: AnySpec) -> list[str]:
    """What the reference of a run may be called. Whether a plugin has a trigger, which stays there, is not known."""
    try:
        return [beside(spec, "reference", triggered=triggered).name() for triggered in (False, True)]
    except NoisegateError:
        return []


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


@dataclass(frozen=True)
class Facet:
    """One chart of a sweep. title: the settings that its groups share. lines: its groups by the label of their line."""

    title: str
    lines: dict[str, list[Group]]


def axis_of(record: SweepRecord) -> str | None:
    """The setting to draw accuracy against: of those whose values are numbers, the one with most values."""
    numeric = [key for key, found in record.varying.items() if key != "seed" and all(number(value) for value in found)]
    return max(numeric, key=lambda key: len(record.varying[key]), default=None)


def facets(record: SweepRecord, axis: str | None) -> list[Facet]:
    """The charts of a sweep, each of at most MOST_LINES lines.

    The settings with most values tell charts apart, and the others tell lines apart.
    """
    telling = [key for key in record.varying if key not in ("seed", axis)]
    apart: list[str] = []
    while True:
        within = [key for key in telling if key not in apart]
        found: dict[str, dict[str, list[Group]]] = {}
        for group in record.groups:
            lines = found.setdefault(_label(group, apart), {})
            lines.setdefault(_label(group, within) or "accuracy", []).append(group)
        if not within or max(len(lines) for lines in found.values()) <= MOST_LINES:
            return [Facet(title, lines) for title, lines in found.items()]
        apart.append(max(within, key=lambda key: len(record.varying[key])))


def _label(group: Group, keys: list[str]) -> str:
    return ", ".join(f"{key} {show(group.settings[key])}" for key in keys)


def _hashable(value: Any) -> str:
    return repr(value)
