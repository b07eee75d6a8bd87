"""The command line. Results go to standard output, everything else to standard error.

Exit status: 0 fine, 1 a result outside its bounds, a failed run of a sweep or an output that cannot be written, 2 bad
input (also a plugin that raises), 130 interrupted (state saved).

This file is imported quickly, and so are the declarations of all commands (commands.py). A command imports what takes
time when it is called, so that help comes at once, and Ctrl-C can end the process at any moment.
"""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from noisegate.checks import plain
from noisegate.checks import told as words
from noisegate.cli.late import INTERRUPTED, ends_at_once
from noisegate.errors import NoisegateError, NoisegateWarning, OneClassWarning

FAILED, REFUSED = 1, 2
TRACE = "NOISEGATE_TRACEBACK"
"""Set this variable to see where an error comes from."""

MOST_LINE = 2000
"""Characters of an error that are printed."""

LIBRARIES = (
    "noisegate",
    "torch",
    "numpy",
    "scipy",
    "typer",
    "click",
    "rich",
    "dp_accounting",
    "sklearn",
    "plotly",
    "ray",
)
"""Modules whose frames in a traceback are not those of a plugin."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a system that cannot write what was printed."""


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from noisegate.cli.commands import app

    return app


def main() -> None:
    """Run the command line; an error is one line, and exit status 2."""
    sys.exit(_emptied(_status()))


def _status() -> int:
    """Run the command, and give its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
    try:
        with ends_at_once():
            from noisegate.cli.commands import app
        with warnings.catch_warnings():
            warnings.showwarning = _show(warnings.showwarning)
            app()
    except SystemExit as end:
        if place := _plugins_frame(end.__traceback__):
            return _told(f"{place}: wanted to end the process (status {plain(str(end.code))})", REFUSED)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return _told("interrupted", INTERRUPTED)
    except NoisegateError as error:
        return _told(str(error), REFUSED)
    except BaseException as error:  # noqa: BLE001  # any error is told in one line
        if os.environ.get(TRACE):
            traceback.print_exc()
        return _explained(error)
    return 0


def _show(others: Callable[..., None]) -> Callable[..., None]:
    """Shows a warning of noisegate in one line, and once. others: shows those of libraries."""
    shown = set[str]()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, OneClassWarning):
            return  # each command tells of it in its own way, and of the run that it is for
        if issubclass(category, NoisegateWarning):
            line = plain(f"noisegate: warning: {message}")[:MOST_LINE]
            if line not in shown:
                shown.add(line)
                print(line, file=sys.stderr)
        else:
            others(message, category, *place, **more)

    return show


def _explained(error: BaseException) -> int:
    """Tell an error that no command expects: of a file, of memory, of a plugin, or of noisegate itself."""
    if isinstance(error, BrokenPipeError):
        return FAILED  # the reader has closed the pipe, as `head` does
    where = f"; {TRACE}=1 shows where"
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None and error.errno in DISK_FULL:
            return _told(f"the output cannot be written ({error.strerror})", FAILED)
        return _told(f"{error.filename or 'a file'}: cannot be used ({error.strerror})", REFUSED)
    told = ": ".join(filter(None, (type(error).__name__, words(error))))
    if place := _plugins_frame(error.__traceback__):
        return _told(f"{place}: {told}{where}", REFUSED)
    if isinstance(error, MemoryError):
        return _told(f"out of memory ({told}); lower --memory, --jobs or the size of the run", REFUSED)
    return _told(f"unexpected {told}{where}; please report it", FAILED)


def _plugins_frame(trace: TracebackType | None) -> str:
    """The file and line of the innermost code that belongs neither to noisegate nor to a library that it uses."""
    place = ""
    while trace is not None:
        frame = trace.tb_frame
        owner = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if owner not in LIBRARIES and owner not in sys.stdlib_module_names:
            place = f"{frame.f_code.co_filename}, line {trace.tb_lineno}, in {frame.f_code.co_name}"
        trace = trace.tb_next
    return place


def _told(text: str, status: int) -> int:
    """Print one line, and give the status."""
    line = plain(f"noisegate: {text}")
    with suppress(OSError, ValueError):  # if nothing can be printed, the status is left
        print(line if len(line) <= MOST_LINE else f"{line[:MOST_LINE]}...", file=sys.stderr)
    return status


def _emptied(status: int) -> int:
    """Write out what was printed. Give `status`, or `FAILED` if that fails. A closed pipe (`| head`) is not told."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and status == 0:
                _told(f"the output cannot be written ({error.strerror})", FAILED)
            status = status or FAILED
            with suppress(OSError, ValueError):  # so that Python does not try it again at exit, and print an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status
