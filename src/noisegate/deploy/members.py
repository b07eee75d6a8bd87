"""The server's side of membership: the roster, who is taken out of it, and the server's own certificate."""

from pathlib import Path

from noisegate import checks
from noisegate.checks import plain
from noisegate.deploy.layout import ISSUED, ROSTER, SERVER_CERTIFICATE, SERVER_KEY, SIGNING_KEY
from noisegate.errors import FederationError, SpecError
from noisegate.federation.certificates import (
    Authority,
    identity_of,
    make_request,
    read_certificate,
    sign_request,
)
from noisegate.federation.keys import SigningKey, read_private, write_private
from noisegate.federation.roster import MOST_WORKERS, Roster
from noisegate.files import write_whole
from noisegate.settings import read_settings
from noisegate.usual import DAYS


def revoke(server: Path, authority: Path | None, name: str = "", serial: str = "") -> list[str]:
    """Take a worker out of the roster, with all its certificates; or revoke one certificate by its number.

    Gives a line for each thing that was done. A server that runs reads the roster again within a second.
    """
    roster = read_roster(server)
    numbers, keys, sizes = set(), dict(roster.keys), dict(roster.sizes)
    if serial:
        try:
            numbers.add(int(serial, 16))
        except ValueError:
            raise checks.refuse("certificate", serial, "must be a serial number in hexadecimal") from None
    elif name not in keys:
        raise SpecError(f"{plain(name)}: is not in the roster{checks.guess(name, keys)}; it has {', '.join(keys)}")
    else:
        numbers = _issued_to(name, authority)
        del keys[name]
        sizes.pop(name, None)
    write_roster(server, Roster(keys, roster.revoked | numbers, sizes))
    told = [f"{name}: is not in the roster any more"] if name else []
    told += [f"certificate {number:x}: revoked" for number in sorted(numbers)]
    if not keys:
        told.append("the roster is empty now, which no server takes: stop the server")
    return told


def renew_server(server: Path, authority: Path, hosts: list[str], days: int = DAYS) -> Path:
    """Write the server a new certificate for the keys that it has. Gives its path."""
    signing = SigningKey.read(server / SIGNING_KEY)
    key = read_private(server / SERVER_KEY) if (server / SERVER_KEY).exists() else None
    made, wanted = make_request("server", signing.public, hosts, key)
    certificate = sign_request(Authority.read(authority), wanted, server=True, days=days)
    if key is None:
        write_private(server / SERVER_KEY, made)
    write_whole(server / SERVER_CERTIFICATE, certificate)
    return server / SERVER_CERTIFICATE


def read_roster(server: Path) -> Roster:
    """The roster of a server, which may still be empty."""
    path = server / ROSTER
    found = read_settings(path)
    if set(found) != {"revoked"}:
        return Roster.read(path)
    try:
        return Roster({}, frozenset(int(serial, 16) for serial in found["revoked"]))
    except (TypeError, ValueError):
        raise SpecError(f"{plain(path)}: revoked: must be a list of serial numbers in hexadecimal, as texts") from None


def write_roster(server: Path, roster: Roster) -> None:
    """Write the roster, whole or not at all."""
    if len(roster.keys) > MOST_WORKERS:
        raise SpecError(f"roster: {len(roster.keys)} workers; it must have at most {MOST_WORKERS}")
    if len(set(roster.keys.values())) < len(roster.keys):
        raise FederationError("roster: two workers would have the same key; each makes its own")
    write_whole(server / ROSTER, roster.to_toml().encode())


def _issued_to(name: str, authority: Path | None) -> set[int]:
    """The numbers of the certificates that an authority has signed for a worker."""
    found = sorted((authority / ISSUED).glob(f"{name}.*.pem")) if authority else []
    return {identity_of(read_certificate(path), path).serial for path in found}
