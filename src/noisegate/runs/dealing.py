"""Who holds which examples: the server, the honest workers, and the Byzantine ones."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisegate import data
from noisegate.data import Dataset
from noisegate.errors import DataError, NoisegateWarning, SpecError
from noisegate.runs.spec import Spec
from noisegate.streams import stream


@dataclass(frozen=True, eq=False)
class Dealt:
    """Who holds what, by position.

    dataset: what the workers hold is of. source: what the server's examples are of; aux: (A,) their numbers there.
    parts: the numbers of each worker's examples. byzantine: (n,) who is.
    """

    dataset: Dataset
    source: Dataset
    aux: Tensor
    parts: list[Tensor]
    byzantine: Tensor

    def honest_sizes(self) -> list[int]:
        """How many examples each honest worker holds."""
        return [len(part) for part, byzantine in zip(self.parts, self.byzantine.tolist(), strict=True) if not byzantine]

    def padded(self) -> tuple[Tensor, Tensor]:
        """(n, longest) the parts as rows, padded, and (n,) their sizes."""
        rows: Tensor = nn.utils.rnn.pad_sequence(self.parts, batch_first=True)
        return rows, torch.tensor([len(part) for part in self.parts])


def deal(spec: Spec, dataset: Dataset, source: Dataset, honest: int) -> Dealt:
    """Deal the examples out. The server's are in no worker's data and not in the test set.

    Honest workers share the rest. Byzantine ones hold as much as an honest one, drawn from all of that. Positions are
    shuffled: no aggregator may profit from an order.
    """
    if source.shape != dataset.shape or source.classes < dataset.classes:
        raise SpecError(
            f"auxiliary_from = {spec.auxiliary_from!r}: has examples of shape {source.shape} in {source.classes} "
            f"classes, and {dataset.name!r} {dataset.shape} in {dataset.classes}; choose a data set like it"
        )
    aux, pool = data.hold_out(source.y, dataset.classes, spec.auxiliary, stream(spec.seed, "auxiliary"))
    pool = pool if source is dataset else torch.arange(len(dataset.y))
    parts = [pool[part] for part in _partition(spec, dataset, pool, honest)]
    rng, each = stream(spec.seed, "byzantine-data"), len(pool) // honest
    byzantine = _count_byzantine(spec, honest)
    parts += [pool[torch.randperm(len(pool), generator=rng)[:each]] for _ in range(byzantine)]
    places = torch.randperm(len(parts), generator=stream(spec.seed, "positions"))
    return Dealt(dataset, source, aux, [parts[place] for place in places.tolist()], places >= honest)


def count_honest(spec: Spec, dataset: Dataset, usual: int) -> int:
    """How many honest workers a run has: those of the spec, or those that hold the data, or the usual number."""
    if is_given(spec, dataset):
        return spec.workers or len(dataset.owner.unique())  # type: ignore[union-attr]
    return spec.workers or usual


def is_given(spec: Spec, dataset: Dataset) -> bool:
    """Whether the data say who holds what. SpecError if the spec says otherwise."""
    if dataset.owner is None:
        if spec.redeal:
            raise SpecError(f"redeal = true: {dataset.name!r} does not say who holds what; leave it out")
        return False
    for name, value in (("non_iid", spec.non_iid), ("dirichlet", spec.dirichlet)):
        if value and not spec.redeal:
            raise SpecError(
                f"{name} = {value}: {dataset.name!r} says which worker holds each example; leave {name} out, or give "
                "redeal = true to deal them anew"
            )
    return not spec.redeal


def _partition(spec: Spec, dataset: Dataset, pool: Tensor, honest: int) -> list[Tensor]:
    y, rng = dataset.y[pool], stream(spec.seed, "partition")
    if is_given(spec, dataset) and dataset.owner is not None:
        left = dataset.owner[pool]
        if gone := sorted(set(dataset.owner.tolist()) - set(left.tolist())):
            raise DataError(
                f"auxiliary = {spec.auxiliary}: all examples of worker {gone[0]} became the server's; lower it, or "
                "give auxiliary_from, a data set that they are taken from"
            )
        return data.given(left, honest)
    if spec.dirichlet is not None:
        return data.dirichlet(y, honest, spec.dirichlet, rng, smallest=spec.batch)
    return data.non_iid(y, honest, rng) if spec.non_iid else data.iid(y, honest, rng)


def surrogate(spec: Spec, dealt: Dealt) -> Tensor:
    """Which examples an adversary takes for the server's: as many of each class, of those that its workers hold."""
    pool = held_by_byzantine(spec, dealt, "surrogate")
    labels = dealt.dataset.y[pool]
    return torch.cat([pool[labels == label][: spec.auxiliary] for label in range(dealt.dataset.classes)])


def held_by_byzantine(spec: Spec, dealt: Dealt, name: str) -> Tensor:
    """Every example that a Byzantine worker holds, once, in the random order of that name; none if nobody is."""
    held = [part for part, byzantine in zip(dealt.parts, dealt.byzantine.tolist(), strict=True) if byzantine]
    pool: Tensor = torch.cat([torch.zeros(0, dtype=torch.int64), *held]).unique()
    return pool[torch.randperm(len(pool), generator=stream(spec.seed, name))]


def copies(spec: Spec, dealt: Dealt) -> int:
    """How many workers that follow the protocol hold the same example, at most.

    Byzantine workers hold examples drawn from the whole pool. Where nobody attacks they are honest workers more.
    """
    behave = spec.canonical()["attack"]["name"] == "none"
    held = [
        part for part, byzantine in zip(dealt.parts, dealt.byzantine.tolist(), strict=True) if behave or not byzantine
    ]
    return int(torch.cat(held).bincount().max())


def _count_byzantine(spec: Spec, honest: int) -> int:
    """How many workers are Byzantine. A share that is less than one worker is allowed, and rarely meant."""
    byzantine = spec.count_byzantine(honest)
    if spec.byzantine > 0 and byzantine == 0:
        least = math.ceil(100 * 0.5 / (honest + 0.5)) / 100
        text = f"byzantine = {spec.byzantine:g}: is less than one worker beside {honest} honest ones, so nobody attacks"
        warnings.warn(f"{text}; give {least:g} or more, or more workers", NoisegateWarning, stacklevel=2)
    return byzantine
