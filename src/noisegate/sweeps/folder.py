"""The runs of a sweep on disk. Several processes, on several machines with one file system, may work on them at once.

sweep.toml         settings and [sweep], as given
specs.json         what there is to do: every run, with all its settings
runs/NAME/         a run folder; failed.json in it if the run broke, or cannot exist
runs/.NAME.lock    locked while a process works on that run; holds how far it is
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from noisegate.checks import plain, refuse
from noisegate.errors import SpecError, StoreError
from noisegate.files import read_json, read_whole, seal, unseal, write_whole
from noisegate.locks import take
from noisegate.runs.checkpoints import Identity
from noisegate.runs.key import fingerprint
from noisegate.runs.result import stored
from noisegate.runs.spec import Spec
from noisegate.runs.store import RunFolder
from noisegate.runs.unbuilt import AnySpec, read_unbuilt, unbuilt_spec
from noisegate.sweeps.grid import unbuilt_specs
from noisegate.sweeps.outcome import Outcome

SETTINGS, LISTED, RUNS = "sweep.toml", "specs.json", "runs"
"""The names of what a sweep's folder holds."""

MOST_SETTINGS = 2**24
"""The largest sweep.toml that is read, in bytes."""

WIDTH = 32
"""The length of the text in a lock file that says how far the run is, in characters."""


