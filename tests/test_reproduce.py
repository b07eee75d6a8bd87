"""The paper as data, our runs beside it, verdicts and claims, and the command."""

import csv
import functools
import io
import json
import math
import re
from dataclasses import replace
from html import unescape
from statistics import fmean

import pytest
import torch
from typer.testing import CliRunner

from noisegate import SpecError, StoreError, paper
from noisegate.cli import app
from noisegate.paper.claims import claims
from noisegate.paper.comparison import CELL_COLUMNS, as_table, cells_csv, columns, rows
from noisegate.paper.outcomes import CellOutcome, Record, from_csv, needed, outcomes, passed, to_csv, tolerance
from noisegate.paper.page import page
from noisegate.paper.partition_figure import PRIVATE, distribution
from noisegate.privacy import epsilon as spent
from noisegate.runs import reference
from noisegate.runs.estimate import seconds, shown
from noisegate.runs.setup import prepare
from noisegate.sampling import Poisson

load = functools.cache(paper.load)
EXPERIMENTS = [*paper.names(), paper.QUICK]
SIZES = {
    "mnist": (2999, 1500),
    "fashion": (2999, 1500),
    "usps": (727, 455),
    "colorectal": (458, 287),
    "digits": (141, 267),
}


# --- the data --------------------------------------------------------------------------------------------------------


def test_every_experiment_loads_and_says_where_it_is_from():
    for name in EXPERIMENTS:
        found = load(name)
        assert all(len(words) > 5 for words in (found.title, found.paper, found.about)), name
        names = [spec.name() for spec in found.specs]
        assert 0 < len(set(names)) == len(names) == 3 * len(found.cells), name
        assert {(spec.accountant, spec.delta) for spec in found.specs} == {("rdp", "paper")}, name


def test_places_in_the_paper_are_its_numbers_and_no_labels_of_its_source():
    for name in paper.names():
        place = load(name).paper
        assert re.search(r"(Table|Figure)s? \d|Claim \d", place), (name, place)
        assert "_" not in place, (name, place)


def test_every_printed_number_belongs_to_one_cell():
    """No number is lost to a misspelled key."""
    for name in EXPERIMENTS:
        content = paper._read(f"experiments/{name}.toml")
        for table in {"printed", "rival"} & content.keys():
            values = content[table]["values"]
            assert len({tuple(row[:-1]) for row in values}) == len(values), "no cell is printed twice"
            hit = {
                tuple({**content["fixed"], **cell.varies}.get(key, False) for key in content[table]["keys"])
                for cell in load(name).cells
                if getattr(cell, table) is not None
            }
            assert hit == {tuple(row[:-1]) for row in values}, (name, table)
            assert all(0 < row[-1] < 1 for row in values), (name, table)


def test_every_logged_cell_is_one_of_an_experiment():
    """All but those of the adversaries that copy until the end, logged for three attacks, of which we show one."""
    used = set()
    for name in EXPERIMENTS:
        for cell in load(name).cells:
            if cell.logged:
                used.add(cell.logged)
    every = paper._logs()
    left = {key for key, value in every.items() if value not in used}
    non_iid = {key for key in left if key[3] == "non-iid" and key[0] in ("adaptive", "learning-rate")}
    copies = {key for key in left if key[0] == "side-effect" and key[4] != "label-flip"}
    assert left <= non_iid | copies
    assert len(every) == 2240


def test_logs_are_means_over_seeds():
    for logged in paper._logs().values():
        assert 0 <= logged.lowest <= logged.mean + 1e-4
        assert logged.mean <= logged.highest + 1e-4 <= 1
        assert logged.seeds in (3, 5)


