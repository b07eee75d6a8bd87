"""What a folder holds, read with care: what is missing or damaged becomes a sentence, never a wrong number."""

import io
import json
import math
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from noisegate.errors import NoisegateError, SpecError, StoreError
from noisegate.lab.launch import reference, undefended
from noisegate.lab.plot import part
from noisegate.lab.spec import PARTS, Spec, make_spec, read_settings
from noisegate.views import Reason

Status = Literal["done", "unfinished", "failed", "skipped"]

NEEDED = ("accuracy", "best_accuracy", "rounds", "workers", "byzantine_workers", "delta", "sigma")
"""Numbers without which a result is none."""


@dataclass(frozen=True)
class Verdicts:
    """verdicts.npz. reasons, scores: (rounds, n). byzantine: (n,)."""

    reasons: np.ndarray
    scores: np.ndarray
    byzantine: np.ndarray


@dataclass(frozen=True)
class RunRecord:
    """A run folder as it was found.

    settings: what was asked for, as plain values; spec: the same checked, if it can be. curve: whole lines of
    rounds.jsonl. problems: what is missing or damaged, a sentence each. message: why it failed or was skipped.
    beside: results of the same training "reference" (no attackers, plain mean) and "undefended", where they are known.
    """

    path: Path
    settings: dict[str, Any]
    spec: Spec | None
    spec_text: str
    environment: dict[str, Any]
    curve: list[dict[str, Any]]
    result: dict[str, Any] | None
    verdicts: Verdicts | None
    status: Status
    message: str = ""
    problems: list[str] = field(default_factory=list)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The run in a few words."""
        aggregator, attack = (part(self.settings.get(key, "?")) for key in ("aggregator", "attack"))
        return f"{aggregator} against {attack} on {self.settings.get('dataset', '?')}"


def kind_of(path: Path) -> Literal["run", "sweep"]:
    """What a folder is; StoreError if it is neither."""
    if (path / "spec.toml").exists():
        return "run"
    if (path / "sweep.toml").exists() or (path / "runs").is_dir():
        return "sweep"
    if not path.is_dir():
        raise StoreError(f"{path}: there is no such folder; give one that `noisegate run` or `noisegate sweep` left")
    left = [name for name in ("result.json", "rounds.jsonl", "verdicts.npz") if (path / name).exists()]
    if left:
        raise StoreError(f"{path}: has {', '.join(left)}, but its spec.toml is missing, so nobody can say what was run")
    raise StoreError(
        f"{path}: holds neither a run (spec.toml) nor a sweep (runs/); give a folder that `noisegate run` or "
        "`noisegate sweep` left"
    )


def read_run(path: Path, beside: bool = True) -> RunRecord:
    """A run folder, finished or not. `beside`: look for the runs that put its accuracy into proportion."""
    problems: list[str] = []
    spec, settings, text = _spec(path, problems)
    result = _result(path, problems)
    curve = _curve(path, result, problems)
    failed = _json(path / "failed.json", problems) if (path / "failed.json").exists() else {}
    status: Status = "done" if result else "unfinished"
    if not result and failed:
        status = "skipped" if failed.get("status") == "skipped" else "failed"
    environment = {}
    if (path / "environment.json").exists():
        environment = _json(path / "environment.json", problems)
    elif status in ("done", "unfinished"):
        problems.append("environment.json is missing: versions and device are not known.")
    record = RunRecord(
        path=path,
        settings=dict(result["spec"]) if result and isinstance(result.get("spec"), dict) else settings,
        spec=spec,
        spec_text=text,
        environment=environment,
        curve=curve,
        result=result,
        verdicts=_verdicts(path, result, problems),
        status=status,
        message=str(failed.get("message", "")) if status in ("failed", "skipped") else "",
        problems=problems,
    )
    if beside:
        record.beside.update(_beside(path, spec))
    return record


def number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spec(path: Path, problems: list[str]) -> tuple[Spec | None, dict[str, Any], str]:
    try:
        text = (path / "spec.toml").read_text(encoding="utf-8", errors="replace")
        settings = read_settings(path / "spec.toml")
    except FileNotFoundError:
        problems.append("spec.toml is missing: nobody can say what was asked for.")
        return None, {}, ""
    except SpecError as error:
        raise StoreError(f"{path}: its spec.toml is damaged ({error}); nothing can be said about this run") from None
    except OSError as error:
        raise StoreError(f"{path / 'spec.toml'}: cannot be read ({error.strerror})") from None
    try:
        spec = make_spec(settings, "spec.toml")
    except SpecError as error:
        problems.append(f"The spec cannot be built here ({error}); it is shown as it is written.")
        nameless = {key: "?" for key in PARTS if isinstance(value := settings.get(key), dict) and "name" not in value}
        return None, settings | nameless, text
    return spec, spec.canonical(), text


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged and left out.")
        return {}
    return found


def _result(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not (path / "result.json").exists():
        return None
    known = len(problems)
    found = _json(path / "result.json", problems)
    if len(problems) > known:
        return None
    needed = NEEDED if found.get("sigma") == 0 else (*NEEDED, "epsilon")  # without noise there is none
    lacks = [name for name in needed if not number(found.get(name))]
    if lacks:
        problems.append(f"result.json is damaged and left out: it has no number for {', '.join(lacks)}.")
        return None
    return found


def _curve(path: Path, result: dict[str, Any] | None, problems: list[str]) -> list[dict[str, Any]]:
    """Whole lines only, in the order of their rounds."""
    lines: list[Any] = []
    try:
        text = (path / "rounds.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if result:
            problems.append("rounds.jsonl is missing: accuracy over the rounds is taken from result.json.")
            found = result.get("curve")
            lines = found if isinstance(found, list) else []
    else:
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append(None)
    whole = [line for line in lines if _whole(line)]
    if len(whole) < len(lines):
        problems.append(f"rounds.jsonl is damaged: {len(lines) - len(whole)} of {len(lines)} lines are left out.")
    return sorted(whole, key=lambda line: int(line["round"]))


def _whole(line: Any) -> bool:
    if not isinstance(line, dict) or not number(line.get("round")) or not number(line.get("accuracy")):
        return False
    rejected = line.get("rejected", {})
    pairs = [line.get("selected", {}), *(rejected.values() if isinstance(rejected, dict) else [None])]
    return 0 <= line["accuracy"] <= 1 and all(
        isinstance(pair, dict) and all(number(pair.get(group, 0)) for group in ("honest", "byzantine"))
        for pair in pairs
    )


def _verdicts(path: Path, result: dict[str, Any] | None, problems: list[str]) -> Verdicts | None:
    if not (path / "verdicts.npz").exists():
        if result:
            problems.append("verdicts.npz is missing: who was refused when is not known.")
        return None
    try:
        content = io.BytesIO((path / "verdicts.npz").read_bytes())  # numpy leaves a damaged file open
        with np.load(content, allow_pickle=False) as file:
            found = Verdicts(file["reasons"], file["scores"], file["byzantine"])
        shape = found.reasons.shape
        if len(shape) != 2 or found.scores.shape != shape or found.byzantine.shape != shape[1:] or 0 in shape:
            raise ValueError("shapes do not fit")
        if found.byzantine.dtype != bool or found.scores.dtype.kind != "f" or found.reasons.dtype.kind not in "iu":
            raise ValueError("types do not fit")
        if int(found.reasons.min()) < 0 or int(found.reasons.max()) >= len(Reason):
            raise ValueError("there is no such reason")
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        problems.append("verdicts.npz is damaged and left out: who was refused when is not known.")
        return None
    return found


def _beside(path: Path, spec: Spec | None) -> dict[str, dict[str, Any]]:
    """`noisegate run` leaves them below the run, a sweep beside it; each only if its settings are the right ones."""
    found: dict[str, dict[str, Any]] = {}
    if spec is None:
        return found
    for word, other in (("reference", reference), ("undefended", undefended)):
        try:
            wanted = other(spec)
        except NoisegateError:  # such as a rule without which the attack does not exist
            continue
        for place in (path / word, path.parent / wanted.name()):
            result = _result(place, []) if (place / "result.json").exists() else None
            if result and place != path and _same(place, wanted):
                found[word] = result
                break
    return found


def _same(path: Path, wanted: Spec) -> bool:
    try:
        return make_spec(read_settings(path / "spec.toml"), "spec.toml").canonical() == wanted.canonical()
    except SpecError:
        return False
