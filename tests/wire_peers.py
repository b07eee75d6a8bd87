"""A federation on loopback for tests: server folders with certificates, and raw peers that behave or misbehave.

A peer speaks the wire format over a real mutual-TLS stream, and has nothing of noisegate's worker: it can send any
bytes at any time. `Peer.take_part` is an honest worker without a ledger. Everything is async; `Peer` is a context.

    trial = Trial(tmp_path, workers=3)
    async with trial.serving() as server, trial.peer("w0", server.port) as peer:
        await peer.hello()
        model = await peer.next(Kind.MODEL)
        await peer.send(peer.upload(model))
"""

import asyncio
import dataclasses
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from noisegate.entropy import Secret
from noisegate.federation import wire
from noisegate.federation.certificates import Authority, make_authority, make_request, sign_request
from noisegate.federation.keys import SigningKey, write_private
from noisegate.federation.roster import Roster
from noisegate.federation.server import Server
from noisegate.federation.settings import ServerSettings
from noisegate.federation.terms import Terms
from noisegate.federation.wire import Kind, Message
from noisegate.models import build_model
from noisegate.protocol import Mechanism, upload_of_one
from noisegate.settings import toml
from noisegate.streams import stream
from noisegate.vectors import FlatModel

SHAPE, CLASSES = (6,), 3
TIME = 20.0
"""Seconds after which a peer gives up: nothing in these tests takes as long."""

QUICK: dict[str, Any] = {
    "run": "5a" * 32,
    "title": "a trial",
    "listen": "127.0.0.1:0",
    "model": "mlp",
    "shape": list(SHAPE),
    "classes": CLASSES,
    "rounds": 4,
    "batch": 8,
    "declared": 60,
    "sigma": 1.0,
    "rate": 0.2,
    "aggregator": "two-stage",
    "gather": 10.0,
    "deadline": 5.0,
    "least": 0.5,
    "stall": 20.0,
    "evaluate_every": 2,
    "seed": 7,
}
"""Settings of a run that takes a second."""


