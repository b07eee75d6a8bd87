"""What leaves a worker in a round: draw, contributions, noise, public divisor, publish (Algorithm 1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from noisegate import checks
from noisegate.capacity import Capacity
from noisegate.entropy import BATCH, NOISE, PUBLISH, Randomness, Source
from noisegate.errors import PrivacyError
from noisegate.examples import Drawn, Holdings
from noisegate.roles import Worker
from noisegate.sampling import EQUAL, Sampling
from noisegate.vectors import FlatModel
from noisegate.workers import Company, Sums, choose_sums, fill_with_noise, rounded_sensitivity

Randomnesses = Callable[[str], Randomness]
"""Gives the source of randomness for one of `entropy.PRIVATE`: batch, noise, publish. `Secret.source` is one."""


@dataclass(frozen=True, eq=False)
class Mechanism:
    """What everyone in a federation agreed on: how examples become a private upload. All of it is public.

    model, sums: the module and loss, and a way to its sums of contributions. worker: bounds contributions. sampling:
    draws batches. sigma: the noise multiplier. declared: the number of examples that sigma was priced for, and that the
    sampling rate comes from. It is public, so it may not follow a worker's true number. most: the largest draw that a
    worker may expect, over b_c. Longer sums round by more, which a hair more noise pays for. It is one public number
    for all, since the server judges by the noise.
    """

    model: FlatModel
    sums: Sums
    worker: Worker
    sampling: Sampling
    sigma: float
    declared: int
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.most < math.inf:  # less would take away noise that rounding needs
            raise checks.refuse("most", self.most, "must be a finite number, 1 or more")

    @classmethod
    def of(
        cls,
        model: FlatModel,
        examples: tuple[Tensor, Tensor],
        worker: Worker,
        sampling: Sampling,
        sigma: float,
        declared: int,
        most: float = 1.0,
    ) -> "Mechanism":
        """With the fastest way to the sums of one worker's contributions. SpecError if the model mixes examples.

        examples: real ones (x, y), on which that is tried; a server takes its own.
        """
        sampling.rate(declared)  # which refuses a batch that is larger
        if not 0 <= sigma < math.inf:
            raise checks.refuse("sigma", sigma, "must be a finite number, 0 or more")
        company = Company(sampling.batch, workers=1)
        sums = choose_sums(model, model.initial(), *examples, company=company)
        return cls(model, sums, worker, sampling, sigma, declared, most)

    @property
    def batch(self) -> int:
        """b_c: the expected number of examples in a draw, and the public divisor."""
        return self.sampling.batch

    @property
    def added_noise(self) -> float:
        """Standard deviation of the Gaussian noise in each coordinate of a mean, s = sigma sensitivity / batch."""
        if self.worker.mechanism != "gaussian":
            return 0.0
        return self.sigma * rounded_sensitivity(self.worker, self.batch * self.most) / self.batch

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each coordinate of an upload."""
        return self.worker.noise_in_upload(self.added_noise, self.sigma, self.model.d)


def upload(
    mechanism: Mechanism,
    params: Tensor,
    holdings: Holdings,
    last: Tensor,
    randomness: Randomnesses,
    *,
    into: Tensor | None = None,
    capacity: Capacity | None = None,
    prepare: Callable[[Drawn], None] | None = None,
) -> Tensor:
    """(n, d) what k workers send in a round: the rows `holdings.rows`, or all of them. The others mean nothing.

    params: (d,) the model. last: (n, d) what each of them sent last, zeros before its first upload. into: space for the
    uploads. capacity: the round counts only if it `fits`. prepare: called with the drawn examples before anyone trains.
    """
    if into is not None and into.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
        raise ValueError("into: lies in the same memory as last, which is still needed; give space of its own")
    # 1. Each worker draws a batch.
    batches = randomness(BATCH)
    if isinstance(batches, Source) and mechanism.sampling.name == EQUAL:
        raise PrivacyError(
            f"sampling {EQUAL!r}: draws at rates that follow the data, which is not priced, so nothing of it may "
            "leave; use poisson"
        )
    drawn = holdings.draw(mechanism.sampling, mechanism.declared, batches, capacity)
    if prepare:
        prepare(drawn)

    # 2. Each example's gradient is mixed with the last upload and bounded. The sum gets noise and a public divisor.
    # Research noise comes first, straight into the uploads' place, and contributions are added to it. Secret noise
    # comes last, so that the whole is rounded to a grid that tells nothing of them.
    uploads, noise, std = torch.zeros_like(last) if into is None else into, randomness(NOISE), mechanism.added_noise
    secret = isinstance(noise, Source)
    if secret and not std > 0 and mechanism.worker.mechanism == "gaussian":
        raise PrivacyError(
            f"sigma = {mechanism.sigma}: leaves no noise, so that a secret upload would be bare; raise it"
        )
    fill_with_noise(uploads[: len(holdings)], 0.0 if secret else std, noise)
    for portion in reversed(drawn.portions):  # from the last: a worker's own row never lies before its place here
        sums = uploads[portion.workers] if holdings.rows is None else uploads[portion.workers].clone()
        sent_last = holdings.part_of(last, portion.workers)
        mechanism.sums.add(mechanism.worker, params, drawn.examples(portion), sent_last, sums, 1 / mechanism.batch)
        if isinstance(noise, Source) and std:
            noise.add_noise(sums, std)
        if holdings.rows is not None:
            uploads.index_copy_(0, holdings.rows[portion.workers], sums)

    # 3. What leaves is made of that alone.
    mechanism.worker.publish(uploads, last, mechanism.sigma, partial(randomness, PUBLISH))
    return uploads


def upload_of_one(
    mechanism: Mechanism, params: Tensor, x: Tensor, y: Tensor, last: Tensor | None, randomness: Randomnesses
) -> Tensor:
    """(d,) what one worker with these examples sends in a round. last: what it sent last; None before that.

    PrivacyError if its rate would follow its data, or if it holds fewer examples than sigma was priced for, under a
    sampling whose price depends on that.
    """
    if mechanism.sampling.name == EQUAL:
        raise PrivacyError(
            f"sampling {EQUAL!r}: draws at a rate that follows this worker's {len(y)} examples, which is not priced; "
            "use poisson with a declared number of its own"
        )
    mine, declared = mechanism.sampling.priced([len(y)], mechanism.declared)[0], mechanism.declared
    if mine < declared:
        raise PrivacyError(
            f"declared = {declared}: this worker holds {mine} examples, and sampling {mechanism.sampling.name!r} draws "
            f"each of them more often than was priced; price sigma for {mine}, or use poisson"
        )
    for name, value in (("params", params), ("last", last)):
        if value is not None and value.shape != (mechanism.model.d,):
            raise ValueError(f"{name}: must be of shape ({mechanism.model.d},), not {tuple(value.shape)}")
    last = torch.zeros_like(params) if last is None else last.to(params)
    return upload(mechanism, params, Holdings.of_one(x, y), last[None], randomness)[0]
