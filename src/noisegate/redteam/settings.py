"""What the search varies: the settings of each attack with the values to try, and specs with one setting changed."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from noisegate.attacks import ATTACKS
from noisegate.catalog import find
from noisegate.errors import SpecError
from noisegate.redteam.objectives import Objective
from noisegate.roles import trigger_of
from noisegate.runs.spec import Spec

LATE = 0.9
"""The share of the rounds after which an attack with a late start begins."""

STARTS = (0.0, 0.2, 0.5, LATE)
"""The values of `attack_start` to try, as shares of the rounds."""

STRENGTHS = (1.0, 0.5, 0.25, 0.1)
"""The values of the setting `strength` to try."""

FORMS = ("ranked", "valid")
"""The values of the setting `form` to try."""

Values = Mapping[str, Sequence[Any]]
"""The values to try, by setting."""

SETTINGS: dict[str, Values] = {
    "rank-matched": {
        "form": FORMS,
        "strength": STRENGTHS,
        "target": ("ascend", "weights", "random", "descend"),
    },
    "score-banking": {
        "turn": (0.2, 0.5, 0.9),
        "form": FORMS,
        "strength": STRENGTHS,
        "attack": (None, "gradient-ascent", "label-flip", "inner", "a-little"),
    },
    "trojan": {
        "pull": (0.1, 0.3, 0.6),
        "drift": ("random", "weights"),
        "form": FORMS,
        "apart": (False, True),
        "strength": STRENGTHS,
    },
    "on-off": {
        "share": (0.25, 0.5, 0.75),
        "period": (0.02, 0.1, 0.5),
        "attack": (None, "gradient-ascent", "label-flip", "inner", "a-little"),
    },
    "label-flip": {"to": ("reverse", "random")},
    "class-swap": {"pairs": ("0-1", "2-3", "4-5", "6-7", "8-9", "0-1,2-3,4-5,6-7,8-9")},
    "class-hide": {"hidden": tuple(range(10)), "shown": tuple(range(10))},
    "backdoor": {"share": (0.05, 0.1, 0.2, 0.5, 1.0), "target": tuple(range(10)), "size": (1, 3, 5)},
    "gradient-ascent": {},
    "sign-flip": {"scale": (0.5, 1.0, 2.0)},
    "inner": {"scale": (0.1, 0.5, 1.0, 2.0, 10.0)},
    "a-little": {"deviation": (None, 0.25, 0.5, 1.0, 2.0)},
    "inner-tuned": {"highest": (1.0, 100.0), "questions": (16, 32)},
    "a-little-tuned": {"highest": (1.0, 100.0), "questions": (16, 32)},
    "local-poisoning": {},
    "min-max": {"perturbation": ("std", "unit", "sign")},
    "min-sum": {"perturbation": ("std", "unit", "sign")},
    "fang-krum": {"halvings": (5, 20)},
    "fang-trimmed-mean": {"stretch": (1.1, 2.0, 10.0)},
    "mimic": {"worker": (0, 1, 2)},
    "dormant": {"until": (0.2, 0.5, 0.9), "asleep": ("behave", "copy")},
    "gaussian": {"scale": (0.5, 1.0, 2.0, 10.0)},
    "large-norm": {"factor": (1.0, 10.0, 1e3, 1e6)},
    "zero": {},
    "nan": {"value": ("nan", "inf")},
}
"""The settings of each attack that matter, and the values to try. None stands for the default.

The most promising attacks are first, and so are the most promising settings of each. Of an attack that is not in this
table, only the start is varied.
"""

OWN_START = ("dormant", "score-banking")
"""The attacks that begin by a setting of their own. A late start would make another attack of the catalog of them."""

BEHAVED = "none"
"""The entry of the catalog with which Byzantine workers behave. Attacks are measured by the accuracy that it leaves."""


def fits(spec: Spec, objective: Objective) -> bool:
    """Whether a spec's attack can serve an objective: "backdoor" needs one with a trigger."""
    return objective != "backdoor" or trigger_of(spec.build_attack()) is not None


def candidates(objective: Objective) -> list[str]:
    """The attacks of the catalog that can serve an objective, at their defaults."""
    return [name for name in ATTACKS if name != BEHAVED and fits(Spec(attack=name), objective)]


def attack_of(spec: Spec) -> str:
    """The name of a spec's attack."""
    return str(spec.canonical()["attack"]["name"])


def with_attack(spec: Spec, attack: str) -> Spec:
    """The spec with an attack at its defaults, from the first round."""
    return replace(spec, attack=attack, attack_start=0.0)


def behaved(spec: Spec) -> Spec:
    """The spec without an attack: the Byzantine workers behave as honest ones."""
    return with_attack(spec, BEHAVED)


def by_promise(names: Iterable[str]) -> list[str]:
    """Attacks by how promising they are. Those that are not in SETTINGS are first, since nothing is known of them."""
    place = {name: i for i, name in enumerate(SETTINGS)}
    return sorted(names, key=lambda name: place.get(name, -1))


def settings_of(attack: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """The (setting, values) to try for an attack, the most promising first."""
    if attack not in OWN_START:
        yield "attack_start", STARTS
    yield from SETTINGS.get(attack, {}).items()
    if attack not in OWN_START:
        yield "attack_asleep", ("behave", "copy")


def variants(spec: Spec, setting: str, values: Sequence[Any]) -> list[Spec]:
    """The spec with each of the values of one setting. Invalid specs, and the spec itself, are left out."""
    found = []
    for value in values:
        try:
            changed = with_setting(spec, setting, value)
        except SpecError:
            continue  # such as a nested attack without a setting of that name
        if changed != spec:
            found.append(changed)
    return found


def with_setting(spec: Spec, setting: str, value: Any) -> Spec:
    """The spec with one setting changed. A default is left out, so that equal attacks have equal specs."""
    if setting in ("attack_start", "attack_asleep"):
        return replace(spec, **{setting: value})
    table = dict(spec.canonical()["attack"])
    table.pop(setting, None)
    if value is not None and value != _defaults(table["name"]).get(setting, dataclasses.MISSING):
        table[setting] = value
    return replace(spec, attack=table)


def _defaults(attack: str) -> dict[str, Any]:
    kind = find("attack", attack, ATTACKS)
    return {entry.name: entry.default for entry in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
