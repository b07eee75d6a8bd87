"""What a worker is about to send, kept until the server has it: the same bytes after a crash, and no others.

An upload lies here before the ledger charges it. Its file says which entry of the ledger that will be. So the outbox
shows whether a ledger that was cut lacks lines, and a ledger shows whether an upload may have left.

A file is one line of JSON with its own checksum, and then the bytes of the message.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.federation.ledger_lines import OUTBOX, is_digest
from noisegate.files import count, parse, read_whole, seal, unseal, write_whole

PENDING, LAST = "pending.bin", "last.bin"
"""The upload that was made last; the upload that the server acknowledged last."""

MOST_HEAD = 1024
"""The longest first line of a file, in bytes."""

REMOVE = "remove this file: its round stays charged, and the worker goes on with the next one"


@dataclass(frozen=True)
class Pending:
    """An upload that may have to be sent again. model: sha256 of the model's body. message: the whole bytes."""

    round: int
    model: str
    message: bytes


@dataclass(frozen=True)
class Mark:
    """The first line of an outbox's file. entry: the ledger's that charges it. upload: sha256 of the message."""

    path: Path
    entry: int
    round: int
    model: str
    upload: str
    size: int
    start: int

    @property
    def run(self) -> str:
        """The run that the upload is of."""
        return self.path.parent.name

    @property
    def acknowledged(self) -> bool:
        """Whether the server has it."""
        return self.path.name == LAST


class Outbox:
    """The outbox of one run. number: says which entry of the ledger will charge a round, or why none can."""

    def __init__(self, folder: Path, number: Callable[[int], int]) -> None:
        self.folder = folder
        self._number = number

    def put(self, message: bytes, round: int, model: str) -> None:
        """Keep an upload that is about to be charged. StoreError if its round was charged already, or a later one."""
        if not is_digest(model) or not message:
            raise ValueError("an upload has a message, and a model with a digest of 64 hexadecimal digits")
        upload = hashlib.sha256(message).hexdigest()
        head = {"entry": self._number(round), "round": round, "model": model, "upload": upload, "size": len(message)}
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for above in (self.folder.parent, self.folder.parent.parent):
                    sync_folder(above)
        except OSError as error:
            raise StoreError(
                f"{plain(self.folder)}: cannot be made ({error.strerror}); make room, or let this user write there"
            ) from None
        write_whole(self.folder / PENDING, seal(head, indent=None) + message, part=f".{PENDING}.part")

    def pending(self) -> Pending | None:
        """The upload that was put last, if the server has not acknowledged it. StoreError if it is damaged.

        It may be sent if the ledger's `charge_of` has a charge for its round.
        """
        mark = read_mark(self.folder / PENDING)
        return Pending(mark.round, mark.model, read_message(mark)) if mark else None

    def acknowledge(self, round: int) -> None:
        """The server has the upload of this round. Nothing happens if another one, or none, is pending."""
        mark = read_mark(self.folder / PENDING)
        if mark and mark.round == round:
            try:
                mark.path.replace(self.folder / LAST)
            except OSError as error:
                raise StoreError(
                    f"{plain(mark.path)}: cannot be renamed ({error.strerror}); let this user write there"
                ) from None

    def last(self) -> bytes | None:
        """The message of the last upload that the server acknowledged. StoreError if it is damaged."""
        mark = read_mark(self.folder / LAST)
        return read_message(mark) if mark else None


def read_mark(path: Path) -> Mark | None:
    """The first line of a file, checked; None if there is no such file."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise StoreError(f"{plain(path)}: is not a file; {REMOVE}")
        with path.open("rb") as file:
            line = file.readline(MOST_HEAD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be read ({error.strerror}); let this user read it") from None
    try:
        found = unseal(parse(line, path), path)
    except StoreError as error:
        raise StoreError(f"{error}; {REMOVE}") from None
    whole = all(count(found.get(name)) for name in ("entry", "round", "size"))
    if len(found) != 5 or not whole or not is_digest(found.get("model")) or not is_digest(found.get("upload")):
        raise StoreError(f"{plain(path)}: is damaged (its first line is not that of an upload); {REMOVE}")
    if about.st_size != len(line) + found["size"]:
        raise StoreError(f"{plain(path)}: is damaged ({about.st_size} bytes, not what it says); {REMOVE}")
    return Mark(path, start=len(line), **found)


def read_message(mark: Mark) -> bytes:
    """The message of a file whose first line is known."""
    try:
        message = read_whole(mark.path, mark.start + mark.size)[mark.start :]
    except FileNotFoundError:
        raise StoreError(f"{plain(mark.path)}: was taken away; start the worker again") from None
    if hashlib.sha256(message).hexdigest() != mark.upload:
        raise StoreError(f"{plain(mark.path)}: is damaged (its checksum does not fit); {REMOVE}")
    return message


def runs_in(folder: Path) -> list[str]:
    """The runs that have an outbox beside the ledger in `folder`."""
    try:
        return sorted(each.name for each in (folder / OUTBOX).iterdir() if is_digest(each.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"{plain(folder / OUTBOX)}: cannot be read ({error.strerror}); it must be a folder that this user may use"
        ) from None


def marks_in(folder: Path) -> list[Mark]:
    """The marks of all outboxes beside the ledger in `folder`, in the order of their entries."""
    # The pending one first: one that is acknowledged in between is then seen twice, and never missed.
    paths = [folder / OUTBOX / run / name for run in runs_in(folder) for name in (PENDING, LAST)]
    return sorted((mark for path in paths if (mark := read_mark(path))), key=lambda mark: mark.entry)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk. Windows and some file systems cannot, and need not."""
    if os.name != "posix":
        return
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise StoreError(
                f"{plain(folder)}: cannot be forced to the disk ({error.strerror}); use another disk"
            ) from None
