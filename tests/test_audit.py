"""`noisegate audit`: it refutes what is broken, in each way that it names, and lets the product as it is alone."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from noisegate import Dataset, Spec
from noisegate.compute import Compute
from noisegate.lab import audit as audit_module
from noisegate.lab.audit import audit, fuzz, noise
from noisegate.lab.audit.check import Check
from noisegate.lab.audit.claim import claim_of
from noisegate.lab.audit.record import decide
from noisegate.lab.setup import prepare
from noisegate.sampling import Poisson
from noisegate.simulate import Federation
from noisegate.simulate import round as round_module
from noisegate.workers import Normalized

CPU = Compute(device="cpu", threads=1)
TRIALS = 1500
"""Enough for a budget of 8, whose ROC curve is far from the diagonal."""

SMALL = {"workers": 4, "byzantine": 0.0, "attack": "none", "aggregator": "mean", "batch": 16, "delta": 1e-3}
SEEDS = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    """Enough for what is looked for here, in less time."""
    monkeypatch.setattr(fuzz, "SETTINGS", 40)
    monkeypatch.setattr(noise, "NUMBERS", 2**17)


@pytest.fixture(scope="module")
def small() -> Dataset:
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(240) % 2
    return Dataset("small", x[:200], y[:200], x[200:], y[200:], 2)


def spec_of(**changes) -> Spec:
    return Spec(**{"dataset": "small", "epsilon": 8.0, "rounds": 20, **SMALL, **changes})


def refuters(found) -> set[str]:
    """The names of all checks that refute, those of the whole as `whole`."""
    names = {check.name for check in found.checks if check.refuted}
    return names | ({"whole"} if found.whole.refuted else set())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_product_is_not_refuted_and_less_noise_would_have_been(small, seed):
    found = audit(spec_of(seed=seed), dataset=small, trials=TRIALS, compute=CPU)
    assert not refuters(found)
    assert found.verdict == "not refuted"
    assert found.power.refuted
    assert found.strength > 0.99
    # The attack is about as good as the claim allows at all, so that a failure to refute says something.
    assert found.whole.auc > found.whole.claimed_auc - 0.03
    for bound in found.whole.bounds:
        assert 0 < bound.measured < bound.claimed
        assert bound.one_run < bound.claimed
    assert [bound.delta for bound in found.whole.bounds] == [1e-3, 1e-5]


def test_few_trials_are_inconclusive(small):
    found = audit(spec_of(), dataset=small, trials=40, compute=CPU)
    assert found.verdict == "inconclusive"
    assert any("more trials" in note for note in found.notes)


def half_the_noise(patch):
    added = Federation.added_noise.fget
    patch.setattr(Federation, "added_noise", property(lambda self: 0.5 * added(self)))


def noise_of_one_round(patch):
    rewind = Federation.rewind
    patch.setattr(
        Federation,
        "rewind",
        lambda self, generator, what, t: rewind(self, generator, what, 0 if what == "noise" else t),
    )


def nine_batches(patch):
    rewind = Federation.rewind
    patch.setattr(
        Federation,
        "rewind",
        lambda self, generator, what, t: rewind(self, generator, what, t % 9 if what == "batch" else t),
    )


def noise_of_one_worker(patch):
    fill = round_module.fill_with_noise

    def fill_alike(uploads, *rest):
        fill(uploads[:1], *rest)
        uploads[1:] = uploads[:1]

    patch.setattr(round_module, "fill_with_noise", fill_alike)


def noise_with_a_common_part(patch):
    fill = round_module.fill_with_noise

    def fill_together(uploads, *rest):
        fill(uploads, *rest)
        uploads.mul_(math.sqrt(0.9)).add_(math.sqrt(0.1) * uploads[:1].clone())

    patch.setattr(round_module, "fill_with_noise", fill_together)


def rate_of_the_true_size(patch):
    """What the product did before a size was declared: who has fewer examples draws each more often."""

    def over(self, sizes, declared):
        held = torch.arange(int(sizes.max())) < sizes[:, None]
        chance = self.batch / sizes[:, None].double()
        return lambda rng: held & (torch.rand(held.shape, generator=rng, dtype=torch.float64) < chance)

    patch.setattr(Poisson, "over", over)


def uniform_noise(patch):
    def fill(uploads, std, rng):
        uploads.uniform_(-std * math.sqrt(3), std * math.sqrt(3), generator=rng)

    patch.setattr(round_module, "fill_with_noise", fill)


def noise_used_twice(patch):
    def fill(uploads, std, rng):
        half = uploads.shape[1] // 2
        uploads.normal_(0.0, std, generator=rng)
        uploads[:, half : 2 * half] = uploads[:, :half].clone()

    patch.setattr(round_module, "fill_with_noise", fill)


def long_contributions(patch):
    weights = Normalized.weights
    patch.setattr(Normalized, "weights", lambda self, norms: 1.001 * weights(self, norms))


def twice_the_rate(patch):
    over = Poisson.over
    patch.setattr(Poisson, "over", lambda self, sizes, declared: over(Poisson(2 * self.batch), sizes, declared))


def all_or_nothing(patch):
    def over(self, sizes, declared):
        held = torch.arange(int(sizes.max())) < sizes[:, None]
        return lambda rng: held & (torch.rand(len(sizes), 1, generator=rng) < self.batch / declared)

    patch.setattr(Poisson, "over", over)


MUTANTS = [
    (half_the_noise, {"noise: standard deviation", "whole"}),
    (noise_of_one_round, {"noise: shared by rounds", "noise: two uploads alike"}),
    (noise_of_one_worker, {"noise: shared by workers", "noise: two uploads alike"}),
    (noise_with_a_common_part, {"noise: shared by workers"}),
    (uniform_noise, {"noise: distribution"}),
    (noise_used_twice, {"noise: repeated in an upload"}),
    (nine_batches, {"sampling: two batches alike", "sampling: lags", "sampling: spread of counts"}),
    (long_contributions, {"bound: random gradients", "bound: the model"}),
    (twice_the_rate, {"sampling: rate", "sampling: one example", "whole"}),
    (rate_of_the_true_size, {"whole"}),
    (all_or_nothing, {"sampling: batch sizes"}),
]


@pytest.mark.parametrize(("break_it", "expected"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_product_is_refuted(small, monkeypatch, break_it, expected):
    rounds = {"rounds": 60, "epsilon": 12.0} if break_it is nine_batches else {}
    break_it(monkeypatch)
    found = audit(spec_of(**rounds), dataset=small, trials=600 if "whole" in expected else 30, compute=CPU)
    assert found.verdict == "refuted"
    assert found.refuted
    assert expected <= refuters(found)


def test_half_the_noise_is_refuted_by_uploads_alone(small, monkeypatch):
    """Even if the adversary believes in the claimed noise, and nobody looks at the parts."""
    half_the_noise(monkeypatch)
    monkeypatch.setattr(audit_module, "_parts", lambda setup, *rest: ([], 0.25, []))
    found = audit(spec_of(), dataset=small, trials=600, compute=CPU)
    assert refuters(found) == {"whole"}


def test_nine_batches_pass_the_membership_trials(small, monkeypatch):
    """Why sampling is looked at by itself: the trials alone do not see it."""
    nine_batches(monkeypatch)
    found = audit(spec_of(rounds=60, epsilon=12.0), dataset=small, trials=400, compute=CPU)
    assert not found.whole.refuted
    assert {name.partition(":")[0] for name in refuters(found)} == {"sampling"}


def test_your_own_model_and_loss_are_used(small):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.shift = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return torch.stack([(x * self.scale).sum(1), (x * x * self.scale).sum(1)], 1) + self.shift

    def squared(outputs, targets):
        return (outputs - torch.stack([1 - targets, targets], 1)).square().sum(1)

    found = audit(spec_of(), dataset=small, model=Own(), loss=squared, trials=600, compute=CPU)
    assert (found.model, found.parameters) == ("Own", 10)
    assert not refuters(found)
    assert found.whole.auc > 0.75


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": True},
        {"worker": "clipped"},
        {"worker": "clipped-momentum"},
        {"worker": "sign-gaussian"},
        {"worker": "sign-randomized"},
        {"worker": "ma-sign"},
        {"sampling": "fixed", "accountant": "rdp"},
        {"accountant": "rdp"},
    ],
    ids=str,
)
def test_every_kind_of_worker_and_sampling_is_audited_and_not_refuted(small, changes):
    found = audit(spec_of(**changes), dataset=small, trials=400, compute=CPU)
    assert not refuters(found)
    assert {check.name.partition(":")[0] for check in found.checks} == {"bound", "noise", "sampling"}


def test_signs_that_are_turned_too_rarely_are_refuted(small, monkeypatch):
    from noisegate.workers import signs

    flip = signs.flip_probability
    monkeypatch.setattr(signs, "flip_probability", lambda sigma, d: 0.9 * flip(sigma, d))
    found = audit(spec_of(worker="sign-randomized"), dataset=small, trials=30, compute=CPU)
    assert "noise: signs turned" in refuters(found)


def test_without_noise_there_is_nothing_to_refute(cli):
    answer = cli("audit", "--sigma", "0", "--set", "aggregator.name=mean", "--rounds", "3")
    assert answer.status == 2
    assert "nothing to refute" in answer.err


def test_the_verdict_never_says_that_something_is_proved():
    good, bad = Check("a", "", False), Check("b", "", True)
    strong, weak = (SimpleNamespace(refuted=refuted) for refuted in (True, False))
    assert decide([good, bad], strong) == decide([good, bad], weak) == "refuted"
    assert decide([good], weak) == "inconclusive"
    assert decide([good], strong) == "not refuted"


def test_the_claim_is_of_the_rate_that_batches_have(small):
    setup = prepare(spec_of(), CPU, small)
    claim = claim_of(setup)
    assert claim.rate == pytest.approx(16 / 49, rel=0.03)  # 196 examples, the server has 4
    assert claim.delta_at(claim.epsilon) == pytest.approx(claim.delta, rel=1e-3)
    assert claim.epsilon_at(1e-5) > claim.epsilon


def test_the_command_says_what_it_found_and_leaves_a_plot(cli, tmp_path):
    answer = cli("audit", "--rounds", 3, "--trials", 40, "--out", tmp_path / "found", "--device", "cpu")
    assert answer.status == 0
    assert answer.out.splitlines()[-3] == "inconclusive"
    assert "verified" not in answer.out
    assert "research noise: not to be published" in answer.out
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"audit.json", "audit.html"}
    stored = json.loads((tmp_path / "found" / "audit.json").read_text())
    assert stored["verdict"] == "inconclusive"
    assert stored["claim"]["relation"] == "add-or-remove"
    page = (tmp_path / "found" / "audit.html").read_text()
    assert "claimed: nothing lies above" in page
    assert 'src="http' not in page


def test_refuted_is_exit_status_1(cli, monkeypatch):
    half_the_noise(monkeypatch)
    answer = cli("audit", "--rounds", 3, "--trials", 30, "--json", "--device", "cpu")
    assert answer.status == 1
    assert answer.json["verdict"] == "refuted"
    assert any(check["refuted"] for check in answer.json["checks"])
    assert answer.json["whole"]["trials"] == 30


def test_trials_must_be_a_number_of_trials(cli):
    answer = cli("audit", "--rounds", 3, "--trials", 0)
    assert answer.status == 2
    assert "trials = 0" in answer.err
