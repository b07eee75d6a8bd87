"""The pages in a real browser, if there is one: drawn without a complaint, without a request, and readable.

The browser is spoken to through a pipe, in its own protocol: commands and events, each a JSON value that ends with a
zero byte.
"""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noisegate import Compute, Spec, reference, run
from noisegate.cli.findings import as_json
from noisegate.paper.partition_figure import Distribution
from noisegate.redteam import red_team
from noisegate.report import write_report
from noisegate.report.page import Page, table
from noisegate.report.partition_page import partition_page
from noisegate.report.redteam_page import redteam_page
from noisegate.sweeps.sweep import sweep
from test_redteam import Pretend, planted

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
"""Seconds that a browser gets for an answer, on a machine that has other work too."""

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *(
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ),
)


class Browser:
    """One headless browser with one tab."""

    def __init__(self, program: str, profile: Path) -> None:
        command = [program, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.rest, self.number, self.events, self.session = b"", 0, [], None
        tabs = [found for found in self.ask("Target.getTargets")["targetInfos"] if found["type"] == "page"]
        tab = tabs[0]["targetId"] if tabs else self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{part}.enable")

    def ask(self, method: str, **values: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": values}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while (answer := self.hear()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def hear(self) -> dict[str, Any]:
        """The next message; an event is kept, too."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the browser ended"
            self.rest += more
        line, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def look(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        """Open a page and wait until its charts are drawn."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.prefer(dark)
        self.events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait_until(
            "document.readyState == 'complete' && "
            "(!document.querySelector('.plot') || document.documentElement.dataset.drawn > 0)"
        )

    def wait_until(self, expression: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.02)

    def prefer(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.evaluate("new Promise(seen => requestAnimationFrame(() => setTimeout(seen)))")  # until the page was told

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, errors and warnings since the page was opened."""
        found = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        for event in self.events:
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(event)
            if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                found.append(event)
        return found

    def requests(self) -> list[str]:
        """What was asked for, but for the page itself and what it brings along."""
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls[1:] if not url.startswith(("data:", "blob:"))]

    def screenshot(self) -> bytes:
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)})")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run with long and hostile names, and that of a sweep that is not whole."""
    place = tmp_path_factory.mktemp("pages")
    spec = Spec(
        rounds=8,
        sigma=2.5,
        sigma_base=2.5,
        accountant="rdp",
        aggregator="two-stage",
        attack="gaussian",
        evaluate_every=2,
    )
    run(spec, out=place / "one")
    run(reference(spec), out=place / "one" / "reference")
    (place / "one" / "tables.json").write_text(json.dumps(TABLES))
    specs = [
        replace(spec, aggregator=aggregator, seed=seed, rounds=2) for aggregator in ("mean", "krum") for seed in (1, 2)
    ]
    sweep(specs[:3], place / "many", compute=Compute(device="cpu", threads=1), jobs=1)
    lines = ["[sweep]", 'aggregator = ["mean", "krum"]', "seed = [1, 2]"]
    settings = {
        key: value for key, value in tomllib.loads(specs[0].to_toml()).items() if key not in ("aggregator", "seed")
    }
    flat = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    (place / "many" / "sweep.toml").write_text("\n".join(['attack = "gaussian"', *flat, *lines]))
    return {name: write_report(place / name) for name in ("one", "many")}


LONG = "a-name-without-end-" * 12
TABLES = [
    {
        "title": "<script>document.title = 'broken'</script>",
        "columns": [LONG, "<img src=x onerror=alert(1)>", *map(str, range(30))],
        "rows": [["</script>", LONG, *range(30)]],
        "notes": ["<style>body { display: none }</style>"],
    }
]
DRAWN = "Array.from(document.querySelectorAll('.plot')).map(p => p.querySelectorAll('.main-svg').length)"


@pytest.mark.parametrize("name", ["one", "many"])
def test_every_chart_is_drawn_without_a_complaint_or_a_request(browser, pages, name):
    browser.look(pages[name])
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) >= 2
    assert all(drawn)
    assert browser.complaints() == []
    assert browser.requests() == []


def test_the_browser_sees_complaints_and_requests(browser, tmp_path):
    """Else the test above could not fail."""
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('oh')</script><script>none()</script><img src='https://example.org/x.png'>")
    browser.look(page)
    assert len(browser.complaints()) >= 2
    assert browser.requests() == ["https://example.org/x.png"]


def test_the_charts_show_what_the_run_says(browser, pages):
    browser.look(pages["one"])
    first = browser.evaluate("document.getElementById('chart-1').layout.yaxis.range")
    assert first == [0, 1.005]
    heat = "Array.from(document.querySelectorAll('.plot')).find(plot => plot.data.some(trace => trace.z))"
    cells = browser.evaluate(f"{heat}.data.map(trace => [trace.z.length, trace.z[0].length])")
    assert cells == [[10, 8], [15, 8]], "honest workers, then Byzantine ones, by rounds"
    assert browser.evaluate(f"{heat}.querySelectorAll('image, .hm').length") >= 2


@pytest.mark.parametrize("name", ["one", "many"])
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_down_only(browser, pages, name, width):
    browser.look(pages[name], width=width, height=844, touch=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wide = browser.evaluate("Array.from(document.querySelectorAll('.plot')).map(p => p.getBoundingClientRect().right)")
    assert max(wide) <= width
    assert browser.evaluate(CUT) == [], "a table that is too wide is a list of blocks"
    assert browser.evaluate("document.querySelectorAll('.stacked').length") >= 1


CUT = """Array.from(document.querySelectorAll('.scroll')).filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => box.getAttribute('aria-label'))"""
"""The tables of which something is cut off."""


@pytest.mark.parametrize("width", [375, 768, 1400])
@pytest.mark.parametrize("name", ["one", "many"])
def test_nothing_of_a_table_is_cut_off(browser, pages, name, width):
    browser.look(pages[name], width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    browser.wait_until(f"({CUT}).length == 0")
    if name == "many":
        edges = """Array.from(document.querySelectorAll('[aria-label=results] td'))
            .filter(cell => cell.dataset.name.includes('accuracy')).map(cell => cell.getBoundingClientRect().right)"""
        found = browser.evaluate(edges)
        assert len(found) == 2
        assert 0 < min(found) <= max(found) <= width, "the accuracy is on the screen"
    if name == "many" and width == 1400:
        assert browser.evaluate("document.querySelectorAll('.stacked').length") == 0, "there is room for tables"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 768, 1400])
def test_a_red_team_and_a_partition_look_like_the_other_pages(browser, tmp_path, width, dark):
    found = as_json(red_team(Spec(), Pretend(planted), budget=60), 360)
    shares = Distribution("digits", torch.eye(10) * 0.5 + 0.05, torch.full((10,), 0.1))
    for name, page in (("red", redteam_page(found)), ("partition", partition_page(shares))):
        (tmp_path / f"{name}.html").write_text(page.html())
        browser.look(tmp_path / f"{name}.html", width=width, dark=dark)
        assert all(browser.evaluate(DRAWN))
        assert (browser.complaints(), browser.requests()) == ([], [])
        browser.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
        browser.wait_until(f"({CUT}).length == 0")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert (light(browser.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.05) is dark
        assert browser.evaluate("document.querySelector('.verdict .lead').textContent").endswith(".")


@pytest.mark.parametrize("width", [375, 1400])
def test_a_table_is_sorted_by_mouse_and_keyboard(browser, tmp_path, width):
    page = Page("Sorting")
    long = "x" * (200 if width < 400 else 1)
    rows = [["b 10", "0.5", "x"], ["b 9", "1,000", "x"], ["a", "–", "x"], ["c", "-2 %", long]]
    page.section("Table", table(["name", "number", "words"], rows))
    (tmp_path / "sorting.html").write_text(page.html())
    browser.look(tmp_path / "sorting.html", width=width)
    names = "Array.from(document.querySelectorAll('tbody tr')).map(row => row.cells[0].textContent)"
    order = "Array.from(document.querySelectorAll('th')).map(head => head.getAttribute('aria-sort'))"
    button = "document.querySelectorAll('th button')[{}]"
    browser.evaluate(f"{button.format(1)}.click()")
    assert browser.evaluate(names) == ["c", "b 10", "b 9", "a"], "by numbers, what has none last"
    assert browser.evaluate(order) == [None, "ascending", None]
    browser.evaluate(f"{button.format(1)}.click()")
    assert browser.evaluate(names) == ["b 9", "b 10", "c", "a"], "what has none stays last"
    assert browser.evaluate(order) == [None, "descending", None]
    browser.evaluate(f"{button.format(1)}.click()")
    assert browser.evaluate(names) == ["b 10", "b 9", "a", "c"], "as it was written"
    assert browser.evaluate(order) == [None, None, None]
    browser.evaluate(f"{button.format(0)}.focus()")
    assert browser.evaluate("document.activeElement.textContent") == "name"
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.ask("Input.dispatchKeyEvent", type="keyDown", **key)
    browser.ask("Input.dispatchKeyEvent", type="keyUp", **key)
    browser.wait_until("document.querySelector('th').getAttribute('aria-sort') == 'ascending'")
    assert browser.evaluate(names) == ["a", "b 9", "b 10", "c"], "words with numbers in them, by these"
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    assert browser.complaints() == []


def test_what_users_wrote_stays_text(browser, pages):
    browser.look(pages["one"])
    assert browser.evaluate("document.title").startswith("Run: two-stage against gaussian")
    assert browser.evaluate("document.querySelectorAll('main img, main style').length") == 0
    assert TABLES[0]["title"] in browser.evaluate("document.body.innerText")
    assert browser.evaluate("getComputedStyle(document.body).display") == "block"


def test_dark_and_light_for_the_page_and_its_charts(browser, pages):
    def look() -> tuple[float, float, float, float]:
        page = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        words = browser.evaluate("getComputedStyle(document.body).color")
        chart = browser.evaluate("document.getElementById('chart-1').layout.paper_bgcolor")
        line = browser.evaluate("document.getElementById('chart-1').layout.font.color")
        return light(page), light(words), light(chart), light(line)

    browser.look(pages["one"], dark=True)
    page, words, chart, line = look()
    assert page < 0.05 > chart
    assert words > 0.6 < line
    before = browser.evaluate("document.getElementById('chart-1').layout.paper_bgcolor")
    browser.prefer(False)  # while it is open; the charts are drawn again when the page is told
    browser.wait_until(f"document.getElementById('chart-1').layout.paper_bgcolor != '{before}'")
    page, words, chart, line = look()
    assert page > 0.8 < chart
    assert words < 0.05 > line


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out(browser, pages, dark):
    """A contrast of 4.5 to 1 for words, of 3 to 1 for lines (WCAG 2.1, AA)."""
    browser.look(pages["one"], dark=dark)

    def color(name: str) -> float:
        return light(
            browser.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        )

    for words, behind in [("text", "page"), ("text", "card"), ("quiet", "page"), ("quiet", "card"), ("link", "card")]:
        assert contrast(color(words), color(behind)) >= 4.5, (words, behind)
    assert contrast(color("bad"), color("bad-back")) >= 4.5
    assert contrast(color("text"), color("shade")) >= 4.5
    for line in ("honest", "byzantine", *(f"line-{i}" for i in range(6))):
        assert contrast(color(line), color("card")) >= 3, line


def light(color: str) -> float:
    """Relative luminance of #rrggbb or rgb(r, g, b)."""
    if color.startswith("#"):
        parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = [int(part) for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if (c := part / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_print_is_light_and_fits_the_sheet(browser, pages):
    browser.look(pages["one"], dark=True)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert light(browser.evaluate("document.getElementById('chart-1').layout.paper_bgcolor")) > 0.8
    widths = browser.evaluate(
        "Array.from(document.querySelectorAll('.main-svg')).map(s => s.getBoundingClientRect().width)"
    )
    assert max(widths) <= 680, "A4 within its margins"
    assert browser.evaluate("document.querySelector('details.printed').open")
    hidden = (
        "Array.from(document.querySelectorAll('details:not([open])')).every(d => getComputedStyle(d).display == 'none')"
    )
    assert browser.evaluate(hidden)
    browser.prefer(True)
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert light(browser.evaluate("document.getElementById('chart-1').layout.paper_bgcolor")) < 0.05
    assert base64.b64decode(browser.ask("Page.printToPDF")["data"]).startswith(b"%PDF")
