"""The commands of `noisegate federation` by which workers on other machines come and go."""

from pathlib import Path

import typer

from noisegate.checks import plain
from noisegate.cli.declared.federation import SignFlags
from noisegate.deploy import enroll, layout, members
from noisegate.deploy.init import new_run
from noisegate.deploy.invitation import Invitation
from noisegate.deploy.status import runs
from noisegate.errors import NoisegateError, StoreError
from noisegate.federation.certificates import days_left, hosts_of, read_certificate
from noisegate.files import write_whole


def request_command(folder: Path, name: str) -> None:
    """Make keys and a request, and say what to do with it."""
    _told_request(folder, enroll.request(folder, name))


def renew_command(folder: Path, new_keys: bool, authority: Path | None, days: int) -> None:
    """Renew a certificate, or ask for a new one."""
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


def sign_command(flags: SignFlags) -> None:
    """Show a request, sign it if that is confirmed, and write the invitation."""
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


def accept_command(folder: Path, invitation: Path, yes: bool) -> None:
    """Show an invitation, and accept it if that is confirmed."""
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


def revoke_command(server: Path, name: str, certificate: str, authority: Path | None) -> None:
    """Take a worker out, or revoke one certificate."""
    if bool(name) == bool(certificate):
        raise StoreError("revoke: give the NAME of a worker, or --certificate with a serial number")
    home = layout.server_folder(server)
    ca = layout.authority_folder(home, authority) if authority or not certificate else None
    for line in members.revoke(home, ca, name, certificate):
        print(line)


def new_run_command(server: Path) -> None:
    """Prepare a new run, and say what it costs."""
    home = layout.server_folder(server)
    if runs(home):
        raise StoreError(f"{plain(home)}: its server is running; stop it first")
    print(f"run {new_run(home)[:12]}: start it with `noisegate serve {home}`")
    print("workers pay for it as for the last one; each must allow that in its policy")
