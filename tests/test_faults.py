"""Each fault is injected for real. After each: the model is finite, no ledger under-counts, the run goes on.

The server is a process of its own. So are the workers that are killed or stopped; the others are real workers in this
process, beside raw peers that send what they like.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import torch

import wire_peers
from federation_kit import LONG, House, expired, nursery_of_all, until, within
from noisegate.errors import FederationError, StoreError
from noisegate.federation import wire
from noisegate.federation.certificates import BACKDATED, identity_of, make_authority
from noisegate.federation.keys import SigningKey
from noisegate.federation.ledger import Ledger, repair
from noisegate.federation.wire import Kind
from wire_peers import Certified, Peer, certified, sends, silence

MB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and the signals and limits of Linux")


@pytest.fixture
def nursery():
    nursery = nursery_of_all()
    try:
        yield nursery
    finally:
        nursery.end_all()


@pytest.fixture(autouse=True)
def quick_to_return(monkeypatch):
    """Workers of this process dial again after little time."""
    monkeypatch.setattr("noisegate.federation.client.FIRST_PAUSE", 0.05)
    monkeypatch.setattr("noisegate.federation.client.LONGEST_PAUSE", 0.2)


@contextlib.asynccontextmanager
async def tasks(*some):
    """Coroutines that run meanwhile, and are ended with the block. Gives their tasks. One that fails ends the test."""
    begun, here = [asyncio.ensure_future(one) for one in some], asyncio.current_task()

    def look(task) -> None:
        if not task.cancelled() and not isinstance(task.exception(), FederationError | None):
            failed.append(task.exception())
            here.cancel()

    failed = []
    for task in begun:
        task.add_done_callback(look)
    try:
        yield begun
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def keep_at_it(house: House, name: str, behavior=None, who: Certified | None = None, port: int = 0) -> None:
    """A raw peer that behaves in its way, and comes back whenever its stream ends, until the run is over."""
    while True:
        with contextlib.suppress(AssertionError, TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with house.peer(name, port or house.port, who) as peer:
                peer.vector = pure_noise
                if await peer.take_part(behavior) is not None:
                    return
        await asyncio.sleep(0.05)


def pure_noise(model: wire.Message) -> torch.Tensor:
    """An upload that costs nothing to make, and looks like one of a worker that has nothing to say."""
    return torch.randn(len(model.body) // 4) / 8


# What uploads can be.


def nan(peer: Peer, model: wire.Message) -> bytes:
    vector = peer.vector(model)
    vector[7] = torch.nan
    return peer.upload(model, vector)


def infinite(peer, model):
    return peer.upload(model, peer.vector(model) * torch.inf)


def huge(peer, model):
    return peer.upload(model, torch.full_like(peer.vector(model), 1e15))


def largest(peer, model):
    """Finite numbers, whose norm is not."""
    return peer.upload(model, torch.full_like(peer.vector(model), 3e38))


def short(peer, model):
    return peer.upload(model, peer.vector(model)[:-1])


def long(peer, model):
    return peer.upload(model, torch.cat([peer.vector(model), torch.zeros(50)]))


def empty(peer, model):
    return peer.message(model, b"").signed(peer.who.key)


def nothing_at_all(peer, model):
    return b""


def noise(peer, model):
    return os.urandom(300)


def wrong_signature(peer, model):
    return peer.message(model, wire.body_of(peer.vector(model).numpy())).signed(SigningKey.generate())


def in_the_name_of_another(peer, model):
    return peer.upload(model, worker="w0")


def wrong_digest(peer, model):
    return peer.upload(model, digest=bytes(32))


def another_run(peer, model):
    return peer.upload(model, run=bytes(32))


def later_round(peer, model):
    return peer.upload(model, round=model.round + 1)


def a_model_of_its_own(peer, model):
    return dataclasses.replace(model, worker=peer.name).signed(peer.who.key)


def decline(peer, model):
    return peer.decline(model)


def large(peer, model):
    return bytes(100 * MB)


async def duplicate(peer: Peer, model: wire.Message) -> None:
    first = peer.upload(model)
    for content in (first, first, peer.upload(model)):
        await peer.send(content)


async def replay(peer: Peer, model: wire.Message) -> None:
    """Its first upload, again and again."""
    if not hasattr(peer, "first"):
        peer.first = peer.upload(model)
    await peer.send(peer.first)


async def flood(peer: Peer, model: wire.Message) -> None:
    for _ in range(2000):
        async with asyncio.timeout(0.5):  # once it is not read any more, a send waits for ever
            await peer.call.write(peer.upload(model))


class Thief:
    """Sends the bytes that another worker has just sent."""

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}

    async def victim(self, peer: Peer, model: wire.Message) -> None:
        self.sent[model.round] = peer.upload(model)
        await peer.send(self.sent[model.round])

    async def thief(self, peer: Peer, model: wire.Message) -> None:
        await until(lambda: model.round in self.sent, "something to steal", 5.0)
        await peer.send(self.sent[model.round])

    async def signs_it(self, peer: Peer, model: wire.Message) -> None:
        await until(lambda: model.round in self.sent, "something to steal", 5.0)
        body = wire.read(self.sent[model.round]).body
        await peer.send(peer.message(model, bytes(body)).signed(peer.who.key))


THIEF = Thief()

RECEIVED = {"used", "refused"}

UPLOADS = {
    # what it does: (behavior, what is said of it, what may be said of it in other rounds beside late and missing)
    "honest": (THIEF.victim, RECEIVED, set()),
    "not a number": (sends(nan), {"malformed"}, set()),
    "infinite": (sends(infinite), {"malformed"}, set()),
    "huge": (sends(huge), {"refused"}, set()),
    "largest": (sends(largest), {"malformed"}, set()),
    "one number short": (sends(short), {"malformed"}, set()),
    "too long": (sends(long), {"malformed"}, set()),
    "empty": (sends(empty), {"malformed"}, set()),
    "no byte": (sends(nothing_at_all), {"malformed"}, set()),
    "random bytes": (sends(noise), {"malformed"}, set()),
    "wrong signature": (sends(wrong_signature), {"forged"}, set()),
    "in the name of another": (sends(in_the_name_of_another), {"forged"}, set()),
    "another's bytes": (THIEF.thief, {"forged"}, set()),
    "another's numbers": (THIEF.signs_it, RECEIVED, set()),
    "wrong digest": (sends(wrong_digest), {"late"}, set()),
    "another run": (sends(another_run), {"late"}, set()),
    "a later round": (sends(later_round), {"late"}, set()),
    "replay": (replay, {"late"}, RECEIVED),
    "duplicate": (duplicate, RECEIVED, set()),
    "a model": (sends(a_model_of_its_own), {"late"}, set()),
    "silent": (silence, {"late"}, set()),
    "declines": (sends(decline), {"missing"}, set()),
    "100 MB": (sends(large), {"missing"}, set()),
    "flood": (flood, {"late", "missing"} | RECEIVED, set()),  # which of them is a matter of time
}


def test_whatever_uploads_are_sent_each_has_its_word_and_the_run_goes_on(tmp_path, nursery):
    real, raw = 3, len(UPLOADS)
    house = House(
        tmp_path, real + raw, rounds=25, believed_honest=4, quorum=4, deadline=1.5, least=0.5, stall=30.0, gather=20.0
    )
    names = dict(zip(UPLOADS, house.names[real:], strict=True))

    async def trial() -> int:
        server = nursery.serve(house, set={"noisegate.federation.reception:OFTEN": 6})
        peers = [keep_at_it(house, names[what], behavior) for what, (behavior, _, _) in UPLOADS.items()]
        async with tasks(*peers), tasks(*map(house.join, house.names[:real])) as joined:
            await until(house.records, "a first round")
            before = server.memory()
            await until(lambda: len(house.records()) >= 24 or server.poll() is not None, "the last rounds")
            after = server.memory()
            outcomes = await asyncio.gather(*joined)
            assert await server.ended() == 0, server.said()
            assert {one.ended for one in outcomes} == {"done"}
            return after - before

    grown = asyncio.run(within(2 * LONG, trial()))
    house.check(house.names[:real])
    assert grown < 64 * MB  # a message of 100 MB is refused before it is held, and a flood is not read
    for what, (_, words, others) in UPLOADS.items():
        found = [fate["status"] for fate in house.fates(names[what])]
        assert sum(word in words for word in found) >= 5, (what, found)
        assert set(found) <= {"late", "missing"} | words | others, (what, found)
    ignored = [line["ignored"] for line in house.records()]
    for word in ("stale", "duplicate", "unexpected"):
        assert sum(one.get(word, 0) for one in ignored) >= 5, word
    for name in house.names[:real]:
        assert len(house.received(name)) >= 10
    assert not house.received(names["wrong digest"]) | house.received(names["100 MB"])
    assert len(house.received(names["replay"])) <= 1


# What connections can be.


class Proxy:
    """A line between a peer and the server, which after some bytes carries only a few at a time to the server."""

    def __init__(self, port: int, quickly: int) -> None:
        self.port, self.quickly, self.carrying, self.lines = port, quickly, [], []

    async def __aenter__(self) -> int:
        self.server = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.carrying:
            task.cancel()
        await asyncio.gather(*self.lines, return_exceptions=True)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lines.append(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            up, down = await asyncio.open_connection("127.0.0.1", self.port)
            with contextlib.closing(down):
                carry = self.carry(reader, down, self.quickly), self.carry(up, writer, None)
                both = list(map(asyncio.ensure_future, carry))
                self.carrying += both
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)

    async def carry(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, quickly: int | None) -> None:
        done = 0
        with contextlib.suppress(ConnectionError):
            while content := await source.read(2**16):
                slowly = quickly is not None and done > quickly
                step = 20 if slowly else len(content)
                for begin in range(0, len(content), step):
                    await asyncio.sleep(0.05 if slowly else 0)
                    to.write(content[begin : begin + step])
                    await to.drain()
                done += len(content)


async def never_reads(house: House, name: str) -> None:
    """Says hello and takes nothing."""
    while True:
        with contextlib.suppress(AssertionError, TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with house.peer(name, house.port) as peer:
                await peer.send(wire.say(Kind.HELLO, name, peer.who.key, {"noisegate": "test"}))
                await asyncio.sleep(3.0)
        await asyncio.sleep(0.05)


async def answer_to(house: House, who: Certified, name: str = "") -> grpc.StatusCode:
    """How the server ends the stream of a certificate."""
    async with house.peer(name or who.name, house.port, who) as peer:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await peer.send(wire.say(Kind.HELLO, name or who.name, who.key, {"noisegate": "test"}))
        while (message := await peer.read()) is not None:
            assert message.kind == Kind.REFUSAL
        return await peer.status_code()


async def never_says_hello(house: House, name: str) -> grpc.StatusCode:
    async with house.peer(name, house.port) as peer:
        while await peer.read() is not None:
            pass
        return await peer.status_code()


async def connects_and_is_silent(house: House, who: Certified | None, says: bytes = b"") -> bytes:
    """A half-open connection, with a handshake if there is a certificate. What it reads before it is closed."""
    about = None
    if who is not None:
        about = ssl.create_default_context(cadata=house.authority.certificate.decode())
        about.set_alpn_protocols(["h2"])
        path = house.root / "half-open.pem"
        path.write_bytes(who.private + who.chain)
        about.load_cert_chain(path)
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port, ssl=about)
        with contextlib.closing(writer):
            writer.write(says)
            return await reader.read()
    return b""


def test_no_connection_holds_up_the_run_and_no_wrong_certificate_gets_in(tmp_path, nursery, monkeypatch):
    monkeypatch.setattr(wire_peers, "SHAPE", (2000,))  # models that no buffer takes whole
    house = House(
        tmp_path,
        7,
        rounds=120,
        shape=[2000],
        believed_honest=3,
        quorum=3,
        deadline=1.0,
        least=0.5,
        stall=20.0,
        gather=2.0,
    )
    authority, checked = make_authority(), []
    w0 = house.workers["w0"]
    dead = Certified("w0", w0.key, *expired(house, "w0"))
    assert identity_of(dead.chain).name == "w0"

    async def connections(server) -> None:
        """All of them at once, while rounds go on."""
        await until(lambda: len(house.received("w3")) > 2, "rounds with a worker")
        before = server.memory()
        silent = [connects_and_is_silent(house, None) for _ in range(20)]
        silent += [connects_and_is_silent(house, w0) for _ in range(10)]  # a worker's certificate, and no word
        silent += [connects_and_is_silent(house, None, b"GET / HTTP/1.1\r\n\r\n"), never_says_hello(house, "w6")]
        denied = {
            "not on the roster": answer_to(house, certified(house.authority, "w99")),
            "with another key": answer_to(house, certified(house.authority, "w0")),
        }
        unknown = {
            "of another authority": answer_to(house, certified(authority, "w0", w0.key)),
            "expired": answer_to(house, dead),
            "of a server": answer_to(house, certified(house.authority, "w0", w0.key, ("localhost",))),
        }
        lying = answer_to(house, house.workers["w6"], name="w0")
        answers = await asyncio.gather(*silent, *denied.values(), *unknown.values(), lying)
        answers = answers[len(silent) :]
        ends = [grpc.StatusCode.PERMISSION_DENIED] * 2 + [grpc.StatusCode.UNAVAILABLE] * 3 + [grpc.StatusCode.ABORTED]
        for answer, end in zip(answers, ends, strict=True):  # a write that met the end of its stream is "internal"
            assert answer in (end, grpc.StatusCode.INTERNAL)
        # One of those who take part is revoked.
        keys = {name: one.key.public for name, one in house.workers.items()}
        house.write_roster(keys, frozenset({identity_of(house.workers["w3"].chain).serial}))
        checked.append(len(house.records()))
        assert server.memory() - before < 64 * MB
        assert server.poll() is None  # it was the server that closed all of them, and not its end

    async def trial() -> None:
        server = nursery.serve(house, handshake=1500, set={"noisegate.federation.reception:HELLO_TIME": 1.0})
        paces = {"w0": lambda: 0.0 if checked else 0.2}  # so that the run does not end before
        joins = [house.join(name, paces.get(name, float)) for name in house.names[:4]]
        async with Proxy(house.port, quickly=9000) as slowly:
            peers = keep_at_it(house, "w4", port=slowly), never_reads(house, "w5")
            async with tasks(*peers), tasks(*joins) as joined:
                await connections(server)
                with pytest.raises(FederationError, match="refuses this worker"):
                    await joined[3]
                outcomes = await asyncio.gather(*joined[:3])
                assert await server.ended() == 0, server.said()
                assert {one.ended for one in outcomes} == {"done"}

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names[:4])
    assert not any(house.received(name) for name in ("w4", "w5", "w6"))
    assert {fate["status"] for fate in house.fates("w4") + house.fates("w5")} <= {"late", "missing"}
    assert house.received("w3")
    assert max(house.received("w3")) < max(house.received("w0"))
    assert house.fates("w3")[-1] == {"status": "missing", "detail": "not connected"}
    said = {(line["event"], line.get("why", "")) for line in house.logged()}
    for why in ("the model was not taken before the deadline", "the certificate is revoked"):
        assert ("dropped", why) in said
    for why in ("not in the roster of this run", "the certificate has another key than the roster"):
        assert ("refused", why) in said
    longest = max(line["seconds"]["wait"] for line in house.records() if "seconds" in line)
    assert longest < house.settings.deadline + 1.0


# Processes that die, stop, or have a wrong clock.

STORE, SERVING = "noisegate.federation.store:StateFolder.", "noisegate.federation.serving:Serving."
RECEPTION, COLLECTION = "noisegate.federation.reception:Reception.", "noisegate.federation.collect:Collection."

SERVER_DIES = {
    "gather": (RECEPTION + "wait_for_change", "after", 2),
    "before the number is logged": (STORE + "log_round", "before", 3),
    "after the number is logged": (STORE + "log_round", "after", 3),
    "after the model is sent": (RECEPTION + "broadcast", "after", 3),
    "in the middle of collecting": (COLLECTION + "take", "after", 8),
    "before it judges": (SERVING + "judged", "before", 3),
    "after uploads are written": (STORE + "put_uploads", "after", 3),
    "after it judged": (SERVING + "step", "after", 3),
    "before a checkpoint is renamed": ("os:replace", "before", 3, "checkpoint.safetensors"),
    "after a checkpoint is renamed": ("os:replace", "after", 3, "checkpoint.safetensors"),
    "before the record": (STORE + "append_record", "before", 3),
    "before receipts": (RECEPTION + "acknowledge", "before", 3),
    "after receipts": (RECEPTION + "acknowledge", "after", 3),
    "before the last model": (STORE + "write_model", "before", 1),
    "before the result": (STORE + "write_result", "before", 1),
    "before the end": (RECEPTION + "end", "before", 1),
}


def test_a_server_that_is_killed_in_any_of_its_states_goes_on_where_it_was(tmp_path, nursery):
    house = House(tmp_path, 3, rounds=60, quorum=2, gather=20.0)
    now = []

    async def trial() -> None:
        paces = {
            "w0": lambda: 0.5 if now == ["in the middle of collecting"] else 0.0
        }  # it computes when the server dies
        async with tasks(*(house.join(name, paces.get(name, float)) for name in house.names)) as joined:
            for lost, (what, point) in enumerate(SERVER_DIES.items(), 1):
                now[:] = [what]
                server = nursery.serve(house, die=[point])
                assert await server.ended() == -signal.SIGKILL, (what, server.said())
                logged = (house.state / "rounds.log").read_text().splitlines() if what != "gather" else []
                done = len(house.records())
                assert 0 <= len(logged) - done <= lost, what
                if "last model" not in what and "result" not in what and "end" not in what:
                    assert not (house.state / "result.json").exists()
            server = nursery.serve(house)
            outcomes = await asyncio.gather(*joined)
            assert {one.ended for one in outcomes} == {"done"}
            assert await server.ended() == 0, server.said()

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names)
    lost = house.settings.rounds - len(house.records())
    assert 6 <= lost <= len(SERVER_DIES)
    for name in house.names:
        assert len(house.charged(name)) <= len(house.received(name)) + lost


PARTICIPATION = "noisegate.federation.participation:Participation."

WORKER_DIES = {
    "before it computes": (PARTICIPATION + "answer", "before", 2),
    "before its upload is in the outbox": ("os:replace", "before", 2, "pending.bin'"),
    "after its upload is in the outbox": ("noisegate.federation.outbox:Outbox.put", "after", 2),
    "after the charge": ("noisegate.federation.ledger:Ledger.charge", "after", 2),
    "before it takes a receipt": (PARTICIPATION + "acknowledge", "before", 2),
    "after it took a receipt": (PARTICIPATION + "acknowledge", "after", 2),
}
DAY = 86400.0


def test_workers_that_are_killed_or_stopped_or_have_a_wrong_clock_do_not_end_a_run(tmp_path, nursery):
    house = House(tmp_path, 5, rounds=400, quorum=2, deadline=1.0, least=0.5, stall=30.0)
    finished = []

    async def rounds_of(name: str, more: int) -> None:
        """Wait until the server has received more uploads of a worker."""
        have = len(house.received(name))
        await until(
            lambda: len(house.received(name)) >= have + more,
            f"{more} uploads of {name}",
        )

    async def trial() -> None:
        server = nursery.serve(house)
        ahead, behind = nursery.join(house, "w3", clock=DAY), nursery.join(house, "w4", clock=-DAY)
        join = [house.join("w0", pace=lambda: 0.0 if finished else 0.1), house.join("w1")]
        async with tasks(*join) as joined:
            for what, point in WORKER_DIES.items():
                worker = nursery.join(house, "w2", die=[point])
                assert await worker.ended() == -signal.SIGKILL, (what, worker.said())
                assert house.received("w2") <= house.charged("w2"), what
            worker = nursery.join(house, "w2")
            await rounds_of("w2", 2)
            worker.kill(signal.SIGSTOP)
            before = len(house.records())
            stopped = await until(
                lambda: [line for line in house.records()[before:] if line["workers"]["w2"]["status"] == "late"],
                "a round without the worker that is stopped",
            )
            assert stopped[0]["seconds"]["wait"] <= house.settings.deadline + 1.0
            worker.kill(signal.SIGCONT)
            await rounds_of("w2", 1)
            for signal_number in (signal.SIGKILL, signal.SIGTERM):  # at any moment
                worker.kill(signal_number)
                assert await worker.ended() == -signal_number
                worker = nursery.join(house, "w2")
                await rounds_of("w2", 1)
            finished.append(True)
            outcomes = await asyncio.gather(*joined)
            assert {one.ended for one in outcomes} == {"done"}
            for child in (server, worker, ahead, behind):
                assert await child.ended() == 0, child.said()

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names)
    for name, clock in (("w3", DAY), ("w4", -DAY)):
        assert house.received(name)
        line = json.loads((house.ledger(name) / "ledger.jsonl").read_text().splitlines()[-1])
        stated = time.mktime(time.strptime(line["time"], "%Y-%m-%dT%H:%M:%SZ"))
        off = stated - time.mktime(time.gmtime()) - clock
        assert abs(off) < 600  # the clock was off, and nothing came of it
    assert BACKDATED.total_seconds() > DAY  # a certificate made today is valid for a clock of yesterday


# Files and disks.


def refusal(ledger: Path) -> str:
    """Why a ledger cannot be opened; empty if it can."""
    try:
        with Ledger.open(ledger):
            return ""
    except StoreError as error:
        return str(error)


def test_a_ledger_that_cannot_be_believed_or_written_stops_its_worker_and_not_the_run(tmp_path, nursery):
    house = House(tmp_path, 3, rounds=400, quorum=2, deadline=1.0, least=0.5, stall=30.0)
    ledger, file = house.ledger("w2"), house.ledger("w2") / "ledger.jsonl"
    finished = []

    async def takes_part(rounds: int = 3, **faults):
        """The worker as a process, killed after some rounds."""
        before = len(house.received("w2"))
        worker = nursery.join(house, "w2", **faults)
        await until(
            lambda: len(house.received("w2")) >= before + rounds,
            "uploads of the worker",
        )
        worker.kill()
        await worker.ended()

    async def refuses(words: str, **faults) -> None:
        """The worker stops by itself, and says why."""
        worker = nursery.join(house, "w2", **faults)
        assert await worker.ended() == 2, worker.said()
        assert words in worker.said()

    async def trial() -> None:
        server = nursery.serve(house)
        join = [house.join("w0", pace=lambda: 0.0 if finished else 0.1), house.join("w1")]
        async with tasks(*join) as joined:
            await takes_part()
            old = shutil.copytree(ledger, tmp_path / "old")
            await takes_part()
            new = shutil.copytree(ledger, tmp_path / "new")
            whole = file.read_bytes()

            charged = house.charged("w2")
            file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
            why = refusal(ledger)  # none if that upload is still in the outbox: then it is charged anew
            assert "lines are missing" in why if why else house.charged("w2") == charged
            file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-3]))
            await refuses("lines are missing")
            file.write_bytes(whole[:-10])
            await refuses("ledger repair")
            file.unlink()
            await refuses("is missing")
            file.mkdir()
            await refuses("is not a file")
            file.rmdir()
            shutil.rmtree(ledger)
            shutil.copytree(old, ledger)
            await refuses("is an older copy")
            shutil.rmtree(ledger)
            shutil.copytree(new, ledger)
            file.write_bytes(file.read_bytes() + whole[-50:-10])  # a torn line behind all others
            await refuses("ledger repair")
            assert repair(ledger)[0] == 40
            await takes_part()
            await refuses("be written (File too large)", limit=file.stat().st_size + 500)
            await refuses("be written (File too large)", limit=100)
            await takes_part()
            second = nursery.join(house, "w2")
            await until(lambda: "agreed" in second.said(), "a worker that takes part")
            await refuses("another process uses this ledger")
            finished.append(True)
            outcomes = await asyncio.gather(*joined)
            assert {one.ended for one in outcomes} == {"done"}
            assert await second.ended() == 0, second.said()
            assert await server.ended() == 0, server.said()

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names)


def test_a_server_without_disk_says_so_and_goes_on_when_there_is_room(tmp_path, nursery):
    house = House(tmp_path, 3, rounds=60, quorum=2, gather=20.0)
    finished = []

    async def trial() -> None:
        joins = [house.join(name, pace=lambda: 0.0 if finished else 0.02) for name in house.names]
        async with tasks(*joins) as joined:
            for limit in (300, 3000, 6000, 9000):
                server = nursery.serve(house, limit=limit)
                assert await server.ended() == 2, server.said()
                assert "cannot be written (File too large)" in server.said()
                assert "start the server again" in server.said() or "make room" in server.said()
            (house.state / "status.json").unlink()
            server = nursery.serve(house)
            await until((house.state / "status.json").exists, "a server")
            second = nursery.serve(house)
            assert await second.ended() == 2
            assert "two servers cannot share a folder" in second.said()
            finished.append(True)
            outcomes = await asyncio.gather(*joined)
            assert {one.ended for one in outcomes} == {"done"}
            assert await server.ended() == 0, server.said()

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int):
    """A file system of so many kilobytes at a folder, where this user may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_at_the_server_and_at_a_worker_costs_nothing_but_time(tmp_path, nursery):
    house = House(tmp_path, 3, rounds=150, quorum=2, gather=1.0, deadline=1.0, least=0.5, stall=30.0)

    async def filled_up(folder: Path, begin, what: str) -> None:
        """A process fails on a full disk. Then there is room again."""
        filler = folder / "filler"
        process = begin()
        await until(lambda: house.records(), "a round")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(256))
        assert await process.ended() == 2, process.said()
        assert "No space left on device" in process.said(), what
        filler.unlink()

    async def trial() -> None:
        async with tasks(*(house.join(name, pace=lambda: 0.02) for name in house.names[:2])) as joined:
            await filled_up(house.state, lambda: nursery.serve(house), "server")
            server = nursery.serve(house)
            await filled_up(house.ledger("w2"), lambda: nursery.join(house, "w2"), "worker")
            worker = nursery.join(house, "w2")
            outcomes = await asyncio.gather(*joined)
            assert {one.ended for one in outcomes} == {"done"}
            assert await server.ended() == 0, server.said()
            assert await worker.ended() == 0, worker.said()

    with small_disk(house.state, 400), small_disk(house.ledger("w2"), 200):
        asyncio.run(within(2 * LONG, trial()))
        house.check(house.names)


