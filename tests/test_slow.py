"""Models that go the slow way: one line says why, how long it takes, and what would be fast."""

import warnings

import pytest
import torch
from torch import nn

import noisegate
from noisegate import Spec
from noisegate.compute import Compute
from noisegate.errors import SlowWarning, SpecError
from noisegate.runs import slow as slow_line
from noisegate.runs.setup import prepare
from noisegate.workers import ClosedForm, Direct, choose_sums
from noisegate.workers.owners import owners, why_untraceable

ONE = Compute(device="cpu", threads=1)
SMALL = {"rounds": 3, "batch": 16, "workers": 3, "byzantine": 0.0, "attack": "none", "aggregator": "mean"}


def sequences():
    return nn.Sequential(nn.Flatten(1, 2), nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(36, 10))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(torch.tanh(self.body(x.flatten(1)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(torch.tanh(self.one(x.flatten(1)))))


def only_bias():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module[1].weight.requires_grad_(False)
    return module


def same():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(128, 10))


def in_place():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(inplace=True), nn.Linear(9, 10))


WHY = {
    "sequences": (sequences, r"layer '1' \(Conv1d\) has none"),
    "twice": (Twice, "one is called twice"),
    "tied": (Tied, "parameter 'two.weight' is shared by two layers"),
    "only bias": (only_bias, r"of layer '1' \(Linear\) the bias is trained and the weight is frozen"),
    "same": (same, r"layer '0' \(Conv2d, groups 1, padding 'same' with zeros\) has none"),
    "in place": (in_place, r"layer '2' \(ReLU\) writes over its inputs \(give it inplace=False\)"),
}


@pytest.mark.parametrize("name", WHY)
def test_a_long_run_of_a_slow_model_says_which_layer_how_long_and_what_is_fast(name, monkeypatch):
    make, why = WHY[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = make()
    monkeypatch.setattr(slow_line, "LONG", 0.0)
    wanted = rf"^model: .*since .*{why}.*some .* a round, .* in all\. Fast are Linear, Conv2d .*GroupNorm, LayerNorm"
    with pytest.warns(SlowWarning, match=wanted) as told:
        noisegate.run(Spec(**SMALL), model=module, compute=ONE)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)


def test_a_short_run_and_a_fast_model_say_nothing(monkeypatch):
    fast = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.Linear(8, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noisegate.run(Spec(**SMALL), model=sequences(), compute=ONE)
        monkeypatch.setattr(slow_line, "LONG", 0.0)
        noisegate.run(Spec(**SMALL), model=fast, compute=ONE)


def test_the_estimate_is_of_a_whole_round_of_everyone():
    few, many = (
        prepare(Spec(**{**SMALL, "workers": workers}), ONE, module=sequences()).federation for workers in (3, 30)
    )
    assert isinstance(few.mechanism.sums, Direct)
    one, ten = slow_line.seconds_per_round(few), slow_line.seconds_per_round(many)
    assert 0 < one < ten  # ten times as many examples: the rest is the machine's noise
    assert slow_line.slow(few, 0) is None
    assert "days" in slow_line.slow(few, 10**9)


def test_what_was_asked_for_is_not_explained_and_what_cannot_be_is_refused_with_the_reason():
    federation = prepare(Spec(**SMALL), ONE, module=sequences()).federation
    model, x, y = federation.mechanism.model, federation.workers.x, federation.workers.y
    assert choose_sums(model, model.initial(), x, y, "direct").why == ""
    with pytest.raises(SpecError, match=r"since layer '1' \(Conv1d\) has none"):
        choose_sums(model, model.initial(), x, y, "closed-form")


def test_a_model_has_a_closed_form_unless_something_stands_against_it():
    fast = noisegate.vectors.FlatModel(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))
    found, why = owners(fast)
    assert (len(found), why) == (2, "")
    assert ClosedForm.of(fast).layers == tuple(found)
    assert "called twice" in why_untraceable(fast.module)
