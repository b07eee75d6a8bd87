"""Features: built by name, of each example alone or refused, kept on the disk, and a part of what a run is."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import noisegate
from noisegate import Compute, Dataset, Spec, SpecError, StoreError
from noisegate.data import read_examples
from noisegate.deploy.enroll import accept, look_at, request, sign
from noisegate.deploy.init import make_server, make_trial
from noisegate.deploy.invitation import Invitation
from noisegate.deploy.layout import AUTHORITY
from noisegate.features import (
    TELL,
    Kept,
    Scattering,
    build_features,
    cache_folder,
    catalog_features,
    check_features,
    embed,
    freeze,
)
from noisegate.federation.server import Server
from noisegate.federation.worker import Worker
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.runs import make_spec
from noisegate.runs.features import digest_features
from noisegate.runs.setup import prepare
from noisegate.runs.unbuilt import uses_plugins
from noisegate.streams import stream
from noisegate.vectors import FlatModel

ONE = Compute(device="cpu", threads=1)
X = torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("NOISEGATE_CACHE", "off")


def rng() -> torch.Generator:
    return stream(1, "test")


def seen(features) -> tuple[int, ...]:
    return check_features(freeze(features), X, rng())


class Doubled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return (self.factor * x).flatten(1)


# What is accepted, and what is refused


def test_a_function_of_each_example_is_accepted_with_its_shape():
    assert seen(lambda x: x.flatten(1).square()) == (36,)
    assert seen(Scattering()) == (9, 3, 3)


def test_a_module_is_frozen_and_copied_and_the_callers_stays_as_it_is():
    own = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    frozen = freeze(own.train())
    assert own.training
    assert not frozen.training
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert check_features(frozen, X, rng()) == (4,)  # a dropout and a batch norm that are frozen do nothing to mix


def centered(x):
    return x.flatten(1) - x.mean()


def standardized(x):
    return x.flatten(1) / x.abs().amax()


def ranked(x):
    return x.flatten(1).argsort(0).float()


def by_number(x):
    return x.flatten(1) * len(x)


def beside_the_largest(x):
    return x.flatten(1) + (x.abs().amax() > 100).float()  # shows in extreme company alone


class Learning(nn.Module):
    """Counts what it is given, as statistics that are kept up to date do. What it gives does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum()
        return x.flatten(1)


@pytest.mark.parametrize("features", [centered, standardized, ranked, by_number, beside_the_largest])
def test_features_that_mix_examples_are_refused(features):
    with pytest.raises(SpecError, match="mix the examples"):
        seen(features)


@pytest.mark.parametrize(
    ("features", "why"),
    [
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False)), "statistics of its own"),
        (Learning(), "change as they are used"),
        (lambda x: x.flatten(1) + torch.rand(len(x), 1), "computed again"),
        (lambda x: x.flatten(1).double(), "float32"),
        (lambda x: x.sum((1, 2, 3)), "shape"),
        (lambda x: x.flatten(1)[:1], "shape"),
        (lambda x: x.flatten(1) / 0, "finite"),
        (lambda x: x.add_(1).flatten(1), "write to their inputs"),
        (lambda x: x @ torch.zeros(7, 7), "fail for"),
        (lambda x: None, "NoneType"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "no shape yet"),
        (3, "must be a function"),
        (Doubled, "must be a function"),
    ],
)
def test_what_are_no_features_is_refused_in_words(features, why):
    with pytest.raises(SpecError, match=why):
        seen(features)


def test_what_is_fitted_to_examples_is_refused():
    from sklearn.decomposition import PCA

    class Fitted(PCA):
        def __call__(self, x):
            return torch.from_numpy(self.transform(x.flatten(1).numpy())).float()

    with pytest.raises(SpecError, match="fitted to"):
        freeze(Fitted(2))


def test_mixing_that_no_drawn_example_shows_is_found_while_features_are_computed():
    def rarely(x):
        first = x.flatten(1)
        return first + (len(x) == 64) * first.mean()  # in whole blocks alone, and 16 are drawn

    many = torch.randn(64, 5, generator=rng())
    check_features(rarely, many, rng())
    with pytest.raises(SpecError, match="mix the examples"):
        embed(rarely, many)


# Blocks, progress and files


def test_features_in_blocks_are_those_of_all_at_once_and_progress_is_told():
    told = []
    held = TELL.set(lambda done, of: told.append((done, of)))
    try:
        pictures = torch.rand(150, 1, 8, 8, generator=rng())
        found = embed(Scattering(), pictures)
    finally:
        TELL.reset(held)
    assert found.allclose(Scattering()(pictures), atol=1e-5)
    assert told == [(64, 150), (128, 150), (150, 150)]


