"""A run, its result and the folder it leaves."""

import dataclasses
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noisegate import Compute, Spec, SpecError, StoreError, data, reference, run, undefended
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.runs import read_spec
from noisegate.runs.setup import SharedData, prepare
from noisegate.simulate import first_state, play
from noisegate.streams import stream
from noisegate.views import Reason

PROMISED = {
    "accuracy",
    "best_accuracy",
    "curve",
    "epsilon",
    "delta",
    "sigma",
    "rounds",
    "workers",
    "byzantine",
    "attack",
}
PROMISED |= {"aggregator", "dataset", "seed", "honest_rejected", "byzantine_selected", "seconds", "ms_per_round"}
TIMES = {"seconds", "ms_per_round"}
FILES = {"spec.toml", "environment.json", "rounds.jsonl", "verdicts.npz", "model.safetensors", "result.json", ".lock"}


def timeless(result) -> dict:
    return {key: value for key, value in result.as_dict().items() if key not in TIMES}


def test_the_result_has_what_was_promised(quick):
    result = run(quick(seed=4))
    found = result.as_dict()
    assert found.keys() >= PROMISED
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["rounds"], found["workers"], found["byzantine"], found["byzantine_workers"]) == (3, 10, 0.6, 15)
    assert (found["attack"], found["aggregator"], found["dataset"], found["seed"]) == (
        "label-flip",
        "fortified",
        "digits",
        4,
    )
    assert found["sigma"] == 2.5
    assert 0 < found["epsilon"] <= 2.0
    assert len(found["worker_epsilons"]) == 10
    assert max(found["worker_epsilons"]) == found["epsilon"]
    assert 0 <= found["accuracy"] <= found["best_accuracy"] <= 1
    assert found["seconds"] > 0
    assert found["ms_per_round"] == pytest.approx(1e3 * found["seconds"] / 3)


def test_byzantine_is_the_share_that_results(quick):
    result = run(quick(workers=10, byzantine=0.25))
    assert result.byzantine_workers == 3
    assert result.byzantine == pytest.approx(3 / 13)


def test_the_last_accuracy_counts_and_the_best_stands_beside_it(quick):
    result = run(quick(rounds=12, evaluate_every=5, aggregator="mean"))
    assert [line["round"] for line in result.curve] == [5, 10, 12]
    assert result.accuracy == result.curve[-1]["accuracy"]
    assert result.best_accuracy == max(line["accuracy"] for line in result.curve)
    ruined = run(quick(rounds=12, evaluate_every=1, aggregator="mean", attack="inner"))
    assert ruined.best_accuracy == max(line["accuracy"] for line in ruined.curve) > ruined.accuracy


def test_same_spec_same_result(quick):
    first = run(quick(rounds=6))
    torch.manual_seed(99)
    torch.rand(7)  # no global generator may matter
    assert timeless(run(quick(rounds=6))) == timeless(first)


def test_no_global_generator_is_moved(quick):
    torch.manual_seed(5)
    np.random.seed(5)
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].tolist()
    run(quick())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numbers


def test_another_seed_another_run(quick, tmp_path):
    models = []
    for seed in (1, 2):
        run(quick(seed=seed), out=tmp_path / str(seed))
        models.append(load_file(tmp_path / str(seed) / "model.safetensors")["1.weight"])
    assert not torch.allclose(*models)


def test_chunks_change_speed_only(quick):
    small, large = (run(quick(), compute=Compute(device="cpu", chunk=chunk)) for chunk in (7, 512))
    assert small.curve[-1]["selected"] == large.curve[-1]["selected"]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_every_attack_meets_every_aggregator(quick, attack, aggregator):
    result = run(quick(attack=attack, aggregator=aggregator))
    assert (result.attack, result.aggregator) == (attack, aggregator)
    used, uploads = 0, 0
    for line in result.curve:
        counts = [line["selected"], *line["rejected"].values()]
        used += sum(line["selected"].values())
        uploads += sum(sum(pair.values()) for pair in counts)
    assert uploads == 3 * 25, "every upload is counted once"
    assert used > 0


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_may_begin_late(quick, attack):
    for asleep in ("behave", "copy"):
        assert run(quick(attack=attack, attack_start=0.5, attack_asleep=asleep)).rounds == 3


@pytest.mark.parametrize("changes", [{"worker": "clipped"}, {"non_iid": True}, {"dirichlet": 5.0}, {"byzantine": 0.0}])
def test_other_settings_run(quick, changes):
    result = run(quick(**changes))
    assert result.rounds == 3
    assert result.byzantine_selected < 1


