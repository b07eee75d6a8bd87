"""How a worker becomes part of a federation: one file goes to the server's operator, one comes back.

The request holds a name and two public keys. The invitation holds the certificate, the authority's certificate, where
the server is, its public key, and what its run asks for. Nothing in either is secret; that they were not swapped on the
way, people check by comparing fingerprints. Private keys are made where they are used, and never leave that machine.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from noisegate.checks import plain
from noisegate.deploy.fingerprints import one_certificate, own_fingerprint, request_fingerprint
from noisegate.deploy.invitation import Invitation
from noisegate.deploy.layout import (
    ISSUED,
    SERVER_CERTIFICATE,
    SETTINGS,
    SIGNING_KEY,
    make_folder,
    to_toml,
)
from noisegate.deploy.members import read_roster, write_roster
from noisegate.errors import FederationError, SpecError, StoreError
from noisegate.federation.certificates import (
    Authority,
    check_issued,
    check_pair,
    hosts_of,
    identity_of,
    make_request,
    read_certificate,
    requested,
    sign_request,
)
from noisegate.federation.keys import MOST_PEM, SigningKey, read_private, write_private
from noisegate.federation.policy import Policy
from noisegate.federation.roster import Roster, checked_size
from noisegate.federation.settings import ServerSettings
from noisegate.federation.worker_folder import AUTHORITY, CERTIFICATE, POLICY, TLS_KEY
from noisegate.federation.worker_folder import SETTINGS as WORKER_SETTINGS
from noisegate.files import read_whole, write_whole
from noisegate.models import build_model
from noisegate.usual import DAYS

REQUEST, NEXT, INVITATION = "request.pem", "next", ".invitation.toml"

RESERVED = ("server", "roster", "federation", "policy", "worker")
"""Names that files of a server's or a worker's folder have. No worker may have one."""


@dataclass(frozen=True)
class OwnRequest:
    """A request where it was made. fingerprint: of the keys in the worker's folder."""

    path: Path
    fingerprint: str


def request(folder: Path, name: str | None = None, new_keys: bool = False) -> OwnRequest:
    """Make what a worker sends to the operator, and the keys that are not there yet.

    name: may be left out if the folder has a certificate already. new_keys: make other keys than those in use, which
    stay in use until the certificate for the new ones is accepted.
    """
    if name is None:
        if not (folder / CERTIFICATE).exists():
            raise SpecError(f"{plain(folder)}: has no certificate to renew; give the worker's --name")
        name = identity_of(read_certificate(folder / CERTIFICATE), folder / CERTIFICATE).name
    _check_free(name)
    home = make_folder(folder / NEXT if new_keys else folder, private=True)
    if new_keys:
        for old in (SIGNING_KEY, TLS_KEY):
            (home / old).unlink(missing_ok=True)
    key = read_private(home / TLS_KEY) if (home / TLS_KEY).exists() else None
    signing = SigningKey.read(home / SIGNING_KEY) if (home / SIGNING_KEY).exists() else SigningKey.generate()
    made, wanted = make_request(name, signing.public, key=key)
    if not (home / SIGNING_KEY).exists():
        signing.write(home / SIGNING_KEY)
    if key is None:
        write_private(home / TLS_KEY, made)
    write_whole(folder / REQUEST, wanted)
    return OwnRequest(folder / REQUEST, own_fingerprint(name, read_private(home / TLS_KEY), signing.public))


@dataclass(frozen=True)
class WorkerRequest:
    """A request that an operator looks at. known: the worker's key in the roster, if it stands there."""

    name: str
    key: bytes
    content: bytes
    known: bytes | None

    def fingerprint(self) -> str:
        """What the worker's machine showed if nobody swapped the request."""
        return request_fingerprint(self.content)


def look_at(server: Path, path: Path) -> WorkerRequest:
    """Read a worker's request, and what the roster says of its name."""
    content = _content(path)
    owner = requested(content, path)
    _check_free(owner.name)
    return WorkerRequest(owner.name, owner.key, content, read_roster(server).keys.get(owner.name))


def sign(
    server: Path,
    found: WorkerRequest,
    authority: Path,
    days: int = DAYS,
    replace: bool = False,
    address: str = "",
    size: int | None = None,
) -> Invitation:
    """Sign a request, write the worker into the roster, and give the invitation.

    replace: the worker may have another key than the roster says. address: "host:port" at which workers reach the
    server, if it is not the first host of its certificate and the port that it listens on. size: the public number of
    examples that the roster lists the worker with; unless given, the one that stands there.
    """
    roster = read_roster(server)
    known = roster.keys.get(found.name)
    if known not in (None, found.key) and not replace:
        raise FederationError(
            f"{found.name}: stands in the roster with another key, {(known or b'').hex()[:16]}...; choose another "
            "name, or say --replace if this worker has new keys"
        )
    sizes = roster.sizes | ({} if size is None else {found.name: checked_size(size, "size")})
    certificate = sign_request(Authority.read(authority), found.content, days=days)
    invitation = _invitation(server, found, certificate, address, sizes.get(found.name, 0))
    write_roster(server, Roster(roster.keys | {found.name: found.key}, roster.revoked, sizes))
    serial = identity_of(invitation.certificate.encode()).serial
    issued = make_folder(authority / ISSUED)
    write_whole(issued / f"{found.name}.{serial:x}.pem", invitation.certificate.encode())
    return invitation


