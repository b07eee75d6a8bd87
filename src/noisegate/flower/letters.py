"""Short texts between the ServerApp and a ClientApp: what the server says is signed, whoever carries it."""

import json
from collections.abc import Iterable
from typing import Any

from noisegate.federation.keys import SigningKey, verify

CONTEXT = b"noisegate flower 1\0"
"""What every signed text begins with, so that a signature serves for nothing else."""

MOST_LETTER = 2**16
"""The longest text, in bytes."""

SIGNATURE = 64


def write_letter(key: SigningKey, kind: str, **text: Any) -> bytes:
    """A signed text. kind: what it is, so that it serves for nothing else."""
    body = json.dumps({"kind": kind, **text}, sort_keys=True).encode()
    return key.sign(CONTEXT + body) + body


def read_letter(content: bytes, kind: str, servers: Iterable[str]) -> dict[str, Any] | None:
    """A text of this kind that one of these servers (public keys in hexadecimal) signed; else None."""
    signature, body = content[:SIGNATURE], content[SIGNATURE:]
    if not any(verify(bytes.fromhex(key), signature, CONTEXT + body) for key in servers):
        return None
    found = read_text(body)
    return found if found is not None and found.get("kind") == kind else None


def read_text(content: bytes) -> dict[str, Any] | None:
    """The JSON object in these bytes, whoever wrote it; None if there is none. Nothing raises."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
