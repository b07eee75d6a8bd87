"""The server's state folder: whole or refused, and no round number twice."""

import errno
import hashlib
import json
import os
import resource

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.errors import StoreError
from noisegate.federation import store as store_module
from noisegate.federation import tensors as tensors_module
from noisegate.federation.checkpoint import RunIdentity, ServerCheckpoint
from noisegate.federation.store import StateFolder
from noisegate.federation.tensors import read_tensors, write_tensors
from noisegate.federation.terms import Terms

N, D = 3, 5
TERMS = Terms("ab" * 32, "a title", 10, D, 4, 40, 1.0)
IDENTITY = RunIdentity(TERMS, {"name": "mean"}, ("a", "b", "c"))


def folder(path, identity=IDENTITY):
    path.mkdir(exist_ok=True)
    return StateFolder(path, identity)


def first():
    return ServerCheckpoint.first(99, torch.arange(float(D)), N)


def judged(store, checkpoint, round):
    """A judged round: each worker's upload is (round, row, ...)."""
    rows = torch.full((N, D), float(round)) + torch.arange(N)[:, None]
    places = {row: store.free_slot(checkpoint, row) for row in range(N)}
    store.log_round(round, bytes(32))
    store.put_uploads(rows, places)
    for row in range(N):
        checkpoint.slots[row] = places[row]
        checkpoint.digests[row] = hashlib.sha256(rows[row].numpy().tobytes()).hexdigest()
    checkpoint.round, checkpoint.judged = round, checkpoint.judged + 1
    checkpoint.params = checkpoint.params + 1
    checkpoint.aggregator = {"average": torch.ones(N, D, dtype=torch.float16) * round, "seen": torch.tensor([True])}
    checkpoint.line = {"round": round}
    store.write_checkpoint(checkpoint)
    store.append_record(checkpoint.line)
    return rows


def begun(path, rounds=2):
    store = folder(path)
    checkpoint, _, _ = store.recover(first())
    for round in range(rounds):
        rows = judged(store, checkpoint, round)
    store.close()
    return checkpoint, rows


def test_what_was_written_is_recovered(tmp_path):
    before, rows = begun(tmp_path / "state")
    after, uploads, next_round = folder(tmp_path / "state").recover(first())
    assert next_round == 2
    assert torch.equal(uploads, rows)
    assert torch.equal(after.params, before.params)
    assert torch.equal(after.aggregator["average"], before.aggregator["average"])
    for name in ("seed", "round", "judged", "slots", "digests", "standings", "totals", "spent", "line"):
        assert getattr(after, name) == getattr(before, name), name


def test_the_safetensors_library_reads_the_file_too(tmp_path):
    begun(tmp_path / "state")
    found = safetensors.torch.load_file(tmp_path / "state" / "checkpoint.safetensors")
    assert set(found) == {"params", "state.average", "state.seen"}
    assert found["state.average"].dtype == torch.float16
    assert bool((found["state.average"] == 1).all())


def test_the_first_start_draws_no_second_seed(tmp_path):
    store = folder(tmp_path / "state")
    assert store.recover(first())[0].seed == 99
    other = ServerCheckpoint.first(7, torch.zeros(D), N)
    assert folder(tmp_path / "state").recover(other)[0].seed == 99


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_every_type_and_form_come_back(tmp_path, kind):
    given = {"a": torch.ones(3, 2).to(kind), "empty": torch.zeros(0, 4).to(kind), "one": torch.tensor(1).to(kind)}
    given["odd"] = torch.arange(12).reshape(3, 4).to(kind).T  # not in one piece
    write_tensors(tmp_path / "t", given, {"x": 1})
    found, about = read_tensors(tmp_path / "t")
    assert about == {"x": 1}
    assert all(torch.equal(found[name], value) and found[name].dtype == kind for name, value in given.items())
    with pytest.raises(StoreError, match="cannot be saved"):
        write_tensors(tmp_path / "c", {"c": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not (tmp_path / "c").exists()


# --- damage -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(["checkpoint", "uploads"]))
def test_a_flipped_bit_in_checkpoint_or_uploads_is_noticed(tmp_path_factory, share, bit, file):
    path = tmp_path_factory.mktemp("s") / "state"
    checkpoint, _ = begun(path)
    name = {"checkpoint": "checkpoint.safetensors", "uploads": "uploads.bin"}[file]
    content = bytearray((path / name).read_bytes())
    place = int(share * len(content))
    if file == "uploads" and (place // (4 * D)) % 2 != checkpoint.slots[place // (8 * D)]:
        return  # a place that the checkpoint does not use
    content[place] ^= 1 << bit
    (path / name).write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|other terms|another aggregator"):
        folder(path).recover(first())


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), name=st.sampled_from(["checkpoint.safetensors", "uploads.bin"]))
def test_a_file_that_was_cut_is_noticed(tmp_path_factory, share, name):
    path = tmp_path_factory.mktemp("s") / "state"
    begun(path, rounds=3)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(share * len(content) * 0.8)])
    with pytest.raises(StoreError, match="damaged"):
        folder(path).recover(first())


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "uploads.bin", "rounds.log"])
def test_a_missing_file_is_never_a_fresh_start(tmp_path, name):
    begun(tmp_path / "state")
    (tmp_path / "state" / name).unlink()
    with pytest.raises(StoreError, match=r"missing|damaged"):
        folder(tmp_path / "state").recover(first())


