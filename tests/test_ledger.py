"""The ledger never under-counts: what it says is what was charged, or it says nothing."""

import errno
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.entropy import slack
from noisegate.errors import SpecError, StoreError
from noisegate.federation import ledger as ledger_module
from noisegate.federation import spending
from noisegate.federation.keys import SigningKey
from noisegate.federation.ledger import Ledger, repair
from noisegate.federation.ledger_folder import read_ledger
from noisegate.federation.ledger_lines import FILE, Book, read_book
from noisegate.federation.outbox import Pending
from noisegate.federation.spending import Spending, most_rounds, price, price_of_choices
from noisegate.federation.terms import Terms
from noisegate.privacy import Cost, together

DELTA = 1e-5
TERMS = Terms("a" * 64, "a trial", rounds=50, parameters=1000, batch=16, declared=200, sigma=2.0)
OTHER = replace(TERMS, run="b" * 64, title="another", rounds=30, batch=8, declared=400, sigma=1.3)
SERVER = bytes(range(32))
RUN = TERMS.run


def model_of(round: int) -> str:
    return hashlib.sha256(f"model {round}".encode()).hexdigest()


def message_of(round: int, again: str = "") -> bytes:
    return f"upload {round} {again}".encode() * 20


def digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def send(ledger: Ledger, round: int, terms: Terms = TERMS, acknowledged: bool = True) -> None:
    """What a worker does in a round."""
    outbox = ledger.outbox(terms.run)
    outbox.put(message_of(round), round, model_of(round))
    ledger.charge(terms.run, round, model_of(round), digest(message_of(round)))
    if acknowledged:
        outbox.acknowledge(round)


def begun(folder: Path, rounds: int = 3, terms: Terms = TERMS) -> Path:
    """The folder of a ledger with so many rounds; the last one is still in the outbox."""
    with Ledger.open(folder) as ledger:
        ledger.note_data("f" * 64)
        ledger.begin(terms, SERVER)
        for round in range(rounds):
            send(ledger, round, terms, acknowledged=round < rounds - 1)
    return folder


def charges(folder: Path, run: str = RUN) -> list[int]:
    return list(read_ledger(folder)[0].runs[run].charges)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """What is wrong is wrong: no test but one waits for a writer."""
    monkeypatch.setattr("noisegate.federation.ledger_folder.TRIES", 1)


