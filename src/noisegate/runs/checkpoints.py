"""Where an unfinished run stands, in one file that nothing in it can make do anything: safetensors and JSON.

The file holds tensors, the curve as JSON, and in its header what it is a checkpoint of: the run's name, the digest of
its spec, the keyed fingerprint of its data, versions, the kind of device, and the sha256 of the whole file. It is
refused unless all of that fits, its tensors have the federation's shapes and types, and its numbers are finite. The
checksum tells damage and files that were put there for others; it does not tell a file that was made on purpose by
somebody who computes the sum anew. Such a file still cannot run code or have other shapes, only other numbers.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import count, number, parse, read_whole
from noisegate.protocol import ServerState
from noisegate.runs.key import Fingerprint, as_fingerprint
from noisegate.runs.spec import MOST_ROUNDS, Spec
from noisegate.runs.wellformed import whole_curve
from noisegate.simulate import Federation, FederationState, Progress
from noisegate.version import __version__
from noisegate.views import Reason

KIND, ABOUT, NO_SUM = "noisegate checkpoint 2", "noisegate", "0" * 64
STATE = "state."
"""What names of the aggregator's own tensors begin with."""

FELL_BACK = "fell_back"
VERDICTS = ("reasons", "scores", "weights", FELL_BACK)
"""The tensors with a row for each round."""

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
TYPES = FLOATS | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
"""Of an aggregator's state."""

ALLOWANCE = 2**28
LARGER = 16
"""A file may be LARGER times as large as model, uploads and verdicts are, and ALLOWANCE bytes: how large an
aggregator's state is cannot be known before it was made."""

HEADER = 2**20
LINE = 2**12
"""Bytes that header and a line of the curve may take."""


@dataclass(frozen=True)
class Identity:
    """What a folder is of. run: the spec's name; spec: its digest; inputs: data and model that it does not name."""

    run: str
    spec: str
    inputs: Fingerprint | None = None

    @classmethod
    def of(cls, spec: Spec, inputs: Fingerprint | None = None) -> "Identity":
        """Of a run."""
        canonical = json.dumps(spec.canonical(), sort_keys=True)
        return cls(spec.name(), hashlib.sha256(canonical.encode()).hexdigest(), inputs)


@dataclass(frozen=True)
class Standing:
    """How far a checkpoint is, by its header alone. reserved: the first round that a secret run has not drawn for."""

    rounds: int
    of: int
    seconds: float
    reserved: int


