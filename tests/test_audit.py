"""`noisegate audit`: it refutes what is broken, in each way that it names, and lets the product as it is alone."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from noisegate import Dataset, Spec
from noisegate import audit as audit_module
from noisegate.audit import audit, fuzz, noise
from noisegate.audit.check import Check
from noisegate.audit.claim import claim_of
from noisegate.audit.clones import stage
from noisegate.audit.record import decide
from noisegate.compute import Compute
from noisegate.entropy import Secret, Source
from noisegate.protocol import Mechanism
from noisegate.protocol import worker as worker_module
from noisegate.runs.setup import prepare
from noisegate.sampling import Poisson
from noisegate.simulate import Schedule, first_state, play
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
    added = Mechanism.added_noise.fget
    patch.setattr(Mechanism, "added_noise", property(lambda self: 0.5 * added(self)))


def noise_of_one_round(patch):
    rewind = Schedule.rewind
    patch.setattr(
        Schedule,
        "rewind",
        lambda self, generator, what, t: rewind(self, generator, what, 0 if what == "noise" else t),
    )


def nine_batches(patch):
    rewind = Schedule.rewind
    patch.setattr(
        Schedule,
        "rewind",
        lambda self, generator, what, t: rewind(self, generator, what, t % 9 if what == "batch" else t),
    )


def noise_of_one_worker(patch):
    fill = worker_module.fill_with_noise

    def fill_alike(uploads, *rest):
        fill(uploads[:1], *rest)
        uploads[1:] = uploads[:1]

    patch.setattr(worker_module, "fill_with_noise", fill_alike)


def noise_with_a_common_part(patch):
    fill = worker_module.fill_with_noise

    def fill_together(uploads, *rest):
        fill(uploads, *rest)
        uploads.mul_(math.sqrt(0.9)).add_(math.sqrt(0.1) * uploads[:1].clone())

    patch.setattr(worker_module, "fill_with_noise", fill_together)


def rate_of_the_true_size(patch):
    """What the product did before a size was declared: who has fewer examples draws each more often."""

    def over(self, sizes, declared, labels=None):
        held = torch.arange(int(sizes.max())) < sizes[:, None]
        chance = self.batch / sizes[:, None].double()
        return lambda rng: held & (torch.rand(held.shape, generator=rng, dtype=torch.float64) < chance)

    patch.setattr(Poisson, "over", over)


def uniform_noise(patch):
    def fill(uploads, std, rng):
        uploads.uniform_(-std * math.sqrt(3), std * math.sqrt(3), generator=rng)

    patch.setattr(worker_module, "fill_with_noise", fill)


def noise_used_twice(patch):
    def fill(uploads, std, rng):
        half = uploads.shape[1] // 2
        uploads.normal_(0.0, std, generator=rng)
        uploads[:, half : 2 * half] = uploads[:, :half].clone()

    patch.setattr(worker_module, "fill_with_noise", fill)


def long_contributions(patch):
    weights = Normalized.weights
    patch.setattr(Normalized, "weights", lambda self, norms: 1.001 * weights(self, norms))


def twice_the_rate(patch):
    over = Poisson.over
    patch.setattr(
        Poisson, "over", lambda self, sizes, declared, labels=None: over(Poisson(2 * self.batch), sizes, declared)
    )


def all_or_nothing(patch):
    def over(self, sizes, declared, labels=None):
        held = torch.arange(int(sizes.max())) < sizes[:, None]
        return lambda rng: held & (torch.rand(len(sizes), 1, generator=rng) < self.batch / declared)

    patch.setattr(Poisson, "over", over)


def one_coordinate_bare(patch):
    """The same place of every upload has no noise: in research runs, and in secret ones."""
    fill, add = worker_module.fill_with_noise, Source.add_noise

    def fill_but_one(uploads, *rest):
        fill(uploads, *rest)
        uploads[:, 3:4] = 0.0

    def add_but_one(self, sums, std):
        kept = sums[:, 3:4].clone()
        add(self, sums, std)
        sums[:, 3:4] = kept

    patch.setattr(worker_module, "fill_with_noise", fill_but_one)
    patch.setattr(Source, "add_noise", add_but_one)


def one_round_bare(patch):
    """Round 40 has no noise: in research runs, and in secret ones."""
    now = [0]
    fill, add, rewind, begin = worker_module.fill_with_noise, Source.add_noise, Schedule.rewind, Secret.begin

    def noted_rewind(self, generator, what, t):
        now[0] = t
        return rewind(self, generator, what, t)

    def noted_begin(self, t, again=False):
        now[0] = t
        begin(self, t, again)

    patch.setattr(Schedule, "rewind", noted_rewind)
    patch.setattr(Secret, "begin", noted_begin)
    patch.setattr(worker_module, "fill_with_noise", lambda u, std, rng: fill(u, 0.0 if now[0] == 40 else std, rng))
    patch.setattr(Source, "add_noise", lambda self, sums, std: None if now[0] == 40 else add(self, sums, std))


def one_worker_bare(patch):
    fill = worker_module.fill_with_noise

    def fill_but_one(uploads, *rest):
        fill(uploads, *rest)
        uploads[5:6] = 0.0

    patch.setattr(worker_module, "fill_with_noise", fill_but_one)


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
    (one_coordinate_bare, {"noise: every coordinate"}),
    (one_round_bare, {"noise: every round"}),
    (one_worker_bare, {"noise: every worker"}),
]


@pytest.mark.parametrize(("break_it", "expected"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_product_is_refuted(small, monkeypatch, break_it, expected):
    rounds = {"rounds": 60, "epsilon": 12.0} if break_it in (nine_batches, one_round_bare) else {}
    break_it(monkeypatch)
    found = audit(spec_of(**rounds), dataset=small, trials=600 if "whole" in expected else 30, compute=CPU)
    assert found.verdict == "refuted"
    assert found.refuted
    assert expected <= refuters(found)


def refuted_again_and_again(spec: Spec, data, trials: int) -> bool:
    """Secret noise is another one every time, and 1 % of audits may refute a sound product: so twice counts."""
    return all(refuters(audit(spec, dataset=data, trials=trials, compute=CPU)) for _ in range(2))


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [(one_coordinate_bare, "noise: every coordinate"), (one_round_bare, "noise: every round")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_secret_run_that_lacks_noise_in_one_place_is_refuted(small, monkeypatch, break_it, expected):
    spec = spec_of(secret=True, rounds=60, epsilon=12.0)
    assert not refuted_again_and_again(spec, small, trials=30)
    break_it(monkeypatch)
    assert expected in refuters(audit(spec, dataset=small, trials=30, compute=CPU))


@pytest.mark.parametrize("place", ["coordinate", "round"])
def test_signs_that_are_not_turned_in_one_place_are_refuted(small, monkeypatch, place):
    """Of a coordinate, and of a late round."""
    from noisegate.workers import SignRandomized

    publish, rounds = SignRandomized.publish, []
    rewind = Schedule.rewind
    monkeypatch.setattr(Schedule, "rewind", lambda self, g, what, t: [rounds.append(t), rewind(self, g, what, t)][1])

    def publish_but_one(self, sent, *rest):
        publish(self, sent, *rest)
        if place == "coordinate":
            sent[:, 3:4] = sent[:, 3:4].abs()
        elif rounds[-1] == 40:
            sent.abs_()

    monkeypatch.setattr(SignRandomized, "publish", publish_but_one)
    spec = spec_of(worker="sign-randomized", rounds=60, epsilon=12.0)
    found = audit(spec, dataset=small, trials=30, compute=CPU)
    assert refuters(found) - {"whole"} == {f"noise: every {place}"}


def test_a_very_large_run_is_watched_in_fewer_coordinates_and_says_so(small, monkeypatch):
    monkeypatch.setattr(noise, "MOST_WATCHED", 2 * 20 * 7)
    for worker in ("normalized", "sign-randomized"):
        found = audit(spec_of(worker=worker), dataset=small, trials=30, compute=CPU)
        (check,) = [check for check in found.checks if check.name == "noise: every round"]
        assert "in 7 of 354 coordinates" in check.found
        assert not refuters(found) - {"whole"}


def test_the_smallest_of_many_sums_is_too_small_as_rarely_as_its_p_value_says():
    """Of 1,000 sets of 60 sums of real noise; the bound for many is nearly exact for a few."""
    rng = torch.Generator().manual_seed(5)
    scale = noise.Scale(torch.zeros(1), 1.0, torch.square, lambda total, count: float(stats.chi2.cdf(total, count)))
    amounts = torch.randn(1000, 60, 20, generator=rng, dtype=torch.float64).square()
    found = [noise.least("round", [noise.ObservedSums(scale, each.sum(1), 20)]).p for each in amounts]
    assert 60 < sum(p < 0.1 for p in found) < 130  # 95 expected, less than four errors
    total = float(amounts[0].sum(1).min())
    assert found[0] == pytest.approx(60 * stats.gamma.cdf(total / 2, 10))


def test_every_staged_federation_has_a_secret_of_its_own(small, monkeypatch):
    """A secret with a key, as on a CUDA device, draws by key and round: two groups of one key would draw alike."""

    def with_a_key(self):
        self.key = torch.from_numpy(np.frombuffer(os.urandom(32), dtype=np.int32).copy())
        self.round = torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(Secret, "__post_init__", with_a_key)
    setup = prepare(spec_of(secret=True), CPU, small)
    one, other = stage(setup), stage(setup)
    sent = [play(run, first_state(run), 0)[0].uploads for run in (setup.federation, one, other, one)]
    assert torch.equal(sent[1], sent[3])
    for k, j in ((0, 1), (0, 2), (1, 2)):
        assert float((sent[k] == sent[j]).float().mean()) < 0.1
    assert stage(prepare(spec_of(), CPU, small)).schedule.secret is None


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
    assert not refuters(found) or not refuted_again_and_again(spec_of(**changes), small, trials=400)
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
