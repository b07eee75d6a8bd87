"""The command line: exit status, what is on standard output, and readable errors."""

import json
import tomllib

import numpy as np
import pytest
import typer

from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.cli import app
from noisegate.data import SOURCES
from noisegate.models import MODELS

QUICK = ["run", "--rounds", "3", "--sigma", "2.5", "--epsilon", "2", "--accountant", "rdp", "--device", "cpu"]
USAGE_LINES = 8
"""The contract of the command line: a usage error is no longer than this."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No data set to be found."""
    monkeypatch.setenv("NOISEGATE_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def refused(answer, *parts: str) -> None:
    assert answer.status == 2, answer
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert 1 <= len(answer.err.strip().splitlines()) <= USAGE_LINES
    for part in parts:
        assert part in answer.err


def one_line(answer, *parts: str) -> None:
    refused(answer, *parts)
    assert len(answer.err.strip().splitlines()) == 1
    assert answer.err.strip().startswith("noisegate: ")


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


@pytest.mark.parametrize(("line", "says"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_readable_line(cli, line, says):
    one_line(cli(*line.split()), says)


@pytest.mark.parametrize(
    "line",
    [
        "run --epsilon two",
        "run --workers 1.5",
        "run --no-such-flag",
        "run one.toml two.toml",
        "list",
        "list nonsense",
        "privacy --rounds 10 --epsilon 2",
        "nonsense",
        "data nonsense",
    ],
)
def test_a_usage_error_is_short(cli, line):
    refused(cli(*line.split()))


@pytest.mark.parametrize("attack", ["os:getcwd", "os:path.join", "json:dumps"])
def test_a_plugins_name_that_is_no_attack_is_refused(cli, attack):
    one_line(cli("run", "--attack", attack, "--rounds", 2, "--sigma", 4))


def test_errors_begin_on_the_first_line(cli):
    """A progress bar that never began leaves nothing behind."""
    answer = cli("run", "--batch", 1000)
    assert answer.err.startswith("noisegate: ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('dataset = "digits"\nepsilom = 2\n', "epsilom = 2: unknown setting (did you mean 'epsilon'?)"),
        ("dataset = [1,2", "not valid TOML"),
        ('epsilon = "2"\n', "epsilon = '2': must be a number"),
        ('attack = { name = "gaussian", scale = -1 }\n', "scale = -1"),
        ("[sweep]\nseed = [1, 2]\n", "sweep"),
        ("attack = [1]\n", "attack = [1]"),
    ],
)
def test_a_wrong_file_is_one_readable_line(cli, tmp_path, content, says):
    (tmp_path / "s.toml").write_text(content)
    one_line(cli("run", "s.toml"), says, "s.toml" if "unknown setting" in says else "")


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


def test_run_for_people_puts_the_accuracy_into_proportion(cli, tmp_path):
    answer = cli(*QUICK, "--out", "here")
    assert answer.status == 0
    for words in (
        "accuracy",
        "reference accuracy",
        "undefended",
        "epsilon",
        "against label-flip",
        "15 of 25",
    ):
        assert words in " ".join(answer.out.split())
    assert "written to here" in answer.out
    for name in ("here", "here/reference", "here/undefended"):
        assert (tmp_path / name / "result.json").exists()


def test_baselines_can_be_asked_for(cli):
    found = cli(*QUICK, "--json", "--baselines").json
    assert 0 <= found["reference_accuracy"] <= 1
    assert 0 <= found["undefended_accuracy"] <= 1


@pytest.mark.parametrize("style", ["names", "tables"])
def test_a_finished_run_is_found_again(cli, style):
    parts = ["--set", "attack.to=random", "--set", "worker.momentum=0.2"] if style == "tables" else []
    first = cli(*QUICK, *parts, "--json")
    again = cli(*QUICK, *parts, "--json", "--resume")
    assert again.status == 0, again.err
    assert again.json == first.json, "seconds too: it was not run again"


def test_the_same_command_may_be_given_twice(cli):
    first, again = cli(*QUICK, "--json"), cli(*QUICK, "--json")
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


@pytest.mark.parametrize(
    ("setting", "part", "expected"),
    [
        ("attack.to=random", "attack", {"name": "label-flip", "to": "random"}),
        ("attack.to='random'", "attack", {"name": "label-flip", "to": "random"}),
        ("aggregator.refused=2.5", "aggregator", {"name": "fortified", "refused": 2.5}),
        ("aggregator.refused=1", "aggregator", {"name": "fortified", "refused": 1}),
        ("worker.momentum=0", "worker", {"name": "normalized", "momentum": 0}),
    ],
)
def test_set_reads_values_as_toml_or_text(cli, setting, part, expected):
    answer = cli(*QUICK, "--set", setting, "--json")
    assert answer.status == 0, answer.err
    assert answer.json["spec"][part] == expected


def test_set_may_be_given_several_times(cli):
    chosen = ["--aggregator", "two-stage", "--set", "aggregator.width=2", "--set", "aggregator.stages=1"]
    found = cli(*QUICK, *chosen, "--json").json
    assert (found["spec"]["aggregator"]["width"], found["spec"]["aggregator"]["stages"]) == (2, 1)


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
        "--dirichlet": 4.0,
        "--auxiliary": 3,
        "--auxiliary-from": "digits",
        "--seed": 9,
        "--model": "mlp",
        "--sampling": "poisson",
    }
    answer = cli(*QUICK, *(part for pair in flags.items() for part in pair), "--json")
    assert answer.status == 0, answer.err
    spec = answer.json["spec"]
    for flag, value in flags.items():
        found = spec[flag[2:].replace("-", "_")]
        assert found == value or found == {"name": value}, flag
    assert cli(*QUICK, "--non-iid", "--json").json["spec"]["non_iid"] is True
    assert cli(*QUICK, "--secret", "--json").json["spec"]["secret"] is True
    assert cli(*QUICK, "--delta", "paper", "--json").json["spec"]["delta"] == "paper"


# --- the others ----------------------------------------------------------------------------------------------------

LISTS = {"datasets": SOURCES, "models": MODELS, "attacks": ATTACKS, "aggregators": AGGREGATORS}


@pytest.mark.parametrize("kind", LISTS)
def test_list_names_every_entry(cli, kind):
    entries = cli("list", kind, "--json").json
    assert [entry["name"] for entry in entries[kind]] == list(LISTS[kind])
    assert all(entry["about"] for entry in entries[kind])
    people = cli("list", kind)
    assert people.status == 0
    for name in LISTS[kind]:
        assert name in people.out


def test_list_settings_can_be_written_into_a_spec(cli):
    for kind in ("attacks", "aggregators"):
        for entry in cli("list", kind, "--json").json[kind]:
            for key, value in entry["settings"].items():
                if value is not None:
                    assert tomllib.loads(f"{key} = {json.dumps(value)}") == {key: value}


def test_list_experiments_is_a_list(cli):
    assert isinstance(cli("list", "experiments", "--json").json["experiments"], list)
    assert cli("list", "experiments").status == 0


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


@pytest.mark.parametrize("sigma", ["1e38", "1e300"])
def test_so_much_noise_is_not_said_to_be_too_little(cli, sigma):
    for accountant in ("pld", "rdp"):
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