def test_numbers_that_can_be_read_in_the_paper():
    """A few of each table, typed again."""

    def printed(name, **varies):
        found = [cell for cell in load(name).cells if all(cell.varies[key] == varies[key] for key in varies)]
        assert len(found) == 1
        return found[0].printed

    assert printed("reference", dataset="usps", epsilon=0.125, non_iid=True) == 0.63
    assert printed("no-privacy", dataset="fashion", non_iid=False) == 0.88
    assert printed("side-effect", dataset="usps", epsilon=0.125, non_iid=False) == 0.58
    assert printed("side-effect", dataset="usps", epsilon=1.0, non_iid=False) is None
    assert printed("adaptive", dataset="colorectal", epsilon=0.125, attack="label-flip", attack_start=0.2) == 0.41
    belief = {"dataset": "usps", "epsilon": 0.125, "attack": "local-poisoning", "gamma": 0.8}
    assert printed("belief", **belief, non_iid=False) == 0.47
    assert printed("belief", **belief, non_iid=True) == 0.43
    assert printed("other-space", dataset="usps", attack="gaussian", byzantine=0.2) == 0.20
    assert printed("guerraoui", attack="a-little", byzantine=0.6) == 0.79
    assert printed("zhu-ling", byzantine=0.4) == 0.86


def test_the_noise_keeps_its_budget_and_wastes_little():
    noise = paper._read("noise.toml")
    assert noise.keys() == SIZES.keys()
    for dataset, (examples, rounds) in SIZES.items():
        for budget in (2.0, 1.0, 0.5, 0.25, 0.125):
            asked = {"examples": examples, "rounds": rounds, "sampling": Poisson(16), "delta": "paper"}
            found = spent(noise[dataset][f"{budget:g}"], **asked, accountant="rdp")
            assert 0.99 * budget <= found <= budget, (dataset, budget)


def test_what_an_experiment_does_not_vary_narrows_it_too():
    assert not paper.load("adaptive", only={"non_iid": [True]}).cells, "it is iid"
    assert not paper.load("no-privacy", only={"epsilon": [0.125]}).cells, "it has no budget"
    assert len(paper.load("convergence", only={"epsilon": [1.0]}).cells) == 8


def test_an_aggregator_that_goes_with_other_workers_judges_the_papers():
    only = {"dataset": ["usps"], "epsilon": [2.0]}
    for aggregator in ("guerraoui", "sign-gaussian", "median"):
        spec = paper.load("attacks", aggregator=aggregator, seeds=[1], only=only).specs[0]
        assert (spec.batch, spec.worker, spec.rate) == (16, "normalized", 0.2), aggregator


def test_an_experiment_can_be_narrowed_and_have_another_aggregator():
    only = {"dataset": ["usps"], "epsilon": [2.0], "non_iid": [False]}
    found = paper.load("attacks", aggregator="fortified", seeds=[7], only=only)
    assert len(found.cells) == 9
    assert {spec.canonical()["aggregator"]["name"] for spec in found.specs} == {"fortified"}
    assert {spec.seed for spec in found.specs} == {7}
    clean = paper.load("reference", aggregator="fortified", only=only)
    assert {spec.canonical()["aggregator"]["name"] for spec in clean.specs} == {"mean"}, "a reference has no filter"
    with pytest.raises(SpecError, match="did you mean 'attacks'"):
        load("attack")


def test_label_flippers_are_on_the_list_of_departures_under_the_papers_filter_only():
    cell = paper.load("attacks", only={"attack": ["label-flip"]}).cells[0]
    assert "whole protocol" in cell.reason
    assert not cell_of("quick", attack="label-flip").reason
    assert not paper.load("attacks", aggregator="fortified", only={"attack": ["label-flip"]}).cells[0].reason
    assert not paper.load("attacks", only={"attack": ["gaussian"]}).cells[0].reason


def test_a_server_with_examples_of_another_shape_is_impossible():
    cell = next(cell for cell in load("other-space").cells if cell.varies["dataset"] == "colorectal")
    assert "one channel" in cell.reason


# --- verdicts --------------------------------------------------------------------------------------------------------


def recorded(cell, *accuracies):
    """Records of a cell's seeds; None for one that is missing."""
    pairs = zip(cell.specs, accuracies, strict=True)
    return {
        spec.name(): Record(spec.name(), "done", accuracy, 0.0, 0.0, 1.0, "cpu", "torch 2")
        for spec, accuracy in pairs
        if accuracy is not None
    }


def cell_of(name, **varies):
    return next(cell for cell in load(name).cells if all(cell.varies.get(key) == varies[key] for key in varies))