def toy(examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of three classes that a small network tells apart, ordered by class."""
    y = torch.arange(CLASSES).repeat_interleave(examples // CLASSES)
    x = torch.randn(len(y), *SHAPE, generator=stream(seed, "toy")) * 0.5
    x[torch.arange(len(y)), y] += 2.0
    return x, y


@dataclasses.dataclass(frozen=True)
class Certified:
    """A TLS key and certificate with the signing key that it names."""

    name: str
    key: SigningKey
    private: bytes
    chain: bytes


def certified(
    authority: Authority, name: str, key: SigningKey | None = None, hosts: tuple[str, ...] = (), days: int = 30
) -> Certified:
    """A new certificate of this authority. hosts: those of a server; a worker's has none."""
    key = key or SigningKey.generate()
    private, request = make_request(name, key.public, hosts)
    return Certified(name, key, private, sign_request(authority, request, server=bool(hosts), days=days))


class Trial:
    """A server folder with everything in it, and the certificates of its workers."""

    def __init__(self, folder: Path, workers: int = 3, **settings: Any) -> None:
        self.folder, self.names = folder, tuple(f"w{i}" for i in range(workers))
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = make_authority()
        self.server_key = SigningKey.generate()
        server = certified(self.authority, "server", self.server_key, ("localhost", "127.0.0.1"))
        self.workers = {name: certified(self.authority, name) for name in self.names}
        (folder / "ca.pem").write_bytes(self.authority.certificate)
        (folder / "server.pem").write_bytes(server.chain)
        write_private(folder / "server.key", server.private)
        self.server_key.write(folder / "signing.key")
        self.write_roster({name: one.key.public for name, one in self.workers.items()})
        self.auxiliary, self.test = toy(30, 100), toy(90, 101)
        arrays = zip(("x", "y", "x_test", "y_test"), (*self.auxiliary, *self.test), strict=True)
        np.savez(folder / "auxiliary.npz", **{name: value.numpy() for name, value in arrays})
        self.write_settings(**{"believed_honest": workers, "quorum": 1, **settings})

    def write_settings(self, **settings: Any) -> None:
        """federation.toml with these changes to `QUICK`."""
        self.given = {**getattr(self, "given", QUICK), **settings}
        lines = (f"{name} = {toml(value)}\n" for name, value in self.given.items())
        (self.folder / "federation.toml").write_text("".join(lines))

    def write_roster(self, keys: dict[str, bytes], revoked: frozenset[int] = frozenset()) -> None:
        """roster.toml, with a time of change that differs from that of the last one."""
        path = self.folder / "roster.toml"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(Roster(keys, revoked).to_toml())
        if path.stat().st_mtime_ns == before:
            os.utime(path, ns=(before + 10**6, before + 10**6))

    @property
    def settings(self) -> ServerSettings:
        """As the server reads them."""
        return ServerSettings.read(self.folder / "federation.toml")

    @property
    def state(self) -> Path:
        """What the server writes to."""
        return self.folder / "state"

    def model(self) -> FlatModel:
        """The model that everyone has."""
        return FlatModel(build_model("mlp", SHAPE, CLASSES, stream(0, "weights")))

    def records(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return [json.loads(line) for line in (self.state / "rounds.jsonl").read_text().splitlines()]

    def logged(self) -> list[dict[str, Any]]:
        """The lines of the operators' log."""
        return [json.loads(line) for line in (self.state / "log.jsonl").read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        """What status.json says."""
        return json.loads((self.state / "status.json").read_text())

    @asynccontextmanager
    async def serving(self, server: Server | None = None, end_time: float = 3.0) -> AsyncIterator[Server]:
        """A server that runs in this event loop, stopped at the end. `server.running` is its task."""
        server = server or Server.of(self.folder)
        server.end_time = end_time
        running = asyncio.ensure_future(server.run())
        server.running = running  # type: ignore[attr-defined]
        try:
            until = time.monotonic() + TIME
            while not server.port and not running.done():
                assert time.monotonic() < until, "the server does not listen"
                await asyncio.sleep(0.01)
            if running.done():
                running.result()
            yield server
        finally:
            server.stop()
            if not running.done():
                await asyncio.wait({running}, timeout=TIME)
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # asked for, so that asyncio does not complain

    def peer(self, name: str, port: int, who: Certified | None = None) -> "Peer":
        """A peer with the certificate of a worker, or another one."""
        examples = toy(60, int(name[1:]) if name[1:].isdigit() else 0)
        return Peer(name, port, who or self.workers[name], self.authority.certificate, examples)


@functools.cache
def mechanism_of(terms: str) -> Mechanism:
    """The mechanism of these terms, as JSON. It takes a while to choose one, and it is the same for all peers."""
    model = FlatModel(build_model("mlp", SHAPE, CLASSES, stream(0, "weights")))
    return Terms.of(json.loads(terms)).mechanism(model, toy(60, 0))


class Peer:
    """One end of a stream. It keeps what it received: `seen` has every message, in order."""

    def __init__(
        self, name: str, port: int, who: Certified, authority: bytes, examples: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.name, self.port, self.who, self.examples = name, port, who, examples
        self.seen: list[Message] = []
        self.receipts: list[Message] = []
        self.terms: Terms | None = None
        self.last: torch.Tensor | None = None
        self._authority, self._channel, self.call = authority, None, None
        self._secret = Secret(torch.device("cpu"))

    async def __aenter__(self) -> "Peer":
        await self.dial()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()

    async def dial(self) -> None:
        """Open a channel and a stream. A refused handshake shows when something is sent or read."""
        credentials = grpc.ssl_channel_credentials(self._authority, self.who.private, self.who.chain)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channel = grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials, options=options)
        self.call = self._channel.stream_stream(wire.METHOD)()

    async def hang_up(self) -> None:
        """Break the stream and the connection."""
        if self._channel is not None:
            self.call.cancel()
            await self._channel.close()
            self._channel = None

    async def send(self, content: bytes) -> None:
        """Send any bytes."""
        async with asyncio.timeout(TIME):
            await self.call.write(content)

    async def read(self, seconds: float = TIME) -> Message | None:
        """The next message; None when the stream ends, however it ends."""
        try:
            async with asyncio.timeout(seconds):
                content = await self.call.read()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        if not isinstance(content, bytes):
            return None
        message = wire.read(content)
        assert isinstance(message, Message), message
        self.seen.append(message)
        if message.kind == Kind.RECEIPT:
            self.receipts.append(message)
        return message

    async def next(self, *kinds: Kind, seconds: float = TIME) -> Message | None:
        """The next message of these kinds, past others; None when the stream ends."""
        while (message := await self.read(seconds)) is not None:
            if message.kind in kinds:
                return message
        return None

    async def hello(self) -> Message:
        """Say hello, and take the terms."""
        await self.send(wire.say(Kind.HELLO, self.name, self.who.key, {"noisegate": "test"}))
        message = await self.read()
        assert message is not None, "the server ended the stream"
        assert message.kind == Kind.TERMS, message.kind.name
        self.terms = Terms.of(message.text())
        return message

    async def status_code(self) -> grpc.StatusCode:
        """How the server ended the stream."""
        async with asyncio.timeout(TIME):
            return await self.call.code()

    def vector(self, model: Message) -> torch.Tensor:
        """What an honest worker computes for a model."""
        assert self.terms is not None, "it has no terms yet: say hello first"
        params = torch.from_numpy(model.vector().copy())
        self._secret.begin(model.round, again=True)
        mechanism = mechanism_of(json.dumps(self.terms.as_dict()))
        return upload_of_one(mechanism, params, *self.examples, self.last, self._secret.source)

    def message(self, model: Message, body: bytes, **changes: Any) -> Message:
        """An upload with this body for a model. changes: of the message's fields, to lie with."""
        made = Message(Kind.UPLOAD, self.name, model.run, model.round, model.digest, body=body)
        return dataclasses.replace(made, **changes)

    def upload(self, model: Message, vector: torch.Tensor | None = None, **changes: Any) -> bytes:
        """A signed upload: an honest one unless given. changes: of the message's fields, to lie with."""
        self.last = self.vector(model) if vector is None else vector
        return self.message(model, wire.body_of(self.last.numpy()), **changes).signed(self.who.key)

    def decline(self, model: Message, why: str = "not today") -> bytes:
        """A signed message that there is nothing in this round."""
        about = {"run": model.run, "round": model.round, "digest": model.digest}
        return wire.say(Kind.DECLINE, self.name, self.who.key, {"why": why}, **about)

    def leave(self, terms: Message, why: str = "budget spent") -> bytes:
        """A signed message that there will be nothing any more."""
        return wire.say(Kind.LEAVE, self.name, self.who.key, {"why": why}, run=terms.run)

    async def take_part(self, answer: "Behavior | None" = None) -> Message | None:
        """Hello, then an answer to every model until the end, which is given; None if the stream broke.

        answer: sends what it likes, in place of an honest upload.
        """
        await self.hello()
        while (message := await self.next(Kind.MODEL, Kind.END, Kind.REFUSAL)) is not None:
            if message.kind != Kind.MODEL:
                return message if message.kind == Kind.END else None
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await (answer(self, message) if answer else self.send(self.upload(message)))
        return None


Behavior = Callable[[Peer, Message], Awaitable[None]]


async def silence(peer: Peer, model: Message) -> None:
    """Answers nothing."""


def sends(make: Callable[[Peer, Message], bytes]) -> Behavior:
    """Answers each model with the bytes that this makes."""

    async def answer(peer: Peer, model: Message) -> None:
        await peer.send(make(peer, model))

    return answer


async def take_parts(
    trial: Trial, port: int, behaviors: dict[str, Behavior | None] | None = None
) -> dict[str, Message | None]:
    """All workers take part, each in its way, honestly unless told otherwise. Gives the last message of each."""

    async def one(name: str) -> Message | None:
        async with trial.peer(name, port) as peer:
            return await peer.take_part((behaviors or {}).get(name))

    ends = await asyncio.gather(*map(one, trial.names))
    return dict(zip(trial.names, ends, strict=True))
