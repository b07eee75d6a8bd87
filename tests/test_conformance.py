"""What holds for every aggregator and every attack. A new entry of a catalog is tested from its first day.

Inputs are small, but of the kind that a round makes: uploads are noise plus a little signal, and pass `receive`.
"""

import io
import itertools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from noisegate import Compute, SpecError, TwoStage, run
from noisegate.aggregators import AGGREGATORS, Krum
from noisegate.attacks import ATTACKS, Dormant, Honest, Inner, LabelFlip, OnOff, RankMatched, ScoreBanking, Zero
from noisegate.attacks.honest import Forger
from noisegate.catalog import build
from noisegate.protocol.intake import as_rows, receive
from noisegate.roles import Aggregator
from noisegate.runs.setup import prepare
from noisegate.simulate import first_state, play
from noisegate.streams import stream
from noisegate.views import KNOWS, AdversaryView, DataView, Reason, ServerView, Verdict

N, D, BELIEVED, NOISE_STD = 12, 600, 5, 0.15
LIKE = torch.zeros(D)

# A mean of up to 12 float32 rows, added up in another order, moves by a few units in the last place of values below 1.
REORDERED = 1e-6

# Aggregators whose update is no weighted mean of uploads: they take each coordinate on its own. The default of nnm has
# such an aggregator inside.
NO_WEIGHTED_MEAN = {
    "bulyan",
    "median",
    "trimmed-mean",
    "sign-vote",
    "sign-gaussian",
    "sign-randomized",
    "ma-sign",
    "nnm",
}

SETTINGS = [
    *(
        {"name": "two-stage", **settings}
        for settings in (
            {"stages": 1},
            {"stages": 2},
            {"server_gradient": "normalized"},
            {"server_momentum": 0.9},
            {"divisor": "workers"},
            {"stages": 2, "server_gradient": "normalized", "server_momentum": 0.5, "divisor": "workers"},
        )
    ),
    {"name": "nnm", "aggregator": "multi-krum"},
    {"name": "bucketing", "aggregator": "krum", "size": 3},
]
BUILDERS = {name: partial(build, "aggregator", name, AGGREGATORS) for name in AGGREGATORS} | {
    " ".join(map(str, settings.values())): partial(build, "aggregator", settings, AGGREGATORS) for settings in SETTINGS
}

HONEST, BYZANTINE, CLASSES = 9, 6, 10
TIMES = (0.0, 0.5, 0.99)


@pytest.fixture(params=BUILDERS)
def aggregator(request):
    return BUILDERS[request.param]()


@pytest.fixture(params=ATTACKS)
def attack(request):
    return build("attack", request.param, ATTACKS)


# --- aggregators ------------------------------------------------------------------------------------------------


def honest_uploads(seed: int, n: int = N) -> torch.Tensor:
    rng = stream(seed, "uploads")
    signal = torch.randn(D, generator=rng) / D**0.5
    return 0.3 * signal + NOISE_STD * torch.randn(n, D, generator=rng)


TENSORS = ("uploads", "norms", "present", "ties", "last")


