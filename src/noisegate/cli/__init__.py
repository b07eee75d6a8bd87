"""The command line. Results go to standard output, everything else to standard error.

Exit status: 0 fine, 1 a result outside its bounds, 2 bad input, 130 interrupted (state saved).
"""

import sys

import typer

from noisegate.cli.data import app as data_app
from noisegate.cli.listing import show_list
from noisegate.cli.privacy import show_privacy
from noisegate.cli.run import run_command
from noisegate.errors import NoisegateError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning that is differentially private for every worker and survives a majority of liars.",
)
app.command("run")(run_command)
app.command("list")(show_list)
app.command("privacy")(show_privacy)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line; an error that noisegate raises on purpose is one line and exit status 2."""
    try:
        app()
    except NoisegateError as error:
        print(f"noisegate: {error}", file=sys.stderr)
        sys.exit(2)
