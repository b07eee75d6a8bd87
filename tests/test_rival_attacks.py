"""The attacks of other papers: against slow, obvious versions of their own definitions, and in rounds."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from noisegate import Compute, Dataset, Inner, LabelFlip, Spec, SpecError, run
from noisegate.aggregators import Krum, Mean, TwoStage
from noisegate.attacks import (
    ALittle,
    ALittleTuned,
    Dormant,
    FangKrum,
    FangTrimmedMean,
    GradientAscent,
    InnerTuned,
    LargeNorm,
    Mimic,
    MinMax,
    MinSum,
    NotANumber,
    SignFlip,
    Zero,
)
from noisegate.attacks.fang_krum import picked_by_krum
from noisegate.attacks.honest import Forger
from noisegate.attacks.line_search import lowest_at
from noisegate.protocol.intake import receive
from noisegate.runs.setup import prepare
from noisegate.simulate import Federation, first_state, play
from noisegate.streams import stream
from noisegate.views import AdversaryView, Reason, ServerView, Verdict
from noisegate.workers import Clipped, Normalized, fill_with_noise, mean_gradient
from noisegate.workers.direct import contributions, per_example_gradients

D, S = 500, 0.2
ROUNDING = 1e-6
"""float32 sums of a few dozen values below 1."""


def mean_of(uploads: torch.Tensor) -> Verdict:
    """What a server without a defense says."""
    n = len(uploads)
    kept = torch.ones(n, dtype=torch.bool)
    return Verdict(uploads.mean(0), kept, torch.zeros(n, dtype=torch.int64), torch.zeros(n))


def view_of(honest, byzantine: int, judge=None, phase: Hashable = None, seed: int = 0) -> AdversaryView:
    """honest: how many, or their uploads. judge: of all uploads, the honest ones first."""
    rng = stream(seed, "uploads")
    if isinstance(honest, int):
        honest = 0.05 + S * torch.randn(honest, D, generator=rng)
    own = S * torch.randn(byzantine, honest.shape[1], generator=rng)
    return AdversaryView(
        workers=byzantine,
        see_honest=honest.clone,
        see_own=own.clone,
        params=torch.zeros(honest.shape[1]),
        noise_std=S,
        phase=phase,
        stream=partial(stream, seed, "attack"),
        judge=lambda forged: (judge or mean_of)(torch.cat([honest, forged])),
    )


# Blind, or with their own data.


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sign_flip_turns_every_workers_own_upload_around(scale):
    view = view_of(4, 6)
    torch.testing.assert_close(SignFlip(scale).forge(view), -scale * view.own)
    assert SignFlip().needs_own(None)


def test_zero_sends_zeros():
    assert torch.equal(Zero().forge(view_of(4, 6)), torch.zeros(6, D))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_sends_what_counts_as_malformed(value):
    forged = NotANumber(value).forge(view_of(4, 6))
    assert not bool(forged.isfinite().any())
    assert bool(forged.isnan().all()) == (value == "nan")
    assert not bool(receive(forged, 6, D, torch.zeros(D))[2].any())


@pytest.mark.parametrize(
    ("factor", "length"), [(1e3, 1e3 * S * math.sqrt(D)), (2.0, 2 * S * math.sqrt(D)), (1e37, 1e19)]
)
def test_large_norm_is_long_well_formed_and_the_same_from_everyone(factor, length):
    forged = LargeNorm(factor).forge(view_of(4, 6))
    rows, norms, present, _ = receive(forged, 6, D, torch.zeros(D))
    assert bool(present.all())
    assert norms.tolist() == pytest.approx([length] * 6, rel=1e-5)
    assert bool((rows == rows[0]).all())
    other = LargeNorm(factor).forge(view_of(4, 6, seed=1))[0].double()
    cosine = torch.cosine_similarity(other, rows[0].double(), dim=0)
    assert abs(float(cosine)) < 5 / math.sqrt(D), "the direction is always the same"


@pytest.mark.parametrize(("worker", "copied"), [(0, 0), (3, 3), (7, 2)])
def test_mimic_copies_one_honest_worker(worker, copied):
    view = view_of(5, 3)
    assert torch.equal(Mimic(worker).forge(view), view.honest[copied].expand(3, D))


# Min-max and min-sum, against a bisection.


def direction_of(honest: torch.Tensor, perturbation: str) -> torch.Tensor:
    mean = honest.mean(0)
    if perturbation == "unit":
        return -mean / mean.norm()
    return -mean.sign() if perturbation == "sign" else -((honest - mean) ** 2).mean(0).sqrt()


def hidden_by_the_largest_distance(forged: torch.Tensor, honest: torch.Tensor) -> bool:
    return max(float((forged - h).norm()) for h in honest) <= max(float((g - h).norm()) for g in honest for h in honest)


def hidden_by_the_largest_sum(forged: torch.Tensor, honest: torch.Tensor) -> bool:
    def total(upload: torch.Tensor) -> float:
        return sum(float(((upload - h) ** 2).sum()) for h in honest)

    return total(forged) <= max(total(h) for h in honest)


def largest_by_bisection(honest: torch.Tensor, p: torch.Tensor, hidden) -> float:
    low, high = 0.0, 1.0
    while hidden(honest.mean(0) + high * p, honest):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if hidden(honest.mean(0) + middle * p, honest) else (low, middle)
    return low


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
@pytest.mark.parametrize("honest", [2, 3, 9])
@pytest.mark.parametrize("lopsided", [False, True])
@pytest.mark.parametrize(
    ("attack", "hidden"), [(MinMax, hidden_by_the_largest_distance), (MinSum, hidden_by_the_largest_sum)]
)
def test_gamma_is_the_largest_that_the_honest_uploads_hide(attack, hidden, honest, perturbation, lopsided):
    uploads = 0.05 + S * torch.randn(honest, 40, generator=stream(honest, "uploads"))
    if lopsided:
        uploads[0] *= 5  # one worker far out decides what hides the others
    view = view_of(uploads, 4)
    forged = attack(perturbation).forge(view)
    assert bool((forged == forged[0]).all())
    exact = uploads.double()
    p = direction_of(exact, perturbation)
    gamma = largest_by_bisection(exact, p, hidden)
    assert gamma > 0
    torch.testing.assert_close(forged[0].double(), exact.mean(0) + gamma * p, atol=10 * ROUNDING, rtol=0)
    assert hidden(exact.mean(0) + 0.999 * gamma * p, exact)
    assert not hidden(exact.mean(0) + 1.001 * gamma * p, exact)


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
@pytest.mark.parametrize("attack", [MinMax, MinSum])
def test_equal_honest_uploads_hide_nothing_but_themselves(attack, perturbation):
    for honest in (1, 3):
        uploads = torch.randn(1, D, generator=stream(0, "uploads")).repeat(honest, 1)
        forged = attack(perturbation).forge(view_of(uploads, 2))
        # The squares of the distances are 0 up to the rounding of float64, and their roots up to its root.
        torch.testing.assert_close(forged, uploads[:1].expand(2, D), atol=ROUNDING, rtol=ROUNDING)


# Fang against Krum.


def krum_picks(uploads: list[torch.Tensor], f: int) -> set[int]:
    """Whom Krum may pick, straight from its definition: everyone with the smallest score."""
    scores = []
    for i, one in enumerate(uploads):
        others = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(uploads) if j != i)
        scores.append(sum(others[: max(len(uploads) - f - 2, 0)]))
    return {i for i, score in enumerate(scores) if score <= min(scores) * (1 + 1e-12)}


def bound_of_the_paper(honest: torch.Tensor, byzantine: int) -> float:
    """Theorem 1 of Fang et al. for uploads of gradients: the model that was received is the origin."""
    h, d = honest.shape
    sums = []
    for i in range(h):
        others = sorted(float(((honest[i] - honest[j]) ** 2).sum()) for j in range(h) if j != i)
        sums.append(sum(others[: max(h - 2, 0)]))
    return math.sqrt(min(sums) / max(h - byzantine - 1, 1) / d) + max(float(row.norm()) for row in honest) / math.sqrt(
        d
    )


@pytest.mark.parametrize(
    ("honest", "byzantine"),
    [(12, 1), (12, 2), (12, 4), (20, 8), (6, 3), (7, 5), (4, 6), (8, 12), (3, 1), (2, 1), (1, 1)],
)
@pytest.mark.parametrize("signal", [0.0, 0.05, 0.5])
def test_fang_krum_takes_the_largest_halving_that_krum_picks(honest, byzantine, signal):
    halvings = 12
    uploads = signal + S * torch.randn(honest, 60, generator=stream(honest, "uploads"))
    forged = FangKrum(halvings).forge(view_of(uploads, byzantine))
    exact = uploads.double()
    signs = exact.mean(0).sign()
    size, found = bound_of_the_paper(exact, byzantine), False
    for j in range(halvings + 1):
        expected = -size / 2**j * signs
        found = any(picked >= honest for picked in krum_picks([*exact, *[expected] * byzantine], byzantine))
        if found:
            break
    torch.testing.assert_close(forged.double(), expected.expand(byzantine, 60), atol=ROUNDING, rtol=ROUNDING)
    if byzantine >= honest - 1:
        assert j == 0


def test_the_cases_of_fang_krum_are_not_all_alike():
    """Of the sizes above: some lambda is the first, some is halved, and some is never picked."""
    halved = set()
    for honest, byzantine, signal in [(4, 6, 0.05), (20, 8, 0.05), (12, 1, 0.5)]:
        uploads = signal + S * torch.randn(honest, 60, generator=stream(honest, "uploads"))
        size = FangKrum(12).forge(view_of(uploads, byzantine)).abs().max()
        halved.add(round(math.log2(bound_of_the_paper(uploads.double(), byzantine) / float(size))))
    assert halved >= {0, 12}
    assert len(halved) == 3


def test_no_forged_upload_beyond_the_bound_is_picked():
    """Theorem 1: more than the upper bound never pays, so nothing is lost by starting there."""
    for seed in range(20):
        exact = (0.02 + S * torch.randn(10, 30, generator=stream(seed, "uploads"))).double()
        size = bound_of_the_paper(exact, 3) * 1.0001
        forged = -size * exact.mean(0).sign()
        assert max(krum_picks([*exact, *[forged] * 3], 3)) < 10


@pytest.mark.parametrize(("honest", "byzantine"), [(9, 1), (9, 3), (9, 7), (9, 12), (3, 2), (2, 2), (1, 3)])
def test_scores_of_many_forged_uploads_at_once_are_krums(honest, byzantine):
    rng = stream(honest, "uploads")
    exact = torch.randn(honest, 5, generator=rng, dtype=torch.float64)
    forged = 0.7 * torch.randn(40, 5, generator=rng, dtype=torch.float64)
    apart = torch.cdist(exact, exact).square().fill_diagonal_(-1).sort(dim=1).values[:, 1:]
    found = picked_by_krum(apart, torch.cdist(forged, exact).square(), byzantine)
    wanted = [any(i >= honest for i in krum_picks([*exact, *[one] * byzantine], byzantine)) for one in forged]
    assert found.tolist() == wanted
    if (honest, byzantine) in ((9, 1), (9, 3)):
        assert len(set(wanted)) == 2


def test_krum_itself_picks_an_upload_of_fang_krum():
    """With as many Byzantine workers as the aggregator reckons with."""
    view = view_of(20, 6)
    sent = torch.cat([view.honest, FangKrum().forge(view)])
    rows, norms, present, _ = receive(sent, 26, D, torch.zeros(D))
    seen = ServerView(rows, norms, present, S, 20, lambda normalized: rows[0], torch.arange(26))
    assert int(Krum(byzantine=6)(seen, {}).kept.nonzero()) >= 20


# Fang against the trimmed mean and the median.


@pytest.mark.parametrize("stretch", [2.0, 1.0, 7.0])
def test_fang_trimmed_mean_sends_values_just_beyond_the_honest_values(stretch):
    rng = stream(3, "uploads")
    # Coordinates of every kind: both signs of the mean, with all values on one side of zero or on both.
    honest = torch.randn(9, 4000, generator=rng) + 4 * torch.randn(4000, generator=rng)
    honest[:, 0] = 0.0
    forged = FangTrimmedMean(stretch).forge(view_of(honest, 6)).double()
    kinds = set()
    for column, sent in zip(honest.double().T, forged.T, strict=True):
        low, high = float(column.min()), float(column.max())
        if float(column.mean()) > 0:
            first, last = (low * stretch, low) if low <= 0 else (low / stretch, low)
        else:
            first, last = (high, high * stretch) if high > 0 else (high, high / stretch)
        kinds.add((float(column.mean()) > 0, low > 0, high > 0))
        assert first <= last
        assert first - ROUNDING * abs(first) <= float(sent.min())
        assert float(sent.max()) <= last + ROUNDING * abs(last)
    assert len(kinds) == 4
    near = torch.where(honest.mean(0) > 0, honest.amin(0), honest.amax(0)).double()
    if stretch == 1.0:
        torch.testing.assert_close(forged, near.expand(6, -1), atol=0, rtol=ROUNDING)
        return
    far = torch.where((near > 0) == (honest.mean(0) > 0), near / stretch, near * stretch)
    places = ((forged - near) / (far - near))[:, 1:]
    # Uniform on [0, 1): 24,000 draws have a mean within 0.0019 and a variance within 0.0005 of it; four times that.
    assert float(places.mean()) == pytest.approx(1 / 2, abs=0.0075)
    assert float(places.var()) == pytest.approx(1 / 12, abs=0.002)
    away = torch.corrcoef(places) - torch.eye(6)
    assert float(away.abs().max()) < 5 / math.sqrt(4000), "workers share their draws"


# Tuned attacks.


def scales_of(attack, view: AdversaryView) -> tuple[float, list[float]]:
    """(what was chosen, what was asked), as multiples of the attack's direction."""
    start, direction = attack.line(view.honest)
    asked: list[float] = []

    def scale(row: torch.Tensor) -> float:
        return float((start - row).double() @ direction.double() / direction.double().square().sum())

    def listen(forged: torch.Tensor) -> Verdict:
        assert forged.shape == (view.workers, len(direction))
        assert bool((forged == forged[0]).all())
        asked.append(scale(forged[0]))
        return view.judge(forged)

    return scale(attack.forge(replace(view, judge=listen))[0]), asked


