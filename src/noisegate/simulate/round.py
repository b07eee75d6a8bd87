"""One round of the protocol, top to bottom."""

from functools import partial

import torch

from noisegate.errors import SpecError
from noisegate.simulate.federation import Federation, State
from noisegate.views import AdversaryView, DataView, ServerView, Verdict, as_rows, checked_examples, receive
from noisegate.workers import add_noise, per_example_gradients


def play(federation: Federation, state: State, t: int) -> tuple[State, Verdict]:
    """Round `t` (from 0): everyone uploads, the server judges, the model moves."""
    run, params = federation, state.params
    n, d, device, progress = len(run.byzantine), len(params), params.device, t / run.rounds

    def rng(what: str) -> torch.Generator:
        return run.stream(what, t)

    # 1. Draw batches. An adversary that makes its uploads up needs none.
    active = run.everyone if run.attack.needs_own(progress) else run.honest_rows
    x, y, owner = run.examples(active, run.sampling.draw(run.sizes[active], rng("batch")))

    # 2. Attacks on data act before anyone trains.
    lying = run.byzantine[active][owner].nonzero().flatten()
    if len(lying):
        poisoned = run.attack.poison(x[lying], y[lying], DataView(run.classes, progress, rng("poison")))
        x[lying], y[lying] = checked_examples(*poisoned, len(lying), run.classes)

    # 3. Every active worker runs the private protocol: bounded contributions, noise, a public divisor (Algorithm 1).
    last_uploads = state.uploads if len(active) == n else state.uploads[active]
    sums = run.sums(run.worker, params, x, y, owner, last_uploads)
    private = add_noise(sums, run.noise_std * run.batch, run.batch, rng("noise"))
    uploads = private if len(active) == n else private.new_zeros(n, d).index_copy_(0, active, private)

    # 4. Attacks on uploads replace the adversary's own rows, whatever it sends.
    if len(run.byzantine_rows):
        own = uploads[run.byzantine_rows]
        view = AdversaryView(
            see_honest=partial(uploads.index_select, 0, run.honest_rows),
            own=own,
            params=params.clone(),
            noise_std=run.noise_std,
            progress=progress,
            rng=rng("attack"),
        )
        forged = as_rows(run.attack.forge(view), len(own), d, like=params)
        uploads = uploads.index_copy(0, run.byzantine_rows, forged)

    # 5. The server judges what it received, and only that.
    received, norms, present = receive(uploads, n, d, like=params)
    verdict = run.rule(
        ServerView(
            uploads=received,
            norms=norms,
            present=present,
            noise_std=run.noise_std,
            believed_honest=run.believed_honest,
            auxiliary=lambda: per_example_gradients(run.model, params, run.aux_x, run.aux_y),
            ties=torch.randperm(n, generator=rng("ties"), device=device),
            progress=progress,
        ),
        state.memory,
    )

    if not isinstance(verdict, Verdict):
        raise SpecError(f"aggregator: must answer with a Verdict, but {run.rule!r} gave {type(verdict).__name__}")

    # 6. Step.
    return State(params - run.rate * verdict.update, uploads, verdict.memory), verdict
