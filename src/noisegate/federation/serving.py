"""What a server holds while a run is on: its state, its files, who is connected.

`server.Server` says in which order its parts are used.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import SpecError
from noisegate.federation import record, wire
from noisegate.federation.checkpoint import NO_UPLOAD, RunIdentity, ServerCheckpoint
from noisegate.federation.collect import Collection
from noisegate.federation.keys import SigningKey
from noisegate.federation.logs import OperatorsLog
from noisegate.federation.memory import give_back
from noisegate.federation.patience import Patience
from noisegate.federation.reception import Reception
from noisegate.federation.roster import Roster
from noisegate.federation.settings import ServerSettings
from noisegate.federation.store import StateFolder
from noisegate.federation.tensors import finite
from noisegate.federation.wire import Kind, Message
from noisegate.protocol import Claims, Judgement, Received, ServerState, judge
from noisegate.protocol import Server as Judge
from noisegate.protocol.intake import received
from noisegate.streams import stream

SECOND = 1.0
"""How often the status is written, and how often a server that waits looks around, in seconds."""


@dataclass(frozen=True)
class Files:
    """What a run writes to, and says who it is with."""

    store: StateFolder
    log: OperatorsLog
    key: SigningKey


class Serving:
    """One run that is on. judge_of: makes what judges uploads, of the number of workers and their claimed sizes."""

    def __init__(
        self, settings: ServerSettings, files: Files, pool: Executor, judge_of: Callable[[int, Claims], Judge]
    ) -> None:
        self.settings, self.store, self.log, self.key = settings, files.store, files.log, files.key
        self.pool, self._judge_of = pool, judge_of
        self.state_name, self.why = "recover", ""
        self.fates: list[record.Fate] = []
        self.seconds: float | None = None
        self._told = 0.0
        self._roster_path, self._roster_time = settings.folder / "roster.toml", 0

    def recover(self, first: ServerCheckpoint, roster: Roster) -> None:
        """Read where the run stands. Nobody is connected yet."""
        self.checkpoint, uploads, next_round = self.store.recover(first)
        self.identity: RunIdentity = self.store.identity
        self.names, self.n = self.identity.names, len(self.identity.names)
        self.claims = roster.claims(self.names)
        self.judge = self._judge_of(self.n, self.claims)
        self.state = ServerState(self.checkpoint.params, self.checkpoint.aggregator, uploads)
        settings = self.settings
        self.patience = Patience(settings.deadline, settings.least, settings.stall, self.checkpoint.spent)
        terms, standings = self.identity.terms, self.checkpoint.standings
        self.reception = Reception(terms, self.names, self.key, roster, standings, self.log, self.pool)
        self.reception.digests = [bytes.fromhex(text) for text in self.checkpoint.digests]
        self.reception.next_round = next_round
        self._say_changes(roster)
        give_back(uploads.nbytes)

    async def gather(self, stopping: Callable[[], bool]) -> None:
        """Wait for all workers of the roster, for `gather` seconds at most."""
        until = time.monotonic() + self.settings.gather
        while not stopping() and self._expected() - self.reception.present() and time.monotonic() < until:
            self.tell("gather")
            await self.reception.wait_for_change(min(SECOND, until - time.monotonic()))
            self.look_at_roster()

    async def quorum(self, stopping: Callable[[], bool]) -> bool:
        """Wait for a quorum. False if there can be none any more, or the server is to stop."""
        self.look_at_roster()
        while not stopping() and len(self.reception.present()) < self.settings.quorum:
            left = sum(bool(each.left) for each in self.checkpoint.standings)
            if self.n - left < self.settings.quorum:
                self.why = f"{left} of {self.n} workers have left, so there is no quorum of {self.settings.quorum}"
                self.log.say("ended early", why=self.why)
                return False
            there = len(self.reception.present())
            self.tell("paused", f"{there} workers are connected, fewer than the quorum of {self.settings.quorum}")
            await self.reception.wait_for_change(SECOND)
            self.look_at_roster()
        self.tell("collect")
        return not stopping()

    def message(self, kind: Kind, round: int) -> tuple[bytes, bytes]:
        """(message, digest) with the current model, the same for everyone."""
        body = wire.body_of(self.state.params.numpy())
        digest = wire.digest_of(body)
        run = bytes.fromhex(self.identity.terms.run)
        return Message(kind, wire.EVERYONE, run, round, digest, body=body).signed(self.key), digest

    def open(self, round: int, digest: bytes) -> Collection:
        """The collection of a round, with fresh memory, which the system gives page by page as uploads arrive."""
        rows = torch.empty(self.n, self.identity.terms.parameters)
        return Collection(round, bytes.fromhex(self.identity.terms.run), digest, rows)

    def see(self, collection: Collection) -> Received:
        """What arrived, in a form that an aggregator can be shown."""
        give_back(collection.rows.nbytes)
        missing = collection.missing()
        for row, answer in collection.answers.items():
            if answer.word == "malformed":  # its row was never written, and is whatever lay in memory
                collection.rows[row] = torch.nan
        return received(collection.rows, missing if bool(missing.any()) else None)

    def places(self, collection: Collection, seen: Received) -> dict[int, int]:
        """Where uploads of this round are written: the slot of each row."""
        present = seen.present.tolist()
        rows = [row for row, answer in collection.answers.items() if answer.word == "upload" and present[row]]
        return {row: self.store.free_slot(self.checkpoint, row) for row in rows}

    def judged(self, round: int, seen: Received) -> tuple[Judgement, bool]:
        """The judgement, and whether its step was taken. One that is not finite is not: the model stays as it was."""
        ties = ties_of(self.checkpoint.seed, self.identity.terms.run, round, self.n)
        before = self.state
        found = judge(self.judge, before, seen, ties)
        after = found.state
        if finite(after.params) and all(map(finite, after.aggregator.values())):
            return found, True
        return Judgement(found.verdict, ServerState(before.params, before.aggregator, after.received)), False

    def step(
        self, collection: Collection, found: Judgement, places: Mapping[int, int], unserved: Set[int] = frozenset()
    ) -> None:
        """Take over what came of a round. It is durable once the checkpoint is written.

        unserved: the rows of workers that the model was never sent to, who missed no deadline.
        """
        self.state, standing = found.state, self.checkpoint
        for row, answer in collection.answers.items():
            if answer.word in ("upload", "malformed"):
                standing.slots[row] = places.get(row, NO_UPLOAD)
                standing.digests[row] = answer.digest.hex() if row in places else ""
            if answer.word == "upload":
                standing.standings[row].counter += 1
                standing.standings[row].answered()
        for row in collection.missed - unserved:
            standing.standings[row].missed(collection.round)
        connected = self.reception.streams.__contains__
        self.fates = record.fates(collection, found.verdict, connected, standing.standings)
        self.fell_back = found.verdict.fell_back
        record.add_up(standing.totals, self.fates)
        standing.params, standing.aggregator = found.state.params, dict(found.state.aggregator)
        standing.round, standing.judged, standing.spent = collection.round, standing.judged + 1, self.patience.spent
        self.reception.next_round = collection.round + 1

    def describe(self, collection: Collection, taken: bool, accuracy: float | None) -> dict[str, Any]:
        """The line of a judged round, which the next checkpoint carries: a crash cannot take it from the record."""
        ignored = collection.ignored + self.reception.ignored
        self.reception.ignored.clear()
        note = None if taken else "the step was not finite; the model stays as it was"
        fallen = True if self.fell_back is not None and bool(self.fell_back) else None
        more = {"accuracy": accuracy, "note": note, "fell_back": fallen}
        line = record.line_of(collection, self.names, self.fates, ignored, **more)
        self.checkpoint.line = line
        return line

    async def watch_roster(self) -> None:
        """Look at the roster every second, also while a round is open."""
        while True:
            await asyncio.sleep(SECOND)
            self.look_at_roster()

    def look_at_roster(self) -> None:
        """Read the roster again if its file has changed. One that cannot be read is not believed."""
        try:
            changed = self._roster_path.stat().st_mtime_ns
        except OSError:
            changed = -1
        if changed == self._roster_time:
            return
        self._roster_time = changed  # at the first look too: it may have changed since the server read it
        try:
            roster = Roster.read(self._roster_path)
        except SpecError as error:
            self.log.say("roster not believed", why=str(error), then="the roster of before is used")
            return
        self._say_changes(roster)
        self.reception.use_roster(roster)

    def tell(self, state: str, why: str = "") -> None:
        """Write the status, if it changed or the last one is old."""
        if self.log.failure is not None:
            raise self.log.failure
        now = time.monotonic()
        if state == self.state_name and now - self._told < SECOND:
            return
        if state != self.state_name:
            self.log.say(state, why=why)
        self.state_name, self.why, self._told = state, why, now
        self.store.write_status(self.status())

    def status(self) -> dict[str, Any]:
        """What the server is doing, and how each worker stands."""
        standing = self.checkpoint
        each = zip(self.names, standing.standings, standing.totals, strict=True)
        last = self.fates or [{"status": "missing", "detail": "no round yet"}] * self.n
        workers = {
            name: {
                **last[row],
                "rounds": dict(totals.rounds),
                "weight_total": totals.weight,
                "counter": one.counter,
                "k": one.k,
                "until": one.until,
                "left": one.left,
                "connected": row in self.reception.streams,
            }
            for row, (name, one, totals) in enumerate(each)
        }
        return {
            "time": time.time(),
            "state": self.state_name,
            "why": self.why,
            "run": self.identity.terms.run,
            "title": self.identity.terms.title,
            "round": standing.round,
            "rounds": self.identity.terms.rounds,
            "judged": standing.judged,
            "connected": [self.names[row] for row in sorted(self.reception.streams)],
            "accuracy": standing.accuracy,
            "stall_left": self.patience.left,
            "seconds": self.seconds,
            "workers": workers,
        }

    async def in_thread(self, step: Callable[..., Any], *given: Any) -> Any:
        """Run a step in a thread, so that streams live on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, step, *given)

    def _expected(self) -> set[int]:
        """The rows of the workers that may still come."""
        known = self.reception.roster.keys
        standings = self.checkpoint.standings
        return {row for row, name in enumerate(self.names) if name in known and not standings[row].left}

    def _say_changes(self, roster: Roster) -> None:
        added = [name for name in roster.keys if name not in self.names]
        if added:
            self.log.say("roster", added=plain(", ".join(added)), then="they can take part in the next run")
        if removed := [name for name in self.names if name not in roster.keys]:
            self.log.say("roster", removed=plain(", ".join(removed)), then="they stay missing in this run")
        known = [name for name in self.names if name in roster.keys]
        if roster.claims(known) != [self.claims[self.names.index(name)] for name in known]:
            self.log.say("roster", sizes="changed", then="they count from the next start of the server on")


def ties_of(seed: int, run: str, round: int, workers: int) -> Tensor:
    """(n,) the order by which equal scores are ranked in a round: it can be drawn again, and nobody knows it before."""
    return torch.randperm(workers, generator=stream(seed, f"ties/{run}", round))
