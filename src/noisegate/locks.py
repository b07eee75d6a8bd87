"""Locks on files. The system unlocks a file when the process that locked it ends, however it ends."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from noisegate.checks import plain
from noisegate.errors import StoreError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The name of an empty file that is locked while a process writes to its folder. It is never removed: otherwise two
processes could hold locks on two files of the same name."""

_guard = threading.Lock()
"""Held while a thread reads or changes the two tables below."""


@dataclass
class _LockedFolder:
    """A folder that this process has locked. number: of the open file. users: how many runs write to it or below it."""

    number: int
    users: int = 0


_held: dict[Path, _LockedFolder] = {}
"""The folders that this process has locked, by absolute path."""

_written: set[Path] = set()
"""The folders that a run of this process writes to."""


def take(number: int, exclusive: bool) -> bool:
    """Lock an open file. False if another process holds its lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


@contextmanager
def alone(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Keep other writers out of a folder, which is made if need be, and out of the one that it is `within`.

    The folder that it is within may be locked by this process already: a command writes a run, and its reference
    into a folder below it.
    """
    own = folder.absolute()
    with _guard:
        if own in _written:
            raise _busy(folder)
        _written.add(own)
    try:
        with _entered(within) if within else nullcontext(), _entered(folder):
            yield
    finally:
        with _guard:
            _written.discard(own)


@contextmanager
def _entered(folder: Path) -> Iterator[None]:
    path = folder.absolute()
    with _guard:
        held = _held.get(path) or _LockedFolder(_locked(folder))
        _held[path] = held
        held.users += 1
    try:
        yield
    finally:
        with _guard:
            held.users -= 1
            if not held.users:
                del _held[path]
                os.close(held.number)


def _locked(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(f"{plain(folder)}: cannot be written ({error.strerror}); choose another --out") from None
    if not take(number, exclusive=True):
        os.close(number)
        raise _busy(folder)
    return number


def _busy(folder: Path) -> StoreError:
    return StoreError(f"{plain(folder)}: another process writes there; wait until it is done, or choose another --out")
