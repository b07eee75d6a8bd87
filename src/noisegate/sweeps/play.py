"""Run the specs of a sweep, each in its folder and under its lock."""

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack

from noisegate.compute import Compute
from noisegate.errors import StoreError
from noisegate.runs.launch import Watch, run, run_together
from noisegate.runs.spec import Spec
from noisegate.simulate import Progress
from noisegate.sweeps.folder import RunLock, SweepFolder
from noisegate.sweeps.outcome import Outcome, broken, outcome_of
from noisegate.sweeps.pool import halved

PULSE = 1.0
"""Seconds between two times that a run writes how far it is."""

BUSY = Outcome("skipped", message="another process works on it")
"""The outcome of a run that another process works on."""


def play_one(folder: SweepFolder, spec: Spec, compute: Compute) -> Outcome:
    """Run a spec in its folder, or resume it there. BUSY if another process works on it."""
    try:
        with folder.lock(spec) as lock:
            return _play(folder, spec, compute, lock) if lock else BUSY
    except StoreError as error:
        return broken(error)


def play_several(folder: SweepFolder, specs: Sequence[Spec], compute: Compute) -> list[Outcome]:
    """Run specs side by side on one device, each in its folder."""
    with ExitStack() as held:
        locks: dict[str, RunLock] = {}
        outcomes: dict[str, Outcome] = {}
        for spec in specs:
            try:
                if (lock := held.enter_context(folder.lock(spec))) is None:
                    outcomes[spec.name()] = BUSY
                else:
                    locks[spec.name()] = lock
            except StoreError as error:
                outcomes[spec.name()] = broken(error)

        def together(some: Sequence[Spec]) -> list[Outcome]:
            outs = [folder.run_path(spec) for spec in some]
            watch = _pulse([locks[spec.name()] for spec in some])
            results = run_together(some, compute=compute, outs=outs, resume=True, watch=watch)
            return [outcome_of(result) for result in results]

        mine = [spec for spec in specs if spec.name() in locks]
        found = halved(mine, together, lambda spec: _play(folder, spec, compute, locks[spec.name()]))
        outcomes.update({spec.name(): outcome for spec, outcome in zip(mine, found, strict=True)})
    return [outcomes[spec.name()] for spec in specs]


def _play(folder: SweepFolder, spec: Spec, compute: Compute, lock: RunLock) -> Outcome:
    try:
        out = folder.run_path(spec)
        return outcome_of(run(spec, compute=compute, out=out, resume=True, watch=_pulse([lock])))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # plugins raise anything; the sweep goes on
        outcome = broken(error)
    try:
        folder.fail(spec, outcome)
    except StoreError as error:
        return broken(error)
    return outcome


def _pulse(locks: Sequence[RunLock]) -> Watch:
    """A watch that writes how far the runs are, and that interrupts them if the process of the sweep was killed."""
    parent, told = multiprocessing.parent_process(), -PULSE

    def watch(progress: Progress, rounds: int) -> None:
        nonlocal told
        if time.monotonic() - told < PULSE:
            return
        told = time.monotonic()
        for lock in locks:
            lock.tell(progress.rounds, rounds)
        if parent is not None and not parent.is_alive():
            raise KeyboardInterrupt

    return watch