@pytest.fixture
def folder(tmp_path):
    return begun(tmp_path / "ledger")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a ledger with three rounds."""
    return (begun(tmp_path_factory.mktemp("whole") / "ledger") / FILE).read_bytes()


def test_what_was_charged_is_found_again(tmp_path):
    with Ledger.open(tmp_path / "new" / "ledger") as ledger:
        assert (ledger.charged(RUN), ledger.last_round(RUN), ledger.charge_of(RUN, 0)) == (0, -1, None)
        assert ledger.spent(DELTA) == 0
        assert ledger.costs() == []
        ledger.begin(TERMS, SERVER)
        for round in (0, 1, 4):
            send(ledger, round)
    with Ledger.open(tmp_path / "new" / "ledger") as ledger:
        ledger.begin(TERMS, SERVER)  # which is known: no line is added
        assert (ledger.charged(RUN), ledger.last_round(RUN)) == (3, 4)
        found = ledger.charge_of(RUN, 4)
        assert (found.round, found.model, found.upload) == (4, model_of(4), digest(message_of(4)))
        assert ledger.charge_of(RUN, 2) is None
        assert ledger.costs() == [TERMS.cost(3)]
        assert ledger.book.entries == 5
    with pytest.raises(StoreError, match="is closed"):
        ledger.charged(RUN)


def test_a_ledger_is_its_owners_alone(tmp_path):
    begun(tmp_path / "ledger")
    assert (tmp_path / "ledger").stat().st_mode & 0o077 == 0


def test_rounds_only_go_up_and_are_charged_once(folder):
    with Ledger.open(folder) as ledger:
        size = (folder / FILE).stat().st_size
        for round, upload in ((2, digest(message_of(2))), (2, "0" * 64), (1, digest(message_of(1)))):
            with pytest.raises(StoreError, match=f"round {round} of run aaaaaaaaaaaa cannot be charged after round 2"):
                ledger.charge(RUN, round, model_of(round), upload)
        with pytest.raises(StoreError, match=r"has no run 'bbb.*begin it first"):
            ledger.charge(OTHER.run, 0, model_of(0), "0" * 64)
        with pytest.raises(StoreError, match="begin it first"):
            ledger.outbox(OTHER.run)
        for wrong in (-1, True, 1.0, "3"):
            with pytest.raises(SpecError, match="must be a whole number"):
                ledger.charge(RUN, wrong, model_of(1), "0" * 64)
        with pytest.raises(SpecError, match="64 hexadecimal digits"):
            ledger.charge(RUN, 3, "model", "0" * 64)
        assert (folder / FILE).stat().st_size == size
        send(ledger, 3)  # a refusal is no failure


def test_no_second_noise_for_a_round_that_was_charged(folder):
    with Ledger.open(folder) as ledger:
        outbox = ledger.outbox(RUN)
        with pytest.raises(StoreError, match="sent again as it lies in the outbox, or not at all"):
            outbox.put(message_of(2, "with fresh noise"), 2, model_of(2))
        assert outbox.pending() == Pending(2, model_of(2), message_of(2))


def test_a_run_never_changes(folder):
    with Ledger.open(folder) as ledger:
        with pytest.raises(StoreError, match=r"other terms \(rounds, sigma\)"):
            ledger.begin(replace(TERMS, sigma=1.0, rounds=60), SERVER)
        with pytest.raises(StoreError, match="the key of another server"):
            ledger.begin(TERMS, bytes(32))
        ledger.begin(OTHER, bytes(32))
        assert list(ledger.book.runs) == [RUN, OTHER.run]


def test_other_data_are_noticed_and_clear_nothing(tmp_path):
    with Ledger.open(tmp_path / "ledger") as ledger:
        assert [ledger.note_data(text) for text in ("one", "one", "two", "two", "one")] == [
            *(False, False, True, False, True)
        ]
        assert ledger.book.data == ["one", "two", "one"]
        ledger.begin(TERMS, SERVER)
        send(ledger, 0)
        ledger.note_data("three")
        assert ledger.charged(RUN) == 1
        for wrong in ("", "two\nlines", "x" * 201, None):
            with pytest.raises(SpecError, match="fingerprint = "):
                ledger.note_data(wrong)


def test_an_old_copy_is_noticed_by_the_servers_counter(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    with Ledger.open(folder) as ledger:
        send(ledger, 3)
        ledger.check_receipt(RUN, 4)
    with Ledger.open(tmp_path / "copy") as ledger:
        ledger.check_receipt(RUN, 3)
        with pytest.raises(StoreError, match="has 4 uploads of run aaaaaaaaaaaa from this worker, and 3 are charged"):
            ledger.check_receipt(RUN, 4)
        with pytest.raises(StoreError, match="has 1 uploads of run bbb"):
            ledger.check_receipt(OTHER.run, 1)


@pytest.mark.parametrize("clock", ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "no clock at all", ""])
def test_nothing_depends_on_the_clock(folder, clock):
    with Ledger.open(folder, clock=lambda: clock) as ledger:
        send(ledger, 3)
    with Ledger.open(folder) as ledger:
        send(ledger, 4)
        assert ledger.charged(RUN) == 5
        assert ledger.spent(DELTA) == price([Spending(TERMS.cost(5), 1000, 50)], DELTA)


# ---- What is on the disk.


def test_a_byte_that_changes_anywhere_is_noticed(whole):
    for place in range(len(whole)):
        for other in (whole[place] ^ 1, whole[place] ^ 0x20, 0x0A, 0x20):
            changed = whole[:place] + bytes([other]) + whole[place + 1 :]
            if changed != whole:
                with pytest.raises(StoreError, match=r"is damaged|is torn"):
                    read_book(changed, Path("ledger"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_lines_that_were_taken_out_put_in_or_moved_are_noticed(whole, data):
    lines = whole.splitlines(keepends=True)
    chosen = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=len(lines) + 2))
    content = b"".join(lines[place] for place in chosen)
    if chosen and chosen == list(range(len(chosen))):
        assert read_book(content, Path("ledger")).entries == len(chosen)
    else:
        with pytest.raises(StoreError, match=r"ledger.jsonl"):
            read_book(content, Path("ledger"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(content):
    with pytest.raises(StoreError, match=r"line \d+ is damaged|is torn|has no whole line"):
        read_book(content, Path("ledger"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 3.0}, "lacks something"),
        ({"n": 4}, "entry 3 is due"),
        ({"previous": "0" * 64}, "does not follow"),
        ({"kind": "gift"}, "not an entry"),
        ({"kind": ["charge"]}, "not an entry"),
        ({"kind": "data"}, "lacks something"),
        ({"extra": 1}, "says too much"),
        ({"round": -1}, "a round and two digests"),
        ({"round": True}, "a round and two digests"),
        ({"upload": "short"}, "a round and two digests"),
        ({"run": "b" * 64}, "no line before begins"),
        ({"run": ["a"]}, "no line before begins"),
    ],
)
def test_a_line_that_cannot_be_is_refused_though_its_sum_fits(whole, change, says):
    lines = whole.splitlines(keepends=True)
    entry = {**json.loads(lines[3]), **change}
    bare = {name: value for name, value in entry.items() if name != "sum"}
    entry["sum"] = digest(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode())
    line = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    with pytest.raises(StoreError, match=f"line 4 is damaged .*{says}"):
        read_book(b"".join(lines[:3]) + line, Path("ledger"))


@pytest.mark.parametrize(
    "change",
    [{"sigma": 0}, {"sigma": "1"}, {"declared": 10}, {"batch": 0}, {"parameters": 0}, {"rounds": 0}, {"title": 1}],
)
def test_a_run_without_a_price_is_refused_though_its_sum_fits(change):
    book = Book()
    lines = [book.line("ledger", "", version=1, id="0")]
    book.add(lines[0][:-1])
    lines.append(book.line("run", "", terms=TERMS.as_dict() | change, server=SERVER.hex()))
    with pytest.raises(StoreError, match="line 2 is damaged"):
        read_book(b"".join(lines), Path("ledger"))


@pytest.mark.parametrize("round", [0, 1])
def test_a_round_that_is_charged_again_or_too_late_is_refused_though_its_sum_fits(whole, round):
    book = read_book(whole, Path("ledger"))
    line = book.line("charge", "", run=RUN, round=round, model=model_of(round), upload="0" * 64)
    with pytest.raises(StoreError, match=f"line 7 is damaged .it charges round {round} after round 2"):
        read_book(whole + line, Path("ledger"))


def test_a_line_has_one_form(whole):
    """Else a line could say one thing twice, and mean the first to some and the second to others."""
    for before, after in ((b'"n":5', b'"n": 5'), (b'"n":5', b'"n":7,"n":5'), (b'"round":2', b'"\\u0072ound":2')):
        changed = whole.replace(before, after)
        assert changed != whole
        with pytest.raises(StoreError, match=r"line 6 is damaged .its checksum does not fit"):
            read_book(changed, Path("ledger"))


def test_a_ledger_of_a_later_version_is_not_read():
    with pytest.raises(StoreError, match="of version 2, and this noisegate reads 1"):
        read_book(Book().line("ledger", "", version=2, id="0"), Path("ledger"))


def test_cut_at_any_byte_it_is_refused_or_as_it_was(folder, tmp_path):
    """The outbox holds the last upload, so that what is cut is known."""
    content = (folder / FILE).read_bytes()
    ends = {place + 1 for place, letter in enumerate(content) if letter == 0x0A}
    last_line = sorted(ends)[-2]
    for left in range(len(content)):
        (folder / FILE).write_bytes(content[:left])
        if left == last_line:  # the one cut that no rule can tell from a crash before the charge: it is made good
            with Ledger.open(folder) as ledger:
                assert (ledger.charged(RUN), ledger.last_round(RUN)) == (3, 2)
                assert ledger.charge_of(RUN, 2).upload == digest(message_of(2))
        else:
            says = "lines are missing" if left in ends else "is torn" if left > min(ends) else "has no whole line"
            with pytest.raises(StoreError, match=says):
                Ledger.open(folder)


def test_without_an_outbox_it_says_what_its_whole_lines_say(folder):
    content = (folder / FILE).read_bytes()
    shutil.rmtree(folder / "outbox")
    for left in range(0, len(content) + 1, 7):
        try:
            book = read_book(content[:left], folder)
        except StoreError:
            assert content[:left][-1:] != b"\n"
        else:
            assert book.entries == content[:left].count(b"\n")
            assert content[:left].endswith(b"\n")


def test_an_append_that_stops_at_any_byte_loses_nothing(folder):
    before = (folder / FILE).read_bytes()
    with Ledger.open(folder) as ledger:
        send(ledger, 3, acknowledged=False)
    after = (folder / FILE).read_bytes()
    for written in range(len(before) + 1, len(after), 5):
        (folder / FILE).write_bytes(after[:written])
        with pytest.raises(StoreError, match=r"line, 7, is torn .* `noisegate ledger repair"):
            Ledger.open(folder)
        assert repair(folder) == (written - len(before), 1)
        assert (folder / f"{FILE}.torn").read_bytes() == after[len(before) : written]
        assert charges(folder) == [0, 1, 2, 3]
    assert repair(folder) == (0, 0)


def test_repair_takes_nothing_but_a_torn_last_line(folder):
    content = (folder / FILE).read_bytes()
    lines = content.splitlines(keepends=True)
    for wrong, says in (
        (content[:40] + b"x" + content[41:], "line 1 is damaged"),
        (b"".join(lines[:4]) + lines[4][:20], "lines are missing"),  # the outbox shows that more than one is lost
        (lines[0][:20], "has no whole line"),
        (b"".join(lines[:-1]) + b"{}\n", "line 6 is damaged"),
        (b"", "has no whole line"),
    ):
        (folder / FILE).write_bytes(wrong)
        with pytest.raises(StoreError, match=says):
            repair(folder)
        assert (folder / FILE).read_bytes() == wrong


def test_zeros_that_a_power_cut_leaves_are_a_torn_line(folder):
    with (folder / FILE).open("ab") as file:
        file.write(bytes(300))
    with pytest.raises(StoreError, match=r"is torn \(300 bytes"):
        Ledger.open(folder)
    assert repair(folder) == (300, 0)
    assert charges(folder) == [0, 1, 2]


def test_a_missing_file_beside_an_outbox_is_no_new_ledger(folder):
    (folder / FILE).unlink()
    for use in (Ledger.open, read_ledger):
        with pytest.raises(StoreError, match=r"is missing, and .*outbox shows that there was one"):
            use(folder)
    assert not (folder / FILE).exists()
    (folder / "outbox" / RUN / "pending.bin").unlink()
    (folder / "outbox" / RUN / "last.bin").unlink()  # an empty folder of a run is enough
    with pytest.raises(StoreError, match="is missing"):
        Ledger.open(folder)


def test_an_outbox_of_a_run_that_no_line_begins_shows_missing_lines(folder):
    shutil.move(folder / "outbox" / RUN, folder / "outbox" / OTHER.run)
    with pytest.raises(StoreError, match="lines are missing"):
        Ledger.open(folder)
    shutil.rmtree(folder / "outbox" / OTHER.run)
    (folder / "outbox" / OTHER.run).mkdir()
    with pytest.raises(StoreError, match="has no run bbbbbbbbbbbb, which has an outbox"):
        Ledger.open(folder)


def test_what_was_acknowledged_must_be_charged(folder, tmp_path):
    """The last upload was acknowledged: a cut by one line is then no crash between outbox and ledger."""
    with Ledger.open(folder) as ledger:
        ledger.outbox(RUN).acknowledge(2)
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    (folder / FILE).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(StoreError, match=r"has 5 lines, and .*last.bin was made when there were at least 6"):
        Ledger.open(folder)


def test_an_outbox_and_a_ledger_that_do_not_belong_together_are_refused(folder, tmp_path):
    with Ledger.open(tmp_path / "twin") as ledger:
        ledger.begin(TERMS, SERVER)
        for round in range(4):
            message = message_of(round, "of the twin")
            ledger.outbox(RUN).put(message, round, model_of(round))
            ledger.charge(RUN, round, model_of(round), digest(message))
    shutil.copy(folder / "outbox" / RUN / "pending.bin", tmp_path / "twin" / "outbox" / RUN / "pending.bin")
    with pytest.raises(StoreError, match="charges another upload for round 2"):
        Ledger.open(tmp_path / "twin")


@pytest.mark.parametrize("spoil", ["directory", "pipe", "link to nothing"])
def test_what_is_no_file_is_no_ledger(folder, spoil):
    (folder / FILE).unlink()
    match spoil:
        case "directory":
            (folder / FILE).mkdir()
        case "pipe":
            os.mkfifo(folder / FILE)
        case "link to nothing":
            (folder / FILE).symlink_to(folder / "gone")
    with pytest.raises(StoreError, match=r"is not a file; nothing of this ledger is believed|is missing"):
        Ledger.open(folder)


def test_what_is_no_folder_holds_no_ledger(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "ledger"):
        with pytest.raises(StoreError, match="cannot be used as the folder of a ledger"):
            Ledger.open(place)
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "outbox").write_text("")
    with pytest.raises(StoreError, match="outbox: cannot be read"):
        Ledger.open(tmp_path / "ledger")
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be used as the folder of a ledger"):
        Ledger.open(tmp_path / "other")


# ---- Writing fails.


@contextmanager
def disk_with(bytes_left: int, path: Path):
    """No file grows beyond what this one has and so many bytes: the system itself refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1, 100])
