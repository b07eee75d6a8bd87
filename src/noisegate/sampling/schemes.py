"""The schemes that draw alike from all classes, and what every scheme does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from noisegate.checks import count, positive, refuse
from noisegate.entropy import Randomness
from noisegate.errors import PrivacyError
from noisegate.marks import below, held_by, joined, uniform_blocks

ADD_OR_REMOVE, REPLACE_ONE = "add-or-remove", "replace-one"
"""What neighboring data sets differ in."""

EQUAL = "equal"
"""The name of `EqualBatch`, and the word that a spec may give for `batch`."""

Draw = Callable[[Randomness], Tensor]
"""Gives (n, longest) bool: which of its examples each worker uses this time."""


class Sampling(Protocol):
    """A scheme that draws batches and states what a draw costs."""

    name: ClassVar[str]
    relation: ClassVar[str]
    sensitivity: ClassVar[float]
    follows_size: ClassVar[bool]
    """Whether who holds more examples draws more of them."""

    @property
    def batch(self) -> int:
        """The public batch size b_c: the expected size of a draw, and the divisor of every upload."""
        ...

    def over(self, sizes: Tensor, declared: int, labels: Tensor | None = None) -> Draw:
        """Draws for n workers that hold so many examples: (n,) int64, on the device of the numbers to come.

        declared: the public number of examples that the rate comes from, where it does not come from the true one.
        labels: (n, longest) the classes of the examples, padded; needed by a scheme whose rates are those of classes.
        """
        ...

    def loads(self, sizes: Tensor, declared: int, labels: Tensor) -> Tensor:
        """(n,) int64: how many examples at the rate batch / declared would be drawn as often as a worker's own."""
        ...

    def as_many(self, declared: int) -> int:
        """Of how many examples a plain mean is as sure as that of what a worker with the declared number draws from."""
        ...

    def rate(self, examples: int) -> float:
        """The chance of an example to be in its worker's batch. examples: as many as were declared."""
        ...

    def event(self, examples: int, noise_multiplier: float) -> Any:
        """The `DpEvent` of one round: a sum of vectors of length at most 1, plus noise of this deviation."""
        ...

    def neighboring(self) -> Any:
        """dp-accounting's name for `relation`."""
        ...

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """The number of examples that each worker's price is for."""
        ...

    def largest(self, examples: int, tail: float) -> int:
        """A size that a batch exceeds with probability at most `tail`."""
        ...

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """A number that the sizes of these batches together exceed with probability at most `tail`.

        workers: how many; held: the examples that all of them hold together.
        """
        ...


class AlikeForClasses:
    """What a scheme says that draws alike from all classes."""

    def loads(self, sizes: Tensor, declared: int, labels: Tensor) -> Tensor:
        """The sizes."""
        return sizes

    def as_many(self, declared: int) -> int:
        """The declared number."""
        return declared


@dataclass(frozen=True)
class Poisson(AlikeForClasses):
    """Every example is in the batch by itself, with probability batch / declared; a batch may be empty."""

    batch: int
    name: ClassVar[str] = "poisson"
    relation: ClassVar[str] = ADD_OR_REMOVE
    sensitivity: ClassVar[float] = 1.0
    follows_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def over(self, sizes: Tensor, declared: int, labels: Tensor | None = None) -> Draw:
        """Every worker's are marked at random, perhaps none.

        A float64 uniform has 53 random bits, so the chance of an example misses batch / declared by at most
        about 1e-16. A float32 has 24: it would miss by up to 6e-8, a relative error of 1e-5 at a rate of
        0.005, and the accountant would not know.
        """
        held, chance = held_by(sizes), self.rate(declared)

        def draw(rng: Randomness) -> Tensor:
            return held.among([below(uniform, chance) for _, uniform in uniform_blocks(held, rng)])

        return draw

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """The declared one for all: the true sizes stay private."""
        return [declared] * len(sizes)

    def rate(self, examples: int) -> float:
        """batch / examples, of which there are as many as were declared."""
        fits(self.batch, examples)
        return self.batch / examples

    def event(self, examples: int, noise_multiplier: float) -> Any:
        """A Poisson-sampled Gaussian: adding or removing one example moves the sum by at most 1."""
        positive(noise_multiplier=noise_multiplier)
        rate, dp = self.rate(examples), accounting()
        return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise_multiplier / self.sensitivity))

    def neighboring(self) -> Any:
        """`NeighboringRelation.ADD_OR_REMOVE_ONE`."""
        return accounting().NeighboringRelation.ADD_OR_REMOVE_ONE

    def largest(self, examples: int, tail: float) -> int:
        """The smallest size that a batch exceeds with probability at most `tail`: a binomial quantile."""
        from scipy.stats import binom

        check_tail(tail)
        return int(binom.isf(tail, examples, self.rate(examples)))

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """A Poisson quantile: a sum of independent events exceeds one beyond its median no more often than that."""
        from scipy.stats import poisson

        check_tail(tail)
        return int(poisson.isf(tail, held * self.rate(declared)))


