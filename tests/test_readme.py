"""What the README says works: its commands run, its snippets run, its links and targets exist.

A comment right above a fenced block may say how it is tested:
`<!-- test: skip, REASON -->` leaves it out, visibly; `<!-- test: FLAGS -->` adds flags to its `noisegate` commands.
"""

import doctest
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from noisegate.data import SOURCES, verify

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"(?:<!--\s*test:\s*(?P<how>.*?)\s*-->\s*\n)?^(?P<fence>```+)(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
TARGET = re.compile(r"^\s*(?:\$ )?make ((?:[a-z][\w-]* ?)+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    how: str

    @property
    def skip(self) -> str | None:
        return self.how.partition(",")[2].strip() or "marked" if self.how.startswith("skip") else None


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def blocks(page: Path) -> list[Block]:
    return [Block(found["kind"], found["body"], found["how"] or "") for found in FENCE.finditer(read(page))]


def command_lines() -> list[tuple[str, Block]]:
    found = []
    for block in blocks(README):
        if block.kind in ("bash", "console", "sh", "shell"):
            for line in block.body.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ")
                if line.startswith("noisegate "):
                    found.append((line, block))
    return found


def snippets() -> list[Block]:
    return [block for block in blocks(README) if block.kind in ("python", "pycon")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder for all commands, in their order: a later one may build on an earlier one."""
    return tmp_path_factory.mktemp("readme")


def test_the_readme_shows_commands_and_snippets():
    assert README.exists(), "README.md is missing"
    assert any(line.startswith("noisegate run") for line, _ in command_lines())
    assert snippets()


@pytest.mark.parametrize(("line", "block"), command_lines(), ids=[line for line, _ in command_lines()])
def test_a_command_of_the_readme_runs(cli, monkeypatch, place, line, block):
    if block.skip:
        pytest.skip(f"README: {block.skip}")
    words = shlex.split(line, comments=True)[1:]
    if words[:2] == ["data", "fetch"]:
        pytest.skip("needs the network")
    for name in set(words) & SOURCES.keys():
        if any(status != "ok" for _, status in verify(name)):
            pytest.skip(f"the files of {name} are not here")
    if "cuda" in words and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device here")
    monkeypatch.chdir(place)
    monkeypatch.setattr("noisegate.report.numbers.PRIVACY_POINTS", 2)  # tests/test_report.py looks at all of them
    answer = cli(*words, *shlex.split(block.how))
    expected = {0, 1} if words[:2] == ["data", "verify"] else {0}  # 1: some data set is not on this machine
    assert answer.status in expected, answer.err


@pytest.mark.parametrize("block", snippets(), ids=[f"snippet {i}" for i, _ in enumerate(snippets(), 1)])
def test_a_snippet_of_the_readme_runs(monkeypatch, place, block):
    if block.skip:
        pytest.skip(f"README: {block.skip}")
    monkeypatch.chdir(place)
    if ">>>" in block.body:
        test = doctest.DocTestParser().get_doctest(block.body, {}, "README", str(README), 0)
        outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test)
        assert outcome.failed == 0
    else:
        exec(compile(block.body, str(README), "exec"), {"__name__": "__main__"})


def test_the_targets_that_the_readme_names_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", read(ROOT / "Makefile"), re.MULTILINE))
    code = "\n".join(block.body for block in blocks(README))
    named = {word for found in TARGET.findall(code) for word in found.split()}
    named |= set(re.findall(r"`make ([a-z][\w-]*)`", read(README)))
    assert named <= targets, f"no such target: {named - targets}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_local_links_resolve(page):
    text = FENCE.sub("", read(page))
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_page_has_a_table_missing():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        assert "TABLE:" not in page.read_text(encoding="utf-8"), page.name