def test_on_a_full_disk_the_charge_fails_and_with_it_every_later_call(folder, left):
    content = (folder / FILE).read_bytes()
    with Ledger.open(folder) as ledger:
        outbox = ledger.outbox(RUN)
        outbox.put(message_of(3), 3, model_of(3))
        with disk_with(left, folder / FILE), pytest.raises(StoreError, match=r"could not be written \(File too large"):
            ledger.charge(RUN, 3, model_of(3), digest(message_of(3)))
        for call in (
            lambda: ledger.charge(RUN, 3, model_of(3), digest(message_of(3))),
            lambda: ledger.charged(RUN),
            lambda: ledger.charge_of(RUN, 0),
            lambda: ledger.last_round(RUN),
            lambda: ledger.begin(TERMS, SERVER),
            lambda: ledger.note_data("x"),
            lambda: ledger.spent(DELTA),
            lambda: ledger.affordable(TERMS, 1.0, DELTA),
            lambda: ledger.check_receipt(RUN, 0),
            lambda: ledger.outbox(RUN),
            lambda: outbox.put(message_of(4), 4, model_of(4)),
            ledger.costs,
        ):
            with pytest.raises(StoreError, match="could not be written"):
                call()
    assert (folder / FILE).read_bytes() == content  # no torn line is left where it can be taken back
    with Ledger.open(folder) as ledger:  # there is room again
        assert ledger.charged(RUN) == 4


