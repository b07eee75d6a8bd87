"""Certificates: what an authority signs, what it refuses, and who a certificate names."""

import datetime
import os
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from noisegate.errors import FederationError, NoisegateError, SpecError, StoreError
from noisegate.federation import certificates
from noisegate.federation.certificates import (
    Authority,
    check_issued,
    check_pair,
    days_left,
    expiry_of,
    identity_of,
    make_authority,
    make_request,
    read_certificate,
    requested,
    sign_request,
)
from noisegate.federation.keys import SigningKey, write_private

KEY = SigningKey.generate().public
CA = make_authority()


def csr(names, subject=((NameOID.COMMON_NAME, "w1"),), key=None, extra=()):
    """A request that anybody can make."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(oid, value) for oid, value in subject])
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in extra:
        builder = builder.add_extension(extension, critical=True)
    made = builder.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def uri(text):
    return x509.UniformResourceIdentifier(text)


OURS = uri("noisegate:key:" + KEY.hex())


def test_a_certificate_names_worker_and_key_and_belongs_to_its_own_private_key_alone():
    key, request = make_request("hospital-a", KEY)
    assert requested(request) == certificates.CertificateOwner("hospital-a", KEY, 0)
    pem = sign_request(CA, request)
    owner = identity_of(pem)
    assert (owner.name, owner.key) == ("hospital-a", KEY)
    assert owner.serial == x509.load_pem_x509_certificate(pem).serial_number > 0
    check_issued(pem, CA.certificate)
    check_pair(pem, key)
    with pytest.raises(FederationError, match="another private key"):
        check_pair(pem, make_request("hospital-a", KEY)[0])
    with pytest.raises(FederationError, match="not signed by this authority"):
        check_issued(pem, make_authority().certificate)


def test_a_worker_may_be_client_and_no_server_and_a_server_the_other_way_around():
    worker = x509.load_pem_x509_certificate(sign_request(CA, make_request("w1", KEY)[1]))
    hosts = ["localhost", "127.0.0.1", "::1", "server.example.org"]
    server = x509.load_pem_x509_certificate(sign_request(CA, make_request("server", KEY, hosts)[1], server=True))
    usage = [list(one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) for one in (worker, server)]
    assert usage == [[ExtendedKeyUsageOID.CLIENT_AUTH], [ExtendedKeyUsageOID.SERVER_AUTH]]
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "server.example.org"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    for one in (worker, server):
        assert not one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(FederationError, match="names no addresses"):
        sign_request(CA, make_request("w1", KEY, ["localhost"])[1])
    with pytest.raises(FederationError, match="must name the addresses"):
        sign_request(CA, make_request("server", KEY)[1], server=True)


def test_the_authority_signs_no_further_authority():
    found = x509.load_pem_x509_certificate(CA.certificate)
    limits = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical
    assert (limits.value.ca, limits.value.path_length) == (True, 0)


def test_openssl_accepts_the_chain(tmp_path):
    key, request = make_request("server", KEY, ["localhost"])
    (tmp_path / "server.pem").write_bytes(sign_request(CA, request, server=True))
    write_private(tmp_path / "server.key", key)
    context = ssl.create_default_context(cadata=CA.certificate.decode())
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    assert context.cert_store_stats()["x509_ca"] == 1


def test_a_clock_off_by_a_day_does_not_matter_and_a_certificate_ends_when_told():
    pem = sign_request(CA, make_request("w1", KEY)[1], days=30)
    found, now = x509.load_pem_x509_certificate(pem), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    assert found.not_valid_before_utc < now - 1.9 * day
    assert abs(expiry_of(pem) - now - 30 * day) < datetime.timedelta(minutes=1)
    assert days_left(pem) == pytest.approx(30, abs=0.01)
    assert days_left(pem, now + 31 * day) < 0
    assert days_left(sign_request(CA, make_request("w1", KEY)[1])) == pytest.approx(365, abs=0.01)
    for days in (0, -1, 100_000):
        with pytest.raises(SpecError, match="days"):
            sign_request(CA, make_request("w1", KEY)[1], days=days)


@pytest.mark.parametrize(
    ("request_of", "why"),
    [
        (lambda: b"", "not a request"),
        (lambda: b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "not a request"),
        (lambda: CA.certificate, "not a request"),
        (lambda: csr([]), "names no Ed25519 key"),
        (lambda: csr([x509.DNSName("localhost")]), "exactly one Ed25519 key"),
        (lambda: csr([OURS, uri("noisegate:key:" + "ab" * 32)]), "exactly one Ed25519 key"),
        (lambda: csr([uri("noisegate:key:" + "AB" * 32)]), "64 hexadecimal digits"),
        (lambda: csr([uri("noisegate:key:00")]), "64 hexadecimal digits"),
        (lambda: csr([uri("noisegate:key:" + "00" * 32)]), "anyone can sign"),
        (lambda: csr([uri("https://example.org")]), "exactly one Ed25519 key"),
        (lambda: csr([OURS, x509.RFC822Name("a@example.org")]), "something else"),
        (lambda: csr([OURS], subject=()), "one common name"),
        (lambda: csr([OURS], subject=[(NameOID.COMMON_NAME, "w1"), (NameOID.COMMON_NAME, "w2")]), "one common name"),
        (lambda: csr([OURS], subject=[(NameOID.COMMON_NAME, "W 1")]), "a to z"),
        (lambda: csr([OURS], subject=[(NameOID.COMMON_NAME, "all")]), "all workers"),
        (lambda: csr([OURS], subject=[(NameOID.ORGANIZATION_NAME, "w1")]), "one common name"),
        (lambda: csr([OURS], extra=[x509.BasicConstraints(ca=True, path_length=None)]), "to be an authority"),
        (lambda: csr([OURS], key=rsa.generate_private_key(65537, 2048)), "P-256"),
        (lambda: csr([OURS], key=ec.generate_private_key(ec.SECP384R1())), "P-256"),
    ],
)
def test_a_request_of_another_form_is_refused(request_of, why):
    with pytest.raises(FederationError, match=why):
        sign_request(CA, request_of())


def test_a_request_that_somebody_changed_is_refused():
    made = x509.load_pem_x509_csr(make_request("w1", KEY)[1])
    bare = bytearray(made.public_bytes(serialization.Encoding.DER))
    at = bytes(bare).index(KEY.hex().encode())
    bare[at : at + 64] = SigningKey.generate().public.hex().encode()
    changed = x509.load_der_x509_csr(bytes(bare)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(FederationError, match="signature is wrong"):
        sign_request(CA, changed)


def test_what_is_no_certificate_of_ours_names_nobody():
    for pem in (b"", b"x" * 100, os.urandom(300), CA.certificate, CA.certificate[:100], CA.key):
        with pytest.raises(FederationError):
            identity_of(pem)


def test_a_cut_or_flipped_certificate_never_raises_anything_else():
    pem = sign_request(CA, make_request("w1", KEY)[1])
    for at in range(0, len(pem), 7):
        for changed in (pem[:at], pem[:at] + bytes([pem[at] ^ 1]) + pem[at + 1 :]):
            try:
                owner = identity_of(changed)
                check_issued(changed, CA.certificate)
            except NoisegateError:
                continue
            assert owner == identity_of(pem)  # such as a change of the line break at the end


def test_names_hosts_and_keys_are_checked_before_anything_is_made():
    for name in ("", "W", "a" * 64, "-a", "all", "a b"):
        with pytest.raises(SpecError, match="name"):
            make_request(name, KEY)
    for host in ("", "a b", "-x", "x" * 64, "a..b", "*.example.org", "http://x"):
        with pytest.raises(SpecError, match="host"):
            make_request("server", KEY, [host])
    with pytest.raises(SpecError, match="32 bytes"):
        make_request("w1", b"short")
    with pytest.raises(SpecError, match="at most"):
        make_request("server", KEY, ["localhost"] * 21)


def test_an_authority_is_read_with_the_key_that_belongs_to_it(tmp_path):
    with pytest.raises(StoreError, match="no such certificate"):
        Authority.read(tmp_path)
    (tmp_path / "ca.pem").write_bytes(CA.certificate)
    with pytest.raises(StoreError, match="no such key"):
        Authority.read(tmp_path)
    write_private(tmp_path / "ca.key", CA.key)
    assert Authority.read(tmp_path) == CA
    assert "PRIVATE" not in repr(CA)
    write_private(tmp_path / "ca.key", make_authority().key)
    with pytest.raises(FederationError, match="another private key"):
        Authority.read(tmp_path)
    write_private(tmp_path / "ca.key", b"nothing")
    with pytest.raises(StoreError, match="not a private key"):
        Authority.read(tmp_path)
    (tmp_path / "ca.pem").write_bytes(b"nothing")
    with pytest.raises(FederationError, match="not a certificate"):
        read_certificate(tmp_path / "ca.pem")


def test_a_request_with_the_same_tls_key_renews_a_certificate():
    key, request = make_request("w1", KEY)
    again, second = make_request("w1", KEY, key=key)
    assert again == key
    first, renewed = sign_request(CA, request), sign_request(CA, second)
    check_pair(renewed, key)
    assert identity_of(first).serial != identity_of(renewed).serial
