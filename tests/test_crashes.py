"""Crashes at every step by which a worker or a server makes something last, or sends it; then it starts again.

A crash is an exception that nothing catches, raised at the k-th write, sync, renaming or send, for each k. What was in
memory is dropped. On the disk then is what was written (as after kill -9), a part of the last write, or only what was
forced to the disk before (as after a power cut): `Disk` keeps book of that.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch
from torch import nn

from federation_kit import LONG, House, nursery_of_all, until, within
from noisegate.errors import StoreError
from noisegate.federation import Ledger, Policy, Terms
from noisegate.federation.keys import SigningKey
from noisegate.federation.ledger import repair
from noisegate.federation.ledger_lines import read_book
from noisegate.federation.participation import Holder, Participation
from noisegate.federation.reception import Reception
from noisegate.federation.server import Server
from noisegate.federation.serving import Serving
from noisegate.federation.store import StateFolder
from noisegate.federation.wire import NOBODY, Kind, Message, body_of, digest_of, read, say
from noisegate.models import build_model
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from wire_peers import CLASSES, SHAPE, Trial

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and fdatasync")

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
        for number in self._open_files():  # which the system does when a process ends
            os.close(number)
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

    def _open_files(self) -> list[int]:
        return [number for number in map(int, os.listdir("/proc/self/fd")) if self._path_of(number)]

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

    def mechanism(terms, model, examples, size=0):
        if terms.parameters not in made:
            made[terms.parameters] = real(terms, model, examples, size)
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
                    assert read(answer).digest == message.digest  # it answers this model, and no other one
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
    assert crashes >= 500
    print(f"{crashes} crashes")


# The server.


class Line:
    """Stands for gRPC's end of a stream at the server: two queues in memory. What it sends is a step."""

    def __init__(self, chain: bytes, disk: Disk) -> None:
        self.up, self.down = asyncio.Queue(), asyncio.Queue()
        self._chain, self._disk = chain, disk

    def auth_context(self):
        return {"x509_pem_cert": [self._chain]}

    def peer(self) -> str:
        return "memory"

    async def read(self):
        return await self.up.get()

    async def write(self, content: bytes) -> None:
        self._disk.step(lambda: self.down.put_nowait(content))

    async def abort(self, code, details: str) -> None:
        raise grpc.aio.AbortError(f"{code}: {details}")


