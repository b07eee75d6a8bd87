"""What travels between a worker and the server: a fixed header, then a body. docs/wire.md has it byte by byte.

Nothing here believes what it reads. `read` gives a message or a reason why it is none, and never raises. A message says
who sent it, in which run and round, and about which model; its signature covers all of that and the body.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from noisegate.federation.keys import EVERYONE as EVERYONE
from noisegate.federation.keys import NAME, SigningKey, verify

METHOD = "/noisegate.v1.Federation/Join"
"""The one gRPC method: a stream of messages each way."""

MAGIC = b"NGT1"
"""The first bytes of every message. The digit is the version of the format."""

HEADER = struct.Struct("<4sB3xQ32s32s64sQQ64s")
"""Magic, kind, round, run, digest, worker, counter, length of the body, signature: 224 bytes, little-endian."""

SIGNED = HEADER.size - 64
"""How many bytes of the header are signed."""

CONTEXT = b"noisegate wire 1\0"
"""What every signed text begins with, so that a signature serves for nothing else."""

NUMBER = np.dtype("<f4")
"""How a number of a model or an upload is written."""

MOST_TEXT = 2**16
"""The longest body that is no model and no upload, in bytes."""

NOBODY = bytes(32)
"""Stands where a message names no run or no digest."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1  # worker: here I am
    TERMS = 2  # server: what is asked of you, and how many uploads of yours I have
    MODEL = 3  # server: the model of a round
    UPLOAD = 4  # worker: its upload of that round
    RECEIPT = 5  # server: your upload of that round is in my state
    DECLINE = 6  # worker: nothing from me in that round
    LEAVE = 7  # worker: nothing from me any more in this run
    END = 8  # server: the run is over, with its last model
    REFUSAL = 9  # server: why the stream ends


VECTORS = (Kind.MODEL, Kind.UPLOAD, Kind.END)
"""The kinds whose body is a vector."""


@dataclass(frozen=True, eq=False)
class Message:
    """One message.

    round: of a model or what is said about it; in TERMS, the first that this worker may be asked for. run: 32 bytes.
    digest: sha256 of the model's body in MODEL, UPLOAD, DECLINE and END; of the upload's body in RECEIPT. worker: the
    name of the worker that it is from or to, or EVERYONE. counter: in TERMS and RECEIPT, how many uploads of this
    worker the server has. body: the vector, or JSON. ValueError if no message can say that.
    """

    kind: Kind
    worker: str
    run: bytes = NOBODY
    round: int = 0
    digest: bytes = NOBODY
    counter: int = 0
    body: bytes | memoryview = b""
    signature: bytes = bytes(64)

    def __post_init__(self) -> None:
        """`struct` cuts and fills what does not fit, and the wrong bytes would be signed."""
        if not NAME.fullmatch(self.worker) or [len(self.run), len(self.digest), len(self.signature)] != [32, 32, 64]:
            raise ValueError("worker, run, digest, signature: must be a name, 32, 32 and 64 bytes")
        if not (0 <= self.round < 2**64 and 0 <= self.counter < 2**64):
            raise ValueError(f"round, counter = {self.round}, {self.counter}: must be 0 or more and fit 8 bytes")
        if why := _wrong_length(self.kind, len(self.body)):
            raise ValueError(f"body: {why}")

    def signed_text(self) -> bytes:
        """What the signature is of: the context, the header but for its signature, the sha256 of the body."""
        return CONTEXT + self._header()[:SIGNED] + hashlib.sha256(self.body).digest()

    def signed(self, key: SigningKey) -> bytes:
        """The message as bytes, signed."""
        return b"".join((self._header()[:SIGNED], key.sign(self.signed_text()), self.body))

    def is_from(self, public: bytes) -> bool:
        """Whether the owner of this key signed it."""
        return verify(public, self.signature, self.signed_text())

    def vector(self) -> np.ndarray:
        """(d,) the body's numbers, as they came. They may be anything."""
        return np.frombuffer(self.body, NUMBER)

    def text(self) -> dict[str, Any] | None:
        """The body as a JSON object (RFC 8259 in UTF-8, finite numbers, no name twice); None if it is none."""
        if self.kind in VECTORS:
            return None
        try:
            found = json.loads(str(self.body, "utf-8"), object_pairs_hook=_once)
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()  # no NaN, 1e999 or half of a character
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _header(self) -> bytes:
        name = self.worker.encode()
        return HEADER.pack(
            *(MAGIC, self.kind, self.round, self.run, self.digest, name, self.counter, len(self.body), self.signature)
        )


def read(content: bytes) -> Message | str:
    """The message in these bytes, or in a few words why there is none. Whatever arrives, nothing is raised."""
    if not isinstance(content, bytes):
        return "not bytes"
    if len(content) < HEADER.size:
        return f"{len(content)} bytes, fewer than a header"
    magic, kind, round, run, digest, name, counter, length, signature = HEADER.unpack_from(content)
    if magic != MAGIC:
        return "not a message of this version"
    if content[5:8] != bytes(3):
        return "its reserved bytes are not 0"
    if kind not in Kind.__members__.values():
        return f"of an unknown kind, {kind}"
    if length != len(content) - HEADER.size:
        return f"{len(content) - HEADER.size} bytes of body, and it says {length}"
    if why := _wrong_length(kind, length):
        return why
    worker = name.rstrip(b"\0").decode("ascii", "replace")
    if not NAME.fullmatch(worker):
        return "its worker has no name"
    body = memoryview(content)[HEADER.size :]
    return Message(Kind(kind), worker, run, round, digest, counter, body, signature)


def _wrong_length(kind: int, length: int) -> str:
    """Why no body of this kind is so long; empty if one may be."""
    if kind not in VECTORS and length > MOST_TEXT:
        return f"{length} bytes of text, more than {MOST_TEXT}"
    if kind in VECTORS and length % NUMBER.itemsize:
        return f"{length} bytes of numbers, which are no whole number of them"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, if no name stands in it twice: readers differ in which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def say(kind: Kind, worker: str, key: SigningKey, text: dict[str, Any], **fields: Any) -> bytes:
    """A signed message with a JSON body."""
    body = json.dumps(text, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return Message(kind, worker, body=body, **fields).signed(key)


def body_of(vector: np.ndarray) -> bytes:
    """The numbers of a vector as they are written on the wire."""
    return np.ascontiguousarray(vector, NUMBER).tobytes()


def digest_of(body: bytes | memoryview) -> bytes:
    """The digest of a model or an upload."""
    return hashlib.sha256(body).digest()