@pytest.mark.parametrize("questions", [6, 7, 16, 31])
@pytest.mark.parametrize("kind", [ALittleTuned, InnerTuned])
def test_against_a_mean_the_largest_scale_is_best(kind, questions):
    chosen, asked = scales_of(kind(0.2, 30.0, questions), view_of(5, 8))
    assert len(asked) == questions
    assert chosen == pytest.approx(30.0, rel=1e-4)
    assert max(asked) == pytest.approx(30.0, rel=1e-4)
    assert min(asked) == pytest.approx(0.2, rel=1e-2)
    assert any(scale == pytest.approx(kind().untuned(5, 8), rel=1e-3) for scale in asked)


@pytest.mark.parametrize("limit", [1.2, 2.0, 9.0])
@pytest.mark.parametrize("kind", [ALittleTuned, InnerTuned])
def test_against_a_limit_of_lengths_the_largest_scale_that_passes_is_best(kind, limit):
    signal = torch.linspace(
        -0.05, 0.1, D
    )  # so much of it that a forged upload goes against it the more, the longer it is
    honest = signal + 0.01 * torch.randn(6, D, generator=stream(1, "uploads"))
    most = limit * honest.norm(dim=1).max()
    attack = kind()
    start, direction = attack.line(honest)
    view = view_of(honest, 9, lambda uploads: mean_of(uploads[uploads.norm(dim=1) <= most]))
    chosen, asked = scales_of(attack, view)
    passing = [scale for scale in asked if (start - scale * direction).norm() <= most]
    assert 0 < len(passing) < len(asked)
    assert chosen == pytest.approx(max(passing), rel=1e-4)
    # Nor does the next scale of the finer grid pass: 9 steps over two of the 6 steps from 0.1 to 100.
    assert (start - chosen * 1000 ** (2 / 6 / 9) * 1.001 * direction).norm() > most