def test_kept_features_are_read_again_and_not_computed(tmp_path):
    calls = []

    def features(x):
        calls.append(len(x))
        return 2 * x.flatten(1)

    kept = Kept(tmp_path / "a" / "b", "key")
    first = embed(features, X, kept=kept)
    count = len(calls)
    again = embed(features, X, kept=kept)
    assert count > 0
    assert len(calls) == count
    assert torch.equal(first, 2 * X.flatten(1))
    assert torch.equal(again, first)
    path = kept.folder / "key.safetensors"
    assert torch.equal(load_file(path)["features"], first)  # a file that anyone's safetensors reads
    assert [entry.name for entry in kept.folder.iterdir()] == ["key.safetensors"]
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o077 == 0
        assert kept.folder.stat().st_mode & 0o077 == 0
    again += 1  # what is done to the tensor does not reach the file
    assert torch.equal(embed(features, X, kept=kept), first)


def damage_number(content: bytes) -> bytes:
    return content[:-4] + struct.pack("<f", 9.0)


def damage_header(content: bytes) -> bytes:
    return content.replace(b"F32", b"F64", 1)


def more_examples(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    about = json.loads(content[8 : 8 + length])
    about["features"]["shape"][0] += 1
    header = json.dumps(about).encode().ljust(length)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        damage_number,
        damage_header,
        more_examples,
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"",
        lambda content: b"\xff" * 100,
    ],
)
def test_a_damaged_file_of_features_is_refused_and_says_what_to_do(tmp_path, damage):
    kept = Kept(tmp_path, "key")
    embed(Doubled(), X, kept=kept)
    path = tmp_path / "key.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"damaged.*remove it"):
        embed(Doubled(), X, kept=kept)


def test_an_interrupted_computation_leaves_no_file(tmp_path):
    def tell(done, of):
        raise KeyboardInterrupt

    held = TELL.set(tell)
    try:
        with pytest.raises(KeyboardInterrupt):
            embed(Doubled(), X, kept=Kept(tmp_path, "key"))
    finally:
        TELL.reset(held)
    assert list(tmp_path.iterdir()) == []


