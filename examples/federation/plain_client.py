"""A worker without noisegate: docs/wire.md in forty lines. It says hello, checks terms and a model, and declines.

    python examples/federation/plain_client.py WORKER_FOLDER

The folder is that of `noisegate join`. Its data and its ledger are not looked at, since nothing of them is sent.
"""

import hashlib
import json
import queue
import struct
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import grpc
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

HEADER, HELLO, TERMS, MODEL, DECLINE, REFUSAL = struct.Struct("<4sB3xQ32s32s64sQQ64s"), 1, 2, 3, 6, 9
folder = Path(sys.argv[1])
settings = tomllib.loads((folder / "worker.toml").read_text())
name, trusted = settings["name"].encode(), tomllib.loads((folder / "policy.toml").read_text())["server"]
key = load_pem_private_key((folder / "signing.key").read_bytes(), None)


def signed_text(header: bytes, body: bytes) -> bytes:
    return b"noisegate wire 1\0" + header[:160] + hashlib.sha256(body).digest()


def say(kind: int, text: dict, round: int = 0, run: bytes = b"", digest: bytes = b"") -> None:
    body = json.dumps(text).encode()
    header = HEADER.pack(b"NGT1", kind, round, run, digest, name, 0, len(body), b"")
    outgoing.put(header[:160] + key.sign(signed_text(header, body)) + body)


def hear(wanted: int, to: bytes) -> tuple[int, bytes, bytes, int, bytes]:
    content = next(stream)
    magic, kind, round, run, digest, worker, counter, length, signature = HEADER.unpack_from(content)
    body = content[224:]
    for server in trusted:
        with suppress(InvalidSignature):
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(server))
            public.verify(signature, signed_text(content, body))
            if (magic, kind, worker.rstrip(b"\0"), length) == (b"NGT1", wanted, to, len(body)):
                return round, run, digest, counter, body
    sys.exit(f"not believed: {body[:200]!r}" if kind != REFUSAL else f"refused: {body!r}")


outgoing: queue.SimpleQueue = queue.SimpleQueue()
files = [(folder / file).read_bytes() for file in ("ca.pem", "worker.key", "worker.pem")]
options = [("grpc.max_receive_message_length", 2**31 - 1)]
with grpc.secure_channel(settings["server"], grpc.ssl_channel_credentials(*files), options) as channel:
    stream = channel.stream_stream("/noisegate.v1.Federation/Join")(iter(outgoing.get, None), timeout=60)
    say(HELLO, {"noisegate": "none"})
    first, run, _, counter, body = hear(TERMS, name)
    print(f"terms: {body.decode()}; next round {first}, uploads received {counter}")
    round, run, digest, _, body = hear(MODEL, b"all")
    print(f"model of round {round}: {len(body) // 4} numbers, digest right: {hashlib.sha256(body).digest() == digest}")
    say(DECLINE, {"why": "a plain client computes nothing"}, round, run, digest)
    outgoing.put(None)
    print(f"declined; the server sent {len(list(stream))} more messages")