def test_a_torn_line_that_cannot_be_taken_back_is_seen_at_the_next_start(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with Ledger.open(folder) as ledger:
        monkeypatch.setattr(ledger_module.os, "ftruncate", refuse)
        with disk_with(50, folder / FILE), pytest.raises(StoreError, match="could not be written"):
            ledger.charge(RUN, 3, model_of(3), "0" * 64)
    with pytest.raises(StoreError, match=r"is torn \(50 bytes"):
        Ledger.open(folder)


def test_a_charge_that_is_not_forced_to_the_disk_is_none(folder, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    with Ledger.open(folder) as ledger:
        monkeypatch.setattr(ledger_module.os, "fsync", refuse)
        with pytest.raises(StoreError, match=r"could not be written .Input/output error"):
            ledger.charge(RUN, 3, model_of(3), "0" * 64)
        with pytest.raises(StoreError, match="could not be written"):
            ledger.charged(RUN)
    with pytest.raises(StoreError, match="cannot be written"):
        Ledger.open(folder)


def test_an_interrupted_append_ends_all_use(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with Ledger.open(folder) as ledger:
        monkeypatch.setattr(ledger_module.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(RUN, 3, model_of(3), "0" * 64)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="was interrupted"):
            ledger.charged(RUN)
    assert charges(folder) == [0, 1, 2, 3]  # it may count too much, never too little


def test_a_charge_is_on_the_disk_before_it_returns(folder, monkeypatch):
    forced = []
    real = os.fsync
    monkeypatch.setattr(ledger_module.os, "fsync", lambda number: (forced.append(os.fstat(number)), real(number)))
    with Ledger.open(folder) as ledger:
        forced.clear()
        ledger.charge(RUN, 3, model_of(3), "0" * 64)
        last = forced[-1]
        assert (last.st_ino, last.st_size) == ((folder / FILE).stat().st_ino, (folder / FILE).stat().st_size)


def test_a_new_ledger_and_its_folders_are_on_the_disk_before_they_are_used(tmp_path, monkeypatch):
    forced, real = set(), os.fsync
    monkeypatch.setattr(ledger_module.os, "fsync", lambda number: (forced.add(os.fstat(number).st_ino), real(number)))
    folder = tmp_path / "ledger"
    with Ledger.open(folder) as ledger:
        ledger.begin(TERMS, SERVER)
        assert {path.stat().st_ino for path in (tmp_path, folder, folder / FILE)} <= forced
        send(ledger, 0, acknowledged=False)
    outbox = folder / "outbox"
    assert {path.stat().st_ino for path in (outbox, outbox / RUN, outbox / RUN / "pending.bin")} <= forced


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_what_may_not_be_written_is_not_opened(folder, monkeypatch, code):
    real = os.open

    def refuse(path, flags, *mode, **more):
        if flags & os.O_APPEND:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(ledger_module.os, "open", refuse)
    with pytest.raises(StoreError, match=f"cannot be written .{os.strerror(code)}.*nothing is sent that cannot"):
        Ledger.open(folder)
    monkeypatch.undo()
    Ledger.open(folder).close()  # its lock was given back


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_ledger_is_not_opened(folder):
    (folder / FILE).chmod(0o400)
    with pytest.raises(StoreError, match="cannot be written"):
        Ledger.open(folder)


@pytest.mark.parametrize("how", ["appended", "replaced", "removed", "cut"])
def test_a_ledger_that_someone_else_changes_is_not_written_to(folder, how):
    with Ledger.open(folder) as ledger:
        content = (folder / FILE).read_bytes()
        match how:
            case "appended":
                with (folder / FILE).open("ab") as file:
                    file.write(b"x")
            case "replaced":
                (folder / "copy").write_bytes(content)
                (folder / "copy").replace(folder / FILE)
            case "removed":
                (folder / FILE).unlink()
            case "cut":
                os.truncate(folder / FILE, 100)
        with pytest.raises(StoreError, match=r"was changed by someone else|could not be written"):
            ledger.charge(RUN, 3, model_of(3), "0" * 64)
        with pytest.raises(StoreError, match=r"was changed by someone else|could not be written"):
            ledger.charged(RUN)


# ---- Others.


def test_two_users_of_one_process_are_kept_apart(folder):
    with Ledger.open(folder), pytest.raises(StoreError, match="another process uses this ledger; wait until it ends"):
        Ledger.open(folder)
    Ledger.open(folder).close()


def test_where_no_lock_holds_a_second_writer_is_noticed(folder):
    with Ledger.open(folder) as first:
        (folder / ".lock").unlink()
        with Ledger.open(folder) as second:
            send(second, 3)
        with pytest.raises(StoreError, match="was changed by someone else"):
            send(first, 4)
    assert charges(folder) == [0, 1, 2, 3]


WORKER = """
import hashlib, sys
from pathlib import Path
from noisegate.federation.ledger import Ledger
from noisegate.federation.terms import Terms
with Ledger.open(Path(sys.argv[1])) as ledger:
    run = sys.argv[2]
    outbox = ledger.outbox(run)
    for round in range(ledger.last_round(run) + 1, 10**6):
        message = bytes(1000) + str(round).encode()
        outbox.put(message, round, "0" * 64)
        ledger.charge(run, round, "0" * 64, hashlib.sha256(message).hexdigest())
        print(round, flush=True)
        outbox.acknowledge(round)
"""


def test_a_process_holds_it_alone_is_read_meanwhile_and_may_be_killed(folder, cli, monkeypatch):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), RUN], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        sent = [int(worker.stdout.readline()) for _ in range(20)]
        with pytest.raises(StoreError, match="another process uses this ledger"):
            Ledger.open(folder)
        monkeypatch.setattr("noisegate.federation.ledger_folder.TRIES", 10)
        for _ in range(20):
            found = charges(folder)
            assert found == list(range(len(found)))
        answer = cli("ledger", "verify", folder)
        assert answer.status == 0, answer
        worker.send_signal(signal.SIGKILL)
        sent += [int(line) for line in worker.stdout.read().splitlines()]
    finally:
        worker.kill()
        worker.communicate()
    repair(folder)  # it may have been killed in the middle of a line
    assert sent[0] == 3
    assert set(sent) <= set(charges(folder))


def test_a_reader_waits_for_a_line_that_is_being_written(folder, monkeypatch):
    monkeypatch.setattr("noisegate.federation.ledger_folder.TRIES", 40)
    monkeypatch.setattr("noisegate.federation.ledger_folder.PAUSE", 0.05)
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-20])
    timer = threading.Timer(0.15, lambda: (folder / FILE).write_bytes(content))
    timer.start()
    try:
        assert charges(folder) == [0, 1, 2]
    finally:
        timer.join()


