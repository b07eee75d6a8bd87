"""Frozen parameters stay as they are: only the rest is trained, counted, made private and sent."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

import noisegate
from noisegate import Dataset, Spec
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.models import check_module
from noisegate.runs.identity import digest_run
from noisegate.runs.key import fingerprint
from noisegate.runs.publish import publish
from noisegate.runs.setup import prepare
from noisegate.streams import stream
from noisegate.vectors import FlatModel, cross_entropy
from noisegate.workers import Clipped, Direct, Normalized
from noisegate.workers.closed_form import ClosedForm
from oracles import clipped
from oracles import sums as oracle_sums

ONE = Compute(device="cpu", threads=1)
SMALL = {"rounds": 30, "workers": 3, "byzantine": 0.0, "attack": "none", "aggregator": "mean", "seed": 5}


class Backboned(nn.Module):
    """A frozen backbone with everything that only a frozen part may have, and a head that is trained."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 6, 3),
                nn.BatchNorm2d(6),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.BatchNorm2d(6, affine=False),
                nn.AvgPool2d(2),
                nn.Flatten(),
            )
            self.backbone[1].running_mean.normal_(0.0, 0.1)
            self.backbone[1].running_var.uniform_(0.5, 1.0)
            self.backbone.requires_grad_(False)
            self.head = nn.Linear(54, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_only_the_head_is_trained_and_all_of_the_model_is_kept(tmp_path):
    module = Backboned()
    before = copy.deepcopy(module.state_dict())
    out = tmp_path / "run"
    result = noisegate.run(Spec(epsilon=8.0, rate=0.5, **SMALL), model=module, compute=ONE, out=out)
    assert same(module.state_dict(), before)  # the caller's own is left alone
    assert result.parameters == 550
    assert result.frozen == sum(value.numel() for name, value in before.items() if not name.startswith("head"))
    assert result.accuracy > 0.3
    kept = safetensors.torch.load_file(out / "model.safetensors")
    assert kept.keys() == before.keys()
    for name, value in kept.items():
        assert torch.equal(value, before[name]) == (not name.startswith("head")), name
    trained = Backboned(seed=7)
    trained.load_state_dict(kept)
    data = prepare(Spec(**SMALL), ONE)
    assert same(result.model.state_dict(), kept)
    assert [name for name, each in result.model.named_parameters() if each.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    stored = noisegate.load(out, model=Backboned(seed=9))  # whose own backbone is another
    assert same(stored.model.state_dict(), kept)
    assert torch.equal(stored.predict(data.x_test), result.predict(data.x_test))
    right = (trained.eval()(data.x_test).argmax(1) == data.y_test).double().mean()
    assert float(right) == result.accuracy  # what was evaluated is what was kept


def test_a_secret_run_with_a_backbone_is_published_whole(tmp_path):
    spec = Spec(epsilon=2.0, secret=True, **{**SMALL, "rounds": 3})
    noisegate.run(spec, model=Backboned(), compute=ONE, out=tmp_path / "run")
    publish(tmp_path / "run", tmp_path / "public")
    published = safetensors.torch.load_file(tmp_path / "public" / "model.safetensors")
    assert published.keys() == Backboned().state_dict().keys()
    # A file with a tensor that the result knows nothing of is not published.
    path = tmp_path / "run" / "model.safetensors"
    path.write_bytes(safetensors.torch.save({**published, "more": torch.zeros(1)}))
    with pytest.raises(noisegate.errors.StoreError, match="damaged"):
        publish(tmp_path / "run", tmp_path / "again")


def test_a_run_with_a_backbone_is_resumed_to_the_same_bytes(tmp_path):
    spec = Spec(epsilon=8.0, **{**SMALL, "rounds": 12, "evaluate_every": 4})

    def stop(progress, rounds):
        if progress.rounds == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noisegate.run(spec, model=Backboned(), compute=ONE, out=tmp_path / "run", watch=stop)
    resumed = noisegate.run(spec, model=Backboned(), compute=ONE, out=tmp_path / "run", resume=True)
    whole = noisegate.run(spec, model=Backboned(), compute=ONE, out=tmp_path / "whole")
    assert resumed.curve == whole.curve
    one, two = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert same(one, two)


def parts_of(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.GroupNorm(1, 5), nn.Tanh(), nn.Linear(5, 3)
        )
    frozen = {
        "first": ["0.weight", "0.bias"],
        "middle": ["2.weight", "2.bias", "3.weight", "3.bias"],
        "last": ["3.weight", "3.bias", "5.weight", "5.bias"],
        "biases": ["0.bias", "2.bias", "3.weight", "3.bias", "5.bias"],
        "weights": ["0.weight", "2.weight", "3.weight", "5.weight"],
    }[kind]
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    return module


@pytest.mark.parametrize("kind", ["first", "middle", "last", "biases", "weights"])
@pytest.mark.parametrize("momentum", [0.0, 0.1])
def test_either_way_gives_the_contributions_of_what_is_trained(kind, momentum):
    module = parts_of(kind)
    model = FlatModel(module)
    rng = stream(1, "frozen")
    x, y = torch.randn(9, 6, generator=rng), torch.randint(0, 3, (9,), generator=rng)
    owner, last = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 2]), torch.randn(3, model.d, generator=rng) / model.d**0.5

    # The oracle: gradients of all parameters, of which the frozen ones are left out.
    everything = FlatModel(copy.deepcopy(module).requires_grad_(True))
    trained = torch.cat(
        [
            torch.full((size,), module.get_parameter(name).requires_grad)
            for name, size in zip(everything.names, everything.sizes, strict=True)
        ]
    )
    assert model.d == int(trained.sum())
    padded = torch.zeros(3, everything.d)
    padded[:, trained] = last

    def of_trained(phi):
        short = torch.zeros_like(phi)
        short[trained] = clipped(0.5)(phi[trained])
        return short

    wanted = oracle_sums(of_trained, momentum, module, everything.initial(), x, y, owner, padded)[:, trained]
    ways = [Direct(model)] + ([closed] if (closed := ClosedForm.of(model)) else [])
    assert len(ways) == 2 or kind == "weights"
    for way in ways:
        found = way(Clipped(0.5, momentum), model.initial(), x, y, owner, last)
        assert torch.linalg.vector_norm(found.double() - wanted) < 1e-5
        assert way(Normalized(), model.initial(), x, y, owner, last).norm() > 0


