"""Uploads in envelopes that the server alone can open, for a transport that others can read.

In message mode an upload passes through the SuperLink. It is sealed: X25519 between a key that the worker makes for
this one upload and the server's key of the run, HKDF with SHA-256, ChaCha20-Poly1305. The server's sealing key is
signed by its Ed25519 key, so that a worker knows whose it is.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from noisegate.federation.keys import SigningKey, verify
from noisegate.federation.wire import Message

CONTEXT = b"noisegate seal 1\0"
"""What every signed text and every derived key begins with, so that neither serves for anything else."""

PUBLIC = 32
TAG = 16
NONCE = bytes(12)  # every envelope has a key of its own


class SealingKey:
    """The server's private key of one run. It is nowhere but in this process: who comes later cannot open old uploads.

    stated: its public half, signed by the server for this run, 96 bytes.
    """

    def __init__(self, signing: SigningKey, run: bytes) -> None:
        self._private = X25519PrivateKey.generate()
        public = self._private.public_key().public_bytes_raw()
        self.stated = public + signing.sign(CONTEXT + run + public)

    def open(self, envelope: bytes, about: bytes) -> bytes | None:
        """What is in an envelope that was sealed `about` the same; None if it is none. Nothing raises."""
        if len(envelope) < PUBLIC + TAG:
            return None
        sender, public = envelope[:PUBLIC], self.stated[:PUBLIC]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(sender))
            return ChaCha20Poly1305(_key(shared, sender, public)).decrypt(NONCE, envelope[PUBLIC:], about)
        except (InvalidTag, ValueError):  # the latter: a point of small order
            return None

    def __reduce__(self) -> str:
        raise TypeError("a sealing key is not sent or saved")


def sealing_key(stated: bytes, server: bytes, run: bytes) -> bytes | None:
    """The public sealing key in these 96 bytes, if this server signed it for this run; else None."""
    public, signature = stated[:PUBLIC], stated[PUBLIC:]
    if len(stated) != PUBLIC + 64 or not verify(server, signature, CONTEXT + run + public):
        return None
    return public


def seal_to(public: bytes, content: bytes, about: bytes) -> bytes:
    """An envelope that the owner of this key can open. about: what both know it to be about; it is not in it."""
    once = X25519PrivateKey.generate()
    sender = once.public_key().public_bytes_raw()
    shared = once.exchange(X25519PublicKey.from_public_bytes(public))
    return sender + ChaCha20Poly1305(_key(shared, sender, public)).encrypt(NONCE, content, about)


def _key(shared: bytes, sender: bytes, public: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=CONTEXT + sender + public).derive(shared)


def about_round(model: Message, worker: str) -> bytes:
    """What the envelope of a worker's answer to a model is about."""
    return model.run + model.round.to_bytes(8, "little") + model.digest + worker.encode()
