"""A hook of mkdocs: links that leave docs/ go on working on the site. mkdocs.yml names it; `make site` runs it.

On a code host a page may link to any file of the repository. A site has what is in docs/ only. So whatever a page
links to is added to the site: the README as the home page, another Markdown file as a page, a picture or a table of
numbers as it is, a notebook or any other file as a page that shows it, and a folder as its README or as a list of its
files. The links are rewritten. One to a file that is not there stays as it is, and `mkdocs build --strict` refuses it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ALWAYS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
"""Pages of the site although they are not in docs/: mkdocs.yml has them in its navigation."""

FENCE = re.compile(r"^(?P<fence>```+).*?^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\]\()(?P<target>[^)\s]+)(?=\)|\s)")
PLAYED = re.compile(r"^<!--\s*test:.*?-->\n", re.MULTILINE)
"""How tests/test_pages.py plays the block below: not for readers."""

RAW = {".csv", ".jsonl", ".json", ".svg", ".png", ".html"}
LINKING = {".md", ".ipynb"}
"""Kinds of pages whose links are followed and rewritten."""

LANGUAGES = {".py": "python", ".toml": "toml", ".service": "ini", ".yml": "yaml"}
LONGEST = 200_000
"""Bytes of a file that is shown as a page; a longer one is copied as it is."""

_origin: dict[str, Path] = {}
"""Where each page of the site is from in the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside docs/."""
    _origin.clear()
    waiting = [
        DOCS / file.src_uri for file in files if file.src_uri.endswith(".md") and not file.inclusion.is_excluded()
    ]
    _origin.update({_address(path): path for path in waiting})
    waiting += [path for name in ALWAYS if _add(path := ROOT / name, files, config)]
    while waiting:
        page = waiting.pop()
        for target in _links(page.read_text(encoding="utf-8")):
            path = _target(page, target)
            if path and not _in_docs(path) and _add(path, files, config) and path.suffix in LINKING:
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page, and takes out what only the tests read."""
    origin = _origin.get(page.file.src_uri)
    if origin is None or origin.suffix not in LINKING:
        return markdown
    here = os.path.dirname(page.file.src_uri)

    def rewritten(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        path = _target(origin, target)
        if path is None or (_in_docs(path) and _in_docs(origin) and path.is_file()):
            return found[0]
        address = os.path.relpath(_address(path), here or ".")
        return f"{found['text']}{address}{'#' + anchor if anchor else ''}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return PLAYED.sub("", "".join([*parts, LINK.sub(rewritten, markdown[end:])]))


def _links(text: str) -> list[str]:
    return [found["target"].partition("#")[0] for found in LINK.finditer(FENCE.sub("", text))]


def _target(page: Path, target: str) -> Path | None:
    """The file or folder of the repository that a link of `page` leads to; none if it leads elsewhere or nowhere."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = (page.parent / unquote(target)).resolve()
    if path.is_dir() and (path / "README.md").exists():
        path = path / "README.md"
    return path if path.is_relative_to(ROOT) and path.exists() else None


def _address(path: Path) -> str:
    """Where a file or folder of the repository is on the site: what mkdocs calls its src_uri."""
    if _in_docs(path):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return name if path.suffix == ".md" or _is_raw(path) else f"files/{name}.md"


def _in_docs(path: Path) -> bool:
    """Whether mkdocs has it already: everything in docs/ but this file."""
    return path.is_relative_to(DOCS) and path != Path(__file__).resolve()


def _is_raw(path: Path) -> bool:
    return path.is_file() and (path.suffix in RAW or path.stat().st_size > LONGEST)


def _add(path: Path, files: Files, config: MkDocsConfig) -> bool:
    """Adds a file or folder of the repository to the site; False if it is there already."""
    address = _address(path)
    if files.get_file_from_path(address):
        return False
    _origin[address] = path
    content = path.read_bytes() if path.suffix == ".md" or _is_raw(path) else _shown(path).encode()
    if path.is_dir():
        for each in _of_folder(path):
            _add(each, files, config)
    files.append(File.generated(config, address, content=content))
    return True


def _shown(path: Path) -> str:
    """A page that shows a file, or lists those of a folder. Search leaves it out."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        here = os.path.dirname(_address(path))
        return head + "".join(
            f"* [{each.name}]({os.path.relpath(_address(each), here)})\n" for each in _of_folder(path)
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return head.partition("# ")[0] + _notebook(json.loads(text))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{head}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _notebook(notebook: dict[str, Any]) -> str:
    """The cells of a notebook, each code cell followed by what it printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            shown = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def _of_folder(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
