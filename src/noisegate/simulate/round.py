"""One round of the protocol, top to bottom."""

from functools import partial

import torch
from torch import Tensor

from noisegate.capacity import Capacity, places
from noisegate.entropy import BATCH, NOISE, PUBLISH, Source
from noisegate.errors import SpecError
from noisegate.sampling import gather
from noisegate.simulate.federation import Federation, FederationState, Streams
from noisegate.simulate.judging import judged
from noisegate.views import AdversaryView, DataView, ServerView, Verdict, as_rows, checked_examples, receive
from noisegate.workers import contributions_of, fill_with_noise, mean_gradient

POISONED_AT_ONCE = 4096
"""Examples that an attack is shown at a time. Part of what a seed means on a CUDA device: not to be changed."""


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
    run, params, phase = federation, state.params, federation.phase(t)
    if run.secret and streams is None:
        run.secret.begin(t)
    n, d, streams = len(run.byzantine), len(params), streams or Streams(run, t)
    rng, private = streams.generator, streams.private

    # 1. Draw batches. An adversary that makes its uploads up needs none.
    active = run.active(phase)
    batch = gather(active.draw(private(BATCH)), active.at_once, capacity)
    drawn = active.numbers(batch)
    x, y = None, run.y.index_select(0, drawn)

    # 2. Attacks on data act before anyone trains.
    if active.liars:
        lying = places(active.lying.index_select(0, batch.owner), capacity.liars if capacity else 0, capacity)
        knows = DataView(run.classes, phase, partial(rng, "poison"))
        for some in lying.split(POISONED_AT_ONCE):
            mine = run.x.index_select(0, drawn.index_select(0, some)), y.index_select(0, some)
            bad_x, bad_y = checked_examples(*run.attack.poison(*mine, knows), len(some), run.classes, capacity)
            y.index_copy_(0, some, bad_y.to(y))
            if bad_x is not mine[0] or bad_x._version:  # another tensor, or the same one written to
                x = run.x.index_select(0, drawn) if x is None else x
                x.index_copy_(0, some, bad_x.to(x))

    # 3. Every active worker runs the private protocol: bounded contributions, noise, a public divisor (Algorithm 1).
    # Research noise comes first, straight into the uploads' place, and the contributions are added to it. Secret noise
    # comes last, so that the whole is rounded to a grid that tells nothing of them.
    uploads, last, noise = state.spare, state.uploads, private(NOISE)
    fill_with_noise(uploads[: len(active)], 0.0 if isinstance(noise, Source) else run.added_noise, noise)
    turn = run.turned if run.attack.ascends(phase) else None  # who ascends: the negated loss has negated gradients
    for part in reversed(batch.parts):  # the last first: workers move to their own rows, which never lie further up
        rows = active.rows[part.workers]
        sent = uploads[part.workers] if active.everyone else uploads[part.workers].clone()
        sent_last = last[part.workers] if active.everyone else last.index_select(0, rows)
        if turn is not None and run.worker.momentum:
            sent_last = sent_last * turn[rows]
        own_x = run.x.index_select(0, drawn[part.places]) if x is None else x[part.places]
        own = own_x, y[part.places], part.owner
        run.sums.add(run.worker, params, *own, sent_last, sent, 1 / run.batch, part.width, capacity)
        if isinstance(noise, Source) and run.added_noise:
            noise.add_noise(sent, run.added_noise)
        if turn is not None:
            sent.mul_(turn[rows])
        if not active.everyone:
            uploads.index_copy_(0, rows, sent)
    run.worker.publish(uploads, last, run.sigma, partial(private, PUBLISH))

    # 4. Attacks on uploads replace the adversary's own rows, whatever it sends.
    def as_received(sent: Tensor, own_x: Tensor, own_y: Tensor, ties: Tensor) -> ServerView:
        """What a server with these examples of its own knows; `sent` is written to."""
        received, norms, present = receive(sent, n, d, like=params, in_place=True)
        own = run.sums, params, own_x, own_y
        return ServerView(
            received,
            norms,
            present,
            run.noise_std,
            run.believed_honest,
            partial(mean_gradient, *own, capacity=capacity),
            ties,
            run.scratch,
            run.batch,
            run.worker.sensitivity,
            partial(contributions_of, *own, run.worker, run.noise_std, capacity=capacity),
            run.strata if own_y is run.aux_y else 1,  # an adversary's may not be as many of every class
            last,
        )

    def judge(forged: Tensor) -> Verdict:
        """The aggregator as the adversary can imagine it."""
        if not isinstance(forged, Tensor) or forged.shape != (liars, d):
            shape = tuple(forged.shape) if isinstance(forged, Tensor) else type(forged).__name__
            raise SpecError(f"attack: its view's judge takes uploads of shape ({liars}, {d}), not {shape}")
        trial = uploads.index_copy(0, run.byzantine_rows, as_rows(forged, liars, d, like=params))
        return judged(run.aggregator, as_received(trial, run.surrogate_x, run.surrogate_y, run.everyone), {}).copy()

    if liars := len(run.byzantine_rows):
        view = AdversaryView(
            workers=liars,
            see_honest=partial(uploads.index_select, 0, run.honest_rows),
            see_own=partial(uploads.index_select, 0, run.byzantine_rows)
            if active.everyone
            else partial(params.new_zeros, liars, d),
            params=params.clone(),
            noise_std=run.noise_std,
            phase=phase,
            stream=partial(rng, "attack"),
            judge=judge,
            see_gradient=partial(mean_gradient, run.sums, params, run.known_x, run.known_y, capacity=capacity)
            if len(run.known_x)
            else None,
            knows=run.attack.knows,
        )
        forged = run.attack.forge(view)
        if forged is not None or not active.everyone:
            uploads.index_copy_(0, run.byzantine_rows, as_rows(forged, liars, d, like=params))

    # 5. The server judges what it received, and only that.
    ties = torch.randperm(n, generator=rng("ties"), device=params.device)
    seen = as_received(uploads, run.aux_x, run.aux_y, ties)
    verdict = judged(run.aggregator, seen, state.aggregator)

    # 6. Step. Uploads are overwritten in two rounds, and the last ones in the next, so nobody may take them along. What
    # was malformed is remembered as the zeros that the server made of it.
    passing = (seen.uploads, last)
    kept = {
        name: value.clone() if any(shares(value, each) for each in passing) else value
        for name, value in verdict.state.items()
    }
    return FederationState(torch.sub(params, verdict.update, alpha=run.rate), seen.uploads, kept, spare=last), verdict


def shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
