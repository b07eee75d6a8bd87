"""Flags of the command line. Each is declared once; a command takes one record of those that it has.

Nothing here imports torch: what a flag means is found out in reading.py, when a command is called.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from noisegate.cli.completion import names_of

if TYPE_CHECKING:
    from noisegate.runs import Spec

Record = TypeVar("Record")

DATA, PRIVACY, TRAINING, HOSTILE, MACHINE, OUTPUT = (
    "Data and model",
    "Privacy",
    "Training",
    "Attack and defense",
    "Machine",
    "Output",
)
"""Under which headings the help of a command shows its flags."""


def flag(panel: str, help: str, *names: str, **more: Any) -> Any:  # the word of typer
    """A flag, shown under the heading `panel`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


SpecFile = Annotated[Path | None, typer.Argument(metavar="SPEC.toml", help="Settings; flags override them.")]
Engine = Annotated[
    str, flag(MACHINE, "local, or ray: the cluster of RAY_ADDRESS, else one on this machine.", metavar="NAME")
]
Jobs = Annotated[int | None, flag(MACHINE, "Runs at a time. [as many as cores; 16 on CUDA]")]
TimeLimit = Annotated[float | None, flag(MACHINE, "Seconds that a run may take; then it has failed. [no limit]")]
Device = Annotated[str, flag(MACHINE, "auto, cpu or cuda.", metavar="NAME", autocompletion=names_of("devices"))]
Threads = Annotated[int | None, flag(MACHINE, "CPU threads.")]
ThreadsOfEach = Annotated[int | None, flag(MACHINE, "CPU threads of each run. [1]")]
Memory = Annotated[int | None, flag(MACHINE, "MiB beside the uploads of two rounds. [1024; 8192 on CUDA]")]
MemoryOfEach = Annotated[
    int | None, flag(MACHINE, "MiB of each run beside the uploads of two rounds. [1024; 8192 on CUDA]")
]
LabelColumn = Annotated[
    str | None, flag(DATA, "Column of a .csv with the label. [the last]", "--label-column", "--label")
]
WorkerColumn = Annotated[
    str | None, flag(DATA, "Column of a .csv that says who holds each example. [worker, if there is one]")
]
AsJson = Annotated[bool, flag(OUTPUT, "Print one JSON object and nothing else.", "--json")]

READ = ("spec_file", "delta", "batch", "settings")
"""Flags whose texts are read in reading.py, and not by typer."""


