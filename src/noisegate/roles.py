"""The three roles: what an aggregator, an attack and a worker declare and do."""

import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from noisegate.entropy import Randomness
from noisegate.views import AdversaryView, DataView, ServerView, State, Verdict

Knowledge = Literal["omniscient", "data-only", "blind"]
"""What an attack uses of what it may know: everything but the server's auxiliary data; its own workers' data and
uploads; nothing but the shape and the noise of an upload."""


@typing.runtime_checkable
class Aggregator(Protocol):
    """Judges one round's uploads. Extend it, and declare below what is not so by default.

    A missing upload accuses nobody: what an aggregator holds against a worker, and for it, stays as it was.
    """

    goes_with: ClassVar[Mapping[str, Any]] = {}
    """Settings of a run (worker, batch, rate) that it goes with, where the user gives none."""

    @property
    def tests_noise(self) -> bool:
        """Whether it takes uploads for a signal with the Gaussian noise of `ServerView.noise_std`."""
        return False

    @property
    def follows_workers(self) -> bool:
        """Whether it must know a worker again in the next round."""
        return False

    def check(self, workers: int) -> None:
        """Raise SpecError if it does not exist for so many workers."""
        return

    def reckoned(self, workers: int, honest: int) -> int | None:
        """How many Byzantine workers it reckons with if the server believes so many honest; None if it never asks."""
        return None

    def __call__(self, view: ServerView, state: State) -> Verdict:
        """The verdict on this round. state: what the last verdict left, {} in the first round."""
        ...


@typing.runtime_checkable
class Attack(Protocol):
    """An adversary that controls M workers. Both hooks are called every round; one of them is often the identity."""

    knows: ClassVar[Knowledge]

    def check(self, honest: int, byzantine: int) -> None:
        """Raise SpecError if the attack does not exist for these numbers."""

    def phase(self, progress: float) -> Hashable:
        """What the attack does when this share of the rounds lies behind: a word, a number, anything that compares.

        All that an attack learns of the time. A round is prepared once for each phase and then repeated, so there
        should be few; an attack that always does the same has one.
        """

    def needs_own(self, phase: Hashable) -> bool:
        """Whether `forge` reads what its workers would have sent; if not, they need not compute it."""

    def ascends(self, phase: Hashable) -> bool:
        """Whether its workers run the protocol on the negated loss."""

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        """The adversary's own examples as it wants them to be."""

    def forge(self, view: AdversaryView) -> Tensor | None:
        """(M, d) what the adversary's workers send; None for what the protocol computed."""


@typing.runtime_checkable
class Worker(Protocol):
    """Bounds what one example can do to an upload, and makes the upload private. `workers.Private` is a base for it."""

    mechanism: ClassVar[str]
    """What makes an upload private: "gaussian" noise on the sum, or "signs", flipped at random."""

    noisy: ClassVar[bool]
    """Whether an upload is a signal with that Gaussian noise, and not something made of it."""

    fresh: ClassVar[bool]
    """Whether the noise of an upload is independent of that of every earlier one."""

    @property
    def momentum(self) -> float: ...

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example can move the sum, in L2."""

    def weights(self, norms: Tensor) -> Tensor:
        """The factor of a mixed gradient of each (positive, finite) length."""

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """Make of (n, d) means with their noise what leaves the workers, in place. last: (n, d) what left them last.

        Whatever `mechanism` does not do before the sums are handed over must be done here.
        """

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """Standard deviation of the noise in a coordinate of an upload, if `added` is that of the noise in `sent`."""
