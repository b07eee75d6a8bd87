"""All commands. To import this is to import torch."""

from typing import Annotated

import typer

from noisegate.cli.audit import audit_command
from noisegate.cli.data import app as data_app
from noisegate.cli.federation import app as federation_app
from noisegate.cli.join import join_command
from noisegate.cli.ledger import app as ledger_app
from noisegate.cli.listing import show_list
from noisegate.cli.privacy import show_privacy
from noisegate.cli.publish import publish_command
from noisegate.cli.redteam import redteam_command
from noisegate.cli.report import report_command
from noisegate.cli.reproduce import reproduce_command
from noisegate.cli.run import run_command
from noisegate.cli.serve import serve_command
from noisegate.cli.sweep import sweep_command
from noisegate.cli.watch import watch_command
from noisegate.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run_command)
app.command("redteam")(redteam_command)
app.command("sweep")(sweep_command)
app.command("reproduce")(reproduce_command)
app.command("report")(report_command)
app.command("watch")(watch_command)
app.command("publish")(publish_command)
app.command("audit")(audit_command)
app.command("serve")(serve_command)
app.command("list")(show_list)
app.command("privacy")(show_privacy)
app.command("join")(join_command)
app.add_typer(federation_app, name="federation")
app.add_typer(data_app, name="data")
app.add_typer(ledger_app, name="ledger")


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
