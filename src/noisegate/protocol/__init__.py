"""The protocol that any program can call: one upload, one judgement. Who carries them between machines is up to it.

`worker.upload` makes what leaves one worker, or many, in a round. `server.judge` takes whatever arrived and gives the
verdict and the next model. `intake.receive` makes rows of what can be read. The simulator's round is these calls, and
so is every transport (`examples/threads.py` is one in sixty lines).
"""

from noisegate.protocol.claims import MOST_CLAIMED, Claims, expected_of
from noisegate.protocol.intake import LATE, Received, receive
from noisegate.protocol.server import Judgement, Server, ServerState, first_state, judge
from noisegate.protocol.worker import Mechanism, upload, upload_of_one

__all__ = [
    "LATE",
    "MOST_CLAIMED",
    "Claims",
    "Judgement",
    "Mechanism",
    "Received",
    "Server",
    "ServerState",
    "expected_of",
    "first_state",
    "judge",
    "receive",
    "upload",
    "upload_of_one",
]