@pytest.mark.parametrize("kind", [ALittleTuned, InnerTuned])
def test_of_equal_scales_the_smallest_is_taken(kind):
    chosen, asked = scales_of(kind(), view_of(5, 8, lambda uploads: mean_of(uploads[:5])))
    assert chosen == pytest.approx(min(asked), rel=1e-4)


def test_a_search_finds_the_lowest_of_what_it_asked():
    for seed in range(30):
        asked: dict[float, float] = {}
        wild = torch.randn(5, generator=stream(seed, "wild"), dtype=torch.float64)

        def value(scale, asked=asked, wild=wild):
            found = (wild * torch.sin(wild * 3 * scale)).sum()
            asked[float(scale)] = float(found)
            return found

        best = float(lowest_at(value, 1.7, 0.1, 40.0, 16, torch.device("cpu")))
        assert 1.7 in asked
        assert asked[best] == min(asked.values())
        assert len(asked) == 16, "asked twice"


def test_what_is_no_number_is_no_answer():
    def value(scale):
        return torch.where(scale > 3, torch.nan, -scale)

    best = float(lowest_at(value, 1.0, 0.1, 40.0, 16, torch.device("cpu")))
    assert 1.0 < best <= 3
    nothing = float(lowest_at(lambda scale: scale * torch.nan, 1.0, 0.1, 40.0, 16, torch.device("cpu")))
    assert nothing == pytest.approx(0.1)


