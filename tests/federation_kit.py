"""Federations on loopback whose faults are real: processes that are killed, stopped, out of disk or at a wrong time.

`wire_peers` has the server's folder and raw peers. Here are the folders of real workers, and processes. To start Python
with torch takes seconds, so one `Nursery` process imports everything once and forks the server or worker that a test
asks for. Each is a process of its own, with its own files, sockets and death. Nothing outlives the nursery.

Run as a program this file is the nursery: it reads orders, one JSON object a line, and answers each with one.
"""

import asyncio
import atexit
import contextlib
import datetime
import functools
import importlib
import inspect
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from noisegate.entropy import Secret
from noisegate.errors import NoisegateError
from noisegate.federation import Worker, client
from noisegate.federation.certificates import make_request, sign_request
from noisegate.federation.keys import write_private
from noisegate.federation.ledger_folder import read_ledger
from noisegate.federation.server import Server
from noisegate.federation.terms import Terms
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.models import build_model
from noisegate.privacy import together
from noisegate.protocol import upload_of_one
from noisegate.settings import toml
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from wire_peers import CLASSES, SHAPE, TIME, Trial, toy

STATUSES = {"used", "refused", "malformed", "forged", "late", "missing"}
LONG = 60.0
"""Seconds after which a test gives up: a busy machine is slow, and nothing here takes as long."""


class House(Trial):
    """A server's folder on a port of its own, and beside it a folder for each worker."""

    def __init__(self, folder: Path, workers: int = 3, **settings: Any) -> None:
        super().__init__(folder / "server", workers, listen=f"127.0.0.1:{free_port()}", **settings)
        self.root = folder
        for name in self.names:
            self.make_worker(name)

    @property
    def port(self) -> int:
        return int(self.given["listen"].rpartition(":")[2])

    def worker(self, name: str) -> Path:
        return self.root / name

    def ledger(self, name: str) -> Path:
        return self.worker(name) / "ledger"

    def make_worker(self, name: str, port: int | None = None, **policy: Any) -> Path:
        """The folder of a worker that can be joined with."""
        folder, who = self.worker(name), self.workers[name]
        folder.mkdir(exist_ok=True)
        (folder / "ca.pem").write_bytes(self.authority.certificate)
        (folder / "worker.pem").write_bytes(who.chain)
        write_private(folder / "worker.key", who.private)
        who.key.write(folder / "signing.key")
        about = {"name": name, "server": f"127.0.0.1:{port or self.port}", "model": "mlp", "classes": CLASSES}
        limits = {"epsilon": 1000.0, "delta": 1e-5, "server": [self.server_key.public.hex()], "declared": 30} | policy
        for file, values in (("worker.toml", about), ("policy.toml", limits)):
            (folder / file).write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
        return folder

    async def join(self, name: str, pace: Callable[[], float] = lambda: 0.0) -> client.WorkerOutcome:
        """A real worker in this event loop, until it is done. pace: seconds that it takes longer for each upload."""
        place = WorkerFolder.read(self.worker(name))
        data = toy(60, int(name[1:]))
        with Paced(pace) as executor:
            worker = Worker(place.module(data[0]), data, place.policy())
            return await worker.take_part(place, executor=executor)

    def records(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl, without one that is being written or was torn; none if there is no such file."""
        path = self.state / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def charged(self, name: str) -> set[int]:
        """The rounds that a worker's ledger charges in this run."""
        book, _ = read_ledger(self.ledger(name), messages=True)
        return set(book.runs[self.given["run"]].charges) if self.given["run"] in book.runs else set()

    def received(self, name: str) -> set[int]:
        """The rounds in which the server received an upload of a worker, by its record."""
        return {line["round"] for line in self.records() if line["workers"][name]["status"] in ("used", "refused")}

    def fates(self, name: str) -> list[dict[str, Any]]:
        return [line["workers"][name] for line in self.records()]

    def check(self, real: Iterable[str] = (), done: bool = True) -> None:
        """What must hold after every fault. real: workers with a ledger. done: the run came to its end."""
        lines = self.records()
        rounds = [line["round"] for line in lines]
        logged = [json.loads(line)["round"] for line in (self.state / "rounds.log").read_text().splitlines()]
        assert rounds == sorted(set(rounds))
        assert logged == sorted(set(logged))
        assert set(rounds) <= set(logged)
        for line in lines:
            assert set(line["workers"]) == set(self.names)
            assert all(fate["status"] in STATUSES for fate in line["workers"].values())
        tensors = load_file(self.state / "checkpoint.safetensors")
        assert all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())
        for name in real:
            assert self.received(name) <= self.charged(name), name
        least, stall = self.settings.least, self.settings.stall
        waited = sum(line["seconds"]["wait"] for line in lines if "seconds" in line)
        assert waited <= stall + len(logged) * least + 1.0
        assert not any(line["event"] == "fault" for line in self.logged())
        if not done:
            return
        result = json.loads((self.state / "result.json").read_text())
        assert logged == list(range(self.settings.rounds))
        assert result["judged"] == len(lines)
        assert all(bool(each.isfinite().all()) for each in load_file(self.state / "model.safetensors").values())
        for name in real:
            assert result["workers"][name]["counter"] <= len(self.charged(name)), name


