"""From a spec to a federation: who holds what, who stands where, how much noise."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from noisegate import Compute, DataError, Poisson, PrivacyError, Spec, SpecError, epsilon, run
from noisegate.errors import NoisegateWarning
from noisegate.runs.setup import prepare

CPU = Compute(device="cpu")
NOISE = {"rounds": 5, "sigma": 4.0, "sigma_base": 4.0, "accountant": "rdp", "batch": 8}
"""Small batches for small data, and noise that is given, since nothing here is about calibration."""


def numbers(federation, row: int) -> list[int]:
    """The examples of the worker at position `row`, by the number in their first feature."""
    held = federation.workers.holdings[row, : int(federation.workers.sizes[row])]
    return federation.workers.x[held][:, 0].int().tolist()


def honest_and_lying(federation) -> tuple[list[int], list[int]]:
    return federation.adversary.honest_rows.tolist(), federation.adversary.rows.tolist()


PARTITIONS = {"iid": {}, "non-iid": {"non_iid": True}, "dirichlet": {"dirichlet": 1.0}}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_trains_on_what_the_server_or_the_test_holds(toy, partition, seed):
    data = toy()
    setup = prepare(Spec(workers=6, byzantine=0.6, seed=seed, **NOISE, **partition), CPU, data)
    federation = setup.federation
    honest, lying = honest_and_lying(federation)
    aux = federation.server.aux_x[:, 0].int().tolist()
    test = setup.x_test[:, 0].int().tolist()
    assert Counter(federation.server.aux_y.tolist()) == {0: 2, 1: 2, 2: 2}
    everyone = [number for row in honest + lying for number in numbers(federation, row)]
    assert not set(aux) & set(everyone)
    assert not set(test) & (set(everyone) | set(aux))
    # The honest workers hold all the rest, each example once: rows, sizes and `byzantine` belong together.
    held = [number for row in honest for number in numbers(federation, row)]
    assert sorted(held) == sorted(set(range(300)) - set(aux))
    # Byzantine workers draw theirs from the whole pool, as many as an honest worker holds, and none twice.
    assert len(lying) == 9
    for row in lying:
        mine = numbers(federation, row)
        assert len(mine) == len(set(mine)) == len(held) // 6
        assert set(mine) <= set(held)
    assert len({tuple(sorted(numbers(federation, row))) for row in lying}) == len(lying), (
        "Byzantine workers share their data"
    )


def test_positions_are_shuffled(toy):
    lying = torch.stack(
        [
            prepare(Spec(workers=4, byzantine=0.5, seed=seed, **NOISE), CPU, toy()).federation.adversary.byzantine
            for seed in range(24)
        ]
    )
    assert lying.sum(1).tolist() == [4] * 24
    # A position is always of one kind with probability 2^-23: it would be no shuffle.
    assert bool(lying.any(0).all())
    assert not bool(lying.all(0).any())


def test_the_same_seed_makes_the_same_federation(toy):
    spec = Spec(workers=4, byzantine=0.5, **NOISE)
    first, again = (prepare(spec, CPU, toy()).federation for _ in range(2))
    other = prepare(Spec(workers=4, byzantine=0.5, seed=2, **NOISE), CPU, toy()).federation
    for part, name in (("workers", "holdings"), ("workers", "sizes"), ("adversary", "byzantine"), ("server", "aux_x")):
        assert torch.equal(getattr(getattr(first, part), name), getattr(getattr(again, part), name)), name
    assert torch.equal(first.mechanism.model.initial(), again.mechanism.model.initial())
    assert not torch.equal(first.workers.holdings, other.workers.holdings)
    assert not torch.equal(first.server.aux_x, other.server.aux_x)
    assert not torch.equal(first.mechanism.model.initial(), other.mechanism.model.initial())


@pytest.mark.parametrize(("share", "count"), [(0.2, 5), (0.4, 13), (0.6, 30), (0.9, 180), (0.0, 0)])
def test_how_many_are_byzantine(toy, share, count):
    federation = prepare(Spec(workers=20, byzantine=share, **NOISE), CPU, toy(train=400)).federation
    assert int(federation.adversary.byzantine.sum()) == count
    assert len(federation.adversary.byzantine) == 20 + count
    assert federation.server.believed_honest == 20


@pytest.mark.parametrize(
    ("workers", "share", "gamma", "believed"),
    [
        (20, 0.8, None, 20),
        (20, 0.8, 0.07, 7),  # 0.07 * 100 is 7.000000000000001
        (20, 0.8, 0.071, 8),
        (20, 0.8, 0.29, 29),  # 0.29 * 100 is 28.999999999999996
        (20, 0.8, 1.0, 100),
        (20, 0.8, 0.0001, 1),
        (20, 0.8, 1e-12, 1),
        (5, 0.0, 0.5, 3),
    ],
)
def test_how_many_the_server_believes(toy, workers, share, gamma, believed):
    spec = Spec(workers=workers, byzantine=share, gamma=gamma, **NOISE)
    assert prepare(spec, CPU, toy(train=400)).federation.server.believed_honest == believed


def test_unequal_workers_share_one_rate_one_noise_and_one_epsilon(toy):
    """The rate comes from a declared number, so that no worker's true size shows in its price."""
    asked = {"rounds": 20, "batch": 8, "accountant": "rdp", "epsilon": 3.0}
    setup = prepare(Spec(workers=5, byzantine=0.0, dirichlet=0.5, **asked), CPU, toy())
    promise, sizes = setup.privacy, setup.federation.workers.sizes.tolist()
    assert len(set(sizes)) > 1, "the partition is even: the test shows nothing"
    assert promise.declared == setup.federation.mechanism.declared == round(sum(sizes) / 5)
    assert promise.sampling_rate == 8 / promise.declared
    priced = {"rounds": 20, "sampling": Poisson(8), "accountant": "rdp", "delta": promise.delta}
    own = epsilon(promise.sigma, examples=promise.declared, **priced)
    assert promise.worker_epsilons == (own,) * 5
    assert 0.99 * 3.0 < own == promise.epsilon <= 3.0
    assert setup.federation.mechanism.sigma == promise.sigma
    assert promise.relation == "add-or-remove"


