"""Crashes at every step by which a worker or a server makes something last, or sends it; then it starts again.

A crash is an exception that nothing catches, raised at the k-th write, sync, renaming or send, for each k. What was in
memory is dropped. On the disk then is what was written (as after kill -9), a part of the last write, or only what was
forced to the disk before (as after a power cut): `Disk` keeps book of that.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from noisegate.errors import StoreError
from noisegate.federation import Ledger, Policy, Terms
from noisegate.federation.keys import SigningKey
from noisegate.federation.ledger import repair
from noisegate.federation.ledger_lines import read_book
from noisegate.federation.participation import Holder, Participation
from noisegate.federation.wire import NOBODY, Kind, Message, body_of, digest_of, read, say
from noisegate.vectors import FlatModel

KILL, TORN, POWER, HALF = "kill", "torn", "power", "half"
"""What a crash leaves: all that was written; a part of this write, or all of this step; what was synced; all names, and
of what was appended and not synced a half."""

MODES = (KILL, TORN, POWER, HALF)
REAL = {name: getattr(os, name) for name in ("write", "pwrite", "fsync", "replace", "unlink", "mkdir", "ftruncate")}


class Crash(BaseException):
    """The process ends here."""


class Stored:
    """What the disk has of a file. synced: its content when it was last synced."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced


