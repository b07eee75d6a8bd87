"""The runs of a sweep on disk. Several processes, on several machines with one file system, may work on them at once.

sweep.toml         settings and [sweep], as given
specs.json         what there is to do: every run, with all its settings
runs/NAME/         a run folder; failed.json in it if the run broke, or cannot exist
runs/.NAME.lock    locked while a process works on that run; holds how far it is
"""

import hashlib
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from noisegate.checks import plain
from noisegate.compute import Compute
from noisegate.errors import SpecError, StoreError
from noisegate.redteam.search import Outcome
from noisegate.runs.checkpoints import Identity
from noisegate.runs.files import read_json, read_whole, seal, unseal, write_whole
from noisegate.runs.key import fingerprint
from noisegate.runs.launch import Watch, run, run_together
from noisegate.runs.locks import take
from noisegate.runs.plain import AnySpec, plain_spec, read_plain
from noisegate.runs.result import stored
from noisegate.runs.spec import Spec
from noisegate.runs.store import RunFolder
from noisegate.simulate import Progress
from noisegate.sweeps.grid import plain_specs
from noisegate.sweeps.pool import broken, halved, outcome_of

SETTINGS, LISTED, RUNS = "sweep.toml", "specs.json", "runs"
PULSE = 1.0
"""Seconds between two signs of life of a run."""

MOST_SETTINGS = 2**24
"""Bytes of the largest sweep.toml that is read."""

WIDTH = 32
"""Characters that a sign of life takes at most."""

BUSY = Outcome("skipped", message="another process works on it")


@dataclass(frozen=True)
class Cell:
    """A run of a sweep and how it stands. result: what its result.json holds. message: of a failure, or how far it is.

    skipped: what the spec asks for cannot exist. missing: it has not ended and nobody works on it.
    """

    spec: Any  # a Spec; of a folder that is only looked at, and that names a plugin's part, a PlainSpec
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
        with suppress(OSError):  # a full disk: how far it is, is not said, and the run goes on
            os.write(self._number, f"round {rounds} of {of}".ljust(WIDTH).encode())


class SweepFolder:
    """A folder of runs, each under its spec's name."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def run_path(self, spec: AnySpec) -> Path:
        """Where the run is."""
        return self.path / RUNS / spec.name()

    def _lock_path(self, spec: AnySpec) -> Path:
        return self.path / RUNS / f".{spec.name()}.lock"

    def cells(self, specs: Sequence[AnySpec]) -> list[Cell]:
        """How the runs stand."""
        return [self.cell(spec) for spec in specs]

    def cell(self, spec: AnySpec) -> Cell:
        """How the run stands."""
        folder = RunFolder(self.run_path(spec))
        try:
            if (found := folder.result(spec)) is not None:
                stored(found, folder)  # which refuses what is no result
                return Cell(spec, "done", found)
        except StoreError as error:
            return Cell(spec, "failed", None, str(error))
        if self._locked(spec):
            return Cell(spec, "running", None, self.told(spec))
        if (why := folder.failure()) is not None:
            return Cell(spec, "skipped" if why[0] == "skipped" else "failed", None, why[1])
        return Cell(spec, "missing")

    def told(self, spec: AnySpec) -> str:
        """What the process that works on a run last said, as `round 3 of 10`; "" if it said nothing."""
        said = self._said(spec)
        return f"round {said[0]} of {said[1]}" if said else ""

    def share(self, spec: AnySpec) -> float:
        """How much of an unfinished run is played, as far as it is known."""
        said = self._said(spec)
        return said[0] / said[1] if said else 0.0

    def _said(self, spec: AnySpec) -> tuple[int, int] | None:
        """(rounds played, rounds in all); None if the lock file holds anything else."""
        try:
            words = read_whole(self._lock_path(spec), WIDTH).decode("ascii", errors="replace")
        except (OSError, StoreError):
            return None
        found = re.fullmatch(r"round (\d{1,9}) of (\d{1,9}) *", words, re.ASCII)
        rounds, of = (int(found[1]), int(found[2])) if found else (0, 0)
        return (rounds, of) if 0 <= rounds <= of and of else None

    def specs(self) -> list[AnySpec]:
        """Those of specs.json, or else of sweep.toml, or else of all run folders, by name. Nothing is imported."""
        settings = self.path / SETTINGS
        try:
            given = read_whole(settings, MOST_SETTINGS)
        except FileNotFoundError:
            given = None
        listed = self._listed(given)
        if listed is not None:
            return listed
        if given is not None:
            return plain_specs(settings)
        return [read_plain(path) for path in sorted((self.path / RUNS).glob("[!.]*/spec.toml"))]

    def _listed(self, settings: bytes | None) -> list[AnySpec] | None:
        """The runs of specs.json; None if there is none, or it is not of these settings."""
        path = self.path / LISTED
        try:
            found = unseal(read_json(path), path)
            if found.get("of") != (None if settings is None else _sum(settings)):
                return None
            return [plain_spec(dict(entry), LISTED) for entry in found["specs"]]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError) as error:
            why = plain(error) if isinstance(error, SpecError) else "not a list of runs"
            raise StoreError(f"{plain(path)}: is damaged ({why}); the same command writes it anew") from None

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
            if inputs := sums[spec.dataset]:  # the user's own file, which may have changed under its name
                RunFolder(self.run_path(spec), Identity.of(spec, inputs)).check(spec, True)

    def keep_list(self, specs: Sequence[Spec], settings: bytes | None = None) -> None:
        """Write specs.json: what there is to do. settings: the sweep.toml that it was made from.

        Who only looks at the folder reads this: to make specs of sweep.toml may need the code that it names.
        """
        try:
            (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used ({error.strerror}); choose another --out") from None
        listed = {"of": None if settings is None else _sum(settings), "specs": [spec.canonical() for spec in specs]}
        write_whole(self.path / LISTED, seal(listed, indent=None))

    def keep(self, settings: bytes, specs: Sequence[Spec]) -> None:
        """Write the runs of a sweep, and its sweep.toml. The runs of an earlier one stay."""
        self.keep_list(specs, settings)
        write_whole(self.path / SETTINGS, settings)  # under names of their own first: two sweeps may begin at once

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
            if not take(number, exclusive=True):
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
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of anyone's attack or aggregator; the sweep goes on without it
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
