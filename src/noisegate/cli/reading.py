"""What the flags of a command say: settings of a run, and numbers."""

import tomllib
from dataclasses import fields
from typing import Any

from noisegate.cli.flags import READ, SpecFlags
from noisegate.errors import SpecError
from noisegate.privacy import PAPER, Delta
from noisegate.runs import Spec, make_spec
from noisegate.runs.spec import BEST, HEAD, PARTS
from noisegate.runs.usual import partner_of, usual_with
from noisegate.sampling import EQUAL
from noisegate.settings import read_settings


def spec_of(flags: SpecFlags) -> Spec:
    """The run that is asked for: the file, then the flags, then --set; each overrides the one before."""
    gathered = read_settings(flags.spec_file) if flags.spec_file else {}
    own = [entry.name for entry in fields(SpecFlags) if entry.name not in READ]
    given = {name: getattr(flags, name) for name in own}
    given |= {"delta": read_delta(flags.delta), "batch": read_batch(flags.batch)}
    if flags.class_shares is not None:
        given["class_shares"] = read_numbers("class_shares", flags.class_shares, float)
    gathered |= {name: value for name, value in given.items() if value is not None}
    for entry in sorted(flags.settings or [], key=_settled_last):
        _set(entry, gathered)
    return make_spec(gathered, str(flags.spec_file) if flags.spec_file else "flags")


def read_delta(text: str | None) -> Delta:
    """The value of --delta: a number, or the word for the paper's."""
    if text is None:
        return None
    if text == PAPER:
        return "paper"
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"delta = {text!r}: must be a number above 0 and below 1, or paper") from None


def read_batch(text: str | None) -> int | str | None:
    """The value of --batch: a number, or the word for equal batches."""
    if text is None or text == EQUAL:
        return text
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"batch = {text!r}: must be a whole number, or {EQUAL}") from None


def read_numbers(name: str, text: str, kind: type[float] | type[int]) -> list[Any]:
    """The value of a flag that takes several numbers."""
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        example = "1,2" if kind is int else "0.5,2"
        raise SpecError(f"{name} = {text!r}: must be numbers with commas between them, as {example}") from None


def _settled_last(entry: str) -> bool:
    """The worker's settings come last: which worker it is may follow from the aggregator."""
    return entry.startswith("worker")


def _set(entry: str, gathered: dict[str, Any]) -> None:
    """Add what one --set says to the settings that were gathered so far."""
    target, equals, value = entry.partition("=")
    part, dot, key = target.partition(".")
    if not equals or not dot or part not in (*PARTS, "features"):
        known = ", ".join((*PARTS, "features"))
        raise SpecError(f"--set {entry}: must be PART.KEY=VALUE with PART one of {known}; other settings have flags")
    now = gathered[part] if part in gathered else _default(part, gathered)
    if not isinstance(now, str | dict):
        raise SpecError(f"{part} = {now!r}: must be a name, or a table with name and settings")
    gathered[part] = {**({"name": now} if isinstance(now, str) else now), key: _value(value)}


def _default(part: str, gathered: dict[str, Any]) -> Any:
    """A part that was not chosen: the worker is the one that model and aggregator go with."""
    if part == "features":
        raise SpecError("--set features: there are none; give --features too")
    head = gathered.get("model", HEAD if "features" in gathered else None)
    return {**Spec().canonical(), **usual_with(head), **partner_of(gathered.get("aggregator", BEST))}[part]


def _value(text: str) -> Any:
    """A TOML value, or else a plain text; `auto`, as `noisegate list` shows it, for the default."""
    if text == "auto":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise SpecError("--set: a value is nested too deeply") from None
    except ValueError:  # not TOML, or a number that Python refuses to read
        return text
