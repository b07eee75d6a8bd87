"""The processes of a trial: started in groups of their own, and all gone when the trial is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from noisegate.checks import plain
from noisegate.deploy.child import GRACE
from noisegate.deploy.layout import make_folder
from noisegate.errors import StoreError

MOST_LINES, MOST_BYTES = 8, 2**14
"""How much of a process's log is shown when it failed."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Children:
    """Processes by name. Leaving the context ends all of them; if this process is killed, they end by themselves."""

    def __init__(self, logs: Path) -> None:
        self.logs = make_folder(logs)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._reading, self._writing = os.pipe()  # inherited by nobody: children get the reading end as their input

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `noisegate` with these arguments, in a session of its own. What it prints goes to a log."""
        environment = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            with self.log(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "noisegate.deploy.child", *arguments],
                    stdin=self._reading,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # so that Ctrl-C reaches the trial alone, which ends them in order
                )
        except OSError as error:
            raise StoreError(f"{plain(name)}: cannot be started ({error.strerror})") from None

    def log(self, name: str) -> Path:
        """Where a process prints to."""
        return self.logs / f"{name}.log"

    def ended(self, name: str) -> int | None:
        """The exit status of a process; None while it runs."""
        return self.processes[name].poll()

    def last_lines(self, name: str) -> str:
        """The end of a process's log, for messages."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(plain(line) for line in lines[-MOST_LINES:])

    def wait(self, seconds: float, names: Sequence[str] | None = None) -> bool:
        """Wait until these, or all, have ended, at most so long. Whether they have."""
        until = time.monotonic() + seconds
        while any(self.ended(name) is None for name in (self.processes if names is None else names)):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def take_down(self) -> None:
        """End everything: ask first, then do not. The first that was started goes first: others may wait for it."""
        first = list(self.processes)[:1]
        self._signal(signal.SIGTERM, first)
        self.wait(GRACE, first)
        self._signal(signal.SIGTERM)
        if not self.wait(GRACE):
            self._signal(signal.SIGKILL)
            for each in self.processes.values():
                each.wait()

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.take_down()
        finally:
            self._signal(signal.SIGKILL)  # of those who are left after a second Ctrl-C
            for number in (self._reading, self._writing):
                with suppress(OSError):
                    os.close(number)

    def _signal(self, number: int, names: Sequence[str] | None = None) -> None:
        for name in self.processes if names is None else names:
            if self.ended(name) is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.processes[name].pid, number)
