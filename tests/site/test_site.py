"""The site that `make site` built: it needs no network, its links lead somewhere, and it has what it should have."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import noisegate
from test_browser import NAMES, PATIENCE, Browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""What a browser asks for by itself, and by which attribute."""


class Html(HTMLParser):
    """What a page loads, where it links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = {"", "__tabbed"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.names.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADS and LOADS[tag] in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Html]:
    assert SITE.is_dir(), "there is no site: make site builds it"
    return {path: Html(path) for path in SITE.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(pages):
    for path, page in pages.items():
        for target in page.loads:
            assert not re.match(r"(?!data:)\w+:|//", target), f"{path.name} loads {target}"
    for path in SITE.rglob("*.css"):
        for target in re.findall(r"url\(['\"]?([^)'\"]+)", path.read_text(encoding="utf-8")):
            assert not re.match(r"https?:|//", target), f"{path.name} loads {target}"


def test_every_link_leads_somewhere(pages):
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the site's root, wherever that is
            continue
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(SITE)} links to {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].names, f"{path.relative_to(SITE)} links to {link}"


def test_whatever_python_gives_is_in_the_api(pages):
    """A new name in noisegate.__all__ needs a line `::: noisegate.NAME` in a page of docs/api/."""
    named: set[str] = set()
    for path in (ROOT / "docs" / "api").glob("*.md"):
        shown = re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        built = SITE / "api" / ("index.html" if path.stem == "README" else f"{path.stem}.html")
        for name in shown:
            assert any(known.endswith(f".{name.rpartition('.')[2]}") for known in pages[built].names), name
        named.update(shown)
    assert {f"noisegate.{name}" for name in noisegate.__all__} <= named


def test_the_home_page_is_the_readme_and_a_file_of_the_repository_is_shown(pages):
    home = (SITE / "index.html").read_text(encoding="utf-8")
    heading = re.search(r"^## (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f">{heading}<" in home
    assert "test:" not in re.sub(r"<(script|pre).*?</\1>", "", home, flags=re.DOTALL), "comments for the tests"
    assert "Judges one round" in (SITE / "files/src/noisegate/roles.py.html").read_text(encoding="utf-8")


def test_search_knows_every_page_but_shown_files(pages):
    index = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))
    known = {entry["location"].partition("#")[0] for entry in index["docs"]}
    wanted = {path.relative_to(SITE).as_posix() for path in pages if path.name != "404.html"}
    wanted = {name for name in wanted if not name.startswith("files/")}
    assert known == wanted


def test_search_finds_in_a_page_that_was_opened_as_a_file(tmp_path):
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no browser here")
    browser = Browser(program, tmp_path)
    try:
        browser.look(SITE / "index.html")
        until = time.monotonic() + PATIENCE
        while not browser.evaluate("document.querySelectorAll('.md-search-result__item a').length"):
            assert time.monotonic() < until, "search finds nothing"  # what is typed before search is ready is lost
            browser.evaluate("document.querySelector('.md-search__input').select()")
            browser.ask("Input.insertText", text="ledger charge")
            time.sleep(0.5)
        found = browser.evaluate("document.querySelector('.md-search-result__item a').href")
        assert "/ledger.html" in found
        assert not browser.complaints()
        assert not [url for url in browser.requests() if not url.startswith("file:")]
    finally:
        browser.close()
