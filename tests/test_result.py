"""What a result can do beside its numbers: the trained model, predictions, tables, pictures, and its way back."""

import json
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import noisegate
from conftest import sealed
from noisegate import DataError, Dataset, LabelFlip, NoisegateError, Result, SpecError, StoreError
from noisegate.data import load as load_data
from noisegate.streams import stream
from test_own_data import Frame


@pytest.fixture
def digits():
    return load_data("digits", stream(1, "test-split"))


def called(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The oracle: the module as anybody would use it."""
    with torch.no_grad():
        return module(x).argmax(1)


def test_the_model_is_what_was_trained(quick, digits):
    result = noisegate.run(quick(rounds=20))
    module = result.model
    assert isinstance(module, nn.Module)
    assert not module.training
    right = (called(module, digits.x_test) == digits.y_test).float().mean()
    assert float(right) == pytest.approx(result.accuracy)
    assert torch.equal(result.predict(digits.x_test), called(module, digits.x_test))


def test_the_model_is_a_copy_that_may_be_trained_on(quick, digits):
    result = noisegate.run(quick())
    before = result.predict(digits.x_test)
    module = result.model
    assert all(parameter.requires_grad for parameter in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(result.predict(digits.x_test), before)


def test_the_callers_module_stays_as_it_is(quick):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = [parameter.clone() for parameter in net.parameters()]
    result = noisegate.run(quick(model=net))
    assert all(map(torch.equal, before, net.parameters()))
    assert not torch.equal(result.model[1].weight, net[1].weight)


def test_predict_takes_what_a_dataset_takes(quick, digits):
    result = noisegate.run(quick())
    wanted = result.predict(digits.x_test)
    assert torch.equal(result.predict(digits.x_test.numpy()), wanted)
    assert torch.equal(result.predict(digits.x_test.double()), wanted)
    assert torch.equal(result.predict(digits.x_test[:3].tolist()), wanted[:3])
    with pytest.raises(DataError, match=r"x is of shape \(4, 63\), but the model takes \(N, 1, 8, 8\)"):
        result.predict(torch.zeros(4, 63))
    with pytest.raises(DataError, match="must be real numbers"):
        result.predict(np.array([["a", "b"]]))


def test_one_logit_predicts_two_classes(quick, toy):
    two = toy(classes=2)
    net = nn.Linear(5, 1)
    result = noisegate.run(quick(dataset="toy", workers=3, byzantine=0.0, model=net), dataset=two)
    found = result.predict(two.x_test)
    assert set(found.tolist()) <= {0, 1}
    with torch.no_grad():
        assert torch.equal(found, (result.model(two.x_test)[:, 0] > 0).long())


def test_with_features_examples_are_predicted_and_the_model_takes_features(quick, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("NOISEGATE_CACHE", "off")
    result = noisegate.run(quick(features="scattering", model="linear"), out=tmp_path / "run")
    found = result.predict(digits.x_test)
    assert float((found == digits.y_test).float().mean()) == pytest.approx(result.accuracy)
    assert torch.equal(noisegate.load(tmp_path / "run").predict(digits.x_test), found)


def same(one: Result, other: Result, x: torch.Tensor) -> None:
    assert one == other
    assert torch.equal(one.predict(x), other.predict(x))
    tensors = one.model.state_dict()
    assert all(torch.equal(value, tensors[name]) for name, value in other.model.state_dict().items())


def test_a_folder_gives_the_result_back(quick, digits, tmp_path):
    result = noisegate.run(quick(rounds=5), out=tmp_path / "run")
    same(noisegate.load(tmp_path / "run"), result, digits.x_test)
    same(noisegate.run(quick(rounds=5), out=tmp_path / "run", resume=True), result, digits.x_test)
    same(noisegate.load(str(tmp_path / "run")), result, digits.x_test)


def test_a_folder_with_a_module_of_ones_own_needs_that_module(quick, digits, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    spec = quick(model=net)
    result = noisegate.run(spec, out=tmp_path / "run")
    loaded = noisegate.load(tmp_path / "run")
    assert loaded == result
    with pytest.raises(SpecError, match=r"its model, Sequential, was an object; give it: noisegate.load"):
        loaded.predict(digits.x_test)
    same(noisegate.load(tmp_path / "run", model=net), result, digits.x_test)
    same(noisegate.run(spec, out=tmp_path / "run", resume=True), result, digits.x_test)
    for other in (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), nn.Linear(64, 10)):
        with pytest.raises(SpecError, match="does not fit the module"):
            noisegate.load(tmp_path / "run", model=other).predict(digits.x_test)


def test_a_model_of_a_file_is_made_when_it_is_asked_for(quick, digits, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    result = noisegate.run(quick(model=f"{tmp_path}/mine.py:build"), out=tmp_path / "run")
    same(noisegate.load(tmp_path / "run"), result, digits.x_test)
    (tmp_path / "mine.py").unlink()
    loaded = noisegate.load(tmp_path / "run")  # which runs no code
    assert loaded == result
    with pytest.raises(SpecError, match="cannot be loaded"):
        _ = loaded.model


def test_results_of_earlier_versions_are_read(quick, digits, tmp_path):
    """result.json calls the name of the model `model`, as it ever did; what it takes was not told."""
    result = noisegate.run(quick(), out=tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    written = json.loads(path.read_text())
    assert written["model"] == result.model_name == "mlp"
    assert "model_name" not in written
    assert not [name for name in written if name.startswith("_")]
    old = {key: value for key, value in written.items() if key not in ("input_shape", "classes")}
    path.write_text(sealed(old))
    loaded = noisegate.load(tmp_path / "run")
    assert (loaded.accuracy, loaded.input_shape) == (result.accuracy, None)
    with pytest.raises(SpecError, match="an earlier version wrote it"):
        _ = loaded.model
    same(
        noisegate.load(path.parent, model=result.model), replace(result, input_shape=None, classes=None), digits.x_test
    )


def test_what_cannot_be_loaded_is_refused(quick, tmp_path):
    with pytest.raises(StoreError, match="holds no finished run"):
        noisegate.load(tmp_path / "nothing")
    noisegate.run(quick(), out=tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    content = model.read_bytes()
    model.write_bytes(content[:-4] + b"\0\0\0\0")
    with pytest.raises(StoreError, match=r"model.safetensors: is damaged \(its checksum"):
        _ = noisegate.load(tmp_path / "run").model
    model.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        _ = noisegate.load(tmp_path / "run").model
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(StoreError, match="is not finished"):
        noisegate.load(tmp_path / "run")
    (tmp_path / "swept" / "runs").mkdir(parents=True)
    with pytest.raises(StoreError, match="is of a sweep"):
        noisegate.load(tmp_path / "swept")


def test_a_result_travels_without_its_module(quick):
    result = noisegate.run(quick(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))
    again = pickle.loads(pickle.dumps(result))
    assert again == result
    with pytest.raises(SpecError, match="copied from another process"):
        _ = again.model


def test_a_plot_shows_the_curve(quick):
    result = noisegate.run(quick(evaluate_every=1))
    figure = result.plot()
    assert list(figure.data[0].x) == [1, 2, 3]
    assert list(figure.data[0].y) == [line["accuracy"] for line in result.curve]
    bare = replace(result, epsilon=None, aggregator="<b>")
    shown = bare.plot().data[0]
    assert "not private" in shown.name
    assert "&lt;b&gt;" in shown.name


def test_a_frame_has_a_row_for_each_evaluated_round(quick, monkeypatch):
    result = noisegate.run(quick(evaluate_every=1, aggregator="mean", absent=0.3))
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows = result.to_frame()
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert sum(row[f"honest_{what}"] for what in ("used", "not_used", "missing")) == 10
        assert sum(row[f"byzantine_{what}"] for what in ("used", "not_used", "missing")) == 15
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NoisegateError, match=r"needs pandas, which is not installed; install it, or use Result.curve"):
        result.to_frame()


def test_a_notebook_shows_a_result(quick):
    result = noisegate.run(quick())
    shown = result._repr_html_()
    for part in (f"{result.accuracy:.3f}", "label-flip by 15 of 25 workers", "epsilon", "mlp"):
        assert part in shown
    assert "nobody" in replace(result, byzantine_workers=0)._repr_html_()
    assert "NOT PRIVATE" in replace(result, epsilon=None)._repr_html_()
    assert "<script>" not in replace(result, dataset="<script>")._repr_html_()


# --- comparing --------------------------------------------------------------------------------------------------------


def test_runs_are_compared_by_what_differs(quick, tmp_path, monkeypatch):
    one = noisegate.run(quick(aggregator="mean"))
    krum = {"name": "krum", "byzantine": 2}
    other = noisegate.run(quick(aggregator=krum, attack=LabelFlip("random")), out=tmp_path / "b")
    bare = noisegate.run(replace(quick(aggregator="mean"), sigma=0.0, epsilon=None))
    found = noisegate.compare([one, tmp_path / "b", str(tmp_path / "b"), bare][:2])
    assert [row["aggregator"] for row in found.rows] == ["mean", "krum(byzantine=2)"]
    assert [row["attack"] for row in found.rows] == ["label-flip", "label-flip(to=random)"]
    assert [row["accuracy"] for row in found.rows] == [one.accuracy, other.accuracy]
    assert "seed" not in found.rows[0]
    assert found.rows[0]["run"] == "attack label-flip, aggregator mean"
    assert str(found).splitlines()[1].startswith("attack label-flip, aggregator mean  ")
    assert "krum(byzantine=2)" in found._repr_html_()
    assert len(found.plot().data) == 2
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert found.to_frame() == found.rows
    named = noisegate.compare({"<mine>": one, "bare": bare})
    assert [row["epsilon"] for row in named.rows] == [one.epsilon, "none: not private"]
    assert "&lt;mine&gt;" in named._repr_html_()
    assert [row["run"] for row in noisegate.compare([one, one]).rows] == ["run 1", "run 2"]


@pytest.mark.parametrize(
    ("runs", "says"),
    [([], "there are no runs"), ([3], "compare: 3 is neither a result nor"), ("runs/first", "is one run; give a list")],
)
def test_what_cannot_be_compared_is_refused(runs, says):
    with pytest.raises(SpecError, match=says):
        noisegate.compare(runs)


def test_a_dataset_of_ones_own_is_predicted_too(quick, toy):
    mine: Dataset = toy()
    result = noisegate.run(quick(dataset="toy", workers=3), dataset=mine)
    assert (result.input_shape, result.classes) == ([5], 3)
    right = (result.predict(mine.x_test) == mine.y_test).double().mean()
    assert float(right) == pytest.approx(result.accuracy)


def test_columns_of_a_frame_are_taken_by_their_names(quick, tmp_path):
    """Another order of the columns, or more of them, changes nothing; one that is missing is said to be."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (200, 2)) * [1.0, 0.1]
    table = {"age": x[:, 0], "dose": x[:, 1], "ill": (x[:, 0] > 0).astype(int)}
    mine = Dataset.of(Frame(table))
    result = noisegate.run(quick(dataset="mine", workers=3), dataset=mine, out=tmp_path / "run")
    assert result.feature_names == ["age", "dose"]
    wanted = result.predict(x)
    turned = Frame({"dose": x[:, 1], "note": ["-"] * 200, "age": x[:, 0]})
    assert torch.equal(result.predict(turned), wanted)
    assert torch.equal(noisegate.load(tmp_path / "run").predict(turned), wanted)
    assert not torch.equal(result.predict(x[:, ::-1].copy()), wanted), "the order matters"
    with pytest.raises(DataError, match="predict: x has no column 'dose', which the model was trained on; add it"):
        result.predict(Frame({"age": x[:, 0]}))
