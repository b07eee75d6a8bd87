"""What each side may know, and what it answers. The threat model is these types.

A server never learns who is Byzantine; an adversary never sees the server's auxiliary data. Both see a run only
through the views below, in the simulator and in a deployment alike.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from noisegate.capacity import Capacity
from noisegate.errors import SpecError

State = Mapping[str, Tensor]

Knowledge = Literal["blind", "data-only", "omniscient"]
"""What an attack knows, beside the model that the server sends to everyone and the noise of an upload. "blind": nothing
more. "data-only": its own workers' examples, and what they would send. "omniscient": also the honest workers' uploads
and the server's aggregator; everything but the server's auxiliary data."""

KNOWS: dict[Knowledge, tuple[str, ...]] = {
    "blind": (),
    "data-only": ("see_own", "see_gradient"),
    "omniscient": ("see_own", "see_gradient", "see_honest", "judge"),
}
"""The functions of an `AdversaryView` that each kind of attack may call."""

ASKED = {
    "see_own": "what its own workers would send",
    "see_gradient": "the gradient of its own workers' examples",
    "see_honest": "the honest workers' uploads",
    "judge": "the server's verdict",
}
"""What each of these functions gives, in words."""


class Reason(IntEnum):
    """Why an upload was not used this round (or that it was)."""

    KEPT = 0
    MALFORMED = 1  # not finite, or not a vector of the right shape and type
    NORM = 2  # length outside what the privacy noise allows
    DISTRIBUTION = 3  # coordinates not distributed like the privacy noise
    SCORE = 4  # passed every test, but others have the higher score
    EVIDENCE = 5  # over the rounds too far along a direction in which honest uploads cannot lie so far
    DEPENDENT = 6  # shares with another upload of the round what should be independent noise
    MISSING = 7  # nothing arrived from this worker in this round, which accuses nobody
    LOST = 8  # the round was lost with the process that played it: nobody was judged

    @property
    def word(self) -> str:
        """The name used in files and tables."""
        return self.name.lower()


TESTS = (Reason.MALFORMED, Reason.NORM, Reason.DISTRIBUTION, Reason.EVIDENCE, Reason.DEPENDENT)
"""The reasons that accuse an upload, as opposed to preferring another."""


@dataclass(frozen=True)
class Verdict:
    """What an aggregator decided in one round.

    update: (d,) direction of descent; zero if nobody was kept.
    kept: (n,) whose upload is in the update. `kept[i]` exactly when `reason[i]` is KEPT.
    reason: (n,) a `Reason` for each worker.
    weights: (n,) each upload's share in the update: none is negative, and they add up to 1, or to 0 if nobody was kept.
        Unless given, those who were kept have equal shares. An aggregator that is no weighted mean, such as a median,
        leaves it at that.
    score: (n,) what the aggregator ranks by (zero where it ranks by nothing).
    fell_back: () bool, whether what the aggregator takes for granted did not hold in this round, and it answered by a
        simpler rule. None for an aggregator that never does.
    state: handed back to the aggregator next round; tensors only, so that it can be saved.
        A round may be played again, so an aggregator answers with new tensors and writes to none that it was handed.
    """

    update: Tensor
    kept: Tensor
    reason: Tensor
    score: Tensor
    state: State = field(default_factory=dict)
    weights: Tensor = None  # type: ignore[assignment]  # is there once it is made
    fell_back: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weights is None and isinstance(self.kept, Tensor):
            kept = self.kept.to(torch.float32)
            object.__setattr__(self, "weights", kept / kept.sum().clamp(min=1.0))

    def copy(self) -> "Verdict":
        """The same in memory of its own, without the aggregator's state: what an adversary is shown of a verdict."""
        update, kept, reason, score = (each.clone() for each in (self.update, self.kept, self.reason, self.score))
        fell_back = None if self.fell_back is None else self.fell_back.clone()
        return Verdict(update, kept, reason, score, weights=self.weights.clone(), fell_back=fell_back)


