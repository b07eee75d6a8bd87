"""An attack that first earns high scores with the descent direction, and then attacks with them.

The paper's second stage adds up a worker's inner products with the server's gradient over the whole run, and never
forgets. In the form "ranked" an upload points along the descent direction with all of its length s sqrt(d), where an
honest one has a signal of about 1: so each round of banking earns a total that takes an honest worker some s sqrt(d)
rounds, and the attackers stay selected long after they turned. In the form "valid" the signal is as long as an honest
one can be, but follows the mean gradient of many examples where an honest worker has a batch: it still earns more.
`attacks.disguise` says why either form passes the first stage.
"""

from dataclasses import dataclass

from noisegate import checks
from noisegate.attacks.disguise import Form, check_disguise
from noisegate.attacks.rank_matched import RankMatched
from noisegate.attacks.turns import Turns
from noisegate.roles import Attack


@dataclass(frozen=True)
class ScoreBanking(Turns):
    """Send the disguised descent direction until the share `turn` of the run has passed, then attack.

    attack: `rank-matched` uphill unless given, in the same form. strength, form: as those of `rank-matched`.
    """

    attack: Attack = None  # type: ignore[assignment]
    turn: float = 0.5
    strength: float = 1.0
    form: Form = "ranked"

    def __post_init__(self) -> None:
        checks.share(turn=self.turn)
        check_disguise(self.form, self.strength)
        if self.attack is None:
            object.__setattr__(self, "attack", RankMatched(form=self.form))

    def attacks(self, progress: float) -> bool:
        """From the share `turn` on."""
        return progress >= self.turn

    def part(self, attacking: bool) -> Attack:
        """The descent direction until it turns, then the attack."""
        return self.attack if attacking else RankMatched("descend", self.strength, self.form)