# ---- The outbox.


def test_an_upload_lies_in_the_outbox_until_the_server_has_it(tmp_path):
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.begin(TERMS, SERVER)
        outbox = ledger.outbox(RUN)
        assert outbox.pending() is None
        assert outbox.last() is None
        outbox.acknowledge(0)  # of nothing
        send(ledger, 0, acknowledged=False)
        outbox.acknowledge(1)  # of another round
        assert outbox.pending() == Pending(0, model_of(0), message_of(0))
        assert outbox.last() is None
        outbox.acknowledge(0)
        assert outbox.pending() is None
        assert outbox.last() == message_of(0)
        send(ledger, 5, acknowledged=False)
        assert outbox.pending().round == 5
        assert outbox.last() == message_of(0)
        for message, model in ((b"", model_of(6)), (b"x", "no digest")):
            with pytest.raises(ValueError, match="an upload has a message"):
                outbox.put(message, 6, model)


def test_an_upload_that_no_line_charges_is_charged_when_the_ledger_is_opened(folder):
    with Ledger.open(folder) as ledger:
        ledger.begin(OTHER, SERVER)
        ledger.outbox(RUN).put(message_of(7), 7, model_of(7))
        ledger.outbox(OTHER.run).put(message_of(1), 1, model_of(1))
    assert len(read_ledger(folder)[1]) == 2
    with Ledger.open(folder) as ledger:
        assert ledger.charge_of(RUN, 7).upload == digest(message_of(7))
        assert ledger.charge_of(OTHER.run, 1).model == model_of(1)
        assert (ledger.charged(RUN), ledger.charged(OTHER.run)) == (4, 1)
        assert ledger.outbox(RUN).pending().message == message_of(7)
    with Ledger.open(folder) as ledger:
        assert (ledger.charged(RUN), ledger.charged(OTHER.run)) == (4, 1)


