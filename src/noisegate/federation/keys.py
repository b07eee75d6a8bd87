"""Ed25519 keys: who signs what. A private key never leaves the folder that it was made in."""

import os
import re
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noisegate.checks import plain, shown
from noisegate.errors import SpecError, StoreError
from noisegate.files import read_whole, write_whole

MOST_PEM = 2**16
"""The largest file with keys or certificates that is read, in bytes."""

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""The name of a worker: what a certificate, the roster and every message of it say."""

EVERYONE = "all"
"""Stands where a message of the server is for all workers. No worker may have this name."""

PRIME = 2**255 - 19
ORDER_8 = 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
WEAK = (0, 1, PRIME - 1, PRIME, PRIME + 1, ORDER_8, PRIME - ORDER_8)
"""y of the points of small order. Under such a key anyone can sign, and 64 zeros are one."""


class SigningKey:
    """A private key. Its bytes are in no repr."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new one, of the operating system's entropy."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> "SigningKey":
        """The key in a PEM file. StoreError if there is none, or if others may read the file."""
        content = read_private(path)
        try:
            private = serialization.load_pem_private_key(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise StoreError(f"{plain(path)}: is not a private key ({plain(error)[:100]})") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise StoreError(f"{plain(path)}: is not an Ed25519 key")
        return cls(private)

    def write(self, path: Path) -> None:
        """Write the key, for its owner's eyes alone."""
        write_private(
            path,
            self._private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def sign(self, content: bytes) -> bytes:
        """The 64 bytes of its signature."""
        return self._private.sign(content)

    def __reduce__(self) -> str:
        raise TypeError("a private key is not sent or saved but by write()")


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the owner of this public key signed the content."""
    with suppress(InvalidSignature, ValueError):
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
        return True
    return False


def public_key(text: object, what: str = "key") -> bytes:
    """The 32 bytes of a public key from its 64 hexadecimal digits. SpecError if it is none."""
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
        raise SpecError(f"{what} = {shown(text)}: must be the 64 hexadecimal digits of an Ed25519 public key")
    key = bytes.fromhex(text)
    if int.from_bytes(key, "little") % 2**255 in WEAK:
        raise SpecError(f"{what} = {shown(text)}: is a key under which anyone can sign; give one that was generated")
    return key


def checked_name(name: object, what: str = "name") -> str:
    """The name of a worker. SpecError if it is none."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SpecError(
            f"{what} = {shown(name)}: must be 1 to 63 of a to z, 0 to 9 and -, beginning and ending with no -"
        )
    if name == EVERYONE:
        raise SpecError(f"{what} = {name!r}: stands for all workers; choose another name")
    return name


def read_private(path: Path) -> bytes:
    """The bytes of a file that its owner alone may read."""
    try:
        content = read_whole(path, MOST_PEM)
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: there is no such key; make one with `noisegate federation request`") from None
    if os.name == "posix" and mode & 0o077:
        raise StoreError(f"{plain(path)}: others may read this key (mode {mode & 0o777:o}); chmod 600 it")
    return content


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read."""
    mask = os.umask(0o077)
    try:
        write_whole(path, content)
    finally:
        os.umask(mask)
