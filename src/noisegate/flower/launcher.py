"""Keeps a worker running at every node: asks for a request, sends the certificate and the start, and starts again.

A node that fails is asked again after a pause that doubles, so that one that always fails costs little. Flower reports
a ClientApp that was killed after about a minute; its worker then joins again, and its ledger makes that safe.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Message

from noisegate.checks import plain
from noisegate.errors import FederationError
from noisegate.federation.keys import MOST_PEM
from noisegate.flower.client import ANSWER, ENDED, ENROLL, JOIN, LEFT, LETTER, OK
from noisegate.flower.grid import SteadyGrid, packet, part_of
from noisegate.flower.host import NodeEnrollment, node_name
from noisegate.flower.letters import read_text, write_letter

PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds until a node that failed is asked again: first, and at most."""

Tell = Callable[[str], None]


@dataclass
class NodeState:
    """Where a node stands. message: the id of the message that it has not answered yet. at: when it is asked next.

    name: of its worker, once it is enrolled. done: why it is asked no more.
    """

    message: str = ""
    asked: str = ""
    name: str = ""
    certificate: bytes = b""
    at: float = 0.0
    failures: int = 0
    done: str = ""


class Launcher:
    """All nodes of a run. about: what the start says beside the certificate: the address of the stream, and so on."""

    def __init__(
        self, grid: SteadyGrid, enrollment: NodeEnrollment, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.grid, self.enrollment, self._tell, self._clock = grid, enrollment, tell, clock
        self.nodes: dict[int, NodeState] = {}
        self.about: dict[str, object] | None = None  # until it is known, nobody is started

    @property
    def enrolled(self) -> dict[int, str]:
        """The nodes that are enrolled, and the names of their workers."""
        return {node: state.name for node, state in self.nodes.items() if state.name}

    @property
    def running(self) -> set[int]:
        """The nodes that were started and have not answered yet."""
        return {node for node, state in self.nodes.items() if state.message and state.asked == JOIN}

    def look(self) -> None:
        """Take the replies that are there, and send what is due. Nothing that a node replies raises."""
        for node in self.grid.get_node_ids():
            self.nodes.setdefault(node, NodeState())
        waiting = {state.message: (node, state) for node, state in self.nodes.items() if state.message}
        for message, reply in self.grid.replies(list(waiting)):
            node, state = waiting[message]
            state.message = ""
            try:
                self._take(node, state, reply)
            except FederationError as error:
                self._tell(f"node {node}: {plain(error)[:300]}")
                self._fail(state)
        now = self._clock()
        for node, state in self.nodes.items():
            if not state.message and not state.done and now >= state.at:
                self._ask(node, state)

    def _ask(self, node: int, state: NodeState) -> None:
        key = self.enrollment.signing
        if not state.name:
            letter = write_letter(
                key, ENROLL, name=node_name(node), server=key.public.hex(), fixed=self.enrollment.fixed
            )
            kind = ENROLL
        elif self.about is not None:
            papers = {"authority": self.enrollment.certificate.decode(), "certificate": state.certificate.decode()}
            letter, kind = write_letter(key, JOIN, **papers, **self.about), JOIN
        else:
            return
        message = Message(packet(**{LETTER: letter}), dst_node_id=node, message_type=f"query.{kind}")
        state.message, state.asked = next(iter(self.grid.push_messages([message])), ""), kind
        if not state.message:
            self._fail(state)

    def _take(self, node: int, state: NodeState, reply: Message | None) -> None:
        """What a node replied, or what Flower says in its place."""
        if reply is None or reply.has_error():
            why = "unreadable reply" if reply is None else f"error {int(reply.error.code)}"
            raise FederationError(f"{state.asked}: {why}; asked again in {self._pause(state):g} s")
        text = read_text(part_of(reply, ANSWER, 2 * MOST_PEM) or b"") or {}
        word = text.get("answer")
        if state.asked == ENROLL and word == OK:
            request, proof = str(text.get("request", "")), str(text.get("proof", ""))
            state.done = "refused"  # for this run, unless the next line admits it
            state.name, state.certificate = self.enrollment.admit(node, request.encode(), _unhex(proof))
            state.done, state.failures = "", 0
            self._tell(f"node {node}: enrolled as {state.name}")
        elif state.asked == JOIN and word in (ENDED, LEFT):
            state.done = str(word)
            self._tell(f"node {node}: {word}")
        else:
            raise FederationError(f"{state.asked}: {plain(word)[:50]}; asked again in {self._pause(state):g} s")

    def _fail(self, state: NodeState) -> None:
        state.at = self._clock() + self._pause(state)
        state.failures += 1

    def _pause(self, state: NodeState) -> float:
        return float(min(LONGEST_PAUSE, PAUSE * 2.0 ** min(state.failures, 10)))


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
