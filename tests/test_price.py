"""The price of privacy: the same run without noise, and what delta means."""

import json
import math

import pytest

import noisegate
from noisegate import Compute, Spec, SpecError, noiseless, reference
from noisegate.privacy import default_delta
from noisegate.runs.setup import prepare

CPU = Compute(device="cpu")


def test_what_differs_is_the_noise():
    spec = Spec(epsilon=0.5, rounds=7, attack="trojan", aggregator="two-stage", gamma=0.5, batch=8, rate=0.3, seed=4)
    bare, clean = noiseless(spec).canonical(), reference(spec).canonical()
    assert {key for key in bare if bare[key] != clean[key]} == {"epsilon", "sigma"}
    assert (bare["sigma"], bare["epsilon"], bare["aggregator"], bare["byzantine"]) == (0.0, None, {"name": "mean"}, 0.0)


@pytest.mark.parametrize("epsilon", [2.0, 0.5])
def test_its_rate_is_the_base_rate(quick, epsilon):
    """A private run's step shrinks with its noise. That of a run without any is the one of epsilon 2."""
    spec = Spec(rounds=3, epsilon=epsilon, rate=0.3)
    private, bare = (prepare(each, CPU).federation for each in (reference(spec), noiseless(spec)))
    assert bare.server.rate == 0.3
    assert bare.mechanism.noise_std == 0.0
    assert private.server.rate == (0.3 if epsilon == 2.0 else pytest.approx(0.3 * base_over_own(spec)))
    assert bare.mechanism.batch == private.mechanism.batch
    assert bare.schedule.rounds == private.schedule.rounds


def base_over_own(spec: Spec) -> float:
    promise = prepare(reference(spec), CPU).privacy
    return promise.sigma_base / promise.sigma


def test_noise_costs_accuracy():
    spec = Spec(rounds=60, epsilon=0.25, byzantine=0.0, attack="none", aggregator="mean")
    private, bare = noisegate.run(spec, compute=CPU), noisegate.run(noiseless(spec), compute=CPU)
    assert bare.epsilon is None
    assert bare.accuracy > private.accuracy + 0.05


def test_where_there_is_none():
    with pytest.raises(SpecError, match=r"secret = true: the same training without noise keeps no promise"):
        noiseless(Spec(secret=True))
    with pytest.raises(SpecError, match=r"worker = 'sign-randomized': is made of noise"):
        noiseless(Spec(worker="sign-randomized", aggregator="sign-vote"))


def test_on_the_command_line(cli, tmp_path):
    """In the table, in the JSON, in the report; and what all trainings cost together says that one had no noise."""
    asked = ("run", "--rounds", 3, "--sigma", 2.5, "--price", "--out", "priced")
    shown = cli(*asked)
    assert (shown.status, shown.err) == (0, "") or shown.status == 0
    words = " ".join(shown.out.split())
    assert "without noise" in words
    assert "privacy costs" in words
    assert "no bound exists" in words
    assert "delta is the probability that epsilon does not hold" in words
    stored = json.loads((tmp_path / "priced" / "noiseless" / "result.json").read_text())
    found = cli("run", "--rounds", 3, "--sigma", 2.5, "--price", "--out", "again", "--json").json
    assert found["noiseless_accuracy"] == stored["accuracy"]
    assert found["epsilon_together"] is None
    assert "reference_accuracy" not in found
    assert cli("report", "priced", "-o", "page.html").status == 0
    assert "without noise" in (tmp_path / "page.html").read_text()


def test_a_run_that_cannot_be_without_noise_is_refused_before_it_begins(cli, tmp_path):
    answer = cli("run", "--rounds", 3, "--secret", "--byzantine", 0, "--attack", "none", "--price", "--out", "secret")
    assert answer.status == 2
    assert "find its accuracy without secret" in answer.err
    assert not (tmp_path / "secret").exists()


@pytest.mark.parametrize("held", [10, 100, 2000, 10_000, 1_000_000])
def test_the_default_delta_is_small_beside_any_worker(held):
    """What docs/guarantees.md says of it."""
    assert default_delta(held) <= 1e-5
    assert default_delta(held) * held <= 0.1 * (1 + 1e-12)


def test_what_delta_means_is_said(cli):
    answer = cli("privacy", "--samples", 2000, "--rounds", 10, "--sigma", 3)
    assert "of 2,000 examples it is at most 0.02 on average" in " ".join(answer.out.split())
    assert math.isclose(default_delta(2000) * 2000, 0.02)