def test_a_declared_number_is_taken_and_delta_follows_it(toy):
    spec = Spec(workers=4, declared=30_000, **NOISE)
    promise = prepare(spec, CPU, toy()).privacy
    assert (promise.declared, promise.sampling_rate) == (30_000, 8 / 30_000)
    assert promise.delta == 0.1 / 30_000
    assert prepare(replace(spec, declared=30), CPU, toy()).privacy.delta == 1e-5
    with pytest.warns(NoisegateWarning, match=r"is above 1 / \|D\| for 4 of 4 workers"):  # who hold more than declared
        promise = prepare(replace(spec, declared=30, delta="paper"), CPU, toy()).privacy
    assert promise.delta == 30**-1.1


def test_honest_workers_that_hold_copies_are_priced(toy):
    """The extra workers of attack "none" hold examples of the others. Whoever holds an example spends it."""
    spec = Spec(workers=4, byzantine=0.6, attack="none", aggregator="mean", **NOISE)
    setup = prepare(spec, CPU, toy())
    run, promise = setup.federation, setup.privacy
    held = [run.workers.holdings[i, : run.workers.sizes[i]] for i in range(len(run.workers.sizes))]
    assert promise.copies == int(torch.cat(held).bincount().max()) > 1
    asked = {"sampling": Poisson(8), "accountant": "rdp", "delta": promise.delta, "examples": promise.declared}
    assert promise.epsilon_with_copies == epsilon(promise.sigma, rounds=5 * promise.copies, **asked) > promise.epsilon
    attacked = prepare(replace(spec, attack="label-flip"), CPU, toy()).privacy
    assert (attacked.copies, attacked.epsilon_with_copies) == (1, attacked.epsilon)


def test_the_rate_follows_the_noise(toy):
    federation = prepare(Spec(workers=4, rate=0.5, **{**NOISE, "sigma_base": 1.0}), CPU, toy()).federation
    assert federation.server.rate == pytest.approx(0.5 * 1.0 / 4.0)
    assert federation.mechanism.noise_std == pytest.approx(4.0 / 8, rel=1e-5)  # a hair more, for rounding
    clipped = Spec(workers=4, worker={"name": "clipped", "threshold": 0.5}, **NOISE)
    assert prepare(clipped, CPU, toy()).federation.mechanism.noise_std == pytest.approx(0.5 * 4.0 / 8, rel=1e-5)


def test_noise_that_overspends_is_refused(toy):
    with pytest.raises(PrivacyError, match=r"sigma = 0\.5: spends epsilon .* more than the 1 asked for"):
        prepare(Spec(workers=4, rounds=5, batch=8, sigma=0.5, epsilon=1.0, accountant="rdp"), CPU, toy())


def test_noise_without_a_budget_is_priced(toy):
    setup = prepare(Spec(workers=4, **NOISE), CPU, toy())
    asked = {"rounds": 5, "sampling": Poisson(8), "delta": setup.privacy.delta, "accountant": "rdp"}
    assert setup.privacy.epsilon == epsilon(4.0, examples=setup.federation.mechanism.declared, **asked)


