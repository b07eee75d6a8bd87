"""The server's part of message mode: the same steps, files and verdicts as on a stream, without one."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

from noisegate.errors import FederationError
from noisegate.federation import wire
from noisegate.federation.checkpoint import RunIdentity
from noisegate.federation.collect import Collection, Sender, why_of
from noisegate.federation.keys import SigningKey
from noisegate.federation.logs import OperatorsLog
from noisegate.federation.roster import Roster
from noisegate.federation.server import Server, one_server
from noisegate.federation.serving import Files, Serving
from noisegate.federation.store import StateFolder
from noisegate.federation.wire import NOBODY, Kind, Message
from noisegate.flower.host import ROSTER, SIGNING_KEY
from noisegate.flower.sealing import SealingKey, about_round

NO_STREAM = cast(Any, None)
"""Stands for the stream of a worker that Flower's messages reach."""


class MessageServer(Server):
    """A run whose messages others carry: `begin` a round, hand over what came, and `finish` it. `open` comes first."""

    def open(self) -> None:
        """RECOVER: read and check everything that an earlier process left, and keep others out."""
        settings, self._held = self.settings, ExitStack()
        with ExitStack() as held:
            held.enter_context(one_server(settings.state))
            key, self.roster = SigningKey.read(settings.folder / SIGNING_KEY), Roster.read(settings.folder / ROSTER)
            identity = RunIdentity(self.terms, settings.settled_aggregator(), tuple(self.roster.keys))
            store = StateFolder(settings.state, identity)
            held.callback(store.close)
            pool = ThreadPoolExecutor(1, thread_name_prefix="noisegate")
            held.callback(pool.shutdown)
            self.now = Serving(settings, Files(store, OperatorsLog(store.append_log), key), pool, self._judge)
            self.now.recover(self._first(len(self.roster.keys)), self.roster)
            self.sealing = SealingKey(key, bytes.fromhex(self.terms.run))
            self.now.log.say("started", run=self.terms.run, round=self.next_round, judged=self.now.checkpoint.judged)
            self._held = held.pop_all()

    def close(self) -> None:
        """Let others in."""
        self._held.close()

    @property
    def next_round(self) -> int:
        """The number of the round that comes next."""
        return self.now.reception.next_round

    @property
    def over(self) -> bool:
        """Whether all rounds of the run were played, or so many workers left that there is no quorum any more."""
        left = sum(bool(each.left) for each in self.now.checkpoint.standings)
        return self.next_round >= self.terms.rounds or self.now.n - left < self.settings.quorum

    def awaited(self) -> list[str]:
        """Who is asked in the next round: all who did not leave, and did not miss too many deadlines lately."""
        standings = zip(self.now.names, self.now.checkpoint.standings, strict=True)
        return [name for name, one in standings if one.awaited(self.next_round)]

    def staying(self) -> list[str]:
        """All who did not leave."""
        standings = zip(self.now.names, self.now.checkpoint.standings, strict=True)
        return [name for name, one in standings if not one.left]

    def begin(self, names: list[str]) -> bytes:
        """LOG a round number, and give the message with its model, for these workers."""
        round = self.next_round
        content, digest = self.now.message(Kind.MODEL, round)
        self.now.store.log_round(round, digest)
        self.collection: Collection = self.now.open(round, digest)
        self.collection.least = self.now.patience.least
        self._began = time.monotonic()
        self.now.reception.streams.clear()
        for name in names:
            row = self.now.names.index(name)
            self.now.reception.streams[row] = NO_STREAM
            self.collection.ask(row, wait=True)
        return content

    def terms_for(self, name: str) -> bytes:
        """The terms for a worker, signed, with how many uploads of it are here and which was the last."""
        row, run = self.now.names.index(name), bytes.fromhex(self.terms.run)
        standing, last = self.now.checkpoint.standings[row], self.now.checkpoint.digests[row]
        about = {"run": run, "round": self.next_round, "counter": standing.counter}
        digest = bytes.fromhex(last) if last else NOBODY
        return wire.say(Kind.TERMS, name, self.now.key, self.terms.as_dict(), **about, digest=digest)

    def finish(self, came: Mapping[str, bytes | None], gone: set[str]) -> dict[str, Any]:
        """COLLECT what came, JUDGE it, CHECKPOINT. The line of the round. Nothing that a worker sent raises.

        came: the envelope of each worker that replied; None if what it replied has none. gone: whom Flower could not
        reach, so that they missed no deadline.
        """
        now, collection = self.now, self.collection
        asyncio.run(self._take(came))
        for row in collection.awaited - {now.names.index(name) for name in gone}:
            collection.missed.add(row)
        for name in gone:
            now.reception.streams.pop(now.names.index(name), None)
        collection.closed = True
        waited = time.monotonic() - self._began
        now.patience.charge(waited)
        judging, seen = time.monotonic(), now.see(collection)
        places = now.places(collection, seen)
        now.store.put_uploads(seen.uploads, places)
        found, taken = now.judged(collection.round, seen)
        now.step(collection, found, places)
        accuracy, judged = self._examine(now, collection.round), time.monotonic()
        line = now.describe(collection, taken, accuracy)
        now.store.write_checkpoint(now.checkpoint)
        seconds = {"wait": waited, "judge": judged - judging, "checkpoint": time.monotonic() - judged}
        now.store.append_record(line | {"seconds": {name: round(one, 6) for name, one in seconds.items()}})
        now.tell("collect")
        if now.log.failure is not None:
            raise now.log.failure
        self.watch(line)
        return line

    def end(self) -> dict[str, Any]:
        """Write the last model and the result."""
        result = self._result(self.now)
        self.now.store.write_model(self.model.state(self.now.state.params))
        self.now.tell("done", self.now.why)
        self.now.store.write_result(result)
        return result

    async def _take(self, came: Mapping[str, bytes | None]) -> None:
        about = Message(Kind.DECLINE, "all", self.collection.run, self.collection.round, self.collection.digest)
        for name, envelope in came.items():
            sender = Sender(self.now.names.index(name), name, self.roster.keys[name])
            content = self.sealing.open(envelope, about_round(about, name)) if envelope is not None else None
            message = wire.read(content or b"")
            if isinstance(message, Message) and message.kind == Kind.LEAVE:
                self._leave(sender, message)
            else:
                await self.collection.take(sender, content or b"", self.now.pool)

    def _leave(self, sender: Sender, message: Message) -> None:
        if message.worker != sender.name or message.run != self.collection.run or not message.is_from(sender.key):
            return self.collection.ignore("unexpected")
        why = why_of(message) or "no reason given"
        self.now.checkpoint.standings[sender.row].left = why
        self.collection.leave(sender.row, why)
        self.now.log.say_of_peer("left", worker=sender.name, why=why)
        return None


def checked_quorum(server: MessageServer, online: list[str]) -> None:
    """FederationError if fewer workers than the quorum can be asked."""
    if len(online) < server.settings.quorum:
        raise FederationError(
            f"quorum = {server.settings.quorum}: {len(online)} workers can be reached; the run stops here and goes on "
            "where it stopped when it is started again"
        )
