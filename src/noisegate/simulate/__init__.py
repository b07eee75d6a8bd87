"""The protocol on one machine: all workers of a round in one batched computation."""

from noisegate.simulate.federation import Federation, FederationState, Streams, first_state
from noisegate.simulate.progress import Progress, count_reasons, shares, start
from noisegate.simulate.round import play
from noisegate.simulate.rounds import Rounds
from noisegate.simulate.train import Training, accuracy, side_by_side

__all__ = [
    "Federation",
    "FederationState",
    "Progress",
    "Rounds",
    "Streams",
    "Training",
    "accuracy",
    "count_reasons",
    "first_state",
    "play",
    "shares",
    "side_by_side",
    "start",
]