def test_where_features_are_kept_is_said_by_the_environment(monkeypatch, tmp_path):
    assert cache_folder() is None
    monkeypatch.setenv("NOISEGATE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("NOISEGATE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "noisegate" / "features"


# In a spec


FILE = """
import torch
from torch import nn

FACTOR = {factor}

def embed(x):
    return FACTOR * x.flatten(1)

class Scaled(nn.Module):
    def __init__(self, by=1.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by * x.flatten(1)

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(factor=2.0))
    return path


def test_features_of_a_users_own_file(mine):
    assert torch.equal(build_features("mine.py:embed")(X), 2 * X.flatten(1))
    assert torch.equal(build_features({"name": f"{mine}:Scaled", "by": 3.0})(X), 3 * X.flatten(1))
    for asked, why in [
        ("mine.py:number", "neither a function"),
        ("mine.py:nobody", "no function"),
        ("there_is_none.py:embed", "cannot be loaded"),
        ({"name": "mine.py:embed", "by": 2.0}, "takes no settings"),
        ({"name": "mine.py:Scaled", "nothing": 2.0}, "cannot be made"),
    ]:
        with pytest.raises(SpecError, match=why):
            build_features(asked)
    mine.write_text("1 / 0")
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        build_features("mine.py:embed")


def test_a_spec_with_features_has_a_head_of_its_own():
    spec = Spec(features="scattering")
    assert (spec.rate, spec.worker) == (Spec().rate, "clipped")  # a data set's own rate comes first
    assert spec.head("mlp") == "linear"
    assert Spec(dataset="fashion", features="scattering").rate == Spec(dataset="fashion", model="linear").rate == 0.5
    assert Spec(dataset="fashion", features="scattering", rate=0.3, worker="normalized").rate == 0.3
    assert Spec(dataset="fashion", features="scattering", model="mlp").rate == Spec(dataset="fashion").rate
    assert Spec(features="scattering", aggregator="guerraoui").worker == Spec(aggregator="guerraoui").worker


def test_a_spec_without_features_keeps_its_name_and_one_with_them_has_another():
    assert "features" not in Spec().canonical()
    names = [Spec(**more).name() for more in ({}, {"features": "scattering"}, {"features": "mine.py:embed"})]
    names.append(Spec(features={"name": "scattering", "scales": 1}).name())
    assert len(set(names)) == 4
    spec = Spec(features={"name": "scattering", "scales": 1})
    assert make_spec(spec.canonical()) == spec
    assert Spec(features={"name": "scattering"}) == Spec(features="scattering")


@pytest.mark.parametrize(
    ("features", "why"),
    [
        ("scatering", "did you mean 'scattering'"),
        ({"name": "scattering", "scale": 2}, "no such setting"),
        ({"scales": 2}, "needs a name"),
        (3, "features"),
        ("", "unknown"),
    ],
)
def test_features_that_do_not_exist_are_refused(features, why):
    with pytest.raises(SpecError, match=why):
        Spec(features=features)


def test_a_spec_does_not_load_a_users_own_code_and_counts_as_one_that_would():
    spec = Spec(features="there_is_none.py:embed")
    assert uses_plugins(spec.canonical())
    assert not uses_plugins(Spec(features="scattering").canonical())
    with pytest.raises(SpecError, match="cannot be loaded"):
        noisegate.run(spec, compute=ONE)


# In a run


def tiny() -> Dataset:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(160, 1, 6, 6, generator=rng)
    y = (x.mean((1, 2, 3)) > 0).long()
    return Dataset("tiny", x[:120], y[:120], x[120:], y[120:], classes=2)


SMALL = {
    "dataset": "tiny",
    "workers": 3,
    "rounds": 2,
    "batch": 4,
    "attack": "label-flip",
    "sigma": 2.0,
    "sigma_base": 2.0,
}


def test_everyone_in_a_run_has_features():
    data = tiny()
    setup = prepare(Spec(**SMALL, features="scattering"), ONE, data)
    federation, expected = setup.federation, Scattering()(data.x)
    assert federation.workers.x.allclose(expected, atol=1e-5)
    assert setup.x_test.allclose(Scattering()(data.x_test), atol=1e-5)
    assert federation.server.aux_x.allclose(expected[setup.aux], atol=1e-5)
    assert (setup.model, setup.features, federation.d) == ("linear", "scattering", 2 * (81 + 1))
    assert torch.equal(federation.mechanism.model.initial(), torch.zeros(federation.d))
    assert setup.given[0] is data


def test_an_own_module_in_python_and_the_model_it_needs():
    spec = Spec(**SMALL, model="linear")
    result = noisegate.run(spec, dataset=tiny(), features=Doubled(), compute=ONE)
    assert (result.features, result.model_name, result.parameters) == ("Doubled", "linear", 2 * 37)
    with pytest.raises(SpecError, match="no model"):
        noisegate.run(Spec(**SMALL), dataset=tiny(), features=Doubled(), compute=ONE)
    with pytest.raises(SpecError, match="leave one of them out"):
        noisegate.run(Spec(**SMALL, features="scattering"), dataset=tiny(), features=Doubled(), compute=ONE)
    with pytest.raises(SpecError, match="mix the examples"):
        noisegate.run(spec, dataset=tiny(), features=centered, compute=ONE)


def test_streams_follow_code_and_weights_of_features(mine):
    def named(**more):
        return prepare(
            Spec(**SMALL, model="linear", **more.pop("spec", {})), ONE, tiny(), **more
        ).federation.schedule.name

    names = [
        named(),
        named(features=Doubled(2.0)),
        named(features=Doubled(3.0)),
        named(features=lambda x: x.flatten(1)),
    ]
    names += [named(spec={"features": "scattering"}), named(spec={"features": "mine.py:embed"})]
    mine.write_text(FILE.format(factor=4.0))
    names.append(named(spec={"features": "mine.py:embed"}))
    assert len(set(names)) == len(names)
    assert names[1] == named(features=Doubled(2.0))
    assert digest_features(Doubled(), "mine") != digest_features(Doubled(3.0), "mine")  # a label is not for weights


def test_a_run_is_the_same_whether_its_features_were_kept_or_not(monkeypatch, tmp_path):
    spec = Spec(**SMALL, features="scattering")
    once = noisegate.run(spec, dataset=tiny(), compute=ONE)
    monkeypatch.setenv("NOISEGATE_CACHE", str(tmp_path))
    kept, read = (noisegate.run(spec, dataset=tiny(), compute=ONE) for _ in range(2))
    assert once.curve == kept.curve == read.curve
    assert len(list(tmp_path.iterdir())) == 2  # of training and test examples


def test_features_without_a_digest_are_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISEGATE_CACHE", str(tmp_path))

    class Odd:
        def __call__(self, x):
            return x.flatten(1)

        def __reduce_ex__(self, protocol):
            raise TypeError("has no digest")

    noisegate.run(Spec(**SMALL, model="linear"), dataset=tiny(), features=Odd(), compute=ONE)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_run_keeps_features_of_public_data_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISEGATE_CACHE", str(tmp_path))
    noisegate.run(Spec(**SMALL, features="scattering", secret=True), dataset=tiny(), compute=ONE)
    assert list(tmp_path.iterdir()) == []
    settings = {**SMALL, "dataset": "digits", "sigma": 3.0, "sigma_base": 3.0}
    noisegate.run(Spec(**settings, features="scattering", secret=True), compute=ONE)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_is_of_the_features_that_it_was_made_with(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "key"))
    spec, out = Spec(**SMALL, model="linear"), tmp_path / "run"
    given = {"dataset": tiny(), "compute": ONE, "out": out}
    first = noisegate.run(spec, features=Doubled(), **given)
    assert noisegate.run(spec, features=Doubled(), resume=True, **given).accuracy == first.accuracy
    with pytest.raises(StoreError):
        noisegate.run(spec, features=Doubled(3.0), resume=True, **given)


# In a federation


def test_a_stranger_may_name_features_of_the_catalog_alone(mine):
    assert catalog_features("") is None
    assert catalog_features({"name": "scattering", "scales": 1}) == Scattering(scales=1)
    for asked in ("mine.py:embed", "os:system", {"name": "mine.py:embed"}, {"scales": 1}):
        with pytest.raises(SpecError, match="a program may bring its own"):
            catalog_features(asked)


def test_every_worker_of_a_federation_computes_its_own(tmp_path):
    settings = {"dataset": "digits", "workers": 2, "byzantine": 0.4, "rounds": 2, "sigma": 8.0, "sigma_base": 8.0}
    spec = Spec(**settings, epsilon=2.0, features={"name": "scattering", "scales": 2}, aggregator="mean")
    trial = make_trial(spec, tmp_path / "fed", 7443)
    server = Server.of(trial.server)
    simulated = prepare(spec, ONE)
    assert server.settings.shape == (1, 8, 8)  # of the examples, which is what the operator brings
    assert server.model.d == simulated.federation.d == 10 * (81 * 4 + 1)
    assert torch.equal(server.auxiliary[0], simulated.federation.server.aux_x)
    for name in ("w01", "w02", "w03"):
        place = WorkerFolder.read(trial.worker(name))
        assert read_examples(place.folder / "data.npz")[0].shape[1:] == (1, 8, 8)
        worker = Worker.of(place)
        assert worker.data[0].shape[1:] == (81, 2, 2)
        assert FlatModel(worker.model).d == server.model.d
        assert len(list((place.folder / "features").iterdir())) == 1  # read again when the worker is started again
        assert torch.equal(Worker.of(place).data[0], worker.data[0])
    with pytest.raises(SpecError, match="a program may bring its own"):
        make_trial(Spec(**settings, epsilon=2.0, features="mine.py:embed"), tmp_path / "other", 7443)


def test_a_worker_of_a_federation_loads_no_code_that_its_folder_names(tmp_path, mine):
    (tmp_path / "worker.toml").write_text('name = "a"\nserver = "h:1"\ndata = "d.npz"\nfeatures = "mine.py:embed"\n')
    np.savez(tmp_path / "d.npz", x=X.numpy(), y=np.zeros(len(X), dtype=int))
    with pytest.raises(SpecError, match=r"worker\.toml: features = 'mine\.py:embed': must be one of scattering"):
        WorkerFolder.read(tmp_path).examples()


def test_an_invitation_names_the_features_and_the_size_of_their_model(tmp_path):
    settings = {"dataset": "digits", "workers": 2, "rounds": 2, "declared": 400, "sigma": 8.0, "sigma_base": 8.0}
    spec = Spec(**settings, epsilon=2.0, features="scattering")
    make_server(spec, tmp_path / "fed", "0.0.0.0:7443", ["localhost"])
    server, folder = tmp_path / "fed" / "server", tmp_path / "a"
    invited = sign(server, look_at(server, request(folder, "a").path), tmp_path / "fed" / AUTHORITY)
    assert (invited.features, invited.parameters) == ({"name": "scattering"}, 10 * (9 * 16 + 1))
    assert Server.of(server).model.d == invited.parameters
    path = tmp_path / "a.invitation.toml"
    path.write_bytes(invited.to_toml())
    assert Invitation.read(path) == invited
    accept(folder, invited)
    assert WorkerFolder.read(folder).features == {"name": "scattering"}
    path.write_bytes(replace(invited, features="os:system").to_toml())
    with pytest.raises(SpecError, match="a program may bring its own"):
        Invitation.read(path)


def test_the_command_line_takes_features_and_their_settings(cli, tmp_path):
    common = ["run", "--rounds", "2", "--threads", "1", "--json", "--out", str(tmp_path / "run")]
    noise = ["--sigma", "8", "--attack", "none"]
    told = cli(*common, *noise, "--features", "scattering", "--set", "features.scales=2").json
    assert (told["features"], told["model"], told["parameters"]) == ("scattering", "linear", 10 * (81 * 4 + 1))
    assert told["spec"]["features"] == {"name": "scattering", "scales": 2}
    for more, why in [
        (["--set", "features.scales=2"], "there are none; give --features too"),
        (["--features", "scatter"], "unknown"),
    ]:
        refused = cli(*common, *noise, *more)
        assert refused.status == 2
        assert why in refused.err
