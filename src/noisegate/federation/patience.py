"""How long a round waits, and for whom. Nothing here knows of networks or clocks, so that its bounds can be tested.

A round waits at most `least` seconds, and beyond that at most what is left of `stall`. Let w be the wait of a round.
What is charged to `stall` is max(0, w - least), and no round may wait longer than least + (stall - charged so far). So
over a run the waits add up to at most stall + rounds * least, whatever workers do.

A worker's k-th missed deadline means that the server does not wait for it for 2^k rounds; an upload that comes in time
still counts. One silent worker then costs about log2(rounds) deadlines. A worker that answers gets k back by one each
`RECOVERY` rounds.
"""

from dataclasses import dataclass

RECOVERY = 50
"""Rounds answered in time, without a missed deadline between them, after which k goes down by one."""

LARGEST_K = 40
"""2 to this power is more rounds than any run has."""


@dataclass
class Patience:
    """What the waits of a run may add up to, and how much of it is spent. All in seconds."""

    deadline: float
    least: float
    stall: float
    spent: float = 0.0

    @property
    def left(self) -> float:
        """What is left for waiting beyond `least`."""
        return max(0.0, self.stall - self.spent)

    def longest(self) -> float:
        """How long the next round may wait at most."""
        return self.least + min(self.deadline - self.least, self.left)

    def charge(self, waited: float) -> None:
        """Note how long a round waited."""
        self.spent += max(0.0, waited - self.least)


@dataclass
class Attendance:
    """What the server remembers of one worker.

    counter: uploads that were received. k: missed deadlines, less what was recovered. until: the first round in which
    it is awaited again. streak: rounds answered in time since the last change of k. left: why it left; "" if it did
    not.
    """

    counter: int = 0
    k: int = 0
    until: int = 0
    streak: int = 0
    left: str = ""

    def awaited(self, round: int) -> bool:
        """Whether this round waits for it, if it is connected."""
        return not self.left and round >= self.until

    def missed(self, round: int) -> None:
        """It was awaited, and did not answer in time."""
        self.k, self.streak = min(self.k + 1, LARGEST_K), 0
        self.until = round + 1 + 2**self.k

    def answered(self) -> None:
        """It answered in time."""
        self.streak += 1
        if self.streak >= RECOVERY:
            self.k, self.streak = max(0, self.k - 1), 0
