"""Who takes part in a simulated run, and the state that a round takes in and gives out."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from noisegate.capacity import CACHED, TAIL, Capacity
from noisegate.entropy import Randomness, Secret
from noisegate.errors import SpecError
from noisegate.roles import Aggregator, Attack, Worker
from noisegate.sampling import Batch, Draw, Sampling
from noisegate.streams import rewind
from noisegate.vectors import FlatModel
from noisegate.views import State
from noisegate.workers import Sums, rounded_sensitivity


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything about a run that does not change from round to round.

    x, y: the training pool. holdings: (n, width) numbers of the examples that each worker holds, in the order of the
    workers' positions, padded; sizes: (n,) how many. byzantine: (n,) who lies; only the attack may know.
    aux_x, aux_y: the server's own examples. surrogate_x, surrogate_y: what the adversary imagines them to be.
    known_x, known_y: examples of the adversary's workers, by which it estimates the gradient.
    declared: the public number of examples that the sampling rate comes from.
    name: of the run and of all that its uploads are made of. Two runs with one seed may share data and weights, but by
    their names neither noise nor batches: the difference of two uploads with the same noise would show a worker's
    gradients bare. secret: where noise and batches come from instead, if nobody may ever draw them again.
    scratch: bytes that a round may use beside the uploads of this round and the last.
    """

    model: FlatModel
    sums: Sums
    worker: Worker
    sampling: Sampling
    attack: Attack
    aggregator: Aggregator
    x: Tensor
    y: Tensor
    holdings: Tensor
    sizes: Tensor
    byzantine: Tensor
    aux_x: Tensor
    aux_y: Tensor
    surrogate_x: Tensor
    surrogate_y: Tensor
    classes: int
    sigma: float
    batch: int
    rate: float
    believed_honest: int
    rounds: int
    seed: int
    declared: int
    name: str = ""
    secret: Secret | None = None
    scratch: int = 2**30
    known_x: Tensor = field(default_factory=lambda: torch.zeros(0))
    known_y: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @cached_property
    def everyone(self) -> Tensor:
        """(n,) every position."""
        return torch.arange(len(self.byzantine), device=self.byzantine.device)

    @cached_property
    def honest_rows(self) -> Tensor:
        """(H,) the positions of the honest workers."""
        return self.everyone[~self.byzantine]

    @cached_property
    def byzantine_rows(self) -> Tensor:
        """(M,) the positions of the Byzantine workers."""
        return self.everyone[self.byzantine]

    @cached_property
    def strata(self) -> int:
        """How many classes the server's examples are of, if as many of every class, one after the other; else 1."""
        labels, sizes = self.aux_y.unique_consecutive(return_counts=True)
        even = len(labels) == len(labels.unique()) and bool((sizes == sizes[:1]).all())
        return max(1, len(labels)) if even else 1

    @cached_property
    def turned(self) -> Tensor:
        """(n, 1) -1 for the Byzantine workers, 1 for the others."""
        return 1.0 - 2.0 * self.byzantine[:, None].to(self.x.dtype if self.x.is_floating_point() else torch.float32)

    @property
    def added_noise(self) -> float:
        """Standard deviation of the Gaussian noise in each coordinate of a mean, s = sigma sensitivity / batch."""
        if self.worker.mechanism != "gaussian":
            return 0.0
        return self.sigma * rounded_sensitivity(self.worker, self.batch) / self.batch

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each coordinate of an upload."""
        return self.worker.noise_in_upload(self.added_noise, self.sigma, self.model.d)

    def phase(self, t: int) -> Hashable:
        """What the attack makes of round `t`."""
        phase = self.attack.phase(t / self.rounds)
        try:
            hash(phase)
        except TypeError:
            raise SpecError(
                f"attack: its phase must be a word, a number, or a tuple of these, but {self.attack!r} gave {phase!r}"
            ) from None
        return phase

    @cached_property
    def ever_ascends(self) -> bool:
        """Whether the attack ascends at one of a hundred points of the run."""
        return any(self.attack.ascends(self.attack.phase(i / 100)) for i in range(100))

    def stream(self, what: str, t: int) -> torch.Generator:
        """The generator of this run for `what` in round `t`."""
        generator = torch.Generator(device=self.byzantine.device)
        self.rewind(generator, what, t)
        return generator

    def rewind(self, generator: torch.Generator, what: str, t: int) -> None:
        """Make `generator` what `stream` gives."""
        rewind(generator, self.seed, f"{what}/{self.name}" if self.name else what, t)

    def active(self, phase: Hashable) -> "Active":
        """Who computes: everyone, or the honest workers if the adversary makes its uploads up."""
        return self._all_active if self.attack.needs_own(phase) else self._honest_active

    @cached_property
    def _all_active(self) -> "Active":
        return Active(self, self.everyone)

    @cached_property
    def _honest_active(self) -> "Active":
        return Active(self, self.honest_rows)


class Streams:
    """The randomness of one round, by name."""

    def __init__(self, federation: Federation, t: int) -> None:
        self.run, self.t = federation, t

    def generator(self, what: str) -> torch.Generator:
        """What the server and the adversary draw from."""
        return self.run.stream(what, self.t)

    def private(self, what: str) -> Randomness:
        """What the workers draw from: noise, batches, and what else makes an upload private."""
        return self.run.secret.source(what) if self.run.secret else self.generator(what)


@dataclass(frozen=True, eq=False)
class Active:
    """The workers of a federation that compute in a round, by their positions `rows`."""

    federation: Federation
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def everyone(self) -> bool:
        """Whether nobody is left out."""
        return len(self) == len(self.federation.byzantine)

    @cached_property
    def sizes(self) -> Tensor:
        """(k,) how many examples each holds."""
        return self.federation.sizes[self.rows]

    @cached_property
    def longest(self) -> int:
        """The largest of the sizes."""
        return int(self.sizes.max())

    @cached_property
    def draw(self) -> Draw:
        """Draws their batches."""
        return self.federation.sampling.over(self.sizes, self.federation.declared)

    @cached_property
    def lying(self) -> Tensor:
        """(k + 1,) who of them lies; nobody does in an empty place."""
        return functional.pad(self.federation.byzantine[self.rows], (0, 1))

    @cached_property
    def _examples(self) -> Tensor:
        """(k longest + 1,) every worker's examples, one after the other; int32, since it is long."""
        held = self.federation.holdings[:, : self.longest].to(torch.int32)
        return functional.pad(held.index_select(0, self.rows).flatten(), (0, 1))

    @cached_property
    def liars(self) -> int:
        """How many of them lie."""
        return int(self.lying.sum())

    @cached_property
    def at_once(self) -> int:
        """How many of them are worked on at a time: as many as the memory allows, or a CPU's cache."""
        run = self.federation
        each = min(run.sampling.largest_sum(1, self.longest, run.declared, TAIL), self.longest)
        one = each * run.sums.floats(run.x[:1], run.y[:1])
        if not self.everyone:
            one += 2 * run.model.d  # their rows lie apart, and are copied together
        if run.ever_ascends:
            one += run.model.d  # what they sent last is turned around
        floats = run.scratch // 4 if run.x.is_cuda else min(run.scratch // 4, CACHED)
        return max(1, min(len(self), floats // one))

    def capacity(self) -> Capacity:
        """Capacity for a round of theirs: exceeded in one of 10,000."""
        draws, declared, k = self.federation.sampling, self.federation.declared, len(self)
        parts = self.sizes.split(self.at_once)
        fullest = max(int(part.sum()) for part in parts)
        total = draws.largest_sum(min(k, self.at_once), fullest, declared, TAIL / 4 / len(parts))
        width = draws.largest_sum(1, self.longest, declared, TAIL / 4 / k)
        theirs = int(self.sizes[self.lying[:-1]].sum())
        liars = draws.largest_sum(self.liars, theirs, declared, TAIL / 4) if self.liars else 0
        return Capacity(min(total, fullest), min(width, self.longest), min(liars, theirs))

    def numbers(self, batch: Batch) -> Tensor:
        """(E,) which examples of the pool were drawn; any at all where a place of the batch is empty."""
        return self._examples.index_select(0, batch.flat)


@dataclass(frozen=True)
class FederationState:
    """What one round hands to the next.

    params: (d,) the model. uploads: (n, d) what everyone sent last (the workers' momentum). aggregator: its own state.
    spare: (n, d) space for the next uploads. It held those before the last, so a state serves one round only.
    """

    params: Tensor
    uploads: Tensor
    aggregator: State
    spare: Tensor


def first_state(federation: Federation) -> FederationState:
    """The state before the first round: the model as initialized, nobody has sent anything."""
    params = federation.model.initial()
    uploads = params.new_zeros(len(federation.byzantine), len(params))
    return FederationState(params, uploads, {}, torch.empty_like(uploads))
