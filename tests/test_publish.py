"""`noisegate publish`: exactly what may be given away of a secret run, and nothing of any other."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import sealed
from noisegate import Compute, Spec, reference, run
from noisegate.privacy import Cost, together
from noisegate.runs.publish import statement
from noisegate.runs.statement import _up

SPEC = Spec(
    rounds=3,
    sigma=2.5,
    sigma_base=2.5,
    batch=16,
    accountant="rdp",
    aggregator="mean",
    byzantine=0.0,
    attack="none",
    delta=1e-6,
    secret=True,
    seed=987654321,
)
ONE = Compute(device="cpu", threads=1)


def change(folder, **changes):
    """Another result in the folder, with the checksum that goes with it."""
    path = folder / "result.json"
    result = {**json.loads(path.read_text()), **changes}
    path.write_text(sealed({key: value for key, value in result.items() if value != "gone"}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished secret run with its reference."""
    folder = tmp_path_factory.mktemp("made") / "run"
    run(SPEC, compute=ONE, out=folder)
    run(reference(SPEC), compute=ONE, out=folder / "reference")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def test_exactly_three_files_are_written(cli, folder, tmp_path):
    answer = cli("publish", folder, "-o", "public")
    assert (answer.status, answer.err) == (0, "")
    public = tmp_path / "public"
    assert sorted(path.name for path in public.iterdir()) == ["model.safetensors", "privacy.json", "privacy.txt"]
    assert answer.out.split() == [f"public/{path.name}" for path in sorted(public.iterdir())]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["public", "run"], "no unfinished folder stays"
    mine, theirs = load_file(public / "model.safetensors"), load_file(folder / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    said = json.loads((public / "privacy.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    clean = json.loads((folder / "reference" / "result.json").read_text())
    for key in (
        "relation",
        "declared",
        "sampling_rate",
        "epsilon",
        "delta",
        "epsilon_at_1e_5",
        "mu",
        "rounds",
        "sigma",
    ):
        assert said[key] == result[key], key
    assert said["accountant"] == "rdp"
    assert said["model"]["sha256"] == hashlib.sha256((public / "model.safetensors").read_bytes()).hexdigest()
    assert said["trained_beside"][0]["epsilon"] == clean["epsilon"]
    both = [Cost(142, 16, "poisson", 2.5, 3)] * 2
    assert said["together"] == {"epsilon": together(both, 1e-6), "delta": 1e-6}


def test_the_text_says_all_of_it_and_nothing_else(cli, folder, tmp_path):
    assert cli("publish", folder, "-o", "public").status == 0
    words = " ".join((tmp_path / "public" / "privacy.txt").read_text().split())
    result = json.loads((folder / "result.json").read_text())
    for said in (
        "Unit: one example of one worker",
        "relation: one example of one worker added or removed, at a declared rate",
        "a public number of examples, 142. It was not declared beforehand but taken from the data",
        "It and the workers' sizes, by which the server may have judged, count as public.",
        "rate of 0.112676 (poisson sampling)",
        f"epsilon = {_up(result['epsilon'])} at delta = 1e-06",
        f"epsilon = {_up(result['epsilon_at_1e_5'])} at delta = 1e-05",
        f"mu = {_up(result['mu'])}",
        "The server used 2 examples of each class from the same data. These have no protection.",
        "standard deviation of 2.5 times",
        "Rounds: 3",
        "Accountant: rdp",
        "Randomness: the operating system's, kept nowhere",
        "The same command also trained on the same data: reference",
        "These three files, and no others",
    ):
        assert said in words, said
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "public").iterdir())
    assert str(SPEC.seed) not in everything
    for private in ('accuracy"', 'curve"', 'seed"', "worker_epsilons", "honest_rejected"):
        assert private not in everything, private


def test_no_folder_of_the_machine_is_published(folder):
    """A model, a worker or the server's examples may be named by a path; what they are called is enough."""
    found = json.loads((folder / "result.json").read_text())
    found["model"] = "/home/somebody/clinic/mine.py:build"
    found["spec"] |= {"worker": {"name": "C:\\clinic\\own.py:Mine"}, "auxiliary_from": "../private/ours.npz"}
    said = statement(found, {}, "0")
    assert (said["model"]["name"], said["worker"], said["server_examples"]["from"]) == (
        "mine.py:build",
        "own.py:Mine",
        "ours.npz",
    )
    assert not any(place in json.dumps(said) for place in ("somebody", "clinic", "private/"))


def test_numbers_are_never_rounded_down():
    for value in (1.99951, 1.23449, 0.0123449, 12344.9, 2.0, 1e-9, 0.0):
        assert value <= float(_up(value)) <= value * 1.001


REFUSED = [
    ({"secret": False}, "is not a secret run: its seed gives the noise back"),
    ({"secret": "gone"}, "lacks secret"),
    ({"secret": "yes"}, "secret is of another type"),
    ({"sigma": 0.0, "epsilon": None}, "was trained without noise"),
    ({"accountant": "stated"}, "its epsilon was stated"),
    ({"mu": "gone"}, "lacks mu"),
    ({"mu": None}, "no finite mu is known"),
    ({"byzantine_workers": 3, "byzantine": 0.2}, "simulated Byzantine workers, which hold copies of private examples"),
    ({"declared": "many"}, "declared is of another type"),
    ({"epsilon": -1.0}, "epsilon is out of range"),
    ({"parameters": 5}, "model.safetensors"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_has_no_privacy_is_refused_in_one_line(cli, folder, tmp_path, changes, says):
    change(folder, **changes)
    answer = cli("publish", folder, "-o", "public")
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "public").exists()


def test_another_model_is_not_published(cli, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value + 1 for name, value in tensors.items()}, folder / "model.safetensors")
    answer = cli("publish", folder, "-o", "public")
    assert answer.status == 2
    assert "not this run's model" in answer.err
    (folder / "model.safetensors").unlink()
    assert "is missing" in cli("publish", folder, "-o", "public").err


def test_an_unfinished_or_foreign_folder_is_refused(cli, folder, tmp_path):
    (folder / "result.json").rename(tmp_path / "result.json")
    assert "is no finished run" in cli("publish", folder, "-o", "public").err
    run(replace(SPEC, seed=2), compute=ONE, out=tmp_path / "other")
    (folder / "result.json").write_bytes((tmp_path / "other" / "result.json").read_bytes())
    assert "is of another run" in cli("publish", folder, "-o", "public").err


def test_the_place_must_be_empty(cli, folder, tmp_path):
    (tmp_path / "public").mkdir()
    assert cli("publish", folder, "-o", "public").status == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "public").iterdir()}
    answer = cli("publish", folder, "-o", "public")
    assert answer.status == 2
    assert "public: is not empty" in answer.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "public").iterdir()} == before
    assert cli("publish", folder, "-o", folder / "spec.toml").status == 2


def test_all_files_or_none(cli, folder, tmp_path, monkeypatch):
    from noisegate.files import write_whole
    from noisegate.runs import publish as module

    def full(path, content):
        if path.name == "privacy.txt":
            raise OSError(28, "No space left on device")
        write_whole(path, content)

    monkeypatch.setattr(module, "write_whole", full)
    answer = cli("publish", folder, "-o", "public")
    assert answer.status == 2
    assert "No space left" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
