"""The protocol on one machine: all workers of a round in one batched computation."""

from noisegate.simulate.federation import Federation, State, Streams, first_state
from noisegate.simulate.progress import Progress, count_reasons, shares, start
from noisegate.simulate.round import play
from noisegate.simulate.rounds import Rounds
from noisegate.simulate.train import Training, abreast, accuracy

__all__ = [
    "Federation",
    "Progress",
    "Rounds",
    "State",
    "Streams",
    "Training",
    "abreast",
    "accuracy",
    "count_reasons",
    "first_state",
    "play",
    "shares",
    "start",
]
