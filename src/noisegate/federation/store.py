"""The server's state folder. Each durable step is one function here: a test can end the process between any two.

rounds.log is appended to before a model is sent: a number that stands there is never used again. The last line may be
torn by a crash. Its number was probably never sent, but may have been, so it counts as used and is skipped.

uploads.bin has two places for each worker. A new upload goes to the one that the last checkpoint does not use, and the
checkpoint that is written afterwards says which one holds: so the file is never copied, and a crash leaves every upload
that the last checkpoint knows of as it was.

rounds.jsonl, status.json and log.jsonl are for people. Nothing depends on them, so they are not synced: a power cut may
take their last lines.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.federation.checkpoint import NO_UPLOAD, RunIdentity, ServerCheckpoint, read_checkpoint
from noisegate.federation.tensors import blocks, damaged, finite, read_all, sync_folder, write_all
from noisegate.files import count, parse, read_whole, write_whole

LOG, CHECKPOINT, UPLOADS, RECORD = "rounds.log", "checkpoint.safetensors", "uploads.bin", "rounds.jsonl"
OPERATORS_LOG, STATUS, MODEL, RESULT = "log.jsonl", "status.json", "model.safetensors", "result.json"

MOST_LOG = 2**31
"""The largest log of rounds that is read, in bytes."""


class StateFolder:
    """The files of one run of n workers with d parameters. Its user holds the folder's lock."""

    def __init__(self, folder: Path, identity: RunIdentity) -> None:
        self.folder, self.identity = folder, identity
        self.d = identity.terms.parameters
        self._numbers: dict[str, int] = {}

    def recover(self, first: ServerCheckpoint) -> tuple[ServerCheckpoint, Tensor, int]:
        """(checkpoint, (n, d) last uploads, the next round number). `first` is written if nothing was begun here.

        StoreError if anything is damaged, missing or of another run. It never begins anew where something was begun.
        """
        try:
            for folder in (self.folder, self.folder.absolute().parent):  # an earlier process may have crashed before it
                sync_folder(folder)
        except OSError as error:
            raise unwritable(self.folder, error) from None
        used = self._used()
        try:
            checkpoint, self.identity = read_checkpoint(self.folder / CHECKPOINT, self.identity)
        except FileNotFoundError:
            if used >= 0 or (self.folder / UPLOADS).exists():
                raise StoreError(
                    f"{plain(self.folder / CHECKPOINT)}: is missing, and a run was begun here; put back a copy of the "
                    "whole state folder, or begin a new run with a new run id in an empty one"
                ) from None
            self.write_checkpoint(checkpoint := first)
        if used < checkpoint.round:
            raise damaged(self.folder / LOG, f"it ends before round {checkpoint.round}, which was judged")
        uploads = self._read_uploads(checkpoint)
        if self._trim_record(checkpoint.round) < checkpoint.round and checkpoint.line:
            self.append_record(checkpoint.line)
        return checkpoint, uploads, used + 1

    def close(self) -> None:
        """Close its files."""
        for each in self._numbers.values():
            os.close(each)
        self._numbers.clear()

    def log_round(self, round: int, digest: bytes) -> None:
        """Note that a round number is used for a model. Only after this may the model be sent."""
        self._append(LOG, {"round": round, "digest": digest.hex()}, sync=True)

    def free_slot(self, checkpoint: ServerCheckpoint, row: int) -> int:
        """The place of a worker that the last checkpoint does not use."""
        return 1 if checkpoint.slots[row] == 0 else 0

    def put_upload(self, row: int, slot: int, upload: Tensor) -> None:
        """Write a worker's upload to one of its places."""
        path, offset = self.folder / UPLOADS, self._offset(row, slot)
        try:
            number = self._open(UPLOADS, os.O_RDWR | os.O_CREAT)
            for block in blocks(upload):
                write_all(number, block, offset)
                offset += len(block)
        except OSError as error:
            raise unwritable(path, error) from None

    def sync_uploads(self) -> None:
        """Write the uploads to the disk."""
        try:
            getattr(os, "fdatasync", os.fsync)(self._open(UPLOADS, os.O_RDWR | os.O_CREAT))  # not all have it
        except OSError as error:
            raise unwritable(self.folder / UPLOADS, error) from None

    def put_uploads(self, rows: Tensor, places: Mapping[int, int]) -> None:
        """Write the uploads of a round, and sync them. places: the slot of each row that is written."""
        for row, slot in places.items():
            self.put_upload(row, slot, rows[row])
        if places:
            self.sync_uploads()

    def write_checkpoint(self, checkpoint: ServerCheckpoint) -> None:
        """Write where the server stands. Once it returns, the round is judged, also after a power cut."""
        checkpoint.write(self.folder / CHECKPOINT, self.identity)

    def append_record(self, line: Mapping[str, Any]) -> None:
        """Add a round to the record."""
        self._append(RECORD, line)

    def append_log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the operators' log."""
        self._append(OPERATORS_LOG, line)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Write what the server is doing. Readers see one whole file or the next."""
        path, part = self.folder / STATUS, self.folder / f".{STATUS}.part"
        try:
            part.write_text(json.dumps(status))
            part.replace(path)
        except OSError as error:
            raise unwritable(path, error) from None

    def write_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the last model, tensor by tensor."""
        from safetensors.torch import save

        write_whole(self.folder / MODEL, save({name: value.clone() for name, value in tensors.items()}))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write what came of the run: the last file."""
        write_whole(self.folder / RESULT, (json.dumps(result, indent=2) + "\n").encode())

    def _used(self) -> int:
        """The largest round number that may have been used; -1 if none. A torn last line is written anew."""
        path = self.folder / LOG
        try:
            lines = read_whole(path, MOST_LOG).split(b"\n")
        except FileNotFoundError:
            return -1
        torn = lines.pop() != b""
        used = -1
        for i, line in enumerate(lines):
            found = _logged(line, path)
            if found is None or found <= used:
                if i < len(lines) - 1 or found is not None or torn:
                    raise damaged(path, f"line {i + 1} is no round")
                torn = True
                del lines[i]
                break
            used = found
        if torn:  # in the middle of a write: whether its number was sent is not known
            used += 1
            lines.append(json.dumps({"round": used, "digest": ""}).encode())
            write_whole(path, b"\n".join(lines) + b"\n")
        return used

    def _trim_record(self, last: int) -> int:
        """The last round in the record; -1 if none. What comes after the checkpoint, or is half a line, is cut off."""
        path = self.folder / RECORD
        try:
            content = read_whole(path, MOST_LOG)
        except FileNotFoundError:
            return -1
        found, end = -1, len(content)
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            read = _logged(content[begin:end], path) if content[end - 1 : end] == b"\n" else None
            if read is not None and read <= last:
                found = read
                break
            end = begin
        if end < len(content):
            write_whole(path, content[:end])
        return found

    def _read_uploads(self, checkpoint: ServerCheckpoint) -> Tensor:
        """(n, d) the last uploads, zeros where there are none."""
        rows = torch.zeros(len(checkpoint.slots), self.d)
        path = self.folder / UPLOADS
        kept = [row for row, slot in enumerate(checkpoint.slots) if slot != NO_UPLOAD]
        if not kept:
            return rows
        try:
            with path.open("rb", buffering=0) as file:
                for row in kept:
                    file.seek(self._offset(row, checkpoint.slots[row]))
                    summed = hashlib.sha256()
                    for block in blocks(rows[row]):
                        if not read_all(file, block):
                            raise damaged(path, "cut off")
                        summed.update(block)
                    if summed.hexdigest() != checkpoint.digests[row]:
                        raise damaged(path, f"the upload of {self.identity.names[row]} has another sha256")
                    if not finite(rows[row]):
                        raise damaged(path, f"the upload of {self.identity.names[row]} is not finite")
        except OSError as error:
            raise damaged(path, str(error.strerror)) from None
        return rows

    def _offset(self, row: int, slot: int) -> int:
        return (2 * row + slot) * 4 * self.d

    def _append(self, name: str, line: Mapping[str, Any], sync: bool = False) -> None:
        try:
            new = sync and name not in self._numbers
            number = self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            write_all(number, memoryview(json.dumps(line).encode() + b"\n"))
            if sync:
                os.fsync(number)
            if new:
                sync_folder(self.folder)
        except OSError as error:
            raise unwritable(self.folder / name, error) from None

    def _open(self, name: str, flags: int) -> int:
        if name not in self._numbers:
            self._numbers[name] = os.open(self.folder / name, flags, 0o600)
        return self._numbers[name]


def read_rounds(path: Path) -> Sequence[dict[str, Any]]:
    """The lines of a record, oldest first. A last line that is being written is left out."""
    lines = read_whole(path, MOST_LOG).split(b"\n")[:-1]
    return [found for line in lines if isinstance(found := parse(line, path), dict)]


def _logged(line: bytes, path: Path) -> int | None:
    """The round of a line; None if it is no line."""
    try:
        found = parse(line, path)
    except StoreError:
        return None
    round = found.get("round") if isinstance(found, dict) else None
    return round if count(round) else None


def unwritable(path: Path, error: OSError) -> StoreError:
    """The error for a file that cannot be written."""
    return StoreError(
        f"{plain(path)}: cannot be written ({error.strerror}); make room or give access, then start the server again"
    )
