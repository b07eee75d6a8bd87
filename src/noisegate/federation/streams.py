"""One worker's stream at the server: what is waiting to be sent to it, and how much of it is read.

Waiting to be sent is at most one model (the latest), a few receipts and the end. A model that is not taken before its
round's deadline ends the stream. Of what a worker sends, `MESSAGES` are read in a round; then reading stops until the
next one, and the library's flow control holds back whoever floods.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import grpc.aio

from noisegate.federation.collect import Sender

MESSAGES = 8
"""Messages of one worker that are read in a round."""

SHORT = 10.0
"""Seconds in which a worker must take a short message."""

LONG = 60.0
"""Seconds in which a worker must take the last model."""

RECEIPTS = 4
"""Receipts that may wait for a worker. One that is pushed out is made up for by the counter of the next."""

IN_FLIGHT = 2**26
"""Bytes of models that are on their way at once. At least `FEWEST` models are."""

FEWEST = 4
SLOW = 2.0
"""Seconds after which a send makes room for the next one, unless as many are slow already as have turns."""

OnMessage = Callable[["Stream", bytes], Awaitable[None]]


class ModelLetter(NamedTuple):
    """A model on its way. until: when its round is over, by the event loop's clock."""

    content: bytes
    until: float


class SendGate:
    """Bounds how many models are on their way at once: `turns`, and as many again that have been found slow."""

    def __init__(self, size: int) -> None:
        self.turns = max(FEWEST, IN_FLIGHT // max(1, size))
        self._free, self._slow = asyncio.Semaphore(self.turns), 0

    async def send(self, write: Callable[[], Coroutine[Any, Any, None]], until: float) -> bool:
        """Send a model when it is its turn. False if it was begun and not taken in time: the stream is of no use."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until):
                await self._free.acquire()
        except TimeoutError:
            return True  # the queue was long; that is not this worker's fault
        sending, slow = asyncio.ensure_future(write()), False
        try:
            done, _ = await asyncio.wait({sending}, timeout=max(0.0, min(SLOW, until - loop.time())))
            if not done:
                if self._slow < self.turns:
                    slow = True
                    self._slow += 1
                    self._free.release()
                done, _ = await asyncio.wait({sending}, timeout=max(0.0, until - loop.time()))
            if done:
                await sending
            return bool(done)
        finally:
            sending.cancel()
            if slow:
                self._slow -= 1
            else:
                self._free.release()


class Stream:
    """The stream of one worker. sender: who it is. serial: of its certificate."""

    def __init__(self, context: Any, sender: Sender, serial: int, gate: SendGate) -> None:
        self.sender, self.serial = sender, serial
        self.closing = ""  # why the server ended it
        self.ended = asyncio.Event()  # the last model was taken
        self._context, self._gate = context, gate
        self._receipts: deque[bytes] = deque(maxlen=RECEIPTS)
        self._model: ModelLetter | None = None
        self._queued: ModelLetter | None = None
        self._begun: ModelLetter | None = None
        self._withdrawn: ModelLetter | None = None
        self._end: bytes | None = None
        self._wake, self._more, self._dropped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._allowance = MESSAGES

    def post_receipt(self, content: bytes) -> None:
        """Send a receipt when there is time."""
        self._receipts.append(content)
        self._wake.set()

    def post_model(self, letter: ModelLetter) -> None:
        """Send a model in place of an earlier one that still waits, and read again what comes back."""
        self._model, self._allowance = letter, MESSAGES
        self._more.set()
        self._wake.set()

    def post_end(self, content: bytes) -> None:
        """Send the last model, and nothing after it."""
        self._model, self._end = None, content
        self._wake.set()

    def withdraw(self, letter: ModelLetter) -> None:
        """Do not begin to send this model any more."""
        self._withdrawn = letter
        if self._model is letter:
            self._model = None

    def waits_for_turn(self, letter: ModelLetter) -> bool:
        """Whether this model is held back by others that are on their way, and by nothing that the worker does."""
        return self._queued is letter and self._begun is not letter

    def drop(self, why: str) -> None:
        """End the stream, and say why."""
        self.closing = self.closing or why
        self._dropped.set()

    async def alive(self, steps: Coroutine[Any, Any, None]) -> BaseException | None:
        """Take these steps, unless the stream is dropped before. Give what was raised; nothing is raised here."""
        return await first_of(steps, self._waits(self._dropped))

    async def hello(self, seconds: float) -> bytes | None:
        """The first message; None if it does not come in time."""
        try:
            async with asyncio.timeout(seconds):
                content = await self._context.read()
        except TimeoutError:
            return None
        return content if isinstance(content, bytes) else None

    async def say(self, content: bytes) -> None:
        """Send a short message now."""
        async with asyncio.timeout(SHORT):
            await self._context.write(content)

    async def talk(self, on_message: OnMessage) -> None:
        """Read and write until the worker ends the stream, or has taken the end of the run."""
        error = await first_of(self._read(on_message), self._write())
        if error is not None:
            raise error

    async def _read(self, on_message: OnMessage) -> None:
        while True:
            while self._allowance <= 0:
                self._more.clear()
                await self._more.wait()
            self._allowance -= 1
            content = await self._context.read()
            if not isinstance(content, bytes):  # the end of the stream
                return
            await on_message(self, content)
            del content  # else each stream would hold its last message until the next one

    async def _write(self) -> None:
        while not self.ended.is_set():
            await self._wake.wait()
            self._wake.clear()
            while self._receipts:
                await self.say(self._receipts.popleft())
            if (letter := self._model) is not None:
                self._model, self._queued = None, letter
                if not await self._gate.send(partial(self._put, letter), letter.until):
                    self.drop("the model was not taken before the deadline")
            elif (last := self._end) is not None:
                until = asyncio.get_running_loop().time() + LONG
                if not await self._gate.send(partial(self._context.write, last), until):
                    return self.drop("the last model was not taken in time")
                self.ended.set()

    async def _put(self, letter: ModelLetter) -> None:
        if letter is self._withdrawn:  # its round is over: an answer would be charged in vain
            return
        self._begun = letter
        await self._context.write(letter.content)

    async def _waits(self, event: asyncio.Event) -> None:
        await event.wait()


async def first_of(*steps: Coroutine[Any, Any, None]) -> BaseException | None:
    """Run all until one ends, then cancel the others. Give what the one that ended raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next((task.exception() for task in done if not task.cancelled() and task.exception()), None)


GONE = (grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError)
"""What is raised where a peer has gone, or takes nothing."""
