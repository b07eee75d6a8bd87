"""A worker that takes part in federations: a model, its own examples, its own policy.

    worker = Worker(model, (x, y), Policy.read(folder / "policy.toml"))
    outcome = worker.join(folder)

The folder holds its name and keys, and the ledger of the data set (docs/federation.md).
"""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from noisegate.errors import NO_REGRESSION, DataError
from noisegate.federation.client import Teller, WorkerOutcome, WorkerStream
from noisegate.federation.ledger import Ledger
from noisegate.federation.participation import Holder, Maker, Participation
from noisegate.federation.policy import Policy
from noisegate.federation.wire import Message
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.models import check_module
from noisegate.vectors import FlatModel, Loss, cross_entropy


def silent(event: str, /, **about: object) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker: a module, its examples (x, y), and what it allows.

    loss: of (outputs, targets), one number per example. device: where it computes. make: makes uploads, in place of the
    protocol; for those who test a server.
    """

    model: nn.Module
    data: tuple[Tensor, Tensor]
    policy: Policy
    loss: Loss = cross_entropy
    device: str = "cpu"
    make: Callable[[Holder], Maker] | None = None

    def __post_init__(self) -> None:
        check_module(self.model)
        x, y = self.data
        if y.is_floating_point():
            raise DataError(f"data: y has type {y.dtype}; labels must be whole numbers; {NO_REGRESSION}")
        if x.dtype != torch.float32 or len(x) != len(y) or not len(y) or not bool(torch.isfinite(x).all()):
            raise DataError(
                f"data: x has shape {tuple(x.shape)} and type {x.dtype}, y has {tuple(y.shape)}; a worker needs at "
                "least one example, finite float32, and a label for each"
            )
        self.policy.check_data(len(y))

    @classmethod
    def of(cls, folder: WorkerFolder) -> "Worker":
        """The worker that a folder describes: its model by name, its data from a file."""
        examples = folder.examples()
        folder.check_labels(examples[1])
        return cls(folder.module(examples[0]), examples, folder.policy())

    def join(self, folder: Path | str, tell: Teller = silent) -> WorkerOutcome:
        """Take part until the run is over, or the budget is spent. Reconnects as often as need be.

        tell: called with what happens, for logs.
        """
        place = WorkerFolder.read(Path(folder))
        return asyncio.run(self.take_part(place, tell))

    async def take_part(
        self, place: WorkerFolder, tell: Teller = silent, executor: Executor | None = None
    ) -> WorkerOutcome:
        """The same beside others in one event loop. executor: where uploads are computed."""
        with Ledger.open(place.ledger) as ledger:
            if ledger.book.entries == 1:
                tell("new ledger", what=f"nothing counts as spent yet in {place.ledger}")
            if ledger.note_data(self.fingerprint()):
                tell("data changed", what="other examples than before; all that was charged stays charged")
            for doubt in self.policy.doubts(len(self.data[1])):
                tell("doubt", what=doubt)
            holder = self.holder(place, ledger)

            def agree(message: Message) -> Participation:
                return Participation(holder, message, self.make(holder) if self.make else None)

            stream = WorkerStream(place, holder, agree, tell, executor)
            return await stream.until_the_end()

    def holder(self, place: WorkerFolder, ledger: Ledger) -> Holder:
        """This worker with the keys of its folder and a ledger."""
        x, y = (each.to(self.device) for each in self.data)
        model = FlatModel(self.model, self.loss, self.device)
        return Holder(place.name, place.signing_key(), self.policy, ledger, model, (x, y))

    def fingerprint(self) -> str:
        """sha256 of the examples. It stays in the ledger: whoever guesses the data can check the guess with it."""
        found = hashlib.sha256()
        for each in self.data:
            found.update(f"{each.dtype} {tuple(each.shape)}\n".encode())
            found.update(each.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()