@dataclass(frozen=True)
class EqualBatch(Poisson):
    """Every example by itself, with probability batch / its worker's own public size: equal expected batches.

    The sizes are taken for public constants. A worker that drew at a rate which followed its data would pay more than
    is priced (tests/test_adjacency.py), so this one is for simulated runs that are not secret.
    """

    name: ClassVar[str] = EQUAL
    follows_size: ClassVar[bool] = False

    def over(self, sizes: Tensor, declared: int, labels: Tensor | None = None) -> Draw:
        """As `Poisson`, each worker at its own rate."""
        held = held_by(sizes)
        fits(self.batch, int(sizes.min()))
        chances = self.batch / sizes.to(torch.float64)[:, None]

        def draw(rng: Randomness) -> Tensor:
            return held.among([uniform < chances[block] for block, uniform in uniform_blocks(held, rng)])

        return draw

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """Each worker's own: the smallest has the highest rate."""
        return list(sizes)

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """A Poisson quantile, with `batch` for each worker on average."""
        from scipy.stats import poisson

        check_tail(tail)
        return int(poisson.isf(tail, workers * self.batch))


@dataclass(frozen=True)
class FixedSize(AlikeForClasses):
    """Exactly `batch` examples, every subset of that size equally likely."""

    batch: int
    name: ClassVar[str] = "fixed"
    relation: ClassVar[str] = REPLACE_ONE
    sensitivity: ClassVar[float] = 2.0
    follows_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def over(self, sizes: Tensor, declared: int, labels: Tensor | None = None) -> Draw:
        """Marked are the smallest of independent uniform keys (float64, so that ties hardly occur)."""
        held = held_by(sizes)
        fits(self.batch, int(sizes.min()))

        def draw(rng: Randomness) -> Tensor:
            drawn = []
            for block, keys in uniform_blocks(held, rng):
                keys.masked_fill_(~held.marks[block], 2.0)  # never drawn
                smallest = torch.topk(keys, self.batch, dim=1, largest=False, sorted=False).indices
                drawn.append(torch.zeros_like(held.marks[block]).scatter_(1, smallest, True))
            return joined(drawn)

        return draw

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """The true sizes, which are public under this relation."""
        return list(sizes)

    def rate(self, examples: int) -> float:
        """batch / examples."""
        fits(self.batch, examples)
        return self.batch / examples

    def event(self, examples: int, noise_multiplier: float) -> Any:
        """A Gaussian on a sample without replacement: replacing one example moves the sum by up to 2."""
        positive(noise_multiplier=noise_multiplier)
        fits(self.batch, examples)
        dp = accounting()
        noise = dp.GaussianDpEvent(noise_multiplier / self.sensitivity)
        return dp.SampledWithoutReplacementDpEvent(examples, self.batch, noise)

    def neighboring(self) -> Any:
        """`NeighboringRelation.REPLACE_ONE`."""
        return accounting().NeighboringRelation.REPLACE_ONE

    def largest(self, examples: int, tail: float) -> int:
        """`batch`, whatever the tail."""
        check_tail(tail)
        fits(self.batch, examples)
        return self.batch

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """workers * batch, whatever the tail."""
        check_tail(tail)
        return workers * self.batch


def accounting() -> ModuleType:
    """The module dp_accounting, imported when first asked for; without it no epsilon can be stated."""
    try:
        import dp_accounting
    except ImportError as error:
        raise PrivacyError(
            "the package dp-accounting is not installed, so no epsilon can be computed here: install it, "
            "or give sigma, epsilon and delta that were computed elsewhere"
        ) from error
    module: ModuleType = dp_accounting
    return module


def fits(batch: int, examples: int) -> None:
    count(examples=examples)
    if batch > examples:
        raise refuse("batch", batch, f"a worker has only {examples} examples; lower batch to {examples} or less")


def check_tail(tail: float) -> None:
    if not 0 < tail < 1:
        raise refuse("tail", tail, "must be a probability above 0 and below 1")
