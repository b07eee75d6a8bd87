"""Run folders. Files are written under a temporary name and renamed, so a file that exists is whole.

spec.toml               what was asked for
environment.json        versions, device
inputs.json             keyed fingerprint of the data, model and loss that the user brings, if any
rounds.jsonl            a line for each evaluated round
checkpoint.safetensors  where an unfinished run stands
verdicts.npz            reasons and scores, (rounds, n), and who is Byzantine
model.safetensors       the final model's tensors
result.json             written last, so it exists exactly when the run is done; holds all checksums
failed.json             in a sweep: why the run failed, or cannot exist; removed when it is tried again
.lock                   locked while a process writes here
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from noisegate.checks import plain
from noisegate.errors import SpecError, StoreError
from noisegate.files import read_json, seal, unseal, write_whole
from noisegate.locks import LOCK, alone
from noisegate.runs.checkpoints import Identity, pack, read_checkpoint
from noisegate.runs.key import read_fingerprint
from noisegate.runs.spec import Spec
from noisegate.runs.unbuilt import AnySpec, read_unbuilt
from noisegate.runs.verdicts import Verdicts
from noisegate.runs.verdicts import pack as pack_verdicts
from noisegate.simulate import Federation, Progress
from noisegate.version import __version__

__all__ = ["RunFolder", "environment", "write_whole"]

PACKAGES = ("torch", "numpy", "scipy", "dp-accounting")
"""The packages whose versions environment.json names."""

SPEC, INPUTS, RESULT, LINES, FAILED = "spec.toml", "inputs.json", "result.json", "rounds.jsonl", "failed.json"
CHECKPOINT, VERDICTS, MODEL = "checkpoint.safetensors", "verdicts.npz", "model.safetensors"
EARLIER = ("checkpoint.pt", "model.pt", "inputs.txt")
"""Files of earlier versions. Nothing reads them: loading one could run code, and the last is a hash without a key."""

FILES = "files"
"""The key in result.json of the sha256 sums of the other files of a finished run, by name."""

AFRESH = "remove it, or run without --resume, to start afresh"
MOST_FAILURE, LONGEST = 2**20, 2000
"""The largest failed.json that is read, in bytes, and the longest message that is kept, in characters."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. identity: of the run that is to be written or resumed; reading needs none."""

    path: Path
    identity: Identity | None = None

    def check(self, spec: Spec, resume: bool) -> None:
        """Raise StoreError if the folder holds another run, or anything else. Nothing is written."""
        if (self.path / SPEC).exists():
            self._same_spec(spec)
            if spec.secret and self._begun() and not resume:
                raise StoreError(
                    f"{plain(self.path)}: holds a secret run, whose budget is spent; go on with --resume, or choose "
                    "another --out"
                )
            if resume and self._begun():
                self._same_inputs()
        elif self.path.is_dir() and any(_foreign(entry.name) for entry in self.path.iterdir()):
            raise StoreError(f"{plain(self.path)}: is not empty and holds no run; choose another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here, and to the run whose reference this is."""
        above = self.path.absolute().parent
        with alone(self.path, above if (above / SPEC).exists() else None):
            yield

    def begin(self, spec: Spec, resume: bool, device: torch.device) -> None:
        """Begin to write to the folder, which must be held. Without `resume`, remove what an earlier run left."""
        try:
            if not resume:
                for name in (RESULT, CHECKPOINT, LINES, VERDICTS, MODEL, INPUTS, *EARLIER):
                    (self.path / name).unlink(missing_ok=True)
            self._write(SPEC, spec.to_toml().encode())
            if self.identity and self.identity.inputs:
                self._write(INPUTS, (json.dumps(self.identity.inputs.as_dict()) + "\n").encode())
            self._write("environment.json", (json.dumps(environment(device), indent=2) + "\n").encode())
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def fail(self, spec: Spec, status: str, message: str) -> None:
        """Write why the run has no result."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        if not (self.path / SPEC).exists():
            self._write(SPEC, spec.to_toml().encode())
        self._write(FAILED, seal({"status": status, "message": message[:LONGEST]}))

    def failure(self) -> tuple[str, str] | None:
        """(status, message) of a run that failed or was skipped; None if failed.json does not exist."""
        path = self.path / FAILED
        try:
            found = unseal(read_json(path, MOST_FAILURE), path)
        except FileNotFoundError:
            return None
        except StoreError as error:
            return "failed", str(error)
        status, message = found.get("status"), found.get("message")
        if status not in ("failed", "skipped") or not isinstance(message, str):
            return "failed", f"{plain(path)}: is damaged"
        return status, plain(message[:LONGEST])

    def forgive(self) -> None:
        """Remove failed.json, since the run is tried again."""
        (self.path / FAILED).unlink(missing_ok=True)

    def _begun(self) -> bool:
        """Whether there is a result or a checkpoint."""
        return any((self.path / name).exists() for name in (RESULT, CHECKPOINT))

    def _same_inputs(self) -> None:
        found, asked = read_fingerprint(self.path / INPUTS), self.identity.inputs if self.identity else None
        if found and asked and found.key != asked.key:
            raise StoreError(
                f"{plain(self.path)}: is fingerprinted with another key, so nobody can say whether data and model are "
                "the same; give that key in $NOISEGATE_KEY, or choose another --out"
            )
        if found != asked:
            raise StoreError(f"{plain(self.path)}: was made from other data, model or loss; choose another --out")

    def _same_spec(self, spec: Spec) -> None:
        try:
            found = read_unbuilt(self.path / SPEC)
        except SpecError as error:
            raise StoreError(
                f"{plain(self.path)}: its spec.toml is damaged ({plain(error)}); choose another --out"
            ) from None
        if found.canonical() != spec.canonical():
            raise StoreError(
                f"{plain(self.path)}: holds a run with other settings ({plain(_differences(found, spec))}); "
                "choose another --out"
            )

    def result(self, spec: AnySpec | None = None) -> dict[str, Any] | None:
        """The fields of result.json; None if there is none. spec: of the run, with which the result must agree."""
        found = self._sealed()
        if found is None:
            return None
        if spec is not None and found.get("spec") != json.loads(json.dumps(spec.canonical())):
            raise StoreError(f"{plain(self.path / RESULT)}: is of another run; {AFRESH}")
        return {key: value for key, value in found.items() if key != FILES}

    def sums(self) -> dict[str, str]:
        """The sha256 of the files of a finished run, by name."""
        found = (self._sealed() or {}).get(FILES, {})
        return {str(name): str(told) for name, told in found.items()} if isinstance(found, dict) else {}

    def _sealed(self) -> dict[str, Any] | None:
        path = self.path / RESULT
        try:
            return unseal(read_json(path), path)
        except FileNotFoundError:
            return None
        except StoreError as error:
            raise StoreError(f"{error}; {AFRESH}") from None

    def checkpoint(self, federation: Federation) -> Progress | None:
        """The progress of an unfinished run, on the federation's device; None if there is no checkpoint."""
        if self.identity is None:
            raise StoreError(f"{plain(self.path)}: whose checkpoint it is was not said")
        path = self.path / CHECKPOINT
        if not path.exists():
            if (old := self.path / EARLIER[0]).exists():
                raise StoreError(f"{plain(old)}: is of an earlier version and cannot be resumed; {AFRESH}")
            return None
        return read_checkpoint(path, federation, self.identity)

    def save(self, progress: Progress) -> None:
        """Write the checkpoint and the lines of the curve so far."""
        if self.identity is None:
            raise StoreError(f"{plain(self.path)}: whose checkpoint it is was not said")
        self._write(CHECKPOINT, pack(progress, self.identity, progress.state.params.device.type))
        self._write(LINES, _lines(progress))

    def finish(self, federation: Federation, progress: Progress, result: Mapping[str, Any]) -> None:
        """Write the files of a finished run, the result last."""
        params = federation.mechanism.model.state(progress.state.params)
        found = progress.reasons, progress.scores, federation.adversary.byzantine, progress.weights
        fallen = None if progress.fell_back is None else progress.fell_back.bool().cpu().numpy()
        fallen = fallen if fallen is not None and fallen.any() else None  # so that other files stay as they were
        reasons, scores, byzantine, weights = (part.cpu().numpy() for part in found)
        verdicts = Verdicts(reasons, scores, byzantine, weights, fallen)
        files = {
            LINES: _lines(progress),
            VERDICTS: pack_verdicts(verdicts),
            MODEL: save({name: value.detach().cpu().contiguous().clone() for name, value in params.items()}),
        }
        for name, content in files.items():
            self._write(name, content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self._write(RESULT, seal({**result, FILES: sums}))
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content, f".{name}.part")


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{plain(path)}: cannot be written ({error.strerror}); choose another --out")


def _foreign(name: str) -> bool:
    return name != LOCK and not name.endswith(".part")


def _lines(progress: Progress) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in progress.curve).encode()


def environment(device: torch.device) -> dict[str, Any]:
    """What environment.json holds: versions, system and device."""
    versions = {"noisegate": __version__}  # of the code that runs, installed or not
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def _differences(found: AnySpec, asked: Spec) -> str:
    old, new = found.canonical(), asked.canonical()
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return ", ".join(f"{key} = {old.get(key)!r}, not {new.get(key)!r}" for key in keys)