def server_view(uploads, seed: int = 0, believed: int = BELIEVED, missing=None) -> ServerView:
    """What everyone sent last is made of what they send now, so that it goes with them if they change places.

    missing: which workers' uploads did not arrive, whatever `uploads` has for them.
    """
    n = len(uploads)
    if missing is not None:
        missing = torch.tensor([i in missing for i in range(n)])
        uploads = torch.where(missing[:, None], torch.nan, uploads)
    rows, norms, present, _ = receive(uploads, n, D, LIKE)
    gradients = torch.randn(20, D, generator=stream(seed, "auxiliary"))
    ties = torch.randperm(n, generator=stream(seed, "ties"))
    own = torch.nn.functional.normalize(gradients, dim=1) / 2
    both = torch.cat([own, own.roll(1, 0)])  # with their labels, and with those of their neighbors
    known = {"strata": 10, "labels": 10, "last": rows.roll(D // 3, 1), "missing": missing}
    known["contributions"] = lambda shift: both
    return ServerView(rows, norms, present, NOISE_STD, believed, mean_of(gradients), ties, **known)


def mean_of(gradients: torch.Tensor):
    """What the server's examples say, from their gradients."""
    return lambda normalized: (torch.nn.functional.normalize(gradients, dim=1) if normalized else gradients).mean(0)


def same(left: Verdict, right: Verdict) -> bool:
    names = ("update", "kept", "reason", "score", "weights")
    pairs = [(getattr(left, name), getattr(right, name)) for name in names]
    pairs += [(left.state[key], right.state[key]) for key in left.state]
    return left.state.keys() == right.state.keys() and all(torch.equal(*pair) for pair in pairs)


def sound(view: ServerView, verdict: Verdict) -> None:
    """What holds of every verdict."""
    n = len(view.uploads)
    assert verdict.update.shape == (D,)
    assert verdict.update.dtype == view.uploads.dtype
    assert bool(verdict.update.isfinite().all())
    assert verdict.kept.shape == verdict.reason.shape == verdict.score.shape == verdict.weights.shape == (n,)
    assert verdict.kept.dtype == torch.bool
    assert torch.equal(verdict.kept, verdict.reason == Reason.KEPT)
    assert set(verdict.reason.tolist()) <= {int(reason) for reason in Reason}
    missing = torch.zeros(n, dtype=torch.bool) if view.missing is None else view.missing
    assert torch.equal(verdict.reason == Reason.MISSING, missing)
    assert torch.equal(verdict.reason == Reason.MALFORMED, ~view.present & ~missing)
    assert bool(verdict.score.isfinite().all())
    assert bool(verdict.weights.isfinite().all())
    assert bool((verdict.weights >= 0).all())
    assert not bool(verdict.weights[~verdict.kept].any())
    assert float(verdict.weights.double().sum()) == pytest.approx(float(verdict.kept.any()), abs=1e-5)
    if not bool(verdict.kept.any()):
        assert not bool(verdict.update.any())


# Well-formed are those whose length is finite: 1e17 and 1e18.
GARBAGE = (torch.nan, torch.inf, -torch.inf, 1e17, 1e18, 1e30, 1e38, -1e38, 0.0, 1e-38)


def test_garbage_cannot_make_the_update_infinite(aggregator):
    for value, rows in itertools.product(GARBAGE, (1, 4, N)):
        uploads = honest_uploads(1)
        uploads[:rows] = value
        view = server_view(uploads)
        sound(view, aggregator(view, {}))


def test_one_wrong_coordinate_makes_an_upload_malformed(aggregator):
    verdicts = []
    for value in (torch.nan, -torch.inf, 1e38):
        uploads = honest_uploads(2)
        uploads[3, D // 2] = value
        view = server_view(uploads)
        verdicts.append(aggregator(view, {}))
        sound(view, verdicts[-1])
        assert verdicts[-1].reason[3] == Reason.MALFORMED
    assert same(verdicts[0], verdicts[1]), "what a malformed upload holds matters"
    assert same(verdicts[0], verdicts[2]), "what a malformed upload holds matters"


def test_rows_of_the_wrong_shape_count_as_malformed(aggregator):
    uploads = list(honest_uploads(4))
    uploads[0], uploads[5], uploads[7] = None, torch.zeros(D + 1), torch.zeros(D, dtype=torch.complex64)
    view = server_view(uploads)
    verdict = aggregator(view, {})
    sound(view, verdict)
    assert (verdict.reason == Reason.MALFORMED).nonzero().flatten().tolist() == [0, 5, 7]


def test_a_missing_upload_is_not_malformed(aggregator):
    """Over the rounds, one missing, some of each kind, nobody missing, and all."""
    state: dict = {}
    for seed, missing in enumerate(([3], [0, 7], [], list(range(N)), [3, 4, 5])):
        uploads = honest_uploads(seed)
        uploads[4], uploads[8] = torch.nan, 40.0
        view = server_view(uploads, seed, missing=missing)
        verdict = aggregator(view, state)
        sound(view, verdict)
        state = dict(verdict.state)


RANKS_THE_PRESENT = {name for name, make in BUILDERS.items() if isinstance(make(), TwoStage) and make().stages != 1}
"""Aggregators in which a malformed upload takes a place among the best, and a missing one does not."""


@pytest.mark.parametrize("name", BUILDERS)
def test_the_others_are_judged_as_if_the_missing_were_malformed(name):
    """Or, where a malformed upload takes a place among the best, as if the missing workers did not exist."""
    uploads, missing = honest_uploads(11), [2, 6]
    others = [i for i in range(N) if i not in missing]
    view = server_view(uploads, missing=missing)
    verdict = BUILDERS[name]()(view, {})
    if name in RANKS_THE_PRESENT:
        ties = torch.tensor([others.index(i) for i in view.ties.tolist() if i in others])
        without = BUILDERS[name]()(replace(server_view(uploads[others]), ties=ties), {})
        share = 1.0 if BUILDERS[name]().divisor == "selected" else len(others) / N
        torch.testing.assert_close(verdict.update, without.update * share, atol=REORDERED, rtol=REORDERED)
        found = {part: getattr(without, part) for part in ("kept", "reason", "score", "weights")}
    else:
        malformed = BUILDERS[name]()(replace(view, missing=None), {})
        assert torch.equal(verdict.update, malformed.update)
        found = {part: getattr(malformed, part)[others] for part in ("kept", "reason", "score", "weights")}
    for part, expected in found.items():
        torch.testing.assert_close(getattr(verdict, part)[others], expected, atol=REORDERED, rtol=REORDERED)


def test_if_nobody_is_missing_it_does_not_matter_how_that_is_said(aggregator):
    state: dict = {}
    for seed in range(3):
        verdict = aggregator(server_view(honest_uploads(seed), seed), state)
        assert same(verdict, aggregator(server_view(honest_uploads(seed), seed, missing=[]), state))
        state = dict(verdict.state)


def test_aggregators_leave_their_inputs_alone(aggregator):
    state: dict = {}
    for seed in range(3):
        view = server_view(honest_uploads(seed), seed, missing=[seed])
        answers = [view.auxiliary(False), view.auxiliary(True), view.contributions(torch.tensor(1))]
        view = replace(view, auxiliary=answers.__getitem__, contributions=lambda shift, answers=answers: answers[2])
        handed = [getattr(view, name) for name in (*TENSORS, "missing")] + answers + list(state.values())
        before, names = [tensor.clone() for tensor in handed], list(state)
        verdict = aggregator(view, state)
        assert all(map(torch.equal, handed, before))
        assert list(state) == names
        state = dict(verdict.state)


def test_the_same_view_and_a_saved_state_give_the_same_verdict(aggregator):
    state: dict = {}
    for seed in range(2):
        state = dict(aggregator(server_view(honest_uploads(seed), seed), state).state)
    assert all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    first, again = (server_view(honest_uploads(9), 9) for _ in range(2))
    assert same(aggregator(first, state), aggregator(again, loaded))


def test_the_order_of_the_workers_does_not_matter(aggregator):
    """Three rounds, with malformed, missing and absurd uploads among them, in two orders of the workers."""
    order = torch.randperm(N, generator=stream(0, "order"))
    place = torch.argsort(order)  # where each worker stands in the second order
    state: dict = {}
    state_too: dict = {}
    for seed in range(3):
        uploads, missing = honest_uploads(seed), [2, 3 + seed]
        uploads[1], uploads[9], uploads[8] = torch.nan, 0.0, 7.0
        view = server_view(uploads, seed, missing=missing)
        moved_view = server_view(uploads[order], seed, missing=place[missing].tolist())
        verdict = aggregator(view, state)
        moved = aggregator(replace(moved_view, ties=place[view.ties]), state_too)
        assert torch.equal(verdict.kept[order], moved.kept)
        assert torch.equal(verdict.reason[order], moved.reason)
        for part in ("score", "weights"):
            expected = getattr(verdict, part)[order]
            torch.testing.assert_close(expected, getattr(moved, part), atol=REORDERED, rtol=REORDERED)
        torch.testing.assert_close(verdict.update, moved.update, atol=REORDERED, rtol=REORDERED)
        state, state_too = dict(verdict.state), dict(moved.state)


def test_equal_workers_are_told_apart_by_the_ties_alone(aggregator):
    """All send the same: whoever is kept must change with the random order, never with the position."""
    view = server_view(honest_uploads(7)[:1].repeat(N, 1))
    verdict = aggregator(view, {})
    turned = aggregator(replace(view, ties=view.ties.roll(1)), {})
    kept = int(verdict.kept.sum())
    if 0 < kept < N:
        assert not torch.equal(verdict.kept, turned.kept)
        assert set(verdict.kept.nonzero().flatten().tolist()) == set(view.ties[:kept].tolist())


def weighted_sum(name: str, view: ServerView, verdict: Verdict, state) -> torch.Tensor:
    """(d,) float64, the update that the weights stand for."""
    rows, weights = view.uploads.double(), verdict.weights.double()
    if name == "fltrust":  # which scales every upload to the length of the server's gradient
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30) * view.auxiliary(False).double().norm()
    if name == "centered-clipping":  # which has its center in the mean, for all that clipping takes from the uploads
        left = verdict.score.double().sum() / view.present.sum()
        return left * weights @ rows + (1 - left) * state.get("center", LIKE)
    share = int(verdict.kept.sum()) / N if name.startswith("two-stage") and "workers" in name else 1.0
    return share * weights @ rows


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in NO_WEIGHTED_MEAN])
def test_the_update_is_the_weighted_sum_of_what_was_kept(name):
    aggregator = BUILDERS[name]()
    state: dict = {}
    kept_any = False
    for seed in range(4):
        uploads = honest_uploads(seed)
        uploads[2], uploads[6] = torch.nan, 0.5
        view = server_view(uploads, seed, missing=[9])
        verdict = aggregator(view, state)
        expected = weighted_sum(name, view, verdict, state)
        torch.testing.assert_close(verdict.update.double(), expected, atol=REORDERED, rtol=10 * REORDERED)
        state, kept_any = dict(verdict.state), kept_any or bool(verdict.kept.any())
    assert kept_any, "the aggregator keeps nobody of mostly honest workers"


