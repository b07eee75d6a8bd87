"""What may be published of a finished secret run: the model and its privacy statement, and nothing else.

model.safetensors  the model's tensors, without metadata
privacy.json       the statement, for programs
privacy.txt        the statement, as text
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save

from noisegate import privacy
from noisegate.checks import plain
from noisegate.entropy import slack
from noisegate.errors import SpecError, StoreError
from noisegate.files import read_whole, write_whole
from noisegate.privacy import IN_WORDS
from noisegate.runs import costs
from noisegate.runs.promise import STATED
from noisegate.runs.result import stored
from noisegate.runs.statement import NOT_COVERED, as_text
from noisegate.runs.store import CHECKPOINT, MODEL, RESULT, SPEC, RunFolder
from noisegate.runs.unbuilt import UnbuiltSpec, read_unbuilt, unbuilt_spec, uses_plugins
from noisegate.sampling import BALANCED, SAMPLINGS, Balanced
from noisegate.version import __version__

JSON, TEXT = "privacy.json", "privacy.txt"
"""The names of the two files of the statement."""

BESIDE = ("reference", "undefended", "noiseless")
"""The runs that `noisegate run` trains on the same data, in folders below the run."""

NUMBER, HEADER = 8, 2**20
"""The most bytes that one parameter takes in the model's file, and that its header takes."""


def publish(run: Path, out: Path) -> Path:
    """Write what may be published of the run folder `run` to `out`, which must be empty or not exist."""
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
    """The result of a run whose model may be published. StoreError says why it may not."""
    found = _result(run)
    if found is None:
        raise StoreError(f"{plain(run)}: is no finished run; only what has a result.json can be published")
    if found.get("secret") is not True or found["spec"].get("secret", True) is not True:
        raise StoreError(
            f"{plain(run)}: is not a secret run: its seed gives the noise back, so its model has no privacy; "
            "train it again with --secret"
        )
    if found["byzantine_workers"]:
        raise StoreError(
            f"{plain(run)}: was trained with {found['byzantine_workers']} simulated Byzantine workers, which hold "
            "copies of private examples and may use them without noise; train it again with --byzantine 0"
        )
    if not found["sigma"] > 0 or found["epsilon"] is None:
        raise StoreError(f"{plain(run)}: was trained without noise (sigma 0): its model has no privacy")
    if found["accountant"] == STATED:
        raise StoreError(
            f"{plain(run)}: its epsilon was stated, not computed; train it again where dp-accounting is installed"
        )
    if unknown := [name for name in ("epsilon_at_1e_5", "mu") if found[name] is None]:
        raise StoreError(f"{plain(run)}: no finite {', '.join(unknown)} is known for its noise; train it with more")
    return found


def _result(run: Path) -> dict[str, Any] | None:
    """The result in a run folder, checked against its spec; None if there is none."""
    if not (run / RESULT).exists():
        return None
    folder = RunFolder(run)
    try:
        found = folder.result(read_unbuilt(run / SPEC))
    except SpecError as error:
        raise StoreError(f"{plain(run)}: its spec.toml is damaged ({plain(error)})") from None
    if found is not None:
        try:
            stored(found, folder)
        except StoreError as error:
            raise StoreError(f"{str(error).partition('; remove it')[0]}; it cannot be published") from None
    return found


def _model(run: Path, found: Mapping[str, Any]) -> bytes:
    """The content of the published model: the tensors of the run's model, checked and without metadata."""
    path = run / MODEL
    try:
        content = read_whole(path, NUMBER * _numbers(found) + HEADER)
        if hashlib.sha256(content).hexdigest() != RunFolder(run).sums().get(MODEL):
            raise StoreError(f"{plain(path)}: is damaged, or not this run's model (its checksum does not fit)")
        tensors = load(content)
    except FileNotFoundError:
        raise StoreError(f"{plain(path)}: is missing, so there is nothing to publish") from None
    except SafetensorError as error:
        raise StoreError(f"{plain(path)}: is damaged ({plain(error)})") from None
    if sum(value.numel() for value in tensors.values()) != _numbers(found):
        raise StoreError(f"{plain(path)}: holds not as many numbers as its result says")
    if not all(bool(value.isfinite().all()) for value in tensors.values()):
        raise StoreError(f"{plain(path)}: its numbers are not finite")
    return save(tensors)


def _numbers(found: Mapping[str, Any]) -> int:
    """How many numbers a model's file holds: those that were trained, frozen ones and buffers."""
    return int(found["parameters"]) + int(found.get("frozen", 0))