class World:
    """Three workers in memory, which outlive the server and check all that it says and does.

    models: the digest of each round's model, and the life of the server that sent it. sent: the digests of the uploads
    of each worker, by round. receipts: the largest counter that each has got. whole, unfinished: what the last
    checkpoint that was written holds, and the one that was being written.
    """

    def __init__(self, trial: Trial, disk: Disk) -> None:
        self.trial, self.disk, self.life = trial, disk, 0
        self.models: dict[int, tuple[int, bytes]] = {}
        self.sent: dict[str, dict[int, bytes]] = {name: {} for name in trial.names}
        self.receipts = dict.fromkeys(trial.names, 0)
        self.whole = self.unfinished = None
        self.logging, self.ended, self.tasks = -1, set(), []
        self.failure, self.over = None, lambda: None

    # What the server does.

    async def start(self, reception: Reception) -> int:
        self.tasks = [asyncio.ensure_future(self.connect(reception, name)) for name in self.trial.names]
        return 1

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    def recovered(self, store: StateFolder, found) -> None:
        checkpoint, _, next_round = found
        self.life += 1
        mark = mark_of(checkpoint)
        assert mark in (self.whole, self.unfinished), "a checkpoint was lost"
        self.whole, self.unfinished = mark, None
        assert next_round > max([checkpoint.round, *self.models])
        assert next_round <= self.logging + 1, "a number is skipped that was never used"

    def write_checkpoint(self, real, store: StateFolder, checkpoint) -> None:
        self.unfinished = mark_of(checkpoint)
        real(store, checkpoint)
        self.whole, self.unfinished = self.unfinished, None

    def log_round(self, real, store: StateFolder, round: int, digest: bytes) -> None:
        self.logging = round
        real(store, round, digest)

    # What its workers see.

    async def connect(self, reception: Reception, name: str) -> None:
        line = Line(self.trial.workers[name].chain, self.disk)
        joined = asyncio.ensure_future(reception._join(None, line))
        try:
            await self.take_part(name, line)
            line.up.put_nowait(grpc.aio.EOF)
            await joined
        except (AssertionError, LookupError, ValueError) as error:
            self.failure = error
            self.over()
        finally:
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)

    async def take_part(self, name: str, line: Line) -> None:
        key, row = self.trial.workers[name].key, self.trial.names.index(name)
        line.up.put_nowait(say(Kind.HELLO, name, key, {"noisegate": "test"}))
        while True:
            message = read(await line.down.get())
            assert message.is_from(self.trial.server_key.public)
            match message.kind:
                case Kind.TERMS:
                    assert self.receipts[name] <= message.counter <= len(self.sent[name])
                    assert message.digest in (NOBODY, *self.sent[name].values())
                    assert (message.counter == 0) == (message.digest == NOBODY)
                case Kind.MODEL:
                    self.check_model(message)
                    vector = torch.randn(len(message.body) // 4) / 8
                    upload = Message(
                        Kind.UPLOAD, name, message.run, message.round, message.digest, body=body_of(vector.numpy())
                    )
                    self.sent[name][message.round] = digest_of(upload.body)
                    line.up.put_nowait(upload.signed(key))
                case Kind.RECEIPT:
                    assert message.digest == self.sent[name][message.round]
                    kept = about_of(self.disk.synced(self.trial.state / "checkpoint.safetensors"))
                    assert kept["round"] >= message.round
                    assert kept["standings"][row][0] >= message.counter > self.receipts[name]
                    self.receipts[name] = message.counter
                case Kind.END:
                    self.ended.add(name)
                    return
                case other:
                    raise AssertionError(other)

    def check_model(self, message: Message) -> None:
        """No number is used twice, and none that is not in the log on the disk."""
        life, digest = self.models.setdefault(message.round, (self.life, message.digest))
        assert (life, digest) == (self.life, message.digest), "a round number was used twice"
        lines = self.disk.synced(self.trial.state / "rounds.log").splitlines()
        assert {"round": message.round, "digest": message.digest.hex()} == json.loads(lines[-1])


def mark_of(checkpoint) -> str:
    """A digest of all that a checkpoint holds."""
    tensors = {"params": checkpoint.params, **checkpoint.aggregator}
    found = hashlib.sha256(b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors)))
    plainly = [value for name, value in vars(checkpoint).items() if name not in ("params", "aggregator", "line")]
    found.update(repr(plainly).encode())
    return found.hexdigest()


