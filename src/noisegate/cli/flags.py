"""Flags of the command line. Each is declared once; a command takes one record of those that it has."""

import inspect
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from noisegate.errors import SpecError
from noisegate.privacy import PAPER, Delta
from noisegate.runs import Spec, make_spec
from noisegate.runs.spec import BEST, HEAD, PARTS, partner_of, usual_with
from noisegate.sampling import EQUAL
from noisegate.settings import read_settings

Record = TypeVar("Record")

SpecFile = Annotated[Path | None, typer.Argument(metavar="SPEC.toml", help="Settings; flags override them.")]
Engine = Annotated[str, typer.Option(help="local, or ray: the cluster of RAY_ADDRESS, else one on this machine.")]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores; 16 on CUDA]")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds that a run may take; then it has failed. [no limit]")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
ThreadsOfEach = Annotated[int | None, typer.Option(help="CPU threads of each run. [1]")]
Memory = Annotated[int | None, typer.Option(help="MiB beside the uploads of two rounds. [1024; 8192 on CUDA]")]
MemoryOfEach = Annotated[
    int | None, typer.Option(help="MiB of each run beside the uploads of two rounds. [1024; 8192 on CUDA]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


READ = ("spec_file", "delta", "batch", "settings")
"""Flags whose texts are read here, and not by typer."""


@dataclass(frozen=True)
class SpecFlags:
    """What is to be run: a file of settings and the flags that override it. None: not given."""

    spec_file: SpecFile = None
    dataset: Annotated[
        str | None,
        typer.Option(
            *("--dataset", "--data"),
            help="A name of `noisegate list datasets`, a file.npz or file.csv, or a folder with one for each worker.",
        ),
    ] = None
    label_column: Annotated[
        str | None, typer.Option("--label-column", "--label", help="Column of a .csv with the label. [the last]")
    ] = None
    worker_column: Annotated[
        str | None, typer.Option(help="Column of a .csv that says who holds each example. [none]")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="A name of `noisegate list models`, or your own: file.py:build.")
    ] = None
    loss: Annotated[str | None, typer.Option(help="Your own loss: file.py:name. [cross entropy]")] = None
    features: Annotated[
        str | None,
        typer.Option(help="What examples are turned into first: a name of `noisegate list features`, or file.py:name."),
    ] = None
    epsilon: Annotated[float | None, typer.Option(help="Budget of every worker over the whole run. [2]")] = None
    delta: Annotated[
        str | None,
        typer.Option(help="A number, or paper: declared to the power -1.1. [1e-5, or 1 / (10 declared) if less]"),
    ] = None
    sigma: Annotated[
        float | None, typer.Option(help="Noise multiplier, instead of epsilon or beside it; 0 is no privacy.")
    ] = None
    accountant: Annotated[str | None, typer.Option(help="pld or rdp. [pld]")] = None
    sampling: Annotated[str | None, typer.Option(help="poisson, equal or fixed. [poisson]")] = None
    declared: Annotated[
        int | None,
        typer.Option(help="Examples that every worker declares: its rate is batch / declared. [their mean]"),
    ] = None
    secret: Annotated[
        bool | None,
        typer.Option("--secret", help="Noise that nobody can draw again, so that the model can be given away."),
    ] = None
    batch: Annotated[
        str | None, typer.Option(help="Examples per worker and round; or equal: as many for all. [16, by size]")
    ] = None
    rate: Annotated[float | None, typer.Option(help="Base learning rate, scaled to the noise. [0.2]")] = None
    workers: Annotated[int | None, typer.Option(help="Honest workers.")] = None
    byzantine: Annotated[float | None, typer.Option(help="Byzantine share of all workers. [0.6]")] = None
    attack: Annotated[str | None, typer.Option(help="A name of `noisegate list attacks`. [label-flip]")] = None
    attack_start: Annotated[float | None, typer.Option(help="Share of the run before the attack begins. [0]")] = None
    attack_asleep: Annotated[str | None, typer.Option(help="Until then: behave or copy. [behave]")] = None
    aggregator: Annotated[str | None, typer.Option(help="A name of `noisegate list aggregators`. [fortified]")] = None
    worker: Annotated[
        str | None,
        typer.Option(help="A name of `noisegate list workers`. [normalized, or what the aggregator goes with]"),
    ] = None
    gamma: Annotated[float | None, typer.Option(help="Share the server believes honest. [the true one]")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None
    absent: Annotated[float | None, typer.Option(help="Each worker misses each round with this probability. [0]")] = (
        None
    )
    non_iid: Annotated[bool | None, typer.Option("--non-iid/--iid", help="The paper's uneven partition.")] = None
    dirichlet: Annotated[float | None, typer.Option(help="Uneven partition by Dirichlet of this concentration.")] = None
    redeal: Annotated[
        bool | None, typer.Option("--redeal", help="Deal the examples anew although the data say who holds them.")
    ] = None
    auxiliary: Annotated[int | None, typer.Option(help="Examples per class that the server has. [2]")] = None
    auxiliary_from: Annotated[str | None, typer.Option(help="The data set that these are from. [the workers']")] = None
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it. [1]")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PART.KEY=VALUE", help="A setting of attack, aggregator, worker or features."),
    ] = None

    def spec(self) -> Spec:
        """The run that is asked for: the file, then the flags, then --set; each overrides the one before."""
        gathered = read_settings(self.spec_file) if self.spec_file else {}
        own = [entry.name for entry in fields(SpecFlags) if entry.name not in READ]
        given = {name: getattr(self, name) for name in own}
        given |= {"delta": read_delta(self.delta), "batch": read_batch(self.batch)}
        gathered |= {name: value for name, value in given.items() if value is not None}
        for entry in sorted(self.settings or [], key=_settled_last):
            _set(entry, gathered)
        return make_spec(gathered, str(self.spec_file) if self.spec_file else "flags")


def takes(record: type[Record], names: Sequence[str] = ()) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Make a command of a function that takes one record: each field of the record is a flag.

    names: the fields that are flags of this command, in the order in which its help shows them; the others keep their
    defaults. Unless given: all of them.
    """
    known = {entry.name: entry for entry in fields(record)}  # type: ignore[arg-type]
    parameters = []
    for name in names or known:
        default = inspect.Parameter.empty if known[name].default is MISSING else known[name].default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=known[name].type))

    def decorate(function: Callable[[Record], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(record(**given))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
        command.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return command

    return decorate


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