@dataclass(frozen=True)
class ServerView:
    """All that a server knows in one round.

    What it holds is the round's own, and will be overwritten: an aggregator that wants to keep it makes a copy.

    uploads: (n, d), finite; a malformed upload is a row of zeros.
    norms: (n,) their lengths.
    present: (n,) False for an upload that is malformed or missing, which no aggregator may keep.
    noise_std: per-coordinate standard deviation s of the noise in an honest upload.
    believed_honest: how many workers the server believes honest, k = ceil(gamma n).
    auxiliary: gives (d,) the mean gradient of the server's own examples at the current model, as `auxiliary(False)`;
        as `auxiliary(True)` each of them is scaled to length 1 first. An example without a finite gradient counts as
        zeros.
    ties: (n,) a fresh random order of the workers; equal scores are ranked by it.
    scratch: most bytes that an aggregator may use beside the uploads.
    batch: b_c, how many examples an honest upload is expected to be made of, and what their sum was divided by.
    largest: what one example can at most add to that sum, in L2.
    contributions: gives (2 A, d) what each of the server's own examples would on average add to it, in an honest
        worker's hands at the current model; first as they are, and then with labels that are moved by so many classes
        as it is given, () int64. labels: how many labels there are to move them among. strata: how many classes these
        examples are of, if they are as many of every class and one class comes after the other; else 1.
    last: (n, d) what was last received from everyone; zeros before the first upload. A malformed one counts as zeros.
    missing: (n,) whose upload did not arrive in this round; None if all did. This accuses nobody: absence alone
        neither costs a worker its standing nor earns it any.
    expected: (n,) how many examples each worker's upload is expected to be made of, over `batch`: its claimed size over
        the declared one, at most `protocol.claims.MOST_CLAIMED`. A claim is public and unchecked. None means 1 for all.
    momentum: the share of its own last upload that an honest worker mixes into every example.
    declared: the public number of examples that a worker is taken to hold; with `balanced` sampling that of which a
        plain mean is as sure as one over classes of which some have few examples.
    """

    uploads: Tensor
    norms: Tensor
    present: Tensor
    noise_std: float
    believed_honest: int
    auxiliary: Callable[[bool], Tensor]
    ties: Tensor
    scratch: int = 2**28
    batch: int = 16
    largest: float = 1.0
    contributions: Callable[[Tensor], Tensor] | None = None
    labels: int = 1
    strata: int = 1
    last: Tensor | None = None
    missing: Tensor | None = None
    expected: Tensor | None = None
    momentum: float = 0.0
    declared: int = 1000

    def mark_absent(self, reason: Tensor) -> Tensor:
        """`reason` (n,), in which malformed and missing uploads are now called so. It is written to."""
        reason.masked_fill_(~self.present, Reason.MALFORMED.value)
        return self.mark_missing(reason)

    def mark_missing(self, reason: Tensor) -> Tensor:
        """`reason` (n,), in which missing uploads are now called so. It is written to."""
        return reason if self.missing is None else reason.masked_fill_(self.missing, Reason.MISSING.value)


