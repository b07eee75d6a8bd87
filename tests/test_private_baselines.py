"""The private baselines: what their workers send, what their aggregators make of it, and what a run states for them."""

import json
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from conftest import QUICK, sealed
from noisegate import Compute, StoreError, privacy, run
from noisegate.aggregators import AGGREGATORS, MDA, Guerraoui, Krum, Mean
from noisegate.aggregators.sign_baselines import SignSum
from noisegate.errors import PrivacyError, SpecError
from noisegate.flips import cost_of_sign, flip_probability, sigma_of, sign_bias
from noisegate.protocol.intake import receive
from noisegate.runs.setup import prepare
from noisegate.runs.spec import Spec
from noisegate.sampling import Poisson
from noisegate.simulate import start
from noisegate.simulate.round import play
from noisegate.streams import stream
from noisegate.views import ServerView
from noisegate.workers import WORKERS, Clipped, ClippedMomentum, MaSign, Normalized, SignGaussian, SignRandomized
from noisegate.workers.signs import DRAWN_AT_ONCE

PAIRS = ("guerraoui", "sign-gaussian", "sign-randomized", "ma-sign")
CPU = Compute(device="cpu")


def drawn(seed: int = 1):
    return partial(stream, seed, "publish")


def nothing_to_draw():
    raise AssertionError("drew at random")


def view_of(uploads: torch.Tensor, believed: int) -> ServerView:
    n, d = uploads.shape
    rows, norms, present, _ = receive(uploads, n, d, torch.zeros(d))
    ties = torch.randperm(n, generator=stream(1, "ties"))
    return ServerView(rows, norms, present, 0.1, believed, lambda normalized: torch.zeros(d), ties)


# The scale of flips


@pytest.mark.parametrize("signs", [1, 10, 33_736])
@pytest.mark.parametrize("sigma", [1e-3, 0.05, 1.0, 30.0])
def test_sigma_and_the_flips_are_one_scale(sigma, signs):
    cost, flip, left = cost_of_sign(sigma, signs), flip_probability(sigma, signs), sign_bias(sigma, signs)
    assert flip == pytest.approx(1 / (1 + math.exp(cost)), rel=1e-9)
    assert left == pytest.approx(math.tanh(cost / 2), rel=1e-9) == pytest.approx(1 - 2 * flip, abs=1e-9)
    assert left == pytest.approx(1 / math.sqrt(1 + 4 * sigma**2 * signs), rel=1e-9)
    assert sigma_of(cost, signs) == pytest.approx(sigma, rel=1e-9)
    # distance of the two means over the deviation of a coordinate
    apart, deviation = 2 * left * math.sqrt(signs), 2 * math.sqrt(flip * (1 - flip))
    assert deviation / apart == pytest.approx(sigma, rel=1e-6)


def test_extreme_flips_are_numbers_and_senseless_ones_refused():
    assert flip_probability(1e-300, 1) < 1e-300
    assert flip_probability(1e300, 10**9) == 0.5
    for wrong in (
        partial(sign_bias, 0.0, 5),
        partial(cost_of_sign, 1.0, 0),
        partial(sigma_of, -1.0, 5),
        partial(sigma_of, 1e4, 5),
    ):
        with pytest.raises(SpecError):
            wrong()


# Workers


