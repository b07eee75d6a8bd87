"""Which examples a worker uses in a round, and what that choice means for its privacy.

Sampling is accounting: the object that draws the batch is the object that states the DP event of the round,
so nobody can draw one way and be charged for another. Symbols: batch b_c, examples |D_i|, noise sigma.

* `poisson`: each example by itself, with probability b_c over a *declared* number of examples. That number is public
  and one for all workers. It does not follow the data: were the rate b_c / |D_i|, one example more or less would change
  the rate of all others, and cost more than is priced (tests/test_adjacency.py). Who holds fewer examples than declared
  pads with nothing, so |D_i| stays private. Neighbors add or remove one example, which moves a sum of vectors of length
  at most 1 by at most 1.
* `fixed`: b_c examples of |D_i|, uniformly, without replacement. |D_i| is public. Neighbors replace one example, which
  moves that sum by up to 2: one vector out, another one in.

A batch can be drawn without dp-accounting; only `event` and `neighboring` need it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from noisegate.checks import count, positive, refuse
from noisegate.entropy import Randomness, uniforms
from noisegate.errors import PrivacyError

DRAWN_AT_ONCE = 256
"""Workers whose uniforms exist at the same time. Part of what a seed means on a CUDA device: not to be changed."""


Draw = Callable[[Randomness], Tensor]
"""Gives (n, longest) bool: which of its examples each worker uses this time."""


class Sampling(Protocol):
    """A scheme that draws batches and states what a draw costs."""

    name: ClassVar[str]
    relation: ClassVar[str]
    sensitivity: ClassVar[float]

    @property
    def batch(self) -> int:
        """The public batch size b_c: the expected size of a draw, and the divisor of every upload."""
        ...

    def over(self, sizes: Tensor, declared: int) -> Draw:
        """Draws for n workers that hold so many examples: (n,) int64, on the device of the numbers to come.

        declared: the public number of examples that the rate comes from, where it does not come from the true one.
        """
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


@dataclass(frozen=True)
class Poisson:
    """Every example is in the batch by itself, with probability batch / declared; a batch may be empty."""

    batch: int
    name: ClassVar[str] = "poisson"
    relation: ClassVar[str] = "add-or-remove"
    sensitivity: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def over(self, sizes: Tensor, declared: int) -> Draw:
        """Every worker's are marked at random, perhaps none.

        A float64 uniform has 53 random bits, so the chance of an example misses batch / declared by at most
        about 1e-16. A float32 has 24: it would miss by up to 6e-8, a relative error of 1e-5 at a rate of
        0.005, and the accountant would not know.
        """
        held, chance = _held(sizes), self.rate(declared)

        def draw(rng: Randomness) -> Tensor:
            drawn = [_below(uniform, chance) for _, uniform in _uniform(held, rng)]
            return _joined(drawn) if held.all else _joined(drawn).logical_and_(held.marks)

        return draw

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """The declared one for all: the true sizes stay private."""
        return [declared] * len(sizes)

    def rate(self, examples: int) -> float:
        """batch / examples, of which there are as many as were declared."""
        _fits(self.batch, examples)
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

        _tail(tail)
        return int(binom.isf(tail, examples, self.rate(examples)))

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """A Poisson quantile: a sum of independent events exceeds one beyond its median no more often than that."""
        from scipy.stats import poisson

        _tail(tail)
        return int(poisson.isf(tail, held * self.rate(declared)))


@dataclass(frozen=True)
class FixedSize:
    """Exactly `batch` examples, every subset of that size equally likely."""

    batch: int
    name: ClassVar[str] = "fixed"
    relation: ClassVar[str] = "replace-one"
    sensitivity: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def over(self, sizes: Tensor, declared: int) -> Draw:
        """Marked are the smallest of independent uniform keys (float64, so that ties hardly occur)."""
        held = _held(sizes)
        _fits(self.batch, int(sizes.min()))

        def draw(rng: Randomness) -> Tensor:
            drawn = []
            for block, keys in _uniform(held, rng):
                keys.masked_fill_(~held.marks[block], 2.0)  # never drawn
                smallest = torch.topk(keys, self.batch, dim=1, largest=False, sorted=False).indices
                drawn.append(torch.zeros_like(held.marks[block]).scatter_(1, smallest, True))
            return _joined(drawn)

        return draw

    def priced(self, sizes: Sequence[int], declared: int) -> list[int]:
        """The true sizes, which are public under this relation."""
        return list(sizes)

    def rate(self, examples: int) -> float:
        """batch / examples."""
        _fits(self.batch, examples)
        return self.batch / examples

    def event(self, examples: int, noise_multiplier: float) -> Any:
        """A Gaussian on a sample without replacement: replacing one example moves the sum by up to 2."""
        positive(noise_multiplier=noise_multiplier)
        _fits(self.batch, examples)
        dp = accounting()
        noise = dp.GaussianDpEvent(noise_multiplier / self.sensitivity)
        return dp.SampledWithoutReplacementDpEvent(examples, self.batch, noise)

    def neighboring(self) -> Any:
        """`NeighboringRelation.REPLACE_ONE`."""
        return accounting().NeighboringRelation.REPLACE_ONE

    def largest(self, examples: int, tail: float) -> int:
        """`batch`, whatever the tail."""
        _tail(tail)
        _fits(self.batch, examples)
        return self.batch

    def largest_sum(self, workers: int, held: int, declared: int, tail: float) -> int:
        """workers * batch, whatever the tail."""
        _tail(tail)
        return workers * self.batch


SAMPLINGS: dict[str, type[Poisson] | type[FixedSize]] = {"poisson": Poisson, "fixed": FixedSize}


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


def _fits(batch: int, examples: int) -> None:
    count(examples=examples)
    if batch > examples:
        raise refuse("batch", batch, f"a worker has only {examples} examples; lower batch to {examples} or less")


@dataclass(frozen=True, eq=False)
class _Held:
    """marks: (n, longest) which numbers are those of examples. all: whether every one is."""

    marks: Tensor
    all: bool


def _held(sizes: Tensor) -> _Held:
    longest = check_sizes(sizes)
    marks = torch.arange(longest, device=sizes.device) < sizes[:, None]
    return _Held(marks, bool(marks.all()))


def _uniform(held: _Held, rng: Randomness) -> Iterator[tuple[slice, Tensor]]:
    """(which workers, a float64 uniform for each of their examples), a block of workers at a time."""
    n, longest = held.marks.shape
    for first in range(0, n, DRAWN_AT_ONCE):
        block = slice(first, min(first + DRAWN_AT_ONCE, n))
        shape = block.stop - first, longest
        yield block, uniforms(rng, shape, held.marks.device)


def _below(uniform: Tensor, chance: float) -> Tensor:
    return uniform < chance if uniform.is_cuda else torch.from_numpy(uniform.numpy() < chance)


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def check_sizes(sizes: Tensor) -> int:
    """The largest size, after checking that they are sizes of at least 1."""
    if sizes.dim() != 1 or len(sizes) == 0 or sizes.dtype != torch.int64:
        shape = f"{tuple(sizes.shape)} {sizes.dtype}"
        raise refuse("sizes", shape, "must be one int64 number of examples for each worker, shape (n,), n >= 1")
    smallest, longest = torch.stack(torch.aminmax(sizes)).tolist()
    count(examples=smallest)
    return int(longest)


def _tail(tail: float) -> None:
    if not 0 < tail < 1:
        raise refuse("tail", tail, "must be a probability above 0 and below 1")