class Paced(ThreadPoolExecutor):
    """One thread, that rests before each upload."""

    def __init__(self, pace: Callable[[], float]) -> None:
        super().__init__(1)
        self.pace = pace

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        def rested() -> Any:
            if getattr(task, "__name__", "") == "answer":
                time.sleep(self.pace())
            return task(*given, **named)

        return super().submit(rested)


def free_port() -> int:
    """A port of loopback that nobody listens on. Not one that the system gives to clients, which may take it again."""
    for _ in range(200):
        port = 20000 + int.from_bytes(os.urandom(2), "big") % 12000
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                tried.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no free port on loopback")


def expired(house: House, name: str) -> tuple[bytes, bytes]:
    """(private key, certificate) of a worker, whose time ended a day ago."""
    from noisegate.federation import certificates

    now, real = datetime.datetime.now(datetime.UTC), certificates.datetime

    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return now - datetime.timedelta(days=2)

    class Calendar:
        UTC, timedelta, datetime = datetime.UTC, datetime.timedelta, Past

    certificates.datetime = Calendar  # type: ignore[assignment]
    try:
        private, request = make_request(name, house.workers[name].key.public)
        return private, sign_request(house.authority, request, days=1)
    finally:
        certificates.datetime = real


async def until(holds: Callable[[], Any], what: str, seconds: float = LONG) -> Any:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"waited {seconds:g} seconds for: {what}"
        await asyncio.sleep(0.01)
    return found


async def within(seconds: float, what: Awaitable[Any]) -> Any:
    """A test's own time limit."""
    async with asyncio.timeout(seconds):
        return await what


class Child:
    """A process of the nursery."""

    def __init__(self, nursery: "Nursery", pid: int, told: Path) -> None:
        self.nursery, self.pid, self._told, self.code = nursery, pid, told, None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit status, below 0 for a signal; None while it runs."""
        if self.code is None:
            self.code = self.nursery.ask(op="poll", pid=self.pid)["code"]
        return self.code

    async def ended(self, seconds: float = LONG) -> int:
        """Wait for its end, and give the exit status. One that does not end says first where it is."""
        try:
            await until(lambda: self.poll() is not None, f"the end of process {self.pid}", seconds)
        except AssertionError:
            self.kill(signal.SIGUSR1)
            await asyncio.sleep(1.0)
            raise AssertionError(f"process {self.pid} does not end: {self.said()}") from None
        assert self.code is not None
        return self.code

    def said(self) -> str:
        """What it printed."""
        return self._told.read_text() if self._told.exists() else ""

    def memory(self, word: str = "VmHWM") -> int:
        """Its memory in bytes: the largest that it was (VmHWM), or is now (VmRSS)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(word))


class Nursery:
    """Starts processes that have everything imported. A context; at its end all of them are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, []
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.ask(op="ready")

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def serve(self, house: House, **faults: Any) -> Child:
        """A server. faults: see `run_child`."""
        return self.start("serve", house.folder, faults)

    def join(self, house: House, name: str, **faults: Any) -> Child:
        """A worker."""
        return self.start("join", house.worker(name), faults)

    def start(self, what: str, folder: Path, faults: dict[str, Any]) -> Child:
        told = self.folder / f"{len(self.children)}-{what}.txt"
        found = self.ask(op="start", what=what, folder=str(folder), told=str(told), faults=faults)
        self.children.append(child := Child(self, found["pid"], told))
        return child

    def end_all(self) -> None:
        """Kill every process that still runs."""
        for child in self.children:
            child.kill()
        end = time.monotonic() + TIME
        while any(child.poll() is None for child in self.children) and time.monotonic() < end:
            time.sleep(0.005)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # it kills what is left, and ends
        try:
            self.process.wait(TIME)
        finally:
            self.process.kill()
            self.process.wait(TIME)
            assert self.process.stdout is not None
            self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def nursery_of_all() -> Nursery:
    """The one nursery of a test process."""
    nursery = Nursery(Path(tempfile.mkdtemp(prefix="noisegate-nursery-")))
    atexit.register(nursery.close)
    return nursery


def run_nursery() -> None:
    """Read orders until there are none."""
    warm_up()
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = {"ready": True}
        if order["op"] == "start":
            if not (pid := os.fork()):
                run_child(order)
            codes[pid] = None
            answer = {"pid": pid}
        elif order["op"] == "poll":
            pid = order["pid"]
            if codes[pid] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if found else None
            answer = {"code": codes[pid]}
        print(json.dumps(answer), flush=True)
    for pid, code in codes.items():
        if code is None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def warm_up() -> None:
    """Import and try what is otherwise imported when it is first used. With one thread, a fork lacks nothing of it."""
    torch.set_num_threads(1)
    data = toy(60, 0)
    flat = FlatModel(build_model("mlp", SHAPE, CLASSES, stream(0, "weights")))
    terms = Terms("0" * 64, "", rounds=2, parameters=flat.d, batch=8, declared=60, sigma=1.0)
    mechanism, secret = terms.mechanism(flat, data), Secret(torch.device("cpu"))
    secret.begin(0)
    upload_of_one(mechanism, flat.initial(), *data, None, secret.source)
    together([terms.cost(2)], 1e-5)
    importlib.import_module("safetensors.torch")


def run_child(order: dict[str, Any]) -> None:
    """Be a server or a worker, with faults, and end.

    limit: the largest file that can be written, in bytes. clock: seconds that the clock is off. set: {"module:NAME":
    value}. die: [["module:Class.function", "before" or "after", on which call, words that the call has]]: by SIGKILL.
    handshake: milliseconds that a peer has for it.
    """
    code = 1
    try:
        told = os.open(order["told"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stands_for in ((nothing, 0), (told, 1), (told, 2)):
            os.dup2(number, stands_for)
        signal.signal(signal.SIGUSR1, say_where)
        set_faults(**order["faults"])
        code = be(order["what"], Path(order["folder"]))
    except NoisegateError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"error: {error}", flush=True)
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say_where(number: int, frame: Any) -> None:
    """Print where each task of the event loop is."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


