"""What all rules have in common that prepare uploads for another rule."""

from noisegate.aggregators.robust import Number, Robust, lower
from noisegate.errors import SpecError
from noisegate.views import Rule

ITS_RULE = "what its rule needs"
"""Stands for that in `needs`."""


class Wrapper(Robust):
    """A rule around a rule. There is one f for both: the wrapper's own, or else the one that its rule was given."""

    rule: Rule

    @property
    def tests_noise(self) -> bool:
        """Whether its rule takes uploads for Gaussian noise: what is made of signs is none either."""
        return bool(getattr(self.rule, "tests_noise", False))

    def rows(self, workers: Number) -> Number:
        """How many uploads the rule gets of so many workers."""
        return workers

    def admitted(self, workers: Number) -> Number:
        """The largest f of the wrapper itself, whatever its rule admits."""
        return workers - 1

    def most(self, workers: Number) -> Number:
        """What both admit."""
        own = self.admitted(workers)
        return lower(own, self.rule.most(self.rows(workers))) if isinstance(self.rule, Robust) else own

    def chosen(self) -> int | None:
        """Its own, or its rule's."""
        inner = self.rule.chosen() if isinstance(self.rule, Robust) else None
        return inner if self.byzantine is None else self.byzantine

    def condition(self) -> str:
        """With what its rule needs."""
        inner = self.rule.condition() if isinstance(self.rule, Robust) else "nothing"
        return self.needs.replace(ITS_RULE, inner)

    def check(self, workers: int, f: int | None = None) -> None:
        """As for every rule, and of the inner one too; they may not contradict each other."""
        if getattr(self.rule, "follows_workers", False):
            raise SpecError(
                f"rule = {type(self.rule).__name__}: follows each worker over the rounds, which mixed uploads hide; "
                "use it alone"
            )
        f = self.chosen() if f is None else f
        if isinstance(self.rule, Robust):
            inner, rows = self.rule.chosen(), self.rows(workers)
            if inner not in (None, f):
                raise SpecError(f"byzantine = {f}: its rule has byzantine = {inner}; give one of the two")
            try:
                self.rule.check(rows, f)
            except SpecError as error:
                raise SpecError(f"its rule, on {rows} uploads of {workers} workers: {error}") from None
        super().check(workers, f)