def test_momentum_comes_after_the_noise():
    worker = ClippedMomentum(carry=0.75)
    fresh, last = torch.tensor([[4.0, 0.0], [0.0, -8.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    worker.publish(fresh, last, 1.0, nothing_to_draw)
    assert fresh.tolist() == [[1.0, 3.0], [0.0, -2.0]]
    assert last.tolist() == [[0.0, 4.0], [0.0, 0.0]]
    lengths = torch.tensor([0.5, 2.0, 100.0])
    assert worker.momentum == 0
    assert torch.equal(worker.weights(lengths), Clipped().weights(lengths))


def test_noise_of_a_moving_average():
    worker, rng = ClippedMomentum(carry=0.8), stream(1, "noise")
    last = torch.zeros(1, 200_000)
    for _ in range(60):
        fresh = torch.randn(1, 200_000, generator=rng)
        worker.publish(fresh, last, 1.0, nothing_to_draw)
        last = fresh
    assert worker.noise_in_upload(1.0, 1.0, 1) == pytest.approx(float(last.std()), rel=0.01)


def test_momentum_settings():
    for wrong in ({"carry": 1.0}, {"carry": -0.1}, {"threshold": 0.0}):
        with pytest.raises(SpecError):
            ClippedMomentum(**wrong)
    for name in ("clipped-momentum", "sign-gaussian", "sign-randomized", "ma-sign"):
        with pytest.raises(SpecError, match="has no such setting"):
            Spec(worker={"name": name, "momentum": 0.5})
    with pytest.raises(SpecError, match="bound"):
        MaSign(bound=0.0)


@pytest.mark.parametrize("worker", [SignGaussian(), SignRandomized(), MaSign()])
def test_every_coordinate_of_an_upload_is_a_sign_at_length_1(worker):
    sent = torch.randn(5, 70, generator=stream(1, "sent"))
    sent[2] = 0.0
    worker.publish(sent, torch.zeros_like(sent), 0.5, drawn())
    assert sent.abs().unique().tolist() == [pytest.approx(1 / math.sqrt(70), rel=1e-6)]
    assert torch.allclose(sent.norm(dim=1), torch.ones(5))


def test_sign_gaussian_sends_the_signs_and_draws_nothing():
    sent = torch.tensor([[3.0, -0.1, 0.0, -0.0], [-1e-30, 1e30, -1e30, 1e-30]])
    SignGaussian().publish(sent, torch.zeros_like(sent), 1.0, nothing_to_draw)
    assert (2 * sent).tolist() == [[1, -1, 1, 1], [-1, 1, -1, 1]]


def share_within(share: float, chance: float, draws: int) -> bool:
    """Whether a share of so many draws is what the chance makes likely: 5 standard deviations."""
    return abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / draws)


@pytest.mark.parametrize("sigma", [0.0005, 0.002, 0.05])
def test_signs_are_flipped_as_often_as_they_should(sigma):
    n, d = 20, 50_000
    bare = torch.randn(n, d, generator=stream(1, "sent"))
    sent = bare.clone()
    SignRandomized().publish(sent, torch.zeros_like(sent), sigma, drawn())
    kept = (sent > 0) == (bare >= 0)
    chance = 1 - flip_probability(sigma, d)
    assert share_within(float(kept.double().mean()), chance, n * d)
    for part in (kept[bare < 0], kept[0], kept[-1], kept[:, 0]):  # whatever the sign, the worker, the coordinate
        assert share_within(float(part.double().mean()), chance, len(part))
    together = kept[:, 1:] == kept[:, :-1]  # neighbors are flipped without regard for each other
    assert share_within(float(together.double().mean()), chance**2 + (1 - chance) ** 2, together.numel() // 2)


def test_flips_are_those_of_one_row_of_uniforms_in_fixed_portions():
    n, d = 3, DRAWN_AT_ONCE // 2
    bare = torch.randn(n, d, generator=stream(1, "sent"))
    sent, rng = bare.clone(), stream(1, "publish")
    SignRandomized().publish(sent, torch.zeros_like(sent), 0.001, drawn())
    uniforms = [torch.rand(size, generator=rng, dtype=torch.float64) for size in (DRAWN_AT_ONCE, DRAWN_AT_ONCE // 2)]
    flipped = (torch.cat(uniforms) < flip_probability(0.001, d)).view(n, d)
    assert torch.equal(sent > 0, (bare >= 0) != flipped)


def test_one_bit_codes_are_right_on_average_up_to_the_cut():
    d, sigma, worker = 400_000, 0.001, MaSign(bound=2.0)
    cut = 2.0 / math.sqrt(d)
    for value in (-50 * cut, -cut, -0.5 * cut, 0.0, 0.3 * cut, cut, 9 * cut):
        sent = torch.full((2, d), value)
        worker.publish(sent, torch.zeros_like(sent), sigma, drawn())
        chance = 0.5 + sign_bias(sigma, d) * max(-1.0, min(1.0, value / cut)) / 2
        assert share_within(float((sent > 0).double().mean()), chance, sent.numel())
        assert flip_probability(sigma, d) <= chance + 1e-15
        assert chance <= 1 - flip_probability(sigma, d) + 1e-15


def test_noise_in_signs():
    d, sigma = 100_000, 0.001
    sent = torch.ones(4, d)
    SignRandomized().publish(sent, torch.zeros_like(sent), sigma, drawn())
    assert SignRandomized().noise_in_upload(0.0, sigma, d) == pytest.approx(float(sent.std()), rel=0.01)
    noise = torch.randn(4, d, generator=stream(1, "noise"))
    SignGaussian().publish(noise, torch.zeros_like(noise), 1.0, nothing_to_draw)
    assert SignGaussian().noise_in_upload(1.0, 1.0, d) == pytest.approx(float(noise.std()), rel=0.01)


# What happens in a round


class Bare(Normalized):
    """Sends the mean without any noise."""

    mechanism = "signs"

    def publish(self, sent, last, sigma, stream):
        pass


def federation(spec: Spec, worker=None):
    found = prepare(spec, CPU).federation
    return found.change(worker=worker) if worker else found


def uploads_of(run_, rounds: int) -> list[torch.Tensor]:
    state, sent = start(run_).state, []
    for t in range(rounds):
        state, _ = play(run_, state, t)
        sent.append(state.uploads.clone())
        params = start(run_).state.params
        state = replace(state, server=replace(state.server, params=params))  # at the same model, whatever was sent
    return sent


def test_a_round_of_momentum_is_a_round_of_clipping_and_the_average(quick):
    spec = quick(worker="clipped-momentum", aggregator="mean", byzantine=0.0)
    own = federation(spec)
    first, second = uploads_of(own, 2)
    fresh = uploads_of(own.change(worker=Clipped()), 2)
    assert torch.allclose(first, 0.1 * fresh[0], atol=1e-7)
    assert torch.allclose(second, 0.9 * first + 0.1 * fresh[1], atol=1e-7)
    plain = own.change(worker=Clipped()).mechanism
    assert own.mechanism.added_noise == plain.added_noise > own.mechanism.noise_std


def test_a_round_of_sign_gaussian_sends_the_signs_of_the_noisy_means(quick):
    own = federation(quick(worker="sign-gaussian", aggregator="mean", byzantine=0.0))
    noisy = uploads_of(own.change(worker=Normalized(momentum=0.0)), 2)
    for sent, mean in zip(uploads_of(own, 2), noisy, strict=True):
        assert torch.equal(sent > 0, mean >= 0)


def test_a_round_of_sign_randomized_flips_the_signs_of_bare_means(quick):
    own = federation(quick(worker="sign-randomized", aggregator="mean", byzantine=0.0, sigma=0.02, epsilon=None))
    bare = uploads_of(own.change(worker=Bare(momentum=0.0)), 2)
    sent = uploads_of(own, 2)
    assert own.mechanism.added_noise == 0
    flipped = torch.stack([(a > 0) != (b >= 0) for a, b in zip(sent, bare, strict=True)]).double()
    assert share_within(float(flipped.mean()), flip_probability(0.02, own.d), flipped.numel())
    assert not torch.equal(flipped[0], flipped[1])


# What a run states


@pytest.mark.parametrize("worker", ["sign-randomized", "ma-sign"])
def test_a_run_states_the_price_of_all_signs_of_an_example(worker):
    spec = Spec(worker=worker, aggregator="mean", byzantine=0.0, epsilon=2.0, rounds=20, batch=8)
    setup = prepare(spec, CPU)
    d, workers = setup.federation.mechanism.model.d, len(setup.federation.workers.sizes)
    asked = {"rounds": 20, "sampling": Poisson(8), "signs": d, "delta": setup.privacy.delta}
    own = privacy.epsilon(setup.privacy.sigma, examples=setup.federation.mechanism.declared, **asked)
    assert list(setup.privacy.worker_epsilons) == [own] * workers
    assert 1.98 <= setup.privacy.epsilon == own <= 2
    assert setup.privacy.epsilon > 10 * cost_of_sign(setup.privacy.sigma, d)  # which is what the paper would state


@pytest.mark.parametrize(("worker", "like"), [("clipped-momentum", "clipped"), ("sign-gaussian", "normalized")])
def test_what_is_made_of_private_gradients_costs_nothing_more(worker, like):
    spec = Spec(worker=worker, aggregator="mean", byzantine=0.0, rounds=20)
    assert prepare(spec, CPU).privacy == prepare(replace(spec, worker=like), CPU).privacy


@pytest.mark.parametrize("worker", ["sign-randomized", "ma-sign"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("given", [{"epsilon": 2.0}, {"sigma": 2.0}])
def test_no_number_is_stated_that_does_not_hold(worker, sampling, given):
    spec = Spec(worker=worker, aggregator="mean", accountant="rdp", sampling=sampling, rounds=3, **given)
    with pytest.raises(PrivacyError, match='"pld" and sampling = "poisson" only'):
        prepare(spec, CPU)


class Laplace(Normalized):
    """A mechanism without a known price."""

    mechanism = "laplace"


def test_a_mechanism_without_a_price_is_refused():
    spec = Spec(worker=f"{__name__}:Laplace", aggregator="mean", rounds=3, sigma=2.0)
    with pytest.raises(SpecError, match="its mechanism is 'laplace', which cannot be priced"):
        prepare(spec, CPU)


# Aggregators


def test_each_baseline_brings_a_worker_and_settings_that_fit_the_smallest_data_set():
    for name in PAIRS:
        partner = AGGREGATORS[name].goes_with
        spec = Spec(aggregator=name)
        assert spec.worker == partner["worker"] in WORKERS
        assert (spec.batch, spec.rate) == (partner["batch"], partner["rate"])
        given = Spec(aggregator=name, batch=3, worker="clipped", rate=0.5)
        assert (given.batch, given.worker, given.rate) == (3, "clipped", 0.5)
        few = replace(spec, workers=20, byzantine=0.0, **QUICK)  # of the smallest data set, 70 examples for each
        assert int(prepare(few, CPU).federation.workers.sizes.min()) >= spec.batch


@pytest.mark.parametrize("name", PAIRS)
def test_a_baseline_runs_by_its_name_alone(name):
    result = run(Spec(aggregator=name, byzantine=0.2, rounds=3), compute=CPU)
    assert result.epsilon <= 2
    assert result.spec["worker"]["name"] == AGGREGATORS[name].goes_with["worker"]
    assert result.believed_byzantine is not None


def test_the_sum_of_signs_counts_heads():
    uploads = torch.tensor([[0.1, -5.0, 1e18, 0.0], [2.0, 5.0, -1e-30, -1.0], [3.0, -1.0, -2.0, -1.0]])
    verdict = SignSum(length=6.0)(view_of(uploads, 2), {})
    assert verdict.update.tolist() == pytest.approx([3.0, -1.0, -1.0, -2.0])
    assert verdict.kept.all()
    malformed = torch.cat([uploads, torch.full((1, 4), torch.nan)])
    again = SignSum(length=6.0)(view_of(malformed, 2), {})
    assert torch.equal(again.update, verdict.update)
    assert again.kept.tolist() == [True, True, True, False]
    no_upload = SignSum()(view_of(torch.full((2, 4), torch.nan), 1), {})
    assert no_upload.update.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scratch", [1, 100, 2**28])
def test_the_sum_of_signs_is_the_mean_of_uploads_that_are_signs(scratch):
    uploads = torch.randn(7, 33, generator=stream(1, "uploads"))
    SignGaussian().publish(uploads, uploads, 1.0, nothing_to_draw)
    view = replace(view_of(uploads, 5), scratch=scratch)
    assert torch.allclose(SignSum()(view, {}).update, uploads.mean(0), atol=1e-6)


def test_guerraoui_is_its_aggregator():
    uploads = torch.randn(12, 9, generator=stream(1, "uploads"))
    for aggregator in (MDA(), Krum(), Mean()):
        for believed in (12, 9, 7):
            view = view_of(uploads, believed)
            own, inner = Guerraoui(aggregator=aggregator)(view, {}), aggregator(view, {})
            assert torch.equal(own.update, inner.update)
            assert torch.equal(own.reason, inner.reason)
    assert Guerraoui().aggregator == MDA()


def test_guerraoui_reckons_as_its_aggregator_does():
    assert Guerraoui(aggregator=Krum()).most(12) == Krum().most(12)
    assert Guerraoui(aggregator=Mean()).most(12) == 11
    assert Guerraoui(aggregator=Krum(byzantine=3)).reckoned(12, 12) == 3
    assert Guerraoui(aggregator=Krum(), byzantine=2).reckoned(12, 12) == 2
    assert Guerraoui(aggregator=Krum()).reckoned(12, 2) == Krum().most(12)
    view = view_of(torch.randn(12, 9, generator=stream(1, "uploads")), 12)
    handed_on = Guerraoui(aggregator=MDA(), byzantine=4)(view, {})
    assert torch.equal(handed_on.update, MDA(byzantine=4)(view, {}).update)
    assert int(handed_on.kept.sum()) == 8
    for wrong in (Guerraoui(aggregator=Krum(byzantine=5)), Guerraoui(aggregator=Krum(), byzantine=5)):
        with pytest.raises(SpecError, match="byzantine = 5: needs n >= 2 f"):
            wrong.check(12)
    Guerraoui(aggregator=Krum(), byzantine=4).check(12)
    Guerraoui(aggregator=Mean(), byzantine=4).check(12)


# For people


def test_privacy_prices_signs(cli):
    asked = ["privacy", "--samples", 3000, "--batch", 16, "--rounds", 10, "--epsilon", 1, "--signs", 500]
    found = cli(*asked, "--json").json
    assert found["signs"] == 500
    assert 0.99 <= found["epsilon"] <= 1
    people = cli(*asked).out
    assert f"flipped with probability {flip_probability(found['sigma'], 500):.4f}" in people
    assert "one example can change all of them" in people
    assert "signs" not in cli(*asked[:-2]).out


@pytest.mark.parametrize(
    ("aggregator", "setting", "worker"),
    [
        ("guerraoui", "carry=0.5", {"name": "clipped-momentum", "carry": 0.5}),
        ("ma-sign", "bound=0.2", {"name": "ma-sign", "bound": 0.2}),
        ("krum", "momentum=0.3", {"name": "normalized", "momentum": 0.3}),
    ],
)
def test_settings_of_the_worker_that_comes_along(cli, tmp_path, aggregator, setting, worker):
    """In any order of the flags."""
    (tmp_path / "quick.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in QUICK.items()))
    flags = ("--json", "--byzantine", 0.2)
    orders = (
        ("--aggregator", aggregator, "--set", f"worker.{setting}"),
        ("--set", f"worker.{setting}", "--aggregator", aggregator),
    )
    for i, order in enumerate(orders):
        answer = cli("run", "quick.toml", *order, *flags, "--out", str(i))
        assert answer.status == 0, answer.err
        assert answer.json["spec"]["worker"] == worker
        assert answer.json["aggregator"] == aggregator


def test_a_setting_that_the_worker_does_not_have_is_refused(cli):
    answer = cli("run", "--aggregator", "sign-gaussian", "--set", "worker.momentum=0.3", "--rounds", 2)
    assert answer.status == 2
    assert "'sign-gaussian' has no such setting" in answer.err


@dataclass(frozen=True)
class Partnered(Krum):
    """A plugin's aggregator with a partner."""

    goes_with = {"worker": "sign-gaussian", "batch": 5, "rate": 2.0}  # noqa: RUF012


def test_a_plugins_aggregator_brings_its_partner_too():
    spec = Spec(aggregator=f"{__name__}:Partnered")
    assert (spec.worker, spec.batch, spec.rate) == ("sign-gaussian", 5, 2.0)


@pytest.mark.parametrize("name", [[1], {"a": 1}, 3, None])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(SpecError, match=r"aggregator.*needs a name"):
        Spec(aggregator={"name": name})


class Unflipped(Normalized):
    """Says that it flips signs, and does not."""

    mechanism = "signs"


def test_a_worker_that_promises_flips_must_flip(quick):
    with pytest.raises(SpecError, match="no `publish` of its own"):
        run(quick(worker=f"{__name__}:Unflipped"))


class Unnamed(Normalized):
    """Does not say how it is private."""

    def __getattribute__(self, name):
        if name == "mechanism":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_what_a_part_lacks_is_named():
    with pytest.raises(SpecError, match="lacks mechanism"):
        Spec(worker=f"{__name__}:Unnamed")


def test_without_dp_accounting_what_has_no_price_is_refused_too(quick, monkeypatch):
    monkeypatch.setattr("noisegate.runs.promise.find_spec", lambda name: None)
    spec = quick(worker="sign-randomized", aggregator="mean", accountant="rdp", sampling="fixed")
    with pytest.raises(PrivacyError, match="signs"):
        prepare(spec, Compute(device="cpu"))


def test_a_result_of_an_older_version_is_refused(quick, tmp_path):
    run(quick(), out=tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    old = json.loads(path.read_text())
    del old["believed_byzantine"]
    path.write_text(sealed(old))
    with pytest.raises(StoreError, match=r"result\.json lacks believed_byzantine; remove it"):
        run(quick(), out=tmp_path / "run", resume=True)
    del old["sha256"]
    path.write_text(json.dumps(old))
    with pytest.raises(StoreError, match="of an earlier version"):
        run(quick(), out=tmp_path / "run", resume=True)
