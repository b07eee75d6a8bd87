"""Who takes part in a simulated run: workers, server, adversary, schedule. The state that a round takes and gives."""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from noisegate.capacity import CACHED, TAIL, Capacity
from noisegate.entropy import Randomness, Secret
from noisegate.examples import Holdings
from noisegate.protocol import Mechanism, Server, ServerState
from noisegate.protocol import first_state as first_server_state
from noisegate.simulate.adversary import Adversary
from noisegate.streams import rewind


@dataclass(frozen=True, eq=False)
class Workers:
    """All n workers of a run, by position, and how their uploads are made private.

    x, y: the training pool. holdings: (n, longest) the numbers of the examples that each worker holds, padded; sizes:
    (n,) how many. scratch: bytes that a round may use beside the uploads of this round and the last.
    """

    mechanism: Mechanism
    x: Tensor
    y: Tensor
    holdings: Tensor
    sizes: Tensor
    scratch: int = 2**30

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Schedule:
    """When things happen and what they are drawn from.

    name: of the run and of all that its uploads are made of. Two runs with one seed may share data and weights, but by
    their names neither noise nor batches: the difference of two uploads with the same noise would show a worker's
    gradients bare. secret: where noise and batches come from instead, if nobody may ever draw them again.
    absent: the probability that a worker misses a round. Its batch is drawn, and so paid for, but nothing arrives.
    """

    rounds: int
    seed: int
    name: str = ""
    secret: Secret | None = None
    absent: float = 0.0

    def rewind(self, generator: torch.Generator, what: str, t: int) -> None:
        """Make `generator` the one for `what` in round `t`."""
        rewind(generator, self.seed, f"{what}/{self.name}" if self.name else what, t)


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything about a run that does not change from round to round, in four parts."""

    workers: Workers
    server: Server
    adversary: Adversary
    schedule: Schedule

    @property
    def mechanism(self) -> Mechanism:
        """How uploads are made private."""
        return self.workers.mechanism

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.workers.x.device

    @property
    def d(self) -> int:
        """How many parameters the model has."""
        return self.mechanism.model.d

    def change(self, **changes: Any) -> "Federation":
        """The same federation, but for these fields of its parts and of its mechanism.

        The adversary goes on imagining the server as it is, but for the examples.
        """
        parts = (Mechanism, Workers, Server, Adversary, Schedule)
        if unknown := set(changes) - {each.name for part in parts for each in fields(part)}:
            raise TypeError(f"no part of a federation has {', '.join(sorted(unknown))}")
        mechanism = replace(self.mechanism, **_of(Mechanism, changes))
        workers = replace(self.workers, mechanism=mechanism, **_of(Workers, changes))
        server = replace(self.server, mechanism=mechanism, workers=len(workers), **_of(Server, changes))
        adversary = replace(self.adversary, **_of(Adversary, changes))
        own = {name: getattr(adversary.imagined, name) for name in ("aux_x", "aux_y", "balanced")}
        adversary = replace(adversary, imagined=replace(server, **own))
        return Federation(workers, server, adversary, replace(self.schedule, **_of(Schedule, changes)))

    def phase(self, t: int) -> Hashable:
        """What the attack makes of round `t`."""
        return self.adversary.phase(t / self.schedule.rounds)

    def stream(self, what: str, t: int) -> torch.Generator:
        """The generator of this run for `what` in round `t`."""
        generator = torch.Generator(device=self.device)
        self.schedule.rewind(generator, what, t)
        return generator

    def active(self, phase: Hashable) -> "Active":
        """Who computes: everyone, or the honest workers if the adversary makes its uploads up."""
        return self._all_active if self.adversary.attack.needs_own(phase) else self._honest_active

    @cached_property
    def _all_active(self) -> "Active":
        return Active(self, None)

    @cached_property
    def _honest_active(self) -> "Active":
        return Active(self, self.adversary.honest_rows)


def _of(part: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Those of the changes that are fields of `part`."""
    own = {each.name for each in fields(part)}
    return {name: value for name, value in changes.items() if name in own}


