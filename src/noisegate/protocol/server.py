"""What a server does with whatever arrived in a round: read it, judge it, step (Algorithms 2 and 3)."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noisegate.capacity import Capacity
from noisegate.errors import SpecError
from noisegate.protocol.answers import check_verdict
from noisegate.protocol.intake import Received, receive
from noisegate.protocol.worker import Mechanism
from noisegate.roles import Aggregator
from noisegate.views import ServerView, State, Verdict
from noisegate.workers import contributions_of, mean_gradient


@dataclass(frozen=True, eq=False)
class Server:
    """What a server holds that does not change from round to round.

    mechanism: how honest uploads are made. aggregator: judges them. aux_x, aux_y: the server's own (auxiliary)
    examples. workers: n, how many take part; believed_honest: how many of them it believes honest. rate: of a step.
    scratch: bytes that an aggregator may use beside the uploads. balanced: whether as many examples of every class, one
    class after the other, count as drawn class by class; else they count as one mixed sample. expected: (n,) what each
    upload is expected to be made of, over b_c (`protocol.claims`); None means 1 for all.
    """

    mechanism: Mechanism
    aggregator: Aggregator
    aux_x: Tensor
    aux_y: Tensor
    workers: int
    believed_honest: int
    rate: float
    scratch: int = 2**28
    balanced: bool = True
    expected: Tensor | None = None

    def __post_init__(self) -> None:
        sound = self.expected is None or (self.expected.shape == (self.workers,) and bool((self.expected > 0).all()))
        if not sound:
            raise SpecError(f"expected: must be one number above 0 for each of the {self.workers} workers, or None")

    @cached_property
    def strata(self) -> int:
        """How many classes its examples are of, if as many of every class, one class after the other; else 1."""
        if not self.balanced:
            return 1
        labels, sizes = self.aux_y.unique_consecutive(return_counts=True)
        even = len(labels) == len(labels.unique()) and bool((sizes == sizes[:1]).all())
        return max(1, len(labels)) if even else 1

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """The labels that its examples have, in order, and for each example which of them is its own."""
        labels, own = self.aux_y.unique(return_inverse=True)
        return labels, own


@dataclass(frozen=True, eq=False)
class ServerState:
    """What a server carries from one round to the next.

    params: (d,) the model. aggregator: what the last verdict left. received: (n, d) the upload that was last received
    from each worker, zeros before the first. A malformed upload counts as zeros. A missing one changes nothing.
    """

    params: Tensor
    aggregator: State
    received: Tensor


class Judgement(NamedTuple):
    """What came of a round: the verdict, and the state with the next model."""

    verdict: Verdict
    state: ServerState


def first_state(server: Server, params: Tensor) -> ServerState:
    """The state before the first round, with this model."""
    return ServerState(params, {}, params.new_zeros(server.workers, len(params)))


def judge(
    server: Server, state: ServerState, arrived: Any, ties: Tensor, capacity: Capacity | None = None
) -> Judgement:
    """The verdict on whatever arrived, and the next state. Nothing that a worker sent, or did not, raises here.

    arrived: one entry for each worker, as in `intake.receive`; or what that gave, whose rows are then used up. ties:
    (n,) a random order of the workers, by which equal scores are ranked. capacity: the round counts only if it `fits`.
    """
    params = state.params
    seen = arrived if type(arrived) is Received else receive(arrived, server.workers, len(params), like=params)
    verdict = ask(server.aggregator, view_of(server, state, seen, ties, capacity), state.aggregator)
    kept = _apart_from(verdict.state, (seen.uploads, state.received))
    stepped = torch.sub(params, verdict.update, alpha=server.rate)
    if seen.missing is not None:  # what was last received from them stays so
        torch.where(seen.missing[:, None], state.received, seen.uploads, out=seen.uploads)
    return Judgement(verdict, ServerState(stepped, kept, seen.uploads))


def view_of(
    server: Server, state: ServerState, seen: Received, ties: Tensor, capacity: Capacity | None = None
) -> ServerView:
    """All that the server knows in this round."""
    mechanism, own = server.mechanism, (server.mechanism.sums, state.params, server.aux_x, server.aux_y)
    return ServerView(
        uploads=seen.uploads,
        norms=seen.norms,
        present=seen.present,
        missing=seen.missing,
        last=state.received,
        noise_std=mechanism.noise_std,
        batch=mechanism.batch,
        largest=mechanism.worker.sensitivity,
        momentum=mechanism.worker.momentum,
        declared=mechanism.sampling.as_many(mechanism.declared),
        believed_honest=server.believed_honest,
        auxiliary=partial(mean_gradient, *own, capacity=capacity),
        contributions=partial(own_contributions, server, state.params, capacity),
        labels=len(server.labels[0]),
        strata=server.strata,
        expected=server.expected,
        ties=ties,
        scratch=server.scratch,
    )


def own_contributions(server: Server, params: Tensor, capacity: Capacity | None, shift: Tensor) -> Tensor:
    """(2 A, d) what each of its examples would on average add, with its own label and with one that is moved."""
    labels, own = server.labels
    x = torch.cat([server.aux_x, server.aux_x])
    y = torch.cat([server.aux_y, labels[(own + shift) % len(labels)]])
    mechanism = server.mechanism
    return contributions_of(mechanism.sums, params, x, y, mechanism.worker, mechanism.noise_std, capacity)


def ask(aggregator: Aggregator, view: ServerView, state: State) -> Verdict:
    """What an aggregator answers, once it is known to be an answer. SpecError otherwise, for it may be anyone's.

    An aggregator that wrote to what it was handed is refused: its uploads are what was received, and a round may be
    played again. Seen is what torch counts as a write.
    """
    handed = {
        "view.uploads": view.uploads,
        "view.last": view.last,
        **{f"state[{name!r}]": state[name] for name in state},
    }
    before = {name: value._version for name, value in handed.items() if value is not None}
    verdict = aggregator(view, state)
    check_verdict(aggregator, verdict, view)
    for name, version in before.items():
        if (value := handed[name]) is not None and value._version != version:
            raise SpecError(f"aggregator: {aggregator!r} wrote to {name}, which is not its own; write to a copy of it")
    return verdict


def _apart_from(state: State, passing: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The state with copies of what lies in tensors that are overwritten in the next rounds."""
    return {
        name: value.clone() if any(_share_storage(value, each) for each in passing) else value
        for name, value in state.items()
    }


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
