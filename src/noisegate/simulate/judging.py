"""Asking an aggregator, which may be anyone's."""

from torch import Tensor

from noisegate.errors import SpecError
from noisegate.roles import Aggregator
from noisegate.views import ServerView, State, Verdict


def judged(aggregator: Aggregator, view: ServerView, state: State) -> Verdict:
    """What an aggregator answers, once it is known to be an answer. SpecError otherwise.

    An aggregator that wrote to what it was handed is refused: its uploads are what the workers remember as sent, and a
    round may be played again. Seen is what torch counts as a write.
    """
    handed = {
        "view.uploads": view.uploads,
        "view.last": view.last,
        **{f"state[{name!r}]": state[name] for name in state},
    }
    before = {name: value._version for name, value in handed.items() if value is not None}
    verdict = aggregator(view, state)
    if not isinstance(verdict, Verdict):
        raise SpecError(f"aggregator: must answer with a Verdict, but {aggregator!r} gave {type(verdict).__name__}")
    for name, version in before.items():
        if (value := handed[name]) is not None and value._version != version:
            raise SpecError(f"aggregator: {aggregator!r} wrote to {name}, which is not its own; write to a copy of it")
    n, d = view.uploads.shape
    for name, shape in {"update": (d,), "kept": (n,), "reason": (n,), "score": (n,)}.items():
        value = getattr(verdict, name)
        if not isinstance(value, Tensor) or value.shape != shape:
            raise SpecError(
                f"aggregator: the {name} of its verdict must be a tensor of shape {shape}; {aggregator!r} gave another"
            )
    if verdict.update.dtype != view.uploads.dtype:
        raise SpecError(f"aggregator: its update must be of type {view.uploads.dtype}, as the uploads are")
    if not all(isinstance(value, Tensor) for value in verdict.state.values()):
        raise SpecError(
            f"aggregator: its state must hold tensors only, so that it can be saved; {aggregator!r} keeps more"
        )
    return verdict
