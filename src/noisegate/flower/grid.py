"""Messages over Flower's grid, such that no node's reply, and no missing one, raises or waits for ever."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from noisegate.checks import plain, told

PACKET = "noisegate"
"""The name of the one record in a message of noisegate's. Its entries are bytes, as arrays of uint8."""

POLL = 0.5
"""Seconds between two looks for replies. Flower's own loop waits 3."""

FRAME = 512
"""Bytes that an array may be longer than its content: the header of numpy's format."""


def packet(**parts: bytes) -> RecordDict:
    """The content of a message with these parts."""
    arrays = {name: Array(np.frombuffer(part, np.uint8)) for name, part in parts.items()}
    return RecordDict({PACKET: ArrayRecord(arrays)})


def part_of(message: Message, name: str, most: int) -> bytes | None:
    """One part of a message: at most so many bytes. None if it has none, or another thing in its place.

    What another sent is checked before numpy reads it. numpy reads no pickles here.
    """
    try:
        array = message.content[PACKET][name]
        if array.dtype != "uint8" or len(array.shape) != 1 or len(array.data) > most + FRAME:
            return None
        numbers = array.numpy()
        if type(numbers) is not np.ndarray or numbers.dtype != np.uint8 or numbers.ndim != 1 or len(numbers) > most:
            return None
        return numbers.tobytes()
    except Exception:  # noqa: BLE001  # it is a stranger's, and Flower says nowhere what reading it may raise
        return None


class SteadyGrid(Grid):
    """Flower's grid, asked for one reply at a time. A reply that cannot be read is None, and the others come through.

    Flower reads all replies at once and raises if one of them is damaged: one node could end a run. limit: gives the
    seconds that replies are waited for at most.
    """

    def __init__(self, grid: Grid, *, limit: Callable[[], float] = lambda: math.inf, poll: float = POLL) -> None:
        self._grid, self._limit, self._poll = grid, limit, poll

    def set_run(self, run: Any) -> None:
        """As Flower's."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As Flower's."""
        return self._grid.run

    def create_message(self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None) -> Any:
        """As Flower's, which it calls deprecated."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """The nodes that are online."""
        return sorted(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages. Their ids, in order; "" for one that could not be sent."""
        return [each or "" for each in self._grid.push_messages(list(messages))]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there and can be read."""
        return [reply for _, reply in self.replies(message_ids) if reply is not None]

    def replies(self, message_ids: Iterable[str]) -> Iterator[tuple[str, Message | None]]:
        """(id of the message, its reply) for each reply that is there; None if it cannot be read."""
        for each in message_ids:
            try:
                found = list(self._grid.pull_messages([each]))
            except Exception as error:  # noqa: BLE001  # a node made the reply, and reading it may raise anything
                print(f"a reply cannot be read: {plain(told(error))[:200]}", flush=True)
                yield each, None
            else:
                yield from ((each, reply) for reply in found[:1])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and the replies that came within `timeout` seconds and can be read."""
        waiting, came = {each for each in self.push_messages(messages) if each}, []
        end = time.monotonic() + min(self._limit(), math.inf if timeout is None else timeout)
        while waiting:
            for each, reply in self.replies(sorted(waiting)):
                waiting.discard(each)
                came += [reply] if reply is not None else []
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(min(self._poll, max(0.0, end - time.monotonic())))
        return came