def test_any_number_of_workers(aggregator):
    for n, believed in ((1, 1), (2, 1), (N, 1), (N, N)):
        view = server_view(honest_uploads(8, n), believed=believed)
        sound(view, aggregator(view, {}))


def test_two_stage_never_uses_more_than_it_believes_honest():
    for name in RANKS_THE_PRESENT:
        for missing in (None, [0, 1, 2, 3], list(range(9))):
            verdict = BUILDERS[name]()(server_view(honest_uploads(10), missing=missing), {})
            assert 0 < int(verdict.kept.sum()) <= BELIEVED, name


# --- what a server receives ----------------------------------------------------------------------------------------

GOOD = torch.arange(4.0)
ANYTHING = {
    "None": (None, []),
    "text": ("uploads", []),
    "number": (3.0, []),
    "object": (object(), []),
    "dict": ({0: GOOD}, []),
    "empty list": ([], []),
    "scalar": (torch.tensor(1.0), []),
    "empty": (torch.empty(0), []),
    "vector": (GOOD, []),
    "tensor": (GOOD.repeat(3, 1), [0, 1, 2]),
    "needs grad": (GOOD.repeat(3, 1).requires_grad_(), [0, 1, 2]),
    "transposed": (GOOD.repeat(3, 1).T.contiguous(), []),
    "too many": (GOOD.repeat(5, 1), [0, 1, 2]),
    "too few": (GOOD.repeat(2, 1), [0, 1]),
    "too wide": (torch.zeros(3, 5), []),
    "3-d": (torch.zeros(3, 4, 1), []),
    "float64": (GOOD.repeat(3, 1).double(), [0, 1, 2]),
    "float64 beyond float32": (torch.full((3, 4), 1e300, dtype=torch.float64), []),
    "half": (GOOD.repeat(3, 1).half(), [0, 1, 2]),
    "int": (torch.ones(3, 4, dtype=torch.int64), [0, 1, 2]),
    "bool": (torch.ones(3, 4, dtype=torch.bool), [0, 1, 2]),
    "complex": (torch.zeros(3, 4, dtype=torch.complex64), []),
    "nan": (torch.full((3, 4), torch.nan), []),
    "mixed": ([GOOD, None, "x"], [0]),
    "tuple": ((GOOD, torch.zeros(5), GOOD), [0, 2]),
    "nested lists": ([[0.0, 1.0, 2.0, 3.0]] * 3, []),
    "list of columns": ([torch.zeros(4, 1)] * 3, []),
    "list of nan": ([GOOD, torch.full((4,), torch.inf), GOOD], [0, 2]),
    "generator": ((row for row in [GOOD]), []),
    "array": (GOOD.repeat(3, 1).numpy(), []),
    "list of arrays": ([GOOD.numpy()] * 3, []),
}


