"""The ledger of a data set: every round that it was used in, across runs and servers. It never under-counts.

A round is charged before its upload leaves: the upload lies in the outbox, then a line is appended here and forced to
the disk, then it is sent. Whatever cannot be read as it was written stops the worker. docs/ledger.md has the format.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from noisegate.checks import plain, refuse, shown
from noisegate.errors import StoreError
from noisegate.federation.ledger_folder import checked_book, locked, sync_names, uncharged_marks
from noisegate.federation.ledger_lines import (
    FILE,
    OUTBOX,
    VERSION,
    Book,
    Charge,
    RunEntry,
    canonical,
    fingerprint_of,
    is_digest,
    read_book,
    read_file,
)
from noisegate.federation.outbox import Outbox, marks_in, runs_in, sync_folder
from noisegate.federation.spending import Spending, most_rounds, price, price_of_choices
from noisegate.federation.terms import Terms
from noisegate.files import count, parse, write_whole
from noisegate.privacy import Cost

BINARY = getattr(os, "O_BINARY", 0)


def now() -> str:
    """The time in UTC, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Ledger:
    """A ledger that is open, and locked against every other user. One thread uses it at a time.

    After an append that failed, every call raises: what is on the disk is not known until it is read again.
    """

    def __init__(self, folder: Path, book: Book, clock: Callable[[], str]) -> None:
        self.folder = folder
        self._book = book
        self._clock = clock
        self._unusable = ""
        self._file = -1
        self._held = ExitStack()

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], str] = now) -> "Ledger":
        """The ledger in a folder; a new one if there is neither a ledger nor an outbox.

        StoreError if it is torn, damaged, shorter than the outbox shows, locked or not writable. An upload in the
        outbox that no line charges yet is charged now: it never left, unless a line was lost. clock: for people.
        """
        with ExitStack() as held:
            held.enter_context(locked(folder, make=True))
            book, uncharged = checked_book(folder)
            if book is None:
                book = Book()
                first = book.line("ledger", clock(), version=VERSION, id=secrets.token_hex(16))
                book.add(first[:-1])
                write_whole(folder / FILE, first, part=f".{FILE}.part")
                sync_folder(folder)
            ledger = cls(folder, book, clock)
            ledger._open_file(held)
            sync_names(folder)
            for mark in uncharged:
                ledger.charge(mark.run, mark.round, mark.model, mark.upload)
            ledger._held = held.pop_all()
            return ledger

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unlock it. No call but this one works any more."""
        self._unusable = "is closed; open it again"
        self._held.close()

    @property
    def book(self) -> Book:
        """All that its lines say. Nobody may write to it."""
        self._check_usable()
        return self._book

    def note_data(self, fingerprint: str) -> bool:
        """Note what the data set is, if it is not what was noted last. Whether it is another than before.

        What was charged stays charged: whether the new data hold the old examples is not known.
        """
        try:
            fingerprint_of(fingerprint)
        except ValueError as error:
            raise refuse("fingerprint", fingerprint, str(error)) from None
        known = self.book.data
        if known and known[-1] == fingerprint:
            return False
        self._append("data", fingerprint=fingerprint)
        return len(known) > 1

    def begin(self, terms: Terms, server: bytes) -> None:
        """Note a run before its first round. StoreError if it was begun with other terms, or by another server."""
        told = parse(canonical(terms.as_dict()), "terms")  # as they are read back
        if not (entry := self.book.runs.get(terms.run)):
            self._append("run", terms=told, server=server.hex())
            return
        different = [name for name in told if told[name] != entry.terms.get(name)]
        if different or server.hex() != entry.server:
            what = f"other terms ({', '.join(different)})" if different else "the key of another server"
            raise StoreError(
                f"{plain(self.folder / FILE)}: run {terms.run[:12]} stands there with {what}; a run never changes: "
                "the server must give a new run its own id"
            )

    def charged(self, run: str) -> int:
        """How many rounds of a run were charged; 0 if it was never begun."""
        entry = self.book.runs.get(run)
        return len(entry.charges) if entry else 0

    def charge_of(self, run: str, round: int) -> Charge | None:
        """The charge for a round of a run; None if there is none."""
        entry = self.book.runs.get(run)
        return entry.charges.get(round) if entry else None

    def last_round(self, run: str) -> int:
        """The last round of a run that was charged; -1 if none was."""
        entry = self.book.runs.get(run)
        return entry.last_round if entry else -1

    def charge(self, run: str, round: int, model: str, upload: str) -> None:
        """Charge a round, which must be later than all that were charged in this run. Once this returns, it is on disk.

        To charge a round twice is an error, also with the same upload: `charge_of` says that it may be sent.
        """
        self._entry_for(run, round)
        if not is_digest(model) or not is_digest(upload):
            raise refuse("model, upload", (model, upload), "must be 64 hexadecimal digits each")
        self._append("charge", run=run, round=round, model=model, upload=upload)

    def costs(self) -> list[Cost]:
        """What everything that the data set took part in costs an example, run by run."""
        return [entry.cost() for entry in self.book.runs.values() if entry.charges]

    def spent(self, delta: float) -> float:
        """The epsilon of everything that was charged, at `delta`; inf if none is known. See `spending.price`."""
        return price(spendings(self.book), delta)

    def spent_by_choices(self, delta: float) -> float:
        """The same if later terms followed what came of earlier rounds. See `spending.price_of_choices`."""
        return price_of_choices(spendings(self.book), delta)[0]

    def affordable(self, terms: Terms, epsilon: float, delta: float) -> int:
        """How many more rounds of these terms, at most `terms.rounds`, keep what is spent at `epsilon` or less."""
        more = Spending(terms.cost(0), terms.parameters, terms.rounds)
        return most_rounds(spendings(self.book), more, epsilon, delta)

    def check_receipt(self, run: str, counter: int) -> None:
        """StoreError if the server has more uploads of this run than were charged: then this ledger is an old copy."""
        if counter > (charged := self.charged(run)):
            raise StoreError(
                f"{plain(self.folder / FILE)}: the server has {counter} uploads of run {run[:12]} from this worker, "
                f"and {charged} are charged here; it is an older copy, or another data set's: put back the newest one"
            )

    def outbox(self, run: str) -> Outbox:
        """The outbox of a run that was begun."""
        self._run(run)
        return Outbox(self.folder / OUTBOX / run, partial(self._entry_for, run))

    def _entry_for(self, run: str, round: int) -> int:
        """The number of the entry that would charge this round now. StoreError if it may not be charged."""
        if not count(round):
            raise refuse("round", round, "must be a whole number, 0 or more")
        if round <= (last := self._run(run).last_round):
            raise StoreError(
                f"{plain(self.folder / FILE)}: round {round} of run {run[:12]} cannot be charged after round {last}; "
                "rounds only go up, and one that was charged is sent again as it lies in the outbox, or not at all"
            )
        return self._book.entries

    def _run(self, run: str) -> RunEntry:
        if entry := self.book.runs.get(run):
            return entry
        raise StoreError(f"{plain(self.folder / FILE)}: has no run {shown(run)}; begin it first")

    def _check_usable(self) -> None:
        if self._unusable:
            raise StoreError(f"{plain(self.folder / FILE)}: {self._unusable}")

    def _open_file(self, held: ExitStack) -> None:
        """Open the file for appending, and force to the disk what was read: it may be in memory only."""
        try:
            self._file = os.open(self.folder / FILE, os.O_WRONLY | os.O_APPEND | BINARY)
            held.callback(os.close, self._file)
            os.fsync(self._file)
        except OSError as error:
            raise StoreError(
                f"{plain(self.folder / FILE)}: cannot be written ({error.strerror}); nothing is sent that cannot be "
                "charged: let this user write there, and make room"
            ) from None

    def _append(self, kind: str, **fields: Any) -> None:
        """Add a line, and force it to the disk. It counts in memory before: an append that fails ends all use."""
        self._check_usable()
        size, written, line = self._book.size, 0, self._book.line(kind, self._clock(), **fields)
        self._book.add(line[:-1])
        self._unusable = "an append to it was interrupted; start again, and it is read anew"
        try:
            here, there = os.fstat(self._file), (self.folder / FILE).stat()
            if here.st_size != size or (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                self._unusable = "was changed by someone else while it was open; stop them, and start again"
                self._check_usable()
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            self._unusable = f"could not be written ({error.strerror}); make room, let this user write, and start again"
            with suppress(OSError):  # what cannot be taken back is a torn line, which the next start sees
                if os.fstat(self._file).st_size == size + written:  # nobody else's bytes
                    os.ftruncate(self._file, size)
                    os.fsync(self._file)
            self._check_usable()
        self._unusable = ""


def spendings(book: Book) -> list[Spending]:
    """What a ledger says was spent, run by run, in their order."""
    runs = [entry for entry in book.runs.values() if entry.charges]
    return [Spending(entry.cost(), entry.terms["parameters"], entry.terms["rounds"]) for entry in runs]


def repair(folder: Path) -> tuple[int, int]:
    """Take a torn last line away: (how many bytes it had, how many uploads of the outbox were charged then).

    StoreError if anything else is wrong. The bytes are kept in a file beside the ledger.
    """
    with locked(folder, make=False):
        content = read_file(folder) or b""
        whole = content.rfind(b"\n") + 1
        book = read_book(content[:whole], folder)
        uncharged_marks(book, folder, marks_in(folder), runs_in(folder))
        if whole < len(content):
            write_whole(folder / f"{FILE}.torn", content[whole:])
            write_whole(folder / FILE, content[:whole], part=f".{FILE}.part")
    with Ledger.open(folder) as ledger:
        return len(content) - whole, ledger.book.entries - book.entries
