"""What each attack does, against values worked out by hand or taken from its own paper."""

import math
from collections.abc import Hashable
from functools import partial
from statistics import NormalDist

import pytest
import torch

from noisegate import ALittle, Dormant, Gaussian, Honest, Inner, LabelFlip, LocalPoisoning, SpecError
from noisegate.attacks.a_little import NO_SOLUTION, largest_deviation
from noisegate.streams import stream
from noisegate.views import AdversaryView, DataView, Verdict

D, S = 4000, 0.2
ROUNDING = 1e-6
"""float32 sums of a few dozen values below 1."""


def unasked(forged: torch.Tensor) -> Verdict:
    raise AssertionError("none of these attacks asks the aggregator")


def view_of(honest: int, byzantine: int, phase: Hashable = None, seed: int = 0) -> AdversaryView:
    rng = stream(seed, "uploads")
    uploads = 0.05 + S * torch.randn(honest + byzantine, D, generator=rng)
    rows = torch.randperm(honest + byzantine, generator=rng)
    return AdversaryView(
        workers=byzantine,
        see_honest=lambda: uploads[rows[:honest]],
        see_own=lambda: uploads[rows[honest:]],
        params=torch.zeros(D),
        noise_std=S,
        phase=phase,
        stream=partial(stream, seed, "a"),
        judge=unasked,
    )


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_gaussian_is_noise_of_the_agreed_deviation(scale):
    forged = Gaussian(scale).forge(view_of(5, 8))
    # 32,000 normal draws: their deviation is off by 0.4 %, their mean by 0.0056 deviations; four times that.
    assert float(forged.std()) == pytest.approx(scale * S, rel=0.016)
    assert abs(float(forged.mean())) < 0.0225 * scale * S
    correlation = torch.corrcoef(forged).fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 5 / math.sqrt(D), "workers share noise"


def test_label_flip_reverses():
    y = torch.arange(10)
    x = torch.rand(10, 3, generator=stream(0, "x"))
    same_x, flipped = LabelFlip().poison(x, y, DataView(10, None, partial(stream, 0, "p")))
    assert torch.equal(same_x, x)
    assert flipped.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_label_flip_at_random_never_keeps_a_label(classes):
    y = torch.arange(classes).repeat(300)
    _, flipped = LabelFlip("random").poison(torch.zeros(len(y), 1), y, DataView(classes, None, partial(stream, 0, "p")))
    assert not bool((flipped == y).any())
    pairs = torch.zeros(classes, classes, dtype=torch.int64).index_put_((y, flipped), torch.tensor(1), accumulate=True)
    others = ~torch.eye(classes, dtype=torch.bool)
    # 300 draws a row, evenly over the others: five binomial deviations around the expected count.
    expected = 300 / (classes - 1)
    assert float((pairs[others] - expected).abs().max()) <= 5 * math.sqrt(expected)


def test_label_flip_sends_what_the_protocol_computes():
    view = view_of(4, 6)
    assert LabelFlip().forge(view) is None
    assert LabelFlip().needs_own(None)
    assert LabelFlip().needs_own(0.0)


def test_local_poisoning_is_the_scaled_negative_sum():
    honest, byzantine = 16, 24
    view = view_of(honest, byzantine)
    forged = LocalPoisoning().forge(view)
    expected = -view.honest.double().sum(0) / math.sqrt(honest)
    torch.testing.assert_close(forged.double(), expected.expand(byzantine, D), atol=10 * ROUNDING, rtol=ROUNDING)
    # The sum over everyone is -lambda times the honest sum, lambda = M / sqrt(B) - 1.
    everyone = view.honest.double().sum(0) + forged.double().sum(0)
    share = byzantine / math.sqrt(honest) - 1
    torch.testing.assert_close(everyone, -share * view.honest.double().sum(0), atol=1e-4, rtol=1e-5)
    assert float(everyone @ view.honest.double().sum(0)) < 0, "the mean is turned around"


def test_local_poisoning_looks_like_one_honest_upload():
    """Its noise has the deviation of a single honest upload, so that it passes the first stage."""
    view = view_of(16, 24)
    noise = LocalPoisoning().forge(view)[0] + math.sqrt(16) * 0.05  # the signal in an honest upload is 0.05
    assert float(noise.std()) == pytest.approx(S, rel=0.05)  # 4,000 draws: 1.1 %, four times that


@pytest.mark.parametrize(("honest", "byzantine"), [(16, 4), (10, 1), (20, 4), (1, 1)])
def test_local_poisoning_is_refused_where_it_cannot_turn_the_sum(honest, byzantine):
    for attack in (LocalPoisoning(), Dormant(LocalPoisoning(), 0.5)):
        with pytest.raises(SpecError) as caught:
            attack.check(honest, byzantine)
        message = str(caught.value)
        assert f"got {byzantine} against {honest}" in message
        assert "local-poisoning" in message
        assert "raise byzantine" in message


