"""Names and settings become objects, or an error that says what to do."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from noisegate import Dormant, Inner, Mean, SpecError, TwoStage
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.catalog import build, setting_types, typed
from noisegate.roles import Aggregator
from noisegate.runs import Spec
from noisegate.workers import WORKERS


@dataclass(frozen=True)
class Gadget:
    """Settings of every kind."""

    size: int = 1
    weight: float = 1.0
    mode: Literal["soft", "hard", 3] = "soft"
    label: str | None = None
    loud: bool = False
    extra: Any = None
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.size > 100:
            raise SpecError(f"size = {self.size}: must be at most 100")


class Plain:
    """A class without settings."""


NUMBER = 3
TABLE = {"gadget": Gadget, "plain": Plain}


def error(request) -> str:
    with pytest.raises(SpecError) as caught:
        build("thing", request, TABLE)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_name_is_enough():
    assert build("thing", "gadget", TABLE) == Gadget()
    assert build("thing", {"name": "gadget"}, TABLE) == Gadget()
    assert isinstance(build("thing", "plain", TABLE), Plain)


def test_settings_reach_the_object():
    request = {"name": "gadget", "size": 4, "mode": "hard", "label": "x", "loud": True, "extra": [1], "weight": 2}
    made = build("thing", request, TABLE)
    assert made == Gadget(4, 2.0, "hard", "x", True, [1])
    assert type(made.weight) is float, "a whole number becomes a float"
    assert request["name"] == "gadget", "the request is left alone"
    assert type(request["weight"]) is int


def test_an_unknown_name_lists_the_choices():
    message = error("gadgte")
    assert message == "thing = 'gadgte': unknown (did you mean 'gadget'?); choose from gadget, plain"
    assert "did you mean" not in error("zzz")


@pytest.mark.parametrize("request_", [{}, {"size": 2}, {"name": 3}, {"name": None}, {"name": True}])
def test_a_table_needs_a_name(request_):
    assert "needs a name; choose from gadget, plain" in error(request_)


def test_an_unknown_setting_lists_the_choices():
    message = error({"name": "gadget", "wieght": 2})
    for part in (
        "thing.wieght = 2",
        "'gadget' has no such setting",
        "did you mean 'weight'?",
        "choose from size, weight",
    ):
        assert part in message
    assert "made" not in message, "a field that cannot be set is not offered"
    assert "takes no settings" in error({"name": "plain", "size": 2})


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("size", 1.5, "a whole number"),
        ("size", 2.0, "a whole number"),
        ("size", "2", "a whole number"),
        ("size", True, "a whole number"),
        ("size", None, "a whole number"),
        ("weight", "heavy", "a number"),
        ("weight", True, "a number"),
        ("weight", [1.0], "a number"),
        ("mode", "loud", "choose from 'soft', 'hard', 3"),
        ("mode", 4, "choose from 'soft', 'hard', 3"),
        ("label", 3, "must be text"),
        ("loud", 1, "true or false"),
        ("loud", "true", "true or false"),
    ],
)
def test_a_wrong_type_is_named(key, value, must):
    message = error({"name": "gadget", key: value})
    assert f"thing.{key} = {value!r}: " in message
    assert must in message


@pytest.mark.parametrize("value", [True, 1.0])
def test_a_literal_is_taken_literally(value):
    """True == 1 == 1.0 in Python; a setting that may be 1 may still be neither of the others."""
    with pytest.raises(SpecError, match="stages"):
        build("aggregator", {"name": "two-stage", "stages": value}, AGGREGATORS)


def test_literals_and_options_pass():
    assert typed("key", 3, Literal["soft", 3]) == 3
    assert typed("key", None, str | None) is None
    assert typed("key", 3, float | None) == 3.0
    assert typed("key", float("inf"), float) == float("inf"), "ranges are the object's business"


def test_an_impossible_value_names_the_entry():
    message = error({"name": "gadget", "size": 101})
    assert "thing 'gadget': size = 101: must be at most 100" in message


def test_a_plugins_class_is_loaded():
    assert build("thing", f"{__name__}:Gadget", TABLE) == Gadget()
    assert build("thing", {"name": f"{__name__}:Gadget", "size": 7}, TABLE) == Gadget(7)
    assert "'size'" not in error({"name": f"{__name__}:Gadget", "sise": 7}).split(":")[0]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no.such.module:Name", "cannot be loaded"),
        ("test_catalog:NoSuchName", "cannot be loaded"),
        (":Name", "cannot be loaded"),
        ("test_catalog:", "cannot be loaded"),
        (".relative:Name", "cannot be loaded"),
        ("test_catalog:NUMBER", "is neither a function nor a class"),
    ],
)
def test_a_wrong_path_is_explained(path, says):
    message = error(path)
    assert f"thing = {path!r}" in message
    assert says in message


def test_settings_of_every_entry_have_types():
    for table in (ATTACKS, AGGREGATORS):
        for name, kind in table.items():
            for key, hint in setting_types(kind).items():
                assert hint is not None, f"{name}.{key}"


def test_every_entry_is_built_by_its_name_alone():
    for table in (ATTACKS, AGGREGATORS):
        for name, kind in table.items():
            assert isinstance(build("part", name, table), kind)
    assert isinstance(build("aggregator", "mean", AGGREGATORS), Mean)
    assert build("aggregator", {"name": "two-stage", "stages": 1}, AGGREGATORS) == TwoStage(stages=1)


# One row for each entry of the catalog: what it declares. A view, and what a run is refused for, follow from it. An
# attack that plays another one knows what that one knows.
KNOWS = {
    "none": "data-only",
    "zero": "blind",
    "nan": "blind",
    "large-norm": "blind",
    "gaussian": "blind",
    "label-flip": "data-only",
    "class-swap": "data-only",
    "class-hide": "data-only",
    "backdoor": "data-only",
    "gradient-ascent": "data-only",
    "sign-flip": "data-only",
    "mimic": "omniscient",
    "local-poisoning": "omniscient",
    "a-little": "omniscient",
    "inner": "omniscient",
    "min-max": "omniscient",
    "min-sum": "omniscient",
    "fang-krum": "omniscient",
    "fang-trimmed-mean": "omniscient",
    "a-little-tuned": "omniscient",
    "inner-tuned": "omniscient",
    "rank-matched": "data-only",
    "score-banking": "data-only",
    "trojan": "data-only",
    "on-off": "data-only",
    "dormant": "data-only",
}
# tests_noise, follows_workers, and the worker that it goes with
DECLARES = {
    "mean": (False, False, None),
    "two-stage": (True, False, None),
    "fortified": (True, True, None),
    "krum": (False, False, None),
    "multi-krum": (False, False, None),
    "mda": (False, False, None),
    "bulyan": (False, False, None),
    "median": (False, False, None),
    "trimmed-mean": (False, False, None),
    "geometric-median": (False, False, None),
    "centered-clipping": (False, False, None),
    "spectral-filter": (False, False, None),
    "sign-vote": (False, False, None),
    "fltrust": (False, False, None),
    "nnm": (False, False, None),
    "bucketing": (False, False, None),
    "guerraoui": (False, False, "clipped-momentum"),
    "sign-gaussian": (False, False, "sign-gaussian"),
    "sign-randomized": (False, False, "sign-randomized"),
    "ma-sign": (False, False, "ma-sign"),
}


def test_every_attack_declares_what_it_knows():
    assert {name: build("attack", name, ATTACKS).knows for name in ATTACKS} == KNOWS


def test_every_aggregator_declares_its_capabilities():
    found = {}
    for name in AGGREGATORS:
        aggregator = build("aggregator", name, AGGREGATORS)
        assert isinstance(aggregator, Aggregator)
        found[name] = aggregator.tests_noise, aggregator.follows_workers, aggregator.goes_with.get("worker")
    assert found == DECLARES


def test_dormant_wraps_a_table():
    attack = {"name": "dormant", "until": 0.25, "attack": {"name": "inner", "scale": 2}}
    assert Spec(attack=attack).build_attack() == Dormant(Inner(2.0), 0.25)
    twice = {"name": "dormant", "attack": {"name": "dormant", "attack": "inner"}}
    assert Spec(attack=twice).build_attack() == Dormant(Dormant(Inner()))
    assert Spec(attack="inner", attack_start=0.25, attack_asleep="copy").build_attack() == Dormant(
        Inner(), 0.25, "copy"
    )


@pytest.mark.parametrize(
    "inner", ["innner", {"name": "inner", "skale": 1}, {"name": "inner", "scale": -1}, {"scale": 1}]
)
def test_dormant_passes_errors_on(inner):
    with pytest.raises(SpecError, match="attack"):
        Spec(attack={"name": "dormant", "attack": inner})


@pytest.mark.parametrize("inner", [3, 2.5, True, ["inner"], None])
def test_dormant_wraps_attacks_only(inner):
    with pytest.raises(SpecError, match=r"attack\.attack"):
        Spec(attack={"name": "dormant", "attack": inner})


def test_the_first_line_of_every_docstring_is_a_sentence():
    """`noisegate list` prints it alone."""
    for table in (ATTACKS, AGGREGATORS, WORKERS):
        for name, entry in table.items():
            assert (entry.__doc__ or "").split("\n", 1)[0].endswith("."), name
