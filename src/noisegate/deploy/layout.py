"""Where the files of a federation lie. A local trial and a real one have the same files.

DIR/ca/              ca.pem, ca.key, issued/: the authority; keep it off the server where you can
DIR/server/          what `noisegate serve` is given
DIR/workers/NAME/    what `noisegate join` is given; in a real federation each is on a machine of its own
DIR/spec.toml        of a trial alone: what it runs
DIR/trial.toml       of a trial alone: which workers are hostile
DIR/logs/            of a trial alone: what its processes print
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import MOST_TEXT, read_whole, write_whole
from noisegate.settings import toml

AUTHORITY, SERVER, WORKERS, LOGS, ISSUED = "ca", "server", "workers", "logs", "issued"
SPEC, TRIAL = "spec.toml", "trial.toml"
SETTINGS, ROSTER, EXAMPLES = "federation.toml", "roster.toml", "auxiliary.npz"
SERVER_CERTIFICATE, SERVER_KEY, SIGNING_KEY = "server.pem", "server.key", "signing.key"
CHECKPOINT, RESULT = "checkpoint.safetensors", "result.json"


def server_folder(path: Path) -> Path:
    """The folder of a server: this one, or the one that a trial has below. StoreError if there is none."""
    for folder in (path, path / SERVER):
        if (folder / SETTINGS).is_file():
            return folder
    raise StoreError(
        f"{plain(path)}: holds no server ({SETTINGS}); make one with `noisegate federation init {plain(path)}`"
    )


def trial_of(server: Path) -> Path | None:
    """The folder of the trial that a server folder belongs to, if it does."""
    home = server.resolve().parent
    return home if (home / TRIAL).is_file() and (home / SERVER).resolve() == server.resolve() else None


def authority_folder(server: Path, given: Path | None) -> Path:
    """The folder of the authority: the given one, or ca below the server's folder or beside it."""
    for folder in (given,) if given else (server / AUTHORITY, server.resolve().parent / AUTHORITY):
        if (folder / "ca.pem").is_file():
            return folder
    where = plain(given or server / AUTHORITY)
    raise StoreError(f"{where}: holds no authority (ca.pem and ca.key); give its folder with --ca")


def begun(server: Path) -> bool:
    """Whether the run of a server has begun and is not over."""
    state = server / "state"
    return (state / CHECKPOINT).exists() and not (state / RESULT).exists()


def to_toml(values: Mapping[str, Any], comment: str = "") -> bytes:
    """A file of settings. comment: lines before it."""
    said = "".join(f"# {line}\n" for line in comment.splitlines())
    return (said + "".join(f"{key} = {toml(value)}\n" for key, value in values.items() if value is not None)).encode()


def change_setting(path: Path, key: str, value: str) -> None:
    """Give one setting of a file another value. Everything else, comments too, stays as it is."""
    text = _text(path)
    line = f"{key} = {json.dumps(value)}"
    changed, count = re.subn(rf"(?m)^{re.escape(key)}\s*=.*$", lambda _: line, text, count=1)
    if not count:
        changed = f"{line}\n{text}"
    if changed != text:
        write_whole(path, changed.encode())


def make_folder(path: Path, private: bool = False) -> Path:
    """Make a folder, also those above it. private: for its owner's eyes alone."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
    except OSError as error:
        raise StoreError(f"{plain(path)}: cannot be made ({error.strerror}); choose another place") from None
    return path


def _text(path: Path) -> str:
    try:
        return read_whole(path, MOST_TEXT).decode()
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: there is no such file") from None
    except UnicodeDecodeError:
        raise StoreError(f"{plain(path)}: is damaged (not UTF-8)") from None
