"""Attacks that look like noise: what they send, when, and that the paper's tests cannot see it."""

import math
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noisegate import Compute, Dormant, Gaussian, LabelFlip, LocalPoisoning, Spec, SpecError, run
from noisegate.aggregators.ks_test import ks_rejects
from noisegate.aggregators.upload_lengths import norm_interval
from noisegate.attacks import ATTACKS, GradientAscent, OnOff, RankMatched, ScoreBanking, Trojan
from noisegate.attacks.disguise import fixed_directions, ranked, unit, valid
from noisegate.attacks.honest import Forger
from noisegate.catalog import build
from noisegate.runs.setup import MOST_KNOWN, prepare
from noisegate.simulate import first_state, play
from noisegate.streams import stream
from noisegate.views import TESTS, AdversaryView, DataView
from noisegate.workers.direct import per_example_gradients

D, S, BYZANTINE = 4000, 0.2, 6
CPU = Compute(device="cpu")
FIVE = 5 / math.sqrt(D)
"""Five deviations of the cosine of two independent normal vectors."""

GRADIENT = torch.randn(D, generator=stream(0, "gradient")) / D
PARAMS = torch.randn(D, generator=stream(0, "params"))


def view_of(phase=None, byzantine: int = BYZANTINE, seed: int = 0, **changes) -> AdversaryView:
    def unseen(*_):
        raise AssertionError("none of these attacks looks there")

    view = AdversaryView(
        workers=byzantine,
        see_honest=unseen,
        see_own=unseen,
        params=PARAMS.clone(),
        noise_std=S,
        phase=phase,
        stream=partial(stream, seed, "attack"),
        judge=unseen,
        see_gradient=lambda normalized: GRADIENT.clone() if normalized else unseen(),
    )
    return replace(view, **changes)


def cosines(uploads: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(uploads.double(), direction.double(), dim=-1)


# Directions.


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30, 1e38])
def test_a_unit_has_length_one_whatever_its_size(scale):
    vectors = scale * torch.tensor([[3.0, 0.0, -3.0], [1.0, 1.0, 1.0]])
    expected = torch.tensor([[1.0, 0.0, -1.0], [1.0, 1.0, 1.0]]) / torch.tensor([[2.0], [3.0]]).sqrt()
    before = vectors.clone()
    torch.testing.assert_close(unit(vectors), expected)
    assert torch.equal(vectors, before)


def test_what_has_no_direction_is_zero():
    assert unit(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert unit(torch.tensor([torch.nan, torch.inf, 2.0])).tolist() == [0.0, 0.0, 1.0]


def test_fixed_directions_are_normal_and_unrelated():
    rows = torch.cat([fixed_directions(seed, 10, PARAMS) for seed in (0, 1, -7)])
    assert float(torch.corrcoef(rows).fill_diagonal_(0.0).abs().max()) < FIVE
    for shift in (1, 2, 64, 1024):
        assert float(cosines(rows[:, shift:], rows[:, :-shift]).abs().max()) < 5 / math.sqrt(D - shift)
    for row in rows.numpy():
        assert stats.kstest(row, "norm").pvalue > 1e-5


def test_fixed_directions_depend_on_seed_and_row_alone():
    rows = fixed_directions(3, 5, PARAMS)
    assert torch.equal(rows[:2], fixed_directions(3, 2, PARAMS))
    assert torch.equal(rows[:, :100], fixed_directions(3, 5, PARAMS[:100]))


# Disguises.


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 4),
    d=st.integers(1, 40),
    closeness=st.floats(0.01, 1.0),
    noise_std=st.sampled_from([0.0, 1e-6, 0.2, 1e3]),
    scale=st.sampled_from([0.0, 1e-40, 1.0, 1e38, math.nan, math.inf]),
    seed=st.integers(0, 2**20),
)
def test_what_is_ranked_is_a_permutation_of_fresh_noise(rows, d, closeness, noise_std, scale, seed):
    targets = scale * torch.randn(rows, d, generator=stream(seed, "targets"))
    sent = ranked(targets, closeness, noise_std, stream(seed, "attack"))
    rng = stream(seed, "attack")
    torch.randn(rows, d, generator=rng)  # for the order
    noise = torch.empty(rows, d).normal_(0.0, noise_std, generator=rng)
    assert torch.equal(sent.sort(-1).values, noise.sort(-1).values)


