"""What arrives in one round. Each message is checked before a number of it is kept, and nothing in it can raise.

A message that names another worker than its stream's certificate, or is not signed by that worker's key, is forged. One
that cannot be read, or has another length, is malformed. One of another run, round or model is stale; one after the
first valid upload is a duplicate; both are counted and change nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate.checks import plain
from noisegate.federation import wire
from noisegate.federation.checkpoint import MOST_WHY
from noisegate.federation.keys import verify
from noisegate.federation.patience import Patience
from noisegate.federation.wire import Kind, Message

SMALL = 2**18
"""Bytes that are summed at once. A larger message is summed in a thread, and meanwhile others are served."""

Clock = Callable[[], float]


class Sender(NamedTuple):
    """Whose stream a message came on, as the certificate says. row: its place among the workers. key: its own."""

    row: int
    name: str
    key: bytes


@dataclass(frozen=True)
class Answer:
    """What a worker answered in a round. word: upload, malformed, forged, declined or left. digest: of an upload."""

    word: str
    detail: str = ""
    digest: bytes = b""


class Collection:
    """The uploads of one round, from its broadcast until it is closed. All of it runs in the event loop's thread.

    rows: (n, d) space that uploads are written to as they arrive; other rows mean nothing. asked: to whom the model was
    sent. awaited: for whom the round still waits. missed: for whom it waited longer than `least`, and in vain.
    """

    def __init__(self, round: int, run: bytes, digest: bytes, rows: Tensor, clock: Clock = time.monotonic) -> None:
        self.round, self.run, self.digest, self.rows = round, run, digest, rows
        self.asked: set[int] = set()
        self.awaited: set[int] = set()
        self.missed: set[int] = set()
        self.answers: dict[int, Answer] = {}
        self.ignored: Counter[str] = Counter()
        self.uploads = 0  # valid ones that have arrived
        self.closed, self.abandoned = False, False
        self.least = 0.0
        self._clock, self._began, self._changed = clock, clock(), asyncio.Event()

    def missing(self) -> Tensor:
        """(n,) from whom nothing arrived that can be told to be theirs. What is malformed did arrive."""
        arrived = {row for row, answer in self.answers.items() if answer.word in ("upload", "malformed")}
        return torch.tensor([row not in arrived for row in range(len(self.rows))])

    def passed(self) -> float:
        """Seconds since the round began."""
        return self._clock() - self._began

    async def wait(self, patience: Patience, enough: int) -> float:
        """Wait until nobody is awaited any more, or as long as patience allows. Give the seconds that were waited.

        enough: with fewer uploads than that, the round stays open for `least` seconds, so that a round in which nobody
        is awaited does not end before anyone can answer.
        """
        self.least, longest = patience.least, patience.longest()
        while True:
            passed = self.passed()
            limit = longest if self.awaited else min(self.least, longest)
            if self.abandoned or passed >= limit or (not self.awaited and self.uploads >= enough):
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit - passed):
                    await self._changed.wait()
        self.closed = True
        self.missed |= self.awaited
        return passed

    async def take(self, sender: Sender, content: bytes, pool: Executor) -> None:
        """A message on the sender's stream, whatever it is."""
        message = wire.read(content)
        if isinstance(message, str):
            return self._answer(sender.row, Answer("malformed", message))
        if message.worker != sender.name:
            return self._answer(sender.row, Answer("forged", "names another worker"))
        if message.kind not in (Kind.UPLOAD, Kind.DECLINE):
            return self.ignore("unexpected")
        if not self._current(message):
            return self.ignore("stale")
        if self._has_upload(sender.row):
            return self.ignore("duplicate")
        text = await signed_text(message, pool)
        if not verify(sender.key, message.signature, text):
            return self._answer(sender.row, Answer("forged", "its signature is wrong"))
        if not self._current(message):  # closed while the message was summed
            return self.ignore("stale")
        if self._has_upload(sender.row):
            return self.ignore("duplicate")
        if message.kind == Kind.DECLINE:
            return self._answer(sender.row, Answer("declined", why_of(message)))
        if len(message.body) != self.rows.shape[1] * wire.NUMBER.itemsize:
            return self._answer(sender.row, Answer("malformed", f"{len(message.body)} bytes of numbers"))
        self.rows[sender.row].numpy()[:] = message.vector()
        return self._answer(sender.row, Answer("upload", digest=text[-32:]))

    def abandon(self) -> None:
        """Close the round without a judgement: the server is to stop."""
        self.abandoned = True
        self._changed.set()

    def ignore(self, word: str) -> None:
        """Count a message that changes nothing."""
        self.ignored[word] += 1

    def ask(self, row: int, wait: bool) -> None:
        """Note that a worker gets the model, and whether the round waits for it."""
        self.asked.add(row)
        if wait:
            self.awaited.add(row)

    def gone(self, row: int) -> None:
        """Note that a worker is not connected any more: nobody waits for it in this round."""
        self._release(row)

    def leave(self, row: int, why: str) -> None:
        """Note that a worker takes part no more."""
        self._answer(row, Answer("left", why))

    def _current(self, message: Message) -> bool:
        about = message.run, message.round, message.digest
        return not self.closed and about == (self.run, self.round, self.digest)

    def _has_upload(self, row: int) -> bool:
        return row in self.answers and self.answers[row].word == "upload"

    def _answer(self, row: int, answer: Answer) -> None:
        if self.closed or self._has_upload(row):
            return self.ignore("stale" if self.closed else "duplicate")
        self.answers[row] = answer
        self.uploads += answer.word == "upload"
        self._release(row, upload=answer.word == "upload")
        self._changed.set()
        return None

    def _release(self, row: int, upload: bool = False) -> None:
        """Wait for a worker no more. Whoever made the round wait longer than `least`, and in vain, has missed it."""
        if row in self.awaited and not upload and self.passed() > self.least:
            self.missed.add(row)
        if upload:
            self.missed.discard(row)
        self.awaited.discard(row)
        self._changed.set()


async def signed_text(message: Message, pool: Executor) -> bytes:
    """What the signature of a message is of. Its last 32 bytes are the sha256 of the body."""
    if len(message.body) <= SMALL:
        return message.signed_text()
    return await asyncio.get_running_loop().run_in_executor(pool, message.signed_text)


def why_of(message: Message) -> str:
    """The reason that a worker gave, as text that can be printed."""
    found = (message.text() or {}).get("why")
    return plain(found)[:MOST_WHY] if isinstance(found, str) else ""
