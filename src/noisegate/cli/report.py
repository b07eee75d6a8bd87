"""`noisegate report`: a run, a sweep or a federation's server as one HTML page, and as figures."""

from pathlib import Path
from typing import Annotated

import typer

from noisegate.report import write_report


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `noisegate run`, `sweep` or `serve` left.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page. [DIR/report.html]")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write PNG and SVG figures here; needs noisegate[figures].")
    ] = None,
) -> None:
    """Make one HTML page of a run, a sweep or a federation's server; it loads nothing from anywhere."""
    written = []
    if figures is not None:
        from noisegate.report.figures import write_figures  # which most reports do without

        written = write_figures(folder, figures)
    print(write_report(folder, out))
    for path in written:
        print(path)
