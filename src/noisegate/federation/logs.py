"""The operators' log: JSON lines that say what happened and to whom, and hold no upload, no gradient and no example."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from noisegate.checks import plain
from noisegate.errors import StoreError

BURST, PER_SECOND = 200, 2.0
"""How many lines peers can cause at once, and then each second. What they cause beyond is counted, not written."""

MOST_WORDS = 500
"""Characters of a text in a line."""


Listener = Callable[[Mapping[str, Any]], None]
Clock = Callable[[], float]


class OperatorsLog:
    """Writes lines {"time", "event", ...}. A disk that is full is noted in `failure`, and the server stops.

    append: writes one line, or raises StoreError. hear: is told each line too.
    """

    def __init__(self, append: Listener, hear: Listener | None = None, clock: Clock = time.monotonic) -> None:
        self._append, self._hear, self._clock = append, hear, clock
        self._allowance, self._at = float(BURST), clock()
        self.unwritten = 0
        self.failure: StoreError | None = None

    def say(self, event: str, **about: Any) -> None:
        """Write a line about the server itself."""
        line = {"time": round(time.time(), 3), "event": event}
        line |= {key: plain(value)[:MOST_WORDS] if isinstance(value, str) else value for key, value in about.items()}
        if self.unwritten:
            line["unwritten"], self.unwritten = self.unwritten, 0
        if self._hear:
            self._hear(line)
        try:
            self._append(line)
        except StoreError as error:
            self.failure = self.failure or error

    def say_of_peer(self, event: str, **about: Any) -> None:
        """Write a line about a peer, unless peers have caused too many of them."""
        now = self._clock()
        self._allowance = min(BURST, self._allowance + PER_SECOND * (now - self._at))
        self._at = now
        if self._allowance < 1:
            self.unwritten += 1
            return
        self._allowance -= 1
        self.say(event, **about)
