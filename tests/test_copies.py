"""Copies and partial copies among the uploads of a round: who is left out, and who shares a weight, by slow oracles."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from noisegate.aggregators.fortified import copies as copying
from noisegate.aggregators.upload_lengths import honest_lengths
from noisegate.streams import stream
from test_fortified_parts import PROPERTY, at_most, normal


def vectors(edges: dict[tuple[int, int], float], n: int) -> torch.Tensor:
    """Uploads whose inner products are the weights of these edges, and 0 otherwise: two share a coordinate of it."""
    rows = torch.zeros(n, len(edges) + n)
    for at, ((i, j), weight) in enumerate(edges.items()):
        rows[i, at], rows[j, at] = 1.0, weight
    return rows


def divided(uploads: torch.Tensor, limit: float, longest: float, candidates=None, trust=None, ties=None):
    """(who is left out, how often each of the rest is repeated)"""
    n = len(uploads)
    candidates = torch.ones(n, dtype=torch.bool) if candidates is None else candidates
    trust = torch.zeros(n) if trust is None else trust
    ties = torch.arange(n) if ties is None else ties
    handed = uploads, candidates, torch.tensor(limit), trust, ties
    before = [each.clone() for each in handed]
    copies, repeats = copying.find_copies(uploads, candidates, handed[2], longest, trust, ties)
    assert all(torch.equal(*pair) for pair in zip(handed, before, strict=True))
    assert (copies.dtype, copies.shape, repeats.dtype, repeats.shape) == (torch.bool, (n,), uploads.dtype, (n,))
    return set(copies.nonzero().flatten().tolist()), repeats


def left_out(uploads: torch.Tensor, beyond: float, candidates=None, trust=None, ties=None) -> set[int]:
    """Of uploads of which those count as copies whose inner product is beyond this."""
    return divided(uploads, 0.0, math.sqrt(beyond / copying.COPY_SHARE), candidates, trust, ties)[0]


def conflicts_of(uploads: torch.Tensor, beyond: float, candidates) -> dict[int, dict[int, float]]:
    """For each worker, whom it conflicts with, and their inner product."""
    n, gram = len(uploads), (uploads.double() @ uploads.double().T).tolist()
    return {
        i: {j: gram[i][j] for j in range(n) if j != i and candidates[i] and candidates[j] and gram[i][j] > beyond}
        for i in range(n)
    }


def in_order(rivals: dict[int, dict[int, float]], trust, ties) -> list[int]:
    """Who comes first: the more trusted, then who conflicts with fewest, is leaned on most, is first by lot."""
    place = ties.tolist()
    return sorted(
        rivals,
        key=lambda i: (
            -round(float(trust[i]) / copying.TRUST_STEP),
            len(rivals[i]),
            -sum(rivals[i].values()),
            place.index(i),
        ),
    )


def one_by_one(rivals: dict[int, dict[int, float]], order: list[int]) -> set[int]:
    """Who is left out if they come in their order, and whoever conflicts with one that stayed goes."""
    stay: set[int] = set()
    for i in order:
        if not stay & set(rivals[i]):
            stay.add(i)
    return set(rivals) - stay


def in_turns(rivals: dict[int, dict[int, float]], order: list[int], turns: int) -> set[int]:
    """Who is left out if in every turn the rivals of all those go that come before all their rivals; and then the rest.

    The rest are those who are in a conflict still.
    """
    left = {i: set(mine) for i, mine in rivals.items()}
    out: set[int] = set()
    for _ in range(turns):
        first = [i for i in left if left[i] and all(order.index(i) < order.index(j) for j in left[i])]
        out |= {j for i in first for j in left[i]}
        left = {i: set() if i in out else left[i] - out for i in left}
    return out | {i for i in left if left[i]}


@st.composite
def entangled(draw, most: int):
    """(uploads, candidates, trust, ties) of up to so many workers."""
    n = draw(st.integers(1, most))
    pairs = [(i, j) for i in range(n) for j in range(i)]
    edges = {pair: draw(st.sampled_from((0.0, 0.0, 1.0, 2.0, 4.0, -2.0))) for pair in pairs}
    candidates = torch.tensor([draw(st.integers(0, 4)) > 0 for _ in range(n)])
    trust = torch.tensor([draw(st.sampled_from((0.0, 0.3, -0.3, 4.0, -7.0, -80.0))) for _ in range(n)])
    return vectors(edges, n), candidates, trust, torch.tensor(draw(st.permutations(range(n))))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(entangled(5))
def test_conflicts_are_settled_as_one_by_one(case):
    """Up to five workers: each turn settles two at least, and one alone is in no conflict."""
    uploads, candidates, trust, ties = case
    rivals = conflicts_of(uploads, 0.5, candidates)
    assert left_out(uploads, 0.5, candidates, trust, ties) == one_by_one(rivals, in_order(rivals, trust, ties))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(entangled(8))
def test_conflicts_are_settled_in_two_turns_and_what_is_left_then_is_left_out(case):
    uploads, candidates, trust, ties = case
    out = left_out(uploads, 0.5, candidates, trust, ties)
    rivals = conflicts_of(uploads, 0.5, candidates)
    assert out == in_turns(rivals, in_order(rivals, trust, ties), 2)
    rest = [i for i in range(len(candidates)) if candidates[i] and i not in out]
    assert all(j not in rivals[i] for i in rest for j in rest), "no two of the rest conflict"
    assert all(rivals[i] for i in out), "nobody without a conflict is left out"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(9, 60), st.floats(0.02, 0.9))
def test_of_many_conflicts_nobody_is_left(seed, n, density):
    """However entangled: what two turns do not settle is left out."""
    rng = stream(seed, "graph")
    linked = torch.rand(n, n, generator=rng) < density
    edges = {(i, j): 1.0 for i in range(n) for j in range(i) if linked[i, j]}
    uploads = vectors(edges, n)
    out = left_out(uploads, 0.5, ties=torch.randperm(n, generator=rng))
    assert not [(i, j) for i, j in edges if i not in out and j not in out]
    assert all(any(i in edge for edge in edges) for i in out)


def test_a_chain_too_long_to_be_settled_in_two_turns_is_cut():
    """Each is more trusted than the next, so that each turn settles two; who is not settled then is left out."""
    n = 20
    uploads = vectors({(i, i + 1): 1.0 for i in range(n - 1)}, n)
    trust = -2 * copying.TRUST_STEP * torch.arange(float(n))
    assert left_out(uploads, 0.5, trust=trust) == {1, 3, *range(4, n)}


def test_nearly_always_the_first_turn_settles_all():
    """Copies of several uploads, of each another number: one of each stays, and none has to wait for another."""
    families = torch.arange(6).repeat_interleave(torch.tensor([1, 1, 2, 3, 5, 8]))
    for seed in range(20):
        rng = stream(seed, "families")
        uploads = normal(6, 500, seed=seed)[families] + 0.3 * torch.randn(20, 500, generator=rng)
        ties = torch.randperm(20, generator=rng)
        rivals = conflicts_of(uploads, 300.0, torch.ones(20, dtype=torch.bool))
        stay = sorted(set(range(20)) - in_turns(rivals, in_order(rivals, torch.zeros(20), ties), 1))
        assert families[stay].tolist() == list(range(6))
        stay = sorted(set(range(20)) - left_out(uploads, 300.0, ties=ties))
        assert families[stay].tolist() == list(range(6))


def test_the_order_of_conflicts_is_exact():
    """One number stands for trust, conflicts, leaning and lot, as far as each of them goes."""
    highest = (copying.GROUP * 44 + copying.GROUP) * 128 + 100  # a score is above -88, and steps are of 2
    assert highest * copying.MOST_WORKERS < 2**53
    n, most = copying.GROUP, copying.MOST_WORKERS
    products = torch.full((n, n), 2.0).fill_diagonal_(0.0)  # all conflict with all: the most conflicts there can be
    trust, rank = torch.full((n,), -87.0), torch.arange(most - n, most)
    stays = copying._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [0], "of equals the first by lot, though numbers differ by 1 in 5e13"
    products[5, 7] = products[7, 5] = 2.0 + 2.0 * n * 0.02  # which are leaned on more
    stays = copying._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [5]
    trust[500] = -84.9
    stays = copying._copies(products, torch.tensor(1.0), trust, rank).logical_not().nonzero().flatten().tolist()
    assert stays == [500]


def test_of_equal_uploads_the_ties_keep_one():
    sizes = ((2, 600), (7, 33), (12, 2410), (25, 2410), (63, 999), (200, 300))
    for (n, d), seed in itertools.product(sizes, range(5)):
        uploads = normal(1, d).repeat(n, 1)
        ties = torch.randperm(n, generator=stream(seed, "ties"))
        out, repeats = divided(uploads, 0.1 * d, float(uploads[0].norm()), ties=ties)
        assert out == set(range(n)) - {int(ties[0])}
        assert not repeats.any(), "what is left is said once"


def partial_copies(copies: int, d: int, share: float, seed: int) -> torch.Tensor:
    """(1 + copies, d) an upload of length sqrt(d), and mixes of it with noise."""
    rows = normal(1 + copies, d, seed=seed)
    rows[1:] = share * rows[:1] + (1 - share**2) ** 0.5 * rows[1:]
    return rows


def longest_of(uploads: torch.Tensor) -> float:
    return float(uploads.norm(dim=1).max())


def test_of_partial_copies_the_one_stays_that_they_imitate():
    for seed in range(20):
        uploads = torch.cat([partial_copies(6, 2000, 0.85, seed), normal(5, 2000, seed=seed, name="others")])
        places = torch.randperm(12, generator=stream(seed, "places"))
        ties = torch.randperm(12, generator=stream(seed, "ties"))
        imitators = {int(torch.argsort(places)[i]) for i in range(1, 7)}
        longest = longest_of(uploads)
        assert divided(uploads[places], 350.0, longest, ties=ties)[0] == imitators  # they share 0.72, and 0.85 with it


def test_one_upload_made_of_others_goes_and_they_stay():
    for seed in range(20):
        for many in (2, 3):
            others = normal(many, 2000, seed=seed)
            uploads = torch.cat([others, others.sum(0, keepdim=True) / many**0.5])
            ties = torch.randperm(many + 1, generator=stream(seed, "ties"))
            assert divided(uploads, 350.0, longest_of(uploads), ties=ties)[0] == {many}


def test_one_upload_made_of_so_many_that_it_is_no_copy_of_any_shares_its_weight():
    others = normal(10, 2000)
    uploads = torch.cat([others, others.sum(0, keepdim=True) / 10**0.5])
    longest = longest_of(uploads)
    out, found = divided(uploads, 350.0, longest)
    assert not out
    products = uploads[:10].double() @ uploads[10].double()
    assert float(found[10]) == pytest.approx(float(products.sum()) / longest**2, rel=1e-4)
    assert float(found[10]) > 2.5
    assert found[:10].tolist() == pytest.approx((products / longest**2).tolist(), rel=1e-4)


def test_the_more_trusted_of_two_stays_however_many_rivals_it_has():
    uploads = vectors({(0, 1): 1.0, (0, 2): 1.0}, 4)
    assert left_out(uploads, 0.5) == {0}
    assert left_out(uploads, 0.5, trust=torch.tensor([2.2, 0.0, 0.0, -7.0])) == {1, 2}
    assert left_out(uploads, 0.5, trust=torch.tensor([0.9, 0.0, 0.0, 0.0])) == {0}, "a small difference is none"


def repeats_by_loops(uploads: torch.Tensor, limit: float, longest: float, stay: list[int]) -> list[float]:
    """How many further uploads each of those who stay is as good as repeated by; 0 for the others."""
    found, rows = [0.0] * len(uploads), uploads.double()
    for i in stay:
        for j in stay:
            product = float(rows[i] @ rows[j])
            if i != j and product > limit:
                found[i] += product / longest**2
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(0.0, 1.0), st.floats(0.0, 0.7))
def test_what_is_shared_by_loops(seed, n, common, limit):
    """Copies are beyond half of the longest's square and beyond the limit; what stays is counted beyond the limit."""
    rng = stream(seed, "shared")
    uploads = torch.randn(n, 12, generator=rng) + 2 * common * torch.randn(12, generator=rng)
    candidates = torch.rand(n, generator=rng) < 0.8
    trust, ties = 3 * torch.randn(n, generator=rng), torch.randperm(n, generator=rng)
    longest = longest_of(uploads)
    out, found = divided(uploads, limit * longest**2, longest, candidates, trust, ties)
    rivals = conflicts_of(uploads, max(limit, 0.5) * longest**2, candidates)
    assert out == in_turns(rivals, in_order(rivals, trust, ties), 2)
    stay = [i for i in range(n) if candidates[i] and i not in out]
    assert found.tolist() == pytest.approx(repeats_by_loops(uploads, limit * longest**2, longest, stay), rel=1e-4)


