"""An attack that pauses regularly, so that the scores of its honest rounds outlast the hostile ones.

The paper's second stage adds scores up over the whole run, and a hostile round is set to zero: it takes nothing away.
So a worker that is honest for half of the time keeps about half of an honest total, with which some stay selected while
they attack. No test of the first stage looks back at all.
"""

from dataclasses import dataclass, field

from noisegate import checks
from noisegate.attacks.honest import Honest
from noisegate.attacks.rank_matched import RankMatched
from noisegate.attacks.turns import Turns
from noisegate.roles import Attack

DIGITS = 9
"""Decimal digits of a time that count: 0.3 / 0.1 is slightly below 3, and 1 - 0.9 below 0.1."""


@dataclass(frozen=True)
class OnOff(Turns):
    """Follow the protocol and attack by turns, again and again.

    period: the length of an honest and a hostile stretch together, as a share of the run. share: the hostile part of a
        period, at its end.
    """

    attack: Attack = field(default_factory=RankMatched)
    period: float = 0.1
    share: float = 0.5

    def __post_init__(self) -> None:
        checks.positive(period=self.period)
        checks.share(period=self.period, share=self.share)

    def attacks(self, progress: float) -> bool:
        """In the last part of each period."""
        into_period = round(progress / self.period, DIGITS) % 1
        return round(into_period, DIGITS) >= round(1 - self.share, DIGITS)

    def part(self, attacking: bool) -> Attack:
        """The attack, or an honest worker."""
        return self.attack if attacking else Honest()
