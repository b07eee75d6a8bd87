"""A keyed fingerprint of private data, so that a folder can be told to be of these data by their owner alone.

A plain hash of a data set answers "are these the data?" for everyone who sees the folder, and with all but one example
known it answers "was this example in it?". A keyed one answers nobody who does not have the key. The key is 32 random
bytes in a file that only its owner can read, made on first need: $NOISEGATE_KEY, or noisegate/key in $XDG_STATE_HOME
(~/.local/state).
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisegate.checks import plain
from noisegate.data import Dataset, own_files, own_path
from noisegate.errors import DataError, StoreError
from noisegate.features import Features
from noisegate.files import parse, read_whole
from noisegate.models import frozen_names
from noisegate.runs.features import digest_features, own_features
from noisegate.runs.identity import digest_of
from noisegate.runs.modules import own_code
from noisegate.runs.spec import Spec
from noisegate.vectors import Loss, cross_entropy

KEY, HOME = "NOISEGATE_KEY", "XDG_STATE_HOME"
"""The environment variables that name the file of the key, and the folder of a user's state."""

BYTES = 32
"""The length of a key in bytes."""

MOST = 4096
"""The largest file of a fingerprint that is read, in bytes."""

CHUNK = 2**20
"""The bytes of a data file that are read at a time."""


@dataclass(frozen=True)
class Fingerprint:
    """A keyed digest of data and model. key: the name of the key, from which the key cannot be found."""

    key: str
    digest: str

    def as_dict(self) -> dict[str, str]:
        """The fingerprint as a JSON object."""
        return asdict(self)


def as_fingerprint(found: Any, what: object) -> Fingerprint | None:
    """The fingerprint that `as_dict` made this of; None for None. what: where it was found, for messages."""
    if found is None:
        return None
    if isinstance(found, dict) and found.keys() == {"key", "digest"} and all(_hex(word) for word in found.values()):
        return Fingerprint(**found)
    raise StoreError(f"{plain(what)}: is damaged (not a fingerprint)")


def _hex(word: Any) -> bool:
    return isinstance(word, str) and 0 < len(word) <= 64 and all(letter in "0123456789abcdef" for letter in word)


def read_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint in a file; None if there is no such file."""
    try:
        content = read_whole(path, MOST)
    except FileNotFoundError:
        return None
    return as_fingerprint(parse(content, path), path)


def fingerprint(
    spec: Spec,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss = cross_entropy,
    label: str | None = None,
    features: Features | None = None,
) -> Fingerprint | None:
    """The fingerprint of the data, model, loss, features and parts that a user brings; None if a file determines all.

    What a spec names by its path is brought too: its code is loaded here, so that it is told when it has changed.
    Code that cannot be told apart from other code has a new fingerprint each time, unless `label` stands for it.
    """
    path = None if dataset is not None else own_path(spec.dataset)
    files = own_files(path) if path else []
    parts = spec.given()
    model = parts.pop("model", None) if model is None else model
    own = own_code(spec, dataset, features)
    embed = own_features(spec) if features is None else features
    given = (dataset, files or None, model, embed, *own.code, *parts.values())
    if all(each is None for each in given) and loss is cross_entropy:
        return None
    key = user_key()
    digest = hashlib.blake2b(key=key, digest_size=32, person=b"noisegate inputs")
    tensors: list[Tensor] = []
    if dataset is not None:
        tensors += [dataset.x, dataset.y, dataset.x_test, dataset.y_test]
        tensors += [owner for owner in (dataset.owner, dataset.owner_test) if owner is not None]
    for file in files:
        if path and path.is_dir():
            digest.update(f"file {file.relative_to(path)} {file.stat().st_size}".encode("utf-8", "surrogateescape"))
        _add_file(digest, file)
    for module in (model, own.module):
        tensors += [] if module is None else module.state_dict().values()
        digest.update(
            "".join(f"frozen {name}" for name in frozen_names(module)).encode() if module is not None else b""
        )
    for code in own.code:
        digest.update(digest_of(label if label is not None else code).encode())
    if model is not None or loss is not cross_entropy:
        digest.update(digest_of(label if label is not None else (model, loss)).encode())
    if embed is not None:
        digest.update(digest_features(embed, label).encode())
    if parts:
        digest.update(digest_of(label if label is not None else parts).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return Fingerprint(name_of(key), digest.hexdigest())


def _add_file(digest: Any, path: Path) -> None:
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{plain(path)}: cannot be read ({error.strerror})") from None


def name_of(key: bytes) -> str:
    """A name for a key, from which it cannot be found."""
    return hashlib.blake2b(b"name", key=key, digest_size=8, person=b"noisegate key").hexdigest()


def key_path() -> Path:
    """The path of the key."""
    if given := os.environ.get(KEY):
        return Path(given)
    state = Path(os.environ.get(HOME, ""))
    try:
        return (state if state.is_absolute() else Path.home() / ".local" / "state") / "noisegate" / "key"
    except RuntimeError:
        raise StoreError(f"there is no home folder for a key; name a file for it in ${KEY}") from None


def user_key() -> bytes:
    """The user's key, which is made if there is none."""
    path = key_path()
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(number, "wb") as file:
                file.write(secrets.token_bytes(BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first, and its key is used
                os.link(part, path)
        finally:
            part.unlink()
        return _read(path)
    except OSError as error:
        raise StoreError(
            f"{plain(path)}: a key for fingerprints cannot be made there ({error.strerror}); "
            f"name another file in ${KEY}"
        ) from None


def _read(path: Path) -> bytes:
    """The key in a file. StoreError if others can read the file."""
    try:
        with path.open("rb") as file:
            about, key = os.fstat(file.fileno()), file.read(BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{plain(path)}: the key cannot be read ({error.strerror}); see ${KEY}") from None
    if os.name == "posix" and about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StoreError(f"{plain(path)}: others may read this key; `chmod 600` it, or name another file in ${KEY}")
    if len(key) != BYTES:
        raise StoreError(f"{plain(path)}: is no key of {BYTES} bytes; name another file in ${KEY}")
    return key
