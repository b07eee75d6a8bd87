"""How the workers of a run draw their batches, and what the server may expect of that."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from noisegate.errors import DataError, SpecError
from noisegate.protocol import MOST_CLAIMED, expected_of
from noisegate.runs.dealing import Dealt
from noisegate.runs.promise import sizes_are_public
from noisegate.runs.spec import Spec
from noisegate.sampling import BALANCED, SAMPLINGS, Balanced, Sampling


def sampling_of(spec: Spec, dealt: Dealt, declared: int) -> Sampling:
    """The sampling scheme. DataError if a worker has too few examples for it."""
    scheme: Sampling = SAMPLINGS[spec.sampling](spec.batch)
    sizes = dealt.honest_sizes()
    if (fewest := min(scheme.priced(sizes, declared))) < spec.batch:
        raise DataError(
            f"batch = {spec.batch}: the smallest of {len(sizes)} workers has only {fewest} examples; "
            "lower batch or workers"
        )
    return Balanced(spec.batch, class_shares(spec, dealt)) if spec.sampling == BALANCED else scheme


def priced_draws(spec: Spec, result: Mapping[str, Any]) -> dict[str, Any]:
    """What the accountant was told of the draws of a finished run: the number of examples, and the sampling."""
    if spec.sampling == BALANCED:
        return {"examples": result["declared"], "sampling": Balanced(spec.batch, tuple(result["class_shares"]))}
    return {
        "examples": round(spec.batch / float(result["sampling_rate"])),
        "sampling": SAMPLINGS[spec.sampling](spec.batch),
    }


def class_shares(spec: Spec, dealt: Dealt) -> tuple[float, ...]:
    """The public shares of the classes: the spec's, or those of all that the honest workers hold together."""
    classes = dealt.dataset.classes
    if spec.class_shares is not None:
        if len(spec.class_shares) != classes:
            raise SpecError(
                f"class_shares = {spec.class_shares}: has {len(spec.class_shares)} shares, and {dealt.dataset.name!r} "
                f"{classes} classes; give one for each class"
            )
        return tuple(spec.class_shares)
    held = torch.cat(
        [part for part, byzantine in zip(dealt.parts, dealt.byzantine.tolist(), strict=True) if not byzantine]
    )
    counts = dealt.dataset.y[held].bincount(minlength=classes)
    return tuple((counts.double() / len(held)).tolist())


def most_drawn(spec: Spec, sampling: Sampling, dealt: Dealt, declared: int) -> float:
    """The largest draw that an honest worker may expect, over b_c. DataError if one expects more, unsaid."""
    if not (spec.secret and sampling.follows_size):
        return 1.0  # research noise keeps the bytes that it had
    highest = 1.0
    if isinstance(sampling, Balanced):  # all of a worker may be the class that is drawn most often
        highest = sampling.rate(declared) * declared / sampling.batch
    largest = max(dealt.honest_sizes()) / declared
    if sizes_are_public(spec):
        return highest * max(MOST_CLAIMED, largest)
    if largest > MOST_CLAIMED:
        raise DataError(
            f"declared = {declared}: a worker holds more than {MOST_CLAIMED:g} times as many examples, whose sums "
            "round by more than the noise allows for; declare more, or leave declared out, so that sizes are public"
        )
    return highest * MOST_CLAIMED


def expected_draws(spec: Spec, sampling: Sampling, dealt: Dealt, declared: int, device: torch.device) -> Tensor | None:
    """What uploads are expected to be made of, by the sizes that workers claim: all of them claim what they hold.

    Where classes have rates of their own, they claim how many examples at the plain rate that is worth. In a secret run
    they do not: that would tell what classes they hold.
    """
    if not sampling.follows_size or not sizes_are_public(spec):
        return None
    numbers, sizes = dealt.padded()
    claimed = sizes if spec.secret else sampling.loads(sizes, declared, dealt.dataset.y[numbers])
    return expected_of(claimed.clamp(min=1).tolist(), declared, device)
