"""Reads the folder of a run. A file that is missing or damaged gives a sentence on the page, never a wrong number."""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from noisegate.checks import plain
from noisegate.errors import NoisegateError, SpecError, StoreError
from noisegate.files import MOST_TEXT, number, parse, read_json, read_whole
from noisegate.redteam.plot import part
from noisegate.redteam.trials import RESULTS
from noisegate.runs.launch import noiseless, reference, undefended
from noisegate.runs.publish import BESIDE
from noisegate.runs.result import stored
from noisegate.runs.spec import PARTS
from noisegate.runs.store import LINES, RESULT, VERDICTS, RunFolder
from noisegate.runs.unbuilt import AnySpec, UnbuiltSpec, read_unbuilt, unbuilt_spec
from noisegate.runs.verdicts import Verdicts, read_verdicts
from noisegate.runs.wellformed import finite, whole_line
from noisegate.settings import read_settings

__all__ = ["RunRecord", "RunStatus", "Verdicts", "kind_of", "number", "read_run"]

RunStatus = Literal["done", "unfinished", "failed", "skipped"]
"""How a run stands, as its folder says."""


@dataclass(frozen=True)
class RunRecord:
    """A run folder as it was found.

    settings: the spec as plain values. spec: the same, checked; None if it cannot be. No plugin is imported for it.
    curve: the lines of the result, or the readable lines of rounds.jsonl.
    message: why the run failed or was skipped. problems: a sentence for each file that is missing or damaged.
    beside: the results of the "reference", of the "undefended" and of the "noiseless" run, as far as they are known.
    """

    path: Path
    settings: dict[str, Any]
    spec: AnySpec | None
    spec_text: str
    environment: dict[str, Any]
    curve: list[dict[str, Any]]
    result: dict[str, Any] | None
    verdicts: Verdicts | None
    status: RunStatus
    message: str = ""
    problems: list[str] = field(default_factory=list)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The run in a few words."""
        aggregator, attack = (part(self.settings.get(key, "?")) for key in ("aggregator", "attack"))
        return f"{aggregator} against {attack} on {self.settings.get('dataset', '?')}"


def kind_of(path: Path) -> Literal["run", "sweep", "server", "redteam"]:
    """Whether a folder is that of a run, a sweep, a federation's server or a red team. StoreError if it is none."""
    if any((path / name).exists() for name in ("federation.toml", "trial.toml", "server/federation.toml")):
        return "server"
    if (path / "spec.toml").exists():
        return "run"
    if (path / RESULTS).exists():
        return "redteam"
    if (path / "sweep.toml").exists() or (path / "runs").is_dir():
        return "sweep"
    if not path.is_dir():
        raise StoreError(f"{path}: there is no such folder; give one that `noisegate run` or `noisegate sweep` left")
    left = [name for name in ("result.json", "rounds.jsonl", "verdicts.npz") if (path / name).exists()]
    if left:
        raise StoreError(f"{path}: has {', '.join(left)}, but its spec.toml is missing, so its settings are not known")
    raise StoreError(
        f"{path}: holds neither a run (spec.toml) nor a sweep (runs/) nor a server (federation.toml) nor a red team "
        f"({RESULTS}); give a folder that `noisegate run`, `sweep`, `serve` or `redteam` left"
    )


def read_run(path: Path, beside: bool = True) -> RunRecord:
    """Read a run folder, finished or not. `beside`: also look for its reference and undefended runs."""
    problems: list[str] = []
    spec, settings, text = _spec(path, problems)
    result = _result(path, spec, problems)
    curve = _curve(path, result, problems)
    failed = None if result else RunFolder(path).failure()
    status: RunStatus = "done" if result else "unfinished"
    if failed:
        status = "skipped" if failed[0] == "skipped" else "failed"
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
        message=failed[1] if failed else "",
        problems=problems,
    )
    if beside:
        record.beside.update(_beside(path, spec))
    return record


def _spec(path: Path, problems: list[str]) -> tuple[AnySpec | None, dict[str, Any], str]:
    try:
        text = (path / "spec.toml").read_text(encoding="utf-8", errors="replace")
        settings = read_settings(path / "spec.toml")
    except FileNotFoundError:
        problems.append("spec.toml is missing: the settings of the run are not known.")
        return None, {}, ""
    except SpecError as error:
        raise StoreError(
            f"{plain(path)}: its spec.toml is damaged ({plain(error)}), so its settings are not known"
        ) from None
    except OSError as error:
        raise StoreError(f"{plain(path / 'spec.toml')}: cannot be read ({error.strerror})") from None
    try:
        spec = unbuilt_spec(settings, "spec.toml")
    except SpecError as error:
        problems.append(f"The spec cannot be built here ({plain(error)}); it is shown as it is written.")
        nameless = {
            key: "?"
            for key in (*PARTS, "features")
            if isinstance(value := settings.get(key), dict) and "name" not in value
        }
        return None, settings | nameless, text
    return spec, spec.canonical(), text


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, StoreError):
        found = None
    if not isinstance(found, dict) or not finite(found):
        problems.append(f"{path.name} is damaged and left out.")
        return {}
    return found


