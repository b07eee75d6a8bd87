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

LARGEST = 2**128 - 1
"""The largest whole number that a setting can be: no seed needs more digits."""

MODERATE = 1e-6, 1e9
"""Between these lie numbers that float32 can add, multiply and divide by one another without becoming 0 or infinite."""

MOST_SHOWN = 200
"""Characters of a value that a message shows."""


def plain(text: object, keep: str = "") -> str:
    """`str(text)` with everything escaped that a terminal would obey and a reader would not see; `keep`: but for these.

    >>> print(plain("red: \\x1b[31m, hidden: \\u202e"))
    red: \\x1b[31m, hidden: \\u202e
    """
    written = str(text)
    if written.isprintable():
        return written
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in written
    )


def shown(value: object) -> str:
    """A value in a message: its repr, on one line, without what a terminal would obey, and not too long."""
    if isinstance(value, int) and abs(value) > 10**MOST_SHOWN:  # Python refuses to write the largest ones
        return f"a whole number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = plain(repr(value))
    except Exception:  # noqa: BLE001  # it may be of a plugin's class, or nested too deeply
        return f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def told(error: BaseException) -> str:
    """An error's own words on one line, if it has any. It may be of a plugin's class."""
    try:
        return plain(" ".join(str(error).split()))[: 5 * MOST_SHOWN]
    except Exception:  # noqa: BLE001  # even to ask for its words may raise
        return "?"


def _number(value: object) -> bool:
    if isinstance(value, int) and abs(value) > LARGEST:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def refuse(name: str, value: object, rule: str) -> SpecError:
    """The error for a setting `name` whose `value` breaks `rule`."""
    return SpecError(f"{plain(name)} = {shown(value)}: {rule}")


def positive(**settings: Any) -> None:
    """Each setting must be a finite number above 0."""
    for name, value in settings.items():
        if not (_number(value) and value > 0):
            raise refuse(name, value, "must be a finite number above 0")


def moderate(**settings: Any) -> None:
    """Each setting must be above 0, and neither so small nor so large that float32 cannot carry what is made of it."""
    positive(**settings)
    least, most = MODERATE
    for name, value in settings.items():
        if value < least:
            raise refuse(name, value, f"is too small to compute with; must be at least {least:g}")
        if value > most:
            raise refuse(name, value, f"is too large to compute with; must be at most {most:g}")


def finite(**settings: Any) -> None:
    """Each setting must be a number that is not so large that float32 cannot carry what is made of it."""
    most = MODERATE[1]
    for name, value in settings.items():
        if not (_number(value) and abs(value) <= most):
            raise refuse(name, value, f"must be a number from {-most:g} to {most:g}")


def count(**settings: Any) -> None:
    """Each setting must be a whole number, 1 or more."""
    for name, value in settings.items():
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise refuse(name, value, "must be a whole number, 1 or more")
        if value > LARGEST:
            raise refuse(name, value, f"must be at most {LARGEST}")


def label(classes: int | None = None, /, **settings: Any) -> None:
    """Each setting must be the number of a class: 0 or more, and one of `classes`, if that is known."""
    for name, value in settings.items():
        if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST):
            raise refuse(name, value, "must be the number of a class, 0 or more")
        if classes is not None and value >= classes:
            raise refuse(name, value, f"the classes of the data are 0 to {classes - 1}")


def fraction(**settings: Any) -> None:
    """Each setting must be at least 0 and below 1."""
    for name, value in settings.items():
        if not (_number(value) and 0 <= value < 1):
            raise refuse(name, value, f"must be at least 0 and below 1{as_share(value)}")


def share(**settings: Any) -> None:
    """Each setting must lie between 0 and 1, both allowed."""
    for name, value in settings.items():
        if not (_number(value) and 0 <= value <= 1):
            raise refuse(name, value, f"must lie between 0 and 1{as_share(value)}")


def as_share(value: object) -> str:
    """What a percentage would be as a share."""
    percent = _number(value) and isinstance(value, int | float) and 1 < value < 100
    return f" (did you mean {value / 100:g}?)" if percent else ""  # type: ignore[operator]  # a number, as was found


def one_of(choices: Iterable[Any], **settings: Any) -> None:
    """Each setting must be one of `choices`; the message lists them and guesses what was meant."""
    known = list(choices)
    for name, value in settings.items():
        if value not in known:
            raise refuse(name, value, f"unknown{guess(value, known)}; choose from {', '.join(map(str, known))}")


def guess(value: object, known: Iterable[Any]) -> str:
    """` (did you mean 'x'?)` for the closest known word, whatever the case, or nothing."""
    if not isinstance(value, str) or len(value) > MOST_SHOWN:
        return ""
    words = {_even(str(word)): str(word) for word in known}
    close = difflib.get_close_matches(_even(value), words, n=1)
    return f" (did you mean {words[close[0]]!r}?)" if close else ""


def _even(word: str) -> str:
    return word.casefold().replace("_", "-").replace(" ", "-")


def rounded(number: float, places: int) -> str:
    """A number with so many decimal places; with two digits that count, where those would show nothing but 0.

    >>> rounded(1.9996, 3), rounded(0.000123, 3), rounded(0.0, 3)
    ('2.000', '0.00012', '0.000')
    """
    return f"{number:.{places}f}" if number == 0 or abs(number) >= 0.5 * 10.0**-places else f"{number:.2g}"