def judged(cell, *accuracies, **others):
    experiment = replace(load(cell.experiment), cells=(cell,))
    return outcomes(experiment, recorded(cell, *accuracies) | others)[0]


@pytest.mark.parametrize(
    ("name", "varies", "points"),
    [
        ("reference", {"dataset": "usps", "epsilon": 0.5, "non_iid": False}, 1.5),
        ("reference", {"dataset": "usps", "epsilon": 0.25, "non_iid": False}, 3.0),
        ("reference", {"dataset": "colorectal", "epsilon": 2.0, "non_iid": False}, 4.0),
        ("no-privacy", {"dataset": "usps", "non_iid": False}, 1.5),
        ("attacks", {"dataset": "usps", "epsilon": 0.25, "attack": "gaussian", "byzantine": 0.6}, 2.0),
        ("attacks", {"dataset": "usps", "epsilon": 0.125, "attack": "gaussian", "byzantine": 0.6}, 4.0),
    ],
)
def test_tolerances(name, varies, points):
    cell = replace(cell_of(name, **varies), reason="")  # as if it were on no list of departures
    assert tolerance(cell) == points
    just, beyond = points / 100 - 1e-6, points / 100 + 1e-4
    for off, verdict in ((-just, "within"), (-beyond, "outside")):
        assert judged(cell, *[cell.expected + off] * 3).verdict == verdict
    above = judged(cell, *[cell.expected + beyond] * 3).verdict
    assert above == ("outside" if cell.judged == "reference" else "within"), "an attacked cell may be better"


def test_what_is_expected_is_the_papers_number_or_else_the_authors():
    both = cell_of("side-effect", dataset="usps", epsilon=2.0, non_iid=False)
    assert both.expected == both.printed == 0.87
    assert both.logged is not None
    logged = cell_of("side-effect", dataset="usps", epsilon=1.0, non_iid=False)
    assert logged.printed is None
    assert logged.expected == logged.logged.mean


def test_a_departure_is_shown_with_its_reason_and_does_not_fail():
    cell = cell_of("attacks", dataset="usps", epsilon=2.0, attack="label-flip", byzantine=0.6)
    assert judged(cell, 0.5, 0.5, 0.5).verdict == "outside", "a reason goes so far and no further"
    outcome = judged(cell, *[cell.expected - 0.05] * 3)
    assert outcome.verdict == "departs"
    assert outcome.note == cell.reason
    assert passed([outcome])
    assert judged(cell, *[cell.expected] * 3).verdict == "within", "the list hides nothing"


def test_missing_failed_and_impossible_cells_are_shown_and_the_first_two_fail():
    cell = cell_of("attacks", dataset="usps", epsilon=2.0, attack="gaussian", byzantine=0.6)
    assert (judged(cell, 0.9, None, 0.9).verdict, judged(cell, 0.9, None, 0.9).note) == ("missing", "2 of 3 seeds")
    name = cell.specs[1].name()
    failed = judged(cell, 0.9, None, 0.9, **{name: Record(name, "failed", message="out of memory")})
    assert (failed.verdict, failed.note) == ("failed", "out of memory")
    no = {spec.name(): Record(spec.name(), "skipped", message="needs more attackers") for spec in cell.specs}
    skipped = judged(cell, None, None, None, **no)
    assert (skipped.verdict, skipped.note) == ("impossible", "needs more attackers")
    assert judged(cell, 0.9, None, 0.9, **{name: no[name]}).verdict == "missing", "one seed alone cannot be impossible"
    assert not passed([failed])
    assert not passed([judged(cell, None, None, None)])
    assert not passed([skipped]), "it is not on the list of departures"
    few = cell_of("attacks", dataset="usps", epsilon=2.0, attack="local-poisoning", byzantine=0.2)
    no = {spec.name(): Record(spec.name(), "skipped", message="needs more attackers") for spec in few.specs}
    assert passed([judged(few, None, None, None, **no)])
    experiment = load("attacks")
    assert len(rows(experiment, outcomes(experiment, {}))) == len(experiment.cells)
    assert all("missing" in row[-1] for row in rows(experiment, outcomes(experiment, {})))


