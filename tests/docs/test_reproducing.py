"""docs/reproducing.md is what `noisegate reproduce` makes of the committed runs, and these are the ones asked for."""

from noisegate import paper
from noisegate.paper.claims import claims
from noisegate.paper.comparison import page
from noisegate.paper.outcomes import from_csv, outcomes
from scripts import ROOT, script

SOURCE = "benchmarks/reproduced.csv"


def test_the_docs_have_the_tables_of_the_results():
    records = from_csv((ROOT / SOURCE).read_text(), SOURCE)
    chosen = [paper.load(name) for name in paper.names()]
    found = {one.name: outcomes(one, records) for one in chosen}
    assert (ROOT / "docs" / "reproducing.md").read_text() == page(chosen, found, claims(found), records, SOURCE)


def test_every_result_is_of_a_run_that_is_asked_for():
    reproduce = script("reproduce")
    wanted = {spec.name() for spec in reproduce.wanted(ROOT / "benchmarks" / "reproduce.toml")}
    assert set(reproduce.read([ROOT / SOURCE])) <= wanted
