"""The commands of `noisegate data` and `noisegate ledger`."""

from pathlib import Path
from typing import Annotated

import typer

from noisegate.cli.completion import names_of
from noisegate.cli.flags import AsJson, LabelColumn, WorkerColumn
from noisegate.cli.help import HeadedCommand, HeadedGroup
from noisegate.cli.late import done_in

data = typer.Typer(
    cls=HeadedGroup, no_args_is_help=True, rich_markup_mode=None, help="List, verify, fetch or show data sets."
)
Name = Annotated[
    str | None, typer.Argument(help="A data set; all of them if left out.", autocompletion=names_of("datasets"))
]

ledger = typer.Typer(
    cls=HeadedGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, verify or repair the ledger of a data set.",
)
Place = Annotated[Path, typer.Argument(metavar="PATH", help="A worker's folder, or the folder of a ledger.")]


@data.command("list", cls=HeadedCommand)
@done_in("data")
def list_data(as_json: AsJson = False) -> None:
    """Every data set, whether it is here, its license."""


@data.command("verify", cls=HeadedCommand)
@done_in("data")
def verify_data(name: Name = None, as_json: AsJson = False) -> None:
    """Check the files' sums; exit status 1 if a file is missing or damaged."""


@data.command("fetch", cls=HeadedCommand)
@done_in("data")
def fetch_data(name: Name = None, as_json: AsJson = False) -> None:
    """Download from the data sets' public homes and check the sums."""


@data.command("show", cls=HeadedCommand)
@done_in("data")
def show_data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_PATH", help="As --data of a run takes it.", autocompletion=names_of("datasets")
        ),
    ],
    label_column: LabelColumn = None,
    worker_column: WorkerColumn = None,
    seed: Annotated[int, typer.Option(help="Of the run, by which test examples are split off.")] = 1,
    as_json: AsJson = False,
) -> None:
    """What a run would understand of a data set: examples, classes, workers, range, test part, and what looks odd."""


@ledger.command("show", cls=HeadedCommand)
@done_in("ledger")
def show_ledger(
    path: Place,
    delta: Annotated[float | None, typer.Option(help="Price at this delta. [the policy's, or 1e-5]")] = None,
    as_json: AsJson = False,
) -> None:
    """What each run cost an example, what all cost together, and what is left of the budget."""


@ledger.command("verify", cls=HeadedCommand)
@done_in("ledger")
def verify_ledger(path: Place) -> None:
    """Check every line, their chain and the outbox; exit status 1 if anything is wrong."""


@ledger.command("repair", cls=HeadedCommand)
@done_in("ledger")
def repair_ledger(path: Place) -> None:
    """Take a torn last line away, charge what lies in the outbox, and touch nothing else."""