def test_every_departure_is_of_some_cell():
    reasons = {cell.reason for name in EXPERIMENTS for cell in load(name).cells}
    assert {entry["reason"] for entry in paper._read("departures.toml")["departure"]} <= reasons
    assert all(entry["points"] >= 0 for entry in paper._read("departures.toml")["departure"])


def test_cells_of_the_quick_subset_are_judged_by_our_own_reference():
    cell = cell_of("quick", attack="gaussian", byzantine=0.6)
    clean = {reference(spec).name(): Record(reference(spec).name(), "done", 0.9) for spec in cell.specs}
    assert judged(cell, 0.83, 0.83, 0.83, **clean).verdict == "within"
    low = judged(cell, 0.81, 0.81, 0.81, **clean)
    assert low.verdict == "outside"
    assert low.difference == pytest.approx(-0.09)
    lacking = judged(cell, 0.1, 0.1, 0.1)
    assert (lacking.verdict, lacking.note) == ("missing", "the reference: 0 of 3 seeds")
    assert not passed([lacking])
    assert {reference(spec).name() for spec in cell.specs} <= {spec.name() for spec in needed(load("quick"))}


def test_runs_survive_a_csv_file():
    cell = cell_of("reference", dataset="usps")
    records = recorded(cell, 0.876543, 0.9, None)
    odd = cell.specs[2].name()
    records[odd] = Record(odd, "failed", message='broke, "badly"\nsomewhere')
    again = from_csv(to_csv(records.values()), "here")
    assert again == records
    assert [row["run"] for row in csv.DictReader(to_csv(records.values()).splitlines()[:2])]
    with pytest.raises(StoreError, match=r"here: is no file of runs"):
        from_csv("a,b\n1,2\n", "here")
    text = to_csv(records.values())
    for old, new in (("0.9,", "7,"), ("0.9,", "nan,"), ("0.9,", "-1,"), (",done,", ",splendid,"), ("0.9,", ",")):
        assert old in text
        with pytest.raises(StoreError, match=r"here: is no file of runs"):
            from_csv(text.replace(old, new, 1), "here")
    assert "\x1b" not in from_csv(text.replace("badly", "\x1b[2J"), "here")[odd].message


# --- claims ----------------------------------------------------------------------------------------------------------


def fake(accuracy):
    """Outcomes of every experiment, from a function of the cell's first spec."""
    found = {}
    for name in paper.names():
        experiment = load(name)
        records = {}
        for cell in experiment.cells:
            records |= recorded(cell, *[accuracy(name, cell)] * 3)
        found[name] = outcomes(experiment, records)
    return found


@pytest.fixture(scope="module")
def perfect():
    return fake(lambda name, cell: 0.9)


def test_with_equal_accuracy_everywhere_every_claim_holds(perfect):
    found = claims(perfect)
    assert [claim.number for claim in found] == list(range(1, 8))
    assert [claim.verdict for claim in found] == ["holds"] * 7


def broken(perfect, name, spoil):
    """`perfect`, but for the cells of one experiment that `spoil` accepts, which are five points lower."""
    some = [replace(one, accuracies=(0.85, 0.85, 0.85)) if spoil(one.cell) else one for one in perfect[name]]
    return {**perfect, name: some}


SPOILED = [
    (1, "clipping", lambda cell: cell.varies["worker"] == "normalized"),
    (3, "side-effect", lambda cell: cell.varies["epsilon"] == 0.5),
    (4, "attacks", lambda cell: cell.varies["byzantine"] == 0.2 and cell.varies["epsilon"] == 2.0),
    (5, "majority", lambda cell: cell.varies["byzantine"] == 0.99),
    (6, "learning-rate", lambda cell: cell.varies["rate"] != 0.8 and cell.varies["epsilon"] == 0.125),
    (7, "adaptive", lambda cell: cell.varies["attack_start"] == 0.4),
]


def test_a_claim_falls_with_the_cells_that_it_rests_on(perfect):
    for number, name, spoil in SPOILED:
        found = claims(broken(perfect, name, spoil))
        assert [claim.number for claim in found if claim.verdict != "holds"] == [number]


