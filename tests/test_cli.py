"""The command line: exit status, what is on standard output, and readable errors."""

import copy
import inspect
import itertools
import json
import tomllib
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import pytest
import typer

from noisegate import Compute, Spec, paper, run
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.cli import app, table
from noisegate.cli.flags import SpecFlags, takes
from noisegate.data import SOURCES
from noisegate.features import FEATURES
from noisegate.models import MODELS
from noisegate.workers import WORKERS

QUICK = ["run", "--rounds", "3", "--sigma", "2.5", "--epsilon", "2", "--accountant", "rdp", "--device", "cpu"]
USAGE_LINES = 8
"""The contract of the command line: a usage error is no longer than this."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No data set to be found."""
    monkeypatch.setenv("NOISEGATE_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def refused(answer, *parts: str) -> None:
    assert answer.status == 2, (parts, answer)
    assert answer.out == "", parts
    assert "Traceback" not in answer.err, parts
    assert 1 <= len(answer.err.strip().splitlines()) <= USAGE_LINES, answer.err
    for part in parts:
        assert part in answer.err


def one_line(answer, *parts: str) -> None:
    refused(answer, *parts)
    assert len(answer.err.strip().splitlines()) == 1, answer.err
    assert answer.err.startswith("noisegate: "), "a progress bar that never began leaves nothing behind"


BAD = [
    # The contract's own.
    ("run --dataset nosuch", "dataset = 'nosuch': unknown; choose from digits"),
    ("run --epsilon -1", "epsilon = -1.0: must be a finite number above 0"),
    ("run --epsilon nan", "epsilon = nan"),
    ("run --byzantine 1.0", "byzantine = 1.0: must be at least 0 and below 1"),
    ("run --byzantine -0.1", "byzantine = -0.1"),
    ("run --attack labelflip", "attack = 'labelflip': unknown (did you mean 'label-flip'?); choose from none"),
    ("run --aggregator krumm", "aggregator = 'krumm': unknown (did you mean 'krum'?); choose from mean"),
    ("run --workers 0", "workers = 0: must be a whole number, 1 or more"),
    ("run --rounds 0", "rounds = 0"),
    ("run --attack local-poisoning --byzantine 0.1", "got 1 against 10"),
    ("run --device tpu", "device = 'tpu': unknown (did you mean 'cpu'?); choose from auto, cpu, cuda"),
    ("run nosuch.toml", "nosuch.toml: cannot be read (No such file or directory)"),
    ("privacy --samples 10 --batch 16 --rounds 10 --epsilon 2", "batch = 16: a worker has only 10 examples"),
    ("privacy --samples 3000 --batch 16 --rounds 1500 --epsilon 0", "epsilon = 0.0"),
    # And more.
    ("run --epsilon inf", "epsilon = inf"),
    ("run --epsilon 0", "epsilon = 0.0"),
    ("run --delta 2", "delta = 2.0"),
    ("run --sigma 0", "sigma = 0.0"),
    ("run --rounds 50 --sigma 0.5 --epsilon 1 --accountant rdp", "sigma = 0.5: spends epsilon"),
    ("run --byzantine nan", "byzantine = nan"),
    ("run --gamma 0", "gamma = 0.0"),
    ("run --gamma 1.1", "gamma = 1.1"),
    ("run --attack-start 2", "attack_start = 2.0"),
    ("run --absent 1", "absent = 1.0: must be at least 0 and below 1"),
    ("run --absent -0.1", "absent = -0.1"),
    ("run --attack-asleep snore", "attack_asleep = 'snore'"),
    ("run --workers -3", "workers = -3"),
    ("run --workers 1000", "1000"),
    ("run --batch 0", "batch = 0"),
    ("run --batch 1000", "batch = 1000"),
    ("run --model vgg", "model = 'vgg': unknown; choose from mlp"),
    ("run --model cnn", "model 'cnn' cannot take examples of shape (1, 8, 8)"),
    ("run --accountant moments", "accountant = 'moments'"),
    ("run --sampling shuffle", "sampling = 'shuffle'"),
    ("run --worker lazy", "worker = 'lazy'"),
    ("run --dirichlet 0", "dirichlet = 0.0"),
    ("run --dirichlet 1 --non-iid", "non_iid"),
    ("run --rate 0", "rate = 0.0"),
    ("run --threads 0", "threads = 0"),
    ("run --dataset nosuch.npz", "nosuch.npz"),
    ("run --attack no.such:Attack", "cannot be loaded"),
    ("run --attack .such:Attack", "cannot be loaded"),
    ("run --set attack", "must be PART.KEY=VALUE"),
    ("run --set attack.to", "must be PART.KEY=VALUE"),
    ("run --set to=random", "must be PART.KEY=VALUE"),
    ("run --set server.width=2", "with PART one of attack, aggregator, worker"),
    ("run --set attack.too=random", "did you mean 'to'?"),
    ("run --set attack.to=left", "choose from 'reverse', 'random'"),
    ("run --set aggregator.refused=few", "aggregator.refused = 'few': must be a number"),
    ("run --set aggregator.=3", "aggregator."),
    ("privacy --samples 3000 --rounds 10", "give either --epsilon"),
    ("privacy --samples 3000 --rounds 10 --epsilon 2 --sigma 1", "give either --epsilon"),
    ("privacy --samples 0 --rounds 10 --epsilon 2", "examples = 0"),
    ("privacy --samples 3000 --rounds 0 --epsilon 2", "rounds = 0"),
    ("privacy --samples 3000 --rounds 10 --epsilon 2 --sampling shuffle", "sampling = 'shuffle'"),
    ("privacy --samples 3000 --rounds 10 --epsilon 2 --accountant moments", "accountant"),
    ("privacy --samples 3000 --rounds 10 --epsilon 2 --delta 1", "delta"),
    ("data verify nosuch", "name = 'nosuch'"),
    ("data fetch nosuch", "name = 'nosuch'"),
]


def test_bad_input_is_one_readable_line(cli):
    for line, says in BAD:
        one_line(cli(*line.split()), says)
    for attack in ("os:getcwd", "os:path.join", "json:dumps"):
        one_line(cli("run", "--attack", attack, "--rounds", 2, "--sigma", 4), attack)


USAGE = [
    "run --epsilon two",
    "run --workers 1.5",
    "run --no-such-flag",
    "run one.toml two.toml",
    "list",
    "list nonsense",
    "privacy --rounds 10 --epsilon 2",
    "nonsense",
    "data nonsense",
    "audit --byzantine 0.2",
    "sweep",
]


def test_a_usage_error_is_short(cli):
    for line in USAGE:
        refused(cli(*line.split()))


FILES = [
    ('dataset = "digits"\nepsilom = 2\n', "s.toml: epsilom = 2: unknown setting (did you mean 'epsilon'?)"),
    ("dataset = [1,2", "not valid TOML"),
    ('epsilon = "2"\n', "epsilon = '2': must be a number"),
    ('attack = { name = "gaussian", scale = -1 }\n', "scale = -1"),
    ("[sweep]\nseed = [1, 2]\n", "sweep"),
    ("attack = [1]\n", "attack = [1]"),
]


def test_a_wrong_file_is_one_readable_line(cli, tmp_path):
    for content, says in FILES:
        (tmp_path / "s.toml").write_text(content)
        one_line(cli("run", "s.toml"), says)


def test_set_of_a_part_that_is_no_table_is_one_readable_line(cli, tmp_path):
    (tmp_path / "s.toml").write_text("attack = 3\n")
    one_line(cli("run", "s.toml", "--set", "attack.scale=2"), "attack = 3")


def test_a_data_set_that_is_not_here_says_how_to_get_it(cli, elsewhere):
    one_line(cli("run", "--dataset", "mnist"), "mnist")


def test_out_that_cannot_be_written_is_one_readable_line(cli, tmp_path):
    (tmp_path / "file").write_text("")
    one_line(cli(*QUICK, "--out", "file/run"), "cannot be written")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    one_line(cli(*QUICK, "--out", "full"), "not empty and holds no run")


# --- run -----------------------------------------------------------------------------------------------------------


def test_run_json_is_one_object_and_nothing_else(cli, tmp_path):
    answer = cli(*QUICK, "--json")
    assert answer.status == 0
    assert answer.err == ""
    found = answer.json
    assert isinstance(found, dict)
    assert "NaN" not in answer.out
    folder = tmp_path / found.pop("out")
    for name in ("trainings", "epsilon_together", "delta_together", "together"):  # of the command, not of the run
        del found[name]
    written = json.loads((folder / "result.json").read_text())
    assert {key: value for key, value in written.items() if key not in ("sha256", "files")} == found
    assert folder.parent == tmp_path / "runs"
    assert "reference_accuracy" not in found, "--json does not run the baselines unless asked"
    assert not (folder / "reference").exists()


def test_run_puts_the_accuracy_into_proportion(cli, tmp_path):
    answer = cli(*QUICK, "--out", "here")
    assert answer.status == 0
    for words in ("accuracy", "reference accuracy", "undefended", "epsilon", "against label-flip", "15 of 25"):
        assert words in " ".join(answer.out.split())
    assert "written to here" in answer.out
    found = cli(*QUICK, "--out", "here", "--resume", "--baselines", "--json").json
    for name in ("reference", "undefended"):
        assert (
            found[f"{name}_accuracy"] == json.loads((tmp_path / "here" / name / "result.json").read_text())["accuracy"]
        )


def rows_of(result, **changes) -> dict[str, str]:
    """The lines about uploads in the table of a changed result."""
    changed = copy.copy(result)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return {name: f"{number} {words}" for name, number, words in table._uploads(changed)}


def test_the_table_says_how_much_of_the_model_is_byzantine(quick):
    result = run(quick(accountant="rdp"), compute=Compute(device="cpu"))
    by_weight = rows_of(result, byzantine_weight=0.042, byzantine_selected=0.346)
    assert by_weight["Byzantine weight"] == "4.2% of the weight in the model, by 60% of the workers"
    assert "Byzantine uploads used" not in by_weight
    old = rows_of(result, byzantine_weight=None, byzantine_selected=0.346)
    assert old["Byzantine uploads used"] == "34.6% of the uploads that made the model"
    assert "Byzantine weight" not in old
    assert "missing uploads" not in by_weight
    lines = [{"rejected": {"missing": {"honest": 2, "byzantine": 1}}}, {"rejected": {"missing": {"honest": 3}}}]
    absent = rows_of(result, curve=lines, spec={**result.spec, "absent": 0.1})
    assert (result.rounds, result.workers, result.byzantine_workers) == (3, 10, 15)
    assert absent["missing uploads"] == "8.0% 6 of 75 did not arrive"
    assert "malformed uploads" not in absent
    malformed = rows_of(result, curve=[{"rejected": {"malformed": {"honest": 0, "byzantine": 9}}}])
    assert malformed["malformed uploads"].startswith("20.0% of the Byzantine ones")


def test_a_finished_run_is_found_again_and_may_be_run_again(cli):
    parts = ["--set", "attack.to=random", "--set", "worker.momentum=0.2"]
    first = cli(*QUICK, *parts, "--json")
    found = cli(*QUICK, *parts, "--json", "--resume")
    assert found.status == 0, found.err
    assert found.json == first.json, "seconds too: it was not run again"
    again = cli(*QUICK, *parts, "--json")
    assert again.status == 0, again.err
    assert first.json["curve"] == again.json["curve"]


def test_flags_override_the_file_and_set_overrides_both(cli, tmp_path):
    (tmp_path / "s.toml").write_text(
        'seed = 7\nrounds = 9\nsigma = 2.5\nsigma_base = 2.5\nattack = { name = "gaussian", scale = 2.0 }\n'
        "byzantine = 0.5\nevaluate_every = 1\n"
    )
    found = cli("run", "s.toml", "--rounds", 2, "--set", "attack.scale=3", "--json").json
    assert (found["seed"], found["rounds"], found["byzantine"]) == (7, 2, 0.5)
    assert found["spec"]["attack"] == {"name": "gaussian", "scale": 3}
    assert len(found["curve"]) == 2
    named = cli("run", "s.toml", "--attack", "inner", "--set", "attack.scale=3", "--rounds", 2, "--json").json
    assert named["spec"]["attack"] == {"name": "inner", "scale": 3}


SETTINGS = [
    ("attack.to=random", "attack", {"name": "label-flip", "to": "random"}),
    ("attack.to='random'", "attack", {"name": "label-flip", "to": "random"}),
    ("aggregator.refused=2.5", "aggregator", {"name": "fortified", "refused": 2.5}),
    ("aggregator.refused=1", "aggregator", {"name": "fortified", "refused": 1}),
    ("worker.momentum=0", "worker", {"name": "normalized", "momentum": 0}),
]


def test_set_reads_values_as_toml_or_text():
    for setting, part, expected in SETTINGS:
        assert SpecFlags(settings=[setting]).spec().canonical()[part] == expected
    both = ["worker.momentum=0.3", "aggregator.width=2", "aggregator.stages=1"]
    spec = SpecFlags(aggregator="two-stage", settings=both).spec()
    assert spec.aggregator == {"name": "two-stage", "width": 2, "stages": 1}
    assert spec.worker == {"name": "normalized", "momentum": 0.3}
    followed = SpecFlags(settings=["worker.carry=0.3", "aggregator.aggregator=median"], aggregator="guerraoui").spec()
    assert followed.worker == {"name": "clipped-momentum", "carry": 0.3}, "the worker that the aggregator goes with"


def test_every_flag_reaches_the_spec(cli):
    flags = {
        "--delta": 1e-4,
        "--declared": 200,
        "--batch": 8,
        "--rate": 0.3,
        "--workers": 6,
        "--byzantine": 0.5,
        "--attack": "gaussian",
        "--attack-start": 0.5,
        "--attack-asleep": "copy",
        "--aggregator": "mean",
        "--worker": "clipped",
        "--gamma": 0.4,
        "--absent": 0.1,
        "--dirichlet": 4.0,
        "--auxiliary": 3,
        "--auxiliary-from": "digits",
        "--seed": 9,
        "--model": "mlp",
        "--sampling": "poisson",
    }
    answer = cli(*QUICK, *(part for pair in flags.items() for part in pair), "--secret", "--json")
    assert answer.status == 0, answer.err
    spec = answer.json["spec"]
    for flag, value in flags.items():
        found = spec[flag[2:].replace("-", "_")]
        assert found == value or found == {"name": value}, flag
    assert spec["secret"] is True
    assert SpecFlags(non_iid=True, delta="paper").spec() == Spec(non_iid=True, delta="paper")
    without = {"spec_file", "settings"}
    assert {entry.name for entry in fields(SpecFlags)} - without <= {entry.name for entry in fields(Spec)}


def test_a_command_takes_the_flags_of_its_record_in_their_order():
    @dataclass(frozen=True)
    class Record:
        first: Annotated[int, typer.Option(help="A number.")]
        second: Annotated[str, typer.Option(help="A text.")] = "a"
        third: Annotated[bool, typer.Option("--third", help="A choice.")] = False

    taken = []
    takes(Record)(taken.append)(first=1, second="b", third=True)
    few = takes(Record, names=("third", "first"))(taken.append)
    few(third=False, first=2)
    assert taken == [Record(1, "b", True), Record(2)]
    assert list(inspect.signature(few).parameters) == ["third", "first"]
    assert inspect.signature(few).parameters["first"].default is inspect.Parameter.empty


def test_what_several_commands_take_they_call_by_the_same_words():
    """`out`, `json` and `secret` differ by what they write, and the filters of `reproduce` are no settings."""
    found = dict(commands(typer.main.get_command(app)))
    for name in ("redteam", "audit"):
        run = {parameter.name: parameter.help for parameter in found["noisegate run"].params}
        for parameter in found[f"noisegate {name}"].params:
            if parameter.name in run.keys() - {"out", "as_json", "secret", "threads"}:
                assert parameter.help == run[parameter.name], f"{name} --{parameter.name}"


# --- the others ----------------------------------------------------------------------------------------------------

LISTS = {
    "datasets": SOURCES,
    "models": MODELS,
    "features": FEATURES,
    "workers": WORKERS,
    "attacks": ATTACKS,
    "aggregators": AGGREGATORS,
    "experiments": [*paper.names(), paper.QUICK],
}


def test_list_names_every_entry(cli):
    for kind, entries in LISTS.items():
        found = cli("list", kind, "--json").json[kind]
        assert [entry["name"] for entry in found] == list(entries)
        assert all(entry["about"] for entry in found)
        people = cli("list", kind)
        assert people.status == 0
        for name in entries:
            assert name in people.out


def test_list_settings_can_be_written_into_a_spec(cli):
    for kind in ("attacks", "aggregators", "features"):
        for entry in cli("list", kind, "--json").json[kind]:
            for key, value in entry["settings"].items():
                if value is not None:
                    assert tomllib.loads(f"{key} = {json.dumps(value)}") == {key: value}


def test_privacy_answers_both_ways(cli):
    asked = [
        "privacy",
        "--samples",
        "3000",
        "--batch",
        "16",
        "--rounds",
        "1500",
        "--accountant",
        "rdp",
        "--delta",
        "paper",
    ]
    found = cli(*asked, "--epsilon", 2, "--json").json
    assert found["sigma"] == pytest.approx(0.792, rel=0.01)  # the contract's
    assert 1.98 <= found["epsilon"] <= 2.0
    assert found["delta"] == pytest.approx(3000**-1.1)
    back = cli(*asked, "--sigma", found["sigma"], "--json").json
    assert back["epsilon"] == pytest.approx(found["epsilon"])
    people = cli(*asked, "--epsilon", 2)
    assert people.status == 0
    assert f"sigma {found['sigma']:.4f}" in people.out
    words = " ".join(people.out.split())
    assert "add-or-remove: one example of one worker added or removed, at a declared rate that does not follow" in words
    assert f"epsilon at delta 1e-5 {found['epsilon_at_1e_5']:.4f}" in words
    assert f"at least as private as {found['mu']:.4f}-GDP (mu) for every delta of 1e-10 or more" in words


def test_privacy_takes_a_small_delta_unless_told_otherwise(cli):
    asked = ["privacy", "--samples", "141", "--rounds", "267", "--epsilon", 2, "--json"]
    found = cli(*asked).json
    assert found["delta"] == 1e-5
    assert found["sigma"] == pytest.approx(3.85, rel=0.001)
    assert found["epsilon_at_1e_5"] == found["epsilon"] <= 2
    assert cli(*asked, "--delta", 0.001).json["delta"] == 0.001
    assert cli(*asked, "--delta", "paper").json["delta"] == 141**-1.1
    one_line(cli(*asked, "--delta", "papers"), "delta = 'papers': must be a number above 0 and below 1, or paper")


def test_privacy_prices_groups(cli):
    asked = ["privacy", "--samples", "141", "--rounds", "267", "--sigma", 3.85]
    found = cli(*asked, "--group", 2, "--group", 4, "--json").json
    assert found["group"] == [2, 4]
    assert found["epsilon"] < found["group_epsilon"][0] < found["group_epsilon"][1]
    assert "group" not in cli(*asked, "--json").json
    people = cli(*asked, "--group", 2).out
    assert (
        f"group of 2 examples of one worker, added or removed together: epsilon {found['group_epsilon'][0]:.4f}"
        in people
    )
    one_line(cli(*asked, "--group", 2, "--accountant", "rdp"), "group = 2: groups are priced with Gaussian noise")
    one_line(cli(*asked, "--group", 0), "group = 0")


def test_so_much_noise_is_not_said_to_be_too_little(cli):
    for sigma, accountant in itertools.product(("1e38", "1e300"), ("pld", "rdp")):
        asked = ["privacy", "--samples", "3000", "--rounds", "10", "--sigma", sigma, "--accountant", accountant]
        one_line(cli(*asked), f"sigma = {float(sigma)!r}: must be at most 1e+06")


def test_privacy_refuses_to_price_fixed_batches_by_pld(cli):
    line = ["privacy", "--samples", "3000", "--rounds", "10", "--epsilon", "2", "--sampling", "fixed"]
    one_line(cli(*line), "rdp")
    assert cli(*line, "--accountant", "rdp", "--json").json["relation"] == "replace-one"


def test_data_list(cli, elsewhere):
    found = cli("data", "list", "--json").json
    assert found.keys() == SOURCES.keys()
    assert found["digits"]["here"] is True
    assert found["mnist"]["here"] is False
    people = cli("data", "list")
    assert people.status == 0
    assert all(name in people.out for name in SOURCES)


def test_data_verify_says_by_its_exit_status(cli, elsewhere):
    whole = cli("data", "verify", "digits")
    assert whole.status == 0
    assert "ok" in whole.out
    lost = cli("data", "verify", "mnist")
    assert lost.status == 1
    assert "missing" in lost.out
    as_json = cli("data", "verify", "mnist", "--json")
    assert as_json.status == 1
    assert set(as_json.json["mnist"].values()) == {"missing"}
    assert cli("data", "verify").status == 1


def test_data_verify_finds_damage(cli, elsewhere, tmp_path):
    folder = tmp_path / "nothing" / "usps"
    folder.mkdir(parents=True)
    np.savez(folder / "usps16.npz", x=np.zeros(3), y=np.zeros(3))
    answer = cli("data", "verify", "usps")
    assert answer.status == 1
    assert "usps16.npz" in answer.out
    assert "ok" not in answer.out


def commands(command, name: str = "noisegate"):
    yield name, command
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {child}")


def test_every_command_and_option_has_a_help_text():
    found = dict(commands(typer.main.get_command(app)))
    assert {"noisegate run", "noisegate list", "noisegate privacy", "noisegate data verify"} <= found.keys()
    for name, command in found.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


def test_help_is_printed(cli):
    for line in ([], ["run"], ["list"], ["privacy"], ["redteam"], ["data"], ["data", "verify"]):
        answer = cli(*line, "--help")
        assert answer.status == 0
        assert "Usage" in answer.out


def test_the_module_is_the_command(spawn):
    process = spawn("privacy", "--samples", 10, "--batch", 16, "--rounds", 10, "--epsilon", 2)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("noisegate: batch = 16")
    assert err.count("\n") == 1
