"""What all aggregators have in common that prepare uploads for another aggregator."""

from noisegate.aggregators.robust import Number, Robust, lower
from noisegate.errors import SpecError
from noisegate.roles import Aggregator

INNER_NEEDS = "what its aggregator needs"
"""Stands for that in `needs`."""


class Wrapper(Robust):
    """An aggregator around an aggregator. There is one f for both: the wrapper's own, or else the one that its
    aggregator was given.
    """

    aggregator: Aggregator

    @property
    def tests_noise(self) -> bool:
        """Whether its aggregator takes uploads for Gaussian noise: what is made of signs is none either."""
        return bool(getattr(self.aggregator, "tests_noise", False))

    def rows(self, workers: Number) -> Number:
        """How many uploads the aggregator gets of so many workers."""
        return workers

    def admitted(self, workers: Number) -> Number:
        """The largest f of the wrapper itself, whatever its aggregator admits."""
        return workers - 1

    def most(self, workers: Number) -> Number:
        """What both admit."""
        own = self.admitted(workers)
        return lower(own, self.aggregator.most(self.rows(workers))) if isinstance(self.aggregator, Robust) else own

    def chosen(self) -> int | None:
        """Its own, or its aggregator's."""
        inner = self.aggregator.chosen() if isinstance(self.aggregator, Robust) else None
        return inner if self.byzantine is None else self.byzantine

    def condition(self) -> str:
        """With what its aggregator needs."""
        inner = self.aggregator.condition() if isinstance(self.aggregator, Robust) else "nothing"
        return self.needs.replace(INNER_NEEDS, inner)

    def check(self, workers: int, f: int | None = None) -> None:
        """As for every aggregator, and of the inner one too; they may not contradict each other."""
        if getattr(self.aggregator, "follows_workers", False):
            raise SpecError(
                f"aggregator = {type(self.aggregator).__name__}: follows each worker over the rounds, which mixed "
                "uploads hide; use it alone"
            )
        f = self.chosen() if f is None else f
        if isinstance(self.aggregator, Robust):
            inner, rows = self.aggregator.chosen(), self.rows(workers)
            if inner not in (None, f):
                raise SpecError(f"byzantine = {f}: its aggregator has byzantine = {inner}; give one of the two")
            try:
                self.aggregator.check(rows, f)
            except SpecError as error:
                raise SpecError(f"its aggregator, on {rows} uploads of {workers} workers: {error}") from None
        super().check(workers, f)
