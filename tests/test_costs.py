"""What a command says that everything it trained costs together."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from noisegate.cli.table import _promise
from noisegate.privacy import Cost, epsilon, together
from noisegate.runs import Spec, costs
from noisegate.sampling import Poisson

OLD_DIGITS = {"sigma": 2.438, "rounds": 267, "sampling_rate": 16 / 141, "parameters": 2410, "copies": 1}
BATCH_16 = Spec(batch=16)
DELTA = 141**-1.1
SHORT = ["--rounds", "3", "--sigma", "1.5", "--declared", "141", "--batch", "16", "--device", "cpu"]


def result(spec: Spec | None = None, **changed):
    """What a result says of a run; by default one on digits as it was when delta was the paper's."""
    spent = epsilon(2.438, examples=141, rounds=267, sampling=Poisson(16), delta=DELTA)
    settings = {"epsilon": spent, "delta": DELTA, **OLD_DIGITS, **changed}
    return {"spec": (spec or BATCH_16).canonical(), **settings}


def bill(*results):
    (only,) = costs.bills(map(costs.training_of, results))
    return only


@pytest.mark.parametrize(("runs", "known"), [(1, 1.999), (3, 4.029), (5, 5.643)])
def test_the_run_its_reference_and_the_undefended_one_cost_4_where_each_costs_2(runs, known):
    found = bill(*[result()] * runs)
    assert found.trainings == runs
    assert found.epsilon == pytest.approx(known, abs=0.001)
    assert found.delta == DELTA
    word = "training" if runs == 1 else "trainings"
    assert f"{runs} {word} on digits cost an example epsilon {known:.3f} together" in found.sentence()


def test_one_training_costs_what_its_result_says():
    assert bill(result(epsilon=1.23)).epsilon == 1.23


def test_different_deltas_count_at_the_smallest():
    found = bill(result(), result(delta=1e-5))
    assert found.delta == 1e-5
    assert found.epsilon == together([Cost(141, 16, "poisson", 2.438, 267, times=2)], 1e-5)


def test_copies_cost_as_often_as_there_are():
    alone, twice = bill(result()), bill(result(copies=2))
    assert twice.epsilon == pytest.approx(bill(result(), result()).epsilon)
    assert twice.epsilon > 1.4 * alone.epsilon


def test_data_sets_are_apart_and_a_file_is_the_same_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    specs = [BATCH_16, Spec(dataset="mnist"), Spec(dataset="mine.npz"), Spec(dataset=str(tmp_path / "." / "mine.npz"))]
    found = costs.bills(costs.training_of(result(spec)) for spec in specs)
    assert [one.trainings for one in found] == [1, 1, 2]
    assert found[2].data == str(tmp_path / "mine.npz")
    told = costs.as_json(found)
    assert told["trainings"] == 4
    assert told["epsilon_together"] == found[2].epsilon > found[0].epsilon
    assert [row["data"] for row in json.loads(json.dumps(told))["together"]] == [one.data for one in found]


def test_without_noise_no_bound_exists():
    found = bill(result(), result(sigma=0.0, epsilon=None))
    assert found.epsilon is None
    assert (
        found.sentence()
        == "privacy: 2 trainings on digits have no epsilon together: 1 had no noise, so no bound exists"
    )
    told = costs.as_json([bill(result(Spec(dataset="mnist"))), found])
    assert told["epsilon_together"] is None


def test_what_cannot_be_priced_says_why():
    fixed = result(Spec(sampling="fixed", accountant="rdp", batch=16), sampling_rate=16 / 100)
    assert "no common price" in bill(result(), fixed).note
    assert costs.training_of(fixed).cost.declared == 100, "the smallest worker's"


def test_a_worker_that_flips_signs_is_priced_for_flips():
    assert costs.training_of(result(Spec(aggregator="ma-sign"))).cost.signs == 2410
    assert costs.training_of(result()).cost.signs == 0


def test_run_says_both(cli):
    found = cli("run", *SHORT, "--baselines", "--json").json
    one = Cost(141, 16, "poisson", 1.5, 3)
    assert found["trainings"] == 3
    assert found["delta_together"] == found["delta"] == 1e-5
    assert found["epsilon_together"] == together([one] * 3, 1e-5) > found["epsilon"]
    alone = cli("run", *SHORT, "--json", "--out", "alone").json
    assert (alone["trainings"], alone["epsilon_together"]) == (1, alone["epsilon"])
    people = " ".join(cli("run", *SHORT, "--out", "people").out.split())
    assert f"together {found['epsilon_together']:.3f}" in people
    assert "for all 3 trainings of this command" in people


def test_run_without_noise_says_that_there_is_no_bound(cli):
    found = cli(
        "run", "--rounds", 2, "--sigma", 0, "--aggregator", "mean", "--device", "cpu", "--baselines", "--json"
    ).json
    assert found["epsilon_together"] is None
    assert found["together"][0]["note"] == "3 had no noise, so no bound exists"


def test_sweeps_count_what_was_done_before(cli, tmp_path):
    head = 'rounds = 2\nbatch = 16\nsigma = 1.5\ndeclared = 141\naggregator = "mean"\n'
    for seeds in ("[1]", "[1, 2]"):
        (tmp_path / "grid.toml").write_text(f"{head}[sweep]\nseed = {seeds}\n")
        found = cli("sweep", "grid.toml", "--device", "cpu", "--jobs", "1", "--json").json
    assert found["trainings"] == 2
    assert found["epsilon_together"] == together([Cost(141, 16, "poisson", 1.5, 2)] * 2, 1e-5)
    people = cli("sweep", "grid.toml", "--device", "cpu", "--jobs", "1").out
    assert f"privacy: 2 trainings on digits cost an example epsilon {found['epsilon_together']:.3f} together" in people


def test_a_red_team_says_what_it_cost(cli):
    flags = ["redteam", *SHORT, "--aggregator", "mean", "--budget", "2", "--shares", "0.4", "--jobs", "1"]
    found = cli(*flags, "--json").json
    assert found["trainings"] == found["runs"] + 2, "and two without attack"
    assert found["epsilon_together"] >= together([Cost(141, 16, "poisson", 1.5, 3)] * found["trainings"], 1e-5) * 0.999
    assert math.isfinite(found["epsilon_together"])
    people = cli(*flags).out
    assert f"privacy: {found['trainings']} trainings on digits cost an example epsilon" in people


def test_the_table_says_the_same_noise_in_every_way():
    told = result(epsilon_at_1e_5=3.494, mu=0.844, accountant="pld", relation="add-or-remove")
    run = SimpleNamespace(**told, as_dict=lambda: told)
    rows = {name.strip(): (number, words) for name, number, words in _promise(run, bill(told, told, told))}
    assert rows["epsilon"][0] == "1.999"
    assert "delta 0.0043, sigma 2.438, PLD; one example of one worker added or removed" in rows["epsilon"][1]
    assert rows["at delta 1e-5"][0] == "3.494"
    assert rows["mu"] == ("0.844", "at least as private as mu-GDP at every delta of 1e-10 or more")
    assert rows["together"][0] == "4.029"
    assert "all 3 trainings" in rows["together"][1]
    assert "together" not in {name.strip() for name, *_ in _promise(run, bill(told))}, "one training: nothing to add"