def test_receive_takes_anything():
    for name, (sent, well_formed) in ANYTHING.items():
        rows, norms, present, _ = receive(sent, 3, 4, torch.zeros(4))
        assert rows.shape == (3, 4), name
        assert rows.dtype == torch.float32, name
        assert not rows.requires_grad, name
        assert bool(rows.isfinite().all()), name
        assert present.nonzero().flatten().tolist() == well_formed, name
        assert torch.equal(norms, torch.linalg.vector_norm(rows, dim=1)), name
        assert not bool(rows[~present].any()), name


def test_receive_takes_unusual_tensors():
    unusual = torch.zeros(3, 4).to_sparse(), torch.zeros(3, 4, device="meta")
    for sent in (*unusual, [unusual[0][0]] * 3, [unusual[1][0]] * 3):
        rows, _, _, _ = receive(sent, 3, 4, torch.zeros(4))
        assert rows.shape == (3, 4)
        assert bool(rows.isfinite().all())


def test_receive_leaves_what_was_sent_alone():
    sent = torch.tensor([[1.0, torch.nan], [3.0, 4.0]])
    before = sent.clone()
    rows, norms, present, _ = receive(sent, 2, 2, torch.zeros(2))
    assert torch.equal(sent.isnan(), before.isnan())
    assert rows.tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert norms.tolist() == [0.0, 5.0]
    assert present.tolist() == [False, True]


