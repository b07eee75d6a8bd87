"""Aggregators that every aggregator and every attack obeys. A new entry of a catalog is tested from its first day.

Inputs are small, but of the kind that a round makes: uploads are noise plus a little signal, and pass `receive`.
"""

import io
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from noisegate import Compute, TwoStage, run
from noisegate.aggregators import AGGREGATORS, Krum
from noisegate.attacks import ATTACKS, Dormant
from noisegate.attacks.honest import Forger
from noisegate.catalog import build
from noisegate.runs.setup import prepare
from noisegate.simulate import first_state, play
from noisegate.streams import stream
from noisegate.views import AdversaryView, DataView, Reason, ServerView, Verdict, as_rows, receive

N, D, BELIEVED, NOISE_STD = 12, 600, 5, 0.15
LIKE = torch.zeros(D)

# A mean of up to 12 float32 rows, added up in another order, moves by a few units in the last place of values below 1.
REORDERED = 1e-6

# Aggregators whose update is not the mean of the rows they keep, and attacks that mean to send what is not finite.
NOT_A_MEAN: set[str] = {
    "fortified",
    "bulyan",
    "median",
    "trimmed-mean",
    "geometric-median",
    "centered-clipping",
    "spectral-filter",
    "sign-vote",
    "fltrust",
    "nnm",
    "bucketing",
    "sign-gaussian",
    "sign-randomized",
    "ma-sign",
}
NOT_FINITE: set[str] = {"nan"}

BUILDERS = {name: (lambda name=name: build("aggregator", name, AGGREGATORS)) for name in AGGREGATORS} | {
    f"two-stage {settings}": (lambda settings=settings: TwoStage(**settings))
    for settings in (
        {"stages": 1},
        {"stages": 2},
        {"server_gradient": "normalized"},
        {"server_momentum": 0.9},
        {"divisor": "workers"},
        {"stages": 2, "server_gradient": "normalized", "server_momentum": 0.5, "divisor": "workers"},
    )
}

HONEST, LIARS, CLASSES = 9, 6, 10
UNTIL = 0.5
WRAPPERS = {
    "plain": lambda attack: attack,
    "behaving": lambda attack: Dormant(attack, UNTIL, "behave"),
    "copying": lambda attack: Dormant(attack, UNTIL, "copy"),
}


@pytest.fixture(params=BUILDERS)
def aggregator(request):
    return BUILDERS[request.param]()


@pytest.fixture(params=[f"{name}, {wrapper}" for name in ATTACKS for wrapper in WRAPPERS])
def attack(request):
    name, wrapper = request.param.split(", ")
    return WRAPPERS[wrapper](build("attack", name, ATTACKS))


@pytest.fixture(params=[0.0, UNTIL, 0.99])
def progress(request):
    return request.param


# --- aggregators ------------------------------------------------------------------------------------------------


def honest_uploads(seed: int, n: int = N) -> torch.Tensor:
    rng = stream(seed, "uploads")
    signal = torch.randn(D, generator=rng) / D**0.5
    return 0.3 * signal + NOISE_STD * torch.randn(n, D, generator=rng)


TENSORS = ("uploads", "norms", "present", "ties", "last")


