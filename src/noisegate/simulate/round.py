"""One round of the protocol, top to bottom."""

from functools import partial

import torch
from torch import Tensor

from noisegate.capacity import Capacity
from noisegate.protocol import judge, upload
from noisegate.protocol.intake import received
from noisegate.simulate.federation import Federation, FederationState, Streams
from noisegate.views import Verdict


def play(
    federation: Federation,
    state: FederationState,
    t: int,
    capacity: Capacity | None = None,
    streams: Streams | None = None,
) -> tuple[FederationState, Verdict]:
    """Round `t` (from 0): everyone uploads, the server judges, the model moves. `state` is used up.

    capacity: never look at the device's numbers; the round counts only if it `fits`.
    streams: the randomness of the round by name, if not the federation's own.
    """
    server, adversary, schedule = federation.server, federation.adversary, federation.schedule
    if schedule.secret and streams is None:
        schedule.secret.begin(t, again=True)  # a state may be played again
    streams = streams or Streams(federation, t)
    phase, last = federation.phase(t), state.uploads
    active, signs = federation.active(phase), adversary.signs if adversary.attack.ascends(phase) else None

    # 1. Every active worker makes its private upload (Algorithm 1). Byzantine workers whose uploads are made up are not
    # active. The others train on what the attack made of their examples, or on the negated loss.
    poison = partial(adversary.poison, byzantine=active.byzantine, phase=phase, generators=streams.generator)
    sent = upload(
        federation.mechanism,
        state.params,
        active.holdings,
        last if signs is None else last * signs,  # a copy: an interruption must find the state as it was
        streams.private,
        into=state.spare,
        capacity=capacity,
        prepare=poison if active.byzantine_count else None,
    )
    if signs is not None:
        sent.mul_(signs)

    # 2. The adversary replaces its own rows by whatever it sends. Some uploads do not arrive.
    own_computed = active.rows is None
    adversary.forge(sent, own_computed, state.server, phase, streams.generator, capacity)
    missing = absent(federation, streams) if schedule.absent else None

    # 3. The server judges what arrived, and only that, and steps (Algorithms 2 and 3).
    ties = torch.randperm(len(last), generator=streams.generator("ties"), device=last.device)
    verdict, after = judge(server, state.server, received(sent, missing), ties, capacity)
    return FederationState(after, spare=last), verdict


def absent(federation: Federation, streams: Streams) -> Tensor:
    """(n,) whose upload does not arrive in this round."""
    n, device = len(federation.workers), federation.device
    return torch.rand(n, generator=streams.generator("absent"), device=device) < federation.schedule.absent
