"""A worker's folder at a node of Flower's: its keys are made there and stay there.

The folder, its ledger and its policy are noisegate's own. Flower's Context.state is not used: it is lost when a
SuperNode restarts, and it is saved after a reply has left.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisegate.checks import plain
from noisegate.errors import FederationError, SpecError
from noisegate.federation.certificates import check_issued, check_pair, identity_of, make_request
from noisegate.federation.keys import SigningKey, checked_name, read_private, write_private
from noisegate.federation.policy import Policy
from noisegate.federation.worker_folder import AUTHORITY, CERTIFICATE, SETTINGS, SIGNING_KEY, TLS_KEY, WorkerFolder
from noisegate.files import write_whole
from noisegate.flower.host import proof_text
from noisegate.flower.letters import read_letter


def node_folder(context: Any) -> Path:
    """The folder of the worker at this node: `folder` of its node config; or, in a simulation, one of `nodes`.

    The latter is a setting of the run config: a folder that holds one folder for each partition.
    """
    if "folder" in context.node_config:
        return Path(str(context.node_config["folder"]))
    if "partition-id" in context.node_config and "nodes" in context.run_config:
        return Path(str(context.run_config["nodes"])) / str(int(context.node_config["partition-id"]))
    raise SpecError(
        "folder: is missing in the node config; start the SuperNode with --node-config 'folder=\"/srv/worker\"'"
    )


@dataclass(frozen=True)
class Desk:
    """What a worker has at a node: its folder and its policy."""

    folder: Path
    policy: Policy

    def request(self, letter: bytes) -> dict[str, str]:
        """A request for a certificate, for a server that the policy names. Keys are made if there are none yet."""
        asked = read_letter(letter, "enroll", self.policy.server)
        if asked is None:
            raise FederationError("asked to enroll by no server that this worker's policy names; not believed")
        signing, given = self._signing_key(), checked_name(asked.get("name"))
        if asked.get("fixed") is True and (self.folder / CERTIFICATE).exists():  # then names are older than node ids
            known_as = identity_of((self.folder / CERTIFICATE).read_bytes())
            given = known_as.name if known_as.key == signing.public else given
        name = self.place(given, "").name
        known = read_private(self.folder / TLS_KEY) if (self.folder / TLS_KEY).exists() else None
        key, request = make_request(name, signing.public, key=known)
        if known is None:
            write_private(self.folder / TLS_KEY, key)
        server = str(asked.get("server"))
        if server not in self.policy.server:
            raise FederationError("asked to enroll with a server that this worker's policy does not name")
        proof = signing.sign(proof_text(request, bytes.fromhex(server)))
        return {"request": request.decode(), "proof": proof.hex()}

    def accept(self, letter: bytes, kind: str) -> tuple[WorkerFolder, dict[str, Any]]:
        """Take the certificate and the authority that a server sends: (the folder, ready to take part; the letter)."""
        told = read_letter(letter, kind, self.policy.server)
        if told is None:
            raise FederationError("asked to take part by no server that this worker's policy names; not believed")
        authority, certificate = (str(told.get(name, "")).encode() for name in ("authority", "certificate"))
        if certificate:
            check_issued(certificate, authority, "the certificate from the server")
            check_pair(certificate, read_private(self.folder / TLS_KEY), "the certificate from the server")
            for path, content in ((AUTHORITY, authority), (CERTIFICATE, certificate)):
                if not _is(self.folder / path, content):
                    write_whole(self.folder / path, content)
        name = identity_of((self.folder / CERTIFICATE).read_bytes()).name
        return self.place(name, str(told.get("address", ""))), told

    def place(self, name: str, address: str) -> WorkerFolder:
        """The worker's folder. Where it has a worker.toml, that says the name and where the ledger is."""
        if (self.folder / SETTINGS).exists():
            found = WorkerFolder.read(self.folder)
            return WorkerFolder(self.folder, found.name, address or found.server, found.ledger)
        return WorkerFolder(self.folder, name, address, self.folder / "ledger")

    def _signing_key(self) -> SigningKey:
        path = self.folder / SIGNING_KEY
        if not path.exists():
            if (self.folder / CERTIFICATE).exists():
                raise FederationError(f"{plain(path)}: is missing, and there is a certificate; put the key back")
            SigningKey.generate().write(path)
        return SigningKey.read(path)


def _is(path: Path, content: bytes) -> bool:
    """Whether a file is there and holds this."""
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False
