"""Which examples a worker uses in a round, and what that choice means for its privacy.

Sampling is accounting: the object that draws the batch is the object that states the DP event of the round,
so nobody can draw one way and be charged for another. Symbols: batch b_c, examples |D_i|, noise sigma.

* `poisson`: each example by itself with probability b_c / |D_i|. Neighbors add or remove one example, which
  moves a sum of vectors of length at most 1 by at most 1.
* `fixed`: b_c examples, uniformly, without replacement. Neighbors replace one example, which moves that sum
  by up to 2: one vector out, another one in.

A batch can be drawn without dp-accounting; only `event` and `neighboring` need it.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from noisegate.checks import count, positive, refuse
from noisegate.errors import PrivacyError


@dataclass(frozen=True, eq=False)
class Batch:
    """The draws of n workers, padded to one width.

    `index` (n, width) int64 holds example numbers from 0 to sizes[i] - 1, and 0 in padding; `real` (n, width)
    bool says which slots are drawn. Real slots come first in a row, and no row has one real number twice.
    """

    index: Tensor
    real: Tensor


class Sampling(Protocol):
    """A scheme that draws batches and states what a draw costs."""

    name: ClassVar[str]
    relation: ClassVar[str]
    sensitivity: ClassVar[float]

    @property
    def batch(self) -> int:
        """The public batch size b_c: the expected size of a draw, and the divisor of every upload."""
        ...

    def draw(self, sizes: Tensor, rng: torch.Generator) -> Batch:
        """One batch for each of n workers; `sizes` (n,) int64, `rng` and the batch live on one device."""
        ...

    def rate(self, examples: int) -> float:
        """The chance of one example of a worker with so many examples to be in its batch."""
        ...

    def event(self, examples: int, noise_multiplier: float) -> Any:
        """The `DpEvent` of one round: a sum of vectors of length at most 1, plus noise of this deviation."""
        ...

    def neighboring(self) -> Any:
        """dp-accounting's name for `relation`."""
        ...

    def largest(self, examples: int, tail: float) -> int:
        """A size that a batch exceeds with probability at most `tail`."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Every example is in the batch by itself, with probability batch / examples; a batch may be empty."""

    batch: int
    name: ClassVar[str] = "poisson"
    relation: ClassVar[str] = "add-or-remove"
    sensitivity: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def draw(self, sizes: Tensor, rng: torch.Generator) -> Batch:
        """A batch of random size for each worker, as wide as the largest one drawn and at least 1 wide.

        A float64 uniform has 53 random bits, so the chance of an example misses batch / examples by at most
        about 1e-16. A float32 has 24: it would miss by up to 6e-8, a relative error of 1e-5 at a rate of
        0.005, and the accountant would not know.
        """
        longest = _longest(sizes, self.batch)
        uniform = torch.rand(len(sizes), longest, generator=rng, dtype=torch.float64, device=sizes.device)
        drawn = uniform < (self.batch / sizes.double())[:, None]
        drawn &= torch.arange(longest, device=sizes.device) < sizes[:, None]
        worker, example = drawn.nonzero(as_tuple=True)  # ordered by worker, so a worker's slots are consecutive
        counts = torch.bincount(worker, minlength=len(sizes))
        slot = torch.arange(len(worker), device=sizes.device) - (counts.cumsum(0) - counts)[worker]
        width = max(int(counts.max()), 1)
        index = torch.zeros(len(sizes), width, dtype=torch.int64, device=sizes.device)
        index[worker, slot] = example
        return Batch(index, torch.arange(width, device=sizes.device) < counts[:, None])

    def rate(self, examples: int) -> float:
        """batch / examples."""
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


@dataclass(frozen=True)
class FixedSize:
    """Exactly `batch` examples, every subset of that size equally likely."""

    batch: int
    name: ClassVar[str] = "fixed"
    relation: ClassVar[str] = "replace-one"
    sensitivity: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        count(batch=self.batch)

    def draw(self, sizes: Tensor, rng: torch.Generator) -> Batch:
        """The examples with the smallest of independent uniform keys (float64, so that ties hardly occur)."""
        longest = _longest(sizes, self.batch)
        keys = torch.rand(len(sizes), longest, generator=rng, dtype=torch.float64, device=sizes.device)
        keys.masked_fill_(torch.arange(longest, device=sizes.device) >= sizes[:, None], 2.0)  # never drawn
        index = torch.topk(keys, self.batch, dim=1, largest=False, sorted=False).indices
        return Batch(index, torch.ones_like(index, dtype=torch.bool))

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


def _longest(sizes: Tensor, batch: int) -> int:
    """The largest size, after checking that every worker can fill a batch."""
    if sizes.dim() != 1 or len(sizes) == 0 or sizes.dtype != torch.int64:
        shape = f"{tuple(sizes.shape)} {sizes.dtype}"
        raise refuse("sizes", shape, "must be one int64 number of examples for each worker, shape (n,), n >= 1")
    smallest, longest = torch.stack(torch.aminmax(sizes)).tolist()
    _fits(batch, smallest)
    return int(longest)


def _tail(tail: float) -> None:
    if not 0 < tail < 1:
        raise refuse("tail", tail, "must be a probability above 0 and below 1")