def test_what_those_say_who_are_not_among_them_does_not_matter():
    """Not even what overflows."""
    uploads = partial_copies(8, 600, 0.6, 1)
    candidates = torch.arange(9) < 6
    longest = longest_of(uploads)
    plain = divided(uploads, 100.0, longest, candidates)
    for huge in (torch.zeros(600), uploads[0], torch.full((600,), 3e38), -torch.full((600,), 3e38)):
        uploads[6:] = huge
        out, repeats = divided(uploads, 100.0, longest, candidates)
        assert out == plain[0]
        assert torch.equal(repeats, plain[1])
    assert plain[1][:6].any()
    assert not plain[1][6:].any()


@st.composite
def any_uploads(draw):
    """(n, d) in float64: independent ones, ones with much in common, copies, opposites, of different lengths."""
    n, d, seed = draw(st.integers(1, 25)), draw(st.integers(1, 30)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    uploads = rng.standard_normal((n, d)) + draw(st.floats(0, 3)) * rng.standard_normal(d)
    uploads[rng.random(n) < draw(st.floats(0, 1))] = uploads[0]
    uploads *= 1 - draw(st.floats(0, 1)) * rng.random((n, 1))
    uploads *= np.where(rng.random((n, 1)) < draw(st.floats(0, 0.5)), -1, 1)
    return uploads, rng.random(n) ** draw(st.sampled_from((0, 1, 5)))


@PROPERTY
@given(any_uploads())
def test_what_several_say_together_is_no_longer_than_what_so_many_would_say_alone(case):
    """The theorem of the module: every positive product counts, and |sum w u|^2 <= L^2 sum w."""
    uploads, odds = case
    longest = max(float(np.linalg.norm(row)) for row in uploads)
    weights = []
    for i in range(len(uploads)):
        others = sum(max(0.0, float(uploads[i] @ uploads[j])) for j in range(len(uploads)) if j != i)
        weights.append(odds[i] / (1 + others / longest**2))
    total = sum(weight * row for weight, row in zip(weights, uploads, strict=True))
    assert float(total @ total) <= longest**2 * sum(weights) * (1 + 1e-9)


@PROPERTY
@given(any_uploads(), st.floats(0.0, 0.6))
def test_with_the_weights_of_the_aggregator_only_what_honest_uploads_may_share_adds_to_that(case, share):
    """Products up to the limit are not counted: they add limit (sum w)^2 at most, less what each has with itself."""
    uploads, odds = torch.tensor(case[0]), torch.tensor(case[1])
    longest, n = longest_of(uploads), len(uploads)
    limit = share * longest**2
    copies, repeats = copying.find_copies(
        uploads, odds >= 0, torch.tensor(limit), longest, torch.zeros(n), torch.arange(n)
    )
    weights = odds * ~copies / (1 + repeats)
    total, said = float((weights @ uploads).square().sum()), float(weights.sum())
    assert total <= (longest**2 * said + limit * (said**2 - float(weights.square().sum()))) * (1 + 1e-6)
    assert total <= (longest**2 + (n - 1) * limit) * said * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5])
