"""The commands of `noisegate federation` by which workers on other machines come and go."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from noisegate.checks import plain
from noisegate.cli.flags import takes
from noisegate.deploy import enroll, layout, members
from noisegate.deploy.init import new_run
from noisegate.deploy.invitation import Invitation
from noisegate.deploy.status import runs
from noisegate.errors import NoisegateError, StoreError
from noisegate.federation.certificates import DAYS, days_left, hosts_of, read_certificate
from noisegate.files import write_whole

WorkerDir = Annotated[Path, typer.Argument(metavar="DIR", help="The worker's folder, on the worker's machine.")]
ServerDir = Annotated[Path, typer.Argument(metavar="SERVER_DIR", help="The server's folder, or the one above it.")]
AuthorityDir = Annotated[Path | None, typer.Option("--ca", help="Folder of ca.pem and ca.key. [ca in or beside it]")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Days = Annotated[int, typer.Option(help="How long the certificate is valid.")]


def request_command(
    folder: WorkerDir,
    name: Annotated[str, typer.Option(help="Name of the worker: a to z, 0 to 9 and -, such as hospital-a.")],
) -> None:
    """On the worker's machine: make its keys, and a request for a certificate to be sent to the server's operator.

    The keys stay in the folder. Nothing in the request is secret.
    """
    _told_request(folder, enroll.request(folder, name))


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
    if not (folder / layout.SETTINGS).is_file() and not (folder / layout.SERVER / layout.SETTINGS).is_file():
        _told_request(folder, enroll.request(folder, new_keys=new_keys))
        return
    server = layout.server_folder(folder)
    hosts = hosts_of(read_certificate(server / layout.SERVER_CERTIFICATE))
    path = members.renew_server(server, layout.authority_folder(server, authority), hosts, days)
    print(f"written {path}, valid for {days_left(read_certificate(path)):.0f} days; start the server again")


def _told_request(folder: Path, made: enroll.OwnRequest) -> None:
    print(f"written {made.path}: send it to the operator of the server")
    print(f"fingerprint, to be compared by telephone: {made.fingerprint}")
    print(f"then: noisegate federation accept {folder} INVITATION.toml, which comes back")


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


@takes(SignFlags)
def sign_command(flags: SignFlags) -> None:
    """At the operator's: check a worker's request, sign it, and write the worker into the roster.

    The invitation that is written goes back to the worker. Nothing in it is secret.
    """
    home = layout.server_folder(flags.server)
    found = enroll.look_at(home, flags.request)
    path = flags.out or Path(f"{found.name}{enroll.INVITATION}")
    _check_replaceable(path, found.name)
    known = "in the roster with this Ed25519 key" if found.known == found.key else "new"
    if found.known not in (None, found.key):
        known = f"in the roster with ANOTHER Ed25519 key, {(found.known or b'').hex()}"
    print(f"name         {found.name} ({known})")
    print(f"fingerprint  {found.fingerprint()}")
    if not flags.yes:
        typer.confirm("Is this the fingerprint that the worker's machine shows?", abort=True)
    authority = layout.authority_folder(home, flags.authority)
    made = enroll.sign(home, found, authority, flags.days, flags.replace, flags.address, flags.size)
    write_whole(path, made.to_toml())
    print(f"written {path}: send it to {found.name}")
    print(f"the server's fingerprint, to be read out when {found.name} accepts: {made.fingerprint()}")
    if runs(home) and found.known is None:
        print(f"a run is under way; {found.name} can take part in the next one")


def _check_replaceable(path: Path, name: str) -> None:
    """StoreError if something else than an older invitation of this worker is there."""
    if not path.exists() and not path.is_symlink():
        return
    try:
        older = Invitation.read(path).name
    except NoisegateError:
        older = ""
    if older != name:
        raise StoreError(f"{plain(path)}: is there already, and is no invitation for {name}; choose another with --out")


def accept_command(
    folder: WorkerDir,
    invitation: Annotated[Path, typer.Argument(metavar="INVITATION.toml", help="What the operator sent back.")],
    yes: Yes = False,
) -> None:
    """On the worker's machine: check the invitation, and put certificate, settings and policy in their places."""
    found = Invitation.read(invitation)
    print(f"server       {plain(found.server)}")
    print(f"fingerprint  {found.fingerprint()}")
    print(
        f"asks for     {found.rounds} rounds of {plain(found.model)} ({found.parameters} parameters), "
        f"batch {found.batch} of {found.declared} declared examples, sigma {found.sigma:.4g}"
    )
    if found.size:
        print(f"lists you    with {found.size} examples, a public number")
    cost, said = found.cost(), found.epsilon
    warning = "" if cost <= said else f"; the invitation says {said:g}, which is not so: do not agree"
    print(f"costs        epsilon {cost if warning else said:.4g} at delta {found.delta:g}{warning}")
    if not yes:
        typer.confirm("Is this the fingerprint that the operator reads out, and do you agree?", abort=True)
    for line in enroll.accept(folder, found):
        print(line)
    print(f"next: put your examples into {folder / 'data.npz'} (x, y), look at policy.toml, then")
    print(f"      noisegate join {folder}")


def revoke_command(
    server: ServerDir,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The worker to be taken out of the roster.")] = "",
    certificate: Annotated[
        str, typer.Option(help="Revoke the certificate with this serial number (hexadecimal) and nothing else.")
    ] = "",
    authority: AuthorityDir = None,
) -> None:
    """At the operator's: take a worker out of the roster, or revoke one certificate. A running server follows."""
    if bool(name) == bool(certificate):
        raise StoreError("revoke: give the NAME of a worker, or --certificate with a serial number")
    home = layout.server_folder(server)
    ca = layout.authority_folder(home, authority) if authority or not certificate else None
    for line in members.revoke(home, ca, name, certificate):
        print(line)


def new_run_command(server: ServerDir) -> None:
    """At the operator's: prepare a server folder for a new run with the same settings. The old state is put aside."""
    home = layout.server_folder(server)
    if runs(home):
        raise StoreError(f"{plain(home)}: its server is running; stop it first")
    print(f"run {new_run(home)[:12]}: start it with `noisegate serve {home}`")
    print("workers pay for it as for the last one; each must allow that in its policy")


def add_enrollment(app: typer.Typer) -> None:
    """Add these commands to `noisegate federation`."""
    app.command("request")(request_command)
    app.command("sign")(sign_command)
    app.command("accept")(accept_command)
    app.command("renew")(renew_command)
    app.command("revoke")(revoke_command)
    app.command("new-run")(new_run_command)
