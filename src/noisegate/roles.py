"""The three roles: what an aggregator, an attack and a worker declare and do."""

import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from noisegate import checks
from noisegate.entropy import Randomness
from noisegate.views import AdversaryView, DataView, ServerView, State, Verdict
from noisegate.views import Knowledge as Knowledge

Number = typing.TypeVar("Number", int, Tensor)
"""A count on the host, or a () tensor with a count on a device."""


@typing.runtime_checkable
class Aggregator(Protocol):
    """Judges one round's uploads. An aggregator extends it, and declares what differs from the defaults below.

    A missing upload accuses nobody: it is never a reason against its sender, in this round or in a later one.
    """

    goes_with: ClassVar[Mapping[str, Any]] = {}
    """Settings of a run (worker, batch, rate) that it goes with, where the user gives none."""

    needs: ClassVar[str] = ""
    """The condition on the number n of workers and the number f of Byzantine ones, in words; empty if there is none."""

    @property
    def tests_noise(self) -> bool:
        """Whether it takes uploads for a signal with the Gaussian noise of `ServerView.noise_std`."""
        return False

    @property
    def follows_workers(self) -> bool:
        """Whether it must know a worker again in the next round."""
        return False

    def chosen(self) -> int | None:
        """The number f of Byzantine workers that it was set to reckon with, if it was."""
        return None

    def most(self, workers: Number) -> Number | None:
        """The largest f that it admits among so many workers, below 0 if they are too few for any; None for no limit.

        By arithmetic alone: on a device the number of workers is a tensor.
        """
        return None

    def condition(self) -> str:
        """What it needs, in full: with what the aggregators inside it need."""
        return self.needs

    def check(self, workers: int, f: int | None = None) -> None:
        """Raise SpecError if it does not exist for so many workers, or not with this f. f: the chosen one, if None."""
        return

    def reckoned(self, workers: int, honest: int) -> int | None:
        """The f of a round in which the server believes so many workers honest; None if the aggregator has no f."""
        return None

    def __call__(self, view: ServerView, state: State) -> Verdict:
        """The verdict on this round. state: what the last verdict left, {} in the first round."""
        ...


@typing.runtime_checkable
class Attack(Protocol):
    """An adversary that controls M workers. Both hooks are called every round; one of them is often the identity."""

    @property
    def knows(self) -> Knowledge:
        """What it knows: its `AdversaryView` holds no more."""
        ...

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
class Triggered(Protocol):
    """An attack that teaches the model to call everything that carries its trigger `target`. Any attack may be one.

    By these two a run measures how far it succeeded (`Result.attack_success`).
    """

    target: int

    def trigger(self, x: Tensor) -> Tensor:
        """These examples with the trigger put on. It draws nothing, and leaves `x` as it is."""


def trigger_of(attack: Any) -> Triggered | None:
    """What an attack declares of its trigger; None if it has none. One that plays another has `triggered` say it."""
    if callable(found := getattr(attack, "triggered", None)):
        attack = found()
    has = isinstance(attack, Triggered) and isinstance(attack.target, int)
    return typing.cast(Triggered, attack) if has else None


def check_classes(attack: Any, classes: int) -> None:
    """Raise SpecError if an attack names a class that the data do not have. Only some attacks have `check_classes`."""
    if callable(check := getattr(attack, "check_classes", None)):
        check(classes)
    if (trigger := trigger_of(attack)) is not None:
        checks.label(classes, target=trigger.target)


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