def test_fixed_batches_are_charged_as_such(quick):
    result = run(quick(sampling="fixed", accountant="rdp", sigma=20.0, sigma_base=20.0))
    cheap = run(quick(sampling="poisson", accountant="rdp", sigma=20.0, sigma_base=20.0))
    assert result.epsilon > cheap.epsilon


def test_gamma_bounds_how_many_are_used(quick):
    for gamma, most in ((0.2, 5), (1.0, 25)):
        result = run(quick(gamma=gamma, evaluate_every=1, aggregator="two-stage"))
        for line in result.curve:
            assert 0 < sum(line["selected"].values()) <= most
    assert sum(result.curve[0]["selected"].values()) > 10, "gamma = 1 believes everybody"


@pytest.mark.parametrize("aggregator", ["mean", "two-stage"])
def test_the_shares_are_those_of_the_verdicts(quick, tmp_path, aggregator):
    result = run(quick(rounds=8, attack="gaussian", aggregator=aggregator), out=tmp_path / "run")
    with np.load(tmp_path / "run" / "verdicts.npz") as verdicts:
        reasons, scores, lying = verdicts["reasons"], verdicts["scores"], verdicts["byzantine"]
    assert reasons.shape == scores.shape == (8, 25)
    assert lying.dtype == bool
    assert lying.sum() == 15
    tests = [Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION]
    refused = sum(reasons[t, i] in tests for t in range(8) for i in range(25) if not lying[i])
    used = [bool(lying[i]) for t in range(8) for i in range(25) if reasons[t, i] == Reason.KEPT]
    assert result.honest_rejected == pytest.approx(refused / 80)
    assert result.byzantine_selected == pytest.approx(sum(used) / len(used))
    if aggregator == "mean":
        assert (result.honest_rejected, result.byzantine_selected) == (0.0, 0.6)
    else:
        assert 0 < result.honest_rejected < 0.5, "the two tests refuse some of the honest uploads"
    lines = result.curve
    assert sum(line["selected"]["honest"] for line in lines) == len(used) - sum(used)


def test_the_reference_has_no_attackers_and_loses_nobody(quick):
    result = run(reference(quick()))
    assert (result.byzantine_workers, result.byzantine_selected, result.honest_rejected) == (0, 0.0, 0.0)
    assert result.aggregator == "mean"
    bare = run(undefended(quick()))
    assert (bare.byzantine_workers, bare.byzantine_selected) == (15, 0.6)


# --- the folder ----------------------------------------------------------------------------------------------------