def test_what_is_lost_at_an_extreme_budget_is_not_claimed(perfect):
    for name in ("side-effect", "attacks", "majority", "adaptive"):
        found = claims(broken(perfect, name, lambda cell: cell.varies["epsilon"] < 0.5))
        assert all(claim.verdict == "holds" for claim in found)


def test_a_claim_with_missing_runs_is_open(perfect):
    narrowed = {**perfect, "attacks": perfect["attacks"][:5]}
    assert claims(narrowed)[3].verdict == "open", "a claim is about every cell"
    for _, name, _ in SPOILED:
        one = perfect[name][0]
        gone = {**perfect, name: [replace(one, accuracies=one.accuracies[:2]), *perfect[name][1:]]}
        if name != "side-effect" or one.cell.varies["epsilon"] >= 0.5:
            assert "open" in {claim.verdict for claim in claims(gone)}
    assert {claim.verdict for claim in claims({})} == {"open"}


def test_a_part_that_fails_is_enough_and_an_open_claim_says_what_is_known(perfect):
    few = {**perfect, "attacks": perfect["attacks"][:5]}
    assert claims(few)[3].why.startswith("of 216 parts 5 were run: at worst 0.0 points below our reference")
    fallen = claims(broken(few, "attacks", lambda cell: cell.varies["epsilon"] == 2.0))[3]
    assert fallen.verdict == "does not hold"
    assert fallen.why.startswith("of 216 parts 5 were run: at worst 5.0 points below")


def test_a_cell_that_cannot_exist_is_no_part_of_a_claim(perfect):
    first, *others = perfect["attacks"]
    some = [replace(first, verdict="impossible", accuracies=()), *others]
    assert claims({**perfect, "attacks": some})[3].verdict == "holds"


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_has_the_settings_the_numbers_and_a_verdict():
    cell = cell_of("reference", dataset="usps", epsilon=2.0, non_iid=False)
    experiment = replace(load("reference"), cells=(cell,))
    found = outcomes(experiment, recorded(cell, 0.86, 0.87, 0.88))
    names = columns(experiment, found)
    assert names == ["dataset", "epsilon", "non_iid", "paper", "authors' logs", "ours", "difference", "verdict"]
    row = dict(zip(names, rows(experiment, found)[0], strict=True))
    assert row["paper"] == "0.87"
    assert row["ours"] == "0.870 (0.860 to 0.880)"
    assert row["difference"] == "+0.0"
    assert row["verdict"] == "within 1.5"
    assert as_table(experiment, found)["rows"] == rows(experiment, found)
    made = page([experiment], {"reference": found}, [], recorded(cell, 0.86, 0.87, 0.88))
    assert "Runs: 3" in made
    assert "(`reference`) | 1 | 1 | +0.0 |" in made


def test_the_page_is_short_and_every_cell_is_in_a_file():
    cells = [cell_of("reference", dataset=name, epsilon=2.0, non_iid=False) for name in ("usps", "mnist", "fashion")]
    experiment = replace(load("reference"), cells=tuple(cells))
    some = [*recorded(cells[2], 0.8, 0.8, 0.8).items()][:2]
    found = outcomes(experiment, recorded(cells[0], 0.86, 0.87, 0.88) | dict(some))
    made = page([experiment], {"reference": found}, [], {}, "runs.csv", "cells.csv")
    assert "| experiment | cells | within | missing |" in made
    assert "(`reference`) | 3 | 1 | 2 |" in made
    assert "[cells.csv](../cells.csv)" in made
    (line,) = [line for line in made.splitlines() if line.startswith("| `reference` | mnist |")]
    assert line.startswith("| `reference` | mnist | 1 of 1 | 3 |")
    assert line.endswith("| `noisegate reproduce reference --dataset mnist` |")
    assert "| `reference` | fashion | 1 of 1 | 3 |" in made
    assert "| `reference` | usps" not in made
    assert "Departures" not in made
    assert "Outside" not in made
    first, *lines = csv.reader(io.StringIO(cells_csv([experiment], {"reference": found})))
    assert tuple(first) == (*CELL_COLUMNS, "difference", "verdict", "note")
    told = [dict(zip(first, line, strict=True)) for line in lines]
    assert [each["verdict"] for each in told] == ["within", "missing", "missing"]
    assert told[0]["settings"] == "dataset usps; epsilon 2; non_iid no"
    assert [told[0][name] for name in ("paper", "ours", "lowest", "highest", "seeds")] == [
        "0.8700",
        "0.8700",
        "0.8600",
        "0.8800",
        "3",
    ]
    assert (told[1]["ours"], told[1]["seeds"], told[2]["seeds"]) == ("", "0", "2")


