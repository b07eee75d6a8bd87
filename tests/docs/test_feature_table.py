"""The table of what features give is what the script makes of the committed results, and the plot too."""

import re

import pytest

from scripts import ROOT, script

SPEC, RESULTS = ROOT / "benchmarks" / "features.toml", ROOT / "benchmarks" / "features.csv"
PLOT = ROOT / "benchmarks" / "features.svg"


@pytest.fixture(scope="module")
def features():
    return script("features")


@pytest.mark.parametrize("name", ["features", "attacks"])
def test_the_docs_have_the_tables_of_the_results(features, name):
    page = (ROOT / "docs" / "features.md").read_text()
    shown = re.search(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", page, re.DOTALL).group(1)
    table = {"features": features.markdown, "attacks": features.attacks_markdown}[name]
    assert shown.strip() == table(SPEC, features.read([RESULTS])).strip()


def test_a_row_under_attack_is_of_the_seeds_that_were_run_and_of_their_references(features):
    cell = next(one for one in features.cells(SPEC) if one.data == "digits")
    attack, several = next(iter(cell.attacked.items()))
    rows = {cell.features[seed].name(): {"accuracy": str(value)} for seed, value in enumerate((0.9, 0.5, 0.4))}
    rows |= {several["fortified"][seed].name(): {"accuracy": "0.89"} for seed in (0,)}
    lines = [line for line in features.attacks_markdown(SPEC, rows).splitlines() if " digits " in line]
    assert lines[0].startswith(f"| digits | 2 | {attack} | 1 | 0.900 | 0.890 | 1.0 | reached | missing |")
    assert lines[1].count("missing") == len(lines[1].split("|")) - 5


def test_every_result_is_of_a_run_that_is_asked_for(features):
    assert set(features.read([RESULTS])) <= {spec.name() for spec in features.wanted(SPEC)}


def test_the_plot_is_that_of_the_results(features):
    assert PLOT.read_text() == features.svg(features.panels(SPEC, features.read([RESULTS])))


def test_every_run_has_the_noise_of_its_epsilon(features):
    for cell in features.cells(SPEC):
        for spec in (*cell.own, *cell.features, *cell.under_attack):
            assert spec.epsilon == cell.epsilon
            assert spec.sigma >= spec.sigma_base > 0
