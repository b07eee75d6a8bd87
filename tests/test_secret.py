"""Secret runs: nothing that was written gives noise or batches back, and no round is drawn for twice."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noisegate import Compute, Poisson, Spec, SpecError, StoreError, epsilon, run
from noisegate.entropy import Source
from noisegate.runs.setup import prepare
from noisegate.simulate import first_state, play, rounds, shares, start
from noisegate.views import Reason
from noisegate.workers import Direct
from oracles import ks_p_value

CPU = Compute(device="cpu", threads=1)
SPEC = Spec(rounds=12, sigma=4.0, sigma_base=4.0, accountant="rdp", secret=True, evaluate_every=4, workers=4)


@pytest.fixture
def drawn_for(monkeypatch):
    """The rounds that noise was drawn for, in order."""
    found: list[int] = []

    def noted(federation, state, t, *args):
        found.append(t)
        return play(federation, state, t, *args)

    monkeypatch.setattr(rounds, "play", noted)
    return found


def test_a_secret_run_never_gives_the_same_twice():
    first, again = (prepare(SPEC, CPU).federation for _ in range(2))
    assert torch.equal(first.workers.holdings, again.workers.holdings)  # data and weights follow from the seed
    assert torch.equal(first.mechanism.model.initial(), again.mechanism.model.initial())
    ours, theirs = (play(each, first_state(each), 0)[0].uploads for each in (first, again))
    assert ((ours - theirs).norm(dim=1) / ours.norm(dim=1)).min() > 1


@pytest.mark.parametrize("attack", ["none", "label-flip", "gaussian", "gradient-ascent"])
def test_secret_uploads_are_sums_plus_the_stated_noise(attack, monkeypatch):
    """Whoever is active: everyone, or the honest workers alone."""
    batches = []
    uniform = Source.uniform
    monkeypatch.setattr(Source, "uniform", lambda self, *shape: batches.append(uniform(self, *shape)) or batches[-1])
    run_ = prepare(Spec(**{**SPEC.canonical(), "attack": attack, "aggregator": "mean"}), CPU).federation
    state, _ = play(run_, first_state(run_), 0)
    active = run_.active(run_.phase(0)).holdings
    held = torch.arange(active.longest) < active.sizes[:, None]
    drawn = (batches[0] < run_.mechanism.sampling.rate(run_.mechanism.declared)) & held
    owner, number = drawn.nonzero(as_tuple=True)
    rows = torch.arange(len(run_.workers)) if active.rows is None else active.rows
    chosen = run_.workers.holdings[rows[owner], number]
    nothing = torch.zeros(len(rows), run_.mechanism.model.d)
    exact = Direct(run_.mechanism.model)(
        run_.mechanism.worker,
        run_.mechanism.model.initial(),
        run_.workers.x[chosen],
        run_.workers.y[chosen],
        owner,
        nothing,
    )
    honest = ~run_.adversary.byzantine[rows]
    noise = (state.uploads[rows].double() - exact.double() / run_.mechanism.batch)[honest]
    assert ks_p_value(noise.flatten(), run_.mechanism.added_noise) > 1e-6  # another noise every time
    assert ks_p_value(noise.flatten(), 0.8 * run_.mechanism.added_noise) < 1e-6
    away = torch.corrcoef(noise) - torch.eye(len(noise))
    assert away.abs().max() < 6.5 / run_.mechanism.model.d**0.5


@pytest.mark.parametrize("worker", ["sign-randomized", "ma-sign", "sign-gaussian", "clipped", "clipped-momentum"])
def test_every_worker_can_be_secret(worker):
    spec = Spec(worker=worker, aggregator="mean", byzantine=0.0, rounds=3, secret=True, workers=4)
    assert run(spec, compute=CPU).secret


def test_secret_without_noise_is_refused():
    with pytest.raises(SpecError, match="secret = True: needs noise"):
        Spec(secret=True, sigma=0.0, aggregator="mean")


def test_an_interrupted_secret_run_goes_on_behind_what_it_drew_for(tmp_path, drawn_for):
    stop_at = 6

    def stop(progress, rounds):
        if progress.rounds == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SPEC, compute=CPU, out=tmp_path / "run", watch=stop)
    result = run(SPEC, compute=CPU, out=tmp_path / "run", resume=True)
    assert drawn_for == list(range(12))
    assert (result.rounds, result.rounds_lost, result.secret) == (12, 0, True)


def test_an_interruption_in_a_round_loses_that_round(tmp_path, monkeypatch):
    drawn = []

    def broken(federation, state, t, *args):
        drawn.append(t)
        if t == 6 and len(drawn) == 7:
            raise KeyboardInterrupt
        return play(federation, state, t, *args)

    monkeypatch.setattr(rounds, "play", broken)
    with pytest.raises(KeyboardInterrupt):
        run(SPEC, compute=CPU, out=tmp_path / "run")
    result = run(SPEC, compute=CPU, out=tmp_path / "run", resume=True)
    assert drawn == list(range(12))
    assert result.rounds_lost == 1


def test_a_killed_secret_run_never_draws_for_a_round_twice(tmp_path, drawn_for):
    """kill -9 in the middle: the rounds that were reserved are lost, their numbers and their price are not."""
    out = tmp_path / "run"
    spec = Spec(**{**SPEC.canonical(), "rounds": 4000, "evaluate_every": 1000})
    code = f"""
