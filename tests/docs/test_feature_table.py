"""The table of what features give is what the script makes of the committed results, and the plot too."""

import re

import pytest

from scripts import ROOT, script

SPEC, RESULTS = ROOT / "benchmarks" / "features.toml", ROOT / "benchmarks" / "features.csv"
PLOT = ROOT / "benchmarks" / "features.svg"


@pytest.fixture(scope="module")
def features():
    return script("features")


def test_the_docs_have_the_table_of_the_results(features):
    page = (ROOT / "docs" / "features.md").read_text()
    shown = re.search(r"<!-- features -->\n(.*)\n<!-- /features -->", page, re.DOTALL).group(1)
    assert shown.strip() == features.markdown(SPEC, features.read([RESULTS])).strip()


def test_every_result_is_of_a_run_that_is_asked_for(features):
    assert set(features.read([RESULTS])) <= {spec.name() for spec in features.wanted(SPEC)}


def test_the_plot_is_that_of_the_results(features):
    assert PLOT.read_text() == features.svg(features.panels(SPEC, features.read([RESULTS])))


def test_every_run_has_the_noise_of_its_epsilon(features):
    for cell in features.cells(SPEC):
        for spec in (*cell.own, *cell.features, *(one for some in cell.attacked.values() for one in some)):
            assert spec.epsilon == cell.epsilon
            assert spec.sigma >= spec.sigma_base > 0
