"""The folder of a ledger: locked by one user, read by anyone, and checked against the outbox."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.federation.ledger_lines import FILE, OUTBOX, RESTORE, Book, read_book, read_file
from noisegate.federation.outbox import Mark, marks_in, read_message, runs_in, sync_folder
from noisegate.locks import LOCK, take

TRIES, PAUSE = 10, 0.1
"""How often a ledger is read that a worker may be writing to, and how long to wait in between, in seconds."""


def read_ledger(folder: Path, messages: bool = False) -> tuple[Book, list[Mark]]:
    """(what the ledger in a folder says, uploads in the outbox that it does not charge yet). It needs no lock.

    messages: whether the uploads themselves are checked too, and not only what stands above them. A worker may be
    writing at the same moment, so what looks wrong is looked at again before StoreError is raised.
    """
    for attempt in range(TRIES):
        try:
            book, uncharged = checked_book(folder)
            for mark in marks_in(folder) if messages else ():
                read_message(mark)
            break
        except StoreError:
            if attempt == TRIES - 1:
                raise
            time.sleep(PAUSE)
    if book is None:
        raise StoreError(f"{plain(folder)}: there is no ledger; a worker makes it when it joins")
    return book, uncharged


def checked_book(folder: Path) -> tuple[Book | None, list[Mark]]:
    """The ledger in a folder, checked against the outbox; None if neither was ever used."""
    runs, marks = runs_in(folder), marks_in(folder)  # before the ledger, which a worker writes to after the outbox
    content = read_file(folder)
    if content is None:
        if runs:
            where = plain(folder / OUTBOX)
            raise StoreError(f"{plain(folder / FILE)}: is missing, and {where} shows that there was one; {RESTORE}")
        return None, []
    book = read_book(content, folder)
    return book, uncharged_marks(book, folder, marks, runs)


def uncharged_marks(book: Book, folder: Path, marks: list[Mark], runs: list[str]) -> list[Mark]:
    """The uploads of the outbox that no line charges and the next ones can. StoreError if lines are missing."""
    where, uncharged = plain(folder / FILE), []
    lost = [run for run in runs if run not in book.runs]
    for mark in marks:
        if book.entries < mark.entry + mark.acknowledged or mark.run in lost:
            raise StoreError(
                f"{where}: has {book.entries} lines, and {plain(mark.path)} was made when there were at least "
                f"{mark.entry + mark.acknowledged}; lines are missing: {RESTORE}"
            )
        entry = book.runs[mark.run]
        charge = entry.charges.get(mark.round)
        if charge is None and not mark.acknowledged:
            uncharged += [mark] if mark.round > entry.last_round else []  # an older one can never be sent
        elif charge is None or (charge.model, charge.upload) != (mark.model, mark.upload):
            raise StoreError(
                f"{where}: charges another upload for round {mark.round} of run {mark.run[:12]} than "
                f"{plain(mark.path)} has; these two do not belong together: {RESTORE}"
            )
    if lost:
        raise StoreError(f"{where}: has no run {lost[0][:12]}, which has an outbox; lines are missing: {RESTORE}")
    return uncharged


def sync_names(folder: Path) -> None:
    """Force to the disk the names of a ledger and its outbox: whoever made them may have crashed before doing so."""
    outbox = folder / OUTBOX
    runs = [outbox / run for run in runs_in(folder)]
    for each in (*runs, *([outbox] if runs else []), folder, folder.absolute().parent):
        sync_folder(each)


@contextmanager
def locked(folder: Path, make: bool) -> Iterator[None]:
    """Keep every other user out, also those of this process."""
    try:
        if make and not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(folder.absolute().parent)
        number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(
            f"{plain(folder)}: cannot be used as the folder of a ledger ({error.strerror}); it must be a folder that "
            "this user may write to"
        ) from None
    try:
        if not take(number, exclusive=True):
            raise StoreError(
                f"{plain(folder)}: another process uses this ledger; wait until it ends, or stop it: a data set takes "
                "part in one place at a time"
            )
        yield
    finally:
        os.close(number)
