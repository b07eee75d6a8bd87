"""All commands: what can be typed. What a command does is imported when it is called, and not for its help."""

from pathlib import Path
from typing import Annotated

import typer

from noisegate.cli import records
from noisegate.cli.declared import data, federation
from noisegate.cli.flags import AsJson, Threads, takes
from noisegate.cli.help import HeadedCommand, HeadedGroup
from noisegate.cli.late import done_in
from noisegate.version import __version__

SIMULATE, LOOK, DEPLOY, KNOW = "Simulate", "Look at results", "Run a federation", "Find out"
LISTED = ("datasets", "models", "features", "workers", "attacks", "aggregators", "experiments")

app = typer.Typer(
    cls=HeadedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
Watched = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder or a sweep folder.")]


@app.command("run", cls=HeadedCommand, rich_help_panel=SIMULATE)
@takes(records.RunFlags)
@done_in("run")
def run_command(flags: records.RunFlags) -> None:
    """Train privately under attack. Without settings: digits, 10 honest workers, 60 % label flippers, epsilon 2."""


@app.command("redteam", cls=HeadedCommand, rich_help_panel=SIMULATE)
@takes(records.RedteamFlags)
@done_in("redteam")
def redteam_command(flags: records.RedteamFlags) -> None:
    """Search for the attack that harms a configuration most: every attack there is, then settings of the worst.

    SPEC.toml and flags say what is attacked, as in `run`; --attack, with its settings, is only the first to be tried.
    """


@app.command("sweep", cls=HeadedCommand, rich_help_panel=SIMULATE)
@takes(records.SweepFlags)
@done_in("sweep")
def sweep_command(given: records.SweepFlags) -> None:
    """Run every combination of the values under [sweep]. The same command goes on where it was interrupted."""


@app.command("reproduce", cls=HeadedCommand, rich_help_panel=SIMULATE)
@takes(records.ReproduceFlags)
@done_in("reproduce")
def reproduce_command(given: records.ReproduceFlags) -> None:
    """Run the paper's experiments and compare. Exit 1 if a cell is outside its tolerance, missing or failed."""


@app.command("report", cls=HeadedCommand, rich_help_panel=LOOK)
@done_in("report")
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `noisegate run`, `sweep`, `redteam` or `serve` left.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page. [DIR/report.html]")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write PNG and SVG figures here; needs noisegate[figures].")
    ] = None,
) -> None:
    """Make one HTML page of a run, a sweep, a red team or a federation's server; it loads nothing from anywhere."""


@app.command("watch", cls=HeadedCommand, rich_help_panel=LOOK)
@done_in("watch")
def watch_command(
    folder: Watched,
    once: Annotated[bool, typer.Option("--once", help="Print how far it is and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a run or a sweep from its folder until it is done. Ctrl-C leaves, and the job goes on."""


@app.command("publish", cls=HeadedCommand, rich_help_panel=LOOK)
@done_in("publish")
def publish_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run with --secret.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="An empty folder, or one to be made.")],
) -> None:
    """Write what may be given away of a secret run: its model, and what is promised about privacy."""


@app.command("audit", cls=HeadedCommand, rich_help_panel=KNOW)
@takes(records.AuditFlags, names=(*records.AUDITED, "trials", "device", "threads", "out", "as_json"))
@done_in("audit")
def audit_command(flags: records.AuditFlags) -> None:
    """Try to refute the privacy claim. Exit status 1: refuted. An attack that fails proves nothing."""


@app.command("privacy", cls=HeadedCommand, rich_help_panel=KNOW)
@takes(records.PrivacyFlags)
@done_in("privacy")
def show_privacy(flags: records.PrivacyFlags) -> None:
    """Calibrate the noise for a budget, or price a given noise."""


@app.command("list", cls=HeadedCommand, rich_help_panel=KNOW)
@done_in("listing")
def show_list(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(LISTED[:-1])} or {LISTED[-1]}.",
            autocompletion=lambda incomplete: [word for word in LISTED if word.startswith(incomplete)],
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List what a run can be made of."""


app.add_typer(data.data, name="data", rich_help_panel=KNOW)


@app.command("serve", cls=HeadedCommand, rich_help_panel=DEPLOY)
@done_in("serve")
def serve_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A server folder: federation.toml, roster.toml, keys, auxiliary.npz.")
    ],
) -> None:
    """Run a federation: wait for workers, send models, judge uploads. Started again, it goes on where it was."""


@app.command("join", cls=HeadedCommand, rich_help_panel=DEPLOY)
@done_in("join")
def join_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of workers; several of them take part from one process."),
    ],
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a federation: agree to the server's terms if the folder's policy allows them, then answer models
    until the run is over or the budget is spent.

    A worker that is stopped, however, goes on with the same command. The last model is written to model.safetensors.
    """


app.add_typer(federation.app, name="federation", rich_help_panel=DEPLOY)
app.add_typer(data.ledger, name="ledger", rich_help_panel=DEPLOY)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning that is differentially private for every worker and survives a majority of Byzantine
    workers.
    """
