"""A CUDA device computes what a CPU computes, queued or not, alone or beside others. Skipped where there is none."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import noisegate
from noisegate import kernels
from noisegate.aggregators import AGGREGATORS
from noisegate.aggregators.ks_test import _any_outside, _edges, ks_rejects
from noisegate.attacks import ATTACKS
from noisegate.capacity import Capacity
from noisegate.entropy import Secret, grid_of
from noisegate.examples import Examples
from noisegate.models import build_model
from noisegate.runs.setup import Setup, SharedData, prepare
from noisegate.simulate import Federation, Progress, Rounds, Training, side_by_side, start
from noisegate.simulate.federation import Active
from noisegate.simulate.graphs import Recorded
from noisegate.streams import stream
from noisegate.vectors import FlatModel, clear_rows, copy_if
from noisegate.workers import Clipped, Normalized, choose_sums
from noisegate.workers.closed_form import ClosedForm
from test_judging import COPIES, check_copies, check_first_tests, check_rounds, view_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ONE_ROUND = 1e-4  # float32 on another device: other orders of addition, nothing else
SHAPES = {"mlp": (1, 28, 28), "cnn": (1, 28, 28), "residual": (3, 20, 20)}


def examples(name: str, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = stream(0, "cuda-test")
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.randn(len(owner), *SHAPES[name], generator=rng), torch.arange(len(owner)) % 10, owner


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("worker", [Normalized(), Normalized(0.0), Clipped(0.5, 0.1)], ids=str)
@pytest.mark.parametrize("with_capacity", [False, True])
def test_sums_agree_with_the_cpu(name, worker, with_capacity) -> None:
    """With capacity by our own kernels; the last place is empty then, and holds an example that must not count."""
    counts = [5, 0, 17, 1, 33, 8]
    module = build_model(name, SHAPES[name], 10, stream(0, "weights"))
    x, y, owner = examples(name, counts)
    last = torch.randn(6, FlatModel(module).d, generator=stream(0, "last")) * 0.05
    found = []
    for device in ("cpu", "cuda"):
        model = FlatModel(module, device=device)
        params, into = model.initial(), torch.ones_like(last, device=device)
        with noisegate.Compute().exact():
            sums = choose_sums(model, params, x[:4].to(device), y[:4].to(device), way="closed-form")
            if device == "cuda" and with_capacity:
                capacity, more = Capacity(99, 40, 0), torch.cat([owner, torch.tensor([6])]).cuda()
                own = torch.cat([x, x[:1] * torch.inf]).cuda(), torch.cat([y, y[:1]]).cuda()
                sums.add(worker, params, Examples(*own, more, 40, capacity), last.cuda(), into, 0.5)
                assert bool(capacity.fits())
            else:
                moved = Examples(*(value.to(device) for value in (x, y, owner)))
                sums.add(worker, params, moved, last.to(device), into, 0.5)
        found.append(into.cpu() - 1)
    assert (found[0] - found[1]).norm(dim=1).max() <= ONE_ROUND * sum(counts)
    assert (found[0] - found[1]).norm() <= ONE_ROUND * found[0].norm()
    assert not found[1][1].any()  # who has no examples adds nothing, not even momentum
    assert ClosedForm.of(FlatModel(module)) is not None


@pytest.mark.parametrize("name", SHAPES)
def test_our_kernels_agree_with_their_twins(name) -> None:
    """On one device, where the residual network's maxima are the same ones."""
    module = build_model(name, SHAPES[name], 10, stream(0, "weights"))
    model = FlatModel(module, device="cuda")
    x, y, owner = (value.cuda() for value in examples(name, [5, 0, 17, 1, 33, 8]))
    last = torch.randn(6, model.d, generator=stream(0, "last")).cuda() * 0.05
    sums, found = ClosedForm.of(model), []
    with noisegate.Compute().exact():
        for capacity in (None, Capacity(99, 40, 0)):
            into = torch.zeros_like(last)
            sums.add(Normalized(), model.initial(), Examples(x, y, owner, 40, capacity), last, into)
            found.append(into)
    assert (found[0] - found[1]).norm(dim=1).max() <= 1e-5 * len(y)