@dataclass(frozen=True)
class SweepCell:
    """One cell of a sweep's grid: a run and how it stands.

    skipped: what the spec asks for cannot exist. waiting: the run has not ended, and no process works on it.
    result: what its result.json holds. message: why the run failed, or how far it is.
    """

    spec: Any  # a Spec; or an UnbuiltSpec, in a folder that was only read and whose runs use plugins
    status: Literal["done", "failed", "skipped", "running", "waiting"]
    result: dict[str, Any] | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether the run has ended, with a result or without."""
        return self.status in ("done", "failed", "skipped")


class RunLock:
    """The lock on a run, which this process holds. The lock file also says how far the run is."""

    def __init__(self, number: int) -> None:
        self._number = number

    def tell(self, rounds: int, of: int) -> None:
        """Write how far the run is, always in one write of the same length."""
        os.lseek(self._number, 0, os.SEEK_SET)
        with suppress(OSError):  # the disk may be full; the run goes on
            os.write(self._number, f"round {rounds} of {of}".ljust(WIDTH).encode())


class SweepFolder:
    """The folder of a sweep. Each run has a folder in it, under its spec's name."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def run_path(self, spec: AnySpec) -> Path:
        """The folder of the run."""
        return self.path / RUNS / spec.name()

    def _lock_path(self, spec: AnySpec) -> Path:
        return self.path / RUNS / f".{spec.name()}.lock"

    def cells(self, specs: Sequence[AnySpec]) -> list[SweepCell]:
        """The cells of these runs."""
        return [self.cell(spec) for spec in specs]

    def cell(self, spec: AnySpec) -> SweepCell:
        """The cell of this run: how it stands now."""
        folder = RunFolder(self.run_path(spec))
        try:
            if (found := folder.result(spec)) is not None:
                stored(found, folder)  # raises if it is no valid result
                return SweepCell(spec, "done", found)
        except StoreError as error:
            return SweepCell(spec, "failed", None, str(error))
        if self._locked(spec):
            return SweepCell(spec, "running", None, self.told(spec))
        if (why := folder.failure()) is not None:
            return SweepCell(spec, "skipped" if why[0] == "skipped" else "failed", None, why[1])
        return SweepCell(spec, "waiting")

    def told(self, spec: AnySpec) -> str:
        """How far the process that works on a run has come, as `round 3 of 10`; "" if that is not known."""
        said = self._said(spec)
        return f"round {said[0]} of {said[1]}" if said else ""

    def share(self, spec: AnySpec) -> float:
        """The share of an unfinished run that has been played; 0 if that is not known."""
        said = self._said(spec)
        return said[0] / said[1] if said else 0.0

    def _said(self, spec: AnySpec) -> tuple[int, int] | None:
        """(rounds played, rounds in all) from the lock file; None if it holds anything else."""
        try:
            words = read_whole(self._lock_path(spec), WIDTH).decode("ascii", errors="replace")
        except (OSError, StoreError):
            return None
        found = re.fullmatch(r"round (\d{1,9}) of (\d{1,9}) *", words, re.ASCII)
        rounds, of = (int(found[1]), int(found[2])) if found else (0, 0)
        return (rounds, of) if 0 <= rounds <= of and of else None

    def specs(self) -> list[AnySpec]:
        """The specs of the sweep, from specs.json, else sweep.toml, else the run folders. Imports no plugin."""
        settings = self.path / SETTINGS
        try:
            given = read_whole(settings, MOST_SETTINGS)
        except FileNotFoundError:
            given = None
        listed = self._listed(given)
        if listed is not None:
            return listed
        if given is not None:
            return unbuilt_specs(settings)
        return [read_unbuilt(path) for path in sorted((self.path / RUNS).glob("[!.]*/spec.toml"))]

    def _listed(self, settings: bytes | None) -> list[AnySpec] | None:
        """The specs in specs.json; None if there is no such file, or it was made from other settings."""
        path = self.path / LISTED
        try:
            found = unseal(read_json(path), path)
            if found.get("of") != (None if settings is None else _sum(settings)):
                return None
            return [unbuilt_spec(dict(entry), LISTED) for entry in found["specs"]]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError) as error:
            why = plain(error) if isinstance(error, SpecError) else "not a list of runs"
            raise StoreError(f"{plain(path)}: is damaged ({why}); the same command writes it anew") from None

    def check(self, specs: Sequence[Spec] = ()) -> None:
        """Raise StoreError if the folder holds no sweep, or runs on other data. Nothing is written.

        SpecError for a spec with an object that no file can hold: the runs of a sweep are played by other processes.
        """
        for spec in specs:
            for what, part in spec.given().items():
                rule = "is an object that only this program has; a sweep needs one of a module that can be imported"
                raise refuse(what, part, rule)
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        if names and not names & {SETTINGS, RUNS}:
            raise StoreError(f"{self.path}: is not empty and holds no sweep; choose another --out")
        sums = {spec.dataset: fingerprint(spec, None, None) for spec in {spec.dataset: spec for spec in specs}.values()}
        for spec in specs:
            if inputs := sums[spec.dataset]:  # of a user's own file, whose content may have changed
                RunFolder(self.run_path(spec), Identity.of(spec, inputs)).check(spec, True)

    def keep_list(self, specs: Sequence[Spec], settings: bytes | None = None) -> None:
        """Write specs.json, the list of all runs. settings: the content of the sweep.toml that they were made from.

        Commands that only show the folder read this list, since making specs from sweep.toml may import plugins.
        """
        try:
            (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        listed = {"of": None if settings is None else _sum(settings), "specs": [spec.canonical() for spec in specs]}
        write_whole(self.path / LISTED, seal(listed, indent=None))

    def keep(self, settings: bytes, specs: Sequence[Spec]) -> None:
        """Write specs.json and sweep.toml. Runs of an earlier sweep in this folder stay."""
        self.keep_list(specs, settings)
        write_whole(self.path / SETTINGS, settings)

    @contextmanager
    def lock(self, spec: Spec) -> Iterator[RunLock | None]:
        """Lock a run; None if another process holds its lock. Taking the lock removes an earlier failure of the run.

        The system releases the lock when this process ends, however it ends. The lock file is never removed:
        otherwise two processes could hold locks on two files of the same name.
        """
        path = self._lock_path(spec)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
        try:
            if not take(number, exclusive=True):
                yield None
                return
            RunFolder(self.run_path(spec)).forgive()
            os.ftruncate(number, 0)  # left by a process that was killed
            try:
                yield RunLock(number)
            finally:
                os.ftruncate(number, 0)
        finally:
            os.close(number)

    def fail(self, spec: Spec, outcome: Outcome) -> None:
        """Write why a run has no result."""
        RunFolder(self.run_path(spec)).fail(spec, outcome.status, outcome.message)

    def _locked(self, spec: AnySpec) -> bool:
        try:
            number = os.open(self._lock_path(spec), os.O_RDONLY)
        except OSError:
            return False
        try:
            return not take(number, exclusive=False)
        finally:
            os.close(number)


def _sum(settings: bytes) -> str:
    return hashlib.sha256(settings).hexdigest()