def trimmed_mean(f: int):
    """Per coordinate, the mean without the f lowest and the f highest."""

    def aggregator(view, state):
        n = len(view.norms)
        update = view.uploads.sort(dim=0).values[f : n - f].mean(0)
        return Verdict(update, view.present, torch.where(view.present, 0, 1), torch.zeros(n), {})

    return aggregator


class Watched:
    """An attack, and beside it what the aggregator would have said to another."""

    def __init__(self, tuned, fixed) -> None:
        self.tuned, self.fixed, self.found = tuned, fixed, []

    def __getattr__(self, name: str):
        return getattr(self.tuned, name)

    def forge(self, view: AdversaryView) -> torch.Tensor:
        mean = view.honest.double().mean(0)
        forged = self.tuned.forge(view)
        both = [float(view.judge(sent).update.double() @ mean) for sent in (forged, self.fixed.forge(view))]
        self.found.append(both)
        return forged


@pytest.mark.parametrize("byzantine", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("defense", ["krum", "trimmed-mean"])
@pytest.mark.parametrize(("tuned", "fixed"), [(ALittleTuned(), ALittle()), (InnerTuned(), Inner())])
def test_tuned_attacks_are_never_less_harmful_than_the_fixed_ones(quick, tuned, fixed, defense, byzantine):
    run = prepare(quick(byzantine=byzantine, rounds=6, aggregator="mean"), Compute(device="cpu")).federation
    watched = Watched(tuned, fixed)
    attackers = int(run.adversary.byzantine.sum())
    aggregator = Krum() if defense == "krum" else trimmed_mean(min(attackers, (len(run.adversary.byzantine) - 1) // 2))
    run = run.change(attack=watched, aggregator=aggregator)
    state = first_state(run)
    for t in range(6):
        state, _ = play(run, state, t)
    assert len(watched.found) == 6
    assert all(one <= other for one, other in watched.found), watched.found
    if defense == "trimmed-mean" or byzantine == 0.6:  # with few of them Krum picks none, whatever they send
        assert any(one < other for one, other in watched.found)


# The protocol on the negated loss.


def small_federation(worker, attack, sigma: float = 0.5, byzantine: float = 0.4) -> Federation:
    rng = stream(2, "data")
    x, y = torch.randn(400, 30, generator=rng), torch.arange(400) % 4
    spec = Spec(
        dataset="mine",
        model="mlp",
        workers=4,
        byzantine=byzantine,
        batch=6,
        rounds=10,
        sigma=1.0,
        sigma_base=1.0,
        epsilon=1e6,
        delta=1e-3,
        accountant="rdp",
        aggregator="mean",
        auxiliary=2,
    )
    ready = prepare(spec, Compute(device="cpu"), Dataset("mine", x, y, x[:20], y[:20], classes=4)).federation
    return ready.change(worker=worker, attack=attack, sigma=sigma)


@pytest.mark.parametrize("sigma", [1e-6, 0.5])
@pytest.mark.parametrize("worker", [Normalized(0.3), Clipped(0.05, momentum=0.3), Clipped(9.0, momentum=0.3)])
@pytest.mark.parametrize("until", [None, 0.1])
def test_gradient_ascent_is_the_honest_mechanism_on_the_negated_loss(worker, sigma, until):
    attack = GradientAscent() if until is None else Dormant(GradientAscent(), until)
    run = small_federation(worker, attack, sigma)
    byzantine = run.adversary.byzantine
    assert 0 < int(byzantine.sum()) < len(byzantine)
    state = first_state(run)
    for t in range(3):
        last, params = state.uploads.clone(), state.params.clone()
        drawn = run.mechanism.sampling.over(run.workers.sizes, run.mechanism.declared)(run.stream("batch", t))
        owner, number = drawn.nonzero(as_tuple=True)
        chosen = run.workers.holdings[owner, number]
        gradients = per_example_gradients(run.mechanism.model, params, run.workers.x[chosen], run.workers.y[chosen])
        expected = torch.empty_like(last)
        fill_with_noise(expected, run.mechanism.added_noise, run.stream("noise", t))
        if until is None or t >= 1:
            gradients[byzantine[owner]] *= -1
            expected[byzantine] *= -1  # the round draws their noise with the other sign, which is noise all the same
        expected.index_add_(0, owner, contributions(worker, gradients, last[owner]) / run.mechanism.batch)
        state, _ = play(run, state, t)
        scale = max(1.0, float(expected.abs().max()))
        assert float((state.uploads - expected).abs().max()) < 5 * ROUNDING * scale


def test_gradient_ascent_is_not_a_flipped_sign_once_there_is_momentum():
    uploads = []
    for attack in (GradientAscent(), SignFlip()):
        run = small_federation(Normalized(0.3), attack, sigma=1e-6)
        state = first_state(run)
        for t in range(2):
            state, _ = play(run, state, t)
        uploads.append(state.uploads[run.adversary.byzantine])
    apart = (uploads[0] - uploads[1]).norm(dim=1)
    assert float(apart.min()) > 1e-3  # whoever drew few examples differs least, and noise and rounding by 1e-5
    assert float(apart.max()) > 0.01


# What an adversary may ask.


class Asks(Zero):
    """Asks the aggregator about a few forged uploads, overwrites what it asked and was told, and then sends zeros."""

    answers: list
    knows = "omniscient"

    def forge(self, view: AdversaryView) -> torch.Tensor:
        for scale in (0.0, 0.3, torch.nan):
            forged = torch.full((view.workers, len(view.params)), scale)
            verdict = view.judge(forged)
            self.answers.append(replace(verdict, update=verdict.update.clone(), score=verdict.score.clone()))
            for tensor in (forged, verdict.update, *verdict.state.values()):
                tensor.fill_(torch.nan)
        return super().forge(view)


def asking() -> Asks:
    attack = Asks()
    object.__setattr__(attack, "answers", [])
    return attack


@pytest.mark.parametrize("aggregator", [Mean(), TwoStage(), TwoStage(server_momentum=0.5, stages=2), Krum()], ids=str)
def test_asking_does_not_change_the_round(quick, aggregator):
    prepared = prepare(quick(), Compute(device="cpu")).federation
    states, verdicts = [], []
    for attack in (Zero(), asking()):
        run = prepared.change(attack=attack, aggregator=aggregator)
        state = first_state(run)
        for t in range(3):
            state, verdict = play(run, state, t)
            verdicts.append(verdict)
        states.append(state)
    assert torch.equal(states[0].params, states[1].params)
    assert torch.equal(states[0].uploads, states[1].uploads)
    kept, kept_too = (state.server.aggregator for state in states)
    assert kept.keys() == kept_too.keys()
    assert all(torch.equal(kept[name], kept_too[name]) for name in kept)
    for one, other in zip(verdicts[:3], verdicts[3:], strict=True):
        assert torch.equal(one.reason, other.reason)
        assert torch.equal(one.score, other.score)


def test_the_answer_is_that_of_the_aggregator_to_these_uploads(quick):
    """An aggregator without state and auxiliary data says what it will say when the forged upload is sent."""
    prepared = prepare(quick(), Compute(device="cpu")).federation
    attack = asking()
    run = prepared.change(attack=attack, aggregator=Mean())
    _, real = play(run, first_state(run), 0)
    zeros, other, malformed = attack.answers
    assert torch.equal(zeros.update, real.update)
    assert torch.equal(zeros.reason, real.reason)
    assert not torch.equal(other.update, real.update)
    assert torch.equal(malformed.reason == Reason.MALFORMED, run.adversary.byzantine)


def test_the_answer_uses_the_surrogate_and_not_the_servers_data(quick):
    prepared = prepare(quick(), Compute(device="cpu")).federation

    def answers(rounds: int = 2, **changes) -> list[Verdict]:
        attack = asking()
        run = prepared.change(attack=attack, aggregator=TwoStage(stages=2), **changes)
        state = first_state(run)
        for t in range(rounds):
            state, _ = play(run, state, t)
        return attack.answers

    # The first round: the model is the same whatever the server's own data say.
    as_is = answers(1)
    other_server = answers(1, aux_x=prepared.server.aux_x.flip(0) + 1.0)
    imagined = prepared.adversary.imagined
    other_guess = answers(1, imagined=replace(imagined, aux_x=imagined.aux_x.flip(0) + 1.0))
    assert all(torch.equal(one.score, two.score) for one, two in zip(as_is, other_server, strict=True))
    assert not torch.equal(as_is[0].score, other_guess[0].score)
    # The aggregator's state, which holds the server's gradient, is kept from the adversary: every question is a first
    # round.
    wanted = mean_gradient(
        prepared.mechanism.sums,
        prepared.mechanism.model.initial(),
        prepared.adversary.imagined.aux_x,
        prepared.adversary.imagined.aux_y,
        normalized=False,
    )
    totals = [verdict.score for verdict in answers(2)]
    assert len(totals) == 6
    run = prepared.change(attack=Zero(), aggregator=TwoStage(stages=2))
    state, _ = play(run, first_state(run), 0)
    scores = (state.uploads @ wanted).double()
    threshold = scores.topk(run.server.believed_honest).values.mean()
    torch.testing.assert_close(totals[0].double(), torch.where(scores < threshold, 0.0, scores), rtol=1e-4, atol=1e-6)


def test_the_answer_knows_nothing_of_the_aggregators_state(quick):
    seen: list[bool] = []

    def aggregator(view, state):
        seen.append("rounds" in state)
        reason = torch.where(view.present, 0, 1)
        return replace(mean_of(view.uploads), kept=view.present, reason=reason, state={"rounds": view.norms})

    run = prepare(quick(), Compute(device="cpu")).federation.change(attack=asking(), aggregator=aggregator)
    state = first_state(run)
    for t in range(2):
        state, _ = play(run, state, t)
    assert seen == [False] * 4 + [False] * 3 + [True]


@pytest.mark.parametrize("byzantine", [0.1, 0.6])
def test_surrogate_examples_are_the_attackers_own_and_none_of_the_servers(toy, byzantine):
    """The first feature of an example is its number."""
    spec = Spec(
        dataset="toy",
        workers=5,
        byzantine=byzantine,
        rounds=2,
        batch=4,
        sigma=50.0,
        sigma_base=50.0,
        epsilon=10.0,
        delta=1e-3,
        accountant="rdp",
    )
    run = prepare(spec, Compute(device="cpu"), toy()).federation
    numbers = run.adversary.imagined.aux_x[:, 0].to(torch.int64).tolist()
    server = run.server.aux_x[:, 0].to(torch.int64).tolist()
    held = {
        number
        for worker in run.adversary.rows.tolist()
        for number in run.workers.holdings[worker, : run.workers.sizes[worker]].tolist()
    }
    assert len(set(numbers)) == len(numbers) > 0
    assert set(numbers) <= held
    assert not set(numbers) & set(server)
    assert run.adversary.imagined.aux_y.tolist() == [number % 3 for number in numbers]
    if byzantine == 0.6:  # enough data for as many of each class as the server has
        assert sorted(run.adversary.imagined.aux_y.tolist()) == sorted(run.server.aux_y.tolist())


# Settings.


@pytest.mark.parametrize(
    "make",
    [
        lambda: SignFlip(0.0),
        lambda: LargeNorm(-1.0),
        lambda: LargeNorm(math.inf),
        lambda: NotANumber("minus-inf"),
        lambda: Mimic(-1),
        lambda: Mimic(1.5),
        lambda: Mimic(True),
        lambda: MinMax("up"),
        lambda: MinSum("Std"),
        lambda: FangKrum(0),
        lambda: FangTrimmedMean(0.5),
        lambda: FangTrimmedMean(math.nan),
        lambda: ALittleTuned(lowest=0.0),
        lambda: ALittleTuned(lowest=3.0, highest=3.0),
        lambda: InnerTuned(questions=5),
        lambda: InnerTuned(questions=6.0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(SpecError, match=" = "):
        make()


@pytest.mark.parametrize("attack", [GradientAscent(), LabelFlip(), MinMax()])
def test_only_gradient_ascent_ascends_and_only_awake(attack):
    ascends = isinstance(attack, GradientAscent)
    assert attack.ascends(attack.phase(0.0)) == ascends
    dormant = Dormant(attack, 0.5)
    assert not dormant.ascends(dormant.phase(0.2))
    assert dormant.ascends(dormant.phase(0.7)) == ascends


@dataclass(frozen=True)
class Misshapen(Forger):
    """Asks the aggregator about uploads that are none."""

    def forge(self, view):
        view.judge(torch.zeros(3, 5))
        return torch.zeros(view.workers, len(view.params))


def test_a_question_of_the_wrong_shape_is_refused(quick):
    with pytest.raises(SpecError, match=r"judge takes uploads of shape \(15, 2410\), not \(3, 5\)"):
        run(quick(attack=f"{__name__}:Misshapen"))
