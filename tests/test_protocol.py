"""The protocol by itself: workers and a server who call it one by one get what the simulator gets."""

import copy
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from devices import Unasked
from noisegate import (
    Compute,
    FixedSize,
    Fortified,
    Mean,
    Normalized,
    Poisson,
    PrivacyError,
    Reason,
    Spec,
    SpecError,
    TwoStage,
)
from noisegate.entropy import BATCH, NOISE, Secret, Source
from noisegate.examples import Holdings
from noisegate.protocol import LATE, Mechanism, Server, ServerState, first_state, judge, receive, upload, upload_of_one
from noisegate.runs.setup import prepare
from noisegate.simulate import Streams, play, start
from noisegate.simulate import first_state as first
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import ClosedForm, Direct
from plain_round import Memory, play_plainly

CPU = Compute(device="cpu", threads=1)
CLOSE = 2e-4  # of models after some rounds in float32, with sums in another order


def federation(**settings):
    asked = {"rounds": 12, "sigma": 0.8, "sigma_base": 0.8, "workers": 4, "batch": 16, "rate": 0.2}
    return prepare(Spec(**(asked | {"byzantine": 0.6, "attack": "label-flip"} | settings)), CPU).federation


# --- the round in plain loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [None, 0.3])
@pytest.mark.parametrize("byzantine", [0.0, 0.6])
def test_the_round_is_the_plain_one(byzantine, absent):
    attack = "label-flip" if byzantine else "none"
    run = federation(aggregator="two-stage", byzantine=byzantine, attack=attack, absent=absent, rounds=5)
    n = len(run.workers)
    state = first(run)
    zeros = [[0.0] * n, [0] * n, [0] * n, [0.0] * n]
    memory = Memory(state.params, [torch.zeros(run.d) for _ in range(n)], *zeros)
    missed = 0
    for t in range(run.schedule.rounds):
        state, verdict = play(run, state, t)
        fates = play_plainly(run, memory, t)
        assert [Reason(code).word.replace("kept", "used") for code in verdict.reason.tolist()] == fates
        assert (state.params - memory.params).norm() < CLOSE * memory.params.norm()
        assert (state.uploads - torch.stack(memory.last)).norm(dim=1).max() < CLOSE * state.uploads.norm(dim=1).max()
        totals = torch.tensor([memory.total(i) for i in range(n)])
        assert (verdict.score - totals).abs().max() < CLOSE * max(1.0, float(totals.abs().max()))
        missed += fates.count("missing")
    assert bool(missed) == bool(absent)


def test_the_page_of_the_round_shows_the_plain_one_whole():
    here = Path(__file__).parent
    assert (here / "plain_round.py").read_text().rstrip() in (here.parent / "docs" / "round.md").read_text()


# --- worker by worker -----------------------------------------------------------------------------------------------


class Given(Source):
    """Numbers that were drawn beforehand: rows for all workers, or one of them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def uniform(self, *shape: int) -> torch.Tensor:
        return self.numbers.view(shape)

    def add_noise(self, sums: torch.Tensor, std: float) -> None:
        sums += std * self.numbers.view_as(sums)


def drawn_beforehand(run, t: int) -> dict[str, torch.Tensor]:
    longest = int(run.workers.sizes.max())
    rng = stream(3, "beforehand", t)
    return {
        BATCH: torch.rand(len(run.workers), longest, generator=rng, dtype=torch.float64),
        NOISE: torch.randn(len(run.workers), run.d, generator=rng),
    }


class Beforehand(Streams):
    """What the simulator draws from."""

    def private(self, what: str) -> Given:
        return Given(drawn_beforehand(self.federation, self.t)[what])


@pytest.mark.parametrize("aggregator", ["two-stage", "fortified"])
def test_a_run_worker_by_worker_has_the_simulators_verdicts(aggregator):
    """Real lists, whose entries are missing, late, garbage, or one worker's own upload."""
    run = federation(aggregator=aggregator)
    workers, server, flipped = run.workers, run.server, run.adversary.byzantine.tolist()
    n, mechanism = len(workers), run.mechanism
    held = [workers.holdings[i, : workers.sizes[i]] for i in range(n)]
    examples = [(workers.x[own], workers.y[own]) for own in held]
    examples = [(x, 9 - y if lies else y) for (x, y), lies in zip(examples, flipped, strict=True)]
    sent: list[torch.Tensor | None] = [None] * n
    state, simulated = first_state(server, mechanism.model.initial()), first(run)
    for t in range(run.schedule.rounds):
        numbers = drawn_beforehand(run, t)
        for i, (x, y) in enumerate(examples):
            own = {BATCH: numbers[BATCH][i, : len(y)], NOISE: numbers[NOISE][i]}
            sent[i] = upload_of_one(mechanism, state.params, x, y, sent[i], lambda what, own=own: Given(own[what]))
        ties = torch.randperm(n, generator=run.stream("ties", t))
        verdict, state = judge(server, state, list(sent), ties)
        simulated, expected = play(run, simulated, t, streams=Beforehand(run, t))
        assert torch.equal(verdict.reason, expected.reason)
        assert (verdict.weights - expected.weights).abs().max() < 1e-3
        assert (state.params - simulated.params).norm() < CLOSE * state.params.norm()


