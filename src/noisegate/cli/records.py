"""The flags of the larger commands. What they mean is found out by the module of each command."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisegate.cli import flags
from noisegate.cli.completion import names, names_of
from noisegate.cli.flags import MACHINE, OUTPUT, PRIVACY, SpecFlags, flag
from noisegate.usual import BUDGET, PAPER_AGGREGATOR, PAPER_SEEDS, QUICK_SEEDS, SHARES

if TYPE_CHECKING:
    from noisegate.runs import Spec

SEARCH, CHOICE = "Search", "What is compared"
PORT = 7443
WORKERS, BYZANTINE = 5, 0.4
"""Of a trial, unless told otherwise: every worker is a process."""

UNFIT = ("secret", "sampling", "class_shares", "accountant", "absent")
"""Settings that a federation does not leave open: noise is secret, batches are Poisson's, absence is real."""


@dataclass(frozen=True)
class RunFlags(SpecFlags):
    """The flags of `noisegate run`."""

    device: flags.Device = "auto"
    threads: flags.Threads = None
    memory: flags.Memory = None
    out: Annotated[Path | None, flag(OUTPUT, "Run folder. [runs/NAME]")] = None
    resume: Annotated[bool, flag(OUTPUT, "Go on where an interrupted run stopped.", "--resume")] = False
    baselines: Annotated[
        bool | None, flag(OUTPUT, "Also run without attack and without defense. [yes, but not with --json]")
    ] = None
    price: Annotated[
        bool, flag(OUTPUT, "Also run without noise and attackers, which shows what privacy costs.", "--price")
    ] = False
    as_json: Annotated[bool, flag(OUTPUT, "Print the result as one JSON object and nothing else.", "--json")] = False


@dataclass(frozen=True)
class AuditFlags(SpecFlags):
    """The flags of `noisegate audit`. It takes no others of `SpecFlags` than those in `AUDITED`."""

    secret: Annotated[bool | None, flag(PRIVACY, "Audit noise that nobody can draw again.", "--secret")] = None
    trials: Annotated[
        int | None, flag(SEARCH, "Workers that hold a canary or do not. [4000; fewer for a large model]")
    ] = None
    device: flags.Device = "auto"
    threads: flags.Threads = None
    out: Annotated[Path | None, flag(OUTPUT, "Folder for audit.json and audit.html, a plot.")] = None
    as_json: flags.AsJson = False


AUDITED = (
    *(
        "spec_file",
        "dataset",
        "model",
        "loss",
        "epsilon",
        "delta",
        "sigma",
        "accountant",
        "sampling",
        "batch",
        "workers",
    ),
    *("worker", "rounds", "declared", "secret", "seed", "settings"),
)
"""The flags of a spec that a privacy claim depends on, in the order of the help."""


@dataclass(frozen=True)
class RedteamFlags(SpecFlags):
    """The flags of `noisegate redteam`: those of a spec, and how to search."""

    device: flags.Device = "auto"
    memory: flags.Memory = None
    threads: flags.ThreadsOfEach = None
    budget: Annotated[int, flag(SEARCH, "Most runs of the search, beside two without attack and --seeds.")] = BUDGET
    shares: Annotated[
        str, flag(SEARCH, "Byzantine shares at which the worst attacks are tried too, with commas between them.")
    ] = ",".join(map(str, SHARES))
    objective: Annotated[
        str,
        flag(
            SEARCH,
            "What is to be harmed: accuracy, recall of a class, by a backdoor, or a metric, as balanced_accuracy.",
            metavar=f"[{'|'.join(names('objectives'))}|METRIC]",
            autocompletion=names_of("objectives"),
        ),
    ] = "accuracy"
    seeds: Annotated[
        str, flag(SEARCH, "Other seeds on which the worst case is repeated in the end, as 2,3,4. [none]")
    ] = ""
    jobs: flags.Jobs = None
    time_limit: flags.TimeLimit = None
    out: Annotated[Path | None, flag(OUTPUT, "Folder; a search that is there goes on. [runs/redteam-NAME]")] = None
    as_json: Annotated[bool, flag(OUTPUT, "Print what was found as one JSON object and nothing else.", "--json")] = (
        False
    )


@dataclass(frozen=True)
class SweepFlags:
    """The flags of `noisegate sweep`."""

    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="Settings, and lists under [sweep].")]
    engine: flags.Engine = "local"
    jobs: flags.Jobs = None
    out: Annotated[Path | None, flag(OUTPUT, "Folder; what is done there stays. [runs/sweep-SPEC]")] = None
    device: flags.Device = "auto"
    threads: flags.ThreadsOfEach = None
    memory: flags.MemoryOfEach = None
    time_limit: flags.TimeLimit = None
    dry_run: Annotated[bool, flag(OUTPUT, "Say what would be run, and write nothing.", "--dry-run")] = False
    as_json: Annotated[bool, flag(OUTPUT, "Print what came of it as one JSON object.", "--json")] = False
    csv: Annotated[Path | None, flag(OUTPUT, "Also write a line for each run to this file.")] = None


