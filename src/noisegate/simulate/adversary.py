"""The adversary of a simulated run: it poisons its workers' examples, and replaces their uploads."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from noisegate.capacity import Capacity, places
from noisegate.errors import SpecError
from noisegate.examples import Drawn
from noisegate.protocol.intake import as_rows, received
from noisegate.protocol.server import Server, ServerState, ask, view_of
from noisegate.roles import Attack, check_classes
from noisegate.views import AdversaryView, DataView, Verdict, checked_examples
from noisegate.workers import mean_gradient

POISONED_AT_ONCE = 4096
"""Examples that an attack is shown at a time. Part of what a seed means on a CUDA device: not to be changed."""

Generators = Callable[[str], torch.Generator]
"""Gives the generator of a name in this round."""


@dataclass(frozen=True, eq=False)
class Adversary:
    """Who is Byzantine, what they do, and what they know beside what their workers see.

    byzantine: (n,) who is; only the attack may know. classes: how many the data have. imagined: the server as the
    adversary imagines it, with examples of its own workers for the server's. known_x, known_y: examples of its workers,
    by which it estimates the gradient.
    """

    attack: Attack
    byzantine: Tensor
    classes: int
    imagined: Server
    known_x: Tensor = field(default_factory=lambda: torch.zeros(0))
    known_y: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        check_classes(self.attack, self.classes)

    @cached_property
    def everyone(self) -> Tensor:
        """(n,) every position."""
        return torch.arange(len(self.byzantine), device=self.byzantine.device)

    @cached_property
    def honest_rows(self) -> Tensor:
        """(H,) the positions of the honest workers."""
        return self.everyone[~self.byzantine]

    @cached_property
    def rows(self) -> Tensor:
        """(M,) the positions of the Byzantine workers."""
        return self.everyone[self.byzantine]

    @cached_property
    def signs(self) -> Tensor:
        """(n, 1) -1 for the Byzantine workers, 1 for the others."""
        x = self.imagined.aux_x
        return 1.0 - 2.0 * self.byzantine[:, None].to(x.dtype if x.is_floating_point() else torch.float32)

    @cached_property
    def ever_ascends(self) -> bool:
        """Whether the attack ascends at one of a hundred points of the run."""
        return any(self.attack.ascends(self.attack.phase(i / 100)) for i in range(100))

    def phase(self, progress: float) -> Hashable:
        """What the attack does when this share of the rounds lies behind."""
        phase = self.attack.phase(progress)
        try:
            hash(phase)
        except TypeError:
            raise SpecError(
                f"attack: its phase must be a word, a number, or a tuple of these, but {self.attack!r} gave {phase!r}"
            ) from None
        return phase

    def poison(self, drawn: Drawn, byzantine: Tensor, phase: Hashable, generators: Generators) -> None:
        """Let the attack change the drawn examples of its own workers. byzantine: (k + 1,) who of those who drew is."""
        capacity = drawn.capacity
        size = capacity.byzantine if capacity else 0
        own = places(byzantine.index_select(0, drawn.owner), size, capacity)
        view = DataView(self.classes, phase, partial(generators, "poison"))
        for some in own.split(POISONED_AT_ONCE):
            x, y = drawn.pictures(some), drawn.y.index_select(0, some)
            new_x, new_y = checked_examples(*self.attack.poison(x, y, view), len(some), self.classes, capacity)
            drawn.y.index_copy_(0, some, new_y.to(drawn.y))
            if new_x is not x or new_x._version:  # another tensor, or the same one written to
                drawn.change_pictures(some, new_x)

    def forge(
        self,
        uploads: Tensor,
        own_computed: bool,
        state: ServerState,
        phase: Hashable,
        generators: Generators,
        capacity: Capacity | None = None,
    ) -> None:
        """Let the attack replace the rows of (n, d) of its own workers by whatever it sends.

        own_computed: whether these rows hold what the protocol computed, and not nothing.
        """
        if not len(self.rows):
            return
        view = self._view(uploads, own_computed, state, phase, generators, capacity)
        forged = self.attack.forge(view)
        if forged is not None or not own_computed:
            uploads.index_copy_(0, self.rows, as_rows(forged, len(self.rows), uploads.shape[1], like=uploads))

    def _view(
        self,
        uploads: Tensor,
        own_computed: bool,
        state: ServerState,
        phase: Hashable,
        generators: Generators,
        capacity: Capacity | None,
    ) -> AdversaryView:
        """What the attack is shown: what it declares to know, and no more."""
        m, params, known = len(self.rows), state.params, (self.known_x, self.known_y)
        own = partial(uploads.index_select, 0, self.rows) if own_computed else partial(params.new_zeros, m, len(params))
        gradient = partial(mean_gradient, self.imagined.mechanism.sums, params, *known, capacity=capacity)
        return AdversaryView(
            workers=m,
            see_honest=partial(uploads.index_select, 0, self.honest_rows),
            see_own=own,
            params=params.clone(),
            noise_std=self.imagined.mechanism.noise_std,
            phase=phase,
            stream=partial(generators, "attack"),
            judge=partial(self._imagine, uploads, state, capacity),
            see_gradient=gradient if len(self.known_x) else None,
            knows=self.attack.knows,
        )

    def _imagine(self, uploads: Tensor, state: ServerState, capacity: Capacity | None, forged: Any) -> Verdict:
        """What the server would answer, as the adversary can imagine it: a first round, with its own examples."""
        m, d = len(self.rows), uploads.shape[1]
        if not isinstance(forged, Tensor) or forged.shape != (m, d):
            shape = tuple(forged.shape) if isinstance(forged, Tensor) else type(forged).__name__
            raise SpecError(f"attack: its view's judge takes uploads of shape ({m}, {d}), not {shape}")
        trial = uploads.index_copy(0, self.rows, as_rows(forged, m, d, like=uploads))
        seen = view_of(self.imagined, state, received(trial), self.everyone, capacity)
        return ask(self.imagined.aggregator, seen, {}).copy()
