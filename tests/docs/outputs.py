"""What the pages show as output is what their code prints. `make outputs` writes it anew, `make docs` compares.

`PYTHONPATH=tests python tests/docs/outputs.py README.md` writes that of one page or notebook.

A block below `<!-- test: output -->` is the standard output of the block before it, of its last line if that one has
several commands. The blocks of a page are played in their order and in one folder, as tests/test_pages.py plays them,
but each in a process of its own, as a reader would. Words must be the same; numbers may differ as far as they do
between machines, and times and digests in any way.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from notebooks import NOTEBOOKS, executed, written
from scripts import ROOT
from test_pages import FENCE, PAGES

SHOWN = re.compile(r"^<!-- test: output -->$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FREE = re.compile(r"[\d.]+ (?:ms|s|minutes|seconds)\b|\b(?=[a-f]*\d)[0-9a-f]{10,}\b")
HERE = "skip, played by make outputs"
"""Above a block that takes long, or is no command of noisegate's alone: tests/test_pages.py leaves it out."""

NEAR, FAR = 0.08, 0.25
"""How far numbers may be apart: by this much, or by this share of the larger one."""


def pages() -> list[Path]:
    """Those that show output."""
    return [page for page in PAGES if SHOWN.search(page.read_text(encoding="utf-8"))]


def replayed(page: Path) -> str:
    """The text of a page or of a notebook, with its outputs as they are now."""
    if page.suffix == ".ipynb":
        with tempfile.TemporaryDirectory() as folder:
            return written(executed(page, Path(folder)))
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    last = max(place for place, found in enumerate(blocks) if found["how"] == "output")
    parts, end, printed = [], 0, ""
    with tempfile.TemporaryDirectory() as folder:
        for found in blocks[: last + 1]:
            how = found["how"] or ""
            if how == "output":
                parts += [text[end : found.start("body")], printed]
                end = found.end("body")
            elif how == HERE:
                printed = _played(found, Path(folder), "")
            elif not how.startswith("skip,"):
                printed = _played(found, Path(folder), how)
    return "".join([*parts, text[end:]])


def _played(found: re.Match[str], folder: Path, how: str) -> str:
    if found["file"]:
        (folder / found["file"]).write_text(found["body"], encoding="utf-8")
    if found["kind"] == "bash":
        lines = [line for line in found["body"].replace("\\\n", " ").splitlines() if line.strip()]
        return [_run(f"{line} {how}", folder) for line in lines][-1]
    if found["kind"] == "python" and not found["file"]:
        (folder / "_block.py").write_text(found["body"], encoding="utf-8")
        return _run(f"{sys.executable} _block.py", folder)
    return ""


def _run(line: str, folder: Path) -> str:
    line = re.sub(r"(^|\s)noisegate(?=\s)", rf"\1{sys.executable} -m noisegate", line, count=1)
    fixed = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", line.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT / 'src'}")],
        cwd=folder,
        env=os.environ | fixed | {"NOISEGATE_KEY": str(folder / ".key")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{line}: exit status {done.returncode}: {done.stderr}")
    return "".join(f"{row.rstrip()}\n" for row in done.stdout.replace(f"{folder}/", "").splitlines())


def words_of(text: str) -> str:
    """A text without its numbers and its line breaks."""
    return re.sub(r"\s+", "", NUMBER.sub("#", FREE.sub("~", text)))


def numbers_of(text: str) -> list[float]:
    """The numbers of a text that should be the same everywhere, or nearly."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(FREE.sub("~", text))]


def near(shown: float, printed: float) -> bool:
    """Whether two numbers are so alike that machines may explain the difference."""
    return abs(shown - printed) <= max(NEAR, FAR * max(abs(shown), abs(printed)))


if __name__ == "__main__":
    named = {Path(name).resolve() for name in sys.argv[1:]}
    for each in (page for page in [*pages(), *NOTEBOOKS] if not named or page in named):
        each.write_text(replayed(each), encoding="utf-8")
        print(each.relative_to(ROOT))
