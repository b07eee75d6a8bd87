"""Run folders. Files are written to a temporary name and renamed, so a file that exists is whole.

spec.toml         what was asked for
environment.json  versions, device
inputs.txt        fingerprint of data and model that the spec does not name; empty for built-in ones
rounds.jsonl      a line per evaluated round
checkpoint.pt     where an unfinished run stands
verdicts.npz      reasons and scores, (rounds, n), and who is Byzantine
model.pt          the final model's state dict
result.json       written last: it exists exactly when the run is done
failed.json       in a sweep: why the run broke, or cannot exist; gone when it is tried again
"""

import io
import json
import os
import pickle
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noisegate.errors import SpecError, StoreError
from noisegate.lab.spec import Spec, read_spec
from noisegate.simulate import Federation, Progress, State
from noisegate.version import __version__

PACKAGES = ("torch", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    def check(self, spec: Spec, resume: bool, inputs: str) -> None:
        """Refuse a folder that holds something else. Nothing is written yet.

        inputs: a fingerprint of data and model that the spec does not name; what is resumed must have the same.
        """
        if (self.path / "spec.toml").exists():
            self._same_spec(spec)
            if resume and self._begun() and self._inputs() != inputs:
                raise StoreError(f"{self.path}: was made from other data or another model; choose another --out")
        elif self.path.is_dir() and any(not entry.name.endswith(".part") for entry in self.path.iterdir()):
            raise StoreError(f"{self.path}: is not empty and holds no run; choose another --out")

    def begin(self, spec: Spec, resume: bool, inputs: str, device: torch.device) -> None:
        """Make the folder, or take it over; without `resume` start afresh."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume:
                for name in ("result.json", "checkpoint.pt", "rounds.jsonl", "verdicts.npz", "model.pt"):
                    (self.path / name).unlink(missing_ok=True)
            self._write("spec.toml", spec.to_toml().encode())
            self._write("inputs.txt", inputs.encode())
            self._write_json("environment.json", environment(device))
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from None

    def fail(self, spec: Spec, status: str, message: str) -> None:
        """Write why there is no result."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from None
        if not (self.path / "spec.toml").exists():
            self._write("spec.toml", spec.to_toml().encode())
        self._write_json("failed.json", {"status": status, "message": message})

    def failure(self) -> tuple[str, str] | None:
        """(status, message) of a run that left no result."""
        path = self.path / "failed.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return str(found["status"]), str(found["message"])
        except OSError:
            return None
        except (ValueError, LookupError, TypeError):
            return "failed", f"{path}: is damaged"

    def forgive(self) -> None:
        """Forget a failure: the run is tried again."""
        (self.path / "failed.json").unlink(missing_ok=True)

    def _begun(self) -> bool:
        """Whether there is something to resume."""
        return any((self.path / name).exists() for name in ("result.json", "checkpoint.pt"))

    def _inputs(self) -> str:
        path = self.path / "inputs.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _same_spec(self, spec: Spec) -> None:
        try:
            found = read_spec(self.path / "spec.toml")
        except SpecError as error:
            raise StoreError(f"{self.path}: its spec.toml is damaged ({error}); choose another --out") from None
        if found.canonical() != spec.canonical():
            raise StoreError(
                f"{self.path}: holds a run with other settings ({_differences(found, spec)}); choose another --out"
            )

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StoreError(
                f"{path}: is damaged ({error}); remove it, or run without --resume, to start afresh"
            ) from None
        return found

    def checkpoint(self, federation: Federation) -> Progress | None:
        """Where an unfinished run stands, on the federation's device."""
        path = self.path / "checkpoint.pt"
        if not path.exists():
            return None
        device = federation.byzantine.device
        try:
            saved = torch.load(path, map_location=device, weights_only=True)
            state = State(saved["params"], saved["uploads"], saved["memory"], torch.empty_like(saved["uploads"]))
            curve = tuple(json.loads(saved["curve"]))
            return Progress(saved["rounds"], state, curve, saved["reasons"], saved["scores"], saved["seconds"])
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, pickle.UnpicklingError):
            raise StoreError(f"{path}: is damaged; remove it, or run without --resume, to start afresh") from None

    def save(self, progress: Progress) -> None:
        """Write the checkpoint and the lines so far."""
        buffer = io.BytesIO()
        state = progress.state
        torch.save(
            {
                "rounds": progress.rounds,
                "params": state.params,
                "uploads": state.uploads,
                "memory": dict(state.memory),
                "curve": json.dumps(progress.curve),
                "reasons": progress.reasons,
                "scores": progress.scores,
                "seconds": progress.seconds,
            },
            buffer,
        )
        self._write("checkpoint.pt", buffer.getvalue())
        self._write_lines(progress)

    def finish(self, federation: Federation, progress: Progress, result: dict[str, Any]) -> None:
        """Write everything a finished run leaves, the result last."""
        self._write_lines(progress)
        verdicts, model = io.BytesIO(), io.BytesIO()
        np.savez_compressed(
            verdicts,
            reasons=progress.reasons.cpu().numpy(),
            scores=progress.scores.cpu().numpy(),
            byzantine=federation.byzantine.cpu().numpy(),
        )
        params = federation.model.tensors(progress.state.params.cpu())
        torch.save({name: value.clone() for name, value in params.items()}, model)
        self._write("verdicts.npz", verdicts.getvalue())
        self._write("model.pt", model.getvalue())
        self._write_json("result.json", result)
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def _write_lines(self, progress: Progress) -> None:
        self._write("rounds.jsonl", "".join(json.dumps(line) + "\n" for line in progress.curve).encode())

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content, f".{name}.part")


def write_whole(path: Path, content: bytes, part: str) -> None:
    """A file that is whole once it exists. part: its name until then, which nobody else may use."""
    unfinished = path.with_name(part)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); make room or choose another --out") from None


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, so that a result can be placed later."""
    versions = {"noisegate": __version__}  # of what runs, installed or not
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


def _differences(found: Spec, asked: Spec) -> str:
    old, new = found.canonical(), asked.canonical()
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return ", ".join(f"{key} = {old.get(key)!r}, not {new.get(key)!r}" for key in keys)
