"""How the groups of a sweep are dealt to charts, lines and maps, and what stands beside them."""

from dataclasses import dataclass, field, replace
from typing import Any

from noisegate import paper
from noisegate.checks import plain
from noisegate.report.folders import number
from noisegate.report.sweeps import Group, SweepRecord, hashable, mean, show

MOST_LINES = 6
"""The largest number of lines in a chart."""

MOST_CHARTS = 12
"""The largest number of charts of accuracy against a setting, and of maps."""

COMPARED = ("dataset", "model", "features", "attack", "aggregator", "byzantine", "non_iid", "epsilon")
"""Settings that are always told. Others are left out where they follow from those that are told."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Facet:
    """One chart of a sweep.

    title: what its groups share and other charts have otherwise. lines: its groups by the label of their line, which
    has only what varies in this chart. legend: the setting that all labels are values of, if there is one alone.
    beside: by name, points to compare the lines with.
    """

    title: str
    lines: dict[str, list[Group]]
    legend: str = ""
    beside: dict[str, Points] = field(default_factory=dict)


def axes_of(record: SweepRecord) -> list[str]:
    """The settings to draw accuracy against: the one with most values, of those that are numbers; and epsilon."""
    found = {}
    for key in record.varying:
        values = [group.settings[key] for group in drawn(record, key)] if key != "seed" else []
        if values and all(number(value) for value in values):
            found[key] = len(set(values))
    found = {key: count for key, count in found.items() if count > 1}
    first = [max(found, key=lambda key: found[key])] if found else []
    return first + [key for key in found if key == "epsilon" and key not in first]


def drawn(record: SweepRecord, axis: str | None) -> list[Group]:
    """The groups that are lines of a chart. Its reference stands beside it, and so does what has no privacy."""
    if axis is None:
        return record.groups
    found = [group for group in record.groups if group.role != "reference"]
    return [group for group in found if group.private] if axis == "epsilon" else found


def facets(record: SweepRecord, axis: str | None) -> list[Facet]:
    """The charts of a sweep, each of at most MOST_LINES lines.

    The settings with most values tell charts apart, and the others tell lines apart.
    """
    groups = drawn(record, axis)
    telling = _telling(groups, [key for key in record.varying if key not in ("seed", axis)], axis)
    apart: list[str] = []
    while True:
        within = [key for key in telling if key not in apart]
        found: dict[str, dict[str, list[Group]]] = {}
        for group in groups:
            lines = found.setdefault(label(group, apart), {})
            lines.setdefault(label(group, within), []).append(group)
        if not within or max(len(lines) for lines in found.values()) <= MOST_LINES:
            dealt = [[group for groups in lines.values() for group in groups] for lines in found.values()]
            made = [_facet(record, some, apart, within, axis) for some in dealt]
            return made if len(made) > 1 else [replace(made[0], title="")] if made else []
        apart.append(max(within, key=lambda key: len(record.varying[key])))


def told_of(record: SweepRecord, group: Group) -> str:
    """The settings that tell a group from the others, in words."""
    groups = [one for one in record.groups if one.role != "reference"]
    keys = _telling(groups, [key for key in record.varying if key != "seed"], None)
    return (
        label(group, [key for key in keys if len({hashable(one.settings[key]) for one in groups}) > 1]) or group.label
    )


def _telling(groups: list[Group], keys: list[str], axis: str | None) -> list[str]:
    """The settings that tell lines apart: without those that follow from the others, such as the worker of a model."""
    kept = list(keys)
    for key in reversed(keys):
        others = [other for other in kept if other != key]
        if key not in COMPARED and _distinct(groups, [*others, axis]) == _distinct(groups, [*kept, axis]):
            kept = others
    return kept


def _distinct(groups: list[Group], keys: list[str | None]) -> int:
    return len({tuple(hashable(group.settings[key]) for key in keys if key) for group in groups})


def _facet(record: SweepRecord, groups: list[Group], apart: list[str], within: list[str], axis: str | None) -> Facet:
    own = [group for group in groups if group.role != "reference"] or groups
    told = [key for key in within if len({hashable(group.settings[key]) for group in own}) > 1]
    shared = [key for key in within if key not in told and own[0].settings[key] is not None]
    legend = told[0] if len(told) == 1 else ""
    lines: dict[str, list[Group]] = {}
    for group in groups:
        lines.setdefault(_line(group, own, told) or "accuracy", []).append(group)
    beside = _beside(record, lines, axis) if axis else {}
    return Facet(label(own[0], apart + shared), lines, legend, beside)


def _line(group: Group, own: list[Group], told: list[str]) -> str:
    """The label of a group among others. own: those that are not references."""
    name = show(group.settings[told[0]]) if len(told) == 1 else label(group, told)
    if group.role == "reference" and group not in own:
        return f"reference, {name}" if name and len(told) > 1 else "reference"
    return f"{name} (undefended)" if group.role == "undefended" and name and "aggregator" in told else name


def label(group: Group, keys: list[str]) -> str:
    """The settings in words. A setting of a part, such as `attack.to`, is told only of the parts that have it."""
    known = [key for key in keys if "." not in key or group.settings[key] is not None]
    return ", ".join(f"{key} {show(group.settings[key])}" for key in known)


def _beside(record: SweepRecord, lines: dict[str, list[Group]], axis: str) -> dict[str, Points]:
    """The references of the lines; against epsilon, what has no privacy, and the paper's numbers."""
    found = _shared("reference", lines, axis)
    if axis != "epsilon":
        return found
    ends = [float(group.settings[axis]) for groups in lines.values() for group in groups]
    keys = [key for key in COMPARED if key in record.varying and key != axis]
    bare: dict[str, Points] = {}
    for name, groups in lines.items():
        same = [group for group in record.groups if not group.private and group.accuracies and group.role == ""]
        same = [group for group in same if all(group.settings[key] == groups[0].settings[key] for key in keys)]
        if same:
            height = mean([mean(group.accuracies) for group in same])
            bare[name] = [(min(ends), height), (max(ends), height)]
    found |= _named("no privacy", bare)
    every = [group for groups in lines.values() for group in groups]
    settings = {hashable(_setting(record, group)): _setting(record, group) for group in every}
    return found | (_of_paper(*settings.popitem()[1], ends) if len(settings) == 1 else {})


