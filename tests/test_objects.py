"""A spec takes objects. A file says of them what it can, and never more."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import noisegate
from noisegate import Dormant, Inner, LabelFlip, Mean, Spec, SpecError, StoreError
from noisegate.aggregators import Krum, Median, NearestNeighborMixing
from noisegate.aggregators.function import FromFunction
from noisegate.attacks.honest import Forger
from noisegate.runs import read_spec, reference, undefended
from noisegate.runs.unbuilt import read_unbuilt
from noisegate.sweeps.sweep import sweep
from noisegate.workers import Clipped

TIMES = ("seconds", "ms_per_round")


@dataclass(frozen=True)
class Shouting(Forger):
    """An attack of a module that can be imported."""

    scale: float = 2.0

    def forge(self, view):
        return -self.scale * view.honest.mean(0).expand(view.workers, -1)


def middle(uploads):
    """The median of each coordinate."""
    return uploads.median(0).values


def maker(keep=3):
    """Makes an aggregator, and is none."""
    return Krum(byzantine=keep)


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def numbers(result):
    return {key: value for key, value in result.as_dict().items() if key not in (*TIMES, "spec")}


@pytest.mark.parametrize(
    ("part", "given", "named"),
    [
        ("attack", LabelFlip(), "label-flip"),
        ("attack", LabelFlip(to="random"), {"name": "label-flip", "to": "random"}),
        (
            "attack",
            Dormant(Inner(2.0), 0.25),
            {"name": "dormant", "attack": {"name": "inner", "scale": 2.0}, "until": 0.25},
        ),
        ("attack", Shouting(), "test_objects:Shouting"),
        ("attack", Shouting(3.0), {"name": "test_objects:Shouting", "scale": 3.0}),
        ("aggregator", Median(), "median"),
        ("aggregator", Krum(byzantine=2), {"name": "krum", "byzantine": 2}),
        ("aggregator", NearestNeighborMixing(aggregator=Krum()), {"name": "nnm", "aggregator": {"name": "krum"}}),
        ("aggregator", middle, "test_objects:middle"),
        ("worker", Clipped(threshold=2.0), {"name": "clipped", "threshold": 2.0}),
    ],
)
def test_an_object_that_a_file_can_hold_is_kept_by_name_and_settings(part, given, named, tmp_path):
    spec = Spec(**{part: given})
    assert spec == Spec(**{part: named})
    assert spec.name() == Spec(**{part: named}).name()
    assert not spec.given()
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    again = read_spec(tmp_path / "spec.toml")
    assert again == spec
    built = getattr(again, f"build_{part}")()
    assert built == (FromFunction(given) if given is middle else given)


def test_the_issues_own_line(quick):
    spec = replace(quick(byzantine=0.3), attack=LabelFlip(), aggregator=Median(), model=net())
    result = noisegate.run(spec)
    assert (result.attack, result.aggregator, result.parameters) == ("label-flip", "median", 650)


def test_a_module_in_the_spec_is_one_beside_it(quick):
    module = net()
    beside = noisegate.run(quick(), model=module)
    within = noisegate.run(quick(model=module))
    assert numbers(within)["model"] == "Sequential"
    # another setting, so batches and noise are others; what is trained is the same
    assert (within.parameters, within.sigma) == (beside.parameters, beside.sigma)


def test_a_function_makes_the_update(quick):
    """A function that averages is `mean`, but for rounding."""
    seen = []

    def average(uploads):
        seen.append(uploads.shape)
        return uploads.mean(0)

    result = noisegate.run(quick(aggregator=average, byzantine=0.2))
    assert seen == [(13, 2410)] * 3
    assert result.aggregator == "given:average"
    assert result.byzantine_weight == pytest.approx(3 / 13)


def test_a_function_sees_the_uploads_that_arrived(quick):
    seen = []

    def average(uploads):
        seen.append((len(uploads), bool((uploads.norm(dim=1) > 0).all())))
        uploads.mul_(1.0)  # its own copy
        return uploads.mean(0)

    noisegate.run(quick(aggregator=average, byzantine=0.0, absent=0.4))
    assert min(seen)[0] < 10
    assert all(sound for _, sound in seen)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda uploads: uploads.mean(1), r"shape \(2410,\).*gave shape \(13,\)"),
        (lambda uploads: uploads.mean(0, keepdim=True), r"gave shape \(1, 2410\)"),
        (lambda uploads: uploads.mean(0).double(), r"torch.float32.*gave.*torch.float64"),
        (lambda uploads: uploads.median(0), "gave median"),
        (lambda uploads: uploads.mean(0).numpy(), "gave ndarray"),
        (lambda uploads: None, "gave NoneType"),
    ],
)
def test_what_a_function_gives_must_be_an_update(quick, function, says):
    with pytest.raises(SpecError, match=says) as caught:
        noisegate.run(quick(aggregator=function, byzantine=0.2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"aggregator": Median}, r"is a class; give an object of it, such as Median\(\)"),
        ({"attack": LabelFlip}, "is a class"),
        ({"attack": 3}, "must be a name, a table with name and settings, or an object"),
        ({"attack": Mean()}, "attack = Mean.*: must be .*lacks .*forge"),
        ({"aggregator": lambda view, state: None}, "must take one argument, the uploads, or be an Aggregator"),
        ({"aggregator": maker}, None),
        ({"worker": middle}, "must be a name"),
        ({"model": 3}, "model = 3: must be"),
        ({"attack": "given:Shouting"}, r"file cannot hold; give it again, as in Spec\(attack=...\)"),
        ({"aggregator": "test_objects:maker"}, None),
    ],
)
def test_what_is_no_part_is_refused(chosen, says):
    if says is None:
        Spec(**chosen)
        return
    with pytest.raises(SpecError, match=says) as caught:
        Spec(**chosen)
    assert "\n" not in str(caught.value)


def test_a_function_that_makes_aggregators_is_no_function_of_uploads():
    """By its path it makes them, as ever; given, it is taken for one of uploads, and a file does not name its path."""
    assert Spec(aggregator="test_objects:maker").build_aggregator() == Krum(byzantine=3)
    assert Spec(aggregator=maker).given() == {"aggregator": FromFunction(maker)}


@dataclass(frozen=True)
class Heavy(Mean):
    """An aggregator with a setting that no file can hold."""

    direction: torch.Tensor = None
    scale: float = 1.0


def test_what_a_file_cannot_hold_is_said_to_be_given(quick, tmp_path):
    @dataclass(frozen=True)
    class Local(Mean):
        strength: float = 1.0

    for aggregator, said in (
        (Local(2.0), {"name": "given:Local", "strength": 2.0}),
        (Heavy(torch.ones(3)), {"name": "given:Heavy", "scale": 1.0}),
        (lambda uploads: uploads.mean(0), {"name": "given:<lambda>"}),
    ):
        spec = quick(aggregator=aggregator)
        assert spec.canonical()["aggregator"] == said
        assert replace(spec, seed=2).aggregator is spec.aggregator
        (tmp_path / "spec.toml").write_text(spec.to_toml())
        with pytest.raises(SpecError, match="was an object in Python, which a file cannot hold"):
            read_spec(tmp_path / "spec.toml")
        assert read_unbuilt(tmp_path / "spec.toml").canonical() == spec.canonical()
        assert read_unbuilt(tmp_path / "spec.toml").name() == spec.name()
    with pytest.raises(SpecError, match=r"aggregator = .*lambda.*: is an object that only this program has"):
        sweep([spec], tmp_path / "sweep")


def test_a_folder_with_an_object_goes_on_with_that_object_alone(quick, tmp_path):
    def average(scale):
        return lambda uploads: scale * uploads.mean(0)

    whole = quick(aggregator=average(1.0))
    first = noisegate.run(whole, out=tmp_path / "run")
    assert noisegate.run(quick(aggregator=average(1.0)), out=tmp_path / "run", resume=True) == first
    for other in (average(2.0), lambda uploads: uploads[0]):
        with pytest.raises(StoreError, match="other data, model or loss"):
            noisegate.run(quick(aggregator=other), out=tmp_path / "run", resume=True)


def test_a_folder_with_a_module_goes_on_with_that_module_alone(quick, tmp_path):
    module = net()
    spec = quick(model=module)
    assert 'model = "given:Sequential"' in spec.to_toml()
    first = noisegate.run(spec, out=tmp_path / "run")
    assert noisegate.run(spec, out=tmp_path / "run", resume=True) == first
    with pytest.raises(StoreError, match="other data, model or loss"):
        noisegate.run(quick(model=net()), out=tmp_path / "run", resume=True)
    with pytest.raises(SpecError, match=r"file cannot hold; give it again, as in Spec\(model=...\)"):
        noisegate.run(read_spec(tmp_path / "run" / "spec.toml"))


def test_objects_reach_what_stands_beside_a_run(quick):
    module = net()
    spec = quick(aggregator=lambda uploads: uploads.mean(0), model=module)
    assert reference(spec).model is module
    assert undefended(spec).aggregator == "mean"


def test_runs_with_unlike_objects_share_no_noise(quick):
    """The same words in a file, and yet two runs."""

    def scaled(by):
        return lambda uploads: by * uploads.mean(0)

    specs = [quick(aggregator=scaled(by), byzantine=0.0, rounds=1, rate=1e-6) for by in (1.0, 1.0, 2.0)]
    assert len({spec.name() for spec in specs}) == 1
    from noisegate.compute import Compute
    from noisegate.runs.setup import prepare

    names = [prepare(spec, Compute()).federation.schedule.name for spec in specs]
    assert names[0] == names[1] != names[2]


def test_an_aggregator_of_a_path_may_be_a_function(cli, monkeypatch, tmp_path):
    (tmp_path / "mine_fn.py").write_text("def middle(uploads):\n    return uploads.median(0).values\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--rounds 2 --sigma 2.5 --byzantine 0.2 --no-baselines --json --aggregator mine_fn:middle"
    answer = cli("run", *flags.split())
    assert answer.status == 0, answer.err
    assert answer.json["aggregator"] == "mine_fn:middle"