def be(what: str, folder: Path) -> int:
    if what == "serve":
        server = Server.of(folder)
        server.end_time = 5.0
        return 0 if server.serve() is not None else 3
    place = WorkerFolder.read(folder)
    data = toy(60, int(place.name[1:]))
    worker = Worker(place.module(data[0]), data, place.policy())
    outcome = worker.join(folder, lambda event, **about: print(event, about, flush=True))
    print(json.dumps({"ended": outcome.ended, "rounds": outcome.rounds}), flush=True)
    return 0


def set_faults(
    limit: int | None = None,
    clock: float = 0.0,
    set: dict[str, Any] | None = None,
    die: Iterable[tuple[Any, ...]] = (),
    handshake: int | None = None,
) -> None:
    quick = {"noisegate.federation.client:FIRST_PAUSE": 0.05, "noisegate.federation.client:LONGEST_PAUSE": 0.2}
    for target, value in (quick | {"noisegate.federation.reception:OFTEN": 1000} | (set or {})).items():
        owner, name = found_in(target)
        assert hasattr(owner, name), target
        setattr(owner, name, value)
    for each in die:
        arm(*each)
    if clock:
        shift_clock(clock)
    if handshake is not None:
        hasten_handshakes(handshake)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def found_in(target: str) -> tuple[Any, str]:
    """The object that holds a name, and the name."""
    module, _, path = target.partition(":")
    *heads, name = path.split(".")
    owner = importlib.import_module(module)
    for head in heads:
        owner = getattr(owner, head)
    return owner, name


def arm(target: str, when: str, nth: int = 1, words: str = "") -> None:
    """Let the process die by SIGKILL before or after the n-th call of a function whose arguments have these words."""
    owner, name = found_in(target)
    real, left = getattr(owner, name), nth

    def die(at: str, given: object) -> None:
        nonlocal left
        if at == when and words in str(given):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*given: Any, **named: Any) -> Any:
        die("before", given)
        result = real(*given, **named)
        die("after", given)
        return result

    async def awaited(*given: Any, **named: Any) -> Any:
        die("before", given)
        result = await real(*given, **named)
        die("after", given)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(real) else wrapped)


def shift_clock(seconds: float) -> None:
    """The clock of this process is off by so much. TLS has a clock of its own, so certificates are dated instead."""
    real, gmtime, calendar = time.time, time.gmtime, datetime.datetime

    class Shifted(calendar):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return calendar.now(tz) + datetime.timedelta(seconds=seconds)

    time.time = lambda: real() + seconds
    time.gmtime = lambda at=None: gmtime(real() + seconds if at is None else at)
    datetime.datetime = Shifted  # type: ignore[misc]


def hasten_handshakes(milliseconds: int) -> None:
    """Peers have less time for their handshake than the server gives them otherwise."""
    import grpc.aio

    real = grpc.aio.server

    def server(*given: Any, options: Iterable[tuple[str, Any]] = (), **named: Any) -> Any:
        changed = dict(options)
        assert "grpc.server_handshake_timeout_ms" in changed
        changed["grpc.server_handshake_timeout_ms"] = milliseconds
        return real(*given, options=tuple(changed.items()), **named)

    grpc.aio.server = server


if __name__ == "__main__":
    run_nursery()