# Absence.


def test_a_run_of_which_three_in_ten_are_absent_at_random_comes_to_its_end(tmp_path, nursery):
    house = House(tmp_path, 10, rounds=40, believed_honest=7, quorum=4, deadline=0.8, least=0.2, stall=5.0, gather=5.0)
    draw = torch.Generator().manual_seed(15)

    async def absent(peer: Peer, model: wire.Message) -> None:
        """In three of ten rounds it is silent, goes away or declines."""
        match int(torch.randint(10, (1,), generator=draw)):
            case 0:
                return
            case 1:
                await peer.hang_up()
            case 2:
                await peer.send(peer.decline(model))
            case _:
                await peer.send(peer.upload(model))

    async def comes_and_goes(name: str) -> None:
        """A real worker that is ended and started again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5 + float(torch.rand(1, generator=draw))):
                    return await house.join(name)
            await asyncio.sleep(0.3)

    async def trial() -> None:
        server = nursery.serve(house)
        peers = [keep_at_it(house, name, absent) for name in house.names[3:]]
        real = [house.join("w0"), comes_and_goes("w1"), comes_and_goes("w2")]
        async with tasks(*peers), tasks(*real) as joined:
            assert await server.ended() == 0, server.said()
            assert (await joined[0]).ended == "done"

    asyncio.run(within(2 * LONG, trial()))
    house.check(house.names[:3])
    words = [fate["status"] for name in house.names[3:] for fate in house.fates(name)]
    there = sum(word in RECEIVED for word in words) / len(words)
    assert 0.3 < there < 0.9, there
    assert {"late", "missing"} <= set(words)