def test_an_upload_is_replaced_whole_or_not_at_all(folder):
    with Ledger.open(folder) as ledger:
        outbox = ledger.outbox(RUN)
        size = (outbox.folder / "pending.bin").stat().st_size
        with (
            disk_with(size, outbox.folder / "pending.bin"),
            pytest.raises(StoreError, match="cannot be written"),
        ):
            outbox.put(bytes(100_000), 3, model_of(3))
        assert outbox.pending() == Pending(2, model_of(2), message_of(2))
        send(ledger, 3)  # nothing was charged, and there is room again
        assert ledger.charged(RUN) == 4


def pending_of(folder: Path) -> Pending | None:
    with Ledger.open(folder) as ledger:
        return ledger.outbox(RUN).pending()


def test_a_damaged_upload_is_never_sent_and_its_round_stays_charged(folder, cli):
    path = folder / "outbox" / RUN / "pending.bin"
    content = path.read_bytes()
    step = max(1, len(content) // 60)
    for place in range(0, len(content), step):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(StoreError, match=r"pending.bin: .*remove this file: its round stays charged"):
            pending_of(folder)
        assert cli("ledger", "verify", folder).status == 1
    for left in range(0, len(content), step):
        path.write_bytes(content[:left])
        with pytest.raises(StoreError, match=r"pending.bin: is damaged"):
            Ledger.open(folder)
    path.unlink()
    with Ledger.open(folder) as ledger:
        assert ledger.charged(RUN) == 3
        assert ledger.outbox(RUN).pending() is None


steps = st.lists(
    st.tuples(
        st.sampled_from([TERMS, OTHER]),
        st.sampled_from(["whole", "before outbox", "before ledger", "in ledger", "before send", "before receipt"]),
        st.integers(0, 1000),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_whatever_crashes_where_every_upload_that_left_is_charged_as_it_left(tmp_path_factory, played):
    """A worker that dies at a step, with a part of the line written, is repaired where need be, and started again."""
    folder = tmp_path_factory.mktemp("crash") / "ledger"
    left: dict[tuple[str, int], set[str]] = {}
    for number, (terms, dies, cut, noted) in enumerate(played):
        with Ledger.open(folder) as ledger:
            if noted:
                ledger.note_data(f"data {number}")
            ledger.begin(terms, SERVER)
            round, outbox = ledger.last_round(terms.run) + 1, ledger.outbox(terms.run)
            message, size = message_of(round, f"drawn at {number}"), ledger.book.size
            if dies != "before outbox":
                outbox.put(message, round, model_of(round))
            if dies not in ("before outbox", "before ledger"):
                ledger.charge(terms.run, round, model_of(round), digest(message))
            if dies in ("whole", "before receipt"):
                left.setdefault((terms.run, round), set()).add(digest(message))
            if dies == "whole":
                outbox.acknowledge(round)
        if dies == "in ledger":
            whole = (folder / FILE).stat().st_size
            os.truncate(folder / FILE, size + cut % (whole - size))
            repair(folder)
        with Ledger.open(folder) as ledger:
            if (found := ledger.outbox(terms.run).pending()) is not None:  # what is sent again after the crash
                left.setdefault((terms.run, found.round), set()).add(digest(found.message))
    if played:
        book, uncharged = read_ledger(folder)
        assert not uncharged
        for (run, round), uploads in left.items():
            assert uploads == {book.runs[run].charges[round].upload}


# ---- What it costs.


def test_everything_is_composed_exactly_with_what_floating_point_adds(tmp_path):
    with Ledger.open(tmp_path / "ledger") as ledger:
        for terms, rounds in ((TERMS, 5), (OTHER, 7)):
            ledger.begin(terms, SERVER)
            for round in range(rounds):
                ledger.charge(terms.run, round, model_of(round), "0" * 64)
        costs = [Cost(200, 16, "poisson", 2.0, 5), Cost(400, 8, "poisson", 1.3, 7)]
        assert ledger.costs() == costs
        more, lost = slack(1000 * 5 + 1000 * 7)
        assert more > 0
        assert lost > 0
        assert ledger.spent(DELTA) == together(costs, DELTA - lost) + more
        assert ledger.spent(DELTA) > together(costs, DELTA) > together(costs[:1], DELTA)
        assert ledger.spent_by_choices(DELTA) > ledger.spent(DELTA)


def test_a_model_so_large_that_no_delta_is_left_has_no_price():
    huge = Spending(TERMS.cost(10), 10**9, 50)
    assert slack(10**10)[1] > DELTA
    assert price([huge], DELTA) == math.inf
    assert price_of_choices([huge], DELTA)[0] == math.inf
    assert most_rounds([], replace(huge, cost=TERMS.cost(0)), 100.0, DELTA) < 10


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan])
def test_a_delta_that_is_none_is_refused(delta):
    for spent in ([], [Spending(TERMS.cost(1), 1, 1)]):
        with pytest.raises(SpecError, match="delta"):
            price(spent, delta)


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 1.5, 50.0])
def test_the_budget_allows_what_a_plain_loop_finds_and_no_round_more(tmp_path, before, epsilon):
    terms = replace(OTHER, rounds=7, declared=40)
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.begin(TERMS, SERVER)
        for round in range(before):
            ledger.charge(RUN, round, model_of(round), "0" * 64)

        def spent(rounds):
            numbers = 1000 * (before + rounds)
            more, lost = slack(numbers) if numbers else (0.0, 0.0)
            return together([TERMS.cost(before), terms.cost(rounds)], DELTA - lost) + more

        plain = 0
        while plain < terms.rounds and spent(plain + 1) <= epsilon:
            plain += 1
        assert ledger.affordable(terms, epsilon, DELTA) == plain
        ledger.begin(terms, SERVER)
        for round in range(plain):  # and what was allowed fits
            ledger.charge(terms.run, round, model_of(round), "0" * 64)
        assert ledger.spent(DELTA) <= epsilon or plain == 0
        assert plain == terms.rounds or ledger.affordable(terms, epsilon, DELTA) == 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 10_000_000),
    st.floats(0, 3),
    st.floats(1e-4, 1),
    st.floats(0.3, 1.2),
    st.floats(0.01, 10),
    st.integers(1, 10_000_000),
)
def test_the_search_is_exact_and_short_whatever_the_price(planned, start, slope, power, epsilon, known):
    """For any price that grows, also one that jumps to infinity."""
    asked = []

    def fake(spent, delta):
        rounds = spent[-1].cost.rounds
        asked.append(rounds)
        return start + slope * rounds**power if rounds <= known else math.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending, "price", fake)
        found = most_rounds([], Spending(TERMS.cost(0), 1, planned), epsilon, DELTA)
        assert len(asked) <= 2 + 4 * planned.bit_length() + 8
        assert 0 <= found <= planned
        assert found == 0 or fake([Spending(TERMS.cost(found), 1, 1)], DELTA) <= epsilon
        assert found == planned or fake([Spending(TERMS.cost(found + 1), 1, 1)], DELTA) > epsilon


