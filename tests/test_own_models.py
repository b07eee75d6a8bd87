"""Models and losses of a user's own, named by their paths: what is accepted, recorded and told apart."""

from pathlib import Path

import pytest
import torch
from torch import nn

import noisegate
from noisegate.catalog import load
from noisegate.compute import Compute
from noisegate.deploy.init import make_trial
from noisegate.errors import NoisegateError, SpecError, StoreError
from noisegate.runs import Spec, make_spec
from noisegate.runs.key import fingerprint
from noisegate.runs.modules import build_own
from noisegate.runs.setup import prepare
from noisegate.runs.unbuilt import uses_plugins
from noisegate.sweeps.grid import SweepGrid

FILE = """
import torch
from torch import nn

SCALE = {scale}


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 9), nn.Tanh(), nn.Linear(9, classes))


def of_nothing():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        return SCALE * self.layer(x.flatten(1))


ready = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def loss(outputs, targets):
    return SCALE * nn.functional.cross_entropy(outputs, targets, reduction="none")


class Loss:
    def __call__(self, outputs, targets):
        return loss(outputs, targets)


number = 3


def no_module(shape, classes):
    return 3


def three(a, b, c):
    return nn.Flatten()


def fails(shape, classes):
    raise RuntimeError("first line\\nsecond line")


def ends(shape, classes):
    raise SystemExit(7)


def mixes(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))


def wrong_width(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))
"""
PRETRAINED = """
def pretrained(shape, classes):
    net = of_nothing()
    net.load_state_dict(torch.load("w.pt"))
    return net
"""
SMALL = {"rounds": 4, "workers": 3, "byzantine": 0.0, "attack": "none", "aggregator": "mean", "seed": 5}
ONE = Compute(device="cpu", threads=1)


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "key"))
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(scale=1.0))
    return path


def sizes(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "d"), [("build", 685), ("of_nothing", 650), ("Net", 650), ("ready", 650)])
def test_a_model_of_a_file_is_trained_and_named(mine, name, d):
    result = noisegate.run(Spec(model=f"mine.py:{name}", **SMALL), compute=ONE)
    assert (result.model_name, result.parameters) == (f"mine.py:{name}", d)
    assert result.spec["model"] == f"mine.py:{name}"


def test_a_model_of_a_package_is_trained(mine, monkeypatch):
    (mine.parent / "hospital").mkdir()
    (mine.parent / "hospital" / "__init__.py").write_text("")
    (mine.parent / "hospital" / "nets.py").write_text(FILE.format(scale=1.0))
    monkeypatch.syspath_prepend(str(mine.parent))
    result = noisegate.run(Spec(model="hospital.nets:build", loss="hospital.nets:loss", **SMALL), compute=ONE)
    assert (result.model_name, result.parameters) == ("hospital.nets:build", 685)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"model": "mine.py:nobody"},
            r"^model = 'mine.py:nobody': the file has no function, class or module 'nobody'$",
        ),
        ({"model": "mine.py:number"}, "neither a function that makes a module, nor a module"),
        ({"model": "mine.py:no_module"}, "must make a torch.nn.Module, not int"),
        ({"model": "mine.py:three"}, r"it takes \(a, b, c\), but must take \(shape, classes\)"),
        ({"model": "mine.py:fails"}, r"cannot be made \(RuntimeError: first line second line\)$"),
        ({"model": "mine.py:ends"}, r"cannot be made \(SystemExit: 7\)"),
        ({"model": "mine.py:mixes"}, "^model = 'mine.py:mixes': layer '1' .BatchNorm1d. mixes examples"),
        ({"model": "mine.py:wrong_width"}, "for one example of shape|in a batch of"),
        ({"model": "there_is_none.py:build"}, "cannot be loaded .No such file"),
        ({"model": "no.such.module:build"}, "cannot be loaded"),
        ({"model": "mine.build"}, "unknown"),
        ({"loss": "mine.py:number"}, "neither a function nor a class"),
        ({"loss": "mine.py:nobody"}, "^loss = 'mine.py:nobody': the file has no"),
        ({"loss": "mse"}, "^loss = 'mse': is no path of your own loss"),
    ],
)
def test_what_is_no_model_or_loss_is_refused_in_one_line(mine, settings, why):
    with pytest.raises(SpecError, match=why) as refused:
        prepare(Spec(**settings, **SMALL), ONE)
    assert "\n" not in str(refused.value)


