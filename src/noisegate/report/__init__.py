"""A run, a sweep, a red team or a federation's server as one HTML page that loads nothing."""

from pathlib import Path

from noisegate.checks import plain
from noisegate.errors import StoreError
from noisegate.files import write_whole
from noisegate.report.federation_page import federation_page, read_server
from noisegate.report.folders import kind_of, read_run
from noisegate.report.redteam_page import read_findings, redteam_page
from noisegate.report.run_page import run_page
from noisegate.report.sweep_page import sweep_page
from noisegate.report.sweeps import read_sweep_folder

__all__ = ["put", "report", "write_report"]


def report(folder: Path, out: Path | None = None) -> str:
    """The page of a folder, whatever it holds. out: where it will be written; its links start there."""
    kind = kind_of(folder)
    if kind == "server":
        return federation_page(read_server(folder)).html()
    if kind == "redteam":
        return redteam_page(read_findings(folder), str(folder)).html()
    if kind == "run":
        return run_page(read_run(folder)).html()
    return sweep_page(read_sweep_folder(folder), out or folder / "report.html").html()


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page to `out`, or to report.html in the folder, and give its path."""
    out = out or folder / "report.html"
    put(out, report(folder, out).encode())
    return out


def put(path: Path, content: bytes) -> None:
    """Write a file, and make its folder. The file appears only once it is whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{plain(path.parent)}: cannot be made ({error.strerror}); choose another place") from None
    write_whole(path, content)
