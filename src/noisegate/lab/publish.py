"""What of a finished secret run may be given away: the model and what it says about privacy, and nothing else.

model.safetensors  the model's tensors, and no other word
privacy.json       the statement, for programs
privacy.txt        the same, for people
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save

from noisegate.checks import plain
from noisegate.errors import SpecError, StoreError
from noisegate.lab.files import number, read_whole, write_whole
from noisegate.lab.plain import PlainSpec, plain_spec, read_plain
from noisegate.lab.promise import STATED
from noisegate.lab.result import stored
from noisegate.lab.statement import FIELDS, as_text
from noisegate.lab.store import CHECKPOINT, MODEL, RESULT, SPEC, RunFolder
from noisegate.version import __version__

JSON, TEXT = "privacy.json", "privacy.txt"
BESIDE = ("reference", "undefended")
"""Runs that `noisegate run` trains on the same data and puts below the run."""

NUMBER, HEADER = 8, 2**20
"""Bytes that a parameter and the header of the model may take."""


def publish(run: Path, out: Path) -> Path:
    """Write to `out`, which must be empty or not exist, what may be given away of the run folder `run`."""
    found = _publishable(run)
    model = _model(run, found)
    said = statement(found, _beside(run), hashlib.sha256(model).hexdigest())
    files = {
        MODEL: model,
        JSON: (json.dumps(said, indent=2) + "\n").encode(),
        TEXT: as_text(said).encode(),
    }
    _put(out, files)
    return out


def _publishable(run: Path) -> dict[str, Any]:
    """The result of a run whose model has the privacy that it states, or a StoreError that says why it has not."""
    found = _result(run)
    if found is None:
        raise StoreError(f"{plain(run)}: is no finished run; only what has a result.json can be published")
    if found.get("secret") is not True or found["spec"].get("secret", True) is not True:
        raise StoreError(
            f"{plain(run)}: is not a secret run: its seed gives the noise back, so its model has no privacy; "
            "train it again with --secret"
        )
    if not found["sigma"] > 0 or found["epsilon"] is None:
        raise StoreError(f"{plain(run)}: was trained without noise (sigma 0): its model has no privacy")
    if found["accountant"] == STATED:
        raise StoreError(
            f"{plain(run)}: its epsilon was stated, not computed; train it again where dp-accounting is installed"
        )
    if missing := [name for name in FIELDS if found.get(name) is None]:
        raise StoreError(
            f"{plain(run)}: its result does not say {', '.join(missing)}; train it again with this version"
        )
    if wrong := [name for name, kind in FIELDS.items() if not _is(kind, found[name])]:
        raise StoreError(f"{plain(run)}: its result is damaged ({', '.join(wrong)})")
    return found


def _is(kind: type, value: Any) -> bool:
    return number(value) and value >= 0 if kind is float else isinstance(value, kind)


def _result(run: Path) -> dict[str, Any] | None:
    """What a run folder's result says, checked against its spec; None if it has none."""
    if not (run / RESULT).exists():
        return None
    folder = RunFolder(run)
    try:
        found = folder.result(read_plain(run / SPEC))
    except SpecError as error:
        raise StoreError(f"{plain(run)}: its spec.toml is damaged ({plain(error)})") from None
    if found is not None:
        stored(found, folder)
    return found


def _model(run: Path, found: Mapping[str, Any]) -> bytes:
    """The model's tensors as they were written in the end, made into a file anew."""
    path = run / MODEL
    try:
        content = read_whole(path, NUMBER * int(found["parameters"]) + HEADER)
        if hashlib.sha256(content).hexdigest() != RunFolder(run).sums().get(MODEL):
            raise StoreError(f"{plain(path)}: is damaged, or not this run's model (its checksum does not fit)")
        tensors = load(content)
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: is missing, so there is nothing to publish") from None
    except SafetensorError as error:
        raise StoreError(f"{plain(path)}: is damaged ({plain(error)})") from None
    if sum(value.numel() for value in tensors.values()) != found["parameters"]:
        raise StoreError(f"{plain(path)}: has another number of parameters than its result says")
    if not all(bool(value.isfinite().all()) for value in tensors.values()):
        raise StoreError(f"{plain(path)}: its numbers are not finite")
    return save(tensors)


def _beside(run: Path) -> list[dict[str, Any]]:
    """What else the folder shows to have been trained on the same data by the same command."""
    others: list[dict[str, Any]] = []
    for name in BESIDE:
        folder = run / name
        found = _result(folder)
        if found is not None:
            others.append({"run": name, **{key: found[key] for key in ("epsilon", "delta", "rounds")}})
        elif (folder / CHECKPOINT).exists() or (folder / SPEC).exists():
            others.append({"run": name, "epsilon": None, "delta": None, "rounds": None})
    return others


def statement(found: Mapping[str, Any], others: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The privacy statement. found: the result. others: as of `_beside`. model: the sha256 of the published file."""
    spec = found["spec"]
    said: dict[str, Any] = {
        "statement": "noisegate privacy statement 1",
        "unit": "one example of one worker",
        "relation": found["relation"],
        "declared": found["declared"],
        "sampling": spec["sampling"],
        "sampling_rate": found["sampling_rate"],
        "epsilon": found["epsilon"],
        "delta": found["delta"],
        "epsilon_at_1e_5": found["epsilon_at_1e_5"],
        "mu": found["mu"],
        "rounds": found["rounds"],
        "sigma": found["sigma"],
        "batch": spec["batch"],
        "worker": spec["worker"]["name"],
        "mechanism": _mechanism(spec),
        "accountant": found["accountant"],
        "noise": "entropy of the operating system; float64, rounded to a public grid",
        "model": {"name": found["model"], "parameters": found["parameters"], "sha256": model},
        "noisegate": __version__,
        "trained_beside": others,
        "together": _together(found, others),
    }
    if isinstance(found.get("copies"), int) and found["copies"] > 1:
        said |= {"copies": found["copies"], "epsilon_with_copies": found.get("epsilon_with_copies")}
    return said


def _mechanism(spec: Mapping[str, Any]) -> str:
    """How the worker makes its uploads private; a stranger's class is not asked, since that would run its code."""
    known = plain_spec(spec)
    if isinstance(known, PlainSpec) and "worker" in known.strangers:
        return f"that of {plain(spec['worker']['name'])}"
    return str((known.standin if isinstance(known, PlainSpec) else known).build_worker().mechanism)


def _together(found: Mapping[str, Any], others: list[dict[str, Any]]) -> dict[str, float] | None:
    """What all of them cost at most, by adding up; None where one of them has no price."""
    everything = [found, *others]
    if not others or any(one["epsilon"] is None for one in everything):
        return None
    return {key: sum(float(one[key]) for one in everything) for key in ("epsilon", "delta")}


def _put(out: Path, files: Mapping[str, bytes]) -> None:
    """A folder that holds these files, all of them or none."""
    part = out.absolute().with_name(f".{out.absolute().name}.{uuid4().hex}.part")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise StoreError(f"{plain(out)}: is not empty; choose another -o")
        part.mkdir(parents=True)
        try:
            for name, content in files.items():
                write_whole(part / name, content)
            if out.exists():
                out.rmdir()
            part.rename(out)
        finally:
            if part.exists():
                for entry in part.iterdir():
                    entry.unlink()
                part.rmdir()
    except OSError as error:
        raise StoreError(f"{plain(out)}: cannot be written ({error.strerror}); choose another -o") from None