def test_ten_thousand_rounds_take_few_prices(monkeypatch):
    asked, real = [], price
    monkeypatch.setattr(spending, "price", lambda *given: asked.append(1) or real(*given))
    before = [Spending(TERMS.cost(20), 1000, 50)]
    terms = Spending(Cost(3000, 16, "poisson", 0.9, 0), 25_000, 10_000)
    found = most_rounds(before, terms, 2.0, DELTA)
    assert 100 < found < 9_000
    assert len(asked) <= 10
    asked.clear()
    assert most_rounds(before, terms, 50.0, DELTA) == 10_000
    assert len(asked) == 1  # the common case


def test_choices_are_priced_at_one_order_set_by_the_first_run():
    spent = [Spending(TERMS.cost(20), 1000, 50), Spending(OTHER.cost(9), 500, 30)]
    found, order = price_of_choices(spent, DELTA)
    _, best = _renyi([(16 / 200, 2.0, 50)], None).get_epsilon_and_optimal_order(DELTA)
    assert order == best
    more, lost = slack(20_000 + 4_500)
    by_hand = _renyi([(16 / 200, 2.0, 20), (8 / 400, 1.3, 9)], [order]).get_epsilon(DELTA - lost) + more
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert price_of_choices([replace(spent[0], cost=TERMS.cost(2)), spent[1]], DELTA)[1] == order
    assert price_of_choices([], DELTA)[0] == 0


