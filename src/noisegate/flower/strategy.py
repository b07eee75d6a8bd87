"""Message mode: a strategy that sends one message to each worker in each round. For simulations and few rounds."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from noisegate import checks
from noisegate.errors import FederationError
from noisegate.federation import wire
from noisegate.flower.client import LETTER, MODEL, ROUND, SEAL, SEALED, TERMS
from noisegate.flower.grid import SteadyGrid, packet, part_of
from noisegate.flower.host import NodeEnrollment
from noisegate.flower.launcher import Launcher
from noisegate.flower.letters import write_letter
from noisegate.flower.rounds import MessageServer, checked_quorum
from noisegate.flower.sealing import PUBLIC, TAG
from noisegate.flower.stream import LOOK, enroll, tell

PARAMETERS = "parameters"
"""The name of the model's one array in what Flower is handed."""


class NoisegateStrategy(Strategy):
    """noisegate's server as a strategy of Flower's. `run(grid)` enrolls the nodes and plays all rounds that are left.

    server: its folder holds keys and state, so that a run that was interrupted goes on. workers: how many nodes take
    part. Whatever a node replies, nothing raises; counts and weights that it states are not read. Who sent what is
    told by the message that it replies to.
    """

    def __init__(self, server: MessageServer, workers: int) -> None:
        checks.count(workers=workers)
        self.server, self.workers = server, workers
        self._launcher: Launcher | None = None
        self._sent: dict[str, Message] = {}  # what each worker was sent in this round

    def run(
        self, grid: Grid, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None
    ) -> Result | None:
        """Play all rounds that are left; None if none are. FederationError if there are too few workers."""
        steady = SteadyGrid(grid, limit=lambda: self.server.now.patience.longest())
        try:
            self._prepare(steady)
            left = self.server.terms.rounds - self.server.next_round
            if left <= 0:
                self.server.end()
                return None
            result = self.start(steady, self.arrays(), left, evaluate_fn=evaluate_fn)
            self.server.end()
            return result
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the server's folder."""
        if self._launcher is not None:
            self.server.close()
            self._launcher = None

    def arrays(self) -> ArrayRecord:
        """The current model, as Flower is handed it."""
        return ArrayRecord({PARAMETERS: Array(self.server.now.state.params.numpy())})

    def summary(self) -> None:
        """Print what is run."""
        terms = self.server.terms
        tell(f"run {terms.run[:12]}: {terms.rounds} rounds, {self.workers} workers, {terms.parameters} parameters")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round. The server's own model is what counts; `arrays` and `config` are not read."""
        if self._launcher is None:
            self._prepare(grid if isinstance(grid, SteadyGrid) else SteadyGrid(grid))
        self._sent = {}
        if self.server.over:
            return []
        nodes = self._reachable()
        model, seal = self.server.begin(list(nodes)), self.server.sealing.stated
        self._sent = {name: self._message(name, node, model, seal) for name, node in nodes.items()}
        return list(self._sent.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Judge what came. The next model, and how many uploads were used, refused and so on."""
        if not self._sent:
            return None, None
        owners = {message.metadata.message_id: name for name, message in self._sent.items()}
        most = PUBLIC + TAG + wire.HEADER.size + max(4 * self.server.terms.parameters, wire.MOST_TEXT)
        came: dict[str, bytes | None] = {}
        gone: set[str] = set()
        for reply in replies:
            name = owners.get(reply.metadata.reply_to_message_id)
            if name is None or name in came:
                continue
            if reply.has_error():
                gone.add(name)
            else:
                came[name] = part_of(reply, SEALED, most)
        line = self.server.finish(came, gone - set(came))
        self._sent = {}
        counts = dict.fromkeys(("used", "refused", "malformed", "forged", "late", "missing"), 0)
        for fate in line["workers"].values():
            counts[fate["status"]] += 1
        return self.arrays(), MetricRecord({**counts, "round": line["round"]})

    def configure_evaluate(self, *_: Any) -> Iterable[Message]:
        """Nothing: workers are asked for no evaluation, which would cost privacy."""
        return []

    def aggregate_evaluate(self, *_: Any) -> MetricRecord | None:
        """Nothing."""
        return None

    def _prepare(self, grid: SteadyGrid) -> None:
        """Enroll the nodes and open the server's folder."""
        folder, settings = self.server.settings.folder, self.server.settings
        launcher = Launcher(grid, NodeEnrollment.of(folder, self.workers), tell)
        enroll(launcher, self.workers, settings.gather)
        launcher.enrollment.write(folder)
        self.server.open()
        self._launcher = launcher

    def _reachable(self) -> dict[str, int]:
        """The workers that are asked now, and their nodes. Waits a while for a quorum."""
        server, launcher = self.server, self._ready()
        until = time.monotonic() + server.settings.gather
        while True:
            online = set(launcher.grid.get_node_ids())
            at = {name: node for node, name in launcher.enrolled.items() if node in online}
            asked = [name for name in server.awaited() if name in at]
            if len(asked) < server.settings.quorum:  # then also those who missed deadlines
                asked = [name for name in server.staying() if name in at]
            if len(asked) >= server.settings.quorum or time.monotonic() >= until:
                checked_quorum(server, asked)
                return {name: at[name] for name in asked}
            if len(at) < len(server.now.names):
                launcher.look()
            time.sleep(LOOK)

    def _message(self, name: str, node: int, model: bytes, seal: bytes) -> Message:
        launcher = self._ready()
        papers = {
            "authority": launcher.enrollment.certificate.decode(),
            "certificate": launcher.nodes[node].certificate.decode(),
        }
        letter = write_letter(self.server.now.key, ROUND, **papers)
        parts = {LETTER: letter, TERMS: self.server.terms_for(name), MODEL: model, SEAL: seal}
        return Message(packet(**parts), dst_node_id=node, message_type=f"train.{ROUND}")

    def _ready(self) -> Launcher:
        if self._launcher is None:
            raise FederationError("the strategy is closed; call run(grid), or begin with configure_train")
        return self._launcher
