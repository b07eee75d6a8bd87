"""The tables of unlike workers are what their script makes of the committed results, as the spec asks."""

import re

import pytest

from scripts import ROOT, script

SPEC, RESULTS = ROOT / "benchmarks" / "unlike.toml", ROOT / "benchmarks" / "unlike.csv"


@pytest.fixture(scope="module")
def withstand():
    return script("withstand")


def test_the_docs_have_the_tables_of_the_results(withstand):
    page = (ROOT / "docs" / "unlike.md").read_text()
    shown = re.search(r"<!-- unlike -->\n(.*)\n<!-- /unlike -->", page, re.DOTALL).group(1)
    rows = withstand.read([RESULTS])
    assert rows
    assert shown.strip() == "\n".join(withstand.measured(table, rows) for table in withstand.tables(SPEC)).strip()


def test_every_result_is_of_a_run_that_is_asked_for(withstand):
    wanted = {spec.name() for spec in withstand.wanted(SPEC)}
    assert set(withstand.read([RESULTS])) <= wanted
