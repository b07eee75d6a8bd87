"""The base of the aggregators that prepare uploads for another aggregator."""

from noisegate.aggregators.robust import Robust, lower
from noisegate.errors import SpecError
from noisegate.roles import Aggregator, Number

INNER_NEEDS = "what its aggregator needs"
"""Stands for that in `needs`."""


class Wrapper(Robust):
    """An aggregator around an inner aggregator of any kind.

    There is one f for both: the wrapper's own, or else the one that the inner aggregator was given. The state is the
    inner aggregator's, and so is what a missing upload does to it.
    """

    aggregator: Aggregator

    @property
    def tests_noise(self) -> bool:
        """Whether the inner aggregator does: the mean of uploads without Gaussian noise has none either."""
        return self.aggregator.tests_noise

    def rows(self, workers: Number) -> Number:
        """How many uploads the inner aggregator gets of so many workers."""
        return workers

    def admitted(self, workers: Number) -> Number:
        """The largest f of the wrapper itself, whatever the inner aggregator admits."""
        return workers - 1

    def most(self, workers: Number) -> Number:
        """The largest f that both admit."""
        own, inner = self.admitted(workers), self.aggregator.most(self.rows(workers))
        return own if inner is None else lower(own, inner)

    def chosen(self) -> int | None:
        """Its own f, or the inner aggregator's."""
        return self.aggregator.chosen() if self.byzantine is None else self.byzantine

    def condition(self) -> str:
        """What it needs, with what the inner aggregator needs."""
        return self.needs.replace(INNER_NEEDS, self.aggregator.condition() or "nothing")

    def check(self, workers: int, f: int | None = None) -> None:
        """As for every aggregator, and for the inner one too; the two may not contradict each other."""
        if self.aggregator.follows_workers:
            raise SpecError(
                f"aggregator = {type(self.aggregator).__name__}: follows each worker over the rounds, which mixed "
                "uploads hide; use it alone"
            )
        f = self.chosen() if f is None else f
        inner, rows = self.aggregator.chosen(), self.rows(workers)
        if inner not in (None, f):
            raise SpecError(f"byzantine = {f}: its aggregator has byzantine = {inner}; give one of the two")
        try:
            self.aggregator.check(rows, f)
        except SpecError as error:
            raise SpecError(f"its aggregator, on {rows} uploads of {workers} workers: {error}") from None
        super().check(workers, f)
