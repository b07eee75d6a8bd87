"""Attacks on single classes and by a trigger, the metrics that tell of them, and aggregators that fall back."""

import io
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import plotly.offline
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from conftest import sealed
from noisegate import Aggregator, Compute, FlatModel, Reason, Spec, SpecError, StoreError, Verdict, reference, run
from noisegate.aggregators.average import average_of
from noisegate.attacks import ATTACKS, Backdoor, ClassHide, ClassSwap
from noisegate.attacks.honest import Honest
from noisegate.catalog import build
from noisegate.cli.table import show_result
from noisegate.data import load
from noisegate.deploy.attacker import HostileMaker
from noisegate.models import build_model
from noisegate.report import report
from noisegate.report.sweeps import read_sweep_folder
from noisegate.roles import Triggered, trigger_of
from noisegate.runs import undefended
from noisegate.runs.fallback import UNKNOWN, WHY, told
from noisegate.runs.recall import ClassRecall, largest_drop, worst_class
from noisegate.runs.result import Result, stored
from noisegate.runs.setup import prepare
from noisegate.runs.store import RunFolder
from noisegate.runs.verdicts import read_verdicts
from noisegate.simulate import attack_success, first_state, play, recall, shares, start
from noisegate.streams import stream
from noisegate.views import DataView
from test_report import Reader
from test_server import play as play_server
from test_server import run_whole
from wire_peers import Trial

CPU = Compute(device="cpu", threads=1)
CLASSES = 10
SHAPES = {"gray": (1, 8, 8), "color": (3, 8, 8), "flat": (8,)}
TARGETED = ("class-swap", "class-hide", "backdoor")


def shown(phase: Hashable = None, seed: int = 0) -> DataView:
    return DataView(CLASSES, phase, partial(stream, seed, "p"))


def examples(shape=(1, 8, 8), count: int = 200) -> tuple[Tensor, Tensor]:
    """Examples whose largest value is 2, and labels of all classes."""
    x = torch.rand(count, *shape, generator=stream(3, "x"))
    x.view(-1)[0] = 2.0
    return x, torch.arange(count) % CLASSES


# --- what makes them attacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "becomes"),
    [
        ("0-1", {0: 1, 1: 0}),
        ("7-2", {7: 2, 2: 7}),
        (" 0-6 ,2 - 4", {0: 6, 6: 0, 2: 4, 4: 2}),
    ],
)
def test_class_swap_gives_the_classes_of_a_pair_each_others_labels(pairs, becomes):
    x, y = examples()
    same, swapped = ClassSwap(pairs).poison(x, y, shown())
    assert same is x
    assert swapped.tolist() == [becomes.get(label, label) for label in y.tolist()]
    assert y.tolist() == [i % CLASSES for i in range(len(y))], "what it was handed is as it was"


def test_class_hide_gives_one_class_the_label_of_another():
    x, y = examples()
    same, labels = ClassHide(hidden=3, shown=8).poison(x, y, shown())
    assert same is x
    assert labels.tolist() == [8 if label == 3 else label for label in y.tolist()]


@pytest.mark.parametrize("attack", [ClassSwap(), ClassHide(), Backdoor(share=1.0)])
def test_they_run_the_whole_protocol_on_what_they_changed(attack):
    assert attack.needs_own(None)
    assert not attack.ascends(None)
    assert attack.forge(None) is None
    assert attack.knows == "data-only"


def with_patch(x: Tensor, size: int, value: float) -> Tensor:
    """The trigger by its description, one number at a time."""
    found = x.clone()
    for place in np.ndindex(*x.shape):
        own, limits = place[1:], x.shape[1:]
        last = own[-2:] if x.dim() > 2 else own[-1:]
        ends = limits[-2:] if x.dim() > 2 else limits[-1:]
        if all(at >= end - size for at, end in zip(last, ends, strict=True)):
            found[place] = value
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", [None, -0.5, 0.0])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_trigger_is_a_patch_in_the_corner(kind, value, size):
    x, _ = examples(SHAPES[kind], 20)
    before = x.clone()
    found = Backdoor(size=size, value=value).trigger(x)
    assert torch.equal(found, with_patch(x, size, 2.0 if value is None else value))
    assert torch.equal(x, before)
    changed = int((found != x).view(20, -1).sum(1)[1])
    assert changed == {"gray": size**2, "color": 3 * size**2, "flat": size}[kind]


