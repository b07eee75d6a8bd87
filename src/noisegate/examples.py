"""Examples: who holds which, who drew which for a round, and what one computation gets of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from noisegate.capacity import Capacity
from noisegate.entropy import Randomness
from noisegate.sampling import Draw, Sampling
from noisegate.vectors import zeros


@dataclass(frozen=True, eq=False)
class Examples:
    """Drawn examples of k workers, worker after worker, and the capacity that they were drawn with.

    x, y: (E, ...) and (E,). owner: (E,) the worker of each, ascending from 0; k for a place without an example, which
    may hold any. most: no worker has more examples, if known. capacity: None if every tensor may be looked at.
    """

    x: Tensor
    y: Tensor
    owner: Tensor
    most: int | None = None
    capacity: Capacity | None = None

    def __len__(self) -> int:
        return len(self.y)

    def some(self, chosen: Tensor | slice) -> "Examples":
        """Some of them, as if there were no capacity."""
        return Examples(self.x[chosen], self.y[chosen], self.owner[chosen])

    @classmethod
    def of_one(cls, x: Tensor, y: Tensor, capacity: Capacity | None = None) -> "Examples":
        """All of them are those of one worker."""
        return cls(x, y, zeros(len(y), y.device), len(y), capacity)


@dataclass(frozen=True, eq=False)
class Holdings:
    """What k workers hold.

    x, y: a pool of examples. numbers: (k, longest) which of them each worker holds, padded; sizes: (k,) how many.
    rows: (k,) the places of these workers among all, ascending; None if they are all workers.
    at_once: how many workers are computed at a time; None for all of them.
    """

    x: Tensor
    y: Tensor
    numbers: Tensor
    sizes: Tensor
    rows: Tensor | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and bool((self.rows.diff() <= 0).any()):
            raise ValueError("rows: must ascend, or one worker's upload would be written over another's noise")

    @classmethod
    def of_one(cls, x: Tensor, y: Tensor) -> "Holdings":
        """The examples of one worker."""
        return cls(x, y, torch.arange(len(y), device=y.device)[None], torch.tensor([len(y)], device=y.device))

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def longest(self) -> int:
        """The largest of the sizes."""
        return int(self.sizes.max())

    @cached_property
    def portions(self) -> list[slice]:
        """The workers that are computed at a time."""
        k = len(self)
        size = k if self.at_once is None else self.at_once
        return [slice(first, min(first + size, k)) for first in range(0, k, size)]

    def draw(self, sampling: Sampling, declared: int, rng: Randomness, capacity: Capacity | None = None) -> "Drawn":
        """Every worker's examples of one round."""
        return gather(self, self._marks(sampling, declared)(rng), capacity)

    def loads(self, sampling: Sampling, declared: int) -> Tensor:
        """(k,) how many examples at the plain rate would be drawn as often as those of each worker."""
        return sampling.loads(self.sizes, declared, self._labels())

    def part_of(self, rows: Tensor, workers: slice) -> Tensor:
        """The rows of (n, d) of some of these workers: a view of it if these are all workers, else a copy."""
        return rows[workers] if self.rows is None else rows.index_select(0, self.rows[workers])

    def _labels(self) -> Tensor:
        """(k, longest) the classes of each worker's examples, padded."""
        return self.y[self.numbers[:, : self.longest]]

    @cached_property
    def _numbers(self) -> Tensor:
        """(k longest + 1,) every worker's numbers, one worker after the other; int32, since there are many."""
        return functional.pad(self.numbers[:, : self.longest].to(torch.int32).flatten(), (0, 1))

    @cached_property
    def _drawn_by(self) -> dict[tuple[Sampling, int], Draw]:
        return {}

    def _marks(self, sampling: Sampling, declared: int) -> Draw:
        """What marks the drawn examples: made once, since it is as large as all numbers."""
        if (sampling, declared) not in self._drawn_by:
            self._drawn_by[sampling, declared] = sampling.over(self.sizes, declared, self._labels())
        return self._drawn_by[sampling, declared]


@dataclass(frozen=True, eq=False)
class Portion:
    """Some workers next to each other, and where their examples lie among the drawn ones.

    owner: (their examples,) counted from the first of these workers, ascending; their number for an empty place.
    most: none of them has more examples.
    """

    workers: slice
    places: slice
    owner: Tensor
    most: int


