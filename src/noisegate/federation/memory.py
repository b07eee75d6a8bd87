"""Memory that is free goes back to the system. A large federation's server would otherwise hold it as if in use."""

import ctypes
import functools
from collections.abc import Callable

LARGE = 2**27
"""Bytes of a round's uploads from which it is worth while."""


def give_back(uploads: int) -> None:
    """Give free memory back, if a round has so many bytes of uploads. Where the C library cannot, nothing happens.

    gRPC cuts messages into small pieces. What is freed of them lies scattered over the heap, and without this stays
    with the process: up to twice the uploads of a round.
    """
    trim = _trim()
    if uploads >= LARGE and trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The C library's `malloc_trim`; None where there is none, as on a Mac."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