@pytest.mark.parametrize(
    "changes",
    [
        {"params": torch.full((D,), torch.nan)},
        {"params": torch.zeros(D + 1)},
        {"params": torch.zeros(D, dtype=torch.float64)},
        {"aggregator": {"a": torch.tensor([torch.inf])}},
        {"round": 2.5},
        {"round": -2},
        {"judged": 9},
        {"slots": [0, 1, 2]},
        {"slots": [0, 1]},
        {"digests": ["x"] * N},
        {"spent": -1.0},
        {"spent": "much"},
        {"accuracy": "good"},
        {"seed": -1},
        {"line": []},
        {"totals": []},
        {"standings": []},
    ],
)
def test_a_checkpoint_that_says_what_cannot_be_is_refused(tmp_path, changes):
    checkpoint, _ = begun(tmp_path / "state")
    for name, value in changes.items():
        setattr(checkpoint, name, value)
    store = folder(tmp_path / "state")
    store.write_checkpoint(checkpoint)
    with pytest.raises(StoreError, match="damaged"):
        store.recover(first())


@pytest.mark.parametrize(
    "counts", [[-1, 0, 0, 0, ""], [0, 99, 0, 0, ""], [0, 0, 0, 0], [0, 0, 0, 0, 5], ["1", 0, 0, 0, ""]]
)
def test_the_standing_of_a_worker_is_checked(tmp_path, counts):
    checkpoint, _ = begun(tmp_path / "state")
    checkpoint.write(tmp_path / "state" / "x", IDENTITY)
    tensors, about = read_tensors(tmp_path / "state" / "x")
    about["standings"][1] = counts
    write_tensors(tmp_path / "state" / "checkpoint.safetensors", tensors, about)
    with pytest.raises(StoreError, match="standing"):
        folder(tmp_path / "state").recover(first())


def test_another_run_or_aggregator_is_refused_and_the_workers_stay_those_of_the_checkpoint(tmp_path):
    begun(tmp_path / "state")
    other = Terms("cd" * 32, "a title", 10, D, 4, 40, 1.0)
    with pytest.raises(StoreError, match="other terms"):
        folder(tmp_path / "state", RunIdentity(other, {"name": "mean"}, ("a", "b", "c"))).recover(first())
    with pytest.raises(StoreError, match="another aggregator"):
        folder(tmp_path / "state", RunIdentity(TERMS, {"name": "krum"}, ("a", "b", "c"))).recover(first())
    store = folder(tmp_path / "state", RunIdentity(TERMS, {"name": "mean"}, ("c", "d")))
    store.recover(first())
    assert store.identity.names == ("a", "b", "c")


# --- the log of rounds ------------------------------------------------------------------------------------------


def test_a_logged_number_is_never_used_again(tmp_path):
    begun(tmp_path / "state", rounds=2)
    store = folder(tmp_path / "state")
    store.recover(first())
    store.log_round(2, bytes(32))  # and then the process ends
    store.close()
    assert folder(tmp_path / "state").recover(first())[2] == 3


@pytest.mark.parametrize("torn", ['{"round": 2, "di', "{", '{"round": 2, "digest": "00"}', "\0\0\0\n"])
def test_a_torn_last_line_is_a_number_that_may_have_been_used(tmp_path, torn):
    begun(tmp_path / "state", rounds=2)
    with (tmp_path / "state" / "rounds.log").open("a") as file:
        file.write(torn)
    for _ in range(2):  # it is written anew, so it counts once
        store = folder(tmp_path / "state")
        assert store.recover(first())[2] == 3
    store.log_round(3, bytes(32))
    store.close()
    assert folder(tmp_path / "state").recover(first())[2] == 4


