"""The paper's filter against a loop that follows Algorithms 2 and 3 line by line, and what its verdict says."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from noisegate.aggregators import TwoStage
from noisegate.errors import SpecError
from noisegate.protocol.intake import receive
from noisegate.streams import stream
from noisegate.views import Reason, ServerView
from oracles import FilterGradient

D, S = 800, 0.5
CLOSE = 1e-5
"""Relative error of float32 sums of a few hundred products against float64."""


def view_of(uploads, auxiliary, top: int, ties=None, s: float = S, missing=None) -> ServerView:
    """missing: who did not send what `uploads` has for it."""
    if missing is not None:
        missing = torch.tensor([i in missing for i in range(len(uploads))])
        uploads = torch.where(missing[:, None], torch.nan, uploads)
    received, norms, present, _ = receive(uploads, len(uploads), uploads.shape[1], like=auxiliary)
    return ServerView(
        uploads=received,
        norms=norms,
        present=present,
        noise_std=s,
        believed_honest=top,
        auxiliary=lambda normalized: (normalize(auxiliary, dim=1) if normalized else auxiliary).mean(0),
        ties=torch.arange(len(uploads)) if ties is None else ties,
        missing=missing,
    )


def round_of_uploads(t: int, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with signals for and against the server's gradient, and uploads that each test must refuse."""
    rng = stream(t, "uploads")
    auxiliary = torch.randn(6, D, generator=rng) * torch.rand(6, 1, generator=rng) + 0.3
    direction = auxiliary.mean(0) / auxiliary.mean(0).norm()
    uploads = S * torch.randn(n, D, generator=rng)
    uploads += torch.linspace(-1, 1, n)[torch.randperm(n, generator=rng), None] * direction
    kinds = torch.randperm(n, generator=rng)
    uploads[kinds[0]] *= 1.4  # too long
    uploads[kinds[1]] *= 0.7  # too short
    uploads[kinds[2]] = S * torch.randn(D, generator=rng).sign()  # right length, wrong distribution
    uploads[kinds[3]] = torch.nan if t % 2 else torch.inf
    uploads[kinds[4]] = 0.0
    uploads[kinds[5]] = uploads[kinds[6]]  # a tie
    return uploads, auxiliary


