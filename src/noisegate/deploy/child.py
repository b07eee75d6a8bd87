"""A process of a trial: `noisegate serve`, `noisegate join` or an attacker, which ends when the trial's process does.

Its standard input is a pipe that the trial's process holds open and never writes to. When that process ends, however it
ends, the pipe does too, and so does this one.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE = 8.0
"""Seconds that a process has to end by itself."""

ATTACKER = "attacker"
"""The first argument of a process that is no command of noisegate."""


def main() -> None:
    """Run what the arguments say, watched."""
    threading.Thread(target=_watch, daemon=True).start()
    if sys.argv[1:2] == [ATTACKER]:
        module, sys.argv = "noisegate.deploy.attacker", sys.argv[1:]
    else:
        module = "noisegate"
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
