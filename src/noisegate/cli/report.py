"""`noisegate report`: a run, a sweep, a red team or a federation's server as one HTML page, and as figures."""

from pathlib import Path

from noisegate.report import write_report


def report_command(folder: Path, out: Path | None, figures: Path | None) -> None:
    """Make one HTML page of a run, a sweep, a red team or a federation's server; it loads nothing from anywhere."""
    written = []
    if figures is not None:
        from noisegate.report.figures import write_figures  # which most reports do without

        written = write_figures(folder, figures)
    print(write_report(folder, out))
    for path in written:
        print(path)