import noisegate
from noisegate.runs.spec import make_spec
noisegate.run(make_spec({spec.canonical()!r}), compute=noisegate.Compute(device="cpu", threads=1), out={str(out)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    while not any(out.glob("checkpoint*")):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    def few(progress, rounds):
        if len(drawn_for) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, compute=CPU, out=out, resume=True, watch=few)
    assert drawn_for == [1000, 1001, 1002]


def test_lost_rounds_are_called_so_and_their_price_is_paid():
    setup = prepare(SPEC, CPU)
    moved = replace(start(setup.federation), reserved=5).skip_reserved()
    assert (moved.rounds, moved.lost) == (5, 5)
    assert (moved.reasons[:5] == Reason.LOST).all()
    assert shares(setup.federation, moved) == (0.0,) * 5  # nobody was refused, nothing was used, nobody fell back
    whole = epsilon(4.0, examples=setup.privacy.declared, rounds=12, sampling=Poisson(SPEC.batch), accountant="rdp")
    assert setup.privacy.epsilon == whole  # of all rounds, whether they are played or lost


def test_the_folder_of_a_secret_run_does_not_give_its_draws_back(tmp_path):
    """Whoever has the folder knows spec and seed. What they draw with these is not what the run drew."""
    out = tmp_path / "run"

    def stop(progress, rounds):
        if progress.rounds == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SPEC, compute=CPU, out=out, watch=stop)
    files = {path.name for path in out.iterdir()}
    assert files == {"spec.toml", "environment.json", "checkpoint.safetensors", "rounds.jsonl", ".lock"}
    sent = load_file(out / "checkpoint.safetensors")["uploads"]
    for secret in (True, False):
        again = prepare(replace(SPEC, secret=secret), CPU).federation
        uploads = play(again, first_state(again), 0)[0].uploads
        assert ((uploads - sent).norm(dim=1) / sent.norm(dim=1)).min() > 1  # independent: about sqrt(2)


def test_the_folder_of_another_run_does(tmp_path):
    """So that the test above can fail: without --secret the folder gives every upload back."""
    out, spec = tmp_path / "run", replace(SPEC, secret=False)

    def stop(progress, rounds):
        if progress.rounds == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, compute=CPU, out=out, watch=stop)
    sent = load_file(out / "checkpoint.safetensors")["uploads"]
    again = prepare(spec, CPU).federation
    assert torch.equal(play(again, first_state(again), 0)[0].uploads, sent)


def test_rounds_that_no_evaluation_divides_can_be_lost_in_the_last_stretch_too(tmp_path, monkeypatch):
    spec = replace(SPEC, rounds=10)  # evaluated after 4, 8 and 10: 12 would be reserved
    drawn = []

    def broken(federation, state, t, *args):
        drawn.append(t)
        if t == 9 and len(drawn) == 10:
            raise MemoryError  # as good as a kill: nothing is saved
        return play(federation, state, t, *args)

    monkeypatch.setattr(rounds, "play", broken)
    with pytest.raises(MemoryError):
        run(spec, compute=CPU, out=tmp_path / "run")
    result = run(spec, compute=CPU, out=tmp_path / "run", resume=True)
    assert drawn == list(range(10))
    assert (result.rounds, result.rounds_lost) == (10, 2)


def test_a_secret_run_is_never_started_afresh_over_another(tmp_path):
    run(SPEC, compute=CPU, out=tmp_path / "run")
    with pytest.raises(StoreError, match="holds a secret run, whose budget is spent"):
        run(SPEC, compute=CPU, out=tmp_path / "run")
    assert run(SPEC, compute=CPU, out=tmp_path / "run", resume=True).secret


def test_a_secret_result_says_so_and_a_run_of_the_seed_does_not(tmp_path):
    assert run(SPEC, compute=CPU).secret
    open_run = run(Spec(**{**SPEC.canonical(), "secret": False}), compute=CPU)
    assert not open_run.secret
    assert np.isfinite(open_run.epsilon)