@dataclass(frozen=True)
class ReproduceFlags:
    """The flags of `noisegate reproduce`. An empty text: not given."""

    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names, as --list shows them. [all that have runs]", autocompletion=names_of("experiments")
        ),
    ] = None
    listing: Annotated[bool, flag(CHOICE, "Show the experiments, their runs and about how long.", "--list")] = False
    quick: Annotated[bool, flag(CHOICE, "A subset on digits, in a few minutes.", "--quick")] = False
    dataset: Annotated[str, flag(CHOICE, "Only these data sets, with commas between them.")] = ""
    epsilon: Annotated[str, flag(CHOICE, "Only these budgets, with commas.")] = ""
    attack: Annotated[str, flag(CHOICE, "Only these attacks, with commas.")] = ""
    byzantine: Annotated[str, flag(CHOICE, "Only these Byzantine shares, with commas.")] = ""
    setting: Annotated[str, flag(CHOICE, "Only iid, or only non-iid.")] = ""
    seeds: Annotated[
        str,
        flag(CHOICE, f"With commas. [{','.join(map(str, PAPER_SEEDS))}; {','.join(map(str, QUICK_SEEDS))} for quick]"),
    ] = ""
    aggregator: Annotated[
        str, flag(CHOICE, "In place of the paper's filter.", autocompletion=names_of("aggregators"))
    ] = PAPER_AGGREGATOR
    engine: flags.Engine = "local"
    jobs: flags.Jobs = None
    device: flags.Device = "auto"
    memory: flags.MemoryOfEach = None
    time_limit: flags.TimeLimit = None
    out: Annotated[Path, flag(OUTPUT, "Folder of the runs; those that are there are not repeated.")] = Path(
        "runs/reproduce"
    )
    source: Annotated[Path | None, flag(OUTPUT, "Compare the runs of this CSV file, and run nothing.", "--from")] = None
    csv: Annotated[Path | None, flag(OUTPUT, "Also write the runs to this file.")] = None
    cells: Annotated[Path | None, flag(OUTPUT, "Also write every cell of the tables to this CSV file.")] = None
    docs: Annotated[Path | None, flag(OUTPUT, "Also write what came out, in short, to this Markdown file.")] = None
    as_json: flags.AsJson = False


@dataclass(frozen=True)
class PrivacyFlags:
    """The flags of `noisegate privacy`."""

    samples: Annotated[
        int,
        typer.Option(
            help="Examples that a worker declares: rate is batch / samples. With equal, fixed: that it holds."
        ),
    ]
    rounds: Annotated[int, typer.Option(help="Rounds of training.")]
    batch: Annotated[int, typer.Option(help="Examples that a worker uses per round, on average.")] = 16
    epsilon: Annotated[float | None, typer.Option(help="Budget: find the noise it needs.")] = None
    sigma: Annotated[float | None, typer.Option(help="Noise multiplier: find what it costs.")] = None
    delta: Annotated[
        str | None,
        typer.Option(help="A number, or paper: samples to the power -1.1. [1e-5, or 1 / (10 samples) if that is less]"),
    ] = None
    sampling: Annotated[
        str,
        typer.Option(
            help="poisson, balanced (needs --class-shares), equal or fixed (needs --accountant rdp).",
            autocompletion=names_of("samplings"),
        ),
    ] = "poisson"
    class_shares: Annotated[
        str | None, typer.Option(help="With balanced: the public shares of the classes, as 0.95,0.05.")
    ] = None
    accountant: Annotated[
        str, typer.Option(help="pld (tight) or rdp (the paper's).", autocompletion=names_of("accountants"))
    ] = "pld"
    signs: Annotated[int, typer.Option(help="Signs per upload, each flipped at random, instead of Gaussian noise.")] = 0
    group: Annotated[
        list[int] | None,
        typer.Option(help="Also price so many examples of one worker together, as 2; may be given several times."),
    ] = None
    as_json: flags.AsJson = False


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the federation.")]
Port = Annotated[int | None, flag(MACHINE, f"Port to listen on; 0 picks a free one. [{PORT}]")]


@dataclass(frozen=True)
class TrialFlags(SpecFlags):
    """The flags of `noisegate federation up`."""

    folder: Folder = field(kw_only=True)
    port: Port = None
    as_json: flags.AsJson = False

    def asked(self) -> "Spec":
        """The run that is asked for. What a trial's folder says counts where no flag is given."""
        from noisegate.deploy import layout

        if self.spec_file is None and (self.folder / layout.TRIAL).is_file():
            return replace(self, spec_file=self.folder / layout.SPEC).spec()
        if self.spec_file is not None:
            return self.spec()
        workers = WORKERS if self.workers is None else self.workers
        return replace(self, workers=workers, byzantine=BYZANTINE if self.byzantine is None else self.byzantine).spec()


@dataclass(frozen=True)
class InitFlags(TrialFlags):
    """The flags of `noisegate federation init`."""

    server_only: Annotated[
        bool, flag(MACHINE, "No workers: they are on other machines. Needs --host and --declared.", "--server-only")
    ] = False
    host: Annotated[
        list[str] | None,
        flag(MACHINE, "With --server-only: a name or address that workers reach the server by; may be repeated."),
    ] = None


def fit(record: type[TrialFlags], *without: str) -> list[str]:
    """The flags of a federation, those of its folder first."""
    own = [entry.name for entry in fields(record) if entry.name not in (*UNFIT, *without)]
    return ["folder", *(name for name in own if name != "folder")]
