"""docs/reproducing.md and its cells are what `noisegate reproduce` makes of the committed runs."""

from noisegate import paper
from noisegate.paper.claims import claims
from noisegate.paper.comparison import cells_csv
from noisegate.paper.outcomes import from_csv, outcomes
from noisegate.paper.page import page
from scripts import ROOT, script

SOURCE, CELLS = "benchmarks/reproduced.csv", "benchmarks/reproduced_cells.csv"


def test_the_page_and_its_cells_are_what_the_runs_give():
    records = from_csv((ROOT / SOURCE).read_text(), SOURCE)
    chosen = [paper.load(name) for name in paper.names()]
    found = {one.name: outcomes(one, records) for one in chosen}
    made = page(chosen, found, claims(found), records, SOURCE, CELLS)
    assert (ROOT / "docs" / "reproducing.md").read_text() == made
    assert (ROOT / CELLS).read_text() == cells_csv(chosen, found)


def test_every_result_is_of_a_run_that_is_asked_for():
    reproduce = script("reproduce")
    wanted = {spec.name() for spec in reproduce.wanted(ROOT / "benchmarks" / "reproduce.toml")}
    assert set(reproduce.read([ROOT / SOURCE])) <= wanted
