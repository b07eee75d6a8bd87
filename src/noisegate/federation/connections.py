"""How many connections a server keeps open."""

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

MOST_CONNECTIONS = 4096
"""Connections that may be open, unless there are more workers, or fewer files."""

KEPT_FILES = 128
"""Open files that connections leave to the server itself."""


def most_connections(workers: int) -> int:
    """How many connections may be open: far more than workers need, and fewer than there are files for.

    Whoever can reach the port can hold connections that prove nothing, each for as long as a handshake may take.
    """
    wanted = max(MOST_CONNECTIONS, 4 * workers + 64)
    if resource is None:
        return wanted
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if allowed == resource.RLIM_INFINITY else max(16, min(wanted, allowed - KEPT_FILES))
