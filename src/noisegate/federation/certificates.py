"""Certificates: who may open a stream, and which Ed25519 key belongs to whom.

An authority signs requests. The private key of a certificate is made where it is used, and stays there: what travels is
the request, and the certificate that comes back. A certificate of this form has one common name, the worker's or the
server's, and says in its subject alternative names which Ed25519 key its owner signs with.
"""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from noisegate.checks import plain, shown
from noisegate.errors import FederationError, SpecError, StoreError
from noisegate.federation.keys import MOST_PEM, checked_name, public_key, read_private
from noisegate.files import read_whole
from noisegate.usual import DAYS

KEY_URI = "noisegate:key:"
"""What stands before the 64 hexadecimal digits of the Ed25519 key in a certificate."""

BACKDATED = datetime.timedelta(days=2)
"""How long before it was made a certificate is valid, so that a clock off by a day does not matter."""

AUTHORITY_DAYS = 3650
"""How long the certificate of an authority is valid unless told otherwise."""

MOST_DAYS = 3650
MOST_HOSTS = 20
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = re.compile(rf"{LABEL}(?:\.{LABEL})*")


@dataclass(frozen=True)
class CertificateOwner:
    """Who a certificate says its owner is. key: the Ed25519 public key. serial: the certificate's own number."""

    name: str
    key: bytes
    serial: int


@dataclass(frozen=True)
class Authority:
    """Who signs certificates: its own one and its private key, as PEM. The key is in no repr."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Authority()"

    @classmethod
    def read(cls, folder: Path) -> "Authority":
        """The authority in a folder: ca.pem and ca.key, which must belong together."""
        found = cls(read_certificate(folder / "ca.pem"), read_private(folder / "ca.key"))
        check_pair(found.certificate, found.key, str(folder))
        return found


def make_authority(name: str = "noisegate authority", days: int = AUTHORITY_DAYS) -> Authority:
    """A new authority, which signs certificates and no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), key_bytes(key))


def make_request(name: str, signing: bytes, hosts: Sequence[str] = (), key: bytes | None = None) -> tuple[bytes, bytes]:
    """A TLS key and a request for a certificate, both as PEM.

    signing: the 32 bytes of the Ed25519 public key. hosts: of a server, the names and addresses that workers reach it
    by. key: the TLS key, if there is one already.
    """
    checked_name(name)
    if len(signing) != 32:
        raise SpecError(f"signing key of {name}: must be the 32 bytes of an Ed25519 public key")
    private = ec.generate_private_key(ec.SECP256R1()) if key is None else _tls_key(key, "the TLS key")
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(KEY_URI + signing.hex())]
    if len(hosts) > MOST_HOSTS:
        raise SpecError(f"hosts: {len(hosts)} of them; a certificate names at most {MOST_HOSTS}")
    names += [_host(host) for host in hosts]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(private, hashes.SHA256())
    )
    return key_bytes(private), request.public_bytes(serialization.Encoding.PEM)


def requested(request: bytes, what: object = "request") -> CertificateOwner:
    """Who a request is of; serial 0. FederationError if it is not of our form, or nobody signed it."""
    return _requested(request, what)[0]


def sign_request(authority: Authority, request: bytes, *, server: bool = False, days: int = DAYS) -> bytes:
    """The certificate of a request, as PEM. FederationError if the request is not of our form.

    server: whether it is that of a server, which has addresses; a worker's has none.
    """
    if not 1 <= days <= MOST_DAYS:
        raise SpecError(f"days = {days}: must be 1 to {MOST_DAYS}")
    identity, asked = _requested(request, "request")
    issuer, key = _certificate(authority.certificate, "ca.pem"), _tls_key(authority.key, "ca.key")
    names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [one for one in names if not isinstance(one, x509.UniformResourceIdentifier)]
    if bool(hosts) != server:
        rule = "a server's must name the addresses that it is reached by" if server else "a worker's names no addresses"
        raise FederationError(f"request of {identity.name}: {rule}; make it anew")
    public: Any = asked.public_key()
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    certificate = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]), issuer.subject, public, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def identity_of(pem: bytes, what: object = "certificate") -> CertificateOwner:
    """Who a certificate names. FederationError if it is not of our form. It does not check who signed it."""
    found = _certificate(pem, what)
    return _identity(found, found.serial_number, what)


