"""Whether what was found before a run still holds: every example's contribution is its own, and there is one.

Looked at now and then on a batch of its own, at the model and the uploads of the moment. It draws from a stream of its
own and writes to nothing that a round reads, so a run's bytes are the same with it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisegate.attacks import Honest
from noisegate.errors import PrivacyError, SpecError
from noisegate.examples import Examples
from noisegate.simulate.federation import Federation, FederationState
from noisegate.streams import stream
from noisegate.vectors import FlatModel, add_rows
from noisegate.workers import ClosedForm, company, contributions, sight

FAINT = 1e-9
"""An example whose gradient is so short beside that for another label is fitted to the last digits: all is rounding."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch as a round has it. last: (k, d) what these workers sent last.

    picked: some of the workers, ascending; mine: the numbers of their examples.
    """

    examples: Examples
    last: Tensor
    picked: Tensor
    mine: Tensor


@dataclass(frozen=True, eq=False)
class Separate:
    """The picked workers' examples, each alone. sums: (p, d) of contributions; reach: (p,) of their lengths.

    lengths: (B,) of gradients; broken: the share of examples without a finite loss and gradient.
    """

    sums: Tensor
    reach: Tensor
    lengths: Tensor
    broken: float


def check_finite(run: Federation, params: Tensor, t: int) -> bool:
    """Whether the model is finite after `t` rounds; SpecError if it is not and nobody attacked it."""
    if bool(params.isfinite().all()):
        return True
    if attacked(run):
        return False
    raise SpecError(
        f"round {t}: the model's parameters are no longer finite, and nobody attacked it; lower rate (a step is "
        f"{run.server.rate:.3g} times an upload here) or the worker's threshold"
    )


def attacked(run: Federation) -> bool:
    """Whether somebody does anything but follow the protocol."""
    return bool(len(run.adversary.rows)) and type(run.adversary.attack) is not Honest


def recheck(run: Federation, state: FederationState, t: int, x_test: Tensor) -> None:
    """PrivacyError if examples mix after `t` rounds; SpecError if most have no finite loss and gradient, or output.

    A model that Byzantine workers drove out of float32's range is what an attack may do: the run goes on.
    """
    rng = stream(run.schedule.seed, f"recheck/{run.schedule.name}", t, run.workers.x.device)
    sample = sample_of(run, state, t, rng)
    if sample is None:
        return
    alone = by_themselves(run, run.mechanism.model, state.params, sample)
    if alone.broken > sight.BROKEN:
        if attacked(run) and not broken_in_any_range(run, state.params, sample):
            return
        raise SpecError(
            f"round {t}: model or loss: gives no finite loss and gradient for {alone.broken:.0%} of "
            f"{len(sample.mine)} examples, though the parameters are finite; look for a division by zero, a logarithm "
            "or root of what may be zero or negative, or lower rate"
        )
    check_outputs(run, state.params, t, x_test[: sight.CHOSEN])
    if isinstance(run.mechanism.sums, ClosedForm):
        mixes = sums_differ(run, state, sample, alone) and sums_still_differ(run, state.params, sample, rng)
    else:
        mixes = company_matters(run.mechanism.model, state.params, sample, rng)
    if mixes or extremes_matter(run, state.params, sample, rng):
        raise PrivacyError(
            f"round {t}: what an example contributes depends on the others of its batch, so epsilon would be wrong: "
            "the model or loss mixes examples at these parameters. Use a loss of each example's own output and label, "
            "and a module without statistics over a batch, without state and without branches on a batch's size"
        )


@torch.no_grad()
def check_outputs(run: Federation, params: Tensor, t: int, x: Tensor) -> None:
    """SpecError if most test examples have no finite output, though the model is finite and nobody attacked it."""
    share = 1 - float(run.mechanism.model.scores(params, x).isfinite().all(1).double().mean())
    if share > sight.BROKEN and not attacked(run):
        raise SpecError(
            f"round {t}: model: gives no finite output for {share:.0%} of {len(x)} test examples, though it does for "
            "training examples; look at how the two differ, or for a division by zero or a logarithm of zero"
        )


def sample_of(run: Federation, state: FederationState, t: int, rng: torch.Generator) -> Sample | None:
    """Some workers' examples in one forward pass, as many as in a round; None if nobody drew any."""
    active = run.active(run.phase(max(0, t - 1)))
    mechanism, holdings = run.mechanism, active.holdings
    capacity = active.capacity() if run.workers.x.is_cuda else None
    before = rng.get_state()
    drawn = holdings.draw(mechanism.sampling, mechanism.declared, rng, capacity)
    if capacity and not bool(capacity.fits()):
        rng.set_state(before)
        drawn = holdings.draw(mechanism.sampling, mechanism.declared, rng)
    portions = drawn.portions
    portion = portions[int(torch.randint(0, len(portions), (), generator=rng, device=rng.device))]
    there = portion.owner[portion.owner < portion.workers.stop - portion.workers.start].unique()
    if not len(there):
        return None
    shuffled = there[torch.randperm(len(there), generator=rng, device=rng.device)]
    picked = shuffled[: max(1, sight.CHOSEN // mechanism.batch)].sort().values
    last = holdings.part_of(state.uploads, portion.workers)
    mine = torch.isin(portion.owner, picked).nonzero().flatten()
    return Sample(drawn.examples(portion), last, picked, mine)


def by_themselves(run: Federation, model: FlatModel, params: Tensor, sample: Sample) -> Separate:
    """The obvious way, some examples at a time."""
    who = torch.searchsorted(sample.picked, sample.examples.owner[sample.mine])
    last = sample.last[sample.picked].to(params)
    sums, reach = torch.zeros_like(last), params.new_zeros(len(last), 1)
    lengths, finite = [], []
    for some, own in zip(sample.mine.split(sight.CHOSEN), who.split(sight.CHOSEN), strict=True):
        gradients, losses = sight.by_themselves(
            model, params, sight.as_in(sample.examples.x[some], params), sample.examples.y[some]
        )
        added = contributions(run.mechanism.worker, gradients, last[own])
        add_rows(sums, own, added)
        add_rows(reach, own, torch.linalg.vector_norm(added, dim=1, keepdim=True))
        lengths.append(torch.linalg.vector_norm(gradients, dim=1))
        finite.append(losses.isfinite() & lengths[-1].isfinite())
    return Separate(sums, reach[:, 0], torch.cat(lengths), 1 - float(torch.cat(finite).double().mean()))


def sums_differ(run: Federation, state: FederationState, sample: Sample, alone: Separate) -> bool:
    """Whether the run's own way gives the picked workers other sums than the obvious one."""
    sums = state.spare[: len(sample.last)].zero_()  # which a round overwrites before it reads
    mechanism, examples = run.mechanism, sample.examples
    mechanism.sums.add(mechanism.worker, state.params, examples, sample.last, sums)
    if examples.capacity and not bool(examples.capacity.fits()):  # a round would be played again without a capacity
        again = replace(examples, capacity=None)
        mechanism.sums.add(mechanism.worker, state.params, again, sample.last, sums.zero_())
    return apart(sums[sample.picked], alone, sight.SUSPECT)


def sums_still_differ(run: Federation, params: Tensor, sample: Sample, rng: torch.Generator) -> bool:
    """The same in float64 without faint examples, or at other weights if the model knows float32 only."""
    try:
        twin = sight.doubled(run.mechanism.model)
        return _sums_differ_in(run, twin, params.double(), sample, sight.CERTAIN)
    except sight.FAILURES:
        at = params + sight.SHAKE * torch.randn(params.shape, generator=rng, device=params.device)
        return _sums_differ_in(run, run.mechanism.model, at, sample, sight.SHORT_OF_DIGITS)


def _sums_differ_in(run: Federation, model: FlatModel, params: Tensor, sample: Sample, tolerance: float) -> bool:
    closed = ClosedForm.of(model, sight.CHOSEN)
    if closed is None:
        return False
    sample = _without_faint(run, model, params, sample)
    if not len(sample.mine):
        return False
    alone = by_themselves(run, model, params, sample)
    # Who was not picked only keeps the others company: all of them between two picked ones are one worker.
    picked = torch.isin(sample.examples.owner, sample.picked)
    owner = torch.where(picked, sample.examples.owner, -1).unique_consecutive(return_inverse=True)[1]
    rows = owner[picked].unique()
    last = params.new_zeros(int(owner.max()) + 1, len(params))
    last[rows] = sample.last[sample.picked].to(params)
    closed, x = replace(closed, own_convolutions=False), sight.as_in(sample.examples.x, params)
    return apart(closed(run.mechanism.worker, params, x, sample.examples.y, owner, last)[rows], alone, tolerance)


def _without_faint(run: Federation, model: FlatModel, params: Tensor, sample: Sample) -> Sample:
    """Without the picked workers' examples that are fitted to the last digits, and workers who have no other."""
    other = sample.examples.y.clone()
    other[sample.mine] = (sample.examples.y[sample.mine] + 1) % run.adversary.classes
    own, others = (
        by_themselves(run, model, params, _labeled(sample, labels)).lengths for labels in (sample.examples.y, other)
    )
    keep = torch.ones_like(sample.examples.owner, dtype=torch.bool)
    keep[sample.mine] = own > FAINT * others
    owner = sample.examples.owner[keep]
    picked = sample.picked[torch.isin(sample.picked, owner)]
    mine = torch.isin(owner, picked).nonzero().flatten()
    return Sample(Examples(sample.examples.x[keep], sample.examples.y[keep], owner), sample.last, picked, mine)


def _labeled(sample: Sample, y: Tensor) -> Sample:
    """The same examples with these labels."""
    return replace(sample, examples=replace(sample.examples, y=y))


def apart(sums: Tensor, alone: Separate, tolerance: float) -> bool:
    """Whether a worker's sum is off by more than `tolerance` of what its contributions can reach."""
    off = torch.linalg.vector_norm(sums - alone.sums, dim=1)
    reach = torch.maximum(alone.reach, torch.linalg.vector_norm(sums, dim=1))
    return not bool((off <= tolerance * reach).all())


def company_matters(model: FlatModel, params: Tensor, sample: Sample, rng: torch.Generator) -> bool:
    """Whether one worker's examples in a batch have other losses or gradients than alone, by plain autograd."""
    mine = (sample.examples.owner == sample.picked[0]).nonzero().flatten()
    chosen = torch.randperm(len(mine), generator=rng, device=rng.device)[: sight.CHOSEN].sort().values
    signs = torch.randn(len(chosen), generator=rng, device=rng.device)
    drawn = sight.Draw(sample.examples.x[mine], sample.examples.y[mine], chosen, signs)
    if not sight.look(model, None, params, drawn, sight.SUSPECT).mixes:
        return False
    return sight.look_again(model, None, params, drawn, rng).mixes


def extremes_matter(run: Federation, params: Tensor, sample: Sample, rng: torch.Generator) -> bool:
    """Whether the picked workers' examples have other losses or gradients than alone beside some made extreme.

    Each has the worse of two labels: what is fitted to the last digits has a gradient that is all rounding.
    """
    if len(sample.mine) < 2:
        return False
    x, y = sample.examples.x[sample.mine], sample.examples.y[sample.mine]
    try:
        with torch.no_grad():
            said, other = run.mechanism.model.outputs(params, x), (y + 1) % run.adversary.classes
            worse = run.mechanism.model.own_losses(said, other) > run.mechanism.model.own_losses(said, y)
    except sight.FAILURES:
        return False
    chosen = torch.arange(min(len(y), sight.CHOSEN), device=y.device)
    signs = torch.randn(len(chosen), generator=rng, device=rng.device)
    factor = company.EXTREMES[int(torch.randint(0, len(company.EXTREMES), (), generator=rng, device=rng.device))]
    drawn = sight.Draw(x, torch.where(worse, other, y), chosen, signs)
    seen = company.seen_beside_extremes(run.mechanism.model, params, company.beside_extremes(drawn, factor, rng), rng)
    return seen is not None and seen.mixes


def broken_in_any_range(run: Federation, params: Tensor, sample: Sample) -> bool:
    """Whether it is not for float32's range that losses and gradients are not finite."""
    try:
        return by_themselves(run, sight.doubled(run.mechanism.model), params.double(), sample).broken > sight.BROKEN
    except sight.FAILURES:
        return False