def test_one_worker_is_many_of_which_there_is_one():
    run = federation(aggregator="mean")
    mechanism, params = run.mechanism, run.mechanism.model.initial()
    x, y = run.workers.x[:70], run.workers.y[:70]
    last = torch.randn(run.d, generator=stream(1, "last")) / 10
    one = upload_of_one(mechanism, params, x, y, last, lambda what: stream(2, what))
    many = upload(mechanism, params, Holdings.of_one(x, y), last[None], lambda what: stream(2, what))
    assert torch.equal(one, many[0])
    assert not torch.equal(one, upload_of_one(mechanism, params, x, y, None, lambda what: stream(2, what)))


def test_secret_uploads_differ_and_lie_on_the_public_grid():
    from noisegate.entropy import grid_of

    run = federation(aggregator="mean")
    x, y, params = run.workers.x[:70], run.workers.y[:70], run.mechanism.model.initial()
    found = []
    for _ in range(2):
        secret = Secret(torch.device("cpu"))
        secret.begin(0)
        found.append(upload_of_one(run.mechanism, params, x, y, None, secret.source))
    assert not torch.equal(*found)
    grid = grid_of(run.mechanism.added_noise)
    assert all(torch.equal((each / grid).round() * grid, each) for each in found)


def test_the_noise_has_the_allowance_for_rounding():
    """s = sigma sensitivity (1 + batch 2^-20) / batch: what one example can add in float32 is paid for."""
    run = federation(aggregator="mean", sigma=1.0)
    assert run.mechanism.added_noise == pytest.approx(1.0 * (1 + 16 * 2**-20) / 16, rel=1e-12)
    assert run.mechanism.added_noise > 1.0 / 16


@pytest.mark.parametrize("closed_form", [True, False])
def test_workers_in_threads_may_share_a_mechanism(closed_form):
    """A module holds hooks and parameters while it is called. Another thread's must not get into a worker's sum."""
    run = federation(aggregator="mean", sigma=0.0)
    mechanism = run.mechanism if closed_form else replace(run.mechanism, sums=Direct(run.mechanism.model))
    assert isinstance(mechanism.sums, ClosedForm) == closed_form
    models = [(1 + i / 4) * run.mechanism.model.initial() for i in range(4)]

    def uploads(i: int) -> list[torch.Tensor]:
        x, y = run.workers.x[70 * i :][:70], run.workers.y[70 * i :][:70]
        return [upload_of_one(mechanism, models[i], x, y, None, lambda what, t=t: stream(t, what)) for t in range(12)]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(uploads, range(4)))
    for i in range(4):
        for one, alone in zip(together[i], uploads(i), strict=True):
            assert torch.equal(one, alone)