def _renyi(parts, orders):
    import dp_accounting as dp

    accountant = rdp.RdpAccountant(orders)
    for rate, sigma, rounds in parts:
        accountant.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), rounds))
    return accountant


# ---- The command line.


def test_show_says_what_each_run_cost_and_what_is_left(tmp_path, cli):
    worker = tmp_path / "worker"
    begun(worker / "here", 4)
    with Ledger.open(worker / "here") as ledger:
        ledger.begin(OTHER, bytes(32))
        for round in (0, 2):
            send(ledger, round, OTHER)
        total = ledger.spent(1e-6)
    (worker / "worker.toml").write_text('name = "w1"\nserver = "localhost:7443"\nledger = "here"\n')
    (worker / "policy.toml").write_text(
        f'epsilon = 3.0\ndelta = 1e-6\nserver = ["{SigningKey.generate().public.hex()}"]\n'
    )
    found = cli("ledger", "show", worker, "--json").json
    assert (found["epsilon"], found["delta"], found["budget"]) == (total, 1e-6, 3.0)
    assert found["left"] == 3.0 - total
    first, second = found["runs"]
    assert (first["charged"], first["first_round"], first["last_round"]) == (4, 0, 3)
    assert (second["title"], second["sigma"], second["rate"], second["server"]) == ("another", 1.3, 0.02, "0" * 64)
    assert first["epsilon"] == price([Spending(TERMS.cost(4), 1000, 50)], 1e-6)
    assert found["epsilon_by_choices"] > found["epsilon"]
    told = cli("ledger", "show", worker).out
    assert f"all together: epsilon {total:.4f} at delta 1e-06, by PLD; {3.0 - total:.4f} left of 3" in told
    assert "if later terms were chosen by earlier results: epsilon" in told
    assert "aaaaaaaaaaaa" in told
    assert "0 to 3" in told
    assert "0 to 2" in told
    assert "another" in told
    assert "the policy's budget is epsilon 3 at delta 1e-06" in cli("ledger", "show", worker, "--delta", "1e-4").out


def test_show_takes_the_folder_of_a_ledger_and_prices_at_1e_5(folder, cli):
    found = cli("ledger", "show", folder, "--json").json
    assert found["delta"] == 1e-5
    assert found["budget"] is None
    assert found["left"] is None
    assert found["epsilon"] == price([Spending(TERMS.cost(3), 1000, 50)], 1e-5)
    assert cli("ledger", "show", folder.parent, "--json").json == found  # a folder that holds one
    (folder.parent / "worker.toml").write_text("ledger = 3\n")  # as the worker itself would refuse it
    answer = cli("ledger", "show", folder.parent)
    assert answer.status == 2
    assert "worker.toml: " in answer.err


def test_show_obeys_nothing_that_a_server_wrote(tmp_path, cli):
    begun(tmp_path / "ledger", 1, replace(TERMS, title="[red]all is well[/red]"))
    told = cli("ledger", "show", tmp_path / "ledger").out
    assert "[red]all is" in told
    assert "well[/red]" in told


def test_show_of_a_new_ledger_and_of_a_price_that_is_not_finite(tmp_path, cli):
    Ledger.open(tmp_path / "ledger").close()
    assert "epsilon 0.0000" in cli("ledger", "show", tmp_path / "ledger").out
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.begin(replace(TERMS, parameters=5 * 10**8), SERVER)
        assert "none" in cli("ledger", "show", tmp_path / "ledger").out  # a run of which no round was charged
        send(ledger, 0)
    assert cli("ledger", "show", tmp_path / "ledger", "--delta", "1e-7", "--json").json["epsilon"] is None
    assert "epsilon inf" in cli("ledger", "show", tmp_path / "ledger", "--delta", "1e-7").out


def test_verify_says_what_it_checked_or_what_is_wrong(folder, cli):
    answer = cli("ledger", "verify", folder)
    assert answer.status == 0
    assert answer.out == "ok: 6 lines in an unbroken chain, 1 runs, 3 rounds charged, 2 uploads in the outbox\n"
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    answer = cli("ledger", "verify", folder)
    assert answer.status == 0
    assert "; 1 more not charged yet: the worker does so when it starts" in answer.out
    (folder / FILE).write_bytes(content[:-5])
    answer = cli("ledger", "verify", folder)
    assert answer.status == 1
    assert "is torn" in answer.out
    assert answer.out.count("\n") == 1
    answer = cli("ledger", "repair", folder)
    assert answer.status == 0
    assert "1 rounds of the outbox were charged" in answer.out
    assert cli("ledger", "verify", folder).status == 0
    assert "nothing is torn" in cli("ledger", "repair", folder).out
    assert charges(folder) == [0, 1, 2]
    (folder / FILE).unlink()
    assert cli("ledger", "verify", folder).status == 1
    assert cli("ledger", "verify", folder.parent / "nowhere").status == 1
    answer = cli("ledger", "show", folder.parent / "nowhere")
    assert answer.status == 2
    assert "there is no ledger" in answer.err
    assert cli("ledger", "repair", folder.parent / "nowhere").status == 2
    assert not (folder.parent / "nowhere").exists()