def test_as_rows_marks_what_it_cannot_read():
    rows = as_rows([GOOD, None], 3, 4, torch.zeros(4))
    assert torch.equal(rows[0], GOOD)
    assert bool(rows[1:].isnan().all())


# --- attacks -------------------------------------------------------------------------------------------------------


def adversary_view(
    attack, progress: float = 0.0, honest: int = HONEST, byzantine: int = BYZANTINE, seed: int = 0
) -> AdversaryView:
    """What the attack is shown at this point of a run."""
    uploads = honest_uploads(seed, honest + byzantine)
    order = torch.randperm(honest + byzantine, generator=stream(seed, "places"))
    gradient = mean_of(torch.randn(20, D, generator=stream(seed, "known")))

    def judge(forged: torch.Tensor) -> Verdict:
        sent = uploads.index_copy(0, order[honest:], forged)
        return Krum()(server_view(sent, seed), {})

    return AdversaryView(
        workers=byzantine,
        see_honest=lambda: uploads[order[:honest]],
        see_own=lambda: uploads[order[honest:]],
        params=torch.ones(D),
        noise_std=NOISE_STD,
        phase=attack.phase(progress),
        stream=partial(stream, seed, "attack"),
        judge=judge,
        see_gradient=gradient,
        knows=attack.knows,
    )


def forged_by(attack, view: AdversaryView) -> torch.Tensor:
    """What the attack's workers send if this is what it is shown."""
    forged = attack.forge(view)
    if forged is None:
        assert attack.needs_own(view.phase), "sends what was not computed"
        return view.own
    return forged