@pytest.mark.parametrize("lines", ["nonsense\n{}\n", '{"round": 1}\n{"round": 1}\n', '{"round": 3}\n{"round": 2}\n'])
def test_a_log_that_is_damaged_elsewhere_is_refused(tmp_path, lines):
    begun(tmp_path / "state", rounds=1)
    (tmp_path / "state" / "rounds.log").write_text(lines)
    with pytest.raises(StoreError, match="damaged"):
        folder(tmp_path / "state").recover(first())


def test_a_log_that_was_set_back_is_noticed(tmp_path):
    begun(tmp_path / "state", rounds=3)
    log = tmp_path / "state" / "rounds.log"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    with pytest.raises(StoreError, match="ends before round 2"):
        folder(tmp_path / "state").recover(first())


def test_the_record_has_the_judged_rounds_after_a_crash_at_any_place(tmp_path):
    begun(tmp_path / "state", rounds=2)
    path = tmp_path / "state" / "rounds.jsonl"
    whole = path.read_text()
    for content in (whole, "", whole[:-1], whole[:5], whole + '{"round": 7}\n', whole + '{"rou'):
        path.write_text(content)
        store = folder(tmp_path / "state")
        store.recover(first())
        store.close()
        rounds = [json.loads(line)["round"] for line in path.read_text().splitlines()]
        assert rounds in ([0, 1], [1])
        assert rounds == [0, 1] or content in ("", whole[:5])


# --- crashes and full disks -------------------------------------------------------------------------------------


class Crash(BaseException):
    """Ends a process in the middle of a step."""


STEPS = [(store_module.os, "pwrite"), (store_module.os, "fsync"), (store_module.os, "fdatasync"), (os, "write")]


@pytest.mark.parametrize(("module", "name"), STEPS)
@pytest.mark.parametrize("at", range(6))
def test_a_crash_at_any_write_leaves_the_last_or_the_next_checkpoint_whole(tmp_path, monkeypatch, module, name, at):
    path = tmp_path / "state"
    _, rows = begun(path, rounds=2)
    store = folder(path)
    checkpoint, _, _ = store.recover(first())
    real, calls = getattr(module, name), []

    def crash(*given):
        calls.append(given)
        if len(calls) == at + 1:
            raise Crash
        return real(*given)

    monkeypatch.setattr(module, name, crash)
    try:
        new = judged(store, checkpoint, 2)
    except Crash:
        new = None
    monkeypatch.undo()
    store.close()
    after, uploads, next_round = folder(path).recover(first())
    assert after.round in (1, 2)
    assert next_round >= 2 + (after.round == 2)
    log = [json.loads(line)["round"] for line in (path / "rounds.log").read_text().splitlines()]
    assert next_round == log[-1] + 1
    expected = rows if after.round == 1 else torch.full((N, D), 2.0) + torch.arange(N)[:, None]
    assert torch.equal(uploads, expected)
    assert new is None or after.round == 2


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["log_round", "put_uploads", "write_checkpoint", "append_record", "write_status"])
def test_a_full_disk_is_a_store_error_that_says_what_to_do_and_a_later_start_goes_on(tmp_path, monkeypatch, what):
    path = tmp_path / "state"
    begun(path, rounds=2)
    store = folder(path)
    checkpoint, _, _ = store.recover(first())
    given = {
        "log_round": (2, bytes(32)),
        "put_uploads": (torch.zeros(N, D), {0: store.free_slot(checkpoint, 0)}),
        "write_checkpoint": (checkpoint,),
        "append_record": ({"round": 2},),
        "write_status": ({},),
    }[what]
    for module in (store_module, tensors_module):
        monkeypatch.setattr(module, "write_all", full, raising=False)
    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(StoreError, match="No space left on device"):
        getattr(store, what)(*given)
    monkeypatch.undo()
    store.close()
    assert folder(path).recover(first())[0].round == 1


def test_a_real_limit_on_file_size_leaves_the_old_checkpoint(tmp_path):
    """The system itself refuses to write on: half a checkpoint is never taken for one."""
    path = tmp_path / "state"
    begun(path, rounds=1)
    store = folder(path)
    checkpoint, _, _ = store.recover(first())
    checkpoint.aggregator = {"large": torch.zeros(2**16)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            store.write_checkpoint(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.close()
    assert folder(path).recover(first())[0].round == 0