@settings(deadline=None, max_examples=30)
@given(d=st.integers(1, 60), seed=st.integers(0, 2**20))
def test_what_is_ranked_has_the_order_of_its_target(d, seed):
    order = torch.stack([torch.randperm(d, generator=stream(seed, "order", i)) for i in range(3)])
    sent = ranked(order - d / 2, 1.0, S, stream(seed, "attack"))  # neighbours far apart, beside the least chance
    assert torch.equal(sent.argsort(-1), order.argsort(-1))


@pytest.mark.parametrize("closeness", [0.1, 0.5, 0.9, 1.0])
def test_the_cosine_of_what_is_ranked_is_its_closeness(closeness):
    targets = torch.randn(8, D, generator=stream(1, "targets"))
    sent = ranked(targets, closeness, S, stream(0, "attack"))
    # Two samples of D values: each moves the cosine by about 1/sqrt(D); sorted ones agree up to 5/D or so.
    off = (cosines(sent, targets) - closeness).abs().max()
    assert float(off) < (FIVE if closeness < 1 else 20 / D)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_values_are_ordered_by_chance(value):
    targets = torch.full((4, D), value)
    targets[:, ::2] = torch.randn(4, D // 2, generator=stream(0, "targets"))
    equal = ranked(targets, 1.0, S, stream(0, "attack"))[:, 1::2]
    together = torch.cat([equal, torch.arange(D // 2.0)[None]])  # with their positions
    assert float(torch.corrcoef(together).fill_diagonal_(0.0).abs().max()) < 5 / math.sqrt(D // 2)


def test_no_gradient_gives_a_random_order():
    for form in ("ranked", "valid"):
        for attack in (RankMatched(form=form), RankMatched("descend", form=form)):
            sent = attack.forge(view_of(see_gradient=None))
            assert float(torch.corrcoef(sent).fill_diagonal_(0.0).abs().max()) < FIVE
            assert float(sent.std()) == pytest.approx(S, rel=0.03)


def test_the_noise_tests_see_in_what_is_ranked_what_they_see_in_noise():
    rows, d = 300, 600
    rng = stream(0, "attack")
    torch.randn(rows, d, generator=rng)
    noise = torch.empty(rows, d).normal_(0.0, S, generator=rng)
    sent = ranked(torch.randn(d, generator=stream(0, "t")).expand(rows, d), 1.0, S, stream(0, "attack"))
    rejected = ks_rejects(noise, S, 0.05)
    assert 0 < int(rejected.sum()) < rows
    assert torch.equal(ks_rejects(sent, S, 0.05), rejected)
    torch.testing.assert_close(sent.norm(dim=1), noise.norm(dim=1), rtol=1e-5, atol=0)


def test_what_is_valid_is_noise_and_a_signal_of_its_length():
    targets = torch.randn(3, D, generator=stream(0, "targets"))
    sent = valid(targets, 0.7, S, stream(0, "attack"))
    signal = sent - torch.empty(3, D).normal_(0.0, S, generator=stream(0, "attack"))
    torch.testing.assert_close(signal, 0.7 * targets / targets.norm(dim=1, keepdim=True), atol=1e-6, rtol=0)


def test_what_is_valid_passes_the_noise_tests():
    rows, d, s = 2000, 600, 0.4
    target = torch.randn(d, generator=stream(0, "t"))
    for length in (0.25, 0.5):
        sent = valid(target.expand(rows, d), length, s, stream(0, "attack"))
        low, high = norm_interval(d, s, 3.0)
        norms = sent.norm(dim=1)
        refused = ks_rejects(sent, s, 0.05) | (norms < low) | (norms > high)
        # Noise is refused with probability 0.05 to 0.053. Four binomial deviations.
        assert float(refused.float().mean()) <= 0.053 + 4 * math.sqrt(0.053 * 0.947 / rows)


@pytest.mark.parametrize("form", ["ranked", "valid"])
@pytest.mark.parametrize("kind", [RankMatched, Trojan])
def test_any_shape_and_no_noise(kind, form):
    for byzantine in (0, 1, 3):
        for d in (1, 2, 7):
            for noise_std in (0.0, S):
                view = view_of(
                    byzantine=byzantine,
                    params=torch.ones(d),
                    noise_std=noise_std,
                    see_gradient=lambda normalized, d=d: torch.zeros(d),
                )
                sent = kind(form=form).forge(view)
                assert sent.shape == (byzantine, d)
                assert sent.dtype == torch.float32
                assert bool(sent.isfinite().all())
    assert not bool(RankMatched().forge(view_of(noise_std=0.0)).any())


# What they point along. A server subtracts uploads.

TARGETS = {"ascend": -GRADIENT, "descend": GRADIENT, "weights": PARAMS, "random": fixed_directions(0, 1, PARAMS)[0]}


@pytest.mark.parametrize("target", TARGETS)
def test_rank_matched_points_along_its_target(target):
    sent = RankMatched(target).forge(view_of())
    assert float(cosines(sent, TARGETS[target]).min()) > 1 - 20 / D
    weak = RankMatched(target, strength=0.4).forge(view_of())
    assert float((cosines(weak, TARGETS[target]) - 0.4).abs().max()) < FIVE
    signal = RankMatched(target, 0.5, "valid").forge(view_of(noise_std=0.0))
    torch.testing.assert_close(signal, (0.5 * unit(TARGETS[target])).expand(BYZANTINE, D), atol=1e-6, rtol=0)


def test_a_random_target_is_fixed_by_its_seed():
    sent = [RankMatched("random", seed=seed).forge(view_of(seed=t)) for seed, t in [(0, 0), (0, 1), (1, 0)]]
    assert float(cosines(sent[0], sent[1]).min()) > 0.99
    assert float(cosines(sent[0], sent[2]).abs().max()) < FIVE


def test_workers_of_rank_matched_do_not_share_their_noise():
    sent = RankMatched(strength=0.3).forge(view_of())
    values = sent.sort(-1).values
    assert not torch.equal(values[0], values[1])
    apart = torch.corrcoef(sent).fill_diagonal_(0.3**2) - 0.3**2
    assert float(apart.abs().max()) < FIVE


@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("drift", ["random", "weights"])
def test_a_trojan_divides_its_length_between_pull_and_drift(pull, drift):
    sent = Trojan(pull, drift).forge(view_of())
    aside = TARGETS[drift]
    assert float((cosines(sent, GRADIENT) - pull).abs().max()) < FIVE
    assert float((cosines(sent, aside) - math.sqrt(1 - pull**2)).abs().max()) < FIVE


def test_drifts_apart_are_fixed_for_each_worker():
    first, later = (Trojan(0.3, apart=True).forge(view_of(seed=t)) for t in (0, 1))
    assert float(cosines(first, later).min()) > 0.98
    drifts = first - S * math.sqrt(D) * 0.3 * unit(GRADIENT)
    assert float(torch.corrcoef(drifts).fill_diagonal_(0.0).abs().max()) < FIVE
    together = Trojan(0.3).forge(view_of())
    assert float(torch.corrcoef(together).min()) > 0.98


# When they do it.


@pytest.mark.parametrize(
    ("period", "share", "hostile"),
    [
        (0.1, 0.5, [t % 10 >= 5 for t in range(100)]),
        (0.1, 0.3, [t % 10 >= 7 for t in range(100)]),
        (0.1, 0.9, [t % 10 >= 1 for t in range(100)]),
        (0.2, 0.25, [t % 20 >= 15 for t in range(100)]),
        (1.0, 0.5, [t >= 50 for t in range(100)]),
        (0.03, 1 / 3, [t % 3 == 2 for t in range(100)]),
        (0.1, 0.0, [False] * 100),
        (0.1, 1.0, [True] * 100),
    ],
)
def test_on_off_takes_turns(period, share, hostile):
    attack = OnOff(Gaussian(), period, share)
    phases = [attack.phase(t / 100) for t in range(100)]
    assert [attack.forge(view_of(phase)) is not None for phase in phases] == hostile
    assert [not attack.needs_own(phase) for phase in phases] == hostile
    assert len(set(phases)) == len(set(hostile))


@pytest.mark.parametrize(("turn", "turned"), [(0.0, 0), (0.25, 25), (0.5, 50), (1.0, 100)])
def test_score_banking_turns_once(turn, turned):
    attack = ScoreBanking(turn=turn)
    signs = [float(cosines(attack.forge(view_of(attack.phase(t / 100), 1)), GRADIENT)) for t in range(100)]
    assert [sign < 0 for sign in signs] == [t >= turned for t in range(100)]
    assert min(map(abs, signs)) > 0.99
    assert not any(attack.needs_own(attack.phase(t / 100)) for t in range(100))


def test_banking_is_disguised_as_it_is_told():
    attack = ScoreBanking(strength=0.5, form="valid")
    assert attack.attack == RankMatched(form="valid")
    sent = attack.forge(view_of(attack.phase(0.0), noise_std=0.0))
    torch.testing.assert_close(sent, (0.5 * unit(GRADIENT)).expand(BYZANTINE, D), atol=1e-6, rtol=0)
    assert ScoreBanking(Trojan(), form="valid").attack == Trojan()


NESTED = {
    "banking of on-off": (ScoreBanking(OnOff(Gaussian(), 0.2), 0.5), "dddddGhGhG"),
    "on-off of banking": (OnOff(ScoreBanking(Gaussian(), 0.5), 0.2), "hdhdhGhGhG"),
    "dormant banking": (Dormant(ScoreBanking(Gaussian(), 0.5), 0.3), "hhhddGGGGG"),
    "dormant on-off": (Dormant(OnOff(Gaussian(), 0.2), 0.4), "hhhhhGhGhG"),
    "banking of dormant": (ScoreBanking(Dormant(Gaussian(), 0.7), 0.2), "ddhhhhhGGG"),
}


def played(attack, progress: float) -> str:
    """h: follows the protocol; d: goes down; G: noise."""
    phase = attack.phase(progress)
    sent = attack.forge(view_of(phase))
    assert attack.needs_own(phase) == (sent is None)
    if sent is None:
        return "h"
    return "d" if float(cosines(sent, GRADIENT).min()) > 0.9 else "G"


@pytest.mark.parametrize("name", NESTED)
def test_they_compose(name):
    attack, expected = NESTED[name]
    assert "".join(played(attack, t / 10) for t in range(10)) == expected


def test_data_are_poisoned_by_the_clock_of_the_innermost():
    attack = ScoreBanking(OnOff(Dormant(LabelFlip(), 0.7), 0.2), 0.2)
    labels = ""
    for t in range(10):
        view = DataView(10, attack.phase(t / 10), partial(stream, 0, "p"))
        labels += str(int(attack.poison(torch.zeros(1, 1), torch.tensor([1]), view)[1]))
    assert labels == "1111111818"


@pytest.mark.parametrize("wrap", [ScoreBanking, OnOff, Dormant])
def test_what_they_hide_behaves_as_it_does_alone(wrap):
    """Its data, its ascent and its conditions."""
    ascent, flip = wrap(GradientAscent()), wrap(LabelFlip())
    for progress, hostile in [(0.0, False), (0.95, True)]:
        assert ascent.ascends(ascent.phase(progress)) == hostile
        view = DataView(10, flip.phase(progress), partial(stream, 0, "p"))
        assert flip.poison(torch.zeros(1, 1), torch.tensor([1]), view)[1].tolist() == [8 if hostile else 1]
    with pytest.raises(SpecError, match="local-poisoning"):
        wrap(LocalPoisoning()).check(16, 2)
    wrap(LocalPoisoning()).check(16, 5)


# As parts of a spec.


def test_they_are_built_from_tables():
    table = {"name": "score-banking", "form": "valid", "turn": 0.25}
    assert build("attack", table, ATTACKS) == ScoreBanking(RankMatched(form="valid"), 0.25, form="valid")
    table = {"name": "on-off", "period": 0.2, "attack": {"name": "trojan", "apart": True}}
    assert build("attack", table, ATTACKS) == OnOff(Trojan(apart=True), 0.2)
    table = {"name": "score-banking", "attack": "on-off"}
    assert Spec(attack=table, attack_start=0.25).build_attack() == Dormant(ScoreBanking(OnOff()), 0.25)
    assert build("attack", "on-off", ATTACKS) == OnOff(RankMatched())


@pytest.mark.parametrize(
    "make",
    [
        lambda: RankMatched("sideways"),
        lambda: RankMatched(strength=0.0),
        lambda: RankMatched(strength=1.1),
        lambda: RankMatched(form="loud"),
        lambda: ScoreBanking(turn=-0.1),
        lambda: ScoreBanking(turn=1.1),
        lambda: ScoreBanking(strength=math.nan),
        lambda: ScoreBanking(form="loud"),
        lambda: Trojan(pull=1.1),
        lambda: Trojan(drift="sideways"),
        lambda: Trojan(strength=2.0),
        lambda: Trojan(form="loud"),
        lambda: Trojan(drift="weights", apart=True),
        lambda: OnOff(period=0.0),
        lambda: OnOff(period=1.5),
        lambda: OnOff(share=-0.5),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(SpecError, match=" = "):
        make()


# What an adversary knows of the gradient.


@dataclass(frozen=True)
class Revealing(Forger):
    """Sends the gradient as it sees it."""

    normalized: bool = True

    def forge(self, view: AdversaryView) -> torch.Tensor:
        return view.gradient(self.normalized).expand(view.workers, -1)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_gradient_is_the_mean_over_its_own_examples(quick, normalized):
    federation = prepare(quick(), CPU).federation.change(attack=Revealing(normalized))
    params = first_state(federation).params
    state, _ = play(federation, first_state(federation), 0)
    gradients = per_example_gradients(
        federation.mechanism.model, params, federation.adversary.known_x, federation.adversary.known_y
    ).double()
    if normalized:
        gradients /= gradients.norm(dim=1, keepdim=True)
    sent = state.uploads[federation.adversary.byzantine].double()
    torch.testing.assert_close(sent, gradients.mean(0).expand_as(sent), atol=1e-6, rtol=1e-4)


def rows_of(x: torch.Tensor) -> set[tuple[float, ...]]:
    return set(map(tuple, x.flatten(1).tolist()))


def test_the_known_examples_are_its_own_and_none_of_the_servers(quick):
    federation = prepare(quick(), CPU).federation
    held_by = zip(
        federation.workers.holdings[federation.adversary.byzantine],
        federation.workers.sizes[federation.adversary.byzantine],
        strict=True,
    )
    own = torch.cat([held[:size] for held, size in held_by]).unique()
    assert len(federation.adversary.known_x) == len(federation.adversary.known_y) == min(MOST_KNOWN, len(own))
    assert rows_of(federation.adversary.known_x) <= rows_of(federation.workers.x[own])
    assert not rows_of(federation.adversary.known_x) & rows_of(federation.server.aux_x)


def test_nothing_is_known_without_byzantine_workers(quick):
    federation = prepare(quick(byzantine=0.0), CPU).federation
    assert (
        len(federation.adversary.known_x)
        == len(federation.adversary.known_y)
        == len(federation.adversary.imagined.aux_x)
        == 0
    )


NAMES = ["rank-matched", "score-banking", "trojan", "on-off"]


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_examples_do_not_matter_to_them(name, quick):
    federation = prepare(quick(attack=name), CPU).federation
    other = federation.change(aux_x=federation.server.aux_x.flip(0) + 1.0, aux_y=federation.server.aux_y.flip(0))
    sent = [play(run, first_state(run), 2)[0].uploads for run in (federation, other)]
    assert torch.equal(*sent)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_of_fixed_capacity_is_the_same(name, quick):
    federation = prepare(quick(attack=name), CPU).federation
    for t in range(3):
        capacity = federation.active(federation.phase(t)).capacity()
        plain, _ = play(federation, first_state(federation), t)
        bound, _ = play(federation, first_state(federation), t, capacity)
        assert bool(capacity.fits())
        off = (plain.uploads - bound.uploads).norm(dim=1) / plain.uploads.norm(dim=1)
        # Sums of gradients in another order; that may change the order of two coordinates that are nearly equal.
        assert float(off.max()) < 1e-3


# Whole runs on digits, against the paper's aggregator as it is printed.

ROUNDS, TURN = 60, 0.5


@lru_cache
def outcome(name: str, **settings):
    """(result, reasons, scores, who is Byzantine)."""
    attack = {"name": name, **settings}
    with tempfile.TemporaryDirectory() as folder:
        noise = {"batch": 16, "rate": 0.2, "sigma": 2.5, "sigma_base": 2.5, "accountant": "rdp"}
        spec = Spec(attack=attack, aggregator="two-stage", rounds=ROUNDS, **noise)
        result = run(spec, compute=CPU, out=f"{folder}/run")
        with np.load(f"{folder}/run/verdicts.npz") as found:
            return result, found["reasons"], found["scores"], found["byzantine"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rank-matched", {}),
        ("score-banking", {}),
        ("trojan", {}),
        ("rank-matched", {"form": "valid", "strength": 0.5}),
        ("score-banking", {"form": "valid", "strength": 0.5}),
    ],
)
def test_they_pass_the_first_stage_like_honest_workers(name, settings):
    _, reasons, _, byzantine = outcome(name, **settings)
    refused = np.isin(reasons, TESTS)
    # 900 Byzantine and 600 honest uploads, each refused with a probability near 0.053: four deviations.
    spread = math.sqrt(0.053 * 0.947 * (1 / 900 + 1 / 600))
    assert refused[:, byzantine].size == 900
    assert abs(refused[:, byzantine].mean() - refused[:, ~byzantine].mean()) < 4 * spread


def test_ranked_banking_wins_the_scores():
    result, reasons, scores, byzantine = outcome("score-banking")
    turn = int(TURN * ROUNDS)
    assert scores[turn - 1, byzantine].min() > 10 * scores[turn - 1, ~byzantine].max()
    kept = reasons == 0
    assert kept[turn - 1, byzantine].sum() > 5 * kept[turn - 1, ~byzantine].sum()
    assert result.accuracy < 0.2, "guessing reaches 0.1"


def test_valid_banking_earns_more_than_honest_work():
    _, _, scores, byzantine = outcome("score-banking", form="valid")
    before = scores[int(TURN * ROUNDS) - 1]
    assert before[byzantine].mean() > before[~byzantine].mean()


def test_what_comes_and_goes_loses_no_score():
    _, reasons, scores, byzantine = outcome("on-off")
    hostile = [t for t in range(1, ROUNDS) if OnOff().attacks(t / ROUNDS)]
    taken = scores[[t - 1 for t in hostile]][:, byzantine] - scores[hostile][:, byzantine]
    assert taken.max() <= 0
    assert scores[-1, byzantine].max() > 0
    assert (reasons[hostile][:, byzantine] == 0).any(), "some are selected while they attack"
