"""Who is connected: the server's one port, mutual TLS, one stream for each worker of the roster.

A certificate counts if it names a worker of the roster, carries that worker's key, and is not revoked. The newest
stream of a worker takes the place of an older one once it has said hello. What arrives on a stream belongs to the
worker of its certificate, whatever it says.

What peers can make the server hold. For each worker there are at most a stream and one that is arriving, of each at
most one message, which is at most a header, `SLACK` and 4 d bytes. On the way out are at most `SendGate` models.
Together with the round's (n, d) rows and the last ones that makes about 3 n d float32, and what is being sent. Peers
without a certificate of the authority hold a connection until the handshake's time is over, of which there are at most
`most_connections`.
"""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import grpc
import grpc.aio

from noisegate.checks import plain
from noisegate.errors import FederationError
from noisegate.federation import wire
from noisegate.federation.certificates import CertificateOwner, identity_of
from noisegate.federation.collect import Collection, Sender, signed_text, why_of
from noisegate.federation.connections import most_connections
from noisegate.federation.keys import SigningKey, verify
from noisegate.federation.logs import OperatorsLog
from noisegate.federation.patience import Attendance
from noisegate.federation.roster import Roster
from noisegate.federation.streams import GONE, ModelLetter, SendGate, Stream, first_of
from noisegate.federation.terms import Terms
from noisegate.federation.wire import Kind, Message

HELLO_TIME = 10.0
"""Seconds in which a stream must begin."""

SLACK = wire.MOST_TEXT
"""Bytes beyond a model's that a message may have: the longest text is longer than a small model."""

OFTEN, LONGEST_PAUSE = 6, 5.0
"""Streams of one worker in a minute that begin at once. Each further one waits twice as long, up to so many seconds."""


