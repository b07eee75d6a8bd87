"""The noise in an upload: right size, right shape, fresh for every worker and round, over a public divisor."""

import pytest
import torch
from torch import nn

from noisegate import Compute, Dataset, Spec
from noisegate.protocol import Mechanism, Server
from noisegate.runs import reference, undefended
from noisegate.runs.setup import prepare
from noisegate.sampling import Poisson
from noisegate.simulate import Adversary, Federation, Schedule, Workers, first_state, play
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.views import Reason, Verdict
from noisegate.workers import Clipped, Direct, Normalized, choose_sums, fill_with_noise, rounded_sensitivity
from oracles import ks_p_value

SIGMA, BATCH, D = 3.0, 16, 20_000
SUMS = torch.randn(6, D, generator=stream(1, "sums"))

PASSES, FAILS = 1e-3, 1e-4
"""p-values with fixed seeds: true noise lies above 1e-3 but once in a thousand seeds; ten thousand values of
a tenth too much or too little noise lie far below 1e-4."""

CORRELATION = 5 / D**0.5
"""Five standard deviations of the sample correlation of two independent rows."""


def noise_of(uploads: torch.Tensor, sums: torch.Tensor, batch: int = BATCH) -> torch.Tensor:
    return uploads.double() - sums.double() / batch


def assert_noise(noise: torch.Tensor, s: float) -> None:
    """Normal with standard deviation s, and neither a tenth more nor less."""
    assert ks_p_value(noise.flatten(), s) > PASSES
    assert ks_p_value(noise.flatten(), 0.9 * s) < FAILS
    assert ks_p_value(noise.flatten(), 1.1 * s) < FAILS


def add_noise(sums: torch.Tensor, std: float, divisor: int, rng: torch.Generator) -> torch.Tensor:
    """As a round does it: noise into the upload's place, then the sums."""
    uploads = torch.full_like(sums, torch.nan)
    fill_with_noise(uploads, std / divisor, rng)
    return uploads.add_(sums, alpha=1 / divisor)


def upload(round: int = 0, sums: torch.Tensor = SUMS) -> torch.Tensor:
    return add_noise(sums, SIGMA, BATCH, stream(1, "noise", round))


@pytest.mark.parametrize("row", range(6))
def test_an_upload_less_its_exact_sum_is_noise_of_sigma_over_batch(row):
    assert_noise(noise_of(upload(), SUMS)[row], SIGMA / BATCH)


def test_rows_are_uncorrelated_across_workers_rounds_and_names():
    others = add_noise(SUMS, SIGMA, BATCH, stream(1, "batch", 0))
    rows = torch.cat([noise_of(found, SUMS) for found in (upload(0), upload(1), upload(2), others)])
    away = torch.corrcoef(rows) - torch.eye(len(rows))
    assert away.abs().max() < CORRELATION


def test_the_same_stream_gives_the_same_bytes_and_another_round_does_not():
    assert torch.equal(upload(3), upload(3))
    assert not (upload(3) == upload(4)).any()


def test_without_noise_nothing_is_written_but_zeros():
    rows = torch.full_like(SUMS, torch.nan)
    fill_with_noise(rows, 0.0, stream(1, "noise"))
    assert not rows.any()


# Through a round.


class Record:
    """An aggregator that remembers what the server saw, and keeps nobody."""

    def __init__(self):
        self.views = []

    def __call__(self, view, state):
        self.views.append(view)
        n = len(view.norms)
        reason = torch.full((n,), Reason.SCORE.value)
        return Verdict(torch.zeros(view.uploads.shape[1]), reason == 0, reason, torch.zeros(n), state)


class Nobody:
    """The attack of no Byzantine worker."""

    knows = ""

    def check(self, honest, byzantine): ...

    def phase(self, progress):
        return None

    def needs_own(self, phase):
        return True

    def ascends(self, phase):
        return False


def federation(worker, n: int = 4, sizes: int = 40, batch: int = 5) -> Federation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = FlatModel(nn.Sequential(nn.Linear(60, 60), nn.ELU(), nn.Linear(60, 3)))
    rng = stream(1, "pool")
    x, y = torch.randn(n * sizes, 60, generator=rng), torch.randint(0, 3, (n * sizes,), generator=rng)
    mechanism = Mechanism(
        model, choose_sums(model, model.initial(), x[:4], y[:4]), worker, Poisson(batch), SIGMA, declared=sizes
    )
    server = Server(mechanism, Record(), x[:2], y[:2], workers=n, believed_honest=n, rate=0.1)
    return Federation(
        Workers(mechanism, x, y, torch.arange(n * sizes).view(n, sizes), torch.full((n,), sizes)),
        server,
        Adversary(Nobody(), torch.zeros(n, dtype=torch.bool), 3, server),
        Schedule(rounds=10, seed=7),
    )


def examples_of(run: Federation, t: int):
    """(x, y, owner) of what everyone draws in round t, looked up one by one."""
    drawn = run.mechanism.sampling.over(run.workers.sizes, run.mechanism.declared)(run.stream("batch", t))
    owner, number = drawn.nonzero(as_tuple=True)
    chosen = run.workers.holdings[owner, number]
    return run.workers.x[chosen], run.workers.y[chosen], owner


