"""A trial on one machine: what it runs, and which of its workers are hostile. Only the trial itself may know."""

from dataclasses import dataclass
from pathlib import Path

from noisegate.catalog import is_own, typed
from noisegate.checks import plain, refuse
from noisegate.deploy.layout import SERVER, SPEC, TRIAL, WORKERS, begun, to_toml
from noisegate.errors import SpecError, StoreError
from noisegate.features import catalog_features
from noisegate.federation.ledger_lines import FILE
from noisegate.runs.spec import Spec, read_spec
from noisegate.settings import read_settings


@dataclass(frozen=True)
class LocalTrial:
    """A trial. hostile: the names of the workers that attack."""

    folder: Path
    spec: Spec
    hostile: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "LocalTrial":
        """The trial in a folder. StoreError if there is none."""
        hostile = read_hostile(folder)
        return cls(folder, read_spec(folder / SPEC), hostile)

    @property
    def server(self) -> Path:
        """The folder of its server."""
        return self.folder / SERVER

    def worker(self, name: str) -> Path:
        """The folder of one of its workers."""
        return self.folder / WORKERS / name

    @property
    def begun(self) -> bool:
        """Whether anybody has used anything of it: a ledger, or the server's state."""
        state = self.server / "state"
        return begun(self.server) or state.exists() or any(self.folder.glob(f"{WORKERS}/*/*/{FILE}"))

    def to_toml(self) -> bytes:
        """What trial.toml says."""
        comment = "Which workers of this trial are hostile. No server knows it; nothing but the trial reads it."
        return to_toml({"attack": _name(self.spec, "attack"), "hostile": list(self.hostile)}, comment)


def read_hostile(folder: Path) -> tuple[str, ...]:
    """The hostile workers of the trial in a folder. Its spec is not read, so no code is loaded that it may name."""
    path = folder / TRIAL
    if not path.is_file():
        raise StoreError(f"{plain(folder)}: holds no trial; make one with `noisegate federation init`")
    found = read_settings(path)
    if set(found) != {"attack", "hostile"}:
        raise SpecError(f"{plain(path)}: must have attack and hostile, and nothing else")
    names = typed(f"{plain(path)}: hostile", found["hostile"], list)
    known = {each.name for each in (folder / WORKERS).glob("*")}
    if wrong := [name for name in names if not isinstance(name, str) or name not in known]:
        raise SpecError(f"{plain(path)}: hostile: {plain(wrong)[:100]}: there is no such worker")
    return tuple(names)


def check_trial(spec: Spec) -> None:
    """SpecError if a spec cannot be run between real processes."""
    attack = spec.build_attack()
    if attack.knows == "omniscient" and spec.byzantine:
        raise SpecError(
            f"attack = {_name(spec, 'attack')!r}: is made of the honest workers' uploads, and in a federation nobody "
            "sees these before sending their own; choose one whose knows is blind or data-only, such as "
            "label-flip, or try it with `noisegate run`"
        )
    if spec.sampling != "poisson":
        raise SpecError(f"sampling = {spec.sampling!r}: a federation samples by poisson alone")
    if spec.sigma == 0:
        raise SpecError("sigma = 0.0: no upload leaves a worker without noise; give epsilon instead")
    if spec.absent:
        raise SpecError(f"absent = {spec.absent:g}: real workers are absent by themselves; leave it out")
    catalog_features(spec.features or "")
    check_of_catalog(spec)
    worker = spec.build_worker()
    if worker.mechanism != "gaussian" or not worker.noisy or not worker.fresh:
        raise SpecError(
            f"worker = {_name(spec, 'worker')!r}: a federation needs fresh Gaussian noise; choose normalized or clipped"
        )


def check_of_catalog(spec: Spec) -> None:
    """SpecError if a spec names a model or a loss of the user's own: a server's settings cannot carry code."""
    for what, value in {"model": spec.model, "loss": spec.loss}.items():
        if is_own(value):
            raise refuse(
                what,
                value,
                "a federation takes no code of your own from a file; a program may bring it (docs/federation.md)",
            )


def _name(spec: Spec, part: str) -> str:
    return str(spec.canonical()[part]["name"])
