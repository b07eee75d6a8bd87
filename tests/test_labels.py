"""Doubt about groups of workers that false labels tell apart, on simulated places; and the bounds that sizes widen."""

import math
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional

from noisegate.aggregators.fortified import labels
from noisegate.aggregators.fortified.copies import largest_product
from noisegate.aggregators.fortified.labels import LabelDoubt, Loads, apart_from_most
from noisegate.aggregators.fortified.state import OWN_SPEED
from noisegate.aggregators.upload_lengths import honest_lengths, longest_lengths
from noisegate.protocol.claims import MOST_CLAIMED
from noisegate.streams import stream
from test_fortified_parts import PROPERTY, SURE, at_most, normal

S, EACH, SETTLED = 0.1, 20, 300
"""The noise, the server's examples of a class, and after how many rounds moving averages are taken to be settled."""

HELD = 3.0
"""A doubt of this much or more leaves a worker a twentieth of its weight."""

LITTLE = 0.8
"""The share of honest workers that weigh as much as all of them do, at least: noise costs no more of them."""


# --- simulated places ------------------------------------------------------------------------------------------------


def mixes(name: str, n: int, classes: int = 4) -> torch.Tensor:
    """(n, C) of workers who all have equal shares, or each most of one class."""
    if name == "equal":
        return torch.full((n, classes), 1 / classes)
    one = functional.one_hot(torch.arange(n) % classes, classes).float()
    return 0.6 * one + 0.4 / classes


def told(mix: torch.Tensor, believed: int | None = None):
    """(view, mixture) of as many workers, as far as labels ask for them."""
    view = SimpleNamespace(noise_std=S, believed_honest=believed or len(mix), declared=1000, batch=16)
    return view, SimpleNamespace(
        mix=mix,
        unknown=torch.zeros(len(mix)),
        expected=mix.sum(1),
        classes=SimpleNamespace(means=torch.zeros(mix.shape[1], 1)),
    )


def nothing_known(n: int, direction: torch.Tensor | None = None, begun: float = 1.0):
    """The state before the first round, but that own averages have begun."""
    direction = torch.ones(1) if direction is None else direction
    return SimpleNamespace(
        places=torch.zeros(n),
        memory=torch.zeros(2),
        label_doubt=torch.zeros(n),
        label_direction=direction[None],
        bias_correction=torch.full((n,), begun),
    )


def loaded(x: torch.Tensor, noise: float, mix: torch.Tensor) -> Loads:
    """Loads of which nothing is explained by mixes yet, made as `Loads.of` makes them."""
    n, classes = mix.shape
    examples = torch.zeros(classes * EACH)
    projections = SimpleNamespace(label_loads=x, examples_along=examples)
    found = Loads.of(*told(mix)[:1], nothing_known(n), told(mix)[1], projections, 1.0, torch.ones(n))
    return found._replace(noise=torch.full((n,), noise))


def doubted(
    mix, x, along, examples, noise=0.01, rounds=1, counts=None, passed=None, state=None, believed=None, turned=1.0
):
    """What is doubted of workers after so many rounds in which they have these loads.

    along: (T, n) where their uploads lie along the label difference. examples: (A,) where the server's do.
    """
    n = len(mix)
    everyone = torch.ones(n, dtype=torch.bool)
    counts, passed = everyone if counts is None else counts, everyone if passed is None else passed
    state, loads = state or nothing_known(n), loaded(x, noise, mix)
    view, mixture = told(mix, believed)
    for t in range(rounds):
        here = along[t % len(along)]
        seen = SimpleNamespace(
            labels_of_examples=examples, along_labels=here, turned=torch.tensor(turned), examples_along=0 * examples
        )
        found = LabelDoubt.of(view, state, mixture, seen, loads, counts, passed)
        state = SimpleNamespace(**{**vars(state), "places": found.places, "memory": found.memory})
        state.label_doubt = found.doubt
    return found


def examples_of(centers: torch.Tensor, spread: float, seed: int) -> torch.Tensor:
    """(A,) where the server's examples lie, class by class."""
    return centers.repeat_interleave(EACH) + spread * normal(len(centers) * EACH, seed=seed, name="examples")


def effective(weights: torch.Tensor) -> float:
    """How many equal weights would average noise as well, as a share of all."""
    return float(weights.sum().square() / weights.square().sum() / len(weights))