def pack(progress: Progress, identity: Identity, device: str) -> bytes:
    """The bytes of a checkpoint."""
    state = progress.state
    tensors = {
        "params": state.params,
        "uploads": state.uploads,
        "reasons": progress.reasons,
        "scores": progress.scores,
        "weights": progress.weights,
        FELL_BACK: _fell_back(progress),
        "curve": torch.frombuffer(bytearray(json.dumps(progress.curve).encode()), dtype=torch.uint8),
        **{STATE + name: value for name, value in state.server.aggregator.items()},
    }
    for name, value in state.server.aggregator.items():
        if value.dtype not in TYPES:
            raise StoreError(f"aggregator: its state {plain(name)!r} is of type {value.dtype}, which cannot be saved")
    about = {
        "kind": KIND,
        "sha256": NO_SUM,
        "run": identity.run,
        "spec": identity.spec,
        "inputs": identity.inputs.as_dict() if identity.inputs else None,
        "versions": versions(),
        "device": device,
        "rounds": progress.rounds,
        "of": len(progress.reasons),
        "seconds": progress.seconds,
        "reserved": progress.reserved,
    }
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}  # no two share memory
    for name in VERDICTS:  # of a round that was interrupted
        own[name][progress.rounds :] = 0
    content = save(own, {ABOUT: json.dumps(about)})  # one entry: of several the order is not always the same
    return content.replace(NO_SUM.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def _fell_back(progress: Progress) -> Tensor:
    none = torch.zeros(len(progress.reasons), dtype=torch.uint8)
    return none if progress.fell_back is None else progress.fell_back


def versions() -> dict[str, str]:
    """Of what numbers depend on."""
    return {"noisegate": __version__, "torch": str(torch.__version__)}


def read_checkpoint(path: Path, federation: Federation, identity: Identity) -> Progress:
    """Where a run stands, on the federation's device. StoreError if the file is of anything else, or damaged."""
    content = read_whole(path, _most(federation))
    about = _about(content, path)
    _same_sum(content, about, path)
    device = federation.adversary.byzantine.device
    _same_run(about, identity, device.type, path)
    standing = _standing(about, path)
    try:
        tensors = {name: value.to(device, copy=True) for name, value in load(content).items()}
        curve = parse(tensors.pop("curve").cpu().numpy().tobytes(), path)
    except (SafetensorError, LookupError, ValueError, RuntimeError, TypeError) as error:
        raise _damaged(path, plain(error)) from None
    if (why := _odd(tensors, curve, standing, federation)) is not None:
        raise _damaged(path, why)
    kept = {name.removeprefix(STATE): value for name, value in tensors.items() if name.startswith(STATE)}
    server = ServerState(tensors["params"], kept, tensors["uploads"])
    state = FederationState(server, torch.empty_like(server.received))
    found = tensors["reasons"], tensors["scores"], tensors["weights"]
    more = standing.seconds, standing.reserved, tensors[FELL_BACK]
    return Progress(standing.rounds, state, tuple(curve), *found, *more)


def read_standing(path: Path) -> Standing | None:
    """How far a checkpoint is, for people: its tensors stay on disk. None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            content = head + file.read(min(HEADER, int.from_bytes(head, "little")))
        return _standing(_about(content, path), path)
    except (OSError, StoreError):
        return None


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{plain(path)}: is damaged ({why}); remove it, or run without --resume, to start afresh")


def _most(federation: Federation) -> int:
    """Bytes that a checkpoint of this federation can take."""
    n, d, rounds = len(federation.workers), federation.d, federation.schedule.rounds
    return ALLOWANCE + HEADER + LARGER * (4 * d * (n + 1) + 9 * rounds * n) + LINE * rounds


def _about(content: bytes, path: Path) -> dict[str, Any]:
    """What the header says of the file."""
    try:
        length = struct.unpack_from("<Q", content)[0]
        if length > HEADER or 8 + length > len(content):
            raise _damaged(path, "cut off")
        header = parse(content[8 : 8 + length], path)
        about = parse(header["__metadata__"][ABOUT].encode(), path)
    except (struct.error, LookupError, TypeError, AttributeError):
        raise _damaged(path, "not a checkpoint") from None
    except StoreError as error:
        raise _damaged(path, str(error).partition(": ")[2] or str(error)) from None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise _damaged(path, "not a checkpoint of this version")
    return about


def _same_sum(content: bytes, about: Mapping[str, Any], path: Path) -> None:
    told = about.get("sha256")
    if not isinstance(told, str) or len(told) != len(NO_SUM) or content.count(told.encode()) != 1:
        raise _damaged(path, "it has no checksum")
    found = hashlib.sha256(content.replace(told.encode(), NO_SUM.encode(), 1)).hexdigest()
    if found != told:
        raise _damaged(path, "its checksum does not fit")


def _same_run(about: Mapping[str, Any], identity: Identity, device: str, path: Path) -> None:
    """Refuse a checkpoint of another run, or one that would go on with other numbers here."""
    afresh = "run without --resume to start afresh"
    if (about.get("run"), about.get("spec")) != (identity.run, identity.spec):
        raise StoreError(f"{plain(path)}: is of another run; remove it, or {afresh}")
    inputs = as_fingerprint(about.get("inputs"), path)
    if inputs != identity.inputs:
        other = inputs and identity.inputs and inputs.key != identity.inputs.key
        what = "is fingerprinted with another key" if other else "was made from other data, model or loss"
        raise StoreError(f"{plain(path)}: {what}; remove it, or {afresh}")
    if (begun := about.get("device")) != device:
        raise StoreError(
            f"{plain(path)}: was begun on {plain(begun)}; a {device} draws other noise: resume there, or {afresh}"
        )
    if (found := about.get("versions")) != versions():
        told = ", ".join(f"{plain(key)} {plain(value)}" for key, value in _items(found))
        raise StoreError(
            f"{plain(path)}: was begun with {told or 'unknown versions'}, and other versions may draw other noise; "
            f"resume with those, or {afresh}"
        )


def _items(found: Any) -> list[tuple[Any, Any]]:
    return list(found.items())[:4] if isinstance(found, dict) else []


def _standing(about: Mapping[str, Any], path: Path) -> Standing:
    rounds, of, seconds, reserved = (about.get(key) for key in ("rounds", "of", "seconds", "reserved"))
    if not (count(rounds) and count(of) and count(reserved) and number(seconds)):
        raise _damaged(path, "how far it is is no number")
    found = Standing(int(rounds), int(of), float(seconds), int(reserved))  # type: ignore[arg-type]
    if not (found.rounds <= found.of <= MOST_ROUNDS and found.reserved <= found.of and found.seconds >= 0):
        raise _damaged(path, "how far it is is out of range")
    return found


def _odd(tensors: Mapping[str, Tensor], curve: Any, standing: Standing, federation: Federation) -> str | None:
    """What is wrong with the tensors and the curve of a checkpoint; None if nothing is."""
    n, d, rounds = len(federation.workers), federation.d, federation.schedule.rounds
    kind = federation.mechanism.model.initial()
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "params": ((d,), kind.dtype),
        "uploads": ((n, d), kind.dtype),
        "reasons": ((rounds, n), torch.uint8),
        "scores": ((rounds, n), torch.float32),
        "weights": ((rounds, n), torch.float32),
        FELL_BACK: ((rounds,), torch.uint8),
    }
    own = {name for name in tensors if name.startswith(STATE)}
    if tensors.keys() - own != forms.keys():
        return "it has other tensors"
    for name, form in forms.items():
        if (tuple(tensors[name].shape), tensors[name].dtype) != form:
            return f"{name} has another shape or type"
    if any(tensors[name].dtype not in TYPES for name in own):
        return "the aggregator's state is of another type"
    sent = tensors["uploads"][~federation.adversary.byzantine]  # what Byzantine workers send may be anything
    if not all(bool(value.isfinite().all()) for value in (sent, *(tensors[name] for name in own))):
        return "its numbers are not finite"
    if not bool(tensors["params"].isfinite().all()):  # damage, or attackers that drove it there: nothing to go on with
        return "its model is not finite"
    if standing.of != rounds:
        return "it is of another number of rounds"
    if rounds * n and int(tensors["reasons"].max()) >= len(Reason):
        return "there is no such reason"
    if any(bool(tensors[name][standing.rounds :].any()) for name in VERDICTS):
        return "it has verdicts of rounds that were not played"
    return None if whole_curve(curve, standing.rounds) else "its curve is none"
