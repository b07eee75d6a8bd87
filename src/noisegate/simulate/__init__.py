"""The protocol on one machine: all workers of a round in one batched computation."""

from noisegate.simulate.federation import Federation, State, first_state
from noisegate.simulate.round import play
from noisegate.simulate.train import Progress, accuracy, count_reasons, shares, start, train

__all__ = [
    "Federation",
    "Progress",
    "State",
    "accuracy",
    "count_reasons",
    "first_state",
    "play",
    "shares",
    "start",
    "train",
]