# --- two groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["equal", "uneven"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_of_two_groups_the_one_nearer_the_servers_examples_is_not_doubted(name, seed):
    """Half of the workers each, with loads that contradict each other. Classes lie apart along the difference too.

    The other group lies by 1 off, of which the standard error of the mean of the server's examples is a tenth.
    """
    n, apart, spread = 20, 1.0, 0.5
    mix, centers = mixes(name, n), torch.tensor([0.3, -0.3, 0.1, 0.0])
    false = torch.arange(n) >= n // 2
    x = false.float() * 2 + 0.1 * normal(n, seed=seed, name="loads")
    along = mix @ centers + apart * false.float() + S * normal(SETTLED, n, seed=seed, name="along")
    found = doubted(mix, x, along, examples_of(centers, spread, seed), noise=0.1**2, rounds=SETTLED, believed=n // 2)
    assert float(found.doubt[false].min()) > HELD
    honest = found.doubt[~false]
    assert effective((-honest).exp()) > LITTLE
    assert float(honest.max()) < HELD / 2


def test_it_is_the_group_and_not_its_side_that_is_doubted():
    n, mix = 20, mixes("equal", 20)
    false = torch.arange(n) >= n // 2
    for sign in (-1.0, 1.0):
        x = sign * (false.float() + 0.05 * normal(n, name="loads"))
        along = sign * false.float() + 0.0 * normal(1, n)
        found = doubted(mix, x, along, examples_of(torch.zeros(4), 0.3, 1), rounds=SETTLED, believed=n // 2)
        assert float(found.doubt[false].min()) > HELD
        swapped = doubted(mix, x, along - sign, examples_of(torch.zeros(4), 0.3, 1), rounds=SETTLED, believed=n // 2)
        assert float(swapped.doubt[~false].min()) > HELD
        assert float(swapped.doubt[false].max()) < 1 < HELD


def test_what_the_servers_error_explains_is_not_held_against_a_group():
    """Half a standard error off: it may as well be the honest one."""
    n, mix, spread = 20, mixes("equal", 20), 0.5
    false = torch.arange(n) >= n // 2
    off = 0.5 * spread / math.sqrt(4 * EACH)
    x = false.float() + 0.05 * normal(n, name="loads")
    along = off * false.float()[None]
    examples = torch.linspace(-1, 1, EACH).repeat(4) * spread * math.sqrt(3)  # whose mean is 0 just
    found = doubted(mix, x, along, examples, rounds=SETTLED, believed=n // 2)
    # A quarter over twice the error's variance is an eighth, times SHARPER.
    assert float(found.doubt.max()) < labels.SHARPER / 8 * 1.5


# --- one group -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["equal", "uneven"])
@pytest.mark.parametrize("n", [10, 40])
def test_where_all_workers_are_one_group_noise_costs_few_of_them(name, n):
    """Loads and places are noise; the server's examples are off by what they may be, and half of all are believed."""
    mix, noise, kept = mixes(name, n), 0.2, []
    for seed in range(20):
        examples = examples_of(torch.zeros(4), 0.3, seed)
        x = noise * normal(n, seed=seed, name="loads")
        along = S * normal(SETTLED, n, seed=seed, name="along")
        found = doubted(mix, x, along, examples, noise=noise**2, rounds=SETTLED, believed=n // 2)
        kept.append(effective((-found.doubt).exp()))
    assert mean(kept) > LITTLE


# --- what counts as none ---------------------------------------------------------------------------------------------


def none_by_loop(doubt: list[float], expected: list[float], passed: list[bool], believed: int) -> float:
    """The least doubt that workers with half of the mass have at most."""
    order = sorted((i for i in range(len(doubt)) if passed[i]), key=lambda i: doubt[i])
    enough, mass = labels.LEAST_MASS * min(sum(expected[i] for i in order), believed), 0.0
    for i in order:
        mass += expected[i]
        if mass >= enough:
            return doubt[i]
    return 0.0


@PROPERTY
@given(st.integers(1, 20), st.integers(0, 10**6), st.integers(1, 20), st.sampled_from((0.0, 0.5, 1.0)))
def test_what_counts_as_none_by_a_loop(n, seed, believed, share):
    rng = stream(seed, "none")
    doubt, passed = torch.rand(n, generator=rng), torch.rand(n, generator=rng) < share
    # Multiples of a sixteenth, so that sums are exact in any order.
    expected = torch.randint(1, 40, (n,), generator=rng) / 16
    found = labels._none(doubt, expected, passed, SimpleNamespace(believed_honest=believed))
    assert float(found) == none_by_loop(doubt.tolist(), expected.tolist(), passed.tolist(), believed)


def test_who_sends_next_to_nothing_does_not_set_what_counts_as_none():
    doubt, tiny = torch.tensor([0.0, 1.0, 1.5, 2.0]), torch.tensor([0.01, 1.0, 1.0, 1.0])
    everyone, view = torch.ones(4, dtype=torch.bool), SimpleNamespace(believed_honest=1)
    assert float(labels._none(doubt, tiny, everyone, view)) == 1.0
    assert float(labels._none(doubt, torch.ones(4), everyone, view)) == 0.0


def test_a_tiny_worker_at_the_servers_examples_leaves_the_doubt_about_others_as_it_is():
    """A worker that sends nothing lies at nothing, which is where its mix of next to nothing is."""
    n, seed = 10, 1
    x = torch.linspace(-1.0, 1.0, n)
    along, examples = (0.3 + x)[None], examples_of(torch.zeros(4), 0.3, seed)
    found = []
    for size in (0.01, 0.001):
        mix = mixes("equal", n).clone()
        mix[3] *= size
        at = along.clone()
        at[0, 3] = 0.0
        found.append(doubted(mix, x, at, examples, rounds=SETTLED, believed=1).doubt)
    others = torch.arange(n) != 3
    assert float(found[0][others].min()) == 0.0, "somebody of full size is taken for none"
    torch.testing.assert_close(found[0][others], found[1][others], rtol=0.05, atol=0.01)


# --- over the rounds -------------------------------------------------------------------------------------------------


def test_doubt_fades_when_there_is_no_more_reason_for_it():
    n = 6
    state, mix = nothing_known(n), mixes("equal", n)
    state.label_doubt = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 0.5])
    before = state.label_doubt.clone()
    examples = examples_of(torch.zeros(4), 0.3, 1)
    examples -= examples.mean()
    found = doubted(mix, torch.zeros(n), torch.zeros(1, n), examples, state=state)
    torch.testing.assert_close(found.doubt, labels.FADE * before)
    assert torch.equal(state.label_doubt, before)


def test_what_is_known_of_workers_that_do_not_count_stays():
    n = 8
    state, mix = nothing_known(n), mixes("uneven", n)
    state.label_doubt, state.places = torch.rand(2, n, generator=stream(1, "before"))
    before = state.label_doubt.clone(), state.places.clone()
    counts = torch.arange(n) % 2 > 0
    x, along = normal(n, name="loads"), 3 * normal(1, n, name="along")
    found = doubted(mix, x, along, examples_of(torch.zeros(4), 0.3, 1), state=state, counts=counts, passed=counts)
    for new, old in zip((found.doubt, found.places), before, strict=True):
        assert torch.equal(new[~counts], old[~counts])
        assert (new[counts] != old[counts]).all()


def test_places_are_a_moving_average_that_a_turn_of_the_direction_cuts_short():
    n, speed = 5, labels.PLACE_SPEED
    mix, examples = mixes("uneven", n), examples_of(torch.tensor([0.4, -0.2, 0.0, 0.1]), 0.3, 1)
    means = examples.view(4, EACH).mean(1)
    along = normal(1, n, name="along")
    for turned in (1.0, 0.7, 0.0, -1.0):
        state = nothing_known(n)
        state.places, state.memory = normal(n, name="places"), torch.tensor([0.6, 0.1])
        found = doubted(mix, torch.zeros(n), along, examples, state=state, turned=turned)
        kept = (1 - speed) * max(0.0, turned)
        wanted = [kept * float(state.places[i]) + speed * float(along[0, i] - mix[i] @ means) for i in range(n)]
        assert found.places.tolist() == pytest.approx(wanted, abs=1e-6)
        assert found.memory.tolist() == pytest.approx([kept * 0.6 + speed, kept**2 * 0.1 + speed**2])


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e6])
@pytest.mark.parametrize("load", [0.0, 1e-20, 1.0, 1e3])
def test_everything_is_finite_whatever_there_is(each, classes, scale, load):
    """Without loads, directions, noise or differences between examples; for one class, and one example of each."""
    if classes * each < 2:
        each = 2
    n = 6
    mix, x = mixes("uneven", n, classes), load * normal(n, name="loads")
    examples, along = scale * normal(classes * each, name="examples"), scale * normal(3, n, name="along")
    for noise in (0.0, 1.0):
        for passed in (torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)):
            found = doubted(mix, x, along, examples, noise=noise, rounds=3, passed=passed)
            assert all(part.isfinite().all() for part in found)
            assert (found.doubt >= 0).all()


