"""What README.md and docs/*.md show works: their code runs, their commands parse, their links and targets exist.

Fenced blocks of one page are played in their order, in one folder:

* `bash`: every line is a `noisegate` command, which must end well. Variables may stand before it.
* `python`: runs as it stands.
* `toml`: is a spec, or a grid if it has a table [sweep]; it must be valid.
* anything else: `noisegate` commands in it must have flags that exist, scripts and make targets must exist.

A `python` or `toml` block is written to a file if the line above it ends with the file's name, as in "A file `a.py`:".
A comment right above a block changes how it is played: `<!-- test: FLAGS -->` adds flags to its commands, and
`<!-- test: skip, REASON -->` leaves it out.
"""

import importlib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from noisegate.cli import app
from noisegate.runs.spec import read_spec
from noisegate.sweeps.grid import read_sweep

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"(?:^[^\n]*`(?P<file>[\w.]+\.(?:py|toml))`:\n+)?(?:^<!--\s*test:\s*(?P<how>.*?)\s*-->\s*\n)?"
    r"^(?P<fence>```+)(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@dataclass(frozen=True)
class Block:
    """A fenced block. place: the page and the line where it begins."""

    place: str
    kind: str
    body: str
    how: str
    file: str | None

    @property
    def lines(self) -> list[str]:
        """The lines of commands, without those that are empty or only a comment."""
        lines = [line.strip() for line in self.body.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start('fence')) + 1}",
            found["kind"],
            found["body"],
            found["how"] or "",
            found["file"],
        )
        for found in FENCE.finditer(text)
    ]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


RUNNING = [page for page in PAGES if {block.kind for block in blocks(page)} & {"bash", "python", "toml"}]


# --- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUNNING, ids=names(RUNNING))
def test_the_code_of_a_page_runs(cli, monkeypatch, tmp_path, page):
    monkeypatch.setattr("noisegate.report.numbers.PRIVACY_POINTS", 2)  # tests/test_report.py looks at all of them
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    for block in blocks(page):
        if block.how.startswith("skip,"):
            continue
        if block.file:
            Path(block.file).write_text(block.body, encoding="utf-8")
        if block.kind == "bash":
            for line in block.lines:
                play(cli, monkeypatch, line, block)
        elif block.kind == "python" and block.file:
            importlib.invalidate_caches()
            importlib.import_module(block.file.removesuffix(".py"))
        elif block.kind == "python":
            exec(compile(block.body, block.place, "exec"), {"__name__": "__main__"})
        elif block.kind == "toml":
            path = Path(block.file or "block.toml")
            path.write_text(block.body, encoding="utf-8")
            (read_sweep if "[sweep]" in block.body else read_spec)(path)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def play(cli, monkeypatch, line, block):
    words = shlex.split(line, comments=True)
    with monkeypatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        assert words[0] == "noisegate", f"{block.place}: {line}: is no command of noisegate's; call the block text"
        answer = cli(*words[1:], *shlex.split(block.how))
    assert answer.status == 0, f"{block.place}: {line}: {answer.err}"


def test_the_pages_that_teach_show_code():
    for page in (README, ROOT / "docs" / "using.md"):
        assert {"bash", "python", "toml"} <= {block.kind for block in blocks(page)}, page.name


# --- what is shown and not run ---------------------------------------------------------------------------------------


def test_commands_that_are_only_shown_exist():
    shown = [(block, line) for page in PAGES for block in blocks(page) for line in block.lines]
    for block, line in shown:
        first, _, rest = line.partition(" ")
        if first == "make":
            assert set(rest.partition("#")[0].split()) <= TARGETS, f"{block.place}: {line}"
        elif first == "python":
            assert (ROOT / rest.split()[0]).exists(), f"{block.place}: {line}"
        elif first == "noisegate" and block.kind != "bash":
            parse(shlex.split(rest, comments=True), f"{block.place}: {line}")
        elif block.kind == "json":
            json.loads(block.body)
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z][\w-]*)", page.read_text(encoding="utf-8")))
        assert named <= TARGETS, f"{page.name}: no such target: {named - TARGETS}"


def parse(words: list[str], where: str) -> None:
    """Reads the words as the command line would; does nothing."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, where
        command = command.commands[words.pop(0)]
    try:
        command.make_context(where, words)
    except Exception as error:
        error.add_note(where)
        raise


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_local_links_resolve(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
