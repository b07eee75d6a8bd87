"""The protocol on one machine: all workers of a round in one batched computation."""

from noisegate.simulate.adversary import Adversary
from noisegate.simulate.exam import Exam, attack_success, examine, marked, recall
from noisegate.simulate.federation import Federation, FederationState, Schedule, Streams, Workers, first_state
from noisegate.simulate.progress import Progress, count_reasons, shares, start
from noisegate.simulate.round import play
from noisegate.simulate.rounds import Rounds
from noisegate.simulate.train import Training, accuracy, side_by_side

__all__ = [
    "Adversary",
    "Exam",
    "Federation",
    "FederationState",
    "Progress",
    "Rounds",
    "Schedule",
    "Streams",
    "Training",
    "Workers",
    "accuracy",
    "attack_success",
    "count_reasons",
    "examine",
    "first_state",
    "marked",
    "play",
    "recall",
    "shares",
    "side_by_side",
    "start",
]
