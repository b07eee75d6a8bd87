"""The server's side of enrollment: its own keys, and who takes part.

Flower says which node a reply is of, and that is what enrollment rests on: a node's first request for a certificate is
believed, and its key stands in roster.toml from then on. A roster that is there already is never added to: then a node
must show the key that stands in it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from noisegate.checks import plain
from noisegate.errors import FederationError, SpecError
from noisegate.federation.certificates import (
    Authority,
    CertificateOwner,
    make_authority,
    make_request,
    requested,
    sign_request,
)
from noisegate.federation.keys import SigningKey, public_key, verify, write_private
from noisegate.federation.roster import Roster
from noisegate.files import write_whole
from noisegate.flower.letters import CONTEXT

ROSTER, AUTHORITY, AUTHORITY_KEY = "roster.toml", "ca.pem", "ca.key"
CERTIFICATE, TLS_KEY, SIGNING_KEY = "server.pem", "server.key", "signing.key"
SERVER = "server"


def make_host(folder: Path, hosts: list[str]) -> str:
    """Make what a server's folder lacks: an authority, its certificate for these addresses, keys. Its public key.

    Nothing that is there is changed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / SIGNING_KEY).exists():
        SigningKey.generate().write(folder / SIGNING_KEY)
    signing = SigningKey.read(folder / SIGNING_KEY)
    if not (folder / AUTHORITY).exists():
        authority = make_authority()
        write_private(folder / AUTHORITY_KEY, authority.key)
        write_whole(folder / AUTHORITY, authority.certificate)
    if not (folder / CERTIFICATE).exists():
        key, request = make_request(SERVER, signing.public, hosts)
        write_private(folder / TLS_KEY, key)
        write_whole(folder / CERTIFICATE, sign_request(Authority.read(folder), request, server=True))
    return signing.public.hex()


def node_name(node: int) -> str:
    """The name of the worker at a node of Flower's. Nodes that are registered with a key keep their id."""
    return f"node-{node}"


def proof_text(request: bytes, server: bytes) -> bytes:
    """What a worker signs to show that it holds the key which its request names. server: whom it shows it to."""
    return CONTEXT + b"enroll\0" + server + request


@dataclass
class NodeEnrollment:
    """Who takes part, as far as is known. authority: None if certificates are signed elsewhere.

    most: how many take part. fixed: whether the roster was there before; then nobody is added.
    """

    signing: SigningKey
    certificate: bytes
    authority: Authority | None
    most: int
    keys: dict[str, bytes] = field(default_factory=dict)
    fixed: bool = False

    @classmethod
    def of(cls, folder: Path, most: int) -> "NodeEnrollment":
        """With the keys of a server's folder, and its roster if it has one."""
        signing = SigningKey.read(folder / SIGNING_KEY)
        authority = Authority.read(folder) if (folder / AUTHORITY_KEY).exists() else None
        certificate = authority.certificate if authority else (folder / AUTHORITY).read_bytes()
        if not (folder / ROSTER).exists():
            return cls(signing, certificate, authority, most)
        return cls(signing, certificate, authority, most, dict(Roster.read(folder / ROSTER).keys), fixed=True)

    def admit(self, node: int, request: bytes, proof: bytes) -> tuple[str, bytes]:
        """(name, certificate) for a node's request; the certificate is empty if others sign. FederationError if not.

        proof: the signature of the request by the key that it names. Public keys are public: anyone can name one.
        """
        asked = requested(request, f"the request of node {node}")
        if not verify(asked.key, proof, proof_text(request, self.signing.public)):
            raise FederationError(f"node {node}: does not hold the key that its request names")
        self._check(node, asked)
        certificate = sign_request(self.authority, request) if self.authority else b""
        self.keys.setdefault(asked.name, asked.key)
        return asked.name, certificate

    def write(self, folder: Path) -> None:
        """Keep the roster: from now on each node must show the same key."""
        if not self.fixed:
            write_whole(folder / ROSTER, Roster(dict(sorted(self.keys.items()))).to_toml().encode())
            self.fixed = True

    def _check(self, node: int, asked: CertificateOwner) -> None:
        known = self.keys.get(asked.name)
        if known is None and self.fixed:
            raise FederationError(f"node {node}: {asked.name} is not in {ROSTER}; add it there for the next run")
        if known is None and len(self.keys) >= self.most:
            raise FederationError(f"node {node}: {self.most} workers are enrolled already, as many as take part")
        if known is not None and known != asked.key:
            raise FederationError(
                f"node {node}: {asked.name} has another key than stands in {ROSTER}; if its folder was made anew on "
                "purpose, change the key there, for the next run"
            )
        if known is None and asked.name != node_name(node):
            raise FederationError(f"node {node}: asks for the name {asked.name}; it must be {node_name(node)}")
        if known is None and asked.key in self.keys.values():
            raise FederationError(f"node {node}: has the key of another worker; every worker has its own")
        try:
            public_key(asked.key.hex())
        except SpecError as error:
            raise FederationError(f"node {node}: {plain(error)}") from None
