"""A spec says what it means, refuses what it cannot mean, and has one name."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noisegate import Compute, Spec, SpecError
from noisegate.data import SOURCES
from noisegate.runs import make_spec, read_spec, reference, undefended

positive = st.floats(1e-6, 1e9)
counts = st.integers(1, 10**6)
attacks = st.one_of(
    st.sampled_from(["none", "gaussian", "label-flip", "local-poisoning", "a-little", "inner", "dormant"]),
    st.builds(lambda scale: {"name": "inner", "scale": scale}, positive),
    st.builds(lambda scale: {"name": "gaussian", "scale": scale}, st.integers(1, 9)),
    st.just({"name": "label-flip", "to": "random"}),
    st.builds(lambda z: {"name": "a-little", "deviation": z}, positive),
    st.builds(
        lambda until, inner: {"name": "dormant", "until": until, "attack": inner},
        st.floats(0, 1),
        st.sampled_from(["inner", {"name": "gaussian", "scale": 3.0}]),
    ),
)
aggregators = st.one_of(
    st.sampled_from(["mean", "two-stage"]),
    st.builds(
        lambda stages, momentum: {"name": "two-stage", "stages": stages, "server_momentum": momentum},
        st.sampled_from(["both", 1, 2]),
        st.floats(0, 0.999),
    ),
)
workers = st.sampled_from(["normalized", "clipped", {"name": "clipped", "threshold": 0.5}, {"name": "normalized"}])
partitions = st.one_of(
    st.just({}),
    st.just({"non_iid": True}),
    st.builds(lambda alpha: {"dirichlet": alpha}, positive),
)
paths = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
options = st.fixed_dictionaries(
    {},
    optional={
        "dataset": st.one_of(st.sampled_from(["digits", "mnist"]), paths.map(lambda name: f"{name}.npz")),
        "model": st.sampled_from(["mlp", "cnn", "linear"]),
        "features": st.sampled_from(["scattering", {"name": "scattering", "scales": 3}, "texture", "mine.py:embed"]),
        "loss": st.sampled_from(["mine.py:loss", "hospital.losses:weighted"]),
        "metrics": st.sampled_from([["auc"], ["recall-3", "mine.py:f1"]]),
        "epsilon": positive,
        "delta": st.floats(1e-12, 0.999),
        "sigma": positive,
        "sigma_base": positive,
        "accountant": st.sampled_from(["pld", "rdp"]),
        "sampling": st.sampled_from(["poisson", "fixed"]),
        "batch": counts,
        "worker": workers,
        "rate": positive,
        "workers": counts,
        "byzantine": st.floats(0, 0.999),
        "attack": attacks,
        "attack_start": st.floats(0, 1),
        "attack_asleep": st.sampled_from(["behave", "copy"]),
        "aggregator": aggregators,
        "gamma": st.floats(1e-6, 1),
        "rounds": counts,
        "auxiliary": counts,
        "evaluate_every": counts,
        "seed": st.integers(-(2**70), 2**70),
    },
)


def priced(chosen: dict[str, object]) -> dict[str, object]:
    """Fixed sampling has one accountant only."""
    return {"accountant": "rdp"} if chosen.get("sampling") == "fixed" else {}


specs = st.builds(lambda chosen, partition: make_spec({**chosen, **partition, **priced(chosen)}), options, partitions)


def through_a_file(spec: Spec) -> Spec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        path.write_text(spec.to_toml(), encoding="utf-8")
        return read_spec(path)


@given(specs)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_toml_and_back(spec):
    again = through_a_file(spec)
    assert again.canonical() == spec.canonical()
    assert again.name() == spec.name()
    if spec.attack_start > 0:  # otherwise what an attack does asleep is left out: it never sleeps
        assert again == spec


def test_a_part_is_the_same_as_a_name_or_as_a_table():
    assert Spec(attack="label-flip") == Spec(attack={"name": "label-flip"})
    assert through_a_file(Spec()) == Spec()


def test_equal_specs_have_equal_names():
    """1 and 1.0 are the same setting of a float, in a table as elsewhere."""
    whole, broken = (
        Spec(epsilon=1, attack={"name": "inner", "scale": 1}),
        Spec(epsilon=1.0, attack={"name": "inner", "scale": 1.0}),
    )
    assert whole == broken
    assert whole.name() == broken.name()


@pytest.mark.parametrize(
    "name", ["ünï.npz", "emoji 😀.npz", 'quo"te\\.npz', "tab\t.npz", "del\x7f.npz", "new\nline.npz"]
)
def test_any_text_survives_toml(name):
    assert through_a_file(Spec(dataset=name)).dataset == name


@pytest.mark.parametrize("value", [[{"a": 1.5}, [True, "x"]], {"a b": {"ü": [1]}}, {}, []])
def test_any_setting_of_own_features_survives_toml(value):
    spec = Spec(features={"name": "mine.py:Embed", "größe": value})
    assert through_a_file(spec) == spec
    assert Spec(features={"name": "mine.py:Embed", "scales": None}) == Spec(features="mine.py:Embed")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), [float("inf")], {1: 2}])
def test_what_no_file_can_hold_is_no_setting_of_own_features(value):
    with pytest.raises(SpecError, match=r"^features\.scale = .*: must be text, a finite number, true or false"):
        Spec(features={"name": "mine.py:Embed", "scale": value})


def test_a_setting_that_is_none_survives_toml():
    spec = Spec(attack={"name": "a-little", "deviation": None})
    assert through_a_file(spec).build_attack() == spec.build_attack()


OTHERWISE = {
    "features": "scattering",
    "dataset": "mnist",
    "model": "cnn",
    "epsilon": 1.0,
    "delta": 1e-5,
    "sigma": 1.0,
    "sigma_base": 1.0,
    "accountant": "rdp",
    "sampling": "fixed",
    "batch": 8,
    "worker": "clipped",
    "rate": 0.1,
    "workers": 7,
    "byzantine": 0.5,
    "attack": "inner",
    "attack_start": 0.5,
    "attack_asleep": "copy",
    "aggregator": "mean",
    "gamma": 0.5,
    "rounds": 7,
    "non_iid": True,
    "dirichlet": 1.0,
    "auxiliary": 3,
    "evaluate_every": 7,
    "seed": 2,
    "auxiliary_from": "kmnist",
    "declared": 100,
    "secret": True,
    "redeal": True,
    "absent": 0.1,
    "loss": "mine.py:loss",
    "label_column": "ill",
    "worker_column": "ward",
    "metrics": ["auc"],
    "class_shares": [9.0, 1.0],
}


def test_names_are_those_of_earlier_versions():
    """A setting that is new and not used changes no name, so that run folders are found again."""
    earlier = {"batch": 16, "rate": 0.2, "delta": "paper"}  # which were the defaults
    assert Spec(aggregator="two-stage", **earlier).name() == "digits-77e7d4db9158"
    assert Spec(aggregator="two-stage").name() != "digits-77e7d4db9158"
    assert not {"auxiliary_from", "declared", "secret", "absent"} & Spec().canonical().keys()
    assert Spec(auxiliary_from="kmnist").canonical()["auxiliary_from"] == "kmnist"


def test_the_name_changes_with_every_setting():
    assert OTHERWISE.keys() == {field.name for field in dataclasses.fields(Spec)}, "add the new setting above"
    # Fixed sampling cannot be priced otherwise, and shares of classes are for one sampling alone.
    needs = {"sampling": {"accountant": "rdp"}, "class_shares": {"sampling": "balanced"}}
    names = {Spec(**{key: value, **needs.get(key, {})}).name() for key, value in OTHERWISE.items()}
    assert len(names) == len(OTHERWISE)
    assert names - {Spec(attack_asleep="copy").name()} == names - {Spec().name()}
    assert Spec(attack_asleep="copy", attack_start=0.5).name() != Spec(attack_start=0.5).name()
    changed_part = Spec(aggregator={"name": "fortified", "refused": 2.0})
    assert changed_part.name() != Spec().name()


def test_the_name_says_the_data_set_and_nothing_of_the_machine():
    assert Spec().name().startswith("digits-")
    assert len(Spec().name()) == len("digits-") + 12
    assert Spec(dataset="/some/where/mine.npz").name().startswith("mine-")
    assert not {field.name for field in dataclasses.fields(Compute)} & {
        field.name for field in dataclasses.fields(Spec)
    }
    assert Spec().name() == Spec().name()


def test_the_order_of_settings_in_a_table_does_not_matter():
    left = Spec(aggregator={"name": "two-stage", "width": 2.0, "stages": 1})
    right = Spec(aggregator={"stages": 1, "width": 2.0, "name": "two-stage"})
    assert left.name() == right.name()
    assert left == right


def test_a_spec_does_not_follow_its_callers_table():
    table = {"name": "inner", "scale": 2.0}
    spec = Spec(attack=table)
    before = spec.name()
    table["scale"] = 3.0
    assert spec.name() == before


WRONG = [
    ({"epsilon": 0}, "epsilon = 0"),
    ({"epsilon": -1.0}, "epsilon = -1.0"),
    ({"epsilon": float("nan")}, "epsilon = nan"),
    ({"epsilon": float("inf")}, "epsilon = inf"),
    ({"epsilon": "two"}, "epsilon = 'two': must be a number"),
    ({"epsilon": True}, "epsilon = True"),
    ({"delta": 1.0}, "delta = 1.0: must be above 0 and below 1"),
    ({"delta": 0.0}, "delta = 0.0"),
    ({"delta": "papers"}, "delta = 'papers': must be a number or 'paper'"),
    ({"declared": 0}, "declared = 0: must be a whole number, 1 or more"),
    ({"sigma": -2}, "sigma = -2"),
    ({"sigma_base": 0}, "sigma_base = 0"),
    ({"accountant": "gdp"}, "accountant = 'gdp': unknown.*choose from pld, rdp"),
    ({"sampling": "shuffle"}, "sampling = 'shuffle': unknown.*choose from poisson, equal, balanced, fixed"),
    ({"batch": 0}, "batch = 0"),
    ({"batch": 16.0}, "batch = 16.0: must be a whole number"),
    ({"batch": True}, "batch = True"),
    ({"worker": "cliped"}, "worker = 'cliped': unknown.*did you mean 'clipped'.*choose from normalized, clipped"),
    ({"worker": {"name": "clipped", "threshold": 0}}, "threshold = 0"),
    ({"worker": {"name": "normalized", "momentum": 1.0}}, "momentum = 1.0"),
    ({"rate": 0}, "rate = 0"),
    ({"rate": float("inf")}, "rate = inf"),
    ({"workers": 0}, "workers = 0"),
    ({"workers": "ten"}, "workers = 'ten': must be a whole number"),
    ({"byzantine": 1.0}, "byzantine = 1.0"),
    ({"byzantine": -0.1}, "byzantine = -0.1"),
    ({"byzantine": float("nan")}, "byzantine = nan"),
    ({"attack": "labelflip"}, "attack = 'labelflip': unknown.*did you mean 'label-flip'.*choose from none, zero"),
    ({"attack": {"name": "label-flip", "too": "random"}}, r"attack\.too = 'random'.*did you mean 'to'"),
    ({"attack": {"name": "label-flip", "to": "left"}}, r"attack\.to = 'left'.*choose from 'reverse', 'random'"),
    ({"attack": 3}, "attack = 3"),
    ({"attack": ["inner"]}, r"attack = \['inner'\]"),
    ({"attack_start": 1.1}, "attack_start = 1.1"),
    ({"attack_asleep": "snore"}, "attack_asleep = 'snore': unknown.*choose from behave, copy"),
    ({"aggregator": "krumm"}, "aggregator = 'krumm': unknown.*choose from mean"),
    ({"aggregator": {"name": "two-stage", "stages": 3}}, r"aggregator\.stages = 3.*choose from 'both', 1, 2"),
    ({"aggregator": {"name": "two-stage", "width": 0}}, "width = 0"),
    ({"aggregator": {"name": "mean", "width": 1}}, r"aggregator\.width = 1.*takes no settings"),
    ({"gamma": 0.0}, "gamma = 0.0"),
    ({"gamma": 1.5}, "gamma = 1.5"),
    ({"gamma": float("nan")}, "gamma = nan"),
    ({"rounds": 0}, "rounds = 0"),
    ({"rounds": 1.5}, "rounds = 1.5"),
    ({"non_iid": 1}, "non_iid = 1: must be true or false"),
    ({"non_iid": "yes"}, "non_iid = 'yes'"),
    ({"dirichlet": 0}, "dirichlet = 0"),
    ({"dirichlet": 1.0, "non_iid": True}, "dirichlet = 1.0.*non_iid"),
    ({"auxiliary": 0}, "auxiliary = 0"),
    ({"evaluate_every": 0}, "evaluate_every = 0"),
    ({"seed": 1.0}, "seed = 1.0: must be a whole number"),
    ({"seed": None}, "seed = None"),
    ({"seed": True}, "seed = True"),
    ({"dataset": 3}, "dataset = 3: must be text"),
    ({"epsilom": 2}, "epsilom = 2: unknown setting.*did you mean 'epsilon'.*choose from dataset, model"),
    ({"sweep": {"seed": [1, 2]}}, "sweep = "),
]


@pytest.mark.parametrize(("chosen", "says"), WRONG, ids=[says[:24] for _, says in WRONG])
def test_an_impossible_spec_is_refused(chosen, says):
    with pytest.raises(SpecError, match=says) as caught:
        make_spec(chosen)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"dataset = [1,2", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"dataset = 'digits'\nepsilom = 2\n", "epsilom = 2.*did you mean 'epsilon'"),
        (b"[attack]\nname = 'inner'\nscale = 'big'\n", r"attack\.scale = 'big'"),
        (b"seed = 1979-05-27\n", "seed = "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, says):
    path = tmp_path / "spec.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=says) as caught:
        read_spec(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SpecError, match="cannot be read"):
            read_spec(path)


def test_batch_and_rate_are_the_users_then_the_aggregators_then_the_data_sets():
    digits = SOURCES["digits"]
    assert (digits.batch, digits.rate) != (16, 0.2), "nothing to tell apart"
    assert (Spec().batch, Spec().rate) == (digits.batch, digits.rate)
    assert (Spec(dataset="mine.npz").batch, Spec(dataset="mine.npz").rate) == (16, 0.2)
    for name in SOURCES.keys() - {"digits"}:
        assert (Spec(dataset=name).batch, Spec(dataset=name).rate) == (16, 0.2)
    brought = Spec(aggregator="ma-sign")
    assert (brought.batch, brought.rate) == (2, 0.3)
    assert (Spec(batch=16).batch, Spec(batch=16).rate) == (16, digits.rate)
    assert Spec(batch=7, rate=0.2, aggregator="ma-sign").batch == 7
    written_out = Spec(batch=digits.batch, rate=digits.rate)
    assert (written_out, written_out.name()) == (Spec(), Spec().name())


def test_reference_and_undefended_change_what_they_say():
    spec = Spec(attack="inner", attack_start=0.5, gamma=0.5, seed=3, epsilon=1.0, rounds=9)
    clean, bare = reference(spec), undefended(spec)
    assert (clean.byzantine, clean.aggregator, clean.gamma, clean.attack_start) == (0.0, "mean", None, 0.0)
    assert clean.canonical()["aggregator"] == bare.canonical()["aggregator"] == {"name": "mean"}
    assert bare == dataclasses.replace(spec, aggregator="mean")
    kept = ("dataset", "epsilon", "seed", "rounds", "batch", "rate", "worker", "sampling")
    assert all(getattr(clean, name) == getattr(spec, name) for name in kept)


@pytest.mark.parametrize(
    ("honest", "share", "count"),
    [
        (20, 0.2, 5),
        (20, 0.4, 13),
        (20, 0.6, 30),
        (20, 0.9, 180),
        (10, 0.6, 15),
        (10, 0.0, 0),
        (10, 0.04, 0),
        (1, 0.5, 1),
    ],
)
def test_the_number_of_byzantine_workers(honest, share, count):
    assert Spec(byzantine=share).count_byzantine(honest) == count