def accept(folder: Path, invitation: Invitation) -> list[str]:
    """Put an invitation to use, once everything in it fits what the folder holds. Gives a line for each file written.

    worker.toml and policy.toml are written if they are not there, with what the terms ask for and no more.
    """
    certificate = one_certificate(invitation.certificate.encode(), "the invitation's certificate")
    authority = one_certificate(invitation.authority.encode(), "the invitation's authority")
    owner = identity_of(certificate, "the invitation's certificate")
    if owner.name != invitation.name:
        raise FederationError(f"the invitation is for {plain(invitation.name)!r}, and its certificate {owner.name!r}")
    check_issued(certificate, authority, "the invitation's certificate")
    home = _home_of(folder, owner.key)
    check_pair(certificate, read_private(home / TLS_KEY), "the invitation")
    if (path := folder / REQUEST).exists() and (asked := requested(_content(path), path).name) != owner.name:
        raise FederationError(f"the invitation is for {owner.name!r}, and this folder's {REQUEST} asked for {asked!r}")
    files = {
        WORKER_SETTINGS: to_toml(
            {
                "name": owner.name,
                "server": invitation.server,
                "data": "data.npz",
                "model": invitation.model,
                "classes": invitation.classes,
                "features": invitation.features or None,
                "ledger": "ledger",
            }
        ),
        POLICY: invitation.policy(),
    }
    told = []
    for name, content in files.items():
        if (folder / name).exists():
            told.append(f"kept     {name}")
        else:
            write_whole(folder / name, content)
            told.append(f"written  {name}")
    policy = Policy.read(folder / POLICY)
    if not policy.trusts(bytes.fromhex(invitation.key)):
        raise FederationError(
            f"{plain(folder / POLICY)}: names another server key than the invitation, {invitation.key}; "
            "change `server` there if that is right"
        )
    if home != folder:
        for name in (SIGNING_KEY, TLS_KEY):
            write_private(folder / name, read_private(home / name))
            (home / name).unlink()
    for name, content in ((AUTHORITY, authority), (CERTIFICATE, certificate)):
        write_whole(folder / name, content)
        told.append(f"written  {name}")
    return told


def _invitation(server: Path, found: WorkerRequest, certificate: bytes, address: str, size: int) -> Invitation:
    settings, path = ServerSettings.read(server / SETTINGS), server / SERVER_CERTIFICATE
    own = read_certificate(path)
    if not address:
        host = hosts_of(own, path)[0]
        address = f"[{host}]:{settings.address()[1]}" if ":" in host else f"{host}:{settings.address()[1]}"
    authority = one_certificate(read_certificate(server / "ca.pem"), server / "ca.pem")
    check_issued(certificate, authority, f"the new certificate of {found.name}")
    module = build_model(settings.model, settings.model_shape(), settings.classes, torch.Generator().manual_seed(0))
    if settings.epsilon is None or settings.delta is None:
        raise SpecError(f"{plain(server / SETTINGS)}: epsilon, delta: must be given, so that workers know the price")
    return Invitation(
        name=found.name,
        server=address,
        key=identity_of(own, path).key.hex(),
        title=settings.title,
        model=settings.model,
        classes=settings.classes,
        rounds=settings.rounds,
        batch=settings.batch,
        declared=settings.declared,
        parameters=sum(each.numel() for each in module.parameters()),
        sigma=settings.sigma,
        epsilon=settings.epsilon,
        delta=settings.delta,
        certificate=certificate.decode(),
        authority=authority.decode(),
        size=size,
        features=settings.features,
    )


def _home_of(folder: Path, key: bytes) -> Path:
    """Where the private keys lie whose public key a certificate names."""
    for home in (folder, folder / NEXT):
        if (home / SIGNING_KEY).exists() and SigningKey.read(home / SIGNING_KEY).public == key:
            return home
    raise FederationError(
        f"{plain(folder)}: the certificate is for the key {key.hex()[:16]}..., which is not in this folder; have the "
        f"{REQUEST} of this folder signed"
    )


def _check_free(name: str) -> None:
    if name in RESERVED:
        raise SpecError(f"name = {name!r}: is that of a file of noisegate's; choose another name, such as {name}-a")


def _content(path: Path) -> bytes:
    try:
        return read_whole(path, MOST_PEM)
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: there is no such file; give the worker's {REQUEST}") from None