def hosts_of(pem: bytes, what: object = "certificate") -> list[str]:
    """The names and addresses in a server's certificate, in order."""
    identity_of(pem, what)
    names = _certificate(pem, what).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in names if isinstance(one, x509.DNSName | x509.IPAddress)]


def expiry_of(pem: bytes, what: object = "certificate") -> datetime.datetime:
    """When a certificate ends, in UTC."""
    return _certificate(pem, what).not_valid_after_utc


def days_left(pem: bytes, now: datetime.datetime | None = None) -> float:
    """How many days a certificate is still valid; below 0 if it is not any more."""
    return (expiry_of(pem) - (now or datetime.datetime.now(datetime.UTC))) / datetime.timedelta(days=1)


def read_certificate(path: Path) -> bytes:
    """The bytes of a file with a certificate. StoreError if there is none."""
    try:
        content = read_whole(path, MOST_PEM)
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: there is no such certificate") from None
    _certificate(content, path)
    return content


def check_issued(pem: bytes, authority: bytes, what: object = "certificate") -> None:
    """FederationError unless this authority's certificate stands behind the other one."""
    try:
        _certificate(pem, what).verify_directly_issued_by(_certificate(authority, "ca.pem"))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise FederationError(f"{plain(what)}: is not signed by this authority (ca.pem)") from None


def check_pair(pem: bytes, key: bytes, what: object = "certificate") -> None:
    """FederationError unless the private key is that of the certificate."""
    mine = _tls_key(key, what).public_key().public_numbers()
    public = _certificate(pem, what).public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.public_numbers() != mine:
        raise FederationError(f"{plain(what)}: the certificate belongs to another private key than the one beside it")


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A TLS key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: x509.Name, issuer: x509.Name, public: Any, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _usage(**given: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**dict.fromkeys(USAGES, False) | given)


def _requested(content: bytes, what: object) -> tuple[CertificateOwner, x509.CertificateSigningRequest]:
    try:
        request = x509.load_pem_x509_csr(content)
        valid = request.is_signature_valid
        identity = _identity(request, 0, what)
        kinds = {extension.oid for extension in request.extensions}
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise FederationError(f"{plain(what)}: is not a request for a certificate ({plain(error)[:100]})") from None
    if not valid:
        raise FederationError(f"{plain(what)}: its signature is wrong; make it anew")
    if kinds != {x509.SubjectAlternativeName.oid}:
        raise FederationError(f"{plain(what)}: asks for more than a name and a key, for example to be an authority")
    public = request.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise FederationError(f"{plain(what)}: its key is not on the curve P-256; make it with `noisegate federation`")
    return identity, request


def _identity(found: Any, serial: int, what: object) -> CertificateOwner:
    """The name and key of a certificate or of a request."""
    where = plain(what)
    try:
        subject, names = list(found.subject), found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
        kinds = {type(one) for one in names.value}
    except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension, UnsupportedAlgorithm):
        raise FederationError(f"{where}: names no Ed25519 key; it was not made by `noisegate federation`") from None
    if len(subject) != 1 or subject[0].oid != NameOID.COMMON_NAME:
        raise FederationError(f"{where}: must have one common name and nothing else")
    if kinds - {x509.UniformResourceIdentifier, x509.DNSName, x509.IPAddress}:
        raise FederationError(f"{where}: names something else than a key, hosts and addresses")
    if len(uris) != 1 or not uris[0].startswith(KEY_URI):
        raise FederationError(f"{where}: must name exactly one Ed25519 key, as {KEY_URI} and 64 hexadecimal digits")
    try:
        name = checked_name(subject[0].value)
        return CertificateOwner(name, public_key(uris[0].removeprefix(KEY_URI)), serial)
    except SpecError as error:
        raise FederationError(f"{where}: {error}") from None


def _certificate(pem: bytes, what: object) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, TypeError) as error:
        raise FederationError(f"{plain(what)}: is not a certificate ({plain(error)[:100]})") from None


def _tls_key(content: bytes, what: object) -> ec.EllipticCurvePrivateKey:
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = serialization.load_pem_private_key(content, password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    raise StoreError(f"{plain(what)}: is not a private key on the curve P-256")


def _host(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if len(host) > 253 or not HOST.fullmatch(host):
        raise SpecError(f"host = {shown(host)}: must be a name or an address that workers reach the server by")
    return x509.DNSName(host)
