"""`noisegate publish`: what may be given away of a secret run."""

from pathlib import Path

from noisegate.checks import plain
from noisegate.runs.publish import publish


def publish_command(run: Path, out: Path) -> None:
    """Write what may be given away of a secret run: its model, and what is promised about privacy."""
    folder = publish(run, out)
    for path in sorted(folder.iterdir()):
        print(plain(path))