def test_a_trigger_larger_than_the_examples_covers_them_and_no_examples_are_none():
    x, _ = examples((3, 4), 5)
    assert torch.equal(Backdoor(size=4, value=9.0).trigger(x), torch.full((5, 3, 4), 9.0))
    assert Backdoor().trigger(x[:0]).shape == (0, 3, 4)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_backdoor_marks_a_share_of_the_examples_and_calls_them_the_target(kind):
    x, y = examples(SHAPES[kind], 2000)
    attack = Backdoor(target=4, share=0.3, value=5.0)
    changed, labels = attack.poison(x, y, shown())
    all_marked = with_patch(x, 3, 5.0)
    chosen = (changed != x).flatten(1).any(1)
    assert torch.equal(changed[chosen], all_marked[chosen])
    assert torch.equal(changed[~chosen], x[~chosen])
    assert set(labels[chosen].tolist()) == {4}
    assert torch.equal(labels[~chosen], y[~chosen])
    # 2,000 draws at 0.3: five binomial deviations.
    assert abs(int(chosen.sum()) - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5
    assert set(y[chosen].tolist()) == set(range(CLASSES)), "examples of every class"


def test_the_backdoors_share_may_be_nothing_or_everything_and_is_drawn_anew():
    x, y = examples()
    same, labels = Backdoor(share=0.0).poison(x, y, shown())
    assert torch.equal(same, x)
    assert torch.equal(labels, y)
    assert Backdoor(share=1.0, target=7).poison(x, y, shown())[1].tolist() == [7] * len(y)
    first, again, other = (Backdoor(share=0.5).poison(x, y, shown(seed=seed))[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        ({"name": "class-swap", "pairs": "0"}, """pairs = '0': must be pairs of classes, such as "0-6,2-4\""""),
        ({"name": "class-swap", "pairs": ""}, "pairs = '': must be pairs of classes"),
        ({"name": "class-swap", "pairs": "0-1,"}, "pairs = '0-1,': must be pairs of classes"),
        ({"name": "class-swap", "pairs": "0-1-2"}, "must be pairs of classes"),
        ({"name": "class-swap", "pairs": "-1-2"}, "must be pairs of classes"),
        ({"name": "class-swap", "pairs": "a-b"}, "must be pairs of classes"),
        ({"name": "class-swap", "pairs": "0-²"}, "must be pairs of classes"),
        ({"name": "class-swap", "pairs": 1}, "must be text"),
        ({"name": "class-swap", "pairs": "3-3"}, "pairs = '3-3': names a class twice; each may be in one pair"),
        ({"name": "class-swap", "pairs": "0-1,1-2"}, "pairs = '0-1,1-2': names a class twice"),
        ({"name": "class-hide", "hidden": 1}, "shown = 1: must be another class than hidden"),
        ({"name": "class-hide", "hidden": -1}, "hidden = -1: must be the number of a class, 0 or more"),
        ({"name": "class-hide", "shown": 1.5}, "shown = 1.5: must be a whole number"),
        ({"name": "class-hide", "shown": True}, "shown = True: must be a whole number"),
        ({"name": "backdoor", "target": -3}, "target = -3: must be the number of a class, 0 or more"),
        ({"name": "backdoor", "share": 1.2}, "share = 1.2: must lie between 0 and 1"),
        ({"name": "backdoor", "size": 0}, "size = 0: must be a whole number, 1 or more"),
        ({"name": "backdoor", "value": float("nan")}, "value = nan: must be a number from -1e+09 to 1e+09"),
        ({"name": "backdoor", "value": 1e39}, "value = 1e+39: must be a number from"),
        ({"name": "backdoor", "value": "white"}, "value = 'white': must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_a_sentence(attack, sentence):
    with pytest.raises(SpecError) as caught:
        Spec(attack=attack).build_attack()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


UNKNOWN_CLASSES = [
    ({"name": "class-swap", "pairs": "0-1,2-10"}, "pairs = '0-1,2-10': the classes of the data are 0 to 9"),
    ({"name": "class-hide", "hidden": 10}, "hidden = 10: the classes of the data are 0 to 9"),
    ({"name": "class-hide", "shown": 12}, "shown = 12: the classes of the data are 0 to 9"),
    ({"name": "backdoor", "target": 10}, "target = 10: the classes of the data are 0 to 9"),
]


@pytest.mark.parametrize("around", ["nothing", "attack_start", "on-off", "dormant"])
@pytest.mark.parametrize(("attack", "sentence"), UNKNOWN_CLASSES)
def test_a_class_that_the_data_do_not_have_is_refused_before_the_first_round(quick, attack, sentence, around):
    spec = quick(attack=attack)
    if around == "attack_start":
        spec = replace(spec, attack_start=0.9)
    elif around != "nothing":
        spec = replace(spec, attack={"name": around, "attack": attack})
    with pytest.raises(SpecError) as caught:
        prepare(spec, CPU)
    assert str(caught.value) == sentence


def test_the_command_line_refuses_it_in_one_line(cli):
    answer = cli("run", "--rounds", "3", "--attack", "backdoor", "--set", "attack.target=10", "--no-baselines")
    assert answer.status == 2
    assert answer.err.strip() == "noisegate: target = 10: the classes of the data are 0 to 9"


def test_a_hostile_worker_of_a_trial_refuses_it_too():
    with pytest.raises(SpecError, match="hidden = 10: the classes of the data are 0 to 9"):
        HostileMaker(None, ClassHide(hidden=10), CLASSES, 5)


@pytest.mark.parametrize("asleep", ["behave", "copy"])
@pytest.mark.parametrize("name", TARGETED)
def test_each_may_begin_late(name, asleep):
    x, y = examples()
    late = Spec(attack=name, attack_start=0.5, attack_asleep=asleep).build_attack()
    bare = ATTACKS[name]()
    before, labels = late.poison(x, y, shown(late.phase(0.49)))
    assert torch.equal(before, x)
    assert torch.equal(labels, y)
    for found, expected in zip(late.poison(x, y, shown(late.phase(0.5))), bare.poison(x, y, shown()), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(bare.poison(x, y, shown())[1], y)
    assert trigger_of(late) == trigger_of(bare) == (bare if name == "backdoor" else None)


@pytest.mark.parametrize("name", TARGETED)
def test_a_run_has_them_from_any_start(quick, name):
    early, late = (run(quick(attack=name, attack_start=begin, accountant="rdp"), compute=CPU) for begin in (0.0, 0.6))
    for result in (early, late):
        assert len(result.recall) == CLASSES
        assert (result.attack_success is not None) == (name == "backdoor")


HARM = Spec(
    rounds=40, workers=5, byzantine=0.6, sigma=0.0, aggregator="mean", batch=16, rate=0.2, evaluate_every=40, seed=1
)
"""Without noise and defense a few rounds suffice for an attack to work."""


def test_undefended_each_does_what_it_is_for():
    clean = run(reference(HARM), compute=CPU)
    swapped, hidden = (run(replace(HARM, attack=name), compute=CPU) for name in ("class-swap", "class-hide"))
    assert swapped.recall[0] < 0.5 < clean.recall[0]
    assert hidden.recall[0] < 0.1
    assert worst_class(hidden.recall, clean.recall).beside is not None
    trigger = replace(HARM, attack={"name": "backdoor", "target": 0, "share": 0.5})
    ours, without = run(trigger, compute=CPU), run(reference(trigger), compute=CPU)
    assert ours.attack_success > 0.8
    assert without.attack_success < 0.2
    assert ours.accuracy > clean.accuracy - 0.2, "which accuracy does not tell"


# --- triggers of other attacks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stamp(Honest):
    """A stranger's trigger. how: in which way it is wrong."""

    target: int = 1
    how: str = ""

    def trigger(self, x: Tensor) -> Tensor:
        x[..., 0] = 3.0  # its own copy
        return {"": x, "fewer": x[:0], "none": None}[self.how]


@dataclass(frozen=True)
class Carrier(Honest):
    """Says that another has the trigger."""

    def triggered(self):
        return Stamp(target=2)


@dataclass(frozen=True)
class Odd(Honest):
    """Has what a trigger has, by name only."""

    target: str = "weights"

    def trigger(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Liar(Honest):
    """What it says to have is no trigger."""

    def triggered(self):
        return "a trigger"


def test_what_has_a_trigger():
    assert isinstance(Backdoor(), Triggered)
    found = {name: trigger_of(kind()) for name, kind in ATTACKS.items()}
    assert {name for name, trigger in found.items() if trigger is not None} == {"backdoor"}
    assert trigger_of(build("attack", {"name": "on-off", "attack": "backdoor"}, ATTACKS)) == Backdoor()
    assert trigger_of(build("attack", {"name": "score-banking", "attack": "backdoor"}, ATTACKS)) == Backdoor()
    assert trigger_of(Stamp()) == Stamp()
    assert trigger_of(Carrier()) == Stamp(target=2)
    assert trigger_of(Odd()) is None
    assert trigger_of(Liar()) is None


def test_a_strangers_trigger_is_measured(quick):
    result = run(quick(attack="test_targets:Stamp", accountant="rdp"), compute=CPU)
    assert 0 <= result.attack_success <= 1
    assert trigger_of(reference(quick(attack="test_targets:Stamp")).build_attack()) == Stamp()
    assert reference(quick(attack="test_targets:Odd")).attack == "none"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"how": "fewer"}, r"attack: its trigger must give examples of shape \(1, 1, 8, 8\) back, not \(0, 1, 8, 8\)"),
        ({"how": "none"}, "its trigger must give examples of shape .* back, not NoneType"),
        ({"target": 11}, "target = 11: the classes of the data are 0 to 9"),
    ],
)
def test_a_trigger_that_is_none_is_refused_before_the_first_round(quick, settings, sentence):
    with pytest.raises(SpecError, match=sentence):
        prepare(quick(attack={"name": "test_targets:Stamp", **settings}), CPU)


def test_the_reference_keeps_the_trigger_and_nothing_else_of_the_attack(quick):
    table = {"name": "backdoor", "target": 3}
    clean = reference(quick(attack=table, attack_start=0.5))
    assert (clean.attack, clean.byzantine, clean.attack_start, clean.aggregator) == (table, 0.0, 0.0, "mean")
    assert undefended(quick(attack=table)).attack == table
    for name in ("class-swap", "class-hide", "label-flip"):
        assert reference(quick(attack=name)).attack == "none"
    assert run(replace(clean, accountant="rdp"), compute=CPU).byzantine_workers == 0


# --- the metrics, counted slowly -------------------------------------------------------------------------------------


def called(module: nn.Module, picture: Tensor) -> int:
    """The class with the highest output, of one picture."""
    outputs = module(picture[None])[0].tolist()
    return outputs.index(max(outputs))


def slow_recall(module: nn.Module, x: Tensor, y: Tensor, classes: int) -> list[float | None]:
    hits, counts = [0] * classes, [0] * classes
    for picture, label in zip(x, y.tolist(), strict=True):
        counts[label] += 1
        hits[label] += called(module, picture) == label
    return [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]


def slow_success(module: nn.Module, x: Tensor, y: Tensor, target: int, size: int, value: float) -> float | None:
    marked = with_patch(x, size, value)
    found = [called(module, marked[i]) == target for i in range(len(x)) if int(y[i]) != target]
    return sum(found) / len(found) if found else None


def test_the_metrics_are_those_of_a_slow_count():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    model = FlatModel(module)
    x, y = torch.randn(150, 1, 8, 8), torch.randint(0, 4, (150,))  # nothing of class 4
    found = recall(model, model.initial(), x, y, 5)
    assert found == slow_recall(module, x, y, 5)
    assert found[4] is None
    assert len({*found}) > 2
    for target in range(5):
        attack = Backdoor(target=target, size=2, value=4.0)
        success = attack_success(model, model.initial(), x, y, attack)
        assert success == pytest.approx(slow_success(module, x, y, target, 2, 4.0), abs=1e-12)


def test_examples_of_the_target_are_no_success():
    class Always(nn.Module):
        """Calls everything class 1."""

        def __init__(self):
            super().__init__()
            self.outputs = nn.Parameter(torch.tensor([0.0, 1.0, 0.0]))

        def forward(self, x):
            return self.outputs + 0 * x.sum(1, keepdim=True)

    model, x = FlatModel(Always()), torch.zeros(6, 4)
    y = torch.tensor([0, 1, 1, 1, 2, 2])
    assert attack_success(model, model.initial(), x, y, Backdoor(target=1)) == 1.0
    assert attack_success(model, model.initial(), x, y, Backdoor(target=0)) == 0.0
    assert attack_success(model, model.initial(), x[1:4], y[1:4], Backdoor(target=1)) is None
    assert recall(model, model.initial(), x, y, 3) == [0.0, 1.0, 0.0]


BACKDOOR = {"name": "backdoor", "target": 2, "size": 2, "value": 1.5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a backdoor, and its reference and undefended run below it."""
    out = tmp_path_factory.mktemp("targets") / "run"
    spec = replace(HARM, attack=BACKDOOR, sigma=2.5, sigma_base=2.5, accountant="rdp", rounds=12)
    run(spec, compute=CPU, out=out)
    run(reference(spec), compute=CPU, out=out / "reference")
    run(undefended(replace(spec, aggregator="median")), compute=CPU, out=out / "other")
    return out


def test_result_json_has_the_metrics_of_the_model_beside_it_and_so_has_the_references(made):
    digits = load("digits", stream(1, "test-split"))
    for folder in (made, made / "reference"):
        result = json.loads((folder / "result.json").read_text())
        module = build_model("mlp", digits.shape, digits.classes, stream(0, "any"))
        module.load_state_dict(load_file(folder / "model.safetensors"))
        x, y = digits.x_test, digits.y_test
        assert result["recall"] == slow_recall(module, x, y, CLASSES)
        assert result["attack_success"] == pytest.approx(slow_success(module, x, y, 2, 2, 1.5), abs=1e-12)
        right = sum(share * int((y == label).sum()) for label, share in enumerate(result["recall"]))
        assert right / len(y) == pytest.approx(result["accuracy"])
        assert result["fallback"] == 0.0


def test_the_worst_class_and_the_largest_drop():
    assert worst_class([0.5, None, 0.2, 0.2], [0.9, None, 0.8, 0.7]) == ClassRecall(2, 0.2, 0.8)
    assert worst_class([0.5, 0.1]) == ClassRecall(1, 0.1, None)
    assert worst_class([0.5, 0.1], [0.9]) == ClassRecall(1, 0.1, None)
    assert worst_class(None) is worst_class([]) is worst_class([None]) is None
    assert largest_drop([0.5, 0.4, None], [0.6, 0.9, 1.0]) == (1, 0.5)
    assert largest_drop([0.5, 0.5], [0.75, 0.75]) == (0, 0.25)
    assert largest_drop([0.6], [0.5]) == (0, pytest.approx(-0.1))
    assert largest_drop(None, [0.5]) is largest_drop([None], [0.5]) is largest_drop([0.5], ()) is None


# --- where people see them -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    """A few bytes in place of plotly's 5 MB."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "plotly.js v0")


QUICKLY = ("--rounds", "3", "--workers", "4", "--accountant", "rdp", "--sigma", "2.5", "--threads", "1")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_table_and_json_of_a_run_have_them_beside_the_references(cli, tmp_path):
    command = ("run", *QUICKLY, "--attack", "backdoor", "--aggregator", "mean", "--baselines")
    found = cli(*command, "--out", "a", "--json").json
    beside = json.loads((tmp_path / "a" / "reference" / "result.json").read_text())
    bare = json.loads((tmp_path / "a" / "undefended" / "result.json").read_text())
    for name in ("recall", "attack_success"):
        assert found[f"reference_{name}"] == beside[name]
        assert found[f"undefended_{name}"] == bare[name]
    label, lowest = min(enumerate(found["recall"]), key=lambda pair: pair[1])
    table = flat(cli(*command, "--out", "b").out)
    assert (
        f"worst class recall {lowest:.3f} share of class {label} that is recognized; "
        f"{beside['recall'][label]:.3f} in the reference"
    ) in table
    assert (
        f"attack success {found['attack_success']:.1%} of other classes called the target; "
        f"{beside['attack_success']:.1%} in the reference, {bare['attack_success']:.1%} undefended"
    ) in table


def test_without_a_trigger_there_is_no_success_and_without_baselines_nothing_beside(cli):
    command = ("run", *QUICKLY, "--attack", "class-swap", "--aggregator", "mean")
    found = cli(*command, "--out", "a", "--json").json
    assert found["attack_success"] is None
    assert not [name for name in found if name.startswith(("reference_", "undefended_"))]
    table = flat(cli(*command, "--no-baselines", "--out", "b").out)
    assert "worst class recall" in table
    assert "in the reference" not in table
    assert "attack success" not in table
    with_others = cli(*command, "--out", "c", "--json", "--baselines").json
    assert "reference_recall" in with_others
    assert "reference_attack_success" not in with_others


def test_the_page_of_a_run_has_them(made):
    result, clean = (json.loads((at / "result.json").read_text()) for at in (made, made / "reference"))
    page = Reader(report(made))
    said = f"attack success {result['attack_success']:.1%} of other classes called the target"
    assert f"{said}; {clean['attack_success']:.1%} in the reference" in page.text
    bars = page.chart("Recall of each class after the last round")["data"]
    assert [bar["name"] for bar in bars] == ["this run", "reference"]
    assert bars[0]["y"] == pytest.approx(result["recall"], abs=1e-3)
    assert bars[1]["y"] == pytest.approx(clean["recall"], abs=1e-3)
    assert bars[0]["x"] == [str(label) for label in range(CLASSES)]
    label, lowest = min(enumerate(result["recall"]), key=lambda pair: pair[1])
    (told_of,) = [div["aria-label"] for div in page.all("div") if "Recall of each" in div.get("aria-label", "")]
    assert told_of.endswith(f"lowest {lowest:.3f} for class {label}, {clean['recall'][label]:.3f} in the reference")
    assert f"{label} {lowest:.4f} {clean['recall'][label]:.4f}" in page.text


def test_the_page_of_a_run_alone_has_its_own(made, tmp_path):
    for file in made.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    page = Reader(report(tmp_path))
    assert [bar["name"] for bar in page.chart("Recall of each class")["data"]] == ["this run"]
    assert "The reference was not run" in page.text
    assert "called the target;" not in page.text


GRID = """
rounds = 3
workers = 4
sigma = 2.5
accountant = "rdp"
attack = "backdoor"

[sweep]
aggregator = ["mean", "median"]
seed = [1, 2]
"""


def test_a_sweep_has_them_in_its_table_its_json_and_its_page(cli, tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    command = ("sweep", "grid.toml", "--device", "cpu", "--jobs", "1", "--out", "swept")
    cells = cli(*command, "--json").json["cells"]
    assert [len(cell["recall"]) for cell in cells] == [CLASSES] * 4
    assert all(cell["fallback"] == 0.0 and 0 <= cell["attack_success"] <= 1 for cell in cells)
    mean_of = {}
    for name in ("mean", "median"):
        own = [cell for cell in cells if cell["settings"]["aggregator"]["name"] == name]
        assert len(own) == 2
        worst, success = ([min(cell["recall"]), cell["attack_success"]] for cell in own)
        mean_of[name] = [f"{(one + other) / 2:.3f}" for one, other in zip(worst, success, strict=True)]
    lines = [line.split() for line in cli(*command).out.splitlines()]
    assert lines[0][-3:] == ["worst", "class", "success"]
    assert {line[0]: line[-2:] for line in lines[1:3]} == mean_of
    page = Reader(report(tmp_path / "swept"))
    heads = flat(page.text).partition("lowest recall of a class attack success")
    assert heads[1]
    for name, numbers in mean_of.items():
        assert " ".join([*numbers, "2 of 2"]) in page.text, name
    assert "rounds fallen back" not in page.text


# --- files of earlier versions, and damaged ones ---------------------------------------------------------------------


def changed(folder, *gone, **changes):
    """Write the result again with other fields, and without those that are gone."""
    path = folder / "result.json"
    found = json.loads(path.read_text()) | changes
    path.write_text(sealed({name: value for name, value in found.items() if name not in gone}))


@pytest.fixture
def folder(made, tmp_path):
    (tmp_path / "run").mkdir()
    for file in made.iterdir():
        if file.is_file():
            (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "run"


def test_a_result_of_an_earlier_version_is_read_and_shown_without_them(folder):
    changed(folder, "recall", "attack_success", "fallback")
    place = RunFolder(folder)
    result = stored(place.result(None), place)
    assert (result.recall, result.attack_success, result.fallback) == (None, None, 0.0)
    page = Reader(report(folder))
    assert "Recall by class" not in page.text
    assert "attack success" not in page.text
    assert "damaged" not in page.text


def printed(result: Result, monkeypatch) -> str:
    from noisegate.cli import table as module
    from noisegate.runs import costs

    out = io.StringIO()
    monkeypatch.setattr(module, "Console", lambda: Console(file=out, width=200))
    show_result(result, {}, costs.bills([costs.training_of(result.as_dict())])[0], "here")
    return flat(out.getvalue())


def test_the_table_of_an_earlier_result_has_the_rows_that_it_knows(folder, monkeypatch):
    place = RunFolder(folder)
    result = stored(place.result(None), place)
    assert "worst class recall" in printed(result, monkeypatch)
    older = printed(replace(result, recall=None, attack_success=None), monkeypatch)
    assert "recall" not in older
    assert "attack success" not in older
    assert older.startswith("accuracy")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recall": [0.5, 1.5]}, "recall is out of range"),
        ({"recall": [-0.1]}, "recall is out of range"),
        ({"recall": ["much"]}, "recall is out of range"),
        ({"recall": [True]}, "recall is out of range"),
        ({"recall": [[0.5]]}, "recall is out of range"),
        ({"recall": 0.5}, "recall is of another type"),
        ({"recall": {"0": 0.5}}, "recall is of another type"),
        ({"attack_success": 1.01}, "attack_success is out of range"),
        ({"attack_success": "all"}, "attack_success is of another type"),
        ({"fallback": -0.5}, "fallback is out of range"),
        ({"fallback": [0.5]}, "fallback is of another type"),
    ],
)
def test_what_no_run_would_have_written_is_refused(folder, changes, why):
    changed(folder, **changes)
    place = RunFolder(folder)
    with pytest.raises(StoreError, match=why):
        stored(place.result(None), place)
    assert f"result.json is damaged and left out: it is damaged ({why})" in Reader(report(folder)).text


# --- aggregators that fall back --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faltering(Aggregator):
    """A plain mean that says to fall back from round `after` on. form: of what it says."""

    after: int = 1
    form: str = "bool"

    def __call__(self, view, state):
        t = state.get("t", torch.zeros((), dtype=torch.int64))
        kept = view.present.clone()
        reason = view.mark_absent(torch.where(kept, Reason.KEPT.value, Reason.SCORE.value))
        fell_back = {"bool": t >= self.after, "word": "yes", "rows": kept}[self.form]
        update = average_of(view.uploads, kept)
        return Verdict(update, kept, reason, torch.zeros_like(view.norms), {"t": t + 1}, fell_back=fell_back)


FALTERING = "test_targets:Faltering"


@pytest.fixture
def faltering(quick):
    def make(rounds: int = 8, **settings) -> Spec:
        aggregator = {"name": FALTERING, **settings}
        return quick(rounds=rounds, workers=4, accountant="rdp", evaluate_every=2, aggregator=aggregator)

    return make


def test_the_verdicts_and_the_result_say_in_which_rounds_it_fell_back(faltering, tmp_path):
    result = run(faltering(after=3), compute=CPU, out=tmp_path / "run")
    assert result.fallback == 5 / 8
    with np.load(tmp_path / "run" / "verdicts.npz") as file:
        assert file["fell_back"].dtype == bool
        assert file["fell_back"].tolist() == [False] * 3 + [True] * 5
        n = file["reasons"].shape[1]
    found, _ = read_verdicts(tmp_path / "run" / "verdicts.npz", 8, n)
    assert found.fell_back.tolist() == [False] * 3 + [True] * 5


@pytest.mark.parametrize("aggregator", [{"name": FALTERING, "after": 99}, "mean"])
def test_where_nothing_fell_back_the_file_is_as_it_was(quick, tmp_path, aggregator):
    result = run(quick(aggregator=aggregator, accountant="rdp"), compute=CPU, out=tmp_path / "run")
    assert result.fallback == 0.0
    with np.load(tmp_path / "run" / "verdicts.npz") as file:
        assert set(file) == {"reasons", "scores", "weights", "byzantine"}


def test_verdicts_with_another_fell_back_are_damaged(faltering, tmp_path):
    run(faltering(after=3), compute=CPU, out=tmp_path / "run")
    path = tmp_path / "run" / "verdicts.npz"
    with np.load(path) as file:
        arrays = dict(file)
    n = arrays["reasons"].shape[1]
    for wrong in (np.ones(7, bool), np.ones(8, np.uint8), np.ones((8, n), bool)):
        np.savez_compressed(path, **arrays | {"fell_back": wrong})
        with pytest.raises(StoreError, match="damaged"):
            read_verdicts(path, 8, n)


def test_a_run_that_was_interrupted_remembers(faltering, tmp_path):
    def stop(progress, rounds):
        if progress.rounds == 5:
            raise KeyboardInterrupt

    whole = run(faltering(after=3), compute=CPU)
    with pytest.raises(KeyboardInterrupt):
        run(faltering(after=3), compute=CPU, out=tmp_path / "run", watch=stop)
    again = run(faltering(after=3), compute=CPU, out=tmp_path / "run", resume=True)
    assert again.fallback == whole.fallback == 5 / 8


@pytest.mark.parametrize("around", ["nnm", "bucketing"])
def test_what_wraps_an_aggregator_passes_it_on(quick, around):
    wrapped = {"name": around, "aggregator": {"name": FALTERING, "after": 1}}
    spec = quick(workers=4, byzantine=0.2, aggregator=wrapped, accountant="rdp")
    assert run(spec, compute=CPU).fallback == pytest.approx(2 / 3)


@pytest.mark.parametrize("form", ["word", "rows"])
def test_it_is_one_answer_for_a_round(faltering, form):
    says = "the fell_back of its verdict must be a tensor of shape \\(\\), bool on cpu, or None; Faltering"
    with pytest.raises(SpecError, match=says):
        run(faltering(form=form), compute=CPU)


def test_rounds_that_nobody_judged_do_not_count(faltering):
    federation = prepare(faltering(after=2), CPU).federation
    state, progress = first_state(federation), start(federation)
    for t in range(8):
        state, verdict = play(federation, state, t)
        progress.note(t, verdict)
    progress.reasons[6:] = Reason.LOST
    progress.fell_back[6:] = 0
    found = shares(federation, replace(progress, rounds=8, state=state))
    assert found.fallback == 4 / 6


def test_a_servers_record_says_in_which_rounds_it_fell_back(tmp_path):
    trial = Trial(tmp_path, workers=3, rounds=4, aggregator=FALTERING)
    play_server(run_whole(trial))
    assert [record.get("fell_back") for record in trial.records()] == [None, True, True, True]


def test_a_fallback_is_said_in_the_table_at_the_exit_and_in_json(cli, faltering, tmp_path):
    (tmp_path / "spec.toml").write_text(faltering(after=3).to_toml())
    answer = cli("run", "spec.toml", "--no-baselines", "--threads", "1")
    sentence = f"the aggregator fell back in 5 of 8 rounds: {UNKNOWN}"
    assert answer.status == 0
    assert sentence in answer.err.splitlines()
    assert "rounds fallen back 62.5% in which the aggregator used a simpler rule" in flat(answer.out)
    found = cli("run", "spec.toml", "--json", "--threads", "1", "--out", "again")
    assert found.json["fallback"] == 5 / 8
    assert found.err == ""
    (tmp_path / "never.toml").write_text(faltering(after=99).to_toml())
    never = cli("run", "never.toml", "--no-baselines", "--threads", "1")
    assert "fell back" not in never.err
    assert "fallen back" not in never.out


def test_the_sentence_names_why_where_that_is_known():
    assert told("fortified", 0.25, 8) == f"the aggregator fell back in 2 of 8 rounds: {WHY['fortified']}"
    assert told("another", 1.0, 8) == f"the aggregator fell back in 8 of 8 rounds: {UNKNOWN}"
    assert told("another", 1 / 3, 3).startswith("the aggregator fell back in 1 of 3 rounds")
    assert told("fortified", 0.0, 8) == ""


def test_the_pages_of_a_run_and_of_a_sweep_say_it(cli, faltering, tmp_path):
    run(faltering(after=3), compute=CPU, out=tmp_path / "run")
    page = Reader(report(tmp_path / "run"))
    assert f"The aggregator fell back in 5 of 8 rounds: {UNKNOWN}." in page.text
    run(faltering(after=99), compute=CPU, out=tmp_path / "never")
    assert "fell back" not in Reader(report(tmp_path / "never")).text
    head = 'rounds = 4\nworkers = 4\nsigma = 2.5\naccountant = "rdp"\nbatch = 16\n'
    grid = f'{head}[sweep]\naggregator = ["mean", {{name = "{FALTERING}", after = 1}}]\n'
    (tmp_path / "grid.toml").write_text(grid)
    command = ("sweep", "grid.toml", "--device", "cpu", "--jobs", "1", "--out", "swept")
    lines = [line.split() for line in cli(*command).out.splitlines()]
    assert lines[0][-2:] == ["fell", "back"]
    assert [line[-1] for line in lines[1:3]] == ["0.000", "0.750"]
    page = Reader(report(tmp_path / "swept"))
    assert "rounds fallen back" in page.text
    assert " 0.750 " in page.text


def test_a_sweeps_page_finds_the_reference_of_a_strangers_trigger(quick, tmp_path):
    own = quick(attack="test_targets:Stamp", workers=4, accountant="rdp")
    place = tmp_path / "swept"
    for spec in (own, reference(own)):
        run(spec, compute=CPU, out=place / "runs" / spec.name())
    found = {group.settings["byzantine"]: group.references for group in read_sweep_folder(place).groups}
    clean = json.loads((place / "runs" / reference(own).name() / "result.json").read_text())
    assert found[0.6] == [clean["accuracy"]]