# --- loads -----------------------------------------------------------------------------------------------------------


def loads_of(mix, label_loads, of_classes, usual=None, begun=1.0, unit=1.0, length=1.0) -> Loads:
    """The server's examples of a class all lie at the same place along the label direction, which is this long."""
    n = len(mix)
    view, mixture = told(mix)
    direction = torch.tensor([length, 0.0])
    mixture.classes.means = of_classes[:, None] * torch.tensor([1.0, 0.0]) / max(length, 1e-30)
    projections = SimpleNamespace(label_loads=label_loads, examples_along=of_classes.repeat_interleave(EACH))
    usual = torch.ones(n) if usual is None else usual
    return Loads.of(view, nothing_known(n, direction, begun), mixture, projections, unit, usual)


@pytest.mark.parametrize("name", ["equal", "uneven"])
def test_loads_by_a_ridge_regression(name):
    n, unit, begun = 12, 0.7, 0.4
    mix, of_classes = mixes(name, n), torch.tensor([0.5, -0.3, 0.1, 0.9])
    usual = (torch.arange(n) % 5 > 0).float()
    label_loads = normal(n, name="loads")
    found = loads_of(mix, label_loads, of_classes, usual, begun, unit)
    rows, weights = mix.double().numpy(), usual.double().numpy()
    own = rows * weights[:, None]
    ridge = labels.UNSURE**2 * weights.sum() * np.eye(4)
    off = (label_loads.double().numpy() - begun * rows @ of_classes.double().numpy() / unit) * weights
    wanted = (off - rows @ np.linalg.solve(own.T @ own + ridge, own.T @ off)) * weights
    np.testing.assert_allclose(found.x.numpy(), wanted, atol=1e-3)  # Newton-Schulz in single precision
    hat = rows @ np.linalg.solve(own.T @ own + ridge, own.T)
    np.testing.assert_allclose(found.explained.numpy(), hat, atol=1e-3)


