"""What is read back from disk is checked: a damaged or foreign file is one clear line, never a resumed run."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from conftest import sealed
from noisegate import Compute, Spec, StoreError, files, run
from noisegate.files import read_whole, seal, unseal, write_whole
from noisegate.redteam import trials
from noisegate.runs import checkpoints, key, launch
from noisegate.runs.key import fingerprint, user_key
from noisegate.runs.setup import Setup, prepare
from noisegate.runs.store import RunFolder
from noisegate.runs.unbuilt import UnbuiltSpec, read_unbuilt, unbuilt_spec, uses_plugins
from noisegate.runs.verdicts import Verdicts, read_verdicts
from noisegate.runs.verdicts import pack as pack_verdicts
from noisegate.sweeps.folder import SweepFolder
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.sweep import sweep
from noisegate.views import Reason

ONE = Compute(device="cpu", threads=1)
SPEC = Spec(rounds=6, sigma=2.5, sigma_base=2.5, accountant="rdp", aggregator="two-stage", evaluate_every=2, workers=4)
NAME = "checkpoint.safetensors"
SOURCE = Path(files.__file__).parent


def stop_after(rounds: int):
    def watch(progress, _):
        if progress.rounds == rounds:
            raise KeyboardInterrupt

    return watch


def stopped(out: Path, spec: Spec = SPEC, after: int = 3, **inputs) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run(spec, compute=ONE, out=out, watch=stop_after(after), **inputs)
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The files of a run that was interrupted after three of six rounds."""
    out = stopped(tmp_path_factory.mktemp("begun") / "run")
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def folder(begun, tmp_path):
    (tmp_path / "run").mkdir()
    for name, content in begun.items():
        (tmp_path / "run" / name).write_bytes(content)
    return tmp_path / "run"


def never(*_):
    raise AssertionError("a damaged checkpoint was resumed")


SETUPS: dict[str, Setup] = {}
"""What `prepare` made, by run: the checks of a checkpoint do not change it."""


def refused(folder: Path, says: str = "", spec: Spec = SPEC) -> None:
    """Resuming is one line that names what is wrong, and no round is played."""
    if spec.name() not in SETUPS:
        SETUPS[spec.name()] = prepare(spec, ONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "prepare", lambda *_, **__: SETUPS[spec.name()])
        with pytest.raises(StoreError, match=says) as caught:
            run(spec, compute=ONE, out=folder, resume=True, watch=never)
    assert "\n" not in str(caught.value)


def test_no_code_is_loaded_from_files():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for word in ("torch.load", "torch.save", "import pickle", "allow_pickle=True"):
            assert word not in text, f"{path}: {word}"


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_resumed(folder):
    assert run(SPEC, compute=ONE, out=folder, resume=True).rounds == 6


