"""Training: rounds, and an examination every so often that the rounds do not wait for."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from noisegate.simulate.federation import Federation
from noisegate.simulate.progress import Progress, describe
from noisegate.simulate.recheck import check_finite, recheck
from noisegate.simulate.rounds import Rounds
from noisegate.vectors import FlatModel

EVALUATION_BLOCK = 2048

RECHECKED = 100
"""Rounds after which the next examination also looks whether examples still have contributions of their own. On a CPU
that takes one to two rounds' time, and less where there are more workers than a forward pass holds."""


class Training:
    """A run on its way: `ahead` and `settled` in turns, until `over`. To iterate is to do that, giving the progress.

    Accuracy is taken every `evaluate_every` rounds and at the end: on a CUDA device behind the rounds, on a CPU in
    another thread, of a copy of the model.
    """

    def __init__(
        self,
        federation: Federation,
        progress: Progress,
        x_test: Tensor,
        y_test: Tensor,
        evaluate_every: int,
        graph: bool = True,
    ) -> None:
        self.federation, self.evaluate_every = federation, evaluate_every
        self._rounds = Rounds(federation, progress, graph)
        self.played = progress.rounds
        self._curve = progress.curve
        self._examiner = Examiner(federation.mechanism.model, x_test, y_test)
        self._pending: tuple[int, Tensor | Future[int]] | None = None
        if self._due() and (not self._curve or self._curve[-1]["round"] < self.played):
            self._examine()  # interrupted before it could be

    @property
    def over(self) -> bool:
        """Whether all rounds are played."""
        return self.played >= self.federation.schedule.rounds

    @property
    def begun(self) -> int:
        """Rounds that something was drawn for, the one that an interruption broke off included."""
        return self._rounds.begun

    def stride(self) -> int:
        """How many rounds to go ahead at most: up to the next examination, and no more than are worth queuing."""
        due = self.evaluate_every - self.played % self.evaluate_every
        return min(self._rounds.stride(), due, self.federation.schedule.rounds - self.played)

    def ahead(self) -> None:
        """One more round, at once or queued."""
        self._rounds.step()
        self.played += 1
        if self._due():
            self._collect()
            self._examine()

    def _due(self) -> bool:
        return self.played > 0 and (self.played % self.evaluate_every == 0 or self.over)

    def _examine(self) -> None:
        state = self._rounds.settled().state
        with self._rounds.beside():
            if check_finite(self.federation, state.params, self.played) and self._recheck_due():
                recheck(self.federation, state, self.played, self._examiner.x)
            self._pending = self.played, self._examiner.begin(state.params)

    def _recheck_due(self) -> bool:
        """By the number of the round alone, so that a resumed run looks when the others do."""
        return self.over or self.played // RECHECKED > (self.played - self.evaluate_every) // RECHECKED

    def __iter__(self) -> Iterator[Progress]:
        """The progress after each remaining round, or every so often on a CUDA device."""
        while not self.over:
            side_by_side([self])
            yield self.settled()

    def settled(self, wait: bool = False) -> Progress:
        """Where the run stands. Its last line may be missing while it is being examined, unless you `wait`."""
        progress = self._rounds.settled()
        if self._pending and (wait or self.over or not self._still_examined()):
            self._collect()
        return replace(progress, curve=self._curve)

    def _still_examined(self) -> bool:
        """Whether to ask for the pending line would mean to wait. What a device counts is there when it is settled."""
        return self._pending is not None and isinstance(self._pending[1], Future) and not self._pending[1].done()

    def _collect(self) -> None:
        """Write the pending line."""
        if self._pending:
            round, found = self._pending
            right = found.result() if isinstance(found, Future) else int(found)
            since = self._curve[-1]["round"] if self._curve else 0
            reasons = self._rounds.settled().reasons
            line = describe(self.federation, reasons, since, round, right / self._examiner.examples)
            if since < round:  # else an interruption came between this line and the next
                self._curve = (*self._curve, line)
            self._pending = None


def side_by_side(trainings: Sequence[Training]) -> None:
    """Take several runs on one device some rounds ahead, side by side."""
    strides = [training.stride() for training in trainings]
    for i in range(max(strides, default=0)):
        for training, stride in zip(trainings, strides, strict=True):
            if i < stride:
                training.ahead()


class Examiner:
    """Examines models while training goes on."""

    def __init__(self, model: FlatModel, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.examples = x, y, len(y)
        # Its own module: whoever calls one puts parameters into it for that long.
        self.model = FlatModel(model.module, model.loss, x.device, model.classes)
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, params: Tensor) -> "Tensor | Future[int]":
        """How many examples `params` has right as it is now, to be had later."""
        if params.is_cuda:
            return right_answers(self.model, params, self.x, self.y)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="examiner")
        return self._thread.submit(self._count, params.clone())

    def _count(self, params: Tensor) -> int:
        return int(right_answers(self.model, params, self.x, self.y))


def accuracy(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> float:
    """Share of the examples whose highest output is that of their label."""
    return float(right_answers(model, params, x, y)) / len(y)


@torch.no_grad()
def right_answers(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """() how many examples have their highest output at their label."""
    right = [
        (model.scores(params, block).argmax(1) == labels).sum()
        for block, labels in zip(x.split(EVALUATION_BLOCK), y.split(EVALUATION_BLOCK), strict=True)
    ]
    return torch.stack(right).sum()