def test_a_batch_larger_than_a_worker_is_refused(toy):
    with pytest.raises(DataError, match="batch = 80: the smallest of 4 workers has only"):
        prepare(Spec(workers=4, **{**NOISE, "batch": 80}), CPU, toy())


def test_rounds_follow_the_passes_over_the_data(toy):
    given = {key: value for key, value in NOISE.items() if key != "rounds"}
    setup = prepare(Spec(dataset="mine.npz", workers=4, **given), CPU, toy())
    assert setup.federation.schedule.rounds == -(-10 * 74 // 8)  # 10 passes over ceil(294 / 4) examples
    assert setup.evaluate_every == setup.federation.schedule.rounds // 20


# --- what a user brings --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A user's own module: uses one layer twice, so there is no closed form for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x / 300)))))


class Normed(nn.Module):
    """Mixes examples, so that one example's gradient is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.norm(x))


def squared(outputs, targets):
    """A user's own loss."""
    return ((outputs - torch.eye(3)[targets]) ** 2).sum(1)


def test_everything_can_be_brought(toy, tmp_path):
    module = Net()
    before = [value.clone() for value in module.parameters()]
    seen = []
    result = run(
        Spec(workers=4, byzantine=0.2, **NOISE),
        dataset=toy(),
        model=module,
        loss=squared,
        out=tmp_path / "run",
        watch=lambda progress, rounds: seen.append((progress.rounds, rounds)),
    )
    assert (result.dataset, result.model_name, result.parameters) == ("toy", "Net", 48)
    assert seen == [(done, 5) for done in range(1, 6)]
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True)), "the module was changed"
    assert module.training
    saved = load_file(tmp_path / "run" / "model.safetensors")
    module.load_state_dict(saved)  # names and shapes are the module's own
    assert any(not torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True)), "nothing was learned"


def test_the_loss_matters(toy, tmp_path):
    torch.manual_seed(0)
    module, spec = Net(), Spec(workers=4, byzantine=0.0, aggregator="mean", **NOISE)
    for name, options in (("mine", {"loss": squared}), ("usual", {})):
        run(spec, dataset=toy(), model=module, out=tmp_path / name, **options)
    mine, usual = (load_file(tmp_path / name / "model.safetensors") for name in ("mine", "usual"))
    assert not torch.equal(mine["last.weight"], usual["last.weight"])


def test_batch_norm_is_refused(toy):
    with pytest.raises(SpecError, match=r"layer 'norm' \(BatchNorm1d\) mixes examples.*use GroupNorm"):
        run(Spec(workers=4, **NOISE), dataset=toy(), model=Normed())


@pytest.mark.parametrize("module", [Net(), None], ids=["direct", "closed form"])
def test_a_loss_that_averages_is_refused(toy, module):
    with pytest.raises(SpecError, match=r"one number per example.*reduction='none'"):
        run(Spec(workers=4, **NOISE), dataset=toy(), model=module, loss=functional.cross_entropy)


def test_an_npz_on_the_command_line(toy, cli, tmp_path):
    data = toy()
    np.savez(tmp_path / "mine.npz", x=data.x[:, 1:].numpy(), y=data.y.numpy())
    flags = ["--rounds", 5, "--sigma", 4, "--epsilon", 8, "--batch", 8, "--workers", 4, "--accountant", "rdp"]
    answer = cli("run", "--dataset", "mine.npz", *flags, "--json")
    assert answer.status == 0, answer.err
    found = answer.json
    assert (found["dataset"], found["model"], found["parameters"]) == ("mine", "mlp", 4 * 32 + 32 + 32 * 3 + 3)
    assert (tmp_path / found["out"]).name.startswith("mine-")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((20, 2))}, "no array 'y'"),
        ({"x": np.zeros((20, 2)), "y": np.arange(19)}, "must agree"),
        ({"x": np.zeros((20, 2)), "y": np.full(20, 0.5)}, "whole numbers"),
        ({"x": np.full((20, 2), np.nan), "y": np.arange(20) % 2}, "NaN"),
        ({"x": np.array(["a"] * 20), "y": np.arange(20) % 2}, "real numbers"),
    ],
)
def test_a_wrong_npz_is_one_line(cli, tmp_path, arrays, says):
    np.savez(tmp_path / "mine.npz", **arrays)
    answer = cli("run", "--dataset", "mine.npz", "--rounds", 2, "--sigma", 4)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err
    assert answer.err.strip().count("\n") == 0
