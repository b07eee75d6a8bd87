"""Checks of settings. Arguments are keywords, so that a message names the setting for free.

>>> positive(epsilon=-1)
Traceback (most recent call last):
noisegate.errors.SpecError: epsilon = -1: must be a finite number above 0
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from noisegate.errors import SpecError


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def refuse(name: str, value: object, rule: str) -> SpecError:
    """The error for a setting `name` whose `value` breaks `rule`."""
    return SpecError(f"{name} = {value!r}: {rule}")


def positive(**settings: Any) -> None:
    """Each setting must be a finite number above 0."""
    for name, value in settings.items():
        if not (_number(value) and value > 0):
            raise refuse(name, value, "must be a finite number above 0")


def count(**settings: Any) -> None:
    """Each setting must be a whole number, 1 or more."""
    for name, value in settings.items():
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise refuse(name, value, "must be a whole number, 1 or more")


def fraction(**settings: Any) -> None:
    """Each setting must be at least 0 and below 1."""
    for name, value in settings.items():
        if not (_number(value) and 0 <= value < 1):
            raise refuse(name, value, "must be at least 0 and below 1")


def share(**settings: Any) -> None:
    """Each setting must lie between 0 and 1, both allowed."""
    for name, value in settings.items():
        if not (_number(value) and 0 <= value <= 1):
            raise refuse(name, value, "must lie between 0 and 1")


def one_of(choices: Iterable[Any], **settings: Any) -> None:
    """Each setting must be one of `choices`; the message lists them and guesses what was meant."""
    known = list(choices)
    for name, value in settings.items():
        if value not in known:
            raise refuse(name, value, f"unknown{guess(value, known)}; choose from {', '.join(map(str, known))}")


def guess(value: object, known: Iterable[Any]) -> str:
    """` (did you mean 'x'?)` for the closest known word, or nothing."""
    close = difflib.get_close_matches(str(value), [str(word) for word in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def plain(text: object) -> str:
    """A text that a file or a user gave, without anything that a terminal would obey: such characters are written out.

    >>> plain("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in str(text)
    )