@dataclass(frozen=True)
class SpecFlags:
    """What is to be run: a file of settings and the flags that override it. None: not given."""

    spec_file: SpecFile = None
    dataset: Annotated[
        str | None,
        flag(
            DATA,
            "A name of `noisegate list datasets`, a file.npz or file.csv, or a folder with one for each worker.",
            *("--dataset", "--data"),
            autocompletion=names_of("datasets"),
        ),
    ] = None
    label_column: LabelColumn = None
    worker_column: WorkerColumn = None
    model: Annotated[
        str | None,
        flag(DATA, "A name of `noisegate list models`, or your own: file.py:build.", autocompletion=names_of("models")),
    ] = None
    loss: Annotated[str | None, flag(DATA, "Your own loss: file.py:name. [cross entropy]")] = None
    features: Annotated[
        str | None,
        flag(
            DATA,
            "What examples are turned into first: a name of `noisegate list features`, or file.py:name.",
            autocompletion=names_of("features"),
        ),
    ] = None
    epsilon: Annotated[float | None, flag(PRIVACY, "Budget of every worker over the whole run. [2]")] = None
    delta: Annotated[
        str | None,
        flag(
            PRIVACY,
            "A number, or paper: declared to the power -1.1. [1e-5, or 1 / (10 declared) if less]",
            metavar="NUMBER",
        ),
    ] = None
    sigma: Annotated[
        float | None, flag(PRIVACY, "Noise multiplier, instead of epsilon or beside it; 0 is no privacy.")
    ] = None
    accountant: Annotated[
        str | None, flag(PRIVACY, "pld or rdp. [pld]", metavar="NAME", autocompletion=names_of("accountants"))
    ] = None
    sampling: Annotated[
        str | None,
        flag(
            PRIVACY,
            "poisson, balanced, equal or fixed. [poisson]",
            metavar="NAME",
            autocompletion=names_of("samplings"),
        ),
    ] = None
    class_shares: Annotated[
        str | None,
        flag(PRIVACY, "Public shares of the classes, for balanced: 0.95,0.05. [the data's]", metavar="NUMBERS"),
    ] = None
    declared: Annotated[
        int | None,
        flag(PRIVACY, "Examples that every worker declares: its rate is batch / declared. [their mean]"),
    ] = None
    secret: Annotated[
        bool | None,
        flag(PRIVACY, "Noise that nobody can draw again, so that the model can be given away.", "--secret"),
    ] = None
    batch: Annotated[
        str | None,
        flag(TRAINING, "Examples per worker and round; or equal: as many for all. [16, by size]", metavar="NUMBER"),
    ] = None
    rate: Annotated[float | None, flag(TRAINING, "Base learning rate, scaled to the noise. [0.2]")] = None
    workers: Annotated[int | None, flag(TRAINING, "Honest workers.")] = None
    byzantine: Annotated[float | None, flag(HOSTILE, "Byzantine share of all workers. [0.6]")] = None
    attack: Annotated[
        str | None,
        flag(HOSTILE, "A name of `noisegate list attacks`. [label-flip]", autocompletion=names_of("attacks")),
    ] = None
    attack_start: Annotated[float | None, flag(HOSTILE, "Share of the run before the attack begins. [0]")] = None
    attack_asleep: Annotated[
        str | None, flag(HOSTILE, "Until then: behave or copy. [behave]", autocompletion=names_of("asleep"))
    ] = None
    aggregator: Annotated[
        str | None,
        flag(HOSTILE, "A name of `noisegate list aggregators`. [fortified]", autocompletion=names_of("aggregators")),
    ] = None
    worker: Annotated[
        str | None,
        flag(
            TRAINING,
            "A name of `noisegate list workers`. [normalized, or what the aggregator goes with]",
            autocompletion=names_of("workers"),
        ),
    ] = None
    gamma: Annotated[float | None, flag(HOSTILE, "Share the server believes honest. [the true one]")] = None
    rounds: Annotated[int | None, flag(TRAINING, "Rounds of training.")] = None
    absent: Annotated[float | None, flag(TRAINING, "Each worker misses each round with this probability. [0]")] = None
    non_iid: Annotated[bool | None, flag(DATA, "The paper's uneven partition.", "--non-iid/--iid")] = None
    dirichlet: Annotated[float | None, flag(DATA, "Uneven partition by Dirichlet of this concentration.")] = None
    redeal: Annotated[
        bool | None, flag(DATA, "Deal the examples anew although the data say who holds them.", "--redeal")
    ] = None
    auxiliary: Annotated[int | None, flag(DATA, "Examples per class that the server has. [2]")] = None
    auxiliary_from: Annotated[
        str | None,
        flag(DATA, "The data set that these are from. [the workers']", autocompletion=names_of("datasets")),
    ] = None
    metrics: Annotated[
        list[str] | None,
        flag(
            TRAINING,
            "Measured too: balanced_accuracy, auc, recall-1, or file.py:name.",
            "--metric",
            metavar="NAME",
            autocompletion=names_of("metrics"),
        ),
    ] = None
    seed: Annotated[int | None, flag(TRAINING, "Everything random follows from it. [1]")] = None
    settings: Annotated[
        list[str] | None,
        flag(
            TRAINING,
            "A setting of attack, aggregator, worker or features.",
            "--set",
            metavar="PART.KEY=VALUE",
        ),
    ] = None

    def spec(self) -> "Spec":
        """The run that is asked for: the file, then the flags, then --set; each overrides the one before."""
        from noisegate.cli.reading import spec_of

        return spec_of(self)


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