class Streams:
    """The randomness of one round, by name."""

    def __init__(self, federation: Federation, t: int) -> None:
        self.federation, self.t = federation, t

    def generator(self, what: str) -> torch.Generator:
        """What the server and the adversary draw from."""
        return self.federation.stream(what, self.t)

    def private(self, what: str) -> Randomness:
        """What the workers draw from: noise, batches, and what else makes an upload private."""
        secret = self.federation.schedule.secret
        return secret.source(what) if secret else self.generator(what)


@dataclass(frozen=True, eq=False)
class Active:
    """The workers that compute in a round, by their positions `rows`; None for all of them."""

    federation: Federation
    rows: Tensor | None

    @cached_property
    def holdings(self) -> Holdings:
        """What they hold."""
        workers, rows = self.federation.workers, self.rows
        numbers = workers.holdings if rows is None else workers.holdings.index_select(0, rows)
        sizes = workers.sizes if rows is None else workers.sizes[rows]
        holdings = Holdings(workers.x, workers.y, numbers, sizes, rows)
        return replace(holdings, at_once=self._at_once(holdings))

    @cached_property
    def byzantine(self) -> Tensor:
        """(k + 1,) who of them is Byzantine; nobody is in an empty place."""
        mask = self.federation.adversary.byzantine
        return functional.pad(mask if self.rows is None else mask[self.rows], (0, 1))

    @cached_property
    def byzantine_count(self) -> int:
        """How many of them are Byzantine."""
        return int(self.byzantine.sum())

    def _at_once(self, holdings: Holdings) -> int:
        """How many of them are computed at a time: as many as the scratch bytes allow, or a CPU's cache."""
        run, workers, mechanism = self.federation, self.federation.workers, self.federation.mechanism
        largest = int(holdings.loads(mechanism.sampling, mechanism.declared).max())
        each = min(mechanism.sampling.largest_sum(1, largest, mechanism.declared, TAIL), holdings.longest)
        one = each * mechanism.sums.floats(workers.x[:1], workers.y[:1])
        if self.rows is not None:
            one += 2 * run.d  # their rows lie apart, and are copied together
        if run.adversary.ever_ascends:
            one += run.d  # what they sent last is copied, with the other sign
        floats = workers.scratch // 4 if workers.x.is_cuda else min(workers.scratch // 4, CACHED)
        return max(1, min(len(holdings), floats // one))

    def capacity(self) -> Capacity:
        """The capacity of a round of theirs, which one round in 10,000 exceeds."""
        return Capacity(*self._most)

    @cached_property
    def _most(self) -> tuple[int, int, int]:
        """The sizes of the capacity. Found once: a recorded round may not ask the device for them."""
        mechanism, holdings = self.federation.mechanism, self.holdings
        draws, declared = mechanism.sampling, mechanism.declared
        sizes, loads, portions = holdings.sizes, holdings.loads(draws, declared), holdings.portions
        held, largest = max(int(sizes[portion].sum()) for portion in portions), portions[0].stop
        fullest = max(int(loads[portion].sum()) for portion in portions)
        total = draws.largest_sum(largest, fullest, declared, TAIL / 4 / len(portions))
        per_worker = draws.largest_sum(1, int(loads.max()), declared, TAIL / 4 / len(holdings))
        mask, count = self.byzantine[:-1], self.byzantine_count
        byzantine = draws.largest_sum(count, int(loads[mask].sum()), declared, TAIL / 4) if count else 0
        return min(total, held), min(per_worker, holdings.longest), min(byzantine, int(sizes[mask].sum()))


@dataclass(frozen=True, eq=False)
class FederationState:
    """What one round hands to the next.

    server: the model, the aggregator's state, and the upload that was last received from each worker. In a simulated
    run an upload that did not arrive was not sent either, so it is also what each worker sent last.
    spare: (n, d) space for the next uploads. It held those before the last, so a state serves one round only.
    """

    server: ServerState
    spare: Tensor

    @property
    def params(self) -> Tensor:
        """(d,) the model."""
        return self.server.params

    @property
    def uploads(self) -> Tensor:
        """(n, d) what everyone sent last."""
        return self.server.received


def first_state(federation: Federation) -> FederationState:
    """The state before the first round: the model as initialized, nobody has sent anything."""
    server = first_server_state(federation.server, federation.mechanism.model.initial())
    return FederationState(server, torch.empty_like(server.received))
