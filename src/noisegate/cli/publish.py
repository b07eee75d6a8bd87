"""`noisegate publish`: what may be given away of a secret run."""

from pathlib import Path
from typing import Annotated

import typer

from noisegate.checks import plain
from noisegate.runs.publish import publish


def publish_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run with --secret.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="An empty folder, or one to be made.")],
) -> None:
    """Write what may be given away of a secret run: its model, and what is promised about privacy."""
    folder = publish(run, out)
    for path in sorted(folder.iterdir()):
        print(plain(path))