def about_of(content: bytes):
    """What a checkpoint says of itself, read by hand."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["noisegate"])


async def at_once(serving, step, *given):
    """In place of a thread."""
    return step(*given)


async def server_life(world: World) -> dict | None:
    """A server from its start to its end; None if it crashed."""
    trial, disk, over = world.trial, world.disk, asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # whoever else dies in a crash has nothing to say
    disk.on_death = world.over = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
    model = build_model("mlp", SHAPE, CLASSES, stream(0, "weights"))
    server = Server(model, trial.auxiliary, trial.settings, test=trial.test)
    server.end_time = 2.0
    running, ended = asyncio.ensure_future(server.run()), asyncio.ensure_future(over.wait())
    await asyncio.wait({running, ended}, timeout=LONG, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not running.done():
        running.cancel()
    (found,) = await asyncio.gather(running, return_exceptions=True)
    await world.stop()
    if world.failure is not None:
        raise world.failure
    if not disk.dead:
        return await running
    assert isinstance(found, Crash | asyncio.CancelledError), found
    return None


def crash_server(trial: Trial, crashes: list[tuple[int, str]]) -> tuple[int, int]:
    """A run in which the server crashes at these steps. Gives the steps of its last life, and the crashes."""
    shutil.rmtree(trial.state, ignore_errors=True)
    trial.state.mkdir()
    disk, left = Disk(trial.state), list(crashes)
    world = World(trial, disk)
    recover, write, log = StateFolder.recover, StateFolder.write_checkpoint, StateFolder.log_round

    def recovered(store, first):
        found = recover(store, first)
        world.recovered(store, found)
        return found

    with on(disk), pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateFolder, "recover", recovered)
        patch.setattr(StateFolder, "write_checkpoint", lambda *given: world.write_checkpoint(write, *given))
        patch.setattr(StateFolder, "log_round", lambda *given: world.log_round(log, *given))
        patch.setattr(Reception, "start", lambda reception, *_: world.start(reception))
        patch.setattr(Reception, "stop", lambda reception: world.stop())
        patch.setattr(Serving, "in_thread", at_once)  # so that steps come in the same order each time
        while True:
            disk.arm(*left.pop(0) if left else ())
            if (result := asyncio.run(server_life(world))) is not None:
                break
            disk.restart()
    steps, rounds = disk.steps, trial.settings.rounds
    assert result["judged"] >= rounds - disk.crashes
    assert world.ended == set(trial.names)
    for name, found in result["workers"].items():
        assert world.receipts[name] <= found["counter"] <= len(world.sent[name])
        assert found["counter"] >= rounds - disk.crashes
    assert about_of((trial.state / "checkpoint.safetensors").read_bytes())["judged"] == result["judged"]
    if all(mode in (KILL, TORN) for _, mode in crashes):
        assert len(trial.records()) == result["judged"]
    return steps, disk.crashes


@pytest.fixture
def nursery():
    nursery = nursery_of_all()
    try:
        yield nursery
    finally:
        nursery.end_all()


@pytest.fixture
def trial(tmp_path):
    settings = {"rounds": 3, "quorum": 3, "deadline": 60.0, "least": 30.0, "stall": 600.0, "aggregator": "fortified"}
    return Trial(tmp_path / "server", 3, believed_honest=2, **settings)


def test_a_server_that_crashes_at_any_step_loses_at_most_that_round_and_uses_no_number_twice(trial):
    steps, _ = crash_server(trial, [])
    assert steps > 50
    crashes = 0
    for at in range(steps):
        for mode in (KILL, POWER, HALF if at % 3 == 0 else TORN):
            crashes += crash_server(trial, [(at, mode)])[1]
    assert crashes >= 3 * (steps - 10)  # a line of the log more or less, by the clock
    print(f"{crashes} crashes at {steps} steps")


def test_a_server_that_crashes_again_while_it_recovers_goes_on_too(trial):
    crashes = 0
    for at in range(20, 100, 2):
        first, second = MODES[at // 2 % 4], MODES[at // 8 % 4]
        crashes += crash_server(trial, [(at, first), (at % 7, second), (at % 23, KILL)])[1]
    for at in range(40, 76):  # more than a round, and then the power goes when little has been done since
        for again in (1, 5):
            crashes += crash_server(trial, [(at, KILL), (again, POWER)])[1]
    assert crashes >= 200
    print(f"{crashes} crashes")


# Real processes.


def test_processes_that_are_killed_at_random_moments_leave_a_run_that_goes_on(tmp_path, nursery):
    house = House(tmp_path, 3, rounds=100_000, quorum=2, deadline=2.0, least=0.5, stall=600.0, gather=2.0)
    draw = torch.Generator().manual_seed(time.time_ns())
    kills = 24

    def begin(name: str):
        return nursery.serve(house) if name == "server" else nursery.join(house, name)

    async def trial() -> None:
        names = ("server", *house.names)
        running = {name: begin(name) for name in names}
        await until(house.records, "a first round")
        for kill in range(kills):
            await asyncio.sleep(0.4 * float(torch.rand(1, generator=draw)))
            name = names[int(torch.randint(len(names), (1,), generator=draw))] if kill % 3 else "server"
            running[name].kill()
            assert await running[name].ended() == -signal.SIGKILL, running[name].said()
            running[name] = begin(name)
        before = {name: len(house.received(name)) for name in house.names}
        await until(lambda: all(len(house.received(name)) > before[name] for name in house.names), "everyone again")
        running["server"].kill(signal.SIGTERM)
        assert await running["server"].ended() == 3, running["server"].said()
        assert all(child.poll() is None for name, child in running.items() if name != "server")
        nursery.end_all()

    asyncio.run(within(LONG, trial()))
    house.check(house.names, done=False)
    logged = (house.state / "rounds.log").read_text().splitlines()
    assert len(house.records()) >= len(logged) - kills - 1