class Reception:
    """Accepts the streams of registered workers, and carries messages to and from them.

    names: the workers of the run, in the order of their rows.
    collection: the round that is open. next_round: the first number that a worker may be asked for. received,
    digests: how many uploads of each worker the last checkpoint has received, and the digest of the last one. ignored:
    messages that came when no round was open.
    """

    def __init__(
        self,
        terms: Terms,
        names: Sequence[str],
        key: SigningKey,
        roster: Roster,
        standings: Sequence[Attendance],
        log: OperatorsLog,
        pool: Executor,
    ) -> None:
        self.terms, self.roster, self.standings, self.log, self.pool = terms, roster, standings, log, pool
        self.run, self.names = bytes.fromhex(terms.run), tuple(names)
        self.received = [each.counter for each in standings]
        self.digests = [b"" for _ in standings]
        self.streams: dict[int, Stream] = {}
        self.collection: Collection | None = None
        self.next_round = 0
        self.ignored: Counter[str] = Counter()
        self.changed = asyncio.Event()
        self._key, self._letter, self._end = key, ModelLetter(b"", 0.0), b""
        self._arriving: dict[int, Stream] = {}
        self._came: list[deque[float]] = [deque(maxlen=64) for _ in self.names]
        self._gate = SendGate(wire.HEADER.size + 4 * terms.parameters)
        self._ended: set[int] = set()  # who took the last model
        self._server: Any = None

    async def start(self, address: tuple[str, int], credentials: Any) -> int:
        """Listen, and give the port."""
        rows, d = len(self.names), self.terms.parameters
        options = (
            ("grpc.max_receive_message_length", wire.HEADER.size + 4 * d + SLACK),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_metadata_size", 2**14),
            ("grpc.max_allowed_incoming_connections", most_connections(rows)),
            ("grpc.server_handshake_timeout_ms", 5_000),
            ("grpc.max_connection_idle_ms", 15_000),  # one without a stream
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.bdp_probe", 0),  # which lets each connection hold megabytes
            ("grpc.experimental.tcp_max_read_chunk_size", 2**16),
        )
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4 * rows + 16)
        service, method = wire.METHOD.lstrip("/").split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._join)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        host, wanted = address
        try:
            port: int = server.add_secure_port(f"{host}:{wanted}", credentials)
        except RuntimeError as error:
            raise FederationError(
                f"listen = {plain(host)}:{wanted}: cannot be listened on ({plain(error)[:100]}); choose another port"
            ) from None
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End all streams."""
        if self._server is not None:
            await self._server.stop(0)

    def present(self) -> set[int]:
        """The rows of the workers that are connected and have not left."""
        return {row for row in self.streams if not self.standings[row].left}

    def broadcast(self, collection: Collection, model: bytes, seconds: float) -> None:
        """Open a round: send its model to all who are there, those who never missed a deadline first."""
        loop = asyncio.get_running_loop()
        self.collection, self._letter = collection, ModelLetter(model, loop.time() + seconds)
        for row in sorted(self.present(), key=lambda row: (self.standings[row].k, secrets.randbelow(2**32))):
            collection.ask(row, wait=self.standings[row].awaited(collection.round))
            self.streams[row].post_model(self._letter)

    def close_round(self) -> None:
        """The round is over: its model is not sent to anybody any more."""
        for stream in self.streams.values():
            stream.withdraw(self._letter)

    def unserved(self) -> set[int]:
        """The rows of workers whose turn to be sent the round's model did not come: they could not answer in time."""
        return {row for row, stream in self.streams.items() if stream.waits_for_turn(self._letter)}

    def acknowledge(self, round: int, digests: dict[int, bytes]) -> None:
        """Send receipts for uploads that the last checkpoint holds. digests: of the uploads, by row."""
        for row, digest in digests.items():
            self.received[row], self.digests[row] = self.standings[row].counter, digest
            if (stream := self.streams.get(row)) is not None:
                receipt = Message(Kind.RECEIPT, self.names[row], self.run, round, digest, self.received[row])
                stream.post_receipt(receipt.signed(self._key))

    async def end(self, content: bytes, seconds: float, everyone: bool) -> None:
        """Send the last model to all who are there, or `everyone` who still comes, and wait until they took it."""
        self._end = content
        for stream in list(self.streams.values()):
            stream.post_end(content)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            if not (set(range(len(self.names))) - self._ended if everyone else self.streams):
                return
            await self.wait_for_change(min(0.5, until - loop.time()))

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until somebody comes or goes, for so long at most."""
        self.changed.clear()
        await first_of(self._changes(), asyncio.sleep(max(0.0, seconds)))

    def use_roster(self, roster: Roster) -> None:
        """Take a new roster: whoever may not be here any more is dropped."""
        self.roster = roster
        for stream in (*self.streams.values(), *self._arriving.values()):
            sender = stream.sender
            if isinstance(why := self._admitted(CertificateOwner(sender.name, sender.key, stream.serial)), str):
                stream.drop(why)

    async def _changes(self) -> None:
        await self.changed.wait()

    def _admitted(self, who: CertificateOwner) -> Sender | str:
        """Whose stream it is, or why it is nobody's."""
        if who.name not in self.names or who.name not in self.roster.keys:
            return "not in the roster of this run"
        if self.roster.keys[who.name] != who.key:
            return "the certificate has another key than the roster"
        if who.serial in self.roster.revoked:
            return "the certificate is revoked"
        return Sender(self.names.index(who.name), who.name, who.key)

    def _identify(self, context: Any) -> tuple[Sender | str, int]:
        try:
            who = identity_of((context.auth_context().get("x509_pem_cert") or [b""])[0])
        except FederationError as error:
            return plain(error)[:200], 0
        return self._admitted(who), who.serial

    async def _join(self, _: Any, context: Any) -> None:
        """One stream from its first message to its last."""
        sender, serial = self._identify(context)
        if isinstance(sender, str):
            self.log.say_of_peer("refused", why=sender, serial=f"{serial:x}", peer=context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, sender)
            return
        stream, row = Stream(context, sender, serial, self._gate), sender.row
        if (older := self._arriving.get(row)) is not None:
            older.drop("another stream of this worker came")
        self._arriving[row] = stream
        try:
            error = await stream.alive(self._serve(stream))
        finally:
            if self._arriving.get(row) is stream:
                del self._arriving[row]
            self._gone(stream)
        if error is not None and not isinstance(error, GONE):
            self.log.say("fault", worker=sender.name, error=type(error).__name__, detail=str(error))
        if stream.closing:
            self.log.say_of_peer("dropped", worker=sender.name, why=stream.closing)
            refusal = wire.say(Kind.REFUSAL, sender.name, self._key, {"why": stream.closing}, run=self.run)
            await first_of(stream.say(refusal), asyncio.sleep(1.0))
            await context.abort(grpc.StatusCode.ABORTED, stream.closing)

    async def _serve(self, stream: Stream) -> None:
        """Greet a worker, then talk with it until the stream ends."""
        row, name = stream.sender.row, stream.sender.name
        await asyncio.sleep(self._pause(row))
        content = await stream.hello(HELLO_TIME)
        hello = wire.read(content) if content is not None else "no hello in time"
        if isinstance(hello, str) or hello.kind != Kind.HELLO or hello.worker != name:
            return stream.drop(hello if isinstance(hello, str) else "the stream did not begin with a hello of its own")
        if not verify(stream.sender.key, hello.signature, await signed_text(hello, self.pool)):
            return stream.drop("the hello has a wrong signature")
        if (older := self.streams.pop(row, None)) is not None:
            older.drop("another stream of this worker came")
        self.standings[row].left = ""  # it came back; if it has no budget, it says so again
        first = self.collection.round if self.collection is not None and self._opened() else self.next_round
        last = self.digests[row] or wire.NOBODY
        about = {"run": self.run, "round": first, "digest": last, "counter": self.received[row]}
        await stream.say(wire.say(Kind.TERMS, name, self._key, self.terms.as_dict(), **about))
        self.streams[row] = stream
        if self._arriving.get(row) is stream:
            del self._arriving[row]
        self.log.say_of_peer("joined", worker=name, serial=f"{stream.serial:x}")
        self.changed.set()
        if self._end:
            stream.post_end(self._end)
        elif self.collection is not None and self._opened():  # it may have been closed or opened meanwhile
            self.collection.ask(row, wait=False)
            stream.post_model(self._letter)
        await stream.talk(self._on_message)

    def _opened(self) -> bool:
        return self.collection is not None and not self.collection.closed

    async def _on_message(self, stream: Stream, content: bytes) -> None:
        sender, found = stream.sender, wire.read(content)
        if isinstance(found, Message) and found.kind == Kind.LEAVE:
            return await self._on_leave(sender, found)
        if self.collection is None:
            self.ignored["stale"] += 1
            return None
        return await self.collection.take(sender, content, self.pool)

    async def _on_leave(self, sender: Sender, message: Message) -> None:
        genuine = message.worker == sender.name and message.run == self.run
        if not genuine or not verify(sender.key, message.signature, await signed_text(message, self.pool)):
            self.ignored["unexpected"] += 1
            return
        why = why_of(message) or "no reason given"
        self.standings[sender.row].left = why
        if self.collection is not None:
            self.collection.leave(sender.row, why)
        self.log.say_of_peer("left", worker=sender.name, why=why)
        self.changed.set()

    def _gone(self, stream: Stream) -> None:
        row = stream.sender.row
        if self.streams.get(row) is stream:
            del self.streams[row]
            self._ended |= {row} if stream.ended.is_set() else set()
            if self.collection is not None:
                self.collection.gone(row)
            self.log.say_of_peer("gone", worker=stream.sender.name)
            self.changed.set()

    def _pause(self, row: int) -> float:
        """Seconds that a new stream of a worker waits: none, unless it comes often."""
        came, now = self._came[row], time.monotonic()
        came.append(now)
        often = sum(now - then < 60.0 for then in came) - OFTEN
        return 0.0 if often <= 0 else min(LONGEST_PAUSE, 0.1 * 2.0**often)