def test_a_command_for_missing_cells_has_the_filters_that_leave_them_and_no_others():
    experiment = load("majority")
    some = [cell for cell in experiment.cells if cell.varies["dataset"] in ("usps", "mnist")]

    def is_there(cell):
        return cell.varies["byzantine"] == 0.9 if cell.varies["dataset"] == "usps" else cell.varies["non_iid"]

    records = {}
    for cell in filter(is_there, some):
        records |= recorded(cell, 0.9, 0.9, 0.9)
    experiment = replace(experiment, cells=tuple(some))
    made = page([experiment], {"majority": outcomes(experiment, records)}, [], {})
    assert "`noisegate reproduce majority --dataset usps --byzantine 0.95,0.99`" in made
    assert "`noisegate reproduce majority --dataset mnist --setting iid`" in made


def test_the_page_names_what_is_outside_and_why_others_depart():
    cell = cell_of("reference", dataset="usps", epsilon=2.0, non_iid=False)
    experiment = replace(load("reference"), cells=(cell,))
    (outcome,) = outcomes(experiment, recorded(cell, 0.7, 0.7, 0.7))
    assert outcome.verdict == "outside"
    made = page([experiment], {"reference": [outcome]}, [], {})
    assert "| `reference` | dataset usps, epsilon 2, non_iid no | 0.870 | 0.700 | -17.0 | outside |" in made
    excused = replace(outcome, verdict="departs", note="noise | more of it")
    made = page([experiment], {"reference": [excused, excused]}, [], {})
    assert "Outside" not in made
    assert "| noise \\| more of it | 2 | `reference` | -17.0 |" in made


def test_times_are_for_people():
    assert [shown(value) for value in (None, 0.2, 80.0, 100.0, 3600.0 * 3, 86400.0 * 20)] == [
        "not known",
        "1 s",
        "80 s",
        "1.7 minutes",
        "3.0 hours",
        "20 days",
    ]
    specs = paper.load("attacks", only={"dataset": ["fashion"], "attack": ["gaussian"]}).specs
    more = paper.load("attacks", only={"dataset": ["fashion"], "attack": ["label-flip"]}).specs
    assert 0 < seconds(specs, cuda=False) < seconds(more, cuda=False)
    assert seconds(more, cuda=True) < seconds(more, cuda=False) / 10
    many = paper.load("majority", only={"dataset": ["fashion"], "attack": ["gaussian"], "byzantine": [0.99]}).specs
    assert seconds(many, cuda=True) > 5 * seconds(specs[: len(many)], cuda=True), (
        "uploads that are made up take time too"
    )
    assert seconds([replace(specs[0], dataset="mine.npz", sigma_base=None)], cuda=False) is None


# --- the command -----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], catch_exceptions=False)


def test_the_command_runs_compares_and_leaves_what_it_found(tmp_path):
    """One cell of the quick subset and its reference: two runs."""
    chosen = ["--quick", "--seeds", "1", "--attack", "gaussian", "--byzantine", "0.6", "--jobs", "1"]
    found = call(*chosen, "--out", tmp_path / "store", "--csv", tmp_path / "runs.csv", "--json")
    assert found.exit_code == 0
    told = json.loads(found.stdout)
    assert told["passed"]
    assert told["trainings"] == 2
    assert [row["data"] for row in told["together"]] == ["digits"]
    (cell,) = told["experiments"][0]["cells"]
    assert cell["verdict"] == "within"
    assert len(cell["ours"]) == 1
    assert math.isclose(cell["mean"], fmean(cell["ours"]))
    tables = json.loads((tmp_path / "store" / "tables.json").read_text())
    assert tables[0]["title"] == "A subset on digits"
    again = call(
        *chosen, "--from", tmp_path / "runs.csv", "--docs", tmp_path / "page.md", "--cells", tmp_path / "c.csv"
    )
    assert again.exit_code == 0
    assert "within" in again.stdout
    assert "trainings on" not in again.stdout, "nothing was trained"
    assert "Runs: 2" in (tmp_path / "page.md").read_text()
    assert "within" in (tmp_path / "c.csv").read_text()
    before = sorted((tmp_path / "store" / "runs").glob("*/result.json"))
    times = [path.stat().st_mtime_ns for path in before]
    assert call(*chosen, "--out", tmp_path / "store", "--json").stdout == found.stdout
    assert [path.stat().st_mtime_ns for path in before] == times, "nothing is run twice"


