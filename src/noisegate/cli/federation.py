"""`noisegate federation`: try a federation on one machine, and run one on many."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import typer

from noisegate.checks import plain, refuse
from noisegate.cli.federation_table import TrialView, show_outcome, show_status
from noisegate.cli.records import PORT, InitFlags, TrialFlags
from noisegate.cli.terminal import Console
from noisegate.deploy import layout
from noisegate.deploy.init import make_server, make_trial
from noisegate.deploy.status import read_status
from noisegate.deploy.trial import LocalTrial
from noisegate.deploy.up import free_port, run_trial, use_port
from noisegate.errors import SpecError, StoreError
from noisegate.federation.settings import ServerSettings

LOOPBACK = ("127.0.0.1", "localhost")


def init_command(flags: InitFlags) -> None:
    """Make a federation, and say what was made."""
    if flags.server_only:
        port = _port(flags.port) if flags.port is not None else PORT
        here = all(host in LOOPBACK for host in flags.host or [])  # who tries it on one machine opens no port to others
        listen = f"{'127.0.0.1' if here else '0.0.0.0'}:{port}"
        settings = make_server(flags.spec(), flags.folder, listen, flags.host or [])
        print(f"made {flags.folder / layout.AUTHORITY} (keep ca.key safe) and {flags.folder / layout.SERVER}")
        print(f"each worker pays epsilon {settings.epsilon:g} at delta {settings.delta:g} for {settings.rounds} rounds")
        print(f"next: noisegate federation sign {flags.folder} REQUEST.pem for each worker, then")
        print(f"      noisegate serve {flags.folder / layout.SERVER}")
        return
    if flags.host:
        raise SpecError("host: goes with --server-only; a trial listens on 127.0.0.1 alone")
    if (flags.folder / layout.TRIAL).is_file():
        raise StoreError(f"{plain(flags.folder)}: holds a trial already; start it with `noisegate federation up`")
    trial = make_trial(flags.asked(), flags.folder, _port(flags.port) if flags.port is not None else PORT)
    honest = len(list((flags.folder / layout.WORKERS).iterdir())) - len(trial.hostile)
    print(f"made {flags.folder}: a server, {honest} honest workers and {len(trial.hostile)} hostile ones")
    print(f"next: noisegate federation up {flags.folder}")


def up_command(flags: TrialFlags) -> None:
    """Run a federation on this machine, and show it."""
    console = Console(stderr=True, quiet=flags.as_json)
    with _interruptible():
        try:
            trial = _trial(flags, console)
            settings = ServerSettings.read(trial.server / layout.SETTINGS)
            view = TrialView(console, trial.hostile, settings.epsilon)
            with view.shown():
                found = run_trial(trial, view.tell)
        except KeyboardInterrupt:
            saved = f"state saved in {flags.folder}" if (flags.folder / layout.TRIAL).is_file() else "nothing was begun"
            told = f"interrupted: {saved}; the same command goes on"
            Console(stderr=True).print(told, soft_wrap=True, highlight=False)
            raise typer.Exit(130) from None
    if flags.as_json:
        print(json.dumps(found, indent=2))
    else:
        show_outcome(found, Console())


def _trial(flags: TrialFlags, console: Console) -> LocalTrial:
    """The trial of a folder, made if there is none, or made anew if nothing was begun and other settings are asked."""
    spec, port = flags.asked(), flags.port
    trial = LocalTrial.read(flags.folder) if (flags.folder / layout.TRIAL).is_file() else None
    if trial and trial.spec.canonical() != spec.canonical():
        if trial.begun:
            old, new = trial.spec.canonical(), spec.canonical()
            wrong = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            raise SpecError(
                f"{', '.join(wrong)}: {'is' if len(wrong) == 1 else 'are'} not what {plain(flags.folder)} was begun "
                "with; leave the flags out to go on with it, or choose another folder"
            )
        trial = None
    if trial is None:
        console.print("up: dealing data, calibrating noise, making keys", soft_wrap=True, highlight=False)
        return make_trial(spec, flags.folder, _port(port) if port is not None else PORT)
    if port is not None:
        use_port(trial, _port(port))
    return trial


def _port(port: int) -> int:
    if not 0 <= port < 2**16:
        raise refuse("port", port, "must be 0 to 65535")
    return port or free_port()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat the signals that end a session as Ctrl-C, so that everything is taken down."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {kind: signal.signal(kind, interrupt) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def status_command(folder: Path, as_json: bool) -> None:
    """Show how a server stands: state, round, accuracy, and each worker."""
    server = layout.server_folder(folder)
    status = read_status(server)
    if as_json:
        print(json.dumps(asdict(status) if status else {"running": False, "state": "never started"}, indent=2))
    elif status is None:
        print(f"never started; start it with `noisegate serve {plain(server)}`", file=sys.stdout)
    else:
        show_status(status, Console())
