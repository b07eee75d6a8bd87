"""The smallest float32 for which something holds, found by bisection over all of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Integers = NDArray[np.integer]

KEY_OF_INF = 0x7F800000
"""The key of infinity (`_keys_of`)."""


def first_floats(holds: Callable[[Floats, Integers], Flags], guess: NDArray[np.float64]) -> Floats:
    """For each i the smallest float32 v above -inf with holds(v, i), if below it `holds` is false and above it true.

    inf if there is none. By bisection, of which a guess that is right up to rounding leaves one step.
    """
    with np.errstate(over="ignore"):
        near = _keys_of(guess.astype(np.float32))
    everyone = np.arange(len(near))
    low, high = np.maximum(near - 1, -KEY_OF_INF), np.minimum(near + 1, KEY_OF_INF)
    low[holds(_floats_of(low), everyone)] = -KEY_OF_INF
    high[~holds(_floats_of(high), everyone)] = KEY_OF_INF
    while len(i := (high - low > 1).nonzero()[0]):
        middle = (low[i] + high[i]) // 2
        held = holds(_floats_of(middle), i)
        high[i[held]], low[i[~held]] = middle[held], middle[~held]
    return _floats_of(high)


def _keys_of(values: Floats) -> NDArray[np.int64]:
    """Integers in the order of the values, neighbours next to each other; 0 for both zeros."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def _floats_of(keys: NDArray[np.int64]) -> Floats:
    """The values that have these keys."""
    return np.where(keys < 0, -(2**31) - keys, keys).astype(np.int32).view(np.float32)