class MixesLargeBatches(nn.Module):
    """Subtracts the mean of its batch where that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.layer(x - x.mean(0) if len(x) > 36 else x)


def test_a_mechanism_is_tried_at_its_own_batch_size():
    run = federation(aggregator="mean")
    examples = run.workers.x[:200], run.workers.y[:200]
    model = FlatModel(MixesLargeBatches())
    with pytest.raises(SpecError, match="mix"):
        Mechanism.of(model, examples, Normalized(), Poisson(48), 1.0, declared=200)
    with pytest.raises(SpecError, match="batch = 48"):
        Mechanism.of(FlatModel(nn.Linear(64, 10)), examples, Normalized(), Poisson(48), 1.0, declared=40)


def test_fewer_examples_than_were_priced_are_refused_where_the_price_depends_on_them():
    run = federation(aggregator="mean")
    x, y, params = run.workers.x[:70], run.workers.y[:70], run.mechanism.model.initial()
    fixed = replace(run.mechanism, sampling=FixedSize(16), declared=70)
    assert upload_of_one(fixed, params, x, y, None, lambda what: stream(1, what)).shape == params.shape
    with pytest.raises(PrivacyError, match="declared = 70: this worker holds 30 examples"):
        upload_of_one(fixed, params, x[:30], y[:30], None, lambda what: stream(1, what))
    poisson = replace(run.mechanism, declared=70)  # who has fewer draws fewer
    assert upload_of_one(poisson, params, x[:30], y[:30], None, lambda what: stream(1, what)).isfinite().all()


def test_a_model_can_be_copied_and_sent():
    model = FlatModel(nn.Linear(3, 2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.initial(), model.initial())
        assert twin.lock is not model.lock


def test_the_capacity_of_a_recorded_round_asks_the_device_for_nothing():
    run = federation(aggregator="mean")
    active = run.active(run.phase(0))
    first_time = active.capacity()
    with Unasked():
        again = active.capacity()
    assert (again.total, again.per_worker, again.byzantine) == (
        first_time.total,
        first_time.per_worker,
        first_time.byzantine,
    )
    assert again.needs is not first_time.needs


# --- what arrives ---------------------------------------------------------------------------------------------------

D, N = 40, 6
LIKE = torch.zeros(D)


class Rude:
    """Raises whenever it is looked at."""

    def __getattribute__(self, name):
        raise RuntimeError("boom")


def small_server(aggregator, n: int = N) -> tuple[Server, ServerState]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FlatModel(nn.Linear(D // 4 - 1, 4))
    x, y = torch.randn(8, D // 4 - 1, generator=stream(0, "x")), torch.arange(8) // 2
    mechanism = Mechanism.of(model, (x, y), Normalized(), Poisson(4), 4.0, declared=8)
    server = Server(mechanism, aggregator, x, y, workers=n, believed_honest=3, rate=0.1)
    return server, first_state(server, model.initial())


def honest(seed: int) -> torch.Tensor:
    return torch.randn(D, generator=stream(seed, "honest"))


GARBAGE = [
    *(torch.full((D,), torch.nan), torch.full((D,), torch.inf), torch.full((D,), 3e38), torch.zeros(D - 1)),
    *(
        torch.zeros(1, D),
        torch.zeros(D, dtype=torch.complex64),
        "upload",
        b"\x00" * 160,
        7,
        [0.0] * D,
        {},
        Rude(),
        Mean(),
    ),
]


def test_missing_late_and_malformed_are_three_things():
    for bad in GARBAGE:
        found = receive([honest(1), None, LATE, bad, honest(2)], N, D, LIKE)
        assert found.missing.tolist() == [False, True, True, False, False, True]
        assert found.present.tolist() == [True, False, False, False, True, False]
        assert not found.uploads[[1, 2, 3, 5]].any()
        assert torch.equal(found.uploads[0], honest(1))
    assert receive([honest(i) for i in range(9)], N, D, LIKE).missing is None  # what is too much is ignored
    for nothing in (None, "list", 5, Rude(), {1: 2}):
        assert not receive(nothing, N, D, LIKE).present.any()


def test_what_arrived_is_not_written_to():
    rows = torch.stack([honest(0), torch.full((D,), torch.nan)])
    before = rows.clone()
    found = receive(rows, 2, D, LIKE)
    assert torch.equal(rows.nan_to_num(7.0), before.nan_to_num(7.0))
    assert found.present.tolist() == [True, False]


PLAIN_GARBAGE = [each for each in GARBAGE if type(each) is not Rude]  # which hypothesis cannot print
ENTRY = st.sampled_from([None, LATE, *PLAIN_GARBAGE, *(honest(i) for i in range(3)), 1e3 * honest(9), -honest(9)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rounds=st.lists(st.lists(ENTRY, max_size=N + 2), min_size=1, max_size=6),
    aggregator=st.sampled_from([Mean(), TwoStage(), TwoStage(stages=2), Fortified()]),
)
def test_nothing_that_arrives_raises_or_reaches_the_model_unjudged(rounds, aggregator):
    server, state = small_server(aggregator)
    for t, arrived in enumerate(rounds):
        last = state.received.clone()
        verdict, after = judge(server, state, arrived, torch.randperm(N, generator=stream(4, "ties", t)))
        missing = [i >= len(arrived) or arrived[i] is None or arrived[i] is LATE for i in range(N)]
        assert (verdict.reason == Reason.MISSING).tolist() == missing
        assert after.params.isfinite().all()
        assert verdict.weights.isfinite().all()
        if not verdict.kept.any():
            assert torch.equal(after.params, state.params)
        assert torch.equal(after.received[missing], last[missing])  # what was last received stays so
        for name, value in after.aggregator.items():
            assert not value.is_floating_point() or value.isfinite().all(), name
        state = after


class FirstRow(Mean):
    """Answers with a row of what it was shown, and not with a copy."""

    def __call__(self, view, state):
        return replace(super().__call__(view, {}), update=view.uploads[0])


def test_an_old_upload_never_comes_back_by_way_of_an_update():
    server, state = small_server(FirstRow())
    _, state = judge(server, state, [honest(i) for i in range(N)], torch.arange(N))
    _, after = judge(server, state, [None, *(honest(i) for i in range(1, N))], torch.arange(N))
    assert torch.equal(after.params, state.params)
    assert torch.equal(after.received[0], honest(0))


def test_a_server_that_hears_nothing_stays_where_it_is():
    for aggregator in (Mean(), TwoStage(), Fortified()):
        server, state = small_server(aggregator)
        for _ in range(3):
            verdict, after = judge(server, state, [None] * N, torch.arange(N))
            assert torch.equal(after.params, state.params)
            assert set(verdict.reason.tolist()) == {Reason.MISSING}
            state = after


class EqualsAnything(type):
    """Whoever compares its classes is answered yes, or not at all."""

    def __eq__(cls, other):
        raise KeyboardInterrupt

    __hash__ = type.__hash__


def test_no_class_of_a_sender_is_asked_whether_it_equals_another():
    upload = EqualsAnything("Upload", (), {})()
    found = receive([upload, honest(1)], 2, D, LIKE)
    assert (found.present.tolist(), found.missing) == ([False, True], None)
    assert not receive(upload, 2, D, LIKE).present.any()


def test_no_round_is_drawn_for_twice():
    secret = Secret(torch.device("cpu"))
    secret.begin(3)
    for t in (3, 2, 0, -1, 3.5, True, "4"):
        with pytest.raises(PrivacyError, match="round = "):
            secret.begin(t)
    secret.begin(4)


def test_what_would_bare_a_worker_is_refused():
    run = federation(aggregator="mean")
    x, y, params = run.workers.x[:70], run.workers.y[:70], run.mechanism.model.initial()
    secret = Secret(torch.device("cpu"))
    secret.begin(0)
    with pytest.raises(PrivacyError, match=r"sigma = 0.0: leaves no noise"):
        upload_of_one(replace(run.mechanism, sigma=0.0), params, x, y, None, secret.source)
    with pytest.raises(ValueError, match="last: must be of shape"):
        upload_of_one(run.mechanism, params, x, y, torch.zeros(3), secret.source)
    with pytest.raises(ValueError, match="params: must be of shape"):
        upload_of_one(run.mechanism, params[:-1], x, y, None, secret.source)
    numbers, sizes, last = torch.arange(70).view(2, 35), torch.tensor([35, 35]), torch.zeros(3, run.d)
    with pytest.raises(ValueError, match="rows: must ascend"):
        Holdings(x, y, numbers, sizes, rows=torch.tensor([2, 0]))
    held = Holdings(x, y, numbers, sizes, rows=torch.tensor([1, 2]))
    sent = upload(run.mechanism, params, held, last, lambda what: stream(1, what))
    assert sent[1:].any(1).all()
    with pytest.raises(ValueError, match="into: lies in the same memory"):
        upload(run.mechanism, params, held, last, lambda what: stream(1, what), into=last)
    for sigma in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="sigma"):
            Mechanism.of(run.mechanism.model, (x, y), Normalized(), Poisson(4), sigma, declared=70)


# --- absence in the simulator -----------------------------------------------------------------------------------------


def test_absence_is_played_and_costs_the_same_epsilon():
    from noisegate import run

    spec = {"rounds": 40, "epsilon": 2.0, "byzantine": 0.6, "seed": 3}
    there, absent = (run(Spec(**spec, absent=share), compute=CPU) for share in (None, 0.25))
    assert there.missing == 0.0
    assert absent.missing == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / (40 * 25)) ** 0.5)
    # A batch that was drawn and not sent is paid for.
    assert (absent.epsilon, absent.sigma, absent.worker_epsilons) == (there.epsilon, there.sigma, there.worker_epsilons)
    assert absent.honest_rejected <= 0.01
    counted = sum(sum(line["rejected"].get("missing", {}).values()) for line in absent.curve)
    assert counted == round(absent.missing * 40 * 25)
    assert Spec(**spec, absent=0.0).name() == Spec(**spec).name() != Spec(**spec, absent=0.25).name()


@pytest.mark.parametrize("aggregator", ["two-stage", "fortified"])
def test_a_third_of_the_rounds_missing_costs_no_honest_worker_its_standing(aggregator):
    """One honest worker after the other misses 20 rounds of 60. Their scores are near what they are if none is missed.

    In the mean of the four: what `fortified` doubts of one compares it with the others, and varies with their noise.
    """
    run = federation(aggregator=aggregator, rounds=60, seed=2)

    def score_of(worker: int, missed=()) -> float:
        state, alone = first(run), torch.arange(len(run.workers)) == worker
        for t in range(60):
            with pytest.MonkeyPatch.context() as patch:
                if t in missed:
                    patch.setattr("noisegate.simulate.round.absent", lambda *_: alone)
                    state, verdict = play(run.change(absent=0.5), state, t)
                    assert verdict.reason[worker] == Reason.MISSING
                else:
                    state, verdict = play(run, state, t)
        return float(verdict.score[worker])

    honest = run.adversary.honest_rows.tolist()
    there, absent = (sum(score_of(worker, missed) for worker in honest) for missed in ((), range(20, 40)))
    assert absent > 0.85 * there > 0


@pytest.mark.parametrize("rounds", [20, 150, 200])
def test_an_outage_of_any_length_makes_no_honest_worker_suspect(rounds):
    """Nothing arrives for so many rounds, then everybody is back."""
    run = federation(aggregator="fortified", byzantine=0.0, attack="none", workers=8, rounds=300, seed=1)
    state, n = first(run), len(run.workers)
    for t in range(20):
        state, _ = play(run, state, t)
    server = state.server
    for _ in range(rounds):
        server = judge(run.server, server, [None] * n, torch.arange(n)).state
    state = replace(state, server=server)
    for t in range(20, 40):
        state, verdict = play(run, state, t)
        assert int(verdict.kept.sum()) >= n - 1


def test_the_share_that_is_believed_honest_is_of_those_that_arrived():
    """Half of the workers are missing: two-stage selects half as many."""
    run = federation(aggregator="two-stage", byzantine=0.5, workers=6, rounds=40, absent=0.5)
    state, kept = first(run), []
    for t in range(40):
        state, verdict = play(run, state, t)
        arrived = int((verdict.reason != Reason.MISSING).sum())
        assert int(verdict.kept.sum()) <= -(-6 * arrived // 12)
        kept.append(int(verdict.kept.sum()))
    assert 0 < sum(kept) / 40 < 4


def test_the_weight_of_byzantine_uploads_is_what_the_updates_were_made_of():
    run = federation(aggregator="fortified", rounds=30)
    from noisegate.simulate import Rounds, shares

    rounds = Rounds(run, start(run))
    state, byzantine, total = first(run), 0.0, 0.0
    for t in range(30):
        state, verdict = play(run, state, t)
        byzantine += float(verdict.weights[run.adversary.byzantine].sum())
        total += float(verdict.weights.sum())
        rounds.step()
    found = shares(run, rounds.settled())
    assert found.byzantine_weight == pytest.approx(byzantine / total, rel=1e-5)
    assert found.byzantine_weight < found.byzantine_selected


# --- the example ----------------------------------------------------------------------------------------------------


def test_the_example_transport_runs_and_is_short():
    path = Path(__file__).parents[1] / "examples" / "threads.py"
    done = subprocess.run([sys.executable, str(path), "40"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stdout
    accuracy, weights = done.stdout.strip().removeprefix("accuracy ").split(", mean weight of each worker ")
    flippers, honest = json.loads(weights)[:2], json.loads(weights)[2:]
    assert float(accuracy) > 0.5  # of ten classes
    assert max(flippers) < min(honest)
    text = path.read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 60