def server_view(uploads, seed: int = 0, believed: int = BELIEVED) -> ServerView:
    """What everyone sent last is made of what they send now, so that it goes with them if they change places."""
    n = len(uploads)
    rows, norms, present = receive(uploads, n, D, LIKE)
    gradients = torch.randn(20, D, generator=stream(seed, "auxiliary"))
    ties = torch.randperm(n, generator=stream(seed, "ties"))
    own = torch.nn.functional.normalize(gradients, dim=1) / 2
    known = {"contributions": lambda: own, "strata": 10, "last": rows.roll(D // 3, 1)}
    return ServerView(rows, norms, present, NOISE_STD, believed, mean_of(gradients), ties, **known)


def mean_of(gradients: torch.Tensor):
    """What the server's examples say, from their gradients."""
    return lambda normalized: (torch.nn.functional.normalize(gradients, dim=1) if normalized else gradients).mean(0)


def copy_of(view: ServerView) -> ServerView:
    plain, scaled, own = view.auxiliary(False), view.auxiliary(True), view.contributions().clone()
    tensors = {name: getattr(view, name).clone() for name in TENSORS}
    answers = {
        "auxiliary": lambda normalized: (scaled if normalized else plain).clone(),
        "contributions": own.clone,
    }
    return replace(view, **answers, **tensors)


def same(left: Verdict, right: Verdict) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("update", "kept", "reason", "score")]
    pairs += [(left.state[key], right.state[key]) for key in left.state]
    return left.state.keys() == right.state.keys() and all(torch.equal(*pair) for pair in pairs)


def sound(view: ServerView, verdict: Verdict) -> None:
    """What holds of every verdict."""
    n = len(view.uploads)
    assert verdict.update.shape == (D,)
    assert verdict.update.dtype == view.uploads.dtype
    assert bool(verdict.update.isfinite().all())
    assert verdict.kept.shape == verdict.reason.shape == verdict.score.shape == (n,)
    assert verdict.kept.dtype == torch.bool
    assert torch.equal(verdict.kept, verdict.reason == Reason.KEPT)
    assert set(verdict.reason.tolist()) <= {int(reason) for reason in Reason}
    assert torch.equal(verdict.reason == Reason.MALFORMED, ~view.present)
    assert bool(verdict.score.isfinite().all())
    if not bool(verdict.kept.any()):
        assert not bool(verdict.update.any())


GARBAGE = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "1e17": 1e17,  # well formed: its length is finite
    "1e18": 1e18,
    "1e30": 1e30,
    "1e38": 1e38,
    "-1e38": -1e38,
    "zero": 0.0,
    "tiny": 1e-38,
}


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("rows", [1, 4, N], ids=["one", "some", "all"])
def test_garbage_cannot_make_the_update_infinite(aggregator, value, rows):
    uploads = honest_uploads(1)
    uploads[:rows] = value
    view = server_view(uploads)
    sound(view, aggregator(view, {}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_one_wrong_coordinate_makes_an_upload_malformed(aggregator, value):
    uploads = honest_uploads(2)
    uploads[3, D // 2] = value
    view = server_view(uploads)
    verdict = aggregator(view, {})
    sound(view, verdict)
    assert verdict.reason[3] == Reason.MALFORMED


def test_what_a_malformed_upload_holds_does_not_matter(aggregator):
    uploads, others = honest_uploads(3), honest_uploads(3)
    uploads[2], others[2] = float("nan"), float("-inf")
    assert same(aggregator(server_view(uploads), {}), aggregator(server_view(others), {}))


def test_rows_of_the_wrong_shape_count_as_malformed(aggregator):
    uploads = list(honest_uploads(4))
    uploads[0], uploads[5], uploads[7] = None, torch.zeros(D + 1), torch.zeros(D, dtype=torch.complex64)
    view = server_view(uploads)
    verdict = aggregator(view, {})
    sound(view, verdict)
    assert (verdict.reason == Reason.MALFORMED).nonzero().flatten().tolist() == [0, 5, 7]


def test_aggregators_leave_their_inputs_alone(aggregator):
    state: dict = {}
    for seed in range(3):
        view = server_view(honest_uploads(seed), seed)
        before, kept_state = copy_of(view), {key: value.clone() for key, value in state.items()}
        verdict = aggregator(view, state)
        for name in TENSORS:
            assert torch.equal(getattr(view, name), getattr(before, name)), name
        assert torch.equal(view.contributions(), before.contributions())
        for normalized in (False, True):
            assert torch.equal(view.auxiliary(normalized), before.auxiliary(normalized))
        assert state.keys() == kept_state.keys()
        assert all(torch.equal(state[key], kept_state[key]) for key in state)
        state = dict(verdict.state)


def test_same_view_same_verdict(aggregator):
    first = server_view(honest_uploads(5))
    state = aggregator(server_view(honest_uploads(6)), {}).state
    assert same(
        aggregator(first, state), aggregator(copy_of(first), {key: value.clone() for key, value in state.items()})
    )


def test_the_order_of_the_workers_does_not_matter(aggregator):
    """Three rounds, with malformed and absurd uploads among them, in two orders of the workers."""
    order = torch.randperm(N, generator=stream(0, "order"))
    place = torch.argsort(order)  # where each worker stands in the second order
    state: dict = {}
    state_too: dict = {}
    for seed in range(3):
        uploads = honest_uploads(seed)
        uploads[1], uploads[4], uploads[8] = float("nan"), 0.0, 7.0
        view = server_view(uploads, seed)
        other = replace(server_view(uploads[order], seed), ties=place[view.ties])
        verdict, moved = aggregator(view, state), aggregator(other, state_too)
        assert torch.equal(verdict.kept[order], moved.kept)
        assert torch.equal(verdict.reason[order], moved.reason)
        torch.testing.assert_close(verdict.score[order], moved.score, atol=REORDERED, rtol=REORDERED)
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


@pytest.mark.parametrize("name", BUILDERS)
def test_the_update_is_the_mean_of_what_was_kept(name):
    if name in NOT_A_MEAN:
        pytest.skip("this aggregator does not average")
    aggregator = BUILDERS[name]()
    state: dict = {}
    kept_any = False
    for seed in range(4):
        uploads = honest_uploads(seed)
        uploads[2], uploads[6] = float("nan"), 0.5
        view = server_view(uploads, seed)
        verdict = aggregator(view, state)
        divisor = N if getattr(aggregator, "divisor", "selected") == "workers" else max(1, int(verdict.kept.sum()))
        expected = view.uploads[verdict.kept].double().sum(0) / divisor
        torch.testing.assert_close(verdict.update.double(), expected, atol=REORDERED, rtol=REORDERED)
        state, kept_any = dict(verdict.state), kept_any or bool(verdict.kept.any())
    assert kept_any, "the aggregator keeps nobody of mostly honest workers"


def test_state_can_be_saved(aggregator):
    state: dict = {}
    for seed in range(2):
        state = dict(aggregator(server_view(honest_uploads(seed), seed), state).state)
    assert all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    view = server_view(honest_uploads(9), 9)
    assert same(aggregator(view, state), aggregator(view, loaded))


@pytest.mark.parametrize(("n", "believed"), [(1, 1), (2, 1), (N, 1), (N, N)])
def test_any_number_of_workers(aggregator, n, believed):
    view = server_view(honest_uploads(8, n), believed=believed)
    sound(view, aggregator(view, {}))


def test_two_stage_never_uses_more_than_it_believes_honest():
    for name, make in BUILDERS.items():
        aggregator = make()
        if isinstance(aggregator, TwoStage) and aggregator.stages != 1:
            verdict = aggregator(server_view(honest_uploads(10)), {})
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


@pytest.mark.parametrize(("sent", "well_formed"), ANYTHING.values(), ids=ANYTHING)
def test_receive_takes_anything(sent, well_formed):
    rows, norms, present = receive(sent, 3, 4, torch.zeros(4))
    assert rows.shape == (3, 4)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert bool(rows.isfinite().all())
    assert present.nonzero().flatten().tolist() == well_formed
    assert torch.equal(norms, torch.linalg.vector_norm(rows, dim=1))
    assert not bool(rows[~present].any())


@pytest.mark.parametrize(
    "sent",
    [
        torch.zeros(3, 4).to_sparse(),
        [torch.zeros(4).to_sparse()] * 3,
        torch.zeros(3, 4, device="meta"),
        [torch.zeros(4, device="meta")] * 3,
    ],
    ids=["sparse", "list of sparse", "meta", "list of meta"],
)
def test_receive_takes_unusual_tensors(sent):
    rows, _, _ = receive(sent, 3, 4, torch.zeros(4))
    assert rows.shape == (3, 4)
    assert bool(rows.isfinite().all())


def test_receive_leaves_what_was_sent_alone():
    sent = torch.tensor([[1.0, torch.nan], [3.0, 4.0]])
    before = sent.clone()
    rows, norms, present = receive(sent, 2, 2, torch.zeros(2))
    assert torch.equal(sent.isnan(), before.isnan())
    assert rows.tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert norms.tolist() == [0.0, 5.0]
    assert present.tolist() == [False, True]


def test_as_rows_marks_what_it_cannot_read():
    rows = as_rows([GOOD, None], 3, 4, torch.zeros(4))
    assert torch.equal(rows[0], GOOD)
    assert bool(rows[1:].isnan().all())


# --- attacks -------------------------------------------------------------------------------------------------------


def adversary_view(phase, honest: int = HONEST, liars: int = LIARS, seed: int = 0) -> AdversaryView:
    uploads = honest_uploads(seed, honest + liars)
    order = torch.randperm(honest + liars, generator=stream(seed, "places"))
    own, rng = uploads[order[honest:]].clone(), partial(stream, seed, "attack")

    def judge(forged: torch.Tensor) -> Verdict:
        sent = uploads.index_copy(0, order[honest:], forged)
        return Krum()(server_view(sent, seed), {})

    gradient = mean_of(torch.randn(20, D, generator=stream(seed, "known")))
    seen = lambda: uploads[order[:honest]], own.clone, torch.ones(D), NOISE_STD
    return AdversaryView(liars, *seen, phase, rng, judge, gradient)


def forged_by(attack, progress: float, honest: int = HONEST, liars: int = LIARS, own=None) -> torch.Tensor:
    """What the attack's workers send at this point of the run."""
    phase = attack.phase(progress)
    view = adversary_view(phase, honest, liars)
    view = view if own is None else replace(view, see_own=lambda: own)
    forged = attack.forge(view)
    if forged is None:
        assert attack.needs_own(phase), "sends what was not computed"
        return view.own
    return forged


def means_to_be_finite(attack) -> bool:
    inner = getattr(attack, "attack", attack)
    return type(inner) not in [ATTACKS[name] for name in NOT_FINITE]


def same_uploads(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, or not a number in the same places."""
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def test_forged_uploads_have_the_right_form(attack, progress):
    forged = forged_by(attack, progress)
    assert forged.shape == (LIARS, D)
    assert forged.dtype == torch.float32
    assert bool(forged.isfinite().all()) or not means_to_be_finite(attack)


@pytest.mark.parametrize(("honest", "liars"), [(1, 1), (1, 5), (7, 1)])
def test_attacks_exist_for_the_smallest_numbers(attack, progress, honest, liars):
    forged = forged_by(attack, progress, honest, liars)
    assert forged.shape == (liars, D)
    assert bool(forged.isfinite().all()) or not means_to_be_finite(attack)


def test_attacks_leave_their_inputs_alone(attack, progress):
    view, before = (adversary_view(attack.phase(progress)) for _ in range(2))
    attack.forge(view)
    for name in ("honest", "own", "params"):
        assert torch.equal(getattr(view, name), getattr(before, name)), name


def test_same_stream_same_upload(attack, progress):
    assert same_uploads(forged_by(attack, progress), forged_by(attack, progress))


def test_needs_own_tells_the_truth(attack, progress):
    if not attack.needs_own(attack.phase(progress)):
        forged = forged_by(attack, progress)
        for own in (torch.ones(LIARS, D), torch.full((LIARS, D), torch.nan)):
            assert same_uploads(forged, forged_by(attack, progress, own=own))


def test_phases_are_few_and_comparable(attack):
    """A round is prepared once for each phase."""
    phases = [attack.phase(t / 1000) for t in range(1000)]
    assert 1 <= len(set(phases)) <= 4
    assert phases == [attack.phase(t / 1000) for t in range(1000)]


@pytest.mark.parametrize("classes", [2, 3, CLASSES])
@pytest.mark.parametrize("examples", [1, 40])
def test_poisoned_data_is_still_data(attack, progress, classes, examples):
    rng = stream(1, "data")
    x = torch.rand(examples, 1, 8, 8, generator=rng)
    y = torch.randint(classes, (examples,), generator=rng)
    kept_x, kept_y = x.clone(), y.clone()
    bad_x, bad_y = attack.poison(x, y, DataView(classes, attack.phase(progress), partial(stream, 1, "poison")))
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)
    assert (bad_x.shape, bad_x.dtype) == (x.shape, x.dtype)
    assert (bad_y.shape, bad_y.dtype) == (y.shape, y.dtype)
    assert int(bad_y.min()) >= 0
    assert int(bad_y.max()) < classes
    assert bool(bad_x.isfinite().all())
    again = attack.poison(x, y, DataView(classes, attack.phase(progress), partial(stream, 1, "poison")))
    assert torch.equal(again[0], bad_x)
    assert torch.equal(again[1], bad_y)


def test_attacks_say_what_they_know(attack):
    assert attack.knows
    attack.check(honest=4, byzantine=LIARS)


# --- plugins -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liar:
    """A plugin's attack: sends what is not an upload."""

    what: str = "none"
    knows = "nothing"

    def check(self, honest, byzantine):
        pass

    def phase(self, progress):
        return None

    def needs_own(self, phase):
        return False

    def ascends(self, phase):
        return False

    def poison(self, x, y, view):
        return x, y

    def forge(self, view):
        m, d = view.own.shape
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
@pytest.mark.parametrize("aggregator", ["mean", "two-stage"])
def test_a_round_survives_whatever_a_plugin_sends(quick, tmp_path, what, aggregator):
    spec = quick(attack={"name": f"{__name__}:Liar", "what": what}, aggregator=aggregator)
    result = run(spec, out=tmp_path / "run")
    malformed = sum(line["rejected"]["malformed"]["byzantine"] for line in result.curve)
    assert malformed == result.rounds * result.byzantine_workers
    assert result.byzantine_selected == 0.0
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in model.values())
    # What liars send as nothing must not move the model: the honest workers alone do.
    assert sum(line["selected"]["honest"] for line in result.curve) > 0


@dataclass(frozen=True)
class Favorite:
    """A plugin's aggregator: takes the upload of one worker."""

    worker: int = 0

    def __call__(self, view, state):
        kept = torch.arange(len(view.norms)) == self.worker
        kept &= view.present
        reason = torch.where(kept, Reason.KEPT.value, Reason.SCORE.value)
        reason = torch.where(view.present, reason, Reason.MALFORMED.value)
        return Verdict(
            view.uploads[self.worker], kept, reason, kept.float(), {"rounds": state.get("rounds", LIKE[0]) + 1}
        )


def test_a_plugins_aggregator_can_be_used(quick):
    result = run(quick(aggregator={"name": f"{__name__}:Favorite", "worker": 2}))
    assert result.aggregator == f"{__name__}:Favorite"
    assert sum(sum(line["selected"].values()) for line in result.curve) == result.rounds


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
        federation = replace(prepared, attack=attack)
        state = first_state(federation)
        for t in range(2):
            state, _ = play(federation, state, t)
        states.append(state)
    assert torch.equal(states[0].params, states[1].params)
    assert torch.equal(states[0].uploads, states[1].uploads)