def test_what_mixes_explain_is_taken_out_and_what_they_do_not_is_left():
    n = 40
    mix = mixes("uneven", n)
    by_class = torch.tensor([0.5, -0.3, 0.1, 0.9])
    false = (torch.arange(n) >= n // 2).float()
    # The ridge is UNSURE^2 of all workers' mass; least of it lies along the mixes' differences: 0.36 / 4 of theirs.
    left = 2 * labels.UNSURE**2 / (0.36 / 4) * float(by_class.abs().sum())
    explained = loads_of(mix, mix @ by_class, torch.zeros(4)).x
    assert float(explained.abs().max()) < left < 0.1
    by_examples = loads_of(mix, mix @ by_class, by_class).x
    assert float(by_examples.abs().max()) < 1e-5, "and what the server's examples explain is taken out first"
    x = loads_of(mix, mix @ by_class + false, torch.zeros(4)).x
    torch.testing.assert_close(x, false - 0.5, rtol=0, atol=left)


def test_the_noise_of_a_load_is_that_of_a_moving_average_of_uploads():
    """By simulation, for workers with equal shares, after 30 and after 300 rounds."""
    workers, unit, length = 4000, 0.7, 1.3
    for rounds in (30, 300):
        rng, average = stream(rounds, "own"), torch.zeros(workers)
        for _ in range(rounds):
            average.lerp_(S / unit * length * torch.randn(workers, generator=rng), OWN_SPEED)
        begun = 1 - (1 - OWN_SPEED) ** rounds
        mix = mixes("equal", 4)
        noise = loads_of(mix, torch.zeros(4), torch.zeros(4), begun=begun, unit=unit, length=length).noise
        assert float(average.std()) == pytest.approx(float(noise[0]) ** 0.5, rel=SURE / math.sqrt(2 * workers))


def test_who_takes_no_part_has_no_load_and_sets_none():
    n = 12
    mix, usual = mixes("uneven", n), (torch.arange(n) % 3 > 0).float()
    label_loads = normal(n, name="loads")
    found = loads_of(mix, label_loads, torch.zeros(4), usual)
    other = loads_of(mix, torch.where(usual > 0, label_loads, 1e3), torch.zeros(4), usual)
    assert not found.x[usual == 0].any()
    torch.testing.assert_close(found.x, other.x)


@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("length", [0.0, 1.0])
def test_loads_are_finite_where_there_is_nothing(classes, length):
    n = 5
    for usual in (torch.ones(n), torch.zeros(n)):
        for begun in (0.0, 1.0):
            mix = mixes("uneven", n, classes)
            found = loads_of(mix, torch.zeros(n), torch.zeros(classes), usual, begun=begun, length=length)
            assert all(part.isfinite().all() for part in found)
            assert not found.x.any()


# --- sizes -----------------------------------------------------------------------------------------------------------

LENGTHS = {"noise_std": 0.15, "batch": 16, "largest": 1.0, "chance": 2.5e-4}


def test_the_longest_length_rises_with_the_expected_batch_and_covers_what_is_honest_at_that_size():
    d, sizes = 500, torch.cat([torch.tensor([1e-6]), torch.linspace(0.03, MOST_CLAIMED, 60)])
    found = longest_lengths(sizes, d, **LENGTHS)
    assert (found.diff() >= 0).all()
    assert len(found.unique()) > 10
    for size, longest in zip(sizes.tolist(), found.tolist(), strict=True):
        assert longest >= honest_lengths(d, **LENGTHS, expected=size)[1] * (1 - 1e-6)
        assert longest <= honest_lengths(d, **LENGTHS, expected=size + 0.5)[1] * (1 + 1e-6), "by no more than a step"


@pytest.mark.parametrize("size", [0.5, 3.0])
def test_an_honest_upload_of_a_large_worker_is_longer_as_rarely_as_stated(size):
    d, s, batch, chance, draws = 40, 0.3, 4, 0.1, 40_000
    rng = np.random.default_rng(1)
    uploads = s * rng.standard_normal((draws, d))
    uploads[:, 0] += rng.poisson(size * batch, draws) / batch
    high = float(longest_lengths(torch.tensor([size]), d, s, batch, 1.0, chance)[0])
    outside = int((np.linalg.norm(uploads, axis=1) > high).sum())
    assert abs(outside - draws * chance / 2) <= SURE * math.sqrt(draws * chance / 2)


def test_the_largest_product_grows_with_the_size_of_a_worker():
    """By the formula: that of the signals as its square, what noise makes of them as the size."""
    given = 0.2, 7.0, torch.tensor(0.25), 1e-3, 24
    sizes = torch.tensor([0.1, 1.0, 2.0, 3.0])
    found = largest_product(*given, sizes)
    width = 0.2 * stats.norm.isf(1e-3 / 96)
    plain = 0.25 + width * 7.5
    larger = [plain + (size**2 - 1) * 0.25 + width * (size - 1) * 0.5 for size in (2, 3)]
    assert found.tolist() == pytest.approx([plain, plain, *larger], rel=1e-5), "smaller: what others are given"
    assert float(largest_product(*given)) == pytest.approx(plain, rel=1e-5)


def test_products_of_workers_of_different_sizes_stay_below_the_mean_of_both_bounds():
    d, s, n, rounds, chance = 600, 0.15, 10, 4000, 0.05
    sizes = torch.linspace(0.2, 3.0, n)
    signal = 0.9 * functional.normalize(normal(d, name="signal"), dim=0)
    _, longest = honest_lengths(d, s, 16, 1.0, 1e-3)
    limit = largest_product(s, longest, signal.square().sum(), chance, n - 1, sizes)
    between = (limit[:, None] + limit) / 2
    conflicts, plain = 0, 0
    for part in range(10):
        uploads = sizes[:, None] * signal + s * normal(rounds // 10, n, d, seed=part)
        products = (uploads @ uploads.mT).masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
        conflicts += int((products > between).any(2).sum())
        plain += int((products > limit[0]).any(2).sum())
    assert at_most(conflicts // 2, rounds * n // 2, chance), "two are in every conflict"
    assert not at_most(plain // 2, rounds * n // 2, chance), "the bound for equal sizes would not do"


# --- loads that are held ---------------------------------------------------------------------------------------------


def test_no_load_counts_for_more_than_the_mean_of_those_that_count():
    x = torch.tensor([0.0, 0.5, -0.5, 1.0, -6.0, 0.0])
    held = Loads(x, torch.zeros(6), torch.zeros(6, 6)).held()
    assert held.tolist() == [0.0, 0.5, -0.5, 1.0, -2.0, 0.0]
    groups = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert Loads(groups, torch.zeros(4), torch.zeros(4, 4)).held().tolist() == groups.tolist(), "two groups stay"
    assert Loads(0 * groups, torch.zeros(4), torch.zeros(4, 4)).held().tolist() == [0.0] * 4


# --- apart from most -------------------------------------------------------------------------------------------------


def apart_by_a_loop(x, noise, passed, believed) -> list[float]:
    """`apart_from_most`, stretch by stretch."""
    n, many = len(x), math.ceil(labels.TOGETHER * believed)
    places = sorted(float(value) for value, counts in zip(x, passed, strict=True) if counts)
    stretches = [(places[i + many - 1] - places[i], places[i]) for i in range(len(places) - many + 1)]
    if 2 * many <= n or not stretches:
        return [0.0] * n
    length, low = min(stretches)
    within = min(labels.MOST_WITHIN, many / len(places))
    scatter = length / 2 / stats.norm.ppf((1 + within) / 2)
    usual = mean(float(value) for value, counts in zip(noise, passed, strict=True) if counts)
    found = []
    for value, variance, counts in zip(x, noise, passed, strict=True):
        square = (float(value) - low - length / 2) ** 2 / (float(variance) * max(1.0, scatter**2 / usual))
        far = many / 2 * math.log1p(square / many) - math.log(n)
        found.append(min(labels.MOST_APART, max(0.0, far)) if counts else 0.0)
    return found


@given(
    n=st.integers(1, 40), seed=st.integers(0, 2**32), believed=st.floats(0.05, 1.0), share=st.sampled_from([0.5, 1.0])
)
@PROPERTY
def test_who_lies_apart_from_most_by_a_loop(n, seed, believed, share):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=rng) + 6 * (torch.rand(n, generator=rng) < 0.2)
    noise, passed = 0.1 + torch.rand(n, generator=rng), torch.rand(n, generator=rng) < share
    many = max(1, math.ceil(believed * n))
    found = apart_from_most(x, noise, passed, many)
    assert found.tolist() == pytest.approx(apart_by_a_loop(x, noise, passed, many), abs=1e-2)


def test_a_minority_apart_is_doubted_and_the_servers_examples_need_not_be_asked():
    """Where 16 of 20 are believed honest, four that lie twelve deviations off lose their weight, on whichever side."""
    for seed in range(20):
        for side in (-12.0, 12.0):
            x = normal(20, seed=seed)
            x[:4] += side
            doubt = apart_from_most(x, torch.ones(20), torch.ones(20, dtype=torch.bool), 16)
            assert doubt[:4].min() > HELD
            assert (doubt[4:] < 1).float().mean() >= LITTLE


@pytest.mark.parametrize(("n", "believed"), [(10, 10), (25, 20), (50, 40)])
def test_noise_of_one_group_costs_next_to_nothing(n, believed):
    """Loads of honest workers follow the label direction, which follows their noise: they scatter by more than it."""
    shares = []
    for seed in range(300):
        weights = (-apart_from_most(2 * normal(n, seed=seed), torch.ones(n), torch.ones(n).bool(), believed)).exp()
        shares.append(float(weights.sum().square() / weights.square().sum() / n))
    assert mean(shares) > 0.96  # of the workers, as many as equal weights of so few would be


def test_no_majority_is_taken_for_one_that_is_not_there():
    """Too few are believed honest, or no nine tenths of them lie together: nobody is doubted for lying apart."""
    everybody = torch.ones(20, dtype=torch.bool)
    x = normal(20) * 0.1
    x[:10] += 8.0
    for believed in (10, 11):  # nine tenths are half of all, or less
        assert not apart_from_most(x, torch.ones(20), everybody, believed).any()
    for believed in (16, 20):  # two groups of ten: a stretch with so many workers holds both
        assert not apart_from_most(x, torch.ones(20), everybody, believed).any()
    few = torch.arange(20) < 5
    assert not apart_from_most(x, torch.ones(20), few, 16).any()
    assert not apart_from_most(torch.zeros(20), torch.zeros(20), everybody, 16).any()