def test_a_head_takes_the_fast_way_and_a_backbone_that_mixes_is_seen():
    setup = prepare(Spec(**SMALL), ONE, module=Backboned())
    assert isinstance(setup.federation.mechanism.sums, ClosedForm)

    class Ranked(Backboned):
        def forward(self, x):
            features = self.backbone(x)
            return self.head(features - features.mean(0))

    with pytest.raises(SpecError, match=r"mixes|batch of one"):
        prepare(Spec(**SMALL), ONE, module=Ranked())


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.BatchNorm2d(6, track_running_stats=False), "mixes examples"),
        (nn.FractionalMaxPool2d(2, output_size=2), "global generator"),
    ],
)
def test_what_mixes_or_draws_in_evaluation_too_is_refused_in_a_frozen_part(layer, why):
    module = Backboned()
    module.backbone[4] = layer.requires_grad_(False)
    with pytest.raises(SpecError, match=rf"layer 'backbone\.4' .*{why}"):
        check_module(module)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(54), nn.BatchNorm1d(54, affine=False), nn.Dropout(0.5)])
def test_what_a_frozen_part_may_have_is_refused_outside_of_it(layer):
    module = Backboned()
    module.head = nn.Sequential(layer, nn.Linear(54, 10))
    with pytest.raises(SpecError, match=r"layer 'head\.0'"):
        check_module(module)


def test_a_model_with_nothing_to_train_is_refused_in_one_line():
    with pytest.raises(SpecError, match="all of them frozen") as refused:
        noisegate.run(Spec(**SMALL), model=Backboned().requires_grad_(False), compute=ONE)
    assert "\n" not in str(refused.value)


def test_other_frozen_parts_are_another_run():
    one, two = parts_of("first"), parts_of("last")
    assert same(one.state_dict(), two.state_dict())
    assert digest_run(("data",), one, cross_entropy, ()) != digest_run(("data",), two, cross_entropy, ())
    assert fingerprint(Spec(), model=one) == fingerprint(Spec(), model=parts_of("first"))
    assert fingerprint(Spec(), model=one) != fingerprint(Spec(), model=two)


def test_statistics_of_a_backbone_do_not_follow_the_private_data(toy):
    module, data = Backboned(), None
    x = torch.randn(300, 1, 8, 8, generator=stream(1, "x")) + 5.0
    y = torch.randint(0, 10, (300,), generator=stream(1, "y"))
    data = Dataset("far", x, y, x[:50], y[:50], 10)
    setup = prepare(Spec(**{**SMALL, "rounds": 2}), ONE, data, module.train())
    found = setup.federation.mechanism.model.kept()
    assert found.keys() == {name for name in module.state_dict() if not name.startswith("head")}
    noisegate.run(Spec(**{**SMALL, "rounds": 2}), dataset=data, model=module, compute=ONE)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in found.items())
    assert int(module.backbone[1].num_batches_tracked) == 0
