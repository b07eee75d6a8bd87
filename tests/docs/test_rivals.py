"""The tables of rivals in the docs are what their script makes of the committed results, and these are the spec's."""

import re

import pytest

from noisegate import Spec
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.runs.usual import partner_of
from scripts import ROOT, script

SPEC, RESULTS = ROOT / "benchmarks" / "rivals.toml", ROOT / "benchmarks" / "rivals.csv"


@pytest.fixture(scope="module")
def rivals():
    return script("rivals")


def test_the_docs_have_the_tables_of_the_results(rivals):
    page = (ROOT / "docs" / "rivals.md").read_text()
    shown = re.search(r"<!-- rivals -->\n(.*)\n<!-- /rivals -->", page, re.DOTALL).group(1)
    assert shown.strip() == rivals.tables(rivals.read(RESULTS)).strip()


def test_the_readme_quotes_them(rivals):
    means = {}
    for row in rivals.read(RESULTS):
        means.setdefault(rivals.key_of(row)[:3], []).append(row)
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| | nobody attacks |") :].split("\n\n")[0].splitlines()
    attacks = ["none", *(word.strip() for word in table[0].split("|")[3:-1])]
    for line in table[2:]:
        aggregator, *cells = (word.strip() for word in line.split("|")[1:-1])
        aggregator = aggregator.replace("`", "").replace("two-stage, normalized", "two-stage (normalized)")
        for attack, cell in zip(attacks, cells, strict=True):
            assert rivals.summary(means["0.6", aggregator, attack]).split()[0] == cell, (aggregator, attack)


def test_every_run_was_made_with_the_settings_that_its_name_has_today(rivals):
    grid = rivals.grid(SPEC)
    assert [rivals.key_of(settings) for settings in grid] == [rivals.key_of(row) for row in rivals.read(RESULTS)]
    assert {settings["attack"] for settings in grid} <= set(ATTACKS)
    for settings in grid[:: len(grid) // 40]:
        spec, brought = Spec(**settings), partner_of(settings["aggregator"])
        assert (spec.batch, spec.rate) == (brought.get("batch", 16), brought.get("rate", 0.2)), "as when it was made"
        assert spec.delta == "paper"


def test_no_run_spent_more_than_it_was_given(rivals):
    assert all(0 < float(row["epsilon"]) <= 2 for row in rivals.read(RESULTS))


def test_every_aggregator_is_in_them(rivals):
    """A new aggregator may stand in the catalog before it was measured: that is said, and is no failure."""
    names = [settings["aggregator"] for settings in rivals.grid(SPEC)]
    measured = {name if isinstance(name, str) else name["name"] for name in names}
    assert measured <= set(AGGREGATORS)
    if measured < set(AGGREGATORS):
        pytest.skip(f"not measured yet: {', '.join(sorted(set(AGGREGATORS) - measured))}")
