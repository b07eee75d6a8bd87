"""A worker's end of the stream: dial the server, agree, answer until the run is over. Dial again when it breaks."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import FederationError
from noisegate.federation.participation import Holder, Participation
from noisegate.federation.wire import HEADER, METHOD, MOST_TEXT, Kind, Message, read, say
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.version import __version__

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the stream is dialed again, the first time and at most."""

TERMS_WITHIN = 60.0
"""Seconds that the server has to send its terms."""

HANG_UP_WITHIN = 5.0
"""Seconds that the server has to end the stream of a worker that leaves."""

REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
"""Answers of a server that knows who is calling, and does not want this worker."""


class Teller(Protocol):
    """Is told what happens, for logs: a few words, and values that hold nothing private."""

    def __call__(self, event: str, /, **about: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class WorkerOutcome:
    """How taking part ended.

    ended: "done" if the run is over, "left" if this worker's budget was spent. rounds: how many were charged in this
    run. epsilon: what everything that this data set was used for costs, at the policy's delta. params: the last model,
    if the run is over.
    """

    ended: str
    run: str
    rounds: int
    epsilon: float
    params: Tensor | None = None


class WorkerStream:
    """Keeps a worker in a run.

    agree: makes a participation of the server's terms. executor: where the worker computes; one thread at a time.
    """

    def __init__(
        self,
        place: WorkerFolder,
        holder: Holder,
        agree: Callable[[Message], Participation],
        tell: Teller,
        executor: Executor | None = None,
    ) -> None:
        self.place, self.holder, self.tell = place, holder, tell
        self._agree, self._executor = agree, executor
        self._run = ""

    async def until_the_end(self) -> WorkerOutcome:
        """Take part, dialing as often as need be. What this worker must not go on after is raised."""
        pause = FIRST_PAUSE
        while True:
            try:
                async with self._channel() as channel:
                    outcome, pause = await self._one_stream(channel, pause)
                if outcome:
                    return outcome
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSED:
                    raise FederationError(
                        f"{self.place.server}: the server refuses this worker ({plain(error.details())[:200]}); ask "
                        "its operator whether name, key and certificate are on the roster"
                    ) from None
                self.tell("disconnected", code=error.code().name, details=plain(error.details())[:200])
            except TimeoutError:
                self.tell("disconnected", code="TIMEOUT", details=f"no terms within {TERMS_WITHIN:g} seconds")
            except asyncio.InvalidStateError:  # what gRPC raises for a write to a stream that has ended
                self.tell("disconnected", code="ENDED", details="the stream ended while this worker computed")
            # Without the random part, all workers of a server that comes back would dial at the same moment.
            await asyncio.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _channel(self) -> grpc.aio.Channel:
        largest = HEADER.size + max(4 * self.holder.model.d, MOST_TEXT)
        authority, key, certificate = self.place.tls()
        options = [
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", largest),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),  # workers of one process are each their own peer
        ]
        return grpc.aio.secure_channel(
            self.place.server, grpc.ssl_channel_credentials(authority, key, certificate), options=options
        )

    async def _one_stream(self, channel: grpc.aio.Channel, pause: float) -> tuple[WorkerOutcome | None, float]:
        """Take part over one stream. (how it ended, or None if it broke; the pause before the next one)."""
        call = channel.stream_stream(METHOD)()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # why the server hung up is said to who reads
            await call.write(say(Kind.HELLO, self.holder.name, self.holder.key, {"noisegate": __version__}))
        async with asyncio.timeout(TERMS_WITHIN):
            first = await _next(call)
        if first is None or self._is_refusal(first):
            return None, pause
        run: Participation = await self._in_thread(self._agree, first)
        self._stay_with(run)
        self.tell("agreed", run=run.terms.run[:12], rounds=run.terms.rounds, allowed=run.allowed)
        async for message in _messages(call):
            if message.kind == Kind.RECEIPT:
                await self._in_thread(run.acknowledge, message)
            elif message.kind == Kind.END:
                params = run.checked_model(message, Kind.END)
                self.tell("done", run=run.terms.run[:12])
                return await self._outcome("done", run, params), pause
            elif message.kind == Kind.MODEL:
                answer = await self._in_thread(run.answer, message)
                await call.write(answer)
                if answer[4] == Kind.LEAVE:
                    self.tell("left", why="budget spent", rounds=run.allowed)
                    await call.done_writing()
                    await _until_the_server_hangs_up(call)
                    return await self._outcome("left", run, None), pause
                pause = FIRST_PAUSE  # the stream works
            elif self._is_refusal(message):
                break
            else:
                raise FederationError(f"the server sent a {message.kind.name}, which does not belong here")
        return None, pause

    def _stay_with(self, run: Participation) -> None:
        """One call takes part in one run. FederationError if the server has begun another one since."""
        if self._run and self._run != run.terms.run:
            raise FederationError(
                f"{self.place.server}: the server has begun another run ({run.terms.run[:12]}) than the one that this "
                f"worker joined ({self._run[:12]}); join again to take part in it"
            )
        self._run = run.terms.run

    def _is_refusal(self, message: Message) -> bool:
        """Whether the server ends this stream on purpose. The next one may be welcome, or refused for good."""
        if message.kind != Kind.REFUSAL:
            return False
        self.tell("refused", why=plain((message.text() or {}).get("why", "it does not say why"))[:200])
        return True

    async def _outcome(self, ended: str, run: Participation, params: Tensor | None) -> WorkerOutcome:
        ledger, name = self.holder.ledger, run.terms.run
        epsilon = await self._in_thread(ledger.spent, self.holder.policy.delta)
        return WorkerOutcome(ended, name, ledger.charged(name), epsilon, params)

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        """Compute elsewhere. Whoever is canceled waits until it is done: the ledger must not be closed under it."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, function, *given)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise


async def _messages(call: grpc.aio.StreamStreamCall) -> AsyncIterator[Message]:
    """What the server sends, until the stream ends."""
    while (message := await _next(call)) is not None:
        yield message


async def _next(call: grpc.aio.StreamStreamCall) -> Message | None:
    """The next message of the server; None at the end of the stream. FederationError if it is none."""
    content = await call.read()  # raises if the server ended the stream with an error
    if content is grpc.aio.EOF:
        return None
    message = read(content)
    if isinstance(message, str):
        raise FederationError(f"the server sent what is no message ({message}); another program may listen there")
    return message


async def _until_the_server_hangs_up(call: grpc.aio.StreamStreamCall) -> None:
    """Let the server read what was written last, before the channel is closed over it."""
    with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async with asyncio.timeout(HANG_UP_WITHIN):
            while await call.read() is not grpc.aio.EOF:
                pass
