"""The commands of `noisegate federation`: a trial on this machine, and workers on others that come and go."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from noisegate.cli.flags import AsJson, takes
from noisegate.cli.help import HeadedCommand, HeadedGroup
from noisegate.cli.late import done_in
from noisegate.cli.records import InitFlags, TrialFlags, fit
from noisegate.usual import DAYS

HERE, OPERATOR, WORKER = "On this machine", "At the operator's", "On the worker's machine"
app = typer.Typer(
    cls=HeadedGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Private training between real machines: try it on this one, or enroll workers on others.",
)
WorkerDir = Annotated[Path, typer.Argument(metavar="DIR", help="The worker's folder, on the worker's machine.")]
ServerDir = Annotated[Path, typer.Argument(metavar="SERVER_DIR", help="The server's folder, or the one above it.")]
AuthorityDir = Annotated[Path | None, typer.Option("--ca", help="Folder of ca.pem and ca.key. [ca in or beside it]")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Days = Annotated[int, typer.Option(help="How long the certificate is valid.")]


@app.command("init", cls=HeadedCommand, rich_help_panel=HERE)
@takes(InitFlags, fit(InitFlags, "as_json"))
@done_in("federation")
def init_command(flags: InitFlags) -> None:
    """Make a federation: an authority, a server with its keys and settings, and for a trial on this machine its
    workers, each with certificate, keys, policy and its share of the data.

    Without settings a trial has 5 honest workers and 3 label flippers on digits.
    """


@app.command("up", cls=HeadedCommand, rich_help_panel=HERE)
@takes(TrialFlags, fit(TrialFlags))
@done_in("federation")
def up_command(flags: TrialFlags) -> None:
    """Run a federation on this machine: a server and one process for each worker, some of them hostile.

    Makes DIR if there is none. Ctrl-C takes everything down; the same command goes on where it was.
    """


@app.command("status", cls=HeadedCommand, rich_help_panel=HERE)
@done_in("federation")
def status_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a trial, or of a server.")],
    as_json: AsJson = False,
) -> None:
    """Show how a server stands: state, round, accuracy, and each worker."""


@app.command("request", cls=HeadedCommand, rich_help_panel=WORKER)
@done_in("enrollment")
def request_command(
    folder: WorkerDir,
    name: Annotated[str, typer.Option(help="Name of the worker: a to z, 0 to 9 and -, such as hospital-a.")],
) -> None:
    """On the worker's machine: make its keys, and a request for a certificate to be sent to the server's operator.

    The keys stay in the folder. Nothing in the request is secret.
    """


@dataclass(frozen=True)
class SignFlags:
    """The flags of `noisegate federation sign`."""

    server: ServerDir
    request: Annotated[Path, typer.Argument(metavar="REQUEST.pem", help="What the worker sent.")]
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The invitation. [NAME.invitation.toml]")] = None
    authority: AuthorityDir = None
    address: Annotated[
        str, typer.Option(help="host:port at which workers reach the server. [first host of its certificate]")
    ] = ""
    size: Annotated[
        int | None, typer.Option(help="About how many examples the worker holds; public. [as many as are declared]")
    ] = None
    replace: Annotated[bool, typer.Option("--replace", help="The worker has new keys: take them.")] = False
    days: Days = DAYS
    yes: Yes = False


@app.command("sign", cls=HeadedCommand, rich_help_panel=OPERATOR)
@takes(SignFlags)
@done_in("enrollment")
def sign_command(flags: SignFlags) -> None:
    """At the operator's: check a worker's request, sign it, and write the worker into the roster.

    The invitation that is written goes back to the worker. Nothing in it is secret.
    """


@app.command("accept", cls=HeadedCommand, rich_help_panel=WORKER)
@done_in("enrollment")
def accept_command(
    folder: WorkerDir,
    invitation: Annotated[Path, typer.Argument(metavar="INVITATION.toml", help="What the operator sent back.")],
    yes: Yes = False,
) -> None:
    """On the worker's machine: check the invitation, and put certificate, settings and policy in their places."""


@app.command("renew", cls=HeadedCommand, rich_help_panel=WORKER)
@done_in("enrollment")
def renew_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a worker, or of a server.")],
    new_keys: Annotated[
        bool, typer.Option("--new-keys", help="A worker: make new keys; the old ones stay until `accept`.")
    ] = False,
    authority: AuthorityDir = None,
    days: Days = DAYS,
) -> None:
    """Renew a certificate. For a worker: make a new request, with the keys that it has, to be sent to the operator.
    For a server: sign a new certificate.
    """


@app.command("revoke", cls=HeadedCommand, rich_help_panel=OPERATOR)
@done_in("enrollment")
def revoke_command(
    server: ServerDir,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The worker to be taken out of the roster.")] = "",
    certificate: Annotated[
        str, typer.Option(help="Revoke the certificate with this serial number (hexadecimal) and nothing else.")
    ] = "",
    authority: AuthorityDir = None,
) -> None:
    """At the operator's: take a worker out of the roster, or revoke one certificate. A running server follows."""


@app.command("new-run", cls=HeadedCommand, rich_help_panel=OPERATOR)
@done_in("enrollment")
def new_run_command(server: ServerDir) -> None:
    """At the operator's: prepare a server folder for a new run with the same settings. The old state is put aside."""