class Disk:
    """Counts the steps that touch a folder, lets the process crash at one, and knows what a power cut would leave."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.live: dict[str, Stored] = {}
        self.named: dict[str, Stored | None] = {}  # names that a synced folder has; None for a folder
        self.crashes = 0
        self.on_death = lambda: None
        self._guard = threading.RLock()
        self.arm()

    def arm(self, at: int = -1, mode: str = KILL) -> None:
        """Crash at the step of this number from now on; never unless given."""
        self.steps, self.at, self.mode, self.dead = 0, at, mode, False

    def step(self, act, tear=None):
        """One step, unless the process dies before it. tear: does a part of it."""
        with self._guard:
            if self.dead:
                raise Crash
            now, self.steps = self.steps, self.steps + 1
            if now != self.at:
                return act()
            if self.mode == TORN:
                (tear or act)()
            elif self.mode == HALF:
                act()
            self.dead = True
            self.crashes += 1
            self.on_death()
            raise Crash

    def restart(self) -> None:
        """What is on the disk when the process, or the machine, is there again."""
        assert self.dead
        assert not self._open_files(), "a crash left files of this process open"
        if self.mode == POWER:
            self._cut({path for path in self.named if self._lasts(path)})
        elif self.mode == HALF:
            self._cut({*self.live, *(folder for folder, _, _ in os.walk(self.root) if folder != self.root)})
        self.arm()

    def synced(self, path: Path) -> bytes:
        """What a power cut would leave of a file now."""
        found = self.named.get(str(path)) if self._lasts(str(path)) else None
        return found.synced if found else b""

    def _lasts(self, path: str) -> bool:
        """Whether a name, and that of every folder above it, is on the disk."""
        return path == self.root or (path in self.named and self._lasts(os.path.dirname(path)))

    def _cut(self, kept: set[str]) -> None:
        """Only these names are left, and of their content what the disk has."""
        files = self.live if self.mode == HALF else self.named
        contents = {path: self._content(path, files[path]) for path in kept if files.get(path)}
        for folder, _, names in os.walk(self.root, topdown=False):
            for name in names:
                REAL["unlink"](f"{folder}/{name}")
            if folder != self.root and folder not in kept:
                os.rmdir(folder)
        for path, content in contents.items():
            Path(path).write_bytes(content)
        self.live = {path: Stored(content) for path, content in contents.items()}
        self.named = {path: self.live.get(path) for path in kept}

    def _content(self, path: str, stored: Stored) -> bytes:
        now = Path(path).read_bytes() if self.mode == HALF else b""
        rest = now.removeprefix(stored.synced) if now.startswith(stored.synced) else b""
        return stored.synced + rest[: len(rest) // 2]

    def _within(self, path) -> str:
        """The path as text if it is in the folder; else nothing."""
        text = os.path.abspath(os.fspath(path))
        return text if text == self.root or text.startswith(self.root + "/") else ""

    def _path_of(self, number: int) -> str:
        try:
            return self._within(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            return ""

    def _open_files(self) -> list[str]:
        return [path for number in os.listdir("/proc/self/fd") if (path := self._path_of(int(number)))]

    # The calls of the system that a process makes things last with.

    def write(self, number, content):
        return self._write(functools.partial(REAL["write"], number), number, content)

    def pwrite(self, number, content, offset):
        return self._write(lambda some: REAL["pwrite"](number, some, offset), number, content)

    def _write(self, real, number, content):
        if not (path := self._path_of(number)):
            return real(content)
        self.live.setdefault(path, Stored())
        return self.step(lambda: real(content), lambda: real(bytes(content)[: len(content) // 2]))

    def fsync(self, number):
        path = self._path_of(number)
        return self.step(lambda: self._sync(path)) if path else REAL["fsync"](number)

    fdatasync = fsync

    def _sync(self, path: str) -> None:
        if not os.path.isdir(path):
            self.live.setdefault(path, Stored()).synced = Path(path).read_bytes()
            return
        with os.scandir(path) as entries:
            folders = {each.path: each.is_dir() for each in entries}
        there = {each: None if is_dir else self.live.setdefault(each, Stored()) for each, is_dir in folders.items()}
        gone = [name for name in self.named if os.path.dirname(name) == path and name not in there]
        for name in gone:
            del self.named[name]
        self.named |= there

    def replace(self, source, target):
        if not self._within(target):
            return REAL["replace"](source, target)

        def act() -> None:
            REAL["replace"](source, target)
            self.live[self._within(target)] = self.live.pop(self._within(source), None) or Stored()

        return self.step(act)

    def unlink(self, path, **more):
        if not self._within(path) or not os.path.lexists(path):
            return REAL["unlink"](path, **more)
        return self.step(lambda: (REAL["unlink"](path, **more), self.live.pop(self._within(path), None)))

    def mkdir(self, path, *more, **named):
        if not self._within(path) or os.path.lexists(path) or not os.path.isdir(os.path.dirname(path)):
            return REAL["mkdir"](path, *more, **named)
        return self.step(lambda: REAL["mkdir"](path, *more, **named))

    def ftruncate(self, number, size):
        real = functools.partial(REAL["ftruncate"], number, size)
        return self.step(real) if self._path_of(number) else real()


@contextlib.contextmanager
def on(disk: Disk):
    """All that this process writes goes through this disk."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*REAL, "fdatasync"):
            patch.setattr(os, name, getattr(disk, name))
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes time and has nothing to do with crashes: a way to sums is chosen once, and budgets are not priced."""
    real, made = Terms.mechanism, {}

    def mechanism(terms, model, examples):
        if terms.parameters not in made:
            made[terms.parameters] = real(terms, model, examples)
        return made[terms.parameters]

    monkeypatch.setattr(Terms, "mechanism", mechanism)
    monkeypatch.setattr(Ledger, "affordable", lambda ledger, terms, *_: terms.rounds)


# The worker.

RUN = "ab" * 32
TERMS = Terms(RUN, "a trial", rounds=6, parameters=22, batch=4, declared=40, sigma=2.0)
SERVER, OWN = SigningKey.generate(), SigningKey.generate()
POLICY = Policy(epsilon=50.0, delta=1e-5, server=(SERVER.public.hex(),))
X = torch.randn(30, 10, generator=torch.Generator().manual_seed(1))
MODEL = FlatModel(nn.Linear(10, 2))

AFTERWARDS = ("the same model", "another model", "the next round")
"""What the server asks a worker for that crashed."""


class Script:
    """A server that signs what it says, and outlives the worker. It checks all that leaves the worker.

    counter, last: how many uploads it has received, and the digest of the last one. sent: what left, by round. taken:
    the rounds whose upload its checkpoint has.
    """

    def __init__(self, disk: Disk, folder: Path, afterwards: str) -> None:
        self.disk, self.folder, self.afterwards = disk, folder, afterwards
        self.round, self.value, self.counter, self.last = 0, 0.0, 0, NOBODY
        self.sent: dict[int, bytes] = {}
        self.taken: set[int] = set()

    def terms(self) -> Message:
        about = {"run": bytes.fromhex(RUN), "round": self.round, "counter": self.counter, "digest": self.last}
        return read(say(Kind.TERMS, "w1", SERVER, TERMS.as_dict(), **about))

    def model(self, round: int | None = None, value: float = 0.0) -> Message:
        body = body_of(np.full(TERMS.parameters, self.value + value, np.float32))
        round = self.round if round is None else round
        return read(Message(Kind.MODEL, "all", bytes.fromhex(RUN), round, digest_of(body), body=body).signed(SERVER))

    def take(self) -> None:
        """A checkpoint has the upload of this round, if there is one."""
        if self.round in self.sent and self.round not in self.taken:
            self.taken.add(self.round)
            self.counter, self.last = self.counter + 1, digest_of(read(self.sent[self.round]).body)

    def receipt(self) -> list[Message]:
        if self.round not in self.sent:
            return []
        self.take()
        made = Message(Kind.RECEIPT, "w1", bytes.fromhex(RUN), self.round, self.last, self.counter)
        return [read(made.signed(SERVER))]

    def stream(self):
        """What the server sends on one stream: each round goes in another way."""
        while self.round < TERMS.rounds:
            yield self.model()
            match self.round % 6:
                case 0:
                    yield from self.receipt()
                case 1:  # the receipt is lost
                    self.take()
                    self.round += 1
                    return
                case 2:  # the server crashed before its checkpoint
                    self.round += 1
                    return
                case 3:  # it asks again, also with another model
                    yield self.model()
                    yield self.model(value=1.0)
                    yield from self.receipt()
                case 4:  # it asks again for what it has
                    yield from self.receipt()
                    yield self.model()
                case 5:
                    yield from self.receipt()
                    yield self.model(self.round - 1, value=2.0)
            self.round += 1

    def restarted(self) -> None:
        """The worker was away."""
        if self.afterwards == "another model":
            self.value += 10.0
        elif self.afterwards == "the next round" and self.round < TERMS.rounds:
            self.take()
            self.round += 1

    def charges(self, content: bytes):
        """What the ledger with this content charges."""
        return read_book(content, self.folder).runs[RUN].charges

    def make(self, mechanism, round, params, last):
        """An upload with fresh noise: never for a round that was charged, and made of what the server has received."""
        assert round not in self.sent
        assert round not in self.charges((self.folder / "ledger.jsonl").read_bytes())
        received = {digest_of(read(content).body): content for content in self.sent.values()}
        if self.last == NOBODY:
            assert last is None
        else:
            assert np.array_equal(last.numpy(), read(received[self.last]).vector())
        return torch.from_numpy(np.frombuffer(os.urandom(4 * TERMS.parameters), np.uint32).astype(np.float32))

    def receive(self, content: bytes) -> None:
        """What left the worker."""
        message = read(content)
        assert message.is_from(OWN.public)
        if message.kind == Kind.DECLINE:
            return
        assert message.kind == Kind.UPLOAD
        assert self.sent.setdefault(message.round, content) == content, "other bytes for the same round"
        charge = self.charges(self.disk.synced(self.folder / "ledger.jsonl"))[message.round]
        assert charge.upload == hashlib.sha256(content).hexdigest(), "not charged before it left"
        assert charge.model == message.digest.hex()


def worker_life(disk: Disk, script: Script) -> None:
    """A worker from its start to the end of the run, or to its crash."""
    with Ledger.open(script.folder) as ledger:
        ledger.note_data("f" * 64)
        holder = Holder("w1", OWN, POLICY, ledger, MODEL, (X, (X[:, 0] > 0).long()))
        while script.round < TERMS.rounds:
            run = Participation(holder, script.terms(), script.make)
            for message in script.stream():
                if message.kind == Kind.MODEL:
                    answer = run.answer(message)
                    disk.step(functools.partial(script.receive, answer))
                else:
                    run.acknowledge(message)


def worker_ends(disk: Disk, script: Script) -> bool:
    """Whether the run came to its end, and not the worker: by a crash, or by a torn line, which is then taken away."""
    try:
        worker_life(disk, script)
        return True
    except StoreError as error:
        torn = str(error)
    except Crash:
        return False
    assert "ledger repair" in torn
    with contextlib.suppress(Crash):
        repair(script.folder)
    return False


def crash_worker(root: Path, afterwards: str, crashes: list[tuple[int, str]]) -> tuple[int, int]:
    """A run in which the worker crashes at these steps, one after the other, each counted from its start.

    Gives the steps of its last life, and how many crashes there were.
    """
    root.mkdir()
    disk = Disk(root)
    script, left = Script(disk, root / "ledger", afterwards), list(crashes)
    with on(disk):
        disk.arm(*left.pop(0) if left else ())
        while not worker_ends(disk, script):
            if disk.dead:
                disk.restart()
                script.restarted()
                disk.arm(*left.pop(0) if left else ())
        steps = disk.steps
        disk.arm()
        with Ledger.open(script.folder) as ledger:
            charged = set(ledger.book.runs[RUN].charges)
    assert set(script.sent) <= charged
    assert script.counter <= len(script.sent)
    assert len(charged) <= len(script.sent) + disk.crashes  # nor is a round charged that no crash explains
    shutil.rmtree(root)
    return steps, disk.crashes


def test_a_worker_that_crashes_at_any_step_never_under_counts_and_never_draws_twice(tmp_path):
    steps, _ = crash_worker(tmp_path / "whole", AFTERWARDS[0], [])
    assert steps > 50
    crashes = 0
    for at in range(steps):
        for number, mode in enumerate(MODES):
            afterwards = AFTERWARDS[(at + number) % len(AFTERWARDS)]
            crashes += crash_worker(tmp_path / f"{at}{mode}", afterwards, [(at, mode)])[1]
    assert crashes == len(MODES) * steps
    print(f"{crashes} crashes at {steps} steps")


def test_a_worker_that_crashes_again_while_it_recovers_never_under_counts_either(tmp_path):
    steps, _ = crash_worker(tmp_path / "whole", AFTERWARDS[0], [])
    crashes = 0
    for at in range(steps):
        for again in range(at % 2, 10, 2):
            first, second = MODES[(at + again) % 4], MODES[(at // 4 + again) % 4]
            both = [(at, first), (again, second)]
            crashes += crash_worker(tmp_path / f"{at}.{again}", AFTERWARDS[at % 3], both)[1]
    assert crashes > 400
    print(f"{crashes} crashes")