def _result(path: Path, spec: AnySpec | None, problems: list[str]) -> dict[str, Any] | None:
    folder = RunFolder(path)
    try:
        if (found := folder.result(spec)) is None:
            return None
        return stored(found, folder).as_dict()
    except StoreError as error:
        why = str(error).removeprefix(f"{plain(path / RESULT)}: ").removeprefix(f"{plain(path)}: its result.json ")
        problems.append(f"result.json is damaged and left out: it {why.partition(';')[0]}.")
        return None


def _curve(path: Path, result: dict[str, Any] | None, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of the result, if the run is finished; else the readable lines of rounds.jsonl, by their rounds."""
    try:
        content = read_whole(path / LINES, MOST_TEXT)
    except FileNotFoundError:
        content = None
    except StoreError:
        content = b"damaged"
    if result:
        if content is None or sha256(content).hexdigest() != RunFolder(path).sums().get(LINES):
            what = "missing" if content is None else "damaged"
            problems.append(f"rounds.jsonl is {what}: accuracy over the rounds is taken from result.json.")
        return list(result["curve"])
    lines = [_line(line) for line in (content or b"").splitlines()]
    whole = [line for line in lines if line is not None]
    if len(whole) < len(lines):
        problems.append(f"rounds.jsonl is damaged: {len(lines) - len(whole)} of {len(lines)} lines are left out.")
    return sorted(whole, key=lambda line: int(line["round"]))


def _line(content: bytes) -> dict[str, Any] | None:
    try:
        line = parse(content, LINES)
    except StoreError:
        return None
    return line if whole_line(line) else None


def _verdicts(path: Path, result: dict[str, Any] | None, problems: list[str]) -> Verdicts | None:
    """The verdicts of a finished run. Without a result they cannot be checked, and are not read."""
    if result is None:
        return None
    try:
        workers = int(result["workers"]) + int(result["byzantine_workers"])
        found, content = read_verdicts(path / VERDICTS, int(result["rounds"]), workers)
        if sha256(content).hexdigest() != RunFolder(path).sums().get(VERDICTS):
            raise StoreError("is damaged (its checksum does not fit)")
    except FileNotFoundError:
        problems.append("verdicts.npz is missing: the verdicts are not known.")
        return None
    except StoreError as error:
        why = str(error).removeprefix(f"{plain(path / VERDICTS)}: ")
        problems.append(f"verdicts.npz {why} and left out: the verdicts are not known.")
        return None
    return found


def _beside(path: Path, spec: AnySpec | None) -> dict[str, dict[str, Any]]:
    """The results of the runs that put this one into proportion, if their specs are the right ones.

    `noisegate run` leaves these runs below the run, and a sweep beside it.
    """
    found: dict[str, dict[str, Any]] = {}
    if spec is None:
        return found
    for word in BESIDE:
        try:
            specs = [beside(spec, word), beside(spec, word, triggered=True)]
        except NoisegateError:  # such as an aggregator without which the attack does not exist
            continue
        places = [(place, wanted) for wanted in specs for place in (path / word, path.parent / wanted.name())]
        for place, wanted in places:
            result = _result(place, wanted, []) if place != path else None
            if result and _same(place, wanted):
                found[word] = result
                break
    return found


def beside(spec: AnySpec, word: str, triggered: bool = False) -> AnySpec:
    """The spec of a run that puts it into proportion. No plugin is imported for it.

    triggered: whether to take an attack that is a plugin for one with a trigger, which stays in the reference.
    """
    change = {"reference": reference, "undefended": undefended, "noiseless": noiseless}[word]
    if not isinstance(spec, UnbuiltSpec):
        return change(spec)
    known = change(spec.standin)
    replaced = {"aggregator"} if word == "undefended" or triggered else {"aggregator", "attack"}
    left = {name: entry for name, entry in spec.plugins.items() if name not in replaced}
    return UnbuiltSpec(known, left) if left else known


def _same(path: Path, wanted: AnySpec) -> bool:
    try:
        return read_unbuilt(path / "spec.toml").canonical() == wanted.canonical()
    except SpecError:
        return False