@dataclass(eq=False)
class Drawn:
    """The examples that k workers drew for one round, worker after worker.

    pool: the pictures that were drawn from; numbers: (E,) which of them. y: (E,) their labels, which may be written to.
    owner: (E,) the worker of each; k for an empty place. Empty places come at the end of a portion, and only with a
    capacity. x: (E, ...) a copy of the pictures; None until one is needed.
    """

    pool: Tensor
    numbers: Tensor
    y: Tensor
    owner: Tensor
    portions: tuple[Portion, ...]
    capacity: Capacity | None
    x: Tensor | None = None

    def pictures(self, chosen: Tensor) -> Tensor:
        """Copies of those with these numbers among the drawn ones."""
        if self.x is not None:
            return self.x.index_select(0, chosen)
        return self.pool.index_select(0, self.numbers.index_select(0, chosen))

    def change_pictures(self, chosen: Tensor, pictures: Tensor) -> None:
        """Those with these numbers among the drawn ones are others from now on."""
        if self.x is None:
            self.x = self.pool.index_select(0, self.numbers)
        self.x.index_copy_(0, chosen, pictures.to(self.x))

    def examples(self, portion: Portion) -> Examples:
        """Those of some workers."""
        here = portion.places
        x = self.pool.index_select(0, self.numbers[here]) if self.x is None else self.x[here]
        return Examples(x, self.y[here], portion.owner, portion.most, self.capacity)


def gather(holdings: Holdings, marks: Tensor, capacity: Capacity | None = None) -> Drawn:
    """The examples that `marks` (k, longest) marks.

    Without a capacity every portion of the workers is as large as it needs to be. With one it has `capacity.total`
    places, and one that stays empty.
    """
    workers = holdings.portions
    flat, owner, portions = _all(marks, workers) if capacity is None else _within(marks, workers, capacity)
    numbers = holdings._numbers.index_select(0, flat)
    # What is computed at once is looked up once. Else it is looked up portion by portion, since it takes memory.
    x = holdings.x.index_select(0, numbers) if len(portions) == 1 else None
    return Drawn(holdings.x, numbers, holdings.y.index_select(0, numbers), owner, portions, capacity, x)


Found = tuple[Tensor, Tensor, tuple[Portion, ...]]
"""(E,) places in the flattened marks, (E,) owners, and the portions."""


def _all(marks: Tensor, workers: list[slice]) -> Found:
    """All that is marked."""
    k, longest = marks.shape
    flat_marks = marks.flatten()  # numpy looks for what is set several times faster than torch on a CPU
    flat = flat_marks.nonzero().flatten() if marks.is_cuda else torch.from_numpy(flat_marks.numpy().nonzero()[0])
    owner = flat // longest
    counts = torch.bincount(owner, minlength=k).tolist()
    portions, begin = [], 0
    for some in workers:
        here = slice(begin, begin + sum(counts[some]))
        portions.append(Portion(some, here, owner[here] - some.start, max(1, *counts[some])))
        begin = here.stop
    return flat, owner, tuple(portions)


def _within(marks: Tensor, workers: list[slice], capacity: Capacity) -> Found:
    """The same in tensors whose sizes do not depend on the marks."""
    k, longest = marks.shape
    portions, flats, owners, size = [], [], [], capacity.total + 1
    for i, some in enumerate(workers):
        count = some.stop - some.start
        flat = torch.nonzero_static(marks[some].flatten(), size=size, fill_value=count * longest).flatten()
        own = flat // longest
        capacity.need(own[-1] == count)
        portions.append(Portion(some, slice(i * size, (i + 1) * size), own, capacity.per_worker))
        flats.append(flat)
        owners.append(own)
    if len(portions) == 1:
        return flats[0], owners[0], tuple(portions)
    shifted = [some.start * longest + flat for some, flat in zip(workers, flats, strict=True)]
    named = [
        torch.where(own == some.stop - some.start, k, own + some.start)
        for some, own in zip(workers, owners, strict=True)
    ]
    return torch.cat(shifted), torch.cat(named), tuple(portions)
