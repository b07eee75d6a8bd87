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
"""In a folder: empty, and locked while a process writes there. It stays: two processes could hold one that is removed
and made anew."""

_guard = threading.Lock()


@dataclass
class _LockedFolder:
    """A folder that this process has locked. users: how many of its runs write to it or below it."""

    number: int
    users: int = 0


_held: dict[Path, _LockedFolder] = {}
_written: set[Path] = set()
"""Folders that a run of this process writes to."""


def take(number: int, exclusive: bool) -> bool:
    """Lock an open file, if nobody else has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, where it is up to the user
    return True


@contextmanager
def alone(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Keep others out of a folder, which is made if need be, and out of the one that it is `within`.

    The folder that it is within may be this process's own already: a run and its
    reference, which lies below it, are one command's.
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