def _shared(word: str, lines: dict[str, list[Group]], axis: str) -> dict[str, Points]:
    """The references of the lines. Runs that are their own reference have none beside them."""
    found = {
        name: sorted(
            (float(group.settings[axis]), mean(group.references))
            for group in groups
            if group.references and group.references != group.accuracies
        )
        for name, groups in lines.items()
    }
    return _named(word, {name: points for name, points in found.items() if points})


def _named(word: str, found: dict[str, Points]) -> dict[str, Points]:
    """One line if all lines have the same to be compared with; else one for each, with its name."""
    if len({hashable(points) for points in found.values()}) <= 1:
        return {word: next(iter(found.values()))} if found else {}
    return {f"{word} of {name}": points for name, points in found.items()}


def _setting(record: SweepRecord, group: Group) -> tuple[str, bool]:
    """The data set of a group, and whether it is dealt as the paper's non-iid one."""
    both = {**record.common, **group.settings}
    return str(both.get("dataset")), bool(both.get("non_iid"))


def _of_paper(dataset: str, non_iid: bool, ends: list[float]) -> dict[str, Points]:
    """What the paper prints for a data set without an attack, from the smallest to the largest epsilon of a chart."""
    only: dict[str, list[Any]] = {"dataset": [dataset], "non_iid": [non_iid]}
    found: dict[str, Points] = {}
    private, open_ = (paper.load(name, seeds=(1,), only=only).cells for name in ("reference", "no-privacy"))
    points = sorted((float(cell.varies["epsilon"]), cell.printed) for cell in private if cell.printed is not None)
    if points := [(at, value) for at, value in points if min(ends) <= at <= max(ends)]:
        found["the paper, no attack"] = points
    if open_ and open_[0].printed is not None:
        found["the paper, no privacy"] = [(at, open_[0].printed) for at in (min(ends), max(ends))]
    return found


@dataclass(frozen=True)
class AttackMap:
    """The mean accuracy by attack and aggregator. title: what tells it from other maps of the sweep."""

    title: str
    attacks: list[str]
    aggregators: list[str]
    values: dict[tuple[str, str], float]

    def worst(self, aggregator: str) -> tuple[float, str] | None:
        """The lowest accuracy of an aggregator, and the attack; None if none of its runs is done."""
        found = [(value, attack) for (attack, name), value in self.values.items() if name == aggregator]
        return min(found, default=None)


def attack_maps(record: SweepRecord) -> list[AttackMap]:
    """The maps of a sweep that tries several attacks on several aggregators: one for each of its other settings."""
    if not {"attack", "aggregator"} <= record.varying.keys():
        return []
    groups = [group for group in record.groups if group.role != "reference"]
    others = [key for key in record.varying if key != "seed" and key.partition(".")[0] not in ("attack", "aggregator")]
    parts = [key for key in record.varying if key.partition(".")[0] in ("attack", "aggregator")]
    others = _telling(groups, [*parts, *others], None)
    others = [key for key in others if key not in parts]
    dealt: dict[str, dict[tuple[str, str], list[float]]] = {}
    for group in groups:
        cell = tuple(_part(group, word) for word in ("attack", "aggregator"))
        dealt.setdefault(label(group, others), {}).setdefault(cell, []).extend(group.accuracies)  # type: ignore[arg-type]
    maps = []
    for title, cells in dealt.items():
        attacks, aggregators = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
        values = {cell: mean(found) for cell, found in cells.items() if found}
        if len(attacks) > 1 and len(aggregators) > 1 and values:
            maps.append(AttackMap(title, attacks, aggregators, values))
    return maps


def _part(group: Group, word: str) -> str:
    """An attack or aggregator with those of its settings that vary."""
    chosen = {key: value for key, value in group.settings.items() if key.startswith(f"{word}.") and value is not None}
    more = ", ".join(f"{key.partition('.')[2]} {show(value)}" for key, value in chosen.items())
    return f"{plain(group.settings[word])} ({more})" if more else plain(group.settings[word])