def _beside(run: Path) -> dict[str, dict[str, Any] | None]:
    """The results of the other runs of the same command in the folder, by name; None for a run without a result."""
    others: dict[str, dict[str, Any] | None] = {}
    for name in BESIDE:
        folder = run / name
        if (folder / RESULT).exists() or (folder / CHECKPOINT).exists() or (folder / SPEC).exists():
            others[name] = _result(folder)
    return others


def statement(found: Mapping[str, Any], others: Mapping[str, dict[str, Any] | None], model: str) -> dict[str, Any]:
    """The privacy statement. found: the result. others: as of `_beside`. model: the sha256 of the published model."""
    spec, mechanism = found["spec"], _mechanism(found["spec"])
    epsilon, delta = slack(found["parameters"] * found["rounds"])
    return {
        "statement": "noisegate privacy statement 1",
        "unit": "one example of one worker",
        "relation": found["relation"],
        "relation_in_words": IN_WORDS[spec["sampling"]],
        "declared": found["declared"],
        "declared_from": "the spec" if spec.get("declared") else "the data",
        "sampling": spec["sampling"],
        "sampling_rate": found["sampling_rate"],
        "class_shares": found.get("class_shares"),
        "class_rates": found.get("class_rates"),
        "epsilon": found["epsilon"],
        "delta": found["delta"],
        "epsilon_at_1e_5": found["epsilon_at_1e_5"],
        "mu": found["mu"],
        "groups": _groups(found, mechanism),
        "rounds": found["rounds"],
        "rounds_lost": found["rounds_lost"],
        "sigma": found["sigma"],
        "noise_over_change": found["sigma"] / SAMPLINGS[spec["sampling"]].sensitivity,
        "batch": spec["batch"],
        "worker": _named(spec["worker"]["name"]),
        "mechanism": mechanism,
        "accountant": plain(found["accountant"]),
        "randomness": "the operating system's, kept nowhere",
        "floating_point": {"epsilon": epsilon, "delta": delta} if mechanism == "gaussian" else None,
        "server_examples": {
            "per_class": spec["auxiliary"],
            "from": _named(spec.get("auxiliary_from") or "the same data"),
        },
        "model": {"name": _named(found["model"]), "parameters": found["parameters"], "sha256": model},
        "noisegate": __version__,
        "trained_beside": [
            {"run": name, **{key: other[key] if other else None for key in ("epsilon", "delta", "rounds")}}
            for name, other in others.items()
        ],
        "together": _together(found, others),
        "not_covered": list(NOT_COVERED),
    }


def _named(name: Any) -> str:
    """What a part or a file is called, without the folders that it lies in: these are nobody else's business."""
    return plain(str(name).replace("\\", "/").rpartition("/")[2])


def _groups(found: Mapping[str, Any], mechanism: str) -> dict[str, float]:
    """The epsilon of two and of four examples of one worker together, where it can be computed."""
    spec = found["spec"]
    if (mechanism, found["accountant"]) != ("gaussian", "pld") or spec["sampling"] not in ("poisson", BALANCED):
        return {}
    scheme = SAMPLINGS[spec["sampling"]](spec["batch"])
    sampling = Balanced(spec["batch"], tuple(found["class_shares"])) if spec["sampling"] == BALANCED else scheme
    asked = {"examples": found["declared"], "rounds": found["rounds"], "delta": found["delta"], "sampling": sampling}
    return {str(k): privacy.group_epsilon(k, found["sigma"], **asked) for k in (2, 4)}


def _mechanism(spec: Mapping[str, Any]) -> str:
    """The mechanism of the spec's worker. A plugin is only named, since asking it would run its code."""
    known = unbuilt_spec(spec)
    if isinstance(known, UnbuiltSpec) and "worker" in known.plugins:
        return f"that of {_named(spec['worker']['name'])}"
    return str((known.standin if isinstance(known, UnbuiltSpec) else known).build_worker().mechanism)


def _together(found: Mapping[str, Any], others: Mapping[str, dict[str, Any] | None]) -> dict[str, float] | None:
    """What all runs cost together; None if there are no others, or one of them has no epsilon."""
    everything = [found, *others.values()]
    if not others or any(one is None or one["epsilon"] is None for one in everything):
        return None
    if any(uses_plugins(one["spec"]) for one in everything if one):  # to price it would run the plugin's code
        return {key: sum(float(one[key]) for one in everything if one) for key in ("epsilon", "delta")}
    (bill,) = costs.bills(costs.training_of(one) for one in everything if one)
    return {"epsilon": bill.epsilon, "delta": bill.delta} if bill.epsilon is not None else None


def _put(out: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, all of them or none."""
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