def test_what_cannot_be_trusted_does_not_fit() -> None:
    model = FlatModel(nn.Linear(6, 3), device="cuda")
    x, y = torch.randn(4, 6, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    x[2] = torch.inf
    sums = ClosedForm.of(model)
    for count, fits in ((2, True), (4, False)):
        capacity, last = Capacity(9, 9, 0), torch.zeros(1, model.d, device="cuda")
        owner = torch.zeros(count, dtype=torch.long, device="cuda")
        some = Examples(x[:count], y[:count], owner, 9, capacity)
        sums.add(Normalized(), model.initial(), some, last, last.clone())
        assert bool(capacity.fits()) == fits


@pytest.mark.parametrize("sure", [500.0, 80.0, 75.0, 65.0])
@pytest.mark.parametrize("worker", [Normalized(0.0), Clipped(0.5)], ids=str)
def test_an_example_with_next_to_nothing_to_say_fits(worker, sure) -> None:
    """Its gradient is zero to the last digit, or too short to count, or just not; and there is no momentum."""
    model = FlatModel(nn.Linear(6, 3), device="cuda")
    params = model.initial()
    params[-3:] = torch.tensor([sure, 0.0, 0.0])  # so sure of the first label that nothing is left to learn
    x, y = torch.randn(4, 6, device="cuda"), torch.tensor([0, 0, 1, 2], device="cuda")
    owner, found = torch.tensor([0, 0, 0, 1], device="cuda"), []
    for capacity in (None, Capacity(9, 9, 0)):
        last = torch.zeros(2, model.d, device="cuda")
        into = torch.zeros_like(last)
        ClosedForm.of(model).add(worker, params, Examples(x, y, owner, 9, capacity), last, into)
        found.append(into)
        assert capacity is None or bool(capacity.fits())
    assert (found[0] - found[1]).norm() < 1e-5
    assert found[0].any(1).all()


@pytest.mark.parametrize("graph", [True, False])
def test_a_run_is_the_same_run_every_time(graph) -> None:
    """Also where some rounds do not fit."""
    run = setup(rounds=20).federation
    few = run.mechanism.sampling.largest_sum(
        len(run.adversary.byzantine), int(run.workers.sizes.sum()), run.mechanism.declared, 0.2
    )
    first, *others = (played(with_less_capacity(run, few), graph)[0] for _ in range(4))
    assert all(same_bytes(first, other) for other in others)


def with_less_capacity(run: Federation, total: int) -> Federation:
    """The same, with capacity for fewer examples."""
    run = replace(run)
    for active in (run.active(run.phase(0)), run._honest_active):
        tight = partial(replace, active.capacity(), total=total)
        active.__dict__["capacity"] = lambda tight=tight: tight(needs=[])
    return run


CONVOLUTIONS = [
    nn.Conv2d(1, 16, 5),
    nn.Conv2d(16, 16, 5),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.Conv2d(3, 40, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    nn.Conv2d(20, 7, 1, stride=3),
]


@pytest.mark.skipif(not kernels.available(), reason="no Triton here")
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("count", [3, 500])
def test_gradients_of_convolutions_are_those_of_autograd(conv, count) -> None:
    from noisegate.kernels.convolution import weight_gradients

    rng = stream(1, "convolution")
    a = torch.randn(count, conv.in_channels, 21, 18, generator=rng)
    delta = torch.randn(conv(a).shape, generator=rng)
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    found = weight_gradients(a.cuda(), delta.cuda(), *shape).cpu().double()
    twin = copy.deepcopy(conv).double()
    for j in (0, 1, count - 1):
        loss = (twin(a[j : j + 1].double()) * delta[j].double()).sum()
        (wanted,) = torch.autograd.grad(loss, [twin.weight])
        assert (found[j].flatten() - wanted.flatten()).norm() <= 2e-6 * wanted.norm()


@pytest.mark.skipif(not kernels.available(), reason="no Triton here")
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolutions_are_those_of_torch(conv) -> None:
    from noisegate.kernels.own_convolutions import OwnConvolutions

    rng, twin = stream(2, "convolution"), copy.deepcopy(conv).double()
    a = torch.randn(40, conv.in_channels, 21, 18, generator=rng)
    delta = torch.randn(conv(a).shape, generator=rng)
    exact = a.double().requires_grad_()
    wanted = twin(exact)
    (wanted_a,) = torch.autograd.grad(wanted, exact, delta.double())
    own, layer = a.cuda().requires_grad_(), copy.deepcopy(conv).cuda().requires_grad_(False)
    with OwnConvolutions():
        found = layer(own)
    (found_a,) = torch.autograd.grad(found, own, delta.cuda())
    assert (found.cpu() - wanted).norm() <= 2e-6 * wanted.norm()
    assert (found_a.cpu() - wanted_a).norm() <= 2e-6 * wanted_a.norm()


def test_noise_tests_agree_with_the_cpu() -> None:
    uploads = torch.randn(400, 5000, generator=stream(0, "uploads"))
    steps = torch.arange(100)[:, None] / 100
    uploads[:100] += 0.06 * steps  # some on either side of the threshold
    uploads[100:200] *= 1 + 0.1 * steps
    uploads[200], uploads[201], uploads[202], uploads[203, 0] = 0.0, 1e38, 1e-42, -1e38
    for s in (1.0, 1e-3):
        assert torch.equal(ks_rejects(s * uploads, s, 0.05), ks_rejects(s * uploads.cuda(), s, 0.05).cpu())
        edges = _edges(5000, s, 0.05, torch.device("cuda"))
        assert torch.equal(ks_rejects(s * uploads, s, 0.05), _any_outside((s * uploads).cuda(), edges).cpu())
    assert torch.equal(ks_rejects(uploads, 1.0, 0.05, 2**16), ks_rejects(uploads.cuda(), 1.0, 0.05, 2**16).cpu())
    wide = torch.randn(7, 2**16 + 5, generator=stream(0, "wide"))
    assert torch.equal(ks_rejects(wide, 1.0, 0.05), ks_rejects(wide.cuda(), 1.0, 0.05).cpu())


def pictures() -> noisegate.Dataset:
    rng = stream(0, "pictures")
    y = torch.arange(1020) % 10
    x = torch.randn(len(y), 1, 28, 28, generator=rng) + y[:, None, None, None] / 5
    return noisegate.Dataset("pictures", x, y, x[:100], y[:100], 10)


PICTURES = pictures()


def setup(device: str = "cuda", shared: SharedData | None = None, state: int | None = None, **settings) -> Setup:
    asked = {
        "model": "mlp",
        "workers": 5,
        "rounds": 12,
        "sigma": 20.0,
        "sigma_base": 20.0,
        "epsilon": 2.0,
        "aggregator": "two-stage",
    } | settings
    return prepare(noisegate.Spec(**asked), noisegate.Compute(device, memory=state), PICTURES, shared=shared)


def played(run: Federation, graph: bool = True, progress: Progress | None = None) -> tuple[Progress, Rounds]:
    with noisegate.Compute().exact():
        rounds = Rounds(run, progress or start(run), graph)
        while (left := run.schedule.rounds - rounds.settled().rounds) > 0:
            for _ in range(left):
                rounds.step()
    return rounds.settled(), rounds


def same_bytes(one: Progress, other: Progress) -> bool:
    return all(
        torch.equal(left, right)
        for left, right in (
            (one.state.params, other.state.params),
            (one.state.uploads, other.state.uploads),
            (one.reasons, other.reasons),
            (one.scores, other.scores),
        )
    )


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_same_spec_same_bytes(model: str) -> None:
    runs = []
    for _ in range(2):
        ready = setup(model=model)
        with noisegate.Compute().exact():
            *_, last = Training(ready.federation, start(ready.federation), ready.x_test, ready.y_test, 5)
        runs.append(last)
    assert same_bytes(*runs)
    assert runs[0].curve == runs[1].curve
    assert [line["round"] for line in runs[0].curve] == [5, 10, 12]


@pytest.mark.parametrize("count", [1, 999, 2410, 100_000])
def test_secret_noise_on_a_device_is_that_of_its_plain_twin(count, monkeypatch) -> None:
    secret, sums = Secret(torch.device("cuda")), torch.randn(1, count, device="cuda")
    found = []
    for fused in (True, False):
        monkeypatch.setattr(kernels, "fused", lambda like, fused=fused: fused)
        sent = sums.clone()
        secret.source("noise").add_noise(sent, 0.05)
        found.append(sent)
    assert (found[0] - found[1]).abs().max() <= grid_of(0.05)
    assert (found[0] == found[1]).float().mean() > 0.999
    noise = (found[0] - sums).flatten().cpu() / 0.05
    assert count < 2410 or abs(float(noise.std()) - 1) < 5 / (2 * count) ** 0.5
    drawn = secret.source("batch").uniform(1000)
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert torch.equal(drawn, secret.source("batch").uniform(1000))


@pytest.mark.parametrize("aggregator", ["mean", "two-stage", "fortified"])
def test_a_secret_run_is_recorded_and_every_round_has_noise_of_its_own(aggregator) -> None:
    run = setup(aggregator=aggregator, secret=True, rounds=12).federation
    recorded, rounds = played(run)
    assert all(isinstance(found, Recorded) for found in rounds._device.graphs.values())
    plain, _ = played(run, graph=False)
    assert same_bytes(recorded, plain)  # one key: the same draws by round, recorded or not
    other, _ = played(setup(aggregator=aggregator, secret=True, rounds=12).federation)
    assert not same_bytes(recorded, other)
    rounds, sent = Rounds(run, start(run)), []
    for _ in range(6):
        rounds.step()
        sent.append(rounds.settled().state.uploads.clone())
    rows = torch.cat(sent)
    away = torch.corrcoef(rows) - torch.eye(len(rows), device="cuda")
    assert away.abs().max() < 0.5  # momentum leans on the last upload by a tenth; the same noise would give 1


LOOK = ("mda", "guerraoui")
"""Aggregators that say that they ask the host, or have such a one inside."""

PAIRED = [(attack, "two-stage") for attack in ATTACKS] + [("label-flip", aggregator) for aggregator in AGGREGATORS]
PAIRED += [("a-little-tuned", aggregator) for aggregator in ("median", "bulyan", "centered-clipping")]


@pytest.mark.parametrize(("attack", "aggregator"), PAIRED)
def test_every_round_can_be_recorded_and_gives_the_bytes_of_one_that_is_not(attack, aggregator) -> None:
    run = setup(attack=attack, aggregator=aggregator).federation
    recorded, rounds = played(run)
    assert rounds._device.graphs
    assert all(isinstance(found, Recorded) == (aggregator not in LOOK) for found in rounds._device.graphs.values())
    plain, rounds = played(run, graph=False)
    assert not rounds._device.graphs
    assert same_bytes(recorded, plain)
    assert recorded.state.params.isfinite().all()


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_with_capacity_or_without_a_round_is_the_same(model, monkeypatch) -> None:
    run = setup(model=model, rounds=6).federation
    queued, _ = played(run)
    tight = replace(run)
    monkeypatch.setattr(Active, "capacity", lambda self: Capacity(1, 1, 1))  # nothing ever fits
    one_by_one, _ = played(tight)
    assert one_by_one.rounds == 6
    assert torch.equal(queued.reasons, one_by_one.reasons)
    difference = (queued.state.uploads - one_by_one.state.uploads).norm(dim=1).max()
    assert difference <= ONE_ROUND * queued.state.uploads.norm(dim=1).max()


def test_a_round_that_does_not_fit_is_played_again_and_those_behind_it_too() -> None:
    run = setup(rounds=40, attack="gaussian").federation
    roomy, _ = played(run)
    few = run.mechanism.sampling.largest_sum(
        5, int(run.workers.sizes[:5].sum()), run.mechanism.declared, 0.3
    )  # too small for about three rounds in ten
    redone, rounds = played(with_less_capacity(run, few))
    assert any(isinstance(found, Recorded) for found in rounds._device.graphs.values())
    assert redone.rounds == 40
    assert (redone.reasons == roomy.reasons).float().mean() > 0.95  # rounding may tip a score
    difference = (redone.state.params - roomy.state.params).norm()
    assert difference <= 0.05 * (roomy.state.params - run.mechanism.model.initial()).norm()


def test_runs_side_by_side_give_the_bytes_of_runs_alone() -> None:
    shared = SharedData()
    kinds = [
        {"seed": 1},
        {"seed": 2, "attack": "gaussian"},
        {"sigma": 30.0, "attack": "inner", "aggregator": "mean"},
        {"attack_start": 0.5},
    ]
    ready = [setup(shared=shared, rounds=30, **kind) for kind in kinds]
    assert ready[0].federation.x is ready[1].federation.x
    alone = [played(each.federation)[0] for each in ready]
    with noisegate.Compute().exact():
        trainings = [Training(s.federation, start(s.federation), s.x_test, s.y_test, 7) for s in ready]
        while going := [training for training in trainings if not training.over]:
            side_by_side(going)
        for training, one in zip(trainings, alone, strict=True):
            assert same_bytes(training.settled(wait=True), one)


def test_run_together_is_run_one_by_one() -> None:
    spec = noisegate.Spec(rounds=20, sigma=2.0, sigma_base=2.0, epsilon=2.0)
    specs = [spec, replace(spec, seed=2), replace(spec, aggregator="mean")]
    compute = noisegate.Compute("cuda")
    together = noisegate.run_together(specs, compute=compute)
    for found, each in zip(together, specs, strict=True):
        alone = noisegate.run(each, compute=compute)
        assert replace(found, seconds=0.0, ms_per_round=0.0) == replace(alone, seconds=0.0, ms_per_round=0.0)


def test_interrupted_and_resumed_gives_the_same_bytes(tmp_path) -> None:
    spec = noisegate.Spec(rounds=40, sigma=2.0, sigma_base=2.0, epsilon=2.0, evaluate_every=10)
    compute = noisegate.Compute("cuda")
    whole = noisegate.run(spec, compute=compute, out=tmp_path / "whole")

    def stop(progress: Progress, rounds: int) -> None:
        if progress.rounds >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noisegate.run(spec, compute=compute, out=tmp_path / "broken", watch=stop)
    resumed = noisegate.run(spec, compute=compute, out=tmp_path / "broken", resume=True)
    assert replace(resumed, seconds=0.0, ms_per_round=0.0) == replace(whole, seconds=0.0, ms_per_round=0.0)
    for name in ("rounds.jsonl", "model.safetensors", "verdicts.npz"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("attack", ["gaussian", "label-flip"])
def test_parts_change_nothing(attack) -> None:
    whole = setup(attack=attack, rounds=3).federation
    parts = replace(whole)
    active = parts.active(parts.phase(0))
    active.__dict__["holdings"] = replace(active.holdings, at_once=2)
    one, two = played(whole)[0], played(parts)[0]
    assert torch.equal(one.reasons, two.reasons)
    assert (one.state.uploads - two.state.uploads).norm(dim=1).max() <= ONE_ROUND * one.state.uploads.norm(dim=1).max()


class Asks(noisegate.Mean):
    """An aggregator that asks the host."""

    def __call__(self, view, state):
        if float(view.norms.max()) < 0:
            raise AssertionError
        return super().__call__(view, state)


def test_an_aggregator_that_asks_the_host_is_played_kernel_by_kernel() -> None:
    run = setup().federation
    asked, rounds = played(run.change(aggregator=Asks()))
    assert list(rounds._device.graphs.values()) == [None]
    assert same_bytes(asked, played(run.change(aggregator=noisegate.Mean()))[0])


@pytest.mark.parametrize("d", [1, 5000, 9001])
def test_rows_are_cleared_or_left_alone(d) -> None:
    rows, absent = torch.randn(6, d, device="cuda"), torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool, device="cuda")
    rows[1] = torch.nan
    wanted = rows.masked_fill(absent[:, None], 0.0)
    assert torch.equal(clear_rows(rows, absent), wanted)


@pytest.mark.parametrize("size", [10, 70_001])
def test_copies_are_made_or_not(size) -> None:
    value, old = torch.randn(size, device="cuda"), torch.zeros(size, device="cuda")
    copy_if(torch.tensor(False, device="cuda"), value, old)
    assert not old.any()
    copy_if(torch.tensor(True, device="cuda"), value, old)
    assert torch.equal(old, value)


# --- the kernels of `fortified`, held against their twins on a CPU ----------------------------------------------------

LARGE = [(100, 25_450, 100, 10), (130, 5000, 47, 1), (600, 300, 20, 10), (2, 1_200_000, 20, 10)]


@pytest.fixture
def exactly():
    """Matrix products in full precision."""
    if not kernels.available():
        pytest.skip("a device that Triton does not compile for")
    with noisegate.Compute().exact():
        yield


@pytest.mark.parametrize("n", [1, 20, 300, 5000])
@pytest.mark.parametrize("tested", [False, True])
def test_what_an_upload_alone_shows(n, tested, exactly) -> None:
    check_first_tests("cuda", n, tested)


@pytest.mark.parametrize("n", [1, 2, 13, 20, 50, 128, 200, 512])
@pytest.mark.parametrize("kind", COPIES)
def test_what_is_shared(n, kind, exactly) -> None:
    for seed in range(8):
        check_copies("cuda", n, kind, seed)
        check_copies("cuda", n, kind, seed, limit=0.05, everyone=True)


def test_a_round_of_fortified_is_that_of_a_cpu(exactly) -> None:
    def there(aggregator, view, state):
        moved, own = view_on("cuda", view), view.contributions().cuda()
        moved = replace(moved, contributions=lambda: own)
        return aggregator(moved, {name: value.cuda() for name, value in state.items()})

    check_rounds(there, rounds=8)
    check_rounds(there, rounds=3, d=6000)