class Shown:
    """Calls a function for an adversary, and shows nothing else of itself.

    No attribute leads to the function, nor to what it holds: the honest workers' uploads, the model, the data. Python
    cannot keep code that searches the process from anything; what an attack finds by looking at its view is copies.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_function")(*args, **named)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__doc__"):
            return object.__getattribute__(self, name)
        raise AttributeError(f"{name!r}: what is shown to an adversary has no attributes; call it")


def _hide(view: Any, *names: str) -> None:
    """Show these functions of a view only by what they give."""
    for name in names:
        function = getattr(view, name)
        if function is not None and not isinstance(function, Shown):
            object.__setattr__(view, name, Shown(function))


def _refusal(name: str, knows: Knowledge) -> Callable[..., Any]:
    """The function of this name in the view of an attack that declares to know too little for it."""
    needed = next(kind for kind, names in KNOWS.items() if name in names)

    def refuse(*args: Any) -> Any:
        raise SpecError(f'attack: its knows is "{knows}", but it asks for {ASKED[name]}; declare knows = "{needed}"')

    return refuse


@dataclass(frozen=True)
class DataView:
    """What an adversary knows when it poisons its own examples: how many classes there are, its phase, and `rng`."""

    classes: int
    phase: Hashable
    stream: Callable[[], torch.Generator]

    def __post_init__(self) -> None:
        _hide(self, "stream")

    @cached_property
    def rng(self) -> torch.Generator:
        """Where its randomness comes from in this round."""
        return self.stream()


@dataclass(frozen=True)
class AdversaryView:
    """What an adversary knows when it forges its own uploads: at most everything but the server's auxiliary data.

    All of it is copies, made when asked for: nothing that an attack does to them reaches an honest worker or the
    server. Its functions are `Shown`, so that no attribute of the view leads to what they copy. A function that the
    attack does not declare to need (`knows`) is not in its view: a call of it, or of what reads it, is a SpecError.

    workers: M, how many it controls. params: (d,) the model. noise_std: as the server knows it.
    see_honest, see_own: give the uploads of the honest workers and of its own; see `honest` and `own`.
    phase: what the attack made of the point that the run has reached.
    stream: gives the generator `rng`.
    judge: gives the verdict on this round if the adversary's workers sent (M, d) this. It is the server's own
        aggregator, but as in a first round, since an aggregator's state may tell of the auxiliary data, and with
        surrogate auxiliary data: examples of the adversary's workers, as many as the server has.
    see_gradient: gives the mean gradient of examples that its workers hold; None if they hold none. See `gradient`.
    knows: what the attack declares to know. A view can be narrowed with `dataclasses.replace`, and never widened.
    """

    workers: int
    see_honest: Callable[[], Tensor]
    see_own: Callable[[], Tensor]
    params: Tensor
    noise_std: float
    phase: Hashable
    stream: Callable[[], torch.Generator]
    judge: Callable[[Tensor], Verdict]
    see_gradient: Callable[[bool], Tensor] | None = None
    knows: Knowledge = "omniscient"

    def __post_init__(self) -> None:
        if self.knows not in KNOWS:
            raise SpecError(f"attack: knows = {self.knows!r}; choose from {', '.join(map(repr, KNOWS))}")
        for name in KNOWS["omniscient"]:
            if name not in KNOWS[self.knows]:
                object.__setattr__(self, name, _refusal(name, self.knows))
        _hide(self, "see_honest", "see_own", "stream", "judge", "see_gradient")

    @cached_property
    def rng(self) -> torch.Generator:
        """Where its randomness comes from in this round."""
        return self.stream()

    @property
    def honest(self) -> Tensor:
        """(H, d) what the honest workers send this round."""
        return self.see_honest()

    @property
    def own(self) -> Tensor:
        """(M, d) what its workers would send if they followed the protocol on their own (poisoned) data.

        Rows of zeros if the attack said it does not need them.
        """
        return self.see_own()

    def gradient(self, normalized: bool) -> Tensor:
        """(d,) the mean gradient, at the current model, of examples that its workers hold; zeros if they hold none.

        normalized: each is scaled to length 1 first. It is what `ServerView.auxiliary` is to the server.
        """
        return self.see_gradient(normalized) if self.see_gradient else torch.zeros_like(self.params)


def checked_examples(
    x: Tensor, y: Tensor, count: int, classes: int, capacity: Capacity | None = None
) -> tuple[Tensor, Tensor]:
    """Poisoned examples that can be trained on: as many as there were, with labels that exist. SpecError otherwise."""
    form = len(x) == count and y.shape == (count,)
    exist = (y >= 0) & (y < classes)
    if capacity:
        capacity.need(exist)
    if not form or (not capacity and not bool(exist.all())):
        raise SpecError(f"attack: its poison must give {count} examples with labels 0 to {classes - 1} back")
    return x, y.clamp(0, classes - 1) if capacity else y  # a device would stop for good at a label that does not exist
