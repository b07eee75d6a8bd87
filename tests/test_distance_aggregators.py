"""Aggregators that compare whole uploads: each against a slow and obvious version of itself, and against
arbitrary uploads.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from devices import OnDevice, Unasked, on_device
from noisegate import kernels
from noisegate.aggregators.bucketing import Bucketing, averages, buckets, shares
from noisegate.aggregators.centered_clipping import CenteredClipping
from noisegate.aggregators.distances import LONGEST, distances_of, inner_products, lowest, shortening, squared_distances
from noisegate.aggregators.fltrust import FLTrust
from noisegate.aggregators.geometric_median import GeometricMedian
from noisegate.aggregators.krum import Krum, MultiKrum
from noisegate.aggregators.mda import MDA, MOST, coverable, lower_bound
from noisegate.aggregators.mean import Mean
from noisegate.aggregators.nnm import NearestNeighborMixing
from noisegate.aggregators.spectral_filter import SpectralFilter, main_direction
from noisegate.aggregators.trimmed_mean import TrimmedMean
from noisegate.aggregators.two_stage import TwoStage
from noisegate.catalog import build
from noisegate.errors import SpecError
from noisegate.protocol.intake import receive
from noisegate.roles import Aggregator
from noisegate.views import ServerView

# Everything that must survive arbitrary uploads. One line for a new aggregator.
BUILDERS = {
    "krum": Krum(),
    "multi-krum": MultiKrum(),
    "mda": MDA(),
    "geometric-median": GeometricMedian(),
    "geometric-median, three steps": GeometricMedian(smoothing=0.1, tolerance=0.0, iterations=3),
    "centered-clipping": CenteredClipping(),
    "centered-clipping, three steps": CenteredClipping(radius=0.5, iterations=3),
    "fltrust": FLTrust(),
    "fltrust, normalized": FLTrust("normalized"),
    "spectral-filter": SpectralFilter(bucket=1),
    "spectral-filter, buckets": SpectralFilter(),
    "nnm": NearestNeighborMixing(),
    "nnm, krum": NearestNeighborMixing(aggregator=Krum()),
    "nnm, centered-clipping": NearestNeighborMixing(aggregator=CenteredClipping()),
    "bucketing": Bucketing(),
    "bucketing, krum": Bucketing(aggregator=Krum()),
    "bucketing, two-stage": Bucketing(aggregator=TwoStage(), size=3),
    "nnm, bucketing": NearestNeighborMixing(aggregator=Bucketing(aggregator=MDA())),
}

D, NOISE_STD = 24, 0.5


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, d: int = D, seed: int = 0, std: float = NOISE_STD) -> torch.Tensor:
    return std * torch.randn(n, d, generator=generator(seed))


def view_of(
    uploads: torch.Tensor, f: int = 0, seed: int = 0, noise_std: float = NOISE_STD, gradient=None
) -> ServerView:
    n, d = uploads.shape
    rows, norms, present, _ = receive(uploads, n, d, torch.zeros(d))
    gradient = torch.randn(d, generator=generator(seed + 1)) if gradient is None else gradient
    ties = torch.randperm(n, generator=generator(seed))
    return ServerView(rows, norms, present, noise_std, n - f, lambda normalized: gradient.clone(), ties)


def with_absent(uploads: torch.Tensor, *absent: int) -> torch.Tensor:
    uploads = uploads.clone()
    uploads[list(absent)] = torch.nan
    return uploads


def close(found: torch.Tensor, expected, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected).double(), atol=atol, rtol=1e-5)


# --- distances -----------------------------------------------------------------------------------------------------


def test_distances_are_those_of_differences():
    view = view_of(with_absent(noise(9, 9000) + 0.3, 4))
    found = distances_of(view)
    for i, j in itertools.product(range(9), repeat=2):
        expected = float((view.uploads[i].double() - view.uploads[j].double()).square().sum())
        assert float(found[i, j]) == pytest.approx(math.inf if 4 in (i, j) else expected, rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 7, 12, 50])
def test_copies_are_at_the_same_distance_from_everyone(n):
    """Or else rounding, which depends on the place, would tell them apart."""
    uploads = noise(n, 5000)
    uploads[n - 1] = uploads[0]
    apart = distances_of(view_of(uploads))
    assert float(apart[0, n - 1]) == 0.0
    assert torch.equal(apart[0], apart[n - 1])


def test_lengths_beyond_the_longest_are_taken_for_it():
    uploads = torch.zeros(3, 4)
    uploads[0, 0], uploads[1, 1], uploads[2, 2] = 1.5e19, -1e19, 3.0
    view = view_of(uploads)
    assert bool(view.present.all())
    products = inner_products(view.uploads, view.norms)
    assert products.diagonal().tolist() == pytest.approx([LONGEST**2, LONGEST**2, 9.0])
    assert bool(products.isfinite().all())
    assert (shortening(view.norms) * view.norms).tolist() == pytest.approx([LONGEST, LONGEST, 3.0])


def test_lowest_ranks_equal_scores_by_ties():
    view = view_of(with_absent(noise(6), 2), seed=3)
    order = [i for i in view.ties.tolist() if i != 2]
    for count in range(7):
        kept = lowest(torch.zeros(6), view, count)
        assert set(kept.nonzero().flatten().tolist()) == set(order[:count])


# --- Krum ----------------------------------------------------------------------------------------------------------


def krum_oracle(uploads: torch.Tensor, there: list[int], f: int) -> dict[int, float]:
    scores = {}
    for i in there:
        apart = sorted(float((uploads[i].double() - uploads[j].double()).square().sum()) for j in there if j != i)
        scores[i] = sum(apart[: len(there) - f - 2])
    return scores


@pytest.mark.parametrize("absent", [(), (0,), (2, 5)])
@pytest.mark.parametrize("n", range(5, 10))
def test_krum_and_multi_krum_by_brute_force(n, absent):
    for seed, f in itertools.product(range(4), range((n - 3) // 2 + 1)):
        view = view_of(with_absent(noise(n, seed=seed), *[i for i in absent if i < n]), f)
        there = view.present.nonzero().flatten().tolist()
        left = min(f, max(0, (len(there) - 3) // 2))
        scores = krum_oracle(view.uploads, there, left)
        ranked = sorted(scores, key=scores.__getitem__)
        for aggregator, keep in ((Krum(), 1), (MultiKrum(), len(there) - left), (MultiKrum(keep=2), 2)):
            verdict = aggregator(view, {})
            assert verdict.kept.nonzero().flatten().tolist() == sorted(ranked[:keep])
            close(verdict.score[there], [scores[i] for i in there])
            close(verdict.update, view.uploads[ranked[:keep]].double().mean(0))


# --- minimum diameter ----------------------------------------------------------------------------------------------


def mda_oracle(apart: torch.Tensor, there: list[int], far_first: list[int], f: int) -> list[int]:
    """All sets are looked at. Of those with the smallest diameter, the one that drops the farthest first."""

    def diameter(kept):
        return max((float(apart[i, j]) for i, j in itertools.combinations(kept, 2)), default=0.0)

    sets = list(itertools.combinations(there, len(there) - f))
    smallest = min(map(diameter, sets))
    best = [kept for kept in sets if diameter(kept) == smallest]
    return sorted(max(best, key=lambda kept: [i not in kept for i in far_first]))


@pytest.mark.parametrize("kind", ["noise", "grid", "absent", "copies"])
@pytest.mark.parametrize("n", range(1, 10))
def test_mda_by_brute_force(n, kind):
    for seed, f in itertools.product(range(4), range((n - 1) // 2 + 1)):
        uploads = noise(n, seed=seed)
        if kind == "grid":  # many equal distances
            uploads = torch.randint(3, (n, 2), generator=generator(seed)).float()
        if kind == "absent" and n > 2:
            uploads = with_absent(uploads, 1)
        if kind == "copies":
            uploads[n // 2 :] = uploads[0]
        view = view_of(uploads, f, seed)
        there = view.present.nonzero().flatten().tolist()
        left = min(f, (len(there) - 1) // 2)
        verdict = MDA()(view, {})
        apart, place = distances_of(view), {i: k for k, i in enumerate(view.ties.tolist())}
        score = {i: float(apart[i, there].sort().values[: len(there) - left].sum()) for i in there}
        close(verdict.score[there], [score[i] for i in there])
        far_first = sorted(there, key=lambda i: (score[i], place[i]), reverse=True)
        kept = verdict.kept.nonzero().flatten().tolist()
        assert kept == mda_oracle(apart, there, far_first, left)
        close(verdict.update, view.uploads[kept].double().mean(0))


@given(st.integers(1, 9), st.floats(0, 1), st.integers(0, 9), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_the_search_finds_every_cover(n, density, budget, seed):
    chosen = np.triu(np.random.default_rng(seed).random((n, n)) < density, 1)
    edges = list(zip(*chosen.nonzero(), strict=True))
    far = [sum(1 << int(j) for j in (chosen | chosen.T)[i].nonzero()[0]) for i in range(n)]
    covers = itertools.combinations(range(n), min(budget, n))
    expected = any(all(a in cover or b in cover for a, b in edges) for cover in covers)
    assert coverable(far, (1 << n) - 1, budget) == expected


def test_mda_takes_no_more_byzantine_workers_than_it_can_search():
    assert [MDA().most(n) for n in (1, 2, 3, 50, 2 * MOST + 1, 1000)] == [0, 0, 1, 24, MOST, MOST]
    MDA(byzantine=MOST).check(1000)
    with pytest.raises(SpecError, match="f <= 24"):
        MDA(byzantine=MOST + 1).check(1000)
    view = view_of(noise(2 * MOST + 1, 300), MOST)
    assert int(MDA()(view, {}).kept.sum()) == MOST + 1


# --- geometric median ----------------------------------------------------------------------------------------------


def smoothed_sum(point: np.ndarray, uploads: np.ndarray, smoothing: float) -> float:
    apart = np.linalg.norm(uploads - point, axis=1)
    return float(np.where(apart < smoothing, apart**2 / (2 * smoothing) + smoothing / 2, apart).sum())


def pulled(point: np.ndarray, uploads: np.ndarray, smoothing: float) -> np.ndarray:
    """One Weiszfeld step."""
    pull = 1 / np.maximum(np.linalg.norm(uploads - point, axis=1), smoothing)
    return (pull[:, None] * uploads).sum(0) / pull.sum()


@pytest.mark.parametrize("smoothing", [0.1, 2.0])
@pytest.mark.parametrize("iterations", [1, 2, 3, 7])
def test_weiszfeld_steps_without_the_coordinates(smoothing, iterations):
    view = view_of(with_absent(torch.cat([noise(6), 5 + noise(3, seed=1)]), 3))
    uploads = view.uploads[view.present].double().numpy()
    point = np.zeros(D)
    for _ in range(iterations):
        point = pulled(point, uploads, smoothing)
    aggregator = GeometricMedian(smoothing=smoothing, iterations=iterations, tolerance=0.0)
    close(aggregator(view, {}).update, point)


@pytest.mark.parametrize("byzantine", [0, 3, 4])
@pytest.mark.parametrize("smoothing", [0.05, 3.0])
def test_the_geometric_median_has_the_smallest_sum_of_distances(byzantine, smoothing):
    uploads = noise(10)
    uploads[:byzantine] += 4.0
    view = view_of(uploads, byzantine)
    update = GeometricMedian(smoothing=smoothing, iterations=1000)(view, {}).update
    rows = view.uploads.double().numpy()
    best = optimize.minimize(smoothed_sum, rows.mean(0), (rows, smoothing), tol=1e-10)
    assert smoothed_sum(update.double().numpy(), rows, smoothing) <= best.fun * (1 + 1e-6)
    close(update, best.x, atol=1e-3)


def test_the_geometric_median_stops_by_itself():
    """Twice as many steps allowed give the same bits: it stopped before. And a looser tolerance stops earlier."""
    uploads = noise(20)
    uploads[:6] += 2.0
    view = view_of(uploads, 6)
    updates = [GeometricMedian(iterations=steps)(view, {}).update for steps in (64, 128)]
    assert torch.equal(*updates)
    assert not torch.equal(GeometricMedian(tolerance=0.1)(view, {}).update, updates[0])
    close(GeometricMedian(tolerance=0.0, iterations=500)(view, {}).update, updates[0])


def test_the_default_smoothing_changes_nothing_between_honest_uploads():
    view = view_of(noise(12, 300))
    plain = GeometricMedian(smoothing=1e-9)(view, {})
    assert torch.equal(GeometricMedian()(view, {}).update, plain.update)
    assert GeometricMedian()._smoothing(view) == pytest.approx(1e-3 * NOISE_STD * 300**0.5)
    assert GeometricMedian()._smoothing(replace(view, noise_std=0.0)) == 1e-6


def test_the_geometric_median_of_a_majority_of_copies_is_their_upload():
    uploads = noise(9)
    uploads[:5] = uploads[0]
    update = GeometricMedian()(view_of(uploads), {}).update
    assert float((update - uploads[0]).norm()) < 1e-2 * float(uploads[0].norm())


def test_an_upload_at_the_start_and_one_far_away_do_not_stop_the_search():
    """A step away from an upload is short at first. A mean distance that one of them makes huge must not excuse it."""
    uploads = 10 + noise(5)
    uploads[0], uploads[1] = 0.0, 1e6
    view = view_of(uploads, 2)
    assert float((GeometricMedian()(view, {}).update - uploads[2:].mean(0)).norm()) < NOISE_STD * math.sqrt(D)


# --- centered clipping ---------------------------------------------------------------------------------------------


def clipped_oracle(uploads: torch.Tensor, center: torch.Tensor, radius: float, iterations: int):
    """The new center, and what each upload counts for in it."""
    center, weights = center.double(), torch.zeros(len(uploads)).double()
    for _ in range(iterations):
        differences = [row.double() - center for row in uploads]
        left = torch.tensor([min(1.0, radius / float(row.norm())) for row in differences]).double() / len(uploads)
        center = center + sum(row * share for row, share in zip(differences, left, strict=True))
        weights = weights * (1 - sum(left)) + left
    return center, weights


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("radius", [0.01, 1.0, 100.0, None])
def test_centered_clipping_over_three_rounds(radius, iterations):
    aggregator, state, center = CenteredClipping(radius=radius, iterations=iterations), {}, torch.zeros(D)
    for t in range(3):
        uploads = 0.5 + noise(9, seed=t)
        uploads[0] *= 1000
        view = view_of(with_absent(uploads, 4), seed=t)
        verdict = aggregator(view, state)
        length = NOISE_STD * math.sqrt(D) if radius is None else radius
        before = center
        center, weights = clipped_oracle(view.uploads[view.present], center, length, iterations)
        close(verdict.update, center)
        close(verdict.weights[view.present], weights / weights.sum())
        by_weights = weights @ view.uploads[view.present].double() + (1 - weights.sum()) * before
        close(verdict.update, by_weights, atol=1e-4)
        state = dict(verdict.state)


def test_centered_clipping_hides_nothing_in_rounding():
    """Uploads that are the center but for rounding may not move it further than the radius, however small."""
    uploads, radius = 100 + 1e-3 * noise(8), 1e-6
    verdict = CenteredClipping(radius=radius)(view_of(uploads), {"center": uploads.mean(0)})
    assert float((verdict.update - uploads.mean(0)).double().norm()) <= radius * 1.01 + 1e-4  # float32 near 100


def test_centered_clipping_without_uploads_has_no_update_but_remembers():
    aggregator = CenteredClipping()
    state = dict(aggregator(view_of(noise(4)), {}).state)
    verdict = aggregator(view_of(torch.full((4, D), torch.nan)), state)
    assert not bool(verdict.update.any())
    assert torch.equal(verdict.state["center"], state["center"])


def test_the_default_radius_leaves_honest_uploads_whole():
    view = view_of(noise(30, 20000), noise_std=NOISE_STD)
    assert float(CenteredClipping()(view, {}).score.min()) > 0.98
    with pytest.raises(SpecError, match="radius: must be given"):
        CenteredClipping()(replace(view, noise_std=0.0), {})


# --- FLTrust -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_fltrust_by_loop(scale):
    gradient = torch.randn(D, generator=generator(5)).double()
    for seed in range(5):
        view = view_of(with_absent(scale * noise(9, seed=seed), 3), gradient=gradient.float())
        trust, total = torch.zeros(9).double(), torch.zeros(D).double()
        for i in view.present.nonzero().flatten().tolist():
            row = view.uploads[i].double()
            trust[i] = max(0.0, float(row @ gradient / (row.norm() * gradient.norm())))
            total += trust[i] * row * gradient.norm() / row.norm()
        verdict = FLTrust()(view, {})
        close(verdict.score, trust)
        assert torch.equal(verdict.kept, trust > 0)
        close(verdict.update, total / trust.sum())


def test_fltrust_asks_for_the_gradient_of_its_setting():
    asked = []

    def auxiliary(normalized):
        asked.append(normalized)
        return torch.ones(D)

    view = replace(view_of(noise(4)), auxiliary=auxiliary)
    FLTrust()(view, {})
    FLTrust("normalized")(view, {})
    assert asked == [False, True]
    with pytest.raises(SpecError, match="server_gradient"):
        FLTrust("plane")


def test_fltrust_stays_where_nobody_is_trusted():
    gradient = torch.ones(D)
    for uploads in (-gradient.repeat(4, 1), torch.zeros(4, D), torch.full((4, D), 1e-25)):
        verdict = FLTrust()(view_of(uploads, gradient=gradient), {})
        assert not bool(verdict.kept.any())
        assert not bool(verdict.update.any())
    assert not bool(FLTrust()(view_of(noise(4), gradient=torch.zeros(D)), {}).kept.any())


# --- spectral filter -----------------------------------------------------------------------------------------------


def filter_oracle(points: np.ndarray, bound: float, rounds: int) -> np.ndarray:
    """The weights, from the covariance itself. bound: as if the total weight were 1."""
    weights = np.ones(len(points))
    for _ in range(rounds):
        share = weights / weights.sum()
        centered = points - share @ points
        values, vectors = np.linalg.eigh((centered * share[:, None]).T @ centered)
        if values[-1] * weights.sum() <= bound:
            break
        apart = np.where(weights > 0, (centered @ vectors[:, -1]) ** 2, 0.0)
        left = 1 - apart / apart.max()
        weights = weights * np.where(left < 1e-4, 0.0, left)
    return weights


@pytest.mark.parametrize("absent", [(), (1, 9)])
@pytest.mark.parametrize("bucket", [1, 2])
def test_the_spectral_filter_from_the_covariance(bucket, absent):
    n, f = 30, 4
    uploads = noise(n, 60)
    uploads[:2, 0] += 40.0  # two directions of their own, one after the other
    uploads[2:4, 1] -= 25.0
    aggregator, view = SpectralFilter(bucket=bucket), view_of(with_absent(uploads, *absent), f)
    order = [i for i in view.ties.tolist() if i not in absent]
    groups = [order[i : i + bucket] for i in range(0, len(order), bucket)]
    points = np.stack([view.uploads[group].double().mean(0).numpy() for group in groups])
    bound = 1.5 * NOISE_STD**2 / bucket * (math.sqrt(60) + math.sqrt(len(points))) ** 2
    weights = filter_oracle(points, bound, 2 * f)
    assert 0 < (weights == 0).sum() < len(points) / 2, "the case tests nothing"
    verdict = aggregator(view, {})
    close(verdict.update, weights @ points / weights.sum(), atol=1e-4)
    for group, weight in zip(groups, weights, strict=True):
        assert verdict.score[group].tolist() == pytest.approx([weight] * len(group), abs=1e-4)
        assert verdict.kept[group].tolist() == [weight > 0] * len(group)


@pytest.mark.parametrize(("n", "d"), [(10, 1000), (50, 1000), (50, 40), (100, 25450)])
def test_the_power_method_finds_the_variance(n, d):
    """Of noise, the hardest case: the eigenvalues lie close together."""
    points = noise(n, d).double()
    weights = torch.rand(n, generator=generator(1), dtype=torch.float64)
    weights[0] = 0.0
    share = weights / weights.sum()
    centered = points - share @ points
    largest = float(torch.linalg.matrix_norm(share.sqrt()[:, None] * centered, 2)) ** 2
    variance, deviations = main_direction(points @ points.T, weights)
    assert 0.96 * largest <= float(variance) <= largest * (1 + 1e-9)
    assert float(share @ deviations) == pytest.approx(float(variance))  # they are deviations in one direction


@pytest.mark.parametrize(("n", "d"), [(10, 1000), (50, 25450), (50, 100), (13, 25450)])
def test_noise_alone_is_not_filtered(n, d):
    for seed in range(5):
        for bucket in (1, 2):
            verdict = SpectralFilter(bucket=bucket)(view_of(noise(n, d, seed), n // 4, seed), {})
            assert bool((verdict.score == 1).all())


@pytest.mark.parametrize("length", [1.0, 10.0, 1e6, 1e17])
def test_a_shift_of_the_noises_length_is_filtered(length):
    """A mean would take over a fifth of the shift. Of one that the noise could hide, a quarter of that may be left."""
    n, f, d = 50, 10, 2000
    uploads, scale = noise(n, d), NOISE_STD * math.sqrt(d)
    honest = uploads[f:].mean(0)
    uploads[:f] += length * scale * torch.ones(d) / math.sqrt(d)
    verdict = SpectralFilter(bucket=1)(view_of(uploads, f), {})
    assert float((verdict.update - honest).norm()) < 0.05 * scale
    assert float(verdict.score[:f].mean()) < 0.2
    assert float(verdict.score[f:].mean()) > 0.9


# --- wrappers ------------------------------------------------------------------------------------------------------


def mixed_oracle(view: ServerView, f: int) -> tuple[torch.Tensor, list[list[int]]]:
    there = view.present.nonzero().flatten().tolist()
    place = {i: k for k, i in enumerate(view.ties.tolist())}
    rows, near = torch.zeros_like(view.uploads), [[] for _ in view.uploads]
    for i in there:
        apart = {j: float((view.uploads[i].double() - view.uploads[j].double()).norm()) for j in there}
        near[i] = sorted(there, key=lambda j: (apart[j], place[j]))[: len(there) - f]
        rows[i] = view.uploads[near[i]].double().mean(0)
    return rows, near


@dataclass(frozen=True)
class Recorder(Aggregator):
    """Notes what it sees, and keeps the first two by ties: the second has twice the weight of the first."""

    calls: list

    def __call__(self, view, state):
        self.calls.append((view, state))
        verdict = Mean()(view, state)
        first = view.ties[:2]
        weights = torch.zeros_like(view.norms).index_copy_(0, first, torch.tensor([1.0, 2.0])[: len(first)])
        weights *= view.present
        score = torch.arange(len(weights), dtype=torch.float32) + 1
        kept, weights = weights > 0, weights / weights.sum().clamp(min=1)
        return replace(verdict, kept=kept, score=score, state={"mark": torch.ones(1)}, weights=weights)


@pytest.mark.parametrize("absent", [(), (0, 5)])
def test_nnm_by_loop(absent):
    for seed, f in itertools.product(range(3), range(4)):
        calls: list = []
        view = view_of(with_absent(noise(10, seed=seed), *absent), f, seed)
        aggregator = NearestNeighborMixing(aggregator=Recorder(calls))
        verdict = aggregator(view, {"before": torch.zeros(1)})
        rows, near = mixed_oracle(view, min(f, (10 - len(absent) - 1) // 2))
        ((seen, state),) = calls
        close(seen.uploads, rows)
        close(seen.norms, rows.norm(dim=1))
        assert torch.equal(seen.present, view.present)
        assert torch.equal(seen.ties, view.ties)
        assert seen.believed_honest == 10 - f
        assert seen.noise_std == pytest.approx(NOISE_STD / math.sqrt(10 - len(absent) - f))
        assert state.keys() == {"before"}
        assert verdict.state.keys() == {"mark"}
        weight = torch.zeros(10)
        for first, share in zip(view.ties[:2].tolist(), (1.0, 2.0), strict=True):
            weight[near[first]] += share / max(1, len(near[first]))
        assert torch.equal(verdict.kept, weight > 0)
        close(verdict.weights, weight / weight.sum())
        assert verdict.score.tolist() == [0.0 if i in absent else i + 1.0 for i in range(10)]


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize("absent", [(), (0, 5, 6)])
def test_bucketing_by_loop(size, absent):
    for seed, f in itertools.product(range(3), range(3)):
        calls: list = []
        view = view_of(with_absent(noise(10, seed=seed), *absent), f, seed)
        verdict = Bucketing(aggregator=Recorder(calls), size=size)(view, {"before": torch.zeros(1)})
        order = [i for i in view.ties.tolist() if i not in absent]
        number = math.ceil(10 / size)
        groups = [order[k * size : (k + 1) * size] for k in range(number)]
        ((seen, state),) = calls
        for k, group in enumerate(groups):
            close(seen.uploads[k], view.uploads[group].double().mean(0) if group else torch.zeros(D))
        assert seen.present.tolist() == [bool(group) for group in groups]
        assert seen.believed_honest == max(1, number - f)
        assert seen.noise_std == pytest.approx(NOISE_STD / math.sqrt(size))
        assert state.keys() == {"before"}
        assert verdict.state.keys() == {"mark"}
        weight = torch.zeros(10)
        for group, share in zip(groups, (1.0, 2.0), strict=False):
            weight[group] += share / max(1, len(group))
        assert torch.equal(verdict.kept, weight > 0)
        close(verdict.weights, weight / weight.sum())
        expected = {i: k + 1.0 for k, group in enumerate(groups) for i in group}
        assert verdict.score.tolist() == [expected.get(i, 0.0) for i in range(10)]


def test_buckets_are_random_and_everyone_is_in_one():
    view = view_of(noise(11))
    member = buckets(view, 3)
    assert member.sum(0).tolist() == [1] * 11
    assert member.sum(1).tolist() == [3, 3, 3, 2]
    other = buckets(replace(view, ties=view.ties.flip(0)), 3)
    assert not torch.equal(member, other)


def test_the_state_of_the_inner_aggregator_lives_through_rounds():
    aggregator, inner, state, state_too = Bucketing(aggregator=CenteredClipping()), CenteredClipping(), {}, {}
    for t in range(3):
        view = view_of(noise(8, seed=t), seed=t)
        means = view.uploads[view.ties].view(4, 2, D).mean(1)
        verdict = aggregator(view, state)
        expected = inner(view_of(means, noise_std=NOISE_STD / math.sqrt(2)), state_too)
        close(verdict.update, expected.update)
        state, state_too = dict(verdict.state), dict(expected.state)


def test_f_reaches_the_inner_aggregator():
    """Of 12 workers, 2 of them Byzantine: what is trimmed inside tells what the inner aggregator reckons with."""
    view = view_of(noise(12), 2)
    for wrapper, rows in (
        (NearestNeighborMixing(), mixed_oracle(view, 2)[0]),
        (Bucketing(aggregator=TrimmedMean()), None),
    ):
        rows = view.uploads[view.ties].view(6, 2, D).mean(1) if rows is None else rows
        close(wrapper(view, {}).update, rows.sort(0).values[2:-2].mean(0))
        own = replace(wrapper, byzantine=1)(view, {}).update
        rows = mixed_oracle(view, 1)[0] if isinstance(wrapper, NearestNeighborMixing) else rows
        close(own, rows.sort(0).values[1:-1].mean(0))


def test_wrappers_admit_what_the_inner_aggregator_admits():
    for n in range(1, 30):
        assert NearestNeighborMixing(aggregator=Mean()).most(n) == (n - 1) // 2
        assert NearestNeighborMixing(aggregator=Krum()).most(n) == (n - 3) // 2
        assert NearestNeighborMixing(aggregator=SpectralFilter(bucket=1)).most(n) == (n - 1) // 3
        assert Bucketing(aggregator=Mean()).most(n) == n - 1
        assert Bucketing(aggregator=Krum()).most(n) == (math.ceil(n / 2) - 3) // 2
        assert Bucketing(aggregator=Krum(), size=5).most(n) == (math.ceil(n / 5) - 3) // 2
    with pytest.raises(SpecError, match="needs"):
        NearestNeighborMixing(aggregator=Krum()).check(2)
    with pytest.raises(SpecError, match="byzantine = 4"):
        NearestNeighborMixing(byzantine=4, aggregator=Krum()).check(10)
    with pytest.raises(SpecError, match="byzantine = 4"):
        NearestNeighborMixing(aggregator=Krum(byzantine=4)).check(10)
    with pytest.raises(SpecError, match="byzantine = 2"):
        Bucketing(aggregator=Krum(byzantine=2)).check(10)
    Bucketing(aggregator=Krum()).check(10)
    Bucketing(aggregator=Mean()).check(3)
    with pytest.raises(SpecError, match="all share a bucket"):
        Bucketing(aggregator=Mean(), size=3).check(3)


def test_wrappers_are_built_from_nested_requests():
    table = {"nnm": NearestNeighborMixing, "bucketing": Bucketing, "krum": Krum, "mda": MDA}
    assert build("aggregator", "nnm", table) == NearestNeighborMixing()
    asked = {"name": "nnm", "aggregator": {"name": "bucketing", "size": 3, "aggregator": "mda"}, "byzantine": 2}
    assert build("aggregator", asked, table) == NearestNeighborMixing(2, Bucketing(aggregator=MDA(), size=3))
    with pytest.raises(SpecError, match="size = 0"):
        build("aggregator", {"name": "bucketing", "size": 0}, table)


# --- settings ------------------------------------------------------------------------------------------------------


def test_a_device_admits_as_many():
    for name, aggregator in BUILDERS.items():
        for n in range(100):
            there = aggregator.most(torch.tensor(n))
            assert (None if there is None else int(there)) == aggregator.most(n), name


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (MultiKrum, {"keep": 0}),
        (GeometricMedian, {"smoothing": 0.0}),
        (GeometricMedian, {"tolerance": -1.0}),
        (GeometricMedian, {"iterations": 0}),
        (CenteredClipping, {"radius": 0.0}),
        (CenteredClipping, {"iterations": 0}),
        (SpectralFilter, {"threshold": 0.0}),
        (SpectralFilter, {"bucket": 0}),
        (Bucketing, {"size": 0}),
        (NearestNeighborMixing, {"byzantine": -1}),
    ],
)
def test_settings_are_checked(kind, setting):
    with pytest.raises(SpecError, match=next(iter(setting))):
        kind(**setting)


# --- arbitrary uploads ---------------------------------------------------------------------------------------------

FORGED = st.one_of(
    st.tuples(st.just("all"), st.floats(width=32)),  # NaN and both infinities among them
    st.tuples(st.just("one"), st.floats(width=32)),
    st.tuples(st.just("length"), st.floats(2.0**-126, 2.0**64, width=32)),
    st.tuples(st.just("against"), st.floats(2.0**-126, 2.0**64, width=32)),
    st.tuples(st.just("copy"), st.integers(0, 100)),
    st.tuples(st.just("near"), st.integers(0, 100)),
)


def forge(kind: str, value: float, honest: torch.Tensor, seed: int) -> torch.Tensor:
    direction = torch.randn(honest.shape[1], generator=generator(seed)).double()
    if kind == "copy":
        return honest[value % len(honest)]
    if kind == "near":
        return honest[value % len(honest)] * 1.0000001
    if kind == "length":
        return (value * direction / direction.norm()).float()
    if kind == "against":
        return (-value * honest.double().mean(0) / honest.double().mean(0).norm()).float()
    row = torch.zeros(honest.shape[1]) if kind == "one" else torch.full((honest.shape[1],), value)
    row[0] = value
    return row


@st.composite
def rounds(draw, most):
    """(view, who is honest, f) with n workers of which up to f = most(n) are Byzantine."""
    n = draw(st.integers(1, 14))
    f = draw(st.integers(0, max(0, min(n - 1, most(n)))))
    sent = draw(st.lists(FORGED, max_size=f))
    seed, shift = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.2, 10.0]))
    uploads = noise(n, seed=seed) + shift
    honest = torch.randperm(n, generator=generator(seed + 2))[len(sent) :]
    byzantine = [i for i in range(n) if i not in honest.tolist()]
    for i, (kind, value) in zip(byzantine, sent, strict=True):
        uploads[i] = forge(kind, value, uploads[honest], seed + i)
    return view_of(uploads, f, seed), honest, f


@pytest.mark.parametrize("aggregator", BUILDERS.values(), ids=BUILDERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_upload_makes_an_update_infinite(aggregator, data):
    view, _, _ = data.draw(rounds(lambda n: n - 1 if aggregator.most(n) is None else aggregator.most(n)))
    state: dict = {}
    for _ in range(2):
        verdict = aggregator(view, state)
        assert bool(verdict.update.isfinite().all())
        assert bool(verdict.score.isfinite().all())
        assert all(bool(value.isfinite().all()) for value in verdict.state.values())
        assert not bool((verdict.kept & ~view.present).any())
        state = dict(verdict.state)


# How far an update may be from the mean of the honest uploads, in their diameters, for n workers, f of them Byzantine.
BOUNDS = {
    # An honest upload's n - f - 2 nearest are no further than the diameter. Whoever is kept scores no worse, so an
    # honest one among its own is within the root of n - f - 2 diameters.
    "krum": lambda n, f: math.sqrt(max(1, n - f - 2)) + 1,
    "multi-krum": lambda n, f: math.sqrt(max(1, n - f - 2)) + 1,
    # Some honest upload is kept, and all who are kept are within a diameter of it.
    "mda": lambda n, f: 2,
    # Minsker (2015): the median moves at most 2 (n - f) / (n - 2 f) radii.
    "geometric-median": lambda n, f: 2 * (n - f) / (n - 2 * f),
    # What is mixed around an honest upload is within a diameter of it, so its mean within two of the honest mean. In
    # every coordinate the trimmed mean stays between those of the n - f honest workers.
    "nnm": lambda n, f: 2 * math.sqrt(n - f),
    # Seen, not proven.
    "spectral-filter": lambda n, f: 1.5,
}


@pytest.mark.parametrize("name", BOUNDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_byzantine_workers_cannot_move_the_update_far(name, data):
    view, honest, f = data.draw(rounds(BUILDERS[name].most))
    n, rows = len(view.uploads), view.uploads[honest].double()
    if n - f - 2 < 1:
        return  # Krum without neighbors picks anyone
    diameter = float(torch.cdist(rows, rows).max())
    moved = float((BUILDERS[name](view, {}).update.double() - rows.mean(0)).norm())
    assert moved <= BOUNDS[name](n, f) * diameter * 1.001 + 1e-3 * float(rows.norm(dim=1).max())


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_each_byzantine_worker_moves_centered_clipping_by_two_radii_over_n(data):
    aggregator = CenteredClipping(radius=1.5)
    view, honest, _ = data.draw(rounds(aggregator.most))
    innocent = view.uploads.clone()
    byzantine = [i for i in range(len(innocent)) if i not in honest.tolist()]
    innocent[byzantine] = 0.0
    innocent = replace(view, uploads=innocent, norms=innocent.norm(dim=1))
    center = noise(1, seed=9)[0]
    updates = [aggregator(seen, {"center": center}).update.double() for seen in (view, innocent)]
    there = int(view.present.sum())
    assert float((updates[0] - updates[1]).norm()) <= 2 * 1.5 * len(byzantine) / max(1, there) * 1.001 + 1e-4


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_fltrust_is_never_longer_than_the_servers_gradient(data):
    view, _, _ = data.draw(rounds(lambda n: n - 1))
    assert float(FLTrust()(view, {}).update.norm()) <= float(view.auxiliary(False).norm()) * 1.001


# --- devices -------------------------------------------------------------------------------------------------------


ASKS = {"mda", "nnm, bucketing"}  # MDA says that it asks, and the second has it inside


@pytest.mark.parametrize("name", BUILDERS)
def test_a_device_decides_the_same_and_is_not_asked(name, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: False)
    aggregator, state, state_too = BUILDERS[name], {}, {}
    for t in range(3):
        # How much noise a mean has left is not told on a device if some are malformed, and this aggregator goes by it.
        absent = () if name == "nnm, centered-clipping" else (3, 6)
        uploads = with_absent(0.1 + noise(14, seed=t), *absent)
        uploads[1], uploads[2], uploads[8], uploads[9] = uploads[0], 1e17, 30.0, -8.0
        view = view_of(uploads, 4, t)
        tensors = {part: on_device(getattr(view, part)) for part in ("uploads", "norms", "present", "ties")}
        gradient = on_device(view.auxiliary(False))
        device = replace(view, auxiliary=lambda normalized, gradient=gradient: gradient, **tensors)
        if name in ASKS:
            with pytest.raises(RuntimeError, match="asks the device"), Unasked():
                aggregator(device, {})
            return
        here = aggregator(view, state)
        with Unasked():
            there = aggregator(device, state_too)
        assert type(there.update) is OnDevice
        close(torch.Tensor(there.update), here.update)
        close(torch.Tensor(there.score), here.score)
        assert torch.equal(there.kept, here.kept)
        assert torch.equal(there.reason, here.reason)
        state, state_too = dict(here.state), dict(there.state)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("absent", [(), (0, 3, 4), tuple(range(9))])
def test_averages_are_what_the_dense_product_gives(size, absent):
    uploads = noise(9, 40, 1)
    view = view_of(with_absent(uploads, *absent), 1)
    member = buckets(view, size)
    expected = shares(member) @ view.uploads.double()
    torch.testing.assert_close(averages(view.uploads, member, size).double(), expected, atol=1e-6, rtol=1e-6)


# --- what only a change of the code would show ----------------------------------------------------------------------


def test_products_that_differ_by_rounding_are_those_of_equal_uploads():
    products = torch.full((3, 3), 100.0, dtype=torch.float64)
    products[0, 1] = products[1, 0] = 100.0 - 1e-5
    assert not bool(squared_distances(products).any())
    products[0, 1] = products[1, 0] = 99.0
    assert squared_distances(products).tolist() == [[0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_filtered_uploads_do_not_shield_those_behind_them():
    """All on one line, each hidden by the one before: who has no weight left does not measure the others."""
    n, f, d = 30, 4, 60
    uploads = noise(n, d)
    honest = uploads[f:].mean(0)
    uploads[:f, 0] += torch.tensor([1e6, 1e3, 30.0, 20.0])
    verdict = SpectralFilter(bucket=1)(view_of(uploads, f), {})
    assert not bool(verdict.kept[:f].any())
    assert float((verdict.update - honest).norm()) < 0.1


@pytest.mark.parametrize("bucket", [1, 2])
def test_the_bound_is_a_multiple_of_what_noise_has(bucket):
    """A variance between the noise's own and the threshold's multiple of it stays; one above it goes."""
    n, d = 40, 400
    for variance, filtered in ((1.3, False), (1.7, True)):
        uploads = torch.zeros(n, d)
        view = view_of(uploads, 4)
        points = n // bucket
        edge = NOISE_STD**2 / bucket * (math.sqrt(d) + math.sqrt(points)) ** 2
        length = math.sqrt(variance * edge / (1 - 1 / points))  # one point so far away has this variance, times all
        odd = buckets(view, bucket)[0].nonzero().flatten()
        uploads[odd, 0] = length
        verdict = SpectralFilter(bucket=bucket)(view_of(uploads, 4), {})
        assert bool((verdict.score[odd] < 1).all()) == filtered


def test_the_filter_takes_twice_as_many_rounds_as_it_reckons_with_byzantine_workers():
    """Each round one of these goes, as each has a direction of its own."""
    n, d = 30, 60
    uploads = noise(n, d)
    uploads[[0, 1, 2], [0, 1, 2]] += torch.tensor([40.0, 50.0, 60.0])
    verdict = SpectralFilter(bucket=1)(view_of(uploads, 1), {})
    assert verdict.kept[:3].tolist() == [True, False, False]


@pytest.mark.parametrize("bucket", [1, 2])
def test_equal_uploads_are_not_filtered(bucket):
    uploads = torch.randn(1, 5000, generator=generator(0)).repeat(24, 1)
    verdict = SpectralFilter(bucket=bucket)(view_of(uploads, 3, noise_std=1e-9), {})
    assert bool(verdict.kept.all())
    close(verdict.update, uploads[0])


@pytest.mark.parametrize("smoothing", [1e-30, 1e-6, 1e18])
def test_any_smoothing_that_is_admitted_gives_a_point(smoothing):
    uploads = noise(7)
    uploads[2] = 0.0
    assert bool(GeometricMedian(smoothing=smoothing)(view_of(uploads, 2), {}).update.isfinite().all())


@pytest.mark.parametrize("smoothing", [1e-200, 1e200])
def test_a_smoothing_that_overflows_is_refused(smoothing):
    with pytest.raises(SpecError, match="smoothing"):
        GeometricMedian(smoothing=smoothing)


def test_a_huge_server_gradient_does_not_overflow_the_update():
    gradient = torch.full((D,), 1e37)
    verdict = FLTrust()(view_of(noise(6), gradient=gradient), {})
    assert bool(verdict.update.isfinite().all())
    assert 0 < float(verdict.update.norm()) <= 1.01 * LONGEST


def test_groups_that_lie_apart_are_covered_apart():
    """Ten groups of five, all far from each other within: four of each, found without trying all combinations."""
    far = [0] * 50
    for i, j in itertools.permutations(range(50), 2):
        far[i] |= (i // 5 == j // 5) << j
    assert coverable(far, 2**50 - 1, 40)
    assert not coverable(far, 2**50 - 1, 39)


@pytest.mark.parametrize("seed", range(30))
def test_coverable_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    pairs = [(i, j) for i, j in itertools.combinations(range(n), 2) if rng.random() < rng.choice([0.15, 0.4, 0.8])]
    far = [0] * n
    for i, j in pairs:
        far[i] |= 1 << j
        far[j] |= 1 << i
    smallest = min(
        size
        for size in range(n + 1)
        for chosen in itertools.combinations(range(n), size)
        if all(i in chosen or j in chosen for i, j in pairs)
    )
    for budget in range(n + 1):
        assert coverable(far, 2**n - 1, budget) == (budget >= smallest)
    assert lower_bound(far, 2**n - 1) <= smallest


@pytest.mark.parametrize("malformed", [0, 1, 2, 4])
def test_mixed_noise_still_passes_for_noise_when_some_are_malformed(malformed):
    uploads = with_absent(noise(20, 3000, std=0.5), *range(malformed))
    verdict = NearestNeighborMixing(aggregator=TwoStage(stages=1))(view_of(uploads, 6, noise_std=0.5), {})
    assert int(verdict.kept.sum()) == 20 - malformed