def same_uploads(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, or not a number in the same places."""
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", ATTACKS)
def test_forged_uploads_have_the_right_form(name):
    attack = build("attack", name, ATTACKS)
    for progress, (honest, byzantine) in itertools.product(TIMES, ((HONEST, BYZANTINE), (1, 1), (1, 5), (7, 1))):
        forged = forged_by(attack, adversary_view(attack, progress, honest, byzantine))
        assert forged.shape == (byzantine, D)
        assert forged.dtype == torch.float32
        assert bool(forged.isfinite().all()) or name == "nan"


def test_what_an_attack_sends_follows_from_its_view_alone(attack):
    """The same view and stream, the same upload; and what it says it does not read, it does not read."""
    for progress in TIMES:
        view = adversary_view(attack, progress)
        forged = forged_by(attack, view)
        assert same_uploads(forged, forged_by(attack, adversary_view(attack, progress)))
        if not attack.needs_own(view.phase):
            other = replace(adversary_view(attack, progress), see_own=lambda: torch.full((BYZANTINE, D), torch.nan))
            assert same_uploads(forged, forged_by(attack, other))


def test_phases_are_few_and_comparable(attack):
    """A round is prepared once for each phase."""
    phases = [attack.phase(t / 1000) for t in range(1000)]
    assert 1 <= len(set(phases)) <= 4
    assert phases == [attack.phase(t / 1000) for t in range(1000)]


def test_poisoned_data_is_still_data(attack):
    for progress, classes, examples in itertools.product(TIMES, (2, 3, CLASSES), (1, 40)):
        rng = stream(1, "data")
        x = torch.rand(examples, 1, 8, 8, generator=rng)
        y = torch.randint(classes, (examples,), generator=rng)
        kept_x, kept_y = x.clone(), y.clone()
        bad_x, bad_y = attack.poison(x, y, DataView(classes, attack.phase(progress), partial(stream, 1, "poison")))
        assert torch.equal(x, kept_x)
        assert torch.equal(y, kept_y)
        assert (bad_x.shape, bad_x.dtype) == (x.shape, x.dtype)
        assert (bad_y.shape, bad_y.dtype) == (y.shape, y.dtype)
        assert 0 <= int(bad_y.min()) <= int(bad_y.max()) < classes
        assert bool(bad_x.isfinite().all())
        again = attack.poison(x, y, DataView(classes, attack.phase(progress), partial(stream, 1, "poison")))
        assert torch.equal(again[0], bad_x)
        assert torch.equal(again[1], bad_y)


def test_attacks_exist_for_some_numbers(attack):
    attack.check(honest=4, byzantine=BYZANTINE)


# --- what an attack knows ------------------------------------------------------------------------------------------


def uses(attack, knows: str) -> bool:
    """Whether at some time the attack reads something of its view that is refused to those who know so much."""
    for progress in TIMES:
        view = replace(adversary_view(attack, progress), knows=knows)
        try:
            if attack.forge(view) is None and knows == "blind":
                return True  # it sends what its workers computed
        except SpecError as error:
            assert "but it asks for" in str(error)  # noqa: PT017
            return True
    return False


def test_attacks_know_what_they_say_and_no_more_than_they_need(attack):
    """`adversary_view` has built the view from `knows` in every test above. With the next smaller one it fails."""
    kinds = list(KNOWS)
    assert attack.knows in kinds
    assert not uses(attack, attack.knows) or attack.knows == "blind"
    if attack.knows != "blind":
        assert uses(attack, kinds[kinds.index(attack.knows) - 1]), "could say that it knows less"


ASKS = {
    "see_own": lambda view: view.own,
    "see_gradient": lambda view: view.gradient(True),
    "see_honest": lambda view: view.honest,
    "judge": lambda view: view.judge(torch.zeros(BYZANTINE, D)),
}


@pytest.mark.parametrize("knows", KNOWS)
def test_a_view_holds_no_more_than_what_the_attack_declares_to_know(knows):
    view = replace(adversary_view(Inner()), knows=knows)
    for name, ask in ASKS.items():
        for again in (view, replace(view, knows="omniscient"), replace(view, phase=1)):  # never widened
            if name in KNOWS[knows]:
                ask(again)
                continue
            with pytest.raises(SpecError, match=f'its knows is "{knows}", but it asks for .*; declare knows = "'):
                ask(again)
    assert view.params.shape == (D,)
    assert isinstance(view.rng, torch.Generator)


def test_nobody_knows_what_has_no_name():
    with pytest.raises(SpecError, match=r"knows = 'nothing'; choose from 'blind', 'data-only', 'omniscient'"):
        replace(adversary_view(Inner()), knows="nothing")


@dataclass(frozen=True)
class Untrue(Forger):
    """Says that it is blind, and looks."""

    knows = "blind"

    def forge(self, view: AdversaryView) -> torch.Tensor:
        return -view.honest.mean(0).expand(view.workers, -1)


def test_an_attack_that_looks_further_than_it_says_ends_the_run(quick):
    with pytest.raises(SpecError, match=r'its knows is "blind", but it asks for the honest workers\' uploads'):
        run(quick(attack=f"{__name__}:Untrue"))


def test_attacks_by_turns_know_as_much_as_their_parts():
    expected = {
        Dormant(Inner()): "omniscient",
        Dormant(LabelFlip()): "data-only",
        Dormant(Zero()): "data-only",  # while it behaves
        Dormant(Zero(), asleep="copy"): "omniscient",
        OnOff(RankMatched()): "data-only",
        OnOff(Inner()): "omniscient",
        ScoreBanking(): "data-only",
        ScoreBanking(OnOff(Inner())): "omniscient",
    }
    for attack, knows in expected.items():
        assert attack.knows == knows, attack
        forged_by(attack, adversary_view(attack))


def test_a_part_is_shown_no_more_than_it_declares():
    """Whatever the other part knows."""
    attack = Dormant(Untrue(), 0.5, "copy")
    assert attack.knows == "omniscient"
    assert forged_by(attack, adversary_view(attack, 0.0)).shape == (BYZANTINE, D)
    with pytest.raises(SpecError, match='its knows is "blind"'):
        attack.forge(adversary_view(attack, 0.9))


# --- plugins -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anything(Honest):
    """A plugin's attack: sends what is not an upload."""

    what: str = "none"
    knows = "blind"

    def needs_own(self, phase):
        return False

    def forge(self, view):
        m, d = view.workers, len(view.params)
        return {
            "none": None,
            "nones": [None] * m,
            "text": "let me in",
            "nan": torch.full((m, d), torch.nan),
            "inf": torch.full((m, d), torch.inf),
            "huge": torch.full((m, d), 1e38),
            "wide": torch.zeros(m, d + 1),
            "narrow": [torch.zeros(d - 1)] * m,
            "complex": torch.zeros(m, d, dtype=torch.complex64),
            "column": torch.zeros(m, d, 1),
            "one": torch.zeros(d),
        }[self.what]


WHATS = ["none", "nones", "text", "nan", "inf", "huge", "wide", "narrow", "complex", "column", "one"]


@pytest.mark.parametrize("what", WHATS)
def test_a_round_survives_whatever_a_plugin_sends(quick, tmp_path, what):
    for aggregator in ("mean", "two-stage"):
        spec = quick(attack={"name": f"{__name__}:Anything", "what": what}, aggregator=aggregator)
        result = run(spec, out=tmp_path / aggregator)
        malformed = sum(line["rejected"]["malformed"]["byzantine"] for line in result.curve)
        assert malformed == result.rounds * result.byzantine_workers
        assert result.byzantine_selected == 0.0
        model = load_file(tmp_path / aggregator / "model.safetensors")
        assert all(bool(value.isfinite().all()) for value in model.values())
        # Malformed uploads must not move the model: the honest workers' uploads alone do.
        assert sum(line["selected"]["honest"] for line in result.curve) > 0


@dataclass(frozen=True)
class Favorite(Aggregator):
    """A plugin's aggregator: takes the upload of one worker."""

    worker: int = 0

    def __call__(self, view, state):
        kept = torch.arange(len(view.norms)) == self.worker
        kept &= view.present
        reason = view.mark_absent(torch.where(kept, Reason.KEPT.value, Reason.SCORE.value))
        rounds = state.get("rounds", LIKE[0]) + 1
        return Verdict(view.uploads[self.worker], kept, reason, kept.float(), {"rounds": rounds})


def test_a_plugins_aggregator_can_be_used(quick):
    result = run(quick(aggregator={"name": f"{__name__}:Favorite", "worker": 2}))
    assert result.aggregator == f"{__name__}:Favorite"
    assert sum(sum(line["selected"].values()) for line in result.curve) == result.rounds
    assert result.believed_byzantine is None


def test_a_plugins_aggregator_can_be_wrapped(quick):
    wrapped = {"name": "bucketing", "aggregator": {"name": f"{__name__}:Favorite", "worker": 2}, "size": 3}
    result = run(quick(aggregator=wrapped))
    assert sum(sum(line["selected"].values()) for line in result.curve) == 3 * result.rounds


@dataclass(frozen=True)
class Bare:
    """An aggregator that does not extend `Aggregator`."""

    def __call__(self, view, state):
        return Favorite()(view, state)


def test_a_plugins_aggregator_must_declare_what_it_can(quick):
    with pytest.raises(SpecError, match=r"Bare.*: lacks .*tests_noise"):
        quick(aggregator=f"{__name__}:Bare")


class Silent(Forger):
    """Sends zeros."""

    def forge(self, view: AdversaryView) -> torch.Tensor:
        return torch.zeros_like(view.own)


class Vandal(Silent):
    """Sends zeros, and overwrites whatever it is shown."""

    def forge(self, view: AdversaryView) -> torch.Tensor:
        for tensor in (view.params, view.honest, view.own):
            tensor.fill_(torch.nan)
        return torch.zeros_like(view.own)


def test_an_attack_cannot_change_what_it_is_shown(quick):
    prepared = prepare(quick(aggregator="mean"), Compute(device="cpu")).federation
    states = []
    for attack in (Silent(), Vandal()):
        federation = prepared.change(attack=attack)
        state = first_state(federation)
        for t in range(2):
            state, _ = play(federation, state, t)
        states.append(state)
    assert torch.equal(states[0].params, states[1].params)
    assert torch.equal(states[0].uploads, states[1].uploads)