def test_first_weights_follow_from_the_seed_and_the_global_generator_stays(mine):
    before = torch.get_rng_state()
    one, same, other = (build_own("mine.py:build", (1, 8, 8), 10, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one[1].weight, same[1].weight)
    assert not torch.equal(one[1].weight, other[1].weight)


def test_a_module_of_a_file_is_not_the_one_that_is_trained(mine):
    ready = load("model", "mine.py:ready")
    assert build_own("mine.py:ready", (1, 8, 8), 10, 1) is not ready


def test_a_loss_of_a_file_is_the_one_that_is_trained_with(mine):
    one, two = (
        noisegate.run(Spec(model="mine.py:ready", sigma=0.0, worker="clipped", **more, **SMALL), compute=ONE)
        for more in ({}, {"loss": "mine.py:loss"})
    )
    assert min(one.accuracy, two.accuracy) > 0.3  # a scale of 1; another spec draws other batches
    mine.write_text(FILE.format(scale=-1.0))
    worse = noisegate.run(
        Spec(model="mine.py:of_nothing", loss="mine.py:Loss", sigma=0.0, worker="clipped", **{**SMALL, "rounds": 40}),
        compute=ONE,
    )
    better = noisegate.run(
        Spec(model="mine.py:of_nothing", sigma=0.0, worker="clipped", **{**SMALL, "rounds": 40}), compute=ONE
    )
    assert worse.accuracy < 0.1 < better.accuracy
    with pytest.raises(SpecError, match="another is given beside the spec"):
        noisegate.run(Spec(loss="mine.py:loss", **SMALL), loss=load("loss", "mine.py:loss"), compute=ONE)


def test_a_spec_without_a_loss_keeps_its_name_and_a_rate_is_the_documented_one(mine):
    assert "loss" not in Spec().canonical()
    spec = Spec(dataset="fashion", model="mine.py:build", loss="mine.py:loss")
    assert (spec.rate, spec.worker, spec.batch) == (0.2, "normalized", 16)
    assert spec.name() not in {Spec(dataset="fashion").name(), Spec(dataset="fashion", model="mine.py:build").name()}
    assert make_spec({"model": "mine.py:build", "loss": "mine.py:loss"}).canonical()["loss"] == "mine.py:loss"
    assert uses_plugins(spec.canonical())
    assert uses_plugins({"model": ["mlp", "mine.py:build"]})
    assert not uses_plugins(Spec(model="mlp").canonical())


def test_features_of_a_file_and_a_model_of_a_file_go_together(mine):
    mine.write_text(FILE.format(scale=1.0) + "\n\ndef embed(x):\n    return x.flatten(1)[:, :30]\n")
    spec = Spec(model="mine.py:build", features="mine.py:embed", **SMALL)
    assert noisegate.run(spec, compute=ONE, out=mine.parent / "run").parameters == 9 * 31 + 100


def test_a_model_of_a_file_is_made_for_the_columns_that_are_features(mine):
    """For the fingerprint too, which builds the model before the data are dealt."""
    rows = [f"{n % 7 / 7:.3f},h{n % 3},{'ab'[n % 2]},{n % 5 / 5}\n" for n in range(120)]
    (mine.parent / "t.csv").write_text("f,clinic,ill,g\n" + "".join(rows))
    settings = {"label_column": "ill", "worker_column": "clinic", "batch": 4, "dataset": "t.csv"}
    spec = Spec(model="mine.py:build", **{**SMALL, **settings})
    first = noisegate.run(spec, compute=ONE, out=mine.parent / "run")
    assert first.input_shape == [2]
    assert noisegate.run(spec, compute=ONE, out=mine.parent / "run", resume=True).as_dict() == first.as_dict()


@pytest.mark.parametrize(
    "settings", [{"model": "mine.py:build"}, {"loss": "mine.py:loss"}, {"features": "mine.py:embed"}]
)
def test_a_folder_tells_when_the_code_that_a_spec_names_has_changed(mine, settings):
    embed = "\n\ndef embed(x):\n    return {scale} * x.flatten(1)\n"
    mine.write_text((FILE + embed).format(scale=1.0))
    spec, out = Spec(**settings, **SMALL), mine.parent / "run"
    first = noisegate.run(spec, compute=ONE, out=out)
    assert noisegate.run(spec, compute=ONE, out=out, resume=True).as_dict() == first.as_dict()
    text = (FILE + embed).format(scale=2.0).replace("Linear(9, classes)", "Linear(9, classes, bias=False)")
    mine.write_text(text)
    with pytest.raises(StoreError, match="was made from other data, model or loss"):
        noisegate.run(spec, compute=ONE, out=out, resume=True)


def test_a_folder_tells_when_the_weights_that_a_builder_reads_have_changed(mine):
    mine.write_text(FILE.format(scale=1.0) + PRETRAINED)
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).state_dict(), "w.pt")
    spec = Spec(model="mine.py:pretrained", **SMALL)
    before = fingerprint(spec)
    assert fingerprint(spec) == before
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).state_dict(), "w.pt")
    assert fingerprint(spec) != before
    assert fingerprint(Spec(model="mlp", **SMALL)) is None


def test_own_models_are_run_swept_and_searched_by_the_command_line(mine, cli):
    (mine.parent / "sweep.toml").write_text(
        'rounds = 4\nworkers = 3\nbyzantine = 0.0\nattack = "none"\naggregator = "mean"\n'
        '[sweep]\nmodel = ["mlp", "mine.py:build"]\nloss = ["mine.py:loss"]\n'
    )
    assert cli("sweep", "sweep.toml", "--out", "swept", "--jobs", "1", "--json").status == 0
    assert len(list((mine.parent / "swept").rglob("result.json"))) == 2
    own = ["--model", "mine.py:build", "--loss", "mine.py:Loss", "--rounds", "3", "--workers", "3"]
    ran = cli("run", *own, "--byzantine", "0.4", "--json")
    assert ran.json["model"] == "mine.py:build"
    found = cli("redteam", *own, "--aggregator", "mean", "--budget", "2", "--jobs", "1", "--json")
    assert found.status in (0, 1), found.err
    missing = cli("run", "--model", "there_is_none.py:build", "--rounds", "2")
    assert (missing.status, missing.err.count("\n")) == (2, 1)


def test_a_grid_names_own_models(mine):
    grid = SweepGrid({"rounds": 3}, {"model": ["mlp", "mine.py:build", "mine.py:Net"]})
    assert [spec.model for spec in grid.specs()] == ["mlp", "mine.py:build", "mine.py:Net"]


@pytest.mark.parametrize("settings", [{"model": "mine.py:build"}, {"loss": "mine.py:loss"}])
def test_a_federation_takes_none_of_a_file(mine, settings):
    with pytest.raises(NoisegateError, match="takes no code of your own from a file"):
        make_trial(Spec(workers=2, byzantine=0.0, attack="none", epsilon=2.0, **settings), mine.parent / "trial", 7443)
