"""Commands that import what they need when they are called, so that help, the version and completion come at once."""

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import Any

INTERRUPTED = 130


def done_in(module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a declaration: its name, its flags and its help text.

    module: the one of noisegate.cli that has a function of the same name, which does the work.
    """

    def decorate(declared: Callable[..., None]) -> Callable[..., None]:
        @wraps(declared)
        def command(*given: Any, **named: Any) -> None:
            worker_of(module, declared.__name__)(*given, **named)

        command.done_in = module  # type: ignore[attr-defined]  # for the test that compares the two
        return command

    return decorate


def worker_of(module: str, name: str) -> Callable[..., None]:
    """The function that does the work of a command."""
    with ends_at_once():
        home = importlib.import_module(f"noisegate.cli.{module}")
    found: Callable[..., None] = getattr(home, name)
    return found


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once: nothing has begun, and an interrupted import may raise any error."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"noisegate: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