SETTINGS = [
    {},
    {"stages": 1},
    {"stages": 2},
    {"divisor": "workers"},
    {"server_momentum": 0.7},
    {"server_gradient": "normalized"},
    {"stages": 2, "divisor": "workers", "server_momentum": 0.3, "server_gradient": "normalized"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("top", [1, 4, 12])
@pytest.mark.parametrize("absences", [False, True])
def test_two_stage_is_the_loop_over_the_printed_algorithms(settings, top, absences):
    """absences: in some rounds some uploads are missing, in one nobody's and in one everybody's."""
    aggregator, state = TwoStage(**settings), {}
    oracle = FilterGradient(
        S,
        top,
        stages=aggregator.stages,
        normalize=aggregator.server_gradient == "normalized",
        server_momentum=aggregator.server_momentum,
        divide_by_all=aggregator.divisor == "workers",
    )
    seen = set()
    missing_in = [[2], [0, 5, 7], [], None, [5, 7], list(range(12)), [11, 2, 3, 4], [1]]
    for t in range(8):
        uploads, auxiliary = round_of_uploads(t)
        ties = torch.randperm(len(uploads), generator=stream(t, "ties"))
        missing = missing_in[t] if absences else None
        view = view_of(uploads, auxiliary, top, ties, missing=missing)
        verdict = aggregator(view, state)
        state = verdict.state
        update, kept, scores = oracle.round(
            view.uploads.double().numpy(),
            view.present.tolist(),
            auxiliary.double().numpy(),
            ties.tolist(),
            missing or (),
        )
        assert verdict.kept.tolist() == kept
        np.testing.assert_allclose(verdict.update, update, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(verdict.score, scores, rtol=CLOSE, atol=CLOSE * 100)
        seen |= {Reason(code) for code in verdict.reason.tolist()}
    first = set() if aggregator.stages == 2 else {Reason.NORM, Reason.DISTRIBUTION}
    second = set() if aggregator.stages == 1 or top == 12 else {Reason.SCORE}
    assert seen == {Reason.KEPT, Reason.MALFORMED} | first | second | ({Reason.MISSING} if absences else set())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_verdict_tells_the_truth(settings):
    aggregator, state = TwoStage(**settings), {}
    for t in range(4):
        uploads, auxiliary = round_of_uploads(t)
        verdict = aggregator(view_of(uploads, auxiliary, 5), state)
        state = verdict.state
        assert torch.equal(verdict.kept, verdict.reason == Reason.KEPT.value)
        rows = uploads[verdict.kept]
        count = len(uploads) if aggregator.divisor == "workers" else len(rows)
        torch.testing.assert_close(verdict.update, rows.sum(0) / count, rtol=CLOSE, atol=CLOSE)
        malformed = ~uploads.isfinite().all(1)
        assert torch.equal(verdict.reason == Reason.MALFORMED.value, malformed)
        assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_each_bad_upload_gets_its_reason():
    good = S * torch.randn(4, D, generator=stream(8, "good"))
    bad = torch.stack([1.4 * good[0], 0.7 * good[0], torch.full((D,), S), torch.full((D,), torch.nan), torch.zeros(D)])
    verdict = TwoStage(stages=1)(view_of(torch.cat([good, bad]), torch.ones(2, D), 4), {})
    wanted = [Reason.KEPT] * 4 + [Reason.NORM, Reason.NORM, Reason.DISTRIBUTION, Reason.MALFORMED, Reason.NORM]
    assert verdict.reason.tolist() == wanted
    assert not verdict.score.any()


@pytest.mark.parametrize("settings", [{}, {"stages": 1}, {"divisor": "workers"}], ids=str)
def test_if_nobody_passes_the_update_is_zero_and_nobody_is_kept(settings):
    verdict = TwoStage(**settings)(view_of(torch.zeros(5, D), torch.ones(2, D), 3), {})
    assert torch.equal(verdict.update, torch.zeros(D))
    assert not verdict.kept.any()
    verdict = TwoStage(**settings)(view_of(torch.full((5, D), torch.nan), torch.ones(2, D), 3), {})
    assert torch.equal(verdict.update, torch.zeros(D))
    assert (verdict.reason == Reason.MALFORMED.value).all()


def scored(*scores: float) -> torch.Tensor:
    """Uploads of two coordinates whose inner product with the server's gradient (1, 0) is as given."""
    return torch.tensor([[score, 1.0] for score in scores])


AXIS = torch.tensor([[1.0, 0.0]])


def test_scores_below_the_mean_of_the_top_are_set_to_zero_and_the_rest_adds_up():
    aggregator = TwoStage(stages=2)
    first = aggregator(view_of(scored(4, 2, 1, -3), AXIS, 2), {})
    assert first.score.tolist() == [4, 0, 0, 0]  # the mean of the top two is 3
    second = aggregator(view_of(scored(0, 5, 6, 1), AXIS, 2), first.state)
    assert second.score.tolist() == [4, 0, 6, 0]  # 5 lies below 5.5
    assert second.kept.tolist() == [True, False, True, False]


def test_where_all_scores_are_negative_those_above_the_mean_count_as_they_are():
    verdict = TwoStage(stages=2)(view_of(scored(-1, -3, -4), AXIS, 2), {})
    assert verdict.score.tolist() == [-1, 0, 0]  # as printed: the mean is -2, and what lies below becomes 0
    assert verdict.kept.tolist() == [False, True, True]


def test_a_selected_worker_whose_upload_fails_stage_one_today_is_not_used():
    good = S * torch.randn(4, D, generator=stream(9, "good"))
    aggregator, auxiliary = TwoStage(), good[:1].clone()
    first = aggregator(view_of(good, auxiliary, 1), {})
    assert first.kept.tolist() == [True, False, False, False]
    second = aggregator(view_of(torch.cat([3 * good[:1], good[1:]]), auxiliary, 1), first.state)
    assert second.reason.tolist() == [Reason.NORM, Reason.SCORE, Reason.SCORE, Reason.SCORE]
    assert torch.equal(second.update, torch.zeros(D))
    assert second.score[0] == first.score[0] > 0  # it scored zero today, and keeps what it had


def totals(misses=lambda t, i: False, first: float | None = None, rounds: int = 60, n: int = 20) -> torch.Tensor:
    """(n,) after so many rounds in which scores are 1 with a deviation of 0.5, and the top 15 are selected.

    misses(t, i): whether worker i stays away. first: what the last worker scores in the first round.
    """
    aggregator, state = TwoStage(stages=2), {}
    for t in range(rounds):
        scores = 1 + 0.5 * torch.randn(n, generator=stream(t, "scores"))
        scores[-1] = first if first is not None and t == 0 else scores[-1]
        missing = [i for i in range(n) if misses(t, i)]
        ties = torch.randperm(n, generator=stream(t, "ties"))
        verdict = aggregator(view_of(scored(*scores.tolist()), AXIS, 15, ties, missing=missing), state)
        state = verdict.state
    return verdict.score


def test_absence_costs_an_honest_worker_little():
    """Whoever misses 20 of 60 rounds has within 10 % of the total that it would have had, on average over workers.

    What one worker would have scored in 20 rounds is a lottery: a score below the mean of the top counts for nothing.
    """
    always = totals()
    for misses in (lambda t, i: t % 3 == 2, lambda t, i: t < 20, lambda t, i: 20 <= t < 40, lambda t, i: t >= 40):
        found = [float(totals(lambda t, i, j=j, misses=misses: i == j and misses(t, i))[j]) for j in range(20)]
        assert sum(found) == pytest.approx(float(always.sum()), rel=0.1)


def test_nobody_gains_by_staying_away_after_a_lucky_round():
    """A high score counts once. For every round that its worker misses, it gets no more than selected ones do."""
    for luck in (3.0, 50.0):
        stays_away = totals(lambda t, i: i == 19 and t > 0, luck)
        assert float(stays_away[19]) - luck <= float(stays_away[:19].topk(15).values.mean())
    assert float(totals(lambda t, i: i == 19)[19]) == 0, "who never sent anything has no mean"


def test_what_is_credited_is_the_own_mean_but_no_more_than_those_with_the_highest_totals_get():
    aggregator = TwoStage(stages=2)
    first = aggregator(view_of(scored(6, 6, 2, 1), AXIS, 2, missing=[]), {})
    assert first.score.tolist() == [6, 6, 0, 0]
    second = aggregator(view_of(scored(9, 8, 4, 2), AXIS, 2, missing=[0]), first.state)
    # Of those that are there, workers 1 and 2 have the highest totals, by ties. They get 8, and 0 for what is below 6.
    assert second.score.tolist() == [10, 14, 0, 0]
    assert second.reason.tolist() == [Reason.MISSING, Reason.KEPT, Reason.KEPT, Reason.SCORE]
    third = aggregator(view_of(scored(9, 8, 40, 40), AXIS, 2, missing=[0, 1]), second.state)
    # 6 and two rounds at its mean of 6, of at most 4 + 40; 14 and one round at its mean of 7.
    assert third.score.tolist() == [18, 21, 40, 40]
    assert third.kept.tolist() == [False, False, True, False]  # half of the two that arrived


def test_a_missing_worker_takes_no_place_among_the_best():
    """Its total is the highest, and of those that are there the same share is selected as always."""
    aggregator = TwoStage(stages=2)
    first = aggregator(view_of(scored(9, 9, 9, 1), AXIS, 3), {})
    assert first.score.tolist() == [9, 9, 9, 0]
    for missing, kept in (([0], [1, 2]), ([0, 1], [2]), ([0, 1, 2], [3]), ([0, 1, 2, 3], [])):
        verdict = aggregator(view_of(scored(0, 0, 0, 1), AXIS, 2, missing=missing), first.state)
        assert verdict.kept.nonzero().flatten().tolist() == kept
    malformed = aggregator(view_of(torch.cat([scored(0) * torch.nan, scored(0, 0, 1)]), AXIS, 2), first.state)
    assert int(malformed.kept.sum()) == 1, "a malformed upload keeps the place of its sender, as printed"


def test_ties_go_by_the_given_order_and_not_by_position():
    for ties in itertools.permutations(range(4)):
        view = view_of(scored(1, 1, 1, 1), AXIS, 2, ties=torch.tensor(ties))
        assert set(TwoStage(stages=2)(view, {}).kept.nonzero().flatten().tolist()) == set(ties[:2])


def test_the_servers_momentum_is_a_moving_average_of_its_gradient():
    aggregator = TwoStage(stages=2, server_momentum=0.75)
    first = aggregator(view_of(scored(1, 2), torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1), {})
    assert first.state["gradient"].tolist() == [2.0, 0.0]
    second = aggregator(view_of(scored(1, 2), torch.tensor([[0.0, 4.0]]), 1), first.state)
    assert second.state["gradient"].tolist() == [1.5, 1.0]


def test_a_normalized_server_gradient_weighs_every_example_alike():
    auxiliary = torch.tensor([[100.0, 0.0], [0.0, 0.01]])
    verdict = TwoStage(stages=2, server_gradient="normalized")(view_of(scored(1, 2), auxiliary, 1), {})
    assert verdict.state["gradient"].tolist() == [0.5, 0.5]
    plain = TwoStage(stages=2)(view_of(scored(1, 2), auxiliary, 1), {})
    assert plain.state["gradient"].tolist() == pytest.approx([50.0, 0.005])


def test_the_aggregator_leaves_its_view_and_state_alone():
    uploads, auxiliary = round_of_uploads(1)
    view = view_of(uploads, auxiliary, 5)
    state = TwoStage()(view, {}).state
    before = view.uploads.clone(), {key: value.clone() for key, value in state.items()}
    TwoStage(server_momentum=0.5)(view, state)
    assert torch.equal(view.uploads, before[0])
    assert all(torch.equal(state[key], value) for key, value in before[1].items())


@pytest.mark.parametrize(
    "bad",
    [
        {"stages": 3},
        {"server_gradient": "median"},
        {"divisor": "none"},
        {"server_momentum": 1.0},
        {"width": 0.0},
        {"significance": 0.0},
        {"significance": 1.0},
    ],
    ids=str,
)
def test_nonsense_is_refused(bad):
    with pytest.raises(SpecError, match=next(iter(bad))):
        TwoStage(**bad)


def test_equal_scores_are_not_below_their_own_mean():
    """In float32 the mean of k equal numbers can come out above them; all scores would be thrown away."""
    n, d = 7, 4
    for seed in range(200):
        size = float(torch.rand(1, generator=stream(seed, "equal")))
        uploads = torch.zeros(n, d)
        uploads[:, 0] = size  # times one: every score is exactly this
        view = ServerView(
            uploads=uploads,
            norms=uploads.norm(dim=1),
            present=torch.ones(n, dtype=torch.bool),
            noise_std=1.0,
            believed_honest=n,
            auxiliary=lambda normalized: torch.eye(1, d)[0],
            ties=torch.arange(n),
        )
        assert torch.equal(TwoStage(stages=2)(view, {}).score, uploads[:, 0])