def test_a_byte_that_flips_anywhere_is_noticed(folder):
    whole = (folder / NAME).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, header, 13), *range(header, len(whole), len(whole) // 40), len(whole) - 1]
    assert len(places) > 60
    for i, place in enumerate(places):
        spoiled = bytearray(whole)
        spoiled[place] ^= (1, 0x80)[i % 2]
        (folder / NAME).write_bytes(spoiled)
        refused(folder, NAME)


@pytest.mark.parametrize("left", [0, 7, 8, 100, 0.5, -1])
def test_a_checkpoint_that_was_cut_is_refused(folder, left):
    whole = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(whole[: int(left * len(whole)) if isinstance(left, float) else left])
    refused(folder, "is damaged")


def test_a_checkpoint_with_more_behind_it_is_refused(folder):
    with (folder / NAME).open("ab") as file:
        file.write(b"\0" * 8)
    refused(folder, "checksum does not fit")


def rewritten(content: bytes, about: dict | None = None, **tensors) -> bytes:
    """A checkpoint with other tensors or words, and a checksum that fits: what somebody makes on purpose, or a bug."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said = json.loads(header["__metadata__"]["noisegate"])
    from safetensors.torch import load

    held = {name: value for name, value in {**load(content), **tensors}.items() if value is not None}
    new = save(held, {"noisegate": json.dumps({**said, **(about or {}), "sha256": "0" * 64})})
    return new.replace(b"0" * 64, hashlib.sha256(new).hexdigest().encode(), 1)


def test_a_checkpoint_that_is_rewritten_as_it_was_is_resumed(folder):
    (folder / NAME).write_bytes(rewritten((folder / NAME).read_bytes()))
    assert run(SPEC, compute=ONE, out=folder, resume=True).rounds == 6


def tensors_of(folder: Path) -> dict:
    return load_file(folder / NAME)


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("params", lambda value: value * float("nan"), "not finite"),
        ("uploads", lambda value: value / 0, "not finite"),
        ("state.*", lambda value: value * float("inf"), "not finite"),
        ("params", lambda value: value[:-1], "another shape"),
        ("params", lambda value: value.double(), "another shape or type"),
        ("uploads", lambda value: value[:-1], "another shape"),
        ("reasons", lambda value: value + 200, "no such reason"),
        ("reasons", lambda value: value[:-1], "another shape"),
        ("scores", lambda value: value + 1, "not played"),
        ("scores", lambda value: None, "other tensors"),
        ("more", lambda value: torch.zeros(1), "other tensors"),
        ("curve", lambda value: value[:-1], "damaged"),
        ("curve", lambda value: torch.frombuffer(bytearray(b"[{}]"), dtype=torch.uint8), "curve"),
        ("curve", lambda value: torch.frombuffer(bytearray(b"[" * 10**5), dtype=torch.uint8), "nested too deeply"),
        ("curve", lambda value: None, "damaged"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_though_the_checksum_does(folder, name, make, says):
    held = tensors_of(folder)
    names = [own for own in held if own.startswith("state.")] if name == "state.*" else [name]
    assert names
    value = {own: make(held.get(own)) for own in names[:1]}
    (folder / NAME).write_bytes(rewritten((folder / NAME).read_bytes(), **value))
    refused(folder, says)


def test_what_liars_sent_may_be_anything(folder, tmp_path):
    spec = replace(SPEC, attack="nan")
    stopped(tmp_path / "attacked", spec)
    assert run(spec, compute=ONE, out=tmp_path / "attacked", resume=True).rounds == 6


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"device": "cuda"}, "was begun on cuda; a cpu draws other noise"),
        ({"device": "\x1b[2J"}, r"was begun on \\x1b\[2J"),
        ({"versions": {"noisegate": "9.9", "torch": "1.0"}}, "was begun with noisegate 9.9, torch 1.0"),
        ({"versions": 3}, "unknown versions"),
        ({"run": "digits-000000000000"}, "is of another run"),
        ({"spec": "0" * 63 + "1"}, "is of another run"),
        ({"inputs": {"key": "00", "digest": "11"}}, "other data, model or loss"),
        ({"inputs": "none"}, "not a fingerprint"),
        ({"rounds": 7}, "out of range"),
        ({"rounds": -1}, "no number"),
        ({"rounds": 2}, "not played"),
        ({"rounds": 3.0}, "no number"),
        ({"rounds": True}, "no number"),
        ({"of": 7}, "another number of rounds"),
        ({"of": 10**300}, "out of range"),
        ({"seconds": -1.0}, "out of range"),
        ({"seconds": "long"}, "no number"),
        ({"kind": "noisegate checkpoint 3"}, "not a checkpoint of this version"),
    ],
)
def test_words_that_do_not_fit_are_refused_though_the_checksum_does(folder, about, says):
    (folder / NAME).write_bytes(rewritten((folder / NAME).read_bytes(), about))
    refused(folder, says)


def test_tensors_that_were_swapped_are_noticed(folder):
    held = tensors_of(folder)
    whole = (folder / NAME).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    one, two = (held["uploads"][row].numpy().tobytes() for row in (0, 1))
    body = whole[header:].replace(one, b"?" * len(one)).replace(two, one).replace(b"?" * len(one), two)
    assert body != whole[header:]
    (folder / NAME).write_bytes(whole[:header] + body)
    refused(folder, "checksum does not fit")


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"sigma": 0.0, "sigma_base": None, "aggregator": "mean"}, {"rate": 0.3}, {"workers": 5}]
)
def test_another_runs_checkpoint_is_refused(folder, tmp_path, change):
    other = stopped(tmp_path / "other", replace(SPEC, **change))
    (folder / NAME).write_bytes((other / NAME).read_bytes())
    refused(folder, "is of another run")


def test_a_checkpoint_of_other_data_is_refused(toy, tmp_path):
    spec = replace(SPEC, batch=8, rounds=4)
    mine = stopped(tmp_path / "mine", spec, dataset=toy())
    other = stopped(tmp_path / "other", spec, dataset=toy(train=330))
    (mine / NAME).write_bytes((other / NAME).read_bytes())
    with pytest.raises(StoreError, match="other data, model or loss"):
        run(spec, compute=ONE, dataset=toy(), out=mine, resume=True, watch=never)


def test_a_file_that_is_too_large_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "ALLOWANCE", 0)
    monkeypatch.setattr(checkpoints, "LARGER", 4)
    with (folder / NAME).open("ab") as file:
        file.truncate(2**33)  # 8 GiB of nothing, which take no capacity on the disk
    monkeypatch.setattr(Path, "read_bytes", never)
    refused(folder, "larger than the")


def test_a_pickle_is_never_opened(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"rounds": 3, "evil": Evil()}, folder / NAME)
    refused(folder, "is damaged")
    (folder / NAME).rename(folder / "checkpoint.pt")
    refused(folder, "of an earlier version and cannot be resumed")
    assert not (tmp_path / "ran").exists()


def test_without_resume_whatever_is_there_makes_no_difference(folder):
    (folder / NAME).write_bytes(b"nonsense")
    (folder / "inputs.txt").write_text("an oracle of an earlier version")
    assert run(SPEC, compute=ONE, out=folder).rounds == 6
    assert not (folder / "inputs.txt").exists()


# --- results -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run(SPEC, compute=ONE, out=out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def done(finished, tmp_path):
    (tmp_path / "run").mkdir()
    for name, content in finished.items():
        (tmp_path / "run" / name).write_bytes(content)
    return tmp_path / "run"


def test_a_number_that_was_changed_in_a_result_is_noticed(done):
    text = (done / "result.json").read_text()
    assert run(SPEC, compute=ONE, out=done, resume=True, watch=never).rounds == 6
    (done / "result.json").write_text(text.replace('"epsilon": ', '"epsilon": 1', 1))
    refused(done, "its checksum does not fit")


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": "2"},
        {"epsilon": -2.0},
        {"accuracy": 1.5},
        {"accuracy": 0.123456},
        {"rounds": 6.5},
        {"rounds": 0},
        {"rounds": True},
        {"rounds": 4},
        {"curve": []},
        {"curve": [{"round": 6}]},
        {"worker_epsilons": ["a"]},
        {"sigma": 10**400},
        {"spec": {}},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_a_result_out_of_range_is_refused_though_the_checksum_fits(done, changes):
    result = json.loads((done / "result.json").read_text())
    (done / "result.json").write_text(sealed({**result, **changes}))
    refused(done, r"result\.json")


def test_the_result_of_another_run_is_refused(done, tmp_path):
    run(replace(SPEC, seed=2), compute=ONE, out=tmp_path / "other")
    (done / "result.json").write_bytes((tmp_path / "other" / "result.json").read_bytes())
    refused(done, "is of another run")
    folder = SweepFolder(tmp_path / "sweep")
    sweep([SPEC], folder, compute=ONE, jobs=1)
    (folder.run_path(SPEC) / "result.json").write_bytes((tmp_path / "other" / "result.json").read_bytes())
    cell = folder.cell(SPEC)
    assert cell.status == "failed"
    assert "is of another run" in cell.message


def test_sealed_files_that_are_not(tmp_path):
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"a": NaN}', b"9" * 5000, b'{"sha256": 3}'):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(StoreError, match="is damaged"):
            unseal(files.read_json(tmp_path / "file"), tmp_path / "file")
    assert unseal(json.loads(seal({"a": [1.5, None, "ü"]})), "it") == {"a": [1.5, None, "ü"]}


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(StoreError, match="is not a file"):
            read_whole(tmp_path / name, 100)
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(StoreError, match="larger than the 4 bytes"):
        read_whole(tmp_path / "large", 4)


def test_what_a_lock_says_is_checked(tmp_path):
    folder = SweepFolder(tmp_path)
    (tmp_path / "runs").mkdir()
    for content in ("round 3 of 0", "round 9 of 3", "round x of y", "a b c d", "round 1 of " + "9" * 5000, "\x1b[2J"):
        folder._lock_path(SPEC).write_text(content)
        assert folder.share(SPEC) == 0.0
        assert folder.told(SPEC) == ""


def test_a_damaged_failure_is_a_failure(tmp_path):
    for content in ("[]", "{", '{"status": 3}', '{"status": "done", "message": "x"}'):
        (tmp_path / "failed.json").write_text(content)
        assert RunFolder(tmp_path).failure()[0] == "failed"
    (tmp_path / "failed.json").write_text(sealed({"status": "skipped", "message": "\x1b[2J" + "x" * 9000}))
    status, message = RunFolder(tmp_path).failure()
    assert status == "skipped"
    assert message.startswith(r"\x1b[2J")
    assert len(message) < 2100


# --- the one writer ------------------------------------------------------------------------------------------------


class Short:
    """A disk that is full after some bytes: it takes a part of what it is given, and then nothing."""

    def __init__(self, monkeypatch, capacity: int) -> None:
        self.capacity, opened = capacity, Path.open

        def opening(path, mode="r", *rest, **more):
            file = opened(path, mode, *rest, **more)
            if "x" in mode or "w" in mode or "a" in mode:
                write = file.write

                def writing(content):
                    write(content[: self.capacity])
                    self.capacity -= min(self.capacity, len(content))
                    raise OSError(errno.ENOSPC, "No space left on device")

                file = Wrapped(file, writing)
            return file

        monkeypatch.setattr(Path, "open", opening)


class Wrapped:
    def __init__(self, file, write) -> None:
        self.file, self.write = file, write

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        Short(patch, 2)
        with pytest.raises(StoreError, match="No space left"):
            write_whole(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_real_full_disk(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def fsync(number: int) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, number)
        os.close(full)
        os.write(number, b"x")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / ".file.part").symlink_to(tmp_path / "theirs")
    write_whole(tmp_path / "file", b"mine", ".file.part")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_search_can_be_opened_again_after_a_full_disk(tmp_path, monkeypatch):
    specs = [replace(SPEC, seed=seed) for seed in range(3)]
    with trials.TrialFolder(tmp_path / "kept", SPEC, "here") as folder:
        folder.add(specs[0], "screen", Outcome("done", 0.5))
        with monkeypatch.context() as patch:
            Short(patch, 100)
            with pytest.raises(StoreError, match="No space left"):
                folder.add(specs[1], "screen", Outcome("done", 0.4))
        assert folder.find(specs[1]) is None, "what is not on disk is not known"
    with trials.TrialFolder(tmp_path / "kept", SPEC, "here") as again:
        assert [again.find(spec) is None for spec in specs] == [False, True, True]
        again.add(specs[2], "screen", Outcome("done", 0.3))
    with trials.TrialFolder(tmp_path / "kept", SPEC, "here") as again:
        assert (len(again), again.damaged) == (2, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b'"accuracy": 0.4', b'"accuracy": 0.9'),
        lambda line: line[: len(line) // 2] + b"\n",
        lambda line: b"\xff\n",
        lambda line: b"[" * 10**5 + b"\n",
        lambda line: sealed({**json.loads(line), "accuracy": 7.0}).encode() + b"\n",
        lambda line: sealed({**json.loads(line), "status": "splendid"}).encode() + b"\n",
        lambda line: sealed({**json.loads(line), "key": 3}).encode() + b"\n",
        lambda line: sealed({**json.loads(line), "accuracy": None}).encode() + b"\n",
    ],
)
def test_a_damaged_trial_is_run_again(tmp_path, damage):
    specs = [replace(SPEC, seed=seed) for seed in range(3)]
    with trials.TrialFolder(tmp_path, SPEC, "here") as folder:
        for spec, accuracy in zip(specs, (0.5, 0.4, 0.3), strict=True):
            folder.add(spec, "screen", Outcome("done", accuracy))
    lines = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_bytes(lines[0] + damage(lines[1]) + lines[2])
    with trials.TrialFolder(tmp_path, SPEC, "here") as again:
        assert again.damaged == 1
        assert [again.find(spec) is None for spec in specs] == [False, True, False]
    assert (tmp_path / "results.jsonl").read_bytes() == lines[0] + lines[2]


def test_what_a_trial_said_is_fit_for_a_terminal(tmp_path):
    with trials.TrialFolder(tmp_path, SPEC, "here") as folder:
        folder.add(SPEC, "screen", Outcome("skipped", message="no\x1b[2J\nway"))
    with trials.TrialFolder(tmp_path, SPEC, "here") as again:
        assert again.find(SPEC).message == "no\\x1b[2J\nway"


# --- locks ---------------------------------------------------------------------------------------------------------

FLAGS = ["--workers", "4", "--rounds", "3", "--sigma", "2.5", "--epsilon", "2", "--accountant", "rdp", "--threads", "1"]


def holding(path: Path) -> subprocess.Popen:
    held = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", held, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_two_runs_in_one_folder(cli, tmp_path):
    (tmp_path / "run").mkdir()
    with holding(tmp_path / "run" / ".lock") as other:
        for more in ([], ["--resume"]):
            answer = cli("run", *FLAGS, "--out", "run", "--no-baselines", "--json", *more)
            assert (answer.status, answer.out) == (2, "")
            assert answer.err == (
                "noisegate: run: another process writes there; wait until it is done, or choose another --out\n"
            )
        other.kill()  # the system unlocks it
    assert cli("run", *FLAGS, "--out", "run", "--no-baselines", "--json").status == 0


def test_a_command_that_trains_the_reference_still_holds_the_run(cli, tmp_path):
    assert cli("run", *FLAGS, "--out", "run").status == 0
    before = (tmp_path / "run" / "result.json").read_bytes()
    with holding(tmp_path / "run" / ".lock") as other:
        answer = cli(
            "run", *FLAGS, "--byzantine", "0", "--attack", "none", "--aggregator", "mean", "--out", "run/reference"
        )
        assert answer.status == 2
        assert "another process writes there" in answer.err
        other.kill()
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_two_threads_in_one_folder(tmp_path):
    inside, go = threading.Event(), threading.Event()

    def watch(progress, _):
        inside.set()
        assert go.wait(60)

    def first():
        run(SPEC, compute=ONE, out=tmp_path / "run", watch=watch)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(StoreError, match="another process writes there"):
            run(SPEC, compute=ONE, out=tmp_path / "run")
    finally:
        go.set()
        thread.join()
    assert run(SPEC, compute=ONE, out=tmp_path / "run", resume=True, watch=never).rounds == 6


# --- fingerprints --------------------------------------------------------------------------------------------------


@pytest.fixture
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "secret" / "key"))
    return tmp_path / "secret" / "key"


def write_data(path: Path, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    np.savez(path, x=rng.random((300, 5), dtype=np.float32), y=np.arange(300) % 3)
    return path


def test_no_file_of_a_folder_is_an_oracle(own_key, tmp_path, toy, monkeypatch):
    """The same run with another key: whatever differs is keyed, and nothing is the plain hash of the data."""
    data = write_data(tmp_path / "own.npz")
    spec = replace(SPEC, dataset=str(data), batch=8)
    stopped(tmp_path / "one", spec)
    first = json.loads((tmp_path / "one" / "inputs.json").read_text())
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "another"))
    stopped(tmp_path / "two", spec)
    second = json.loads((tmp_path / "two" / "inputs.json").read_text())
    assert first.keys() == {"key", "digest"}
    assert first["key"] != second["key"]
    assert first["digest"] != second["digest"]
    plain = [hashlib.new(name, data.read_bytes()).hexdigest() for name in ("sha256", "blake2b", "sha1", "md5")]
    for path in [*(tmp_path / "one").iterdir(), *(tmp_path / "two").iterdir()]:
        content = path.read_bytes()
        assert not any(word[:12].encode() in content for word in plain), path
    key_bytes = own_key.read_bytes()
    for path in (tmp_path / "one").iterdir():
        assert key_bytes not in path.read_bytes()
        assert key_bytes.hex().encode() not in path.read_bytes()


def test_what_the_spec_names_needs_no_key(own_key, tmp_path):
    run(SPEC, compute=ONE, out=tmp_path / "run")
    assert not own_key.exists()
    assert not (tmp_path / "run" / "inputs.json").exists()


def test_another_key_is_said(own_key, tmp_path, toy, monkeypatch):
    spec = replace(SPEC, batch=8)
    stopped(tmp_path / "run", spec, dataset=toy())
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "another"))
    with pytest.raises(StoreError, match=r"another key.*\$NOISEGATE_KEY"):
        run(spec, compute=ONE, dataset=toy(), out=tmp_path / "run", resume=True)
    monkeypatch.setenv("NOISEGATE_KEY", str(own_key))
    assert run(spec, compute=ONE, dataset=toy(), out=tmp_path / "run", resume=True).rounds == 6


def test_trials_of_other_data_are_run_anew(own_key, tmp_path):
    spec = replace(SPEC, dataset=str(write_data(tmp_path / "own.npz")), batch=8)
    with trials.TrialFolder(tmp_path / "kept", spec, "here") as folder:
        folder.add(spec, "screen", Outcome("done", 0.5))
    content = (tmp_path / "kept" / "results.jsonl").read_bytes()
    assert hashlib.sha256((tmp_path / "own.npz").read_bytes()).hexdigest()[:12].encode() not in content
    with trials.TrialFolder(tmp_path / "kept", spec, "here") as folder:
        assert folder.find(spec) is not None
    write_data(tmp_path / "own.npz", seed=2)
    with trials.TrialFolder(tmp_path / "kept", spec, "here") as folder:
        assert folder.find(spec) is None


def test_the_key_is_its_owners_alone(own_key):
    first = user_key()
    assert len(first) == 32
    assert user_key() == first
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(own_key.parent.stat().st_mode) == 0o700
    assert [path.name for path in own_key.parent.iterdir()] == ["key"]
    own_key.chmod(0o640)
    with pytest.raises(StoreError, match="others may read this key; `chmod 600` it"):
        user_key()
    own_key.chmod(0o600)
    own_key.write_bytes(b"short")
    with pytest.raises(StoreError, match="is no key of 32 bytes"):
        user_key()
    assert first.hex() not in key.name_of(first)


def test_where_the_key_is(monkeypatch, tmp_path):
    monkeypatch.delenv("NOISEGATE_KEY")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert key.key_path() == tmp_path / "state" / "noisegate" / "key"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key.key_path() == tmp_path / ".local" / "state" / "noisegate" / "key"
    monkeypatch.setenv("NOISEGATE_KEY", str(tmp_path / "file" / "key"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="key"):
        user_key()


def test_two_processes_at_once_have_one_key(own_key):
    command = "from noisegate.runs.key import user_key; print(user_key().hex())"
    processes = [subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({process.communicate()[0] for process in processes}) == 1
    found = []
    threads = [threading.Thread(target=lambda: found.append(user_key())) for _ in range(8)]
    own_key.unlink()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_the_fingerprint_tells_data_and_models_apart(own_key, toy):
    first = fingerprint(SPEC, toy(), None)
    assert fingerprint(SPEC, toy(), None) == first
    model = torch.nn.Linear(5, 3).bfloat16()
    assert (
        len({first.digest, fingerprint(SPEC, toy(train=330), None).digest, fingerprint(SPEC, toy(), model).digest}) == 3
    )
    assert fingerprint(SPEC, None, None) is None


# --- reading only --------------------------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
from noisegate.attacks import ATTACKS
Path({where!r}).touch()
Attack = ATTACKS["gaussian"]
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module whose import leaves a file; gone from memory, as for a process that has not run it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "evil_plugin.py").write_text(EVIL.format(where=str(tmp_path / "imported")))
    monkeypatch.syspath_prepend(tmp_path / "own")

    def forget() -> Path:
        sys.modules.pop("evil_plugin", None)
        (tmp_path / "imported").unlink(missing_ok=True)
        return tmp_path / "imported"

    yield forget
    forget()


def test_report_and_watch_import_nothing_that_a_run_names(cli, tmp_path, plugin):
    spec = replace(SPEC, attack={"name": "evil_plugin:Attack", "scale": 2.0})
    result = run(spec, compute=ONE, out=tmp_path / "run")
    stopped(tmp_path / "stopped", replace(spec, seed=2))
    trace = plugin()
    for name in ("run", "stopped"):
        watched = cli("watch", name, "--once")
        assert watched.status == 0, watched.err
        assert "two-stage against evil_plugin:Attack (scale 2.0) on digits" in watched.out
        answer = cli("report", name, "-o", f"{name}.html")
        assert answer.status == 0, answer.err
    assert f"accuracy {result.accuracy:.3f}, " in " ".join(cli("watch", "run", "--once").out.split())
    assert "round 3 of 6" in " ".join(cli("watch", "stopped", "--once").out.split())
    page = (tmp_path / "run.html").read_text()
    assert f"{result.accuracy:.3f}" in page
    assert "<h2>Incomplete</h2>" not in page
    assert not trace.exists()


def test_report_and_watch_import_nothing_that_a_sweep_names(cli, tmp_path, plugin):
    lines = SPEC.to_toml().replace('"label-flip"', '"evil_plugin:Attack"').replace("seed = 1\n", "")
    (tmp_path / "grid.toml").write_text(lines + "[sweep]\nseed = [1, 2]\n")
    assert cli("sweep", "grid.toml", "--out", "found", "--device", "cpu", "--jobs", "1").status == 0
    trace = plugin()
    watched = cli("watch", "found", "--once")
    assert watched.status == 0, watched.err
    assert "2 of 2 runs ended: 2 done" in watched.out
    answer = cli("report", "found", "-o", "sweep.html")
    assert answer.status == 0, answer.err
    assert "evil_plugin:Attack" in (tmp_path / "sweep.html").read_text()
    assert not trace.exists()
    (tmp_path / "found" / "specs.json").unlink()
    for command in ("watch", "report"):
        refused = cli(command, "found")
        assert refused.status == 2
        assert "names a part of your own" in refused.err
    assert not trace.exists()


def test_an_unbuilt_spec_has_the_name_and_form_of_the_spec(tmp_path, plugin):
    strange = {"name": "evil_plugin:Attack", "scale": 2.0}
    for changes in (
        {"attack": strange},
        {"attack": "evil_plugin:Attack"},
        {"attack": {"name": "on-off", "attack": strange}},
    ):
        spec = replace(SPEC, **changes)
        (tmp_path / "spec.toml").write_text(spec.to_toml())
        trace = plugin()
        found = read_unbuilt(tmp_path / "spec.toml")
        assert isinstance(found, UnbuiltSpec)
        assert found.canonical() == spec.canonical()
        assert (found.name(), found.rounds) == (spec.name(), spec.rounds)
        assert not trace.exists()
        assert uses_plugins(spec.canonical())
    assert isinstance(unbuilt_spec(SPEC.canonical()), Spec)
    assert not uses_plugins(SPEC.canonical())


def test_a_damaged_list_of_runs_is_one_line(tmp_path):
    unsealed = ["{}", "[]", '{"specs": 3}', '{"of": null, "specs": [3]}', '{"of": null, "specs": [{"batch": 0}]}']
    for content in (*unsealed, *(sealed(json.loads(content)) for content in unsealed[2:])):
        (tmp_path / "specs.json").write_text(content)
        with pytest.raises(StoreError, match="is damaged"):
            SweepFolder(tmp_path).specs()


def test_a_lost_round_of_an_earlier_version_is_read_as_lost(tmp_path):
    """Which had no weights in the file, and the code 7 for it."""
    reasons = np.array([[0, 4], [7, 7]], dtype=np.uint8)
    old = Verdicts(reasons, np.zeros((2, 2), np.float32), np.array([False, True]))
    (tmp_path / "verdicts.npz").write_bytes(pack_verdicts(old))
    found, _ = read_verdicts(tmp_path / "verdicts.npz", 2, 2)
    assert found.weights is None
    assert found.reasons.tolist() == [[0, 4], [Reason.LOST, Reason.LOST]]
    (tmp_path / "verdicts.npz").write_bytes(pack_verdicts(replace(old, weights=np.zeros((2, 2), np.float32))))
    assert read_verdicts(tmp_path / "verdicts.npz", 2, 2)[0].reasons.tolist() == [[0, 4], [7, 7]]
