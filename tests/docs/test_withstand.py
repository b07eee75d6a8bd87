"""The tables of what fortified withstands are what their script makes of the committed results, as the spec asks."""

import re

import pytest

from noisegate.attacks import ATTACKS
from noisegate.runs import reference
from scripts import ROOT, script

SPEC, RESULTS = ROOT / "benchmarks" / "withstand.toml", ROOT / "benchmarks" / "withstand.csv"


@pytest.fixture(scope="module")
def withstand():
    return script("withstand")


def test_the_docs_have_the_tables_of_the_results(withstand):
    page = (ROOT / "docs" / "withstand.md").read_text()
    shown = re.search(r"<!-- withstand -->\n(.*)\n<!-- /withstand -->", page, re.DOTALL).group(1)
    rows = withstand.read([RESULTS])
    assert shown.strip() == "\n".join(withstand.markdown(table, rows) for table in withstand.tables(SPEC)).strip()


def test_every_result_is_of_a_run_that_is_asked_for(withstand):
    wanted = {spec.name() for spec in withstand.wanted(SPEC)}
    assert set(withstand.read([RESULTS])) <= wanted


def test_every_attack_of_the_catalog_is_in_the_first_table(withstand):
    """A new attack may stand in the catalog before it was measured: that is said, and is no failure."""
    table = withstand.tables(SPEC)[0]
    asked, specs = table.asked, table.specs
    assert asked == 1.0
    assert {spec.seed for spec in specs} == {1, 2, 3}
    measured = {spec.canonical()["attack"]["name"] for spec in specs}
    assert measured <= set(ATTACKS)
    if measured < set(ATTACKS):
        pytest.skip(f"not measured yet: {', '.join(sorted(set(ATTACKS) - measured))}")


def test_a_missing_run_is_shown_and_a_cell_too_far_below_is_said_to_be(withstand):
    table = withstand.tables(SPEC)[0]
    specs = table.specs
    some = [spec for spec in specs if spec.canonical()["attack"]["name"] == "zero"]
    empty = {"honest_rejected": "0", "byzantine_selected": "0", "message": ""}

    def row(spec, accuracy):
        return {spec.name(): {"run": spec.name(), "accuracy": accuracy, **empty}}

    rows = {}
    for spec in some:
        rows |= row(reference(spec), "0.8")
    assert "missing | missing" in withstand.markdown(table._replace(specs=some), rows)
    for accuracy, verdict in (("0.79", "reached"), ("0.785", "**not reached**")):
        for spec in some:
            rows |= row(spec, accuracy)
        assert f"| {verdict} |" in withstand.markdown(table._replace(specs=some), rows)