def test_a_cell_outside_its_tolerance_exits_with_1(tmp_path):
    experiment = paper.load("reference", only={"dataset": ["usps"], "epsilon": [2.0], "non_iid": [False]})
    records = recorded(experiment.cells[0], 0.8, 0.8, 0.8)
    (tmp_path / "runs.csv").write_text(to_csv(records.values()))
    narrow = ["reference", "--dataset", "usps", "--epsilon", "2", "--setting", "iid"]
    found = call(*narrow, "--from", tmp_path / "runs.csv")
    assert found.exit_code == 1
    assert "outside" in found.stdout
    missing = call("reference", "--dataset", "usps", "--from", tmp_path / "runs.csv", "--json")
    assert missing.exit_code == 1
    assert len(json.loads(missing.stdout)["experiments"][0]["cells"]) == 10, "a missing cell is shown"


def test_the_list_shows_every_experiment_with_its_runs():
    found = call("--list", "--seeds", "1")
    assert found.exit_code == 0
    for name in paper.names():
        assert name in found.stdout
    assert "different runs" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attack"], "did you mean"),
        (["--quick", "attacks"], "experiment of its own"),
        (["--epsilon", "two"], "must be numbers"),
        (["--setting", "odd"], "must be iid or non-iid"),
        (["--dataset", "cifar"], "no cell"),
        (
            ["--engine", "slurm", "--quick", "--seeds", "1", "--attack", "none"],
            "engine = 'slurm': unknown; choose from local, ray",
        ),
        (["reference", "--from", "nowhere.csv"], "cannot be read"),
    ],
)
def test_mistakes_are_told(arguments, said):
    with pytest.raises((SpecError, StoreError), match=said):
        call(*arguments)


def test_every_spec_of_a_built_in_data_set_can_be_prepared():
    """With the noise given, where the data are at hand: digits."""
    from noisegate import Compute

    for spec in paper.load("quick", seeds=[1]).specs:
        assert prepare(spec, Compute(device="cpu")).privacy.epsilon <= 2.0


def test_an_outcome_without_runs_has_no_mean():
    cell = cell_of("reference", dataset="usps")
    assert CellOutcome(cell, (), "missing", "").mean is None
    assert CellOutcome(cell, (), "missing", "").difference is None


def test_the_non_iid_partition_by_counting(tmp_path):
    found = distribution("digits")
    assert torch.allclose(found.shares.sum(1), torch.ones(10))
    assert float(found.overall.sum()) == pytest.approx(1.0)
    alike = distribution("digits", non_iid=False)
    assert alike.distance < 0.12 < found.distance
    told = call("partition", "--dataset", "digits", "--out", tmp_path)
    assert told.stdout.startswith(PRIVATE), "before anything that is"
    page = unescape((tmp_path / "partition.html").read_text())
    assert page.index(PRIVATE[1:]) < page.index("In short"), "here, too"
    assert "default-src 'none'" in page, "it loads nothing"
    bars = json.loads(re.search(r'id="chart-1-data">(.*?)</script>', page)[1])["data"]
    assert [bar["x"] for bar in bars] == [pytest.approx(shares, abs=1e-4) for shares in found.shares.T.tolist()]
    assert told.exit_code == 0
    assert f"mean total variation {found.distance:.2f}" in told.stdout
    assert (tmp_path / "partition.html").stat().st_size > 1_000_000, "with all that it needs inside"
