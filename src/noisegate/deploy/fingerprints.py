"""What two people compare by telephone, so that whoever carries their files can swap nothing that matters.

The fingerprint of a request covers the worker's name and both of its public keys: the TLS key, which opens the stream,
and the Ed25519 key, which signs uploads. The server's fingerprint covers its Ed25519 key and the certificate of the
authority, by which a worker knows the server when it dials. Each is a sha256 in hexadecimal, in groups of 8 digits.
"""

import hashlib
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from noisegate.checks import plain
from noisegate.errors import FederationError, StoreError
from noisegate.federation.certificates import requested

REQUEST, SERVER = b"noisegate fingerprint of a request\0", b"noisegate fingerprint of a server\0"


def own_fingerprint(name: str, tls: bytes, signing: bytes) -> str:
    """The fingerprint of a worker's request. tls: its own private key, as PEM. signing: its Ed25519 public key."""
    try:
        public = serialization.load_pem_private_key(tls, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise StoreError("the TLS key of this worker: is not a private key; make the request anew") from None
    return _of_request(name, public, signing)


def request_fingerprint(content: bytes, what: object = "request") -> str:
    """The fingerprint of a request as it arrived. FederationError if it is none."""
    owner = requested(content, what)
    return _of_request(owner.name, x509.load_pem_x509_csr(content).public_key(), owner.key)


def server_fingerprint(key: bytes, authority: bytes) -> str:
    """The fingerprint of a server. key: its Ed25519 public key. authority: the authority's certificate, as PEM."""
    return _grouped(SERVER + key + _one(authority, "the authority's certificate").public_bytes(_DER))


def one_certificate(pem: bytes, what: object) -> bytes:
    """A certificate written anew as PEM, so that nothing else is in it. FederationError unless it is exactly one.

    A second one after it would be believed by TLS, and no fingerprint would cover it.
    """
    return _one(pem, what).public_bytes(serialization.Encoding.PEM)


_DER = serialization.Encoding.DER


def _of_request(name: str, tls: Any, signing: bytes) -> str:
    # A name holds no zero byte, and an Ed25519 key has 32 bytes: no two requests are the same bytes.
    public = tls.public_bytes(_DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _grouped(REQUEST + name.encode() + b"\0" + signing + public)


def _one(pem: bytes, what: object) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, TypeError) as error:
        raise FederationError(f"{plain(what)}: is not a certificate ({plain(error)[:100]})") from None
    if len(found) != 1:
        raise FederationError(f"{plain(what)}: holds {len(found)} certificates; it must be one")
    return found[0]


def _grouped(content: bytes) -> str:
    digits = hashlib.sha256(content).hexdigest()
    return " ".join(digits[i : i + 8] for i in range(0, len(digits), 8))