def test_uploads_that_all_share_as_much_weigh_together_just_what_so_many_independent_ones_do(share):
    many, longest = 20, 3.0
    gram = longest**2 * (share + (1 - share) * torch.eye(many, dtype=torch.float64))
    uploads = torch.linalg.cholesky(gram)
    out, repeats = divided(uploads, 0.05 * longest**2, longest)
    assert not out
    weights = 1 / (1 + repeats)
    assert float(weights.sum()) == pytest.approx(many / (1 + (many - 1) * share))
    assert float((weights @ uploads).norm() ** 2) == pytest.approx(longest**2 * float(weights.sum()))


def honest_round(n: int, d: int, s: float, chance: float = 2.5e-4) -> tuple[torch.Tensor, float, float]:
    """(uploads with a signal in common, what two may share, how long one may be)"""
    signal = 0.5 * functional.normalize(normal(d, name="signal"), dim=0)
    _, longest = honest_lengths(d, s, 16, 1.0, chance)
    uploads = signal + s * normal(n, d)
    limit = float(copying.largest_product(s, longest, torch.tensor(0.81), chance, n + 30 - 1))
    return uploads, limit, longest


def test_who_leans_on_honest_uploads_gets_none_of_them_left_out():
    """30 Byzantine workers, each with a tenth of all 20 honest uploads, for or against, and as long as these."""
    honest, byzantine, d, share = 20, 30, 25450, 0.1
    uploads, limit, longest = honest_round(honest, d, 0.05)
    length = float(uploads.norm(dim=1).mean())
    for seed in range(3):
        rng = stream(seed, "signs")
        signs = 2.0 * torch.randint(2, (byzantine, honest), generator=rng) - 1
        fresh = length / d**0.5 * torch.randn(byzantine, d, generator=rng)
        leaning = (1 - honest * share**2) ** 0.5 * fresh + share * signs @ uploads
        assert float((leaning.norm(dim=1) / length - 1).abs().max()) < 0.05
        every = torch.cat([uploads, leaning])
        assert float((every[:honest] @ every[honest:].T).amax()) > limit, "it is seen that they lean"
        ties = torch.randperm(honest + byzantine, generator=rng)
        out, repeats = divided(every, limit, longest, trust=torch.zeros(honest + byzantine), ties=ties)
        assert not out
        weights = 1 / (1 + repeats)
        assert float(weights[:honest].min()) > 0.3
        assert float(weights[:honest].sum() / honest) > 0.9 * float(weights[honest:].sum() / byzantine)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 20), st.floats(0.0, 0.4))
