"""The runs of a sweep on disk. Several processes, on several machines with one file system, may work on them at once.

sweep.toml         settings and [sweep], as given
specs.json         what there is to do, where no grid says so
runs/NAME/         a run folder; failed.json in it if the run broke, or cannot exist
runs/.NAME.lock    locked while a process works on that run; holds how far it is
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from noisegate.compute import Compute
from noisegate.errors import StoreError
from noisegate.lab.crew import broken, halved, outcome_of
from noisegate.lab.grid import read_sweep
from noisegate.lab.launch import Watch, fingerprint, run, run_together, stored
from noisegate.lab.redteam import Outcome
from noisegate.lab.spec import Spec, make_spec, read_spec
from noisegate.lab.store import RunFolder, write_whole
from noisegate.simulate import Progress

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two sweeps apart
    fcntl = None  # type: ignore[assignment]

SETTINGS, LISTED, RUNS = "sweep.toml", "specs.json", "runs"
PULSE = 1.0
"""Seconds between two signs of life of a run."""

WIDTH = 32
"""Characters that a sign of life takes at most."""

BUSY = Outcome("skipped", message="another process works on it")


@dataclass(frozen=True)
class Cell:
    """A run of a sweep and how it stands. result: what its result.json holds. message: of a failure, or how far it is.

    skipped: what the spec asks for cannot exist. missing: it has not ended and nobody works on it.
    """

    spec: Spec
    status: Literal["done", "failed", "skipped", "running", "missing"]
    result: dict[str, Any] | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.status in ("done", "failed", "skipped")


class Claim:
    """A lock that this process holds."""

    def __init__(self, number: int) -> None:
        self._number = number

    def tell(self, rounds: int, of: int) -> None:
        """Say how far the run is, in one write of always the same length."""
        os.lseek(self._number, 0, os.SEEK_SET)
        os.write(self._number, f"round {rounds} of {of}".ljust(WIDTH).encode())


class SweepFolder:
    """A folder of runs, each under its spec's name."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def run_path(self, spec: Spec) -> Path:
        """Where the run is."""
        return self.path / RUNS / spec.name()

    def _lock_path(self, spec: Spec) -> Path:
        return self.path / RUNS / f".{spec.name()}.lock"

    def cells(self, specs: Sequence[Spec]) -> list[Cell]:
        """How the runs stand."""
        return [self.cell(spec) for spec in specs]

    def cell(self, spec: Spec) -> Cell:
        """How the run stands."""
        folder = RunFolder(self.run_path(spec))
        try:
            if (found := folder.result()) is not None:
                stored(found, folder)  # which refuses what is no result
                return Cell(spec, "done", found)
        except StoreError as error:
            return Cell(spec, "failed", None, str(error))
        if self._locked(spec):
            return Cell(spec, "running", None, self.told(spec))
        if (why := folder.failure()) is not None:
            return Cell(spec, "skipped" if why[0] == "skipped" else "failed", None, why[1])
        return Cell(spec, "missing")

    def told(self, spec: Spec) -> str:
        """What the process that works on a run last said, as `round 3 of 10`; "" if it said nothing."""
        try:
            return self._lock_path(spec).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def share(self, spec: Spec) -> float:
        """How much of an unfinished run is played, as far as it is known."""
        words = self.told(spec).split()
        return int(words[1]) / int(words[3]) if len(words) == 4 else 0.0

    def specs(self) -> list[Spec]:
        """Those of sweep.toml, or of specs.json, or else of all run folders, by name."""
        if (self.path / SETTINGS).exists():
            return read_sweep(self.path / SETTINGS)
        if (self.path / LISTED).exists():
            try:
                return [make_spec(entry) for entry in json.loads((self.path / LISTED).read_text(encoding="utf-8"))]
            except (OSError, ValueError, TypeError):
                raise StoreError(f"{self.path / LISTED}: is damaged; remove it") from None
        return [read_spec(path) for path in sorted((self.path / RUNS).glob("[!.]*/spec.toml"))]

    def check(self, specs: Sequence[Spec] = ()) -> None:
        """Refuse a folder that holds something else, or runs on other data. Nothing is written yet."""
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        if names and not names & {SETTINGS, RUNS}:
            raise StoreError(f"{self.path}: is not empty and holds no sweep; choose another --out")
        sums = {spec.dataset: fingerprint(spec, None, None) for spec in {spec.dataset: spec for spec in specs}.values()}
        for spec in specs:
            if sums[spec.dataset]:  # the user's own file, which may have changed under its name
                RunFolder(self.run_path(spec)).check(spec, True, sums[spec.dataset])

    def keep_list(self, specs: Sequence[Spec]) -> None:
        """Write specs.json: what there is to do, where no grid says so."""
        try:
            (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        content = json.dumps([spec.canonical() for spec in specs]).encode()
        write_whole(self.path / LISTED, content, f".{LISTED}.{uuid4().hex}.part")

    def keep(self, settings: bytes) -> None:
        """Write sweep.toml. The runs of an earlier one stay."""
        path = self.path / SETTINGS
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_bytes() == settings:
                return
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        write_whole(path, settings, f".{SETTINGS}.{uuid4().hex}.part")  # two sweeps may begin at the same time

    @contextmanager
    def claim(self, spec: Spec) -> Iterator[Claim | None]:
        """Keep others from a run; None if another process works on it. What failed before is forgotten.

        The system unlocks it if this process ends in any other way. The file stays: to remove it would let two
        processes hold a lock of the same name.
        """
        path = self._lock_path(spec)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
        try:
            if not _free(number, exclusive=True):
                yield None
                return
            RunFolder(self.run_path(spec)).forgive()
            os.ftruncate(number, 0)  # what a process that was killed said
            try:
                yield Claim(number)
            finally:
                os.ftruncate(number, 0)
        finally:
            os.close(number)

    def fail(self, spec: Spec, outcome: Outcome) -> None:
        """Keep why a run has no result."""
        RunFolder(self.run_path(spec)).fail(spec, outcome.status, outcome.message)

    def _locked(self, spec: Spec) -> bool:
        try:
            number = os.open(self._lock_path(spec), os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _free(number, exclusive=False)
        finally:
            os.close(number)


def _free(number: int, exclusive: bool) -> bool:
    """Lock a file if nobody else has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, where it is up to the user
    return True


def play_one(folder: SweepFolder, spec: Spec, compute: Compute) -> Outcome:
    """Run a spec, or what is left of it, in its folder; BUSY if another process does."""
    try:
        with folder.claim(spec) as claim:
            return _play(folder, spec, compute, claim) if claim else BUSY
    except StoreError as error:
        return broken(error)


def play_several(folder: SweepFolder, specs: Sequence[Spec], compute: Compute) -> list[Outcome]:
    """The same for runs that share a device."""
    with ExitStack() as held:
        claims: dict[str, Claim] = {}
        outcomes: dict[str, Outcome] = {}
        for spec in specs:
            try:
                if (claim := held.enter_context(folder.claim(spec))) is None:
                    outcomes[spec.name()] = BUSY
                else:
                    claims[spec.name()] = claim
            except StoreError as error:
                outcomes[spec.name()] = broken(error)

        def together(some: Sequence[Spec]) -> list[Outcome]:
            outs = [folder.run_path(spec) for spec in some]
            watch = _pulse([claims[spec.name()] for spec in some])
            results = run_together(some, compute=compute, outs=outs, resume=True, watch=watch)
            return [outcome_of(result) for result in results]

        mine = [spec for spec in specs if spec.name() in claims]
        found = halved(mine, together, lambda spec: _play(folder, spec, compute, claims[spec.name()]))
        outcomes.update({spec.name(): outcome for spec, outcome in zip(mine, found, strict=True)})
    return [outcomes[spec.name()] for spec in specs]


def _play(folder: SweepFolder, spec: Spec, compute: Compute, claim: Claim) -> Outcome:
    try:
        out = folder.run_path(spec)
        return outcome_of(run(spec, compute=compute, out=out, resume=True, watch=_pulse([claim])))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of anyone's attack or rule; the sweep goes on without it
        outcome = broken(error)
    try:
        folder.fail(spec, outcome)
    except StoreError as error:
        return broken(error)
    return outcome


def _pulse(claims: Sequence[Claim]) -> Watch:
    """Signs of life, and an end to a run whose sweep was killed."""
    parent, told = multiprocessing.parent_process(), -PULSE

    def watch(progress: Progress, rounds: int) -> None:
        nonlocal told
        if time.monotonic() - told < PULSE:
            return
        told = time.monotonic()
        for claim in claims:
            claim.tell(progress.rounds, rounds)
        if parent is not None and not parent.is_alive():
            raise KeyboardInterrupt

    return watch
