"""The ClientApp: enrolls, joins noisegate's stream, or answers one round by one message.

What a node replies says no more than a word where something is refused: Flower carries an exception's text to the
SuperLink, and such a text may name limits or paths that are the worker's own. The text goes to the node's own log.
"""

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from noisegate.checks import plain
from noisegate.errors import FederationError, NoisegateError
from noisegate.federation import wire
from noisegate.federation.ledger import Ledger
from noisegate.federation.participation import Participation
from noisegate.federation.worker import Worker
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.flower.grid import packet, part_of
from noisegate.flower.letters import MOST_LETTER
from noisegate.flower.node import Desk, node_folder
from noisegate.flower.sealing import about_round, seal_to, sealing_key

LETTER, ANSWER, TERMS, MODEL, SEAL, SEALED = "letter", "answer", "terms", "model", "seal", "sealed"
"""The parts of messages."""

ENROLL, JOIN, ROUND = "enroll", "join", "round"
"""The actions: query.enroll, query.join, train.round."""

OK, ENDED, LEFT, LOST, REFUSED, FAILED = "ok", "ended", "left", "lost", "refused", "failed"
"""What an answer says of itself."""

SILENCE = 300.0
"""Seconds without the server after which a ClientApp ends, unless the server says otherwise."""


def client_app(make: Callable[[Context], Worker], folder: Callable[[Context], Path] = node_folder) -> ClientApp:
    """A ClientApp for both modes. make: the worker at this node: model, data, policy. folder: where its files are."""
    app = ClientApp()

    @app.query(ENROLL)
    def enroll(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _say(OK, **_desk(make(context), folder(context)).request(_letter(message))))

    @app.query(JOIN)
    def join(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _join(make(context), folder(context), _letter(message)))

    @app.train(ROUND)
    def round(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _round(make(context), folder(context), message))

    return app


def _desk(worker: Worker, folder: Path) -> Desk:
    return Desk(folder, worker.policy)


def _letter(message: Message) -> bytes:
    letter = part_of(message, LETTER, MOST_LETTER)
    if letter is None:
        raise FederationError("a message has no letter in it; it is not of noisegate's ServerApp of this version")
    return letter


def _say(word: str, **text: Any) -> dict[str, bytes]:
    return {ANSWER: json.dumps({"answer": word, **text}).encode()}


def _reply(message: Message, act: Callable[[], dict[str, bytes]]) -> Message:
    """What the act gives, as a reply. What it raises stays in this node's log."""
    try:
        parts = act()
    except NoisegateError as error:
        print(f"noisegate: {plain(error)}", file=sys.stderr, flush=True)
        parts = _say(REFUSED)
    except Exception:  # noqa: BLE001  # Flower would send its text to the SuperLink
        traceback.print_exc()
        parts = _say(FAILED)
    return Message(packet(**parts), reply_to=message)


def _round(worker: Worker, folder: Path, message: Message) -> dict[str, bytes]:
    """Message mode: one round. The same steps as on a stream, and the answer in an envelope for the server alone."""
    most = wire.HEADER.size + 4 * worker.policy.parameters
    found = [part_of(message, name, most) for name in (TERMS, MODEL, SEAL)]
    terms, model = (wire.read(part) if part is not None else "missing" for part in found[:2])
    if isinstance(terms, str) or isinstance(model, str) or found[2] is None:
        raise FederationError("a message lacks terms, model or sealing key; it is not of noisegate's strategy")
    place, _ = _desk(worker, folder).accept(_letter(message), ROUND)
    with Ledger.open(place.ledger) as ledger:
        ledger.note_data(worker.fingerprint())
        holder = worker.holder(place, ledger)
        mine = Participation(holder, terms, worker.make(holder) if worker.make else None)
        public = sealing_key(found[2], mine.server, model.run)
        if public is None:
            raise FederationError("the sealing key is not signed by the server for this run; nothing is sent")
        answer = mine.answer(model)
        return {SEALED: seal_to(public, answer, about_round(model, place.name))}


def _join(worker: Worker, folder: Path, letter: bytes) -> dict[str, bytes]:
    """Stream mode: take part until the run ends, the budget is spent, or the server is silent for too long."""
    place, told = _desk(worker, folder).accept(letter, JOIN)
    silence = told.get("silence")
    limit = float(silence) if isinstance(silence, int | float) and 0 < silence < 1e6 else SILENCE
    return _say(asyncio.run(_until_silence(worker, place, limit)))


class Contact:
    """Since when a worker has not heard of its server. It is told what happens on the stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()

    def tell(self, event: str, /, **about: Any) -> None:
        """Note an event, and print it to the node's log."""
        print(f"noisegate: {event} {plain(about)}", flush=True)
        if event == "agreed":
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    def silence(self) -> float:
        """Seconds without the server; 0 while the stream is there."""
        return 0.0 if self._since is None else self._clock() - self._since


async def _until_silence(worker: Worker, place: WorkerFolder, limit: float) -> str:
    """How taking part ended: a SuperNode does one thing at a time, so a worker must not wait for ever."""
    contact = Contact()
    taking_part = asyncio.create_task(worker.take_part(place, contact.tell))
    while not taking_part.done() and contact.silence() < limit:
        await asyncio.wait({taking_part}, timeout=1.0)
    if taking_part.done():
        return LEFT if (await taking_part).ended == "left" else ENDED
    taking_part.cancel()
    await asyncio.gather(taking_part, return_exceptions=True)
    return LOST