def test_whoever_displaces_an_upload_carries_half_of_it(seed, honest, byzantine, limit):
    """Uploads made of honest uploads in any way, as trusted as they like, and none longer than may be."""
    rng = stream(seed, "displaced")
    uploads = torch.randn(honest, 300, generator=rng)
    mixed = torch.randn(byzantine, honest, generator=rng) ** 3 @ uploads + 3 * torch.randn(
        byzantine, 300, generator=rng
    )
    uploads = functional.normalize(torch.cat([uploads, mixed]), dim=1).double()
    n, trust = honest + byzantine, torch.cat([torch.zeros(honest), 7 * torch.rand(byzantine, generator=rng)])
    out, _ = divided(uploads, limit, 1.0, trust=trust, ties=torch.randperm(n, generator=rng))
    for i in out:
        carried = [float(uploads[i] @ uploads[j]) for j in range(n) if j != i]
        assert max(carried) > 0.5
    kept = [i for i in range(honest) if all(float(uploads[i] @ uploads[j]) <= 0.5 for j in range(n) if j != i)]
    assert not out & set(kept)


def test_opposite_uploads_share_nothing_that_counts():
    row = normal(1, 500)
    out, repeats = divided(torch.cat([row, -row, -0.9 * row]), 10.0, float(row.norm()))
    assert out == {2}, "of the two that are alike"
    assert not repeats.any()