@pytest.mark.parametrize("worker", [Normalized(0.1), Clipped(2.5)])
def test_a_round_sends_exact_sums_plus_noise_of_sigma_times_sensitivity_over_the_public_batch(worker):
    run = federation(worker)
    state = first_state(run)
    drawn, noises = [], []
    for t in range(3):
        x, y, owner = examples_of(run, t)
        exact = Direct(run.mechanism.model)(worker, state.params, x, y, owner, state.uploads)
        state, _ = play(run, state, t)
        drawn += torch.bincount(owner, minlength=len(run.workers.sizes)).tolist()
        noises.append(noise_of(state.uploads, exact, run.mechanism.batch))
    noises = torch.cat(noises)
    s = SIGMA * rounded_sensitivity(worker, run.mechanism.batch) / run.mechanism.batch
    assert run.mechanism.noise_std == s == run.server.aggregator.views[0].noise_std
    assert worker.sensitivity <= rounded_sensitivity(worker, run.mechanism.batch) < 1.0001 * worker.sensitivity
    assert len(set(drawn)) > 3  # sizes differ, the divisor does not
    assert all(ks_p_value(noise, s) > PASSES for noise in noises)
    assert_noise(noises, s)
    away = torch.corrcoef(noises) - torch.eye(len(noises))
    assert away.abs().max() < 5 / run.mechanism.model.d**0.5


def test_noise_does_not_depend_on_the_data():
    """Two data sets, one stream: the uploads differ by their sums alone."""
    run = federation(Normalized(0.1))
    other = run.change(x=run.workers.x.flip(0) + 1.0)
    uploads, sums = [], []
    for each in (run, other):
        state, _ = play(each, first_state(each), 0)
        mechanism = each.mechanism
        drawn = examples_of(each, 0)
        sums.append(Direct(mechanism.model)(mechanism.worker, mechanism.model.initial(), *drawn, state.spare))
        uploads.append(state.uploads)
    assert (sums[0] - sums[1]).norm(dim=1).min() > 1
    torch.testing.assert_close(uploads[0] - uploads[1], (sums[0] - sums[1]) / run.mechanism.batch, rtol=0, atol=1e-6)


def test_the_divisor_is_the_public_batch_and_not_the_drawn_size():
    """Without noise, a worker that drew B examples of one and the same gradient sends a vector of length B / batch."""
    run = federation(Normalized(0.0))
    run = run.change(sigma=0.0, x=torch.ones_like(run.workers.x), y=torch.zeros_like(run.workers.y))
    state, _ = play(run, first_state(run), 0)
    drawn = torch.bincount(examples_of(run, 0)[2], minlength=len(run.workers.sizes))
    assert len(set(drawn.tolist())) > 1
    torch.testing.assert_close(
        state.uploads.norm(dim=1), drawn / run.mechanism.batch, rtol=1e-3, atol=0
    )  # margin 2^-14


def test_a_prepared_run_adds_the_noise_that_its_spec_states():
    rng = stream(3, "data")
    x, y = torch.randn(200, 100, generator=rng), torch.arange(200) % 2
    spec = Spec(
        dataset="mine",
        sigma=4.0,
        sigma_base=2.0,
        epsilon=50.0,
        delta=1e-3,
        workers=3,
        byzantine=0.0,
        batch=6,
        rounds=2,
        worker={"name": "clipped", "threshold": 0.5},
        rate=0.3,
    )
    setup = prepare(spec, Compute(device="cpu"), Dataset("mine", x, y, x[:20], y[:20], classes=2))
    run = setup.federation
    state, _ = play(run, first_state(run), 0)
    x, y, owner = examples_of(run, 0)
    exact = Direct(run.mechanism.model)(
        run.mechanism.worker, run.mechanism.model.initial(), x, y, owner, torch.zeros_like(state.uploads)
    )
    assert_noise(noise_of(state.uploads, exact, 6), 4.0 * 0.5 / 6)
    assert run.server.rate == pytest.approx(0.3 * 2.0 / 4.0)
    assert setup.privacy.sigma == 4.0


def noises_of(spec: Spec, rounds: int = 2) -> torch.Tensor:
    """(rounds, n, d): uploads less the sums that they came from."""
    run = prepare(spec, Compute(device="cpu")).federation
    state, found = first_state(run), []
    for t in range(rounds):
        x, y, owner = examples_of(run, t)
        exact = Direct(run.mechanism.model)(run.mechanism.worker, state.params, x, y, owner, state.uploads)
        state, _ = play(run, state, t)
        found.append(noise_of(state.uploads, exact, run.mechanism.batch))
    return torch.stack(found)


def test_a_run_and_those_it_is_compared_with_share_data_but_neither_noise_nor_batches():
    """The difference of two uploads with one noise would be the difference of two sums, bare."""
    spec = Spec(sigma=8.0, sigma_base=8.0, epsilon=2.0, rounds=20, attack="none")
    runs = [spec, undefended(spec), reference(spec)]
    ready = [prepare(each, Compute(device="cpu")).federation for each in runs]
    assert torch.equal(ready[0].workers.holdings, ready[1].workers.holdings)
    assert torch.equal(ready[0].mechanism.model.initial(), ready[2].mechanism.model.initial())
    draws = [
        run.mechanism.sampling.over(run.workers.sizes, run.mechanism.declared)(run.stream("batch", 0))[:10]
        for run in ready
    ]
    assert not torch.equal(draws[0], draws[1])
    noises = torch.cat([noises_of(each).flatten(0, 1) for each in runs])
    away = torch.corrcoef(noises) - torch.eye(len(noises))
    assert away.abs().max() < 6 / noises.shape[1] ** 0.5
