"""The server of a federation: the round of `protocol` between real machines, from the first model to the last."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor, nn

from noisegate.errors import FederationError, SpecError, StoreError
from noisegate.features import catalog_features
from noisegate.federation.auxiliary import read_auxiliary
from noisegate.federation.certificates import check_issued, check_pair, identity_of, read_certificate
from noisegate.federation.checkpoint import RunIdentity, ServerCheckpoint
from noisegate.federation.keys import SigningKey, read_private
from noisegate.federation.logs import OperatorsLog
from noisegate.federation.metrics import start_metrics
from noisegate.federation.roster import Roster
from noisegate.federation.serving import Files, Serving
from noisegate.federation.settings import ServerSettings
from noisegate.federation.store import StateFolder
from noisegate.federation.wire import Kind
from noisegate.locks import alone
from noisegate.models import build_model, check_module
from noisegate.protocol import Claims, expected_of
from noisegate.protocol import Server as Judge
from noisegate.streams import stream
from noisegate.vectors import FlatModel, Loss, cross_entropy

END_TIME = 10.0
"""Seconds that workers have to take the last model."""

STOP_TIME = 5.0
"""Seconds that the round in flight has to end when the server is told to stop. Then its number is lost."""

AT_ONCE = 2048
"""Examples that are examined at a time."""

Examples = tuple[Tensor, Tensor]


class Server:
    """One run of a federation. `serve` runs it to its end; `run` does so inside a program's own event loop.

    model: whose parameters are the first model, unless the run was begun already. auxiliary: the server's own examples
    (x, y), which never leave it. test: examples (x, y) for the accuracy. watch: called with the line of each judged
    round. hear: called with each line of the operators' log. A server that is started again goes on after the last
    checkpoint; the round in flight is lost, and its number is not used again.
    """

    def __init__(
        self,
        model: nn.Module,
        auxiliary: Examples,
        settings: ServerSettings,
        *,
        test: Examples | None = None,
        loss: Loss = cross_entropy,
    ) -> None:
        check_module(model)
        self.model = FlatModel(model, loss)  # the settings name the classes of a model of the catalog, which `of` makes
        self.settings, self.auxiliary, self.test = settings, auxiliary, test
        self.terms = settings.terms(self.model.d)
        self.watch: Callable[[dict[str, Any]], None] = lambda line: None
        self.hear: Callable[[Mapping[str, Any]], None] = lambda line: None
        self.port = 0
        """Where it listens, once it does."""
        self.end_time = END_TIME
        self._mechanism = self.terms.mechanism(self.model, auxiliary)
        self._aggregator = settings.build_aggregator()
        self._stopping = False
        self._serving: Serving | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.signal: int | None = None
        """The signal that stopped it."""

    @classmethod
    def of(cls, folder: Path) -> "Server":
        """The server of a folder with federation.toml, roster.toml, keys, certificates and auxiliary.npz."""
        settings = ServerSettings.read(folder / "federation.toml")
        features = catalog_features(settings.features)
        auxiliary, test = read_auxiliary(folder / "auxiliary.npz", settings.shape, settings.classes, features)
        seed = settings.seed if settings.seed is not None else int.from_bytes(os.urandom(16), "big")
        model = build_model(settings.model, settings.model_shape(), settings.classes, stream(seed, "weights"))
        return cls(model, auxiliary, settings, test=test)

    def serve(self) -> dict[str, Any] | None:
        """Run to the end, and give the result; None if a signal (SIGINT, SIGTERM) stopped it before."""
        return asyncio.run(self._with_signals())

    def stop(self) -> None:
        """Stop after the round in flight, or without it if it takes longer. Call it in the event loop's thread."""
        self._stopping = True
        if self._serving is not None and self._loop is not None:
            self._serving.reception.changed.set()
            self._loop.call_later(STOP_TIME, self._abandon)

    async def run(self) -> dict[str, Any] | None:
        """Run to the end, and give the result; None if it was stopped before. StoreError if its folder is of no use."""
        self._loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(3, thread_name_prefix="noisegate")
        try:
            with one_server(self.settings.state):
                return await self._run(pool)
        finally:
            pool.shutdown()

    async def _run(self, pool: ThreadPoolExecutor) -> dict[str, Any] | None:
        # RECOVER: read and check everything that an earlier process left.
        settings, credentials, key, roster = self.settings, *self._identity()
        store = StateFolder(settings.state, RunIdentity(self.terms, settings.settled_aggregator(), tuple(roster.keys)))
        now = Serving(settings, Files(store, OperatorsLog(store.append_log, self.hear), key), pool, self._judge)
        await now.in_thread(now.recover, self._first(len(roster.keys)), roster)
        self._serving, already = now, now.reception.next_round >= self.terms.rounds
        now.log.say("started", run=self.terms.run, round=now.reception.next_round, judged=now.checkpoint.judged)
        metrics = await start_metrics(settings.metrics, now.status) if settings.metrics else None
        watching = asyncio.ensure_future(now.watch_roster())
        try:
            self.port = await now.reception.start(settings.address(), credentials)

            # GATHER: wait a while for everyone; then a quorum is enough.
            if not already:
                await now.gather(self._stops)
            while now.reception.next_round < self.terms.rounds and await now.quorum(self._stops):
                await self._round(now)
            if self._stopping:
                now.log.say("stopped", round=now.checkpoint.round)
                return None

            # END: the last model to all, and what came of the run.
            return await self._end(now, already)
        finally:
            watching.cancel()
            if metrics is not None:
                metrics.close()
            await now.reception.stop()
            await asyncio.to_thread(pool.shutdown)  # whoever still writes does so before the files are closed
            store.close()
            self._serving = None

    async def _round(self, now: Serving) -> None:
        """One round, top to bottom."""
        reception, patience, began = now.reception, now.patience, time.monotonic()

        # LOG: from here on the number is used, whatever happens.
        round = reception.next_round
        model, digest = now.message(Kind.MODEL, round)
        await now.in_thread(now.store.log_round, round, digest)

        # BROADCAST, and COLLECT until all awaited have answered or are gone, or patience is at its end.
        collection = now.open(round, digest)
        reception.broadcast(collection, model, patience.longest())
        waited = await collection.wait(patience, enough=min(self.settings.quorum, len(reception.present())))
        unserved = reception.unserved()
        reception.close_round()
        patience.charge(waited)
        if collection.abandoned:
            return

        # JUDGE what arrived, and only that. Meanwhile it is written to the disk.
        seen = await now.in_thread(now.see, collection)
        places, judging = now.places(collection, seen), time.monotonic()
        writing = asyncio.ensure_future(now.in_thread(now.store.put_uploads, seen.uploads, places))
        judgement = asyncio.ensure_future(now.in_thread(now.judged, round, seen))
        await asyncio.wait({writing, judgement})  # until both have ended, whatever comes of them
        await writing
        found, taken = await judgement
        now.step(collection, found, places, unserved)
        accuracy = await now.in_thread(self._examine, now, round)
        judged = time.monotonic()

        # CHECKPOINT: once it is written, the round is over, and workers get their receipts.
        seconds = {"wait": waited, "judge": judged - judging}
        line = now.describe(collection, taken, accuracy)
        await now.in_thread(now.store.write_checkpoint, now.checkpoint)
        seconds["checkpoint"] = time.monotonic() - judged
        now.store.append_record(line | {"seconds": {name: float(f"{one:.6f}") for name, one in seconds.items()}})
        uploads = {row: one.digest for row, one in collection.answers.items() if one.word == "upload"}
        reception.acknowledge(round, uploads)
        now.seconds = time.monotonic() - began
        now.tell("collect")
        self.watch(line)

    async def _end(self, now: Serving, already: bool) -> dict[str, Any]:
        """Write the last model and the result, and let workers take it. already: the run was over when it started."""
        result = self._result(now)
        tensors = self.model.state(now.state.params)
        await now.in_thread(now.store.write_model, tensors)
        now.tell("done", now.why)
        content, _ = now.message(Kind.END, now.reception.next_round)
        await now.in_thread(now.store.write_result, result)
        await now.reception.end(content, self.end_time, everyone=already)
        return result

    def _result(self, now: Serving) -> dict[str, Any]:
        standing = now.checkpoint
        each = zip(now.names, standing.standings, standing.totals, strict=True)
        judged = max(1, standing.judged)
        return {
            "run": self.terms.run,
            "title": self.terms.title,
            "terms": self.terms.as_dict(),
            "aggregator": now.identity.aggregator,
            "epsilon": self.settings.epsilon,
            "delta": self.settings.delta,
            "rounds": self.terms.rounds,
            "judged": standing.judged,
            "accuracy": standing.accuracy,
            "stalled": standing.spent,
            "why": now.why,
            "workers": {
                name: {
                    "weight": totals.weight / judged,
                    "rounds": totals.rounds,
                    "counter": one.counter,
                    "left": one.left,
                }
                for name, one, totals in each
            },
        }

    def _identity(self) -> tuple[Any, SigningKey, Roster]:
        """(credentials, signing key, roster), which must belong together."""
        folder = self.settings.folder
        authority, chain = read_certificate(folder / "ca.pem"), read_certificate(folder / "server.pem")
        private, key = read_private(folder / "server.key"), SigningKey.read(folder / "signing.key")
        check_issued(chain, authority, folder / "server.pem")
        check_pair(chain, private, folder / "server.pem")
        if identity_of(chain, folder / "server.pem").key != key.public:
            raise FederationError("server.pem: names another Ed25519 key than signing.key; ask for a new certificate")
        credentials = grpc.ssl_server_credentials([(private, chain)], authority, require_client_auth=True)
        return credentials, key, Roster.read(folder / "roster.toml")

    def _judge(self, workers: int, claims: Claims = ()) -> Judge:
        settings = self.settings
        for name, value in (("believed_honest", settings.believed_honest), ("quorum", settings.quorum)):
            if value > workers:
                raise SpecError(f"{name} = {value}: must be at most the number of workers, {workers}")
        self._aggregator.check(workers)
        each = (self._mechanism, self._aggregator, *self.auxiliary, workers, settings.believed_honest, settings.rate)
        return Judge(*each, expected=expected_of(claims, settings.declared))

    def _first(self, workers: int) -> ServerCheckpoint:
        """Where a run begins. Its seed is drawn now, and kept."""
        seed = self.settings.seed
        seed = int.from_bytes(os.urandom(16), "big") if seed is None else seed
        return ServerCheckpoint.first(seed, self.model.initial(), workers)

    @torch.no_grad()
    def _examine(self, now: Serving, round: int) -> float | None:
        """The accuracy, in rounds in which it is taken."""
        due = (round + 1) % self.settings.evaluate_every == 0 or round + 1 >= self.terms.rounds
        if self.test is None or not due:
            return None
        x, y = self.test
        right = 0
        for some, labels in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True):
            right += int((self.model.scores(now.state.params, some).argmax(1) == labels).sum())
        now.checkpoint.accuracy = right / len(y)
        return now.checkpoint.accuracy

    async def _with_signals(self) -> dict[str, Any] | None:
        """`run`, stopped by SIGINT and SIGTERM where those can be taken."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                with suppress(NotImplementedError):
                    loop.add_signal_handler(number, self._on_signal, number)
        return await self.run()

    def _on_signal(self, number: int) -> None:
        self.signal = number
        self.stop()

    def _stops(self) -> bool:
        return self._stopping

    def _abandon(self) -> None:
        if self._serving is not None and self._serving.reception.collection is not None:
            self._serving.reception.collection.abandon()


@contextmanager
def one_server(state: Path) -> Iterator[None]:
    """Keep a second server out of a folder. The lock ends with the process, however that ends."""
    stack = ExitStack()
    try:
        stack.enter_context(alone(state))
    except StoreError as error:
        raise StoreError(f"{error}; two servers cannot share a folder") from None
    with stack:
        yield