def test_more_workers_than_a_group_are_compared_in_groups_and_never_all_at_once():
    n, d = 2 * copying.GROUP + 100, 40
    uploads = normal(n, d)
    uploads[1::2] = uploads[::2]  # pairs of equal ones
    ties = torch.randperm(n, generator=stream(1, "ties"))
    longest = float(uploads.norm(dim=1).min()) * 1.3
    limit, largest = 0.45 * longest**2, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            largest = max(largest, found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

    with Sizes():
        out, repeats = divided(uploads, limit, longest, ties=ties)
    assert largest <= max(copying.GROUP**2, n * d)
    group = {int(i): at // copying.GROUP for at, i in enumerate(ties)}
    for i in range(0, n, 2):
        if group[i] == group[i + 1]:
            assert len({i, i + 1} & out) >= 1, "equal ones in a group"
    assert out, "some pairs meet"
    assert repeats.any(), "and some share less"
    for members in ties.split(copying.GROUP):
        alone, common = divided(uploads[members], limit, longest)
        assert {int(i) for i in members} & out == {int(members[i]) for i in alone}
        stay = [i for i in range(len(members)) if i not in alone]
        wanted = repeats_by_loops(uploads[members], limit, longest, stay)
        assert common.tolist() == pytest.approx(wanted, rel=1e-4)
        scale = (n - 1) / (len(members) - 1)
        assert repeats[members].tolist() == pytest.approx([scale * each for each in wanted], rel=1e-4)


def test_groups_stand_for_everybody_where_many_share_the_same():
    """Of 600 that share a third each weighs about what it would if all were compared."""
    n, share = copying.GROUP + 200, 0.35
    uploads = share**0.5 * normal(1, 4000) + (1 - share) ** 0.5 * normal(n, 4000, name="apart")
    ties = torch.randperm(n, generator=stream(1, "ties"))
    out, repeats = divided(uploads, 0.2 * 4000, longest_of(uploads), ties=ties)
    assert not out
    gram = uploads.double() @ uploads.double().T
    wanted = (gram.sum(1) - gram.diagonal()) / longest_of(uploads) ** 2
    assert repeats.tolist() == pytest.approx(wanted.tolist(), rel=0.05)


def test_honest_uploads_conflict_at_most_at_the_chance():
    """Everybody has the same signal, as long as it can be, which is the worst case."""
    s, d, n, rounds, chance = 0.3, 60, 10, 3000, 0.2
    signal = 0.9 * functional.normalize(normal(d, name="signal"), dim=0)
    uploads = signal + s * normal(rounds, n, d)
    _, high = honest_lengths(d, s, 16, 0.9, 1e-3)
    limit = float(copying.largest_product(s, high, signal.square().sum(), chance, n - 1))
    products = (uploads @ uploads.mT) * (1 - torch.eye(n))
    in_conflict = (products > limit).any(2)
    assert at_most(int(in_conflict.sum()) // 2, rounds * n // 2, chance), "two are in every conflict"
    lower = float(signal.square().sum()) + (limit - float(signal.square().sum())) / 3
    assert int((products > lower).any(2).sum()) > rounds * n * chance, "a third of the width would not do"


def test_the_largest_product_as_a_formula():
    found = copying.largest_product(0.2, 7.0, torch.tensor(0.25), 1e-3, 24)
    width = 0.2 * stats.norm.isf(1e-3 / 96)
    assert float(found) == pytest.approx(0.25 + width * (7.0 + 0.5), rel=1e-6)
    alone = copying.largest_product(0.2, 7.0, torch.tensor(0.25), 1e-3, 0)
    assert float(alone) == pytest.approx(0.25 + 0.2 * stats.norm.isf(1e-3 / 4) * 7.5, rel=1e-6)