@pytest.mark.parametrize(("honest", "byzantine"), [(16, 5), (10, 4), (20, 5), (4, 0)])
def test_local_poisoning_is_allowed_elsewhere(honest, byzantine):
    LocalPoisoning().check(honest, byzantine)


@pytest.mark.parametrize(
    ("honest", "byzantine", "share"),
    [
        (38, 12, 24 / 38),  # Baruch et al.: n = 50, m = 12, s = floor(50/2 + 1) - 12 = 14, (50 - 12 - 14) / (50 - 12)
        (26, 24, 24 / 26),  # n = 50, m = 24: s = 2
        (40, 10, 24 / 40),
        (39, 12, 25 / 39),  # n = 51: s = floor(26.5) - 12 = 14
        (8, 2, 4 / 8),
    ],
)
def test_a_little_takes_the_deviation_of_its_formula(honest, byzantine, share):
    assert largest_deviation(honest, byzantine) == pytest.approx(NormalDist().inv_cdf(share), abs=1e-12)


@pytest.mark.parametrize(("honest", "byzantine"), [(20, 30), (4, 6), (1, 1), (20, 180)])
def test_a_little_falls_to_its_constant_with_a_majority(honest, byzantine):
    assert largest_deviation(honest, byzantine) == NO_SOLUTION == 1.5


@pytest.mark.parametrize("deviation", [None, 0.7])
def test_a_little_sends_mean_less_deviations(deviation):
    view = view_of(38, 12)
    z = NormalDist().inv_cdf(24 / 38) if deviation is None else deviation
    honest = view.honest.double()
    expected = honest.mean(0) - z * ((honest - honest.mean(0)) ** 2).mean(0).sqrt()
    forged = ALittle(deviation).forge(view)
    torch.testing.assert_close(forged.double(), expected.expand(12, D), atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_inner_sends_the_negative_mean(scale):
    view = view_of(5, 8)
    forged = Inner(scale).forge(view)
    expected = -scale * view.honest.double().mean(0).expand(8, D)
    torch.testing.assert_close(forged.double(), expected, atol=ROUNDING, rtol=ROUNDING)
    # The sum turns around exactly where scale > H / M.
    total = (view.honest.sum(0) + forged.sum(0)) @ view.honest.sum(0)
    assert (float(total) < 0) == (scale > 5 / 8)


@pytest.mark.parametrize("asleep", ["behave", "copy"])
@pytest.mark.parametrize(
    ("until", "progress", "sleeps"),
    [(0.0, 0.0, False), (0.5, 0.0, True), (0.5, 0.49, True), (0.5, 0.5, False), (0.5, 0.9, False), (1.0, 0.99, True)],
)
def test_dormant_wakes_in_time(until, progress, sleeps, asleep):
    inner = Inner()
    attack = Dormant(inner, until, asleep)
    phase = attack.phase(progress)
    view = view_of(5, 8, phase)
    forged = attack.forge(view)
    if not sleeps:
        assert torch.equal(forged, inner.forge(view))
        assert not attack.needs_own(phase)
    elif asleep == "behave":
        assert forged is None
        assert attack.needs_own(phase)
    else:
        honest = {tuple(row[:4].tolist()) for row in view.honest}
        assert {tuple(row[:4].tolist()) for row in forged} <= honest
        assert len({tuple(row[:4].tolist()) for row in forged}) > 1, "everyone copies the same worker"
        assert not attack.needs_own(phase)
    y = torch.tensor([1])
    flipper = Dormant(LabelFlip(), until, asleep)
    phase = flipper.phase(progress)
    _, label = flipper.poison(torch.zeros(1, 1), y, DataView(10, phase, partial(stream, 0, "p")))
    assert label.tolist() == ([1] if sleeps else [8])
    assert flipper.needs_own(phase) == (not sleeps or asleep == "behave")


def test_dormant_of_nothing_behaves():
    attack = Dormant(Honest(), 0.5)
    assert attack.forge(view_of(5, 8, attack.phase(0.9))) is None


class Clock(Honest):
    """Does something else in every tenth of a run, and says so."""

    def phase(self, progress):
        return int(progress * 10)

    def forge(self, view):
        return torch.full_like(view.own, float(view.phase))


def test_dormant_hands_the_phase_of_the_attack_on():
    attack = Dormant(Clock(), 0.25)
    assert [attack.phase(t / 10) == attack.phase(0.0) for t in range(10)] == [True] * 3 + [False] * 7
    assert len({attack.phase(t / 10) for t in range(10)}) == 8
    assert float(attack.forge(view_of(5, 8, attack.phase(0.71)))[0, 0]) == 7.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gaussian(scale=0.0),
        lambda: Gaussian(scale=float("nan")),
        lambda: Inner(scale=-1.0),
        lambda: ALittle(deviation=0.0),
        lambda: LabelFlip(to="backwards"),
        lambda: Dormant(until=1.5),
        lambda: Dormant(until=-0.1),
        lambda: Dormant(asleep="snore"),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(SpecError, match=" = "):
        make()