def test_the_folder_holds_the_run(quick, tmp_path):
    spec, out = quick(rounds=4, evaluate_every=2, seed=3), tmp_path / "a" / "b"
    result = run(spec, out=out)
    assert {path.name for path in out.iterdir()} == FILES, "no temporary file stays"
    written = json.loads((out / "result.json").read_text())
    assert {key: value for key, value in written.items() if key not in ("sha256", "files")} == result.as_dict()
    for name, told in written["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == told
    assert written["files"].keys() == {"rounds.jsonl", "verdicts.npz", "model.safetensors"}
    assert read_spec(out / "spec.toml").canonical() == spec.canonical()
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert lines == result.curve
    environment = json.loads((out / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["packages"].keys() >= {"noisegate", "torch", "numpy", "scipy", "dp-accounting"}
    assert environment["device"]
    assert environment["threads"] == torch.get_num_threads()
    model = load_file(out / "model.safetensors")
    assert sum(value.numel() for value in model.values()) == result.parameters


def test_a_run_is_begun_afresh_without_resume(quick, tmp_path):
    first = run(quick(), out=tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{}")
    again = run(quick(), out=tmp_path / "run")
    assert timeless(again) == timeless(first)


def test_a_folder_with_another_run_is_refused(quick, tmp_path):
    run(quick(), out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for resume in (False, True):
        with pytest.raises(StoreError, match=r"other settings \(seed = 1, not 2\); choose another --out"):
            run(quick(seed=2), out=tmp_path / "run", resume=resume)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_foreign_folder_is_refused(quick, tmp_path):
    (tmp_path / "thesis.doc").write_text("years of work")
    with pytest.raises(StoreError, match="not empty and holds no run"):
        run(quick(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]


def test_an_empty_folder_is_taken(quick, tmp_path):
    (tmp_path / "run").mkdir()
    run(quick(), out=tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(quick, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        run(quick(), out=tmp_path / "run")
    with pytest.raises(StoreError, match="cannot be written"):
        run(quick(), out=tmp_path / "run" / "deeper")


def test_a_damaged_spec_is_refused(quick, tmp_path):
    run(quick(), out=tmp_path / "run")
    (tmp_path / "run" / "spec.toml").write_text("seed = [")
    with pytest.raises(StoreError, match=r"spec\.toml is damaged"):
        run(quick(), out=tmp_path / "run")


def test_a_refused_spec_leaves_the_folder_free(quick, tmp_path):
    """What was never run must not keep others out."""
    with pytest.raises(SpecError, match="local-poisoning"):
        run(quick(attack="local-poisoning", byzantine=0.1), out=tmp_path / "run")
    assert run(quick(), out=tmp_path / "run").rounds == 3


def test_result_and_spec_are_frozen(quick):
    with pytest.raises(dataclasses.FrozenInstanceError):
        run(quick()).accuracy = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        Spec().seed = 2


def test_without_noise_nothing_is_promised(quick):
    result = run(quick(sigma=0.0, epsilon=None, sigma_base=None, byzantine=0.0, attack="none", aggregator="mean"))
    assert result.epsilon is None
    assert result.worker_epsilons == []
    assert result.accountant == "none"
    found = result.as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_without_noise_an_upload_is_the_signal_alone(quick):
    """The same batches and the same model: what is sent twice is the same, and short."""
    spec = quick(sigma=0.0, epsilon=None, sigma_base=None, byzantine=0.0, attack="none", aggregator="mean")
    federation = prepare(spec, Compute(device="cpu")).federation
    assert federation.server.rate == spec.rate
    state, _ = play(federation, first_state(federation), 0)
    assert float(state.uploads.norm(dim=1).max()) <= 3.0  # of batches up to three times as large as expected


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"aggregator": "fortified"}, "leaves no noise, which aggregator 'fortified' tests for"),
        ({"aggregator": "two-stage"}, "leaves no noise, which aggregator 'two-stage' tests for"),
        ({"aggregator": "sign-vote", "worker": "sign-randomized"}, "needs noise"),
    ],
)
def test_what_needs_noise_is_refused_without_it(quick, changed, said):
    with pytest.raises(SpecError, match=said):
        run(quick(**{"sigma": 0.0, "epsilon": None, "sigma_base": None, **changed}))


def test_no_noise_keeps_no_budget():
    with pytest.raises(SpecError, match="cannot be kept with sigma = 0"):
        Spec(sigma=0.0, epsilon=2.0)


def test_the_servers_examples_may_be_of_another_data_set(quick, monkeypatch):
    """Its own numbers and labels, and all of the workers' pool stays the workers'."""
    plain = prepare(quick(), Compute(device="cpu")).federation
    other = data.load("digits", stream(0, "test-split"))
    other = replace(other, name="other", x=other.x + 100)
    monkeypatch.setitem(data.SOURCES, "other", data.SOURCES["digits"])
    monkeypatch.setattr(SharedData, "load_auxiliary", lambda self, name: other)
    foreign = prepare(quick(auxiliary_from="other"), Compute(device="cpu")).federation
    assert float(foreign.server.aux_x.min()) > 50 > float(plain.server.aux_x.max())
    assert len(foreign.server.aux_y) == len(plain.server.aux_y) == 20
    assert foreign.server.strata == 10
    workers = foreign.workers
    held = {int(i) for row, size in zip(workers.holdings, workers.sizes, strict=True) for i in row[: int(size)]}
    assert len(held) == len(workers.y)


def test_a_folder_of_a_run_with_other_server_examples_is_refused(quick, tmp_path):
    """A setting that only one of the two has."""
    run(quick(), out=tmp_path / "run")
    with pytest.raises(StoreError, match=r"other settings \(auxiliary_from = None, not 'kmnist'\)"):
        run(quick(auxiliary_from="kmnist"), out=tmp_path / "run", resume=True)


def test_server_examples_that_do_not_fit_are_refused(quick):
    with pytest.raises(SpecError, match="must be one of"):
        run(quick(auxiliary_from="cifar"))


def test_server_examples_of_another_shape_are_refused(quick, monkeypatch):
    other = data.load("digits", stream(0, "test-split"))
    narrow = replace(other, x=other.x[..., :4], x_test=other.x_test[..., :4])
    monkeypatch.setattr(SharedData, "load_auxiliary", lambda self, name: narrow)
    with pytest.raises(SpecError, match="choose a data set like it"):
        run(quick(auxiliary_from="kmnist"))
