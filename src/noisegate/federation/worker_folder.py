"""The folder of a worker: who it is, where the server is, where its data and its ledger are."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisegate import checks
from noisegate.catalog import typed
from noisegate.data import read_examples
from noisegate.errors import DataError, FederationError, SpecError
from noisegate.features import Kept, catalog_features, embed
from noisegate.federation.certificates import check_pair, identity_of, read_certificate
from noisegate.federation.keys import SigningKey, checked_name, read_private
from noisegate.federation.policy import Policy
from noisegate.models import build_model
from noisegate.settings import read_settings

SETTINGS, POLICY, FEATURES_KEPT = "worker.toml", "policy.toml", "features"
AUTHORITY, CERTIFICATE, TLS_KEY, SIGNING_KEY = "ca.pem", "worker.pem", "worker.key", "signing.key"


@dataclass(frozen=True)
class WorkerFolder:
    """What worker.toml says; paths in it are relative to the folder.

    name: in certificate and roster. server: "host:port". data: an .npz with x and y; empty where a program brings the
    data. model: a name of `noisegate list models`, likewise. classes: how many the model tells apart. features: a name
    of `noisegate list features`, or a table with name and settings; without one, examples are taken as they are.
    ledger: the folder of the data set's ledger.
    """

    folder: Path
    name: str
    server: str
    ledger: Path
    data: str = ""
    model: str = ""
    classes: int = 0
    features: str | dict[str, Any] = ""

    @classmethod
    def read(cls, folder: Path) -> "WorkerFolder":
        """The folder, once its worker.toml was checked."""
        path = folder / SETTINGS
        found, where = read_settings(path), checks.plain(path)
        known: dict[str, Any] = {entry.name: str for entry in fields(cls) if entry.name != "folder"}
        known |= {"classes": int, "features": str | dict}
        for key in found:
            if key not in known:
                guess, choices = checks.guess(key, known), ", ".join(known)
                raise SpecError(f"{where}: {checks.plain(key)}: unknown{guess}; choose from {choices}")
        for key in ("name", "server"):
            if key not in found:
                raise SpecError(f"{where}: {key}: is missing, and a worker must state it")
        given = {key: typed(f"{where}: {key}", value, known[key]) for key, value in found.items()}
        checked_name(given["name"], f"{where}: name")
        host, _, port = given["server"].rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise checks.refuse(f"{where}: server", given["server"], "must be host:port")
        return cls(**given | {"folder": folder, "ledger": folder / given.get("ledger", "ledger")})

    def policy(self) -> Policy:
        """What this worker allows."""
        return Policy.read(self.folder / POLICY)

    def signing_key(self) -> SigningKey:
        """The Ed25519 key. FederationError if name, certificate and key do not belong together."""
        key = SigningKey.read(self.folder / SIGNING_KEY)
        identity = identity_of(read_certificate(self.folder / CERTIFICATE))
        if identity.name != self.name or identity.key != key.public:
            raise FederationError(
                f"{checks.plain(self.folder / CERTIFICATE)}: is for {identity.name!r} and the key "
                f"{identity.key.hex()[:16]}..., and this worker is {self.name!r} with the key "
                f"{key.public.hex()[:16]}...; they must agree: have the request of this folder signed"
            )
        return key

    def tls(self) -> tuple[bytes, bytes, bytes]:
        """(authority, private key, certificate) as PEM, checked to belong together."""
        certificate, key = read_certificate(self.folder / CERTIFICATE), read_private(self.folder / TLS_KEY)
        check_pair(certificate, key, str(self.folder))
        return read_certificate(self.folder / AUTHORITY), key, certificate

    def examples(self) -> tuple[Tensor, Tensor]:
        """(x, y) of the data file, or their features, which are kept in the folder."""
        if not self.data:
            raise SpecError(f"{checks.plain(self.folder / SETTINGS)}: data: is missing; give the path of an .npz")
        x, y = read_examples(self.folder / self.data)
        features = catalog_features(self.features, checks.plain(self.folder / SETTINGS))
        if features is None:
            return x, y
        found = hashlib.blake2b(f"{features.key} {x.shape}".encode(), digest_size=16)
        found.update(x.numpy().tobytes())
        return embed(features, x, kept=Kept(self.folder / FEATURES_KEPT, found.hexdigest())), y

    def module(self, x: Tensor) -> nn.Module:
        """The model by its name, for examples like x. Its weights come from the server."""
        if not self.model or self.classes < 2:
            raise SpecError(
                f"{checks.plain(self.folder / SETTINGS)}: model, classes: must be given (a name of `noisegate list "
                "models`, and 2 or more), unless a program brings the model"
            )
        return build_model(self.model, tuple(x.shape[1:]), self.classes, torch.Generator().manual_seed(0))

    def check_labels(self, y: Tensor) -> None:
        """DataError if a label is not one of the classes."""
        if int(y.min()) < 0 or int(y.max()) >= self.classes:
            raise DataError(
                f"{checks.plain(self.folder / self.data)}: has labels {int(y.min())} to {int(y.max())}; with classes = "
                f"{self.classes} they must lie in 0 to {self.classes - 1}"
            )
