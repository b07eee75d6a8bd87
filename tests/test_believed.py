"""How many Byzantine workers an aggregator reckons with: what is believed, admitted, refused and printed (0016)."""

import json
import math

import pytest
import torch

from conftest import QUICK
from noisegate import Compute, SpecError, run
from noisegate.aggregators import AGGREGATORS, Mean, Robust
from noisegate.catalog import build
from noisegate.runs.setup import prepare
from test_conformance import honest_uploads, server_view

ROBUST = [name for name in AGGREGATORS if build("aggregator", name, AGGREGATORS).most(25) is not None]

# What the papers ask for, written down once more: the smallest n for f Byzantine workers.
SMALLEST = {
    "krum": lambda f: 2 * f + 3,
    "multi-krum": lambda f: 2 * f + 3,
    "bulyan": lambda f: 4 * f + 3,
    "median": lambda f: 2 * f + 1,
    "trimmed-mean": lambda f: 2 * f + 1,
    "geometric-median": lambda f: 2 * f + 1,
    "centered-clipping": lambda f: 2 * f + 1,
    "sign-vote": lambda f: 2 * f + 1,
}


RUN = ("run", "quick.toml")


@pytest.fixture
def cli(cli, tmp_path):
    """In a folder with settings of three rounds, for which no noise has to be calibrated."""
    (tmp_path / "quick.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in QUICK.items()))
    return cli


@pytest.mark.parametrize("name", ROBUST)
def test_default_is_how_many_there_are_or_what_is_admitted(quick, name):
    """13 workers with 3 Byzantine ones, then 25 with 15."""
    for share, byzantine, workers in ((0.2, 3, 13), (0.6, 15, 25)):
        result = run(quick(aggregator=name, byzantine=share, rounds=1))
        most = build("aggregator", name, AGGREGATORS).most(workers)
        assert result.byzantine_workers == byzantine
        assert result.believed_byzantine == min(byzantine, most)


def test_what_is_admitted_is_what_the_paper_asks_for():
    for name, smallest in SMALLEST.items():
        aggregator = build("aggregator", name, AGGREGATORS)
        for workers in range(1, 60):
            f = aggregator.most(workers)
            assert f < 0 or smallest(f) <= workers, name
            assert smallest(max(f, -1) + 1) > workers, name


def test_a_device_counts_as_the_host_does():
    for name in ROBUST:
        aggregator = build("aggregator", name, AGGREGATORS)
        for workers in range(1, 60):
            there = torch.as_tensor(aggregator.most(torch.tensor(workers)))
            assert int(there) == aggregator.most(workers), name


@pytest.mark.parametrize("name", ROBUST)
def test_one_more_than_admitted_is_refused(quick, name):
    most = build("aggregator", name, AGGREGATORS).most(13)
    asked = {"byzantine": 0.2, "rounds": 1}
    assert run(quick(aggregator={"name": name, "byzantine": most}, **asked)).believed_byzantine == most
    with pytest.raises(SpecError, match=rf"{name}.*byzantine = {most + 1}: needs .*at most {most} of"):
        prepare(quick(aggregator={"name": name, "byzantine": most + 1}, **asked), Compute(device="cpu"))


def test_a_refusal_is_one_sentence(cli):
    answer = cli(*RUN, "--aggregator", "krum", "--byzantine", 0.2, "--set", "aggregator.byzantine=6")
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert "aggregator 'krum': byzantine = 6: needs n >= 2 f + 3, so at most 5 of 13 workers" in answer.err


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_f_is_a_whole_number(value):
    with pytest.raises(SpecError, match="byzantine"):
        build("aggregator", {"name": "krum", "byzantine": value}, AGGREGATORS)


def test_too_few_workers_for_an_aggregator_are_refused(quick):
    with pytest.raises(SpecError, match=r"krum.*n >= 2 f"):
        prepare(quick(aggregator="krum", workers=2, byzantine=0.0), Compute(device="cpu"))


def test_gamma_is_a_belief_about_byzantine_workers_too(quick):
    for gamma, believed in ((0.9, 25 - math.ceil(0.9 * 25)), (0.2, 11)):
        federation = prepare(quick(aggregator="krum", gamma=gamma), Compute(device="cpu")).federation
        assert federation.server.aggregator.reckoned(25, federation.server.believed_honest) == believed


def test_the_table_says_why(cli, tmp_path):
    run = (*RUN, "--aggregator", "krum", "--no-baselines")
    cases = (
        (("--byzantine", 0.2), "as many as there are"),
        (("--byzantine", 0.6), "as many as it admits"),
        (("--byzantine", 0.6, "--set", "aggregator.byzantine=2"), "as set"),
        (("--byzantine", 0.6, "--gamma", 0.9), "as gamma says"),
        (("--byzantine", 0.2, "--gamma", 0.2), "as many as it admits"),
        (("--aggregator", "nnm", "--set", 'aggregator.aggregator={name="krum",byzantine=2}'), "as set"),
    )
    for i, (more, words) in enumerate(cases):
        answer = cli(*run, *more, "--out", tmp_path / str(i))
        line = next(line for line in answer.out.splitlines() if "Byzantine assumed" in line)
        assert words in line


@pytest.mark.parametrize("name", ROBUST)
def test_an_upload_that_is_malformed_or_missing_does_not_lower_f(name):
    """f stays as long as the aggregator admits it for those that are left."""
    aggregator = build("aggregator", name, AGGREGATORS)
    uploads = honest_uploads(1, n=24)
    for absent in range(24):
        uploads[:absent] = torch.nan
        malformed, missing = server_view(uploads, believed=22), server_view(uploads, believed=22, missing=range(absent))
        n, f = aggregator.counts(malformed)
        assert aggregator.counts(missing) == (n, f)
        assert n == 24 - absent
        assert f == max(0, min(aggregator.reckoned(24, 22), aggregator.most(n)))


def test_more_cannot_be_kept_than_there_are(quick):
    with pytest.raises(SpecError, match=r"multi-krum.*keep = 26.*25 workers"):
        prepare(quick(aggregator={"name": "multi-krum", "keep": 26}), Compute(device="cpu"))


KRUM_1 = {"name": "krum", "byzantine": 1}
NESTED = {
    "inner": ({"name": "bucketing", "aggregator": KRUM_1}, 1),
    "outer": ({"name": "bucketing", "aggregator": "krum", "byzantine": 1}, 1),
    "both, the same": ({"name": "nnm", "aggregator": KRUM_1, "byzantine": 1}, 1),
    "innermost": (
        {"name": "guerraoui", "aggregator": {"name": "bucketing", "aggregator": {"name": "nnm", "aggregator": KRUM_1}}},
        1,
    ),
    "none": ({"name": "bucketing", "aggregator": "krum"}, 2),  # of 7 buckets; 3 of 13 are Byzantine
    "around an aggregator without f": ({"name": "guerraoui", "aggregator": "mean"}, 3),
}


@pytest.mark.parametrize(("aggregator", "f"), NESTED.values(), ids=NESTED)
def test_aggregators_around_aggregators_share_one_f(quick, monkeypatch, aggregator, f):
    """What is printed is what every one of them uses."""
    used = []
    counts = Robust.counts
    monkeypatch.setattr(
        Robust, "counts", lambda aggregator, view: used.append(counts(aggregator, view)[1]) or counts(aggregator, view)
    )
    result = run(quick(aggregator=aggregator, worker="normalized", batch=16, rate=0.2, byzantine=0.2, rounds=1))
    assert result.believed_byzantine == f
    assert set(used) <= {f}


@pytest.mark.parametrize("wrapper", ["nnm", "bucketing", "guerraoui"])
def test_two_numbers_that_differ_are_refused(wrapper):
    aggregator = build("aggregator", {"name": wrapper, "byzantine": 2, "aggregator": KRUM_1}, AGGREGATORS)
    with pytest.raises(SpecError, match="byzantine = 2: its aggregator has byzantine = 1"):
        aggregator.check(40)


@pytest.mark.parametrize("byzantine", [13, 1000])
def test_an_aggregator_without_f_does_not_make_all_workers_byzantine(quick, byzantine):
    asked = {"name": "guerraoui", "aggregator": "two-stage", "byzantine": byzantine}
    with pytest.raises(SpecError, match=f"byzantine = {byzantine}: needs .*at most 12 of 13"):
        prepare(quick(aggregator=asked, byzantine=0.2), Compute(device="cpu"))


@pytest.mark.parametrize("worker", ["sign-gaussian", "sign-randomized", "ma-sign"])
def test_signs_are_not_tested_for_noise(quick, worker):
    with pytest.raises(SpecError, match=rf"worker = '{worker}'.*two-stage.*such as '{worker}'"):
        prepare(quick(worker=worker, aggregator="two-stage"), Compute(device="cpu"))
    prepare(quick(worker=worker, aggregator={"name": "two-stage", "stages": 2}), Compute(device="cpu"))


@pytest.mark.parametrize("wrapper", ["nnm", "bucketing", "guerraoui"])
def test_nor_by_an_aggregator_in_an_aggregator(quick, wrapper):
    """However deep it is inside."""
    for inner in ("two-stage", {"name": "bucketing", "aggregator": "two-stage"}):
        with pytest.raises(SpecError, match=rf"worker = 'sign-gaussian'.*{wrapper}.* tests for"):
            prepare(
                quick(worker="sign-gaussian", aggregator={"name": wrapper, "aggregator": inner}), Compute(device="cpu")
            )
    for inner in ("median", {"name": "two-stage", "stages": 2}):
        prepare(quick(worker="sign-gaussian", aggregator={"name": wrapper, "aggregator": inner}), Compute(device="cpu"))


def test_too_few_workers_are_told_how_many_are_needed(quick):
    with pytest.raises(SpecError, match="1 workers: needs n >= 4 f \\+ 3, so at least 3"):
        prepare(quick(aggregator="bulyan", workers=1, byzantine=0.0), Compute(device="cpu"))


def test_the_condition_of_an_aggregator_around_an_aggregator_is_told_in_full():
    asked = {
        "name": "guerraoui",
        "aggregator": {"name": "bucketing", "aggregator": {"name": "nnm", "aggregator": "krum"}},
    }
    words = "for ceil(n / size) averages, f of them spoiled, n > 2 f, and n >= 2 f + 3"
    assert build("aggregator", asked, AGGREGATORS).condition() == words


def test_auto_is_the_default(cli):
    answer = cli(*RUN, "--aggregator", "krum", "--set", "aggregator.byzantine=auto", "--json")
    assert answer.json["spec"]["aggregator"] == {"name": "krum"}


class Bare(Robust):
    """A plugin's aggregator that says no more than it must."""

    def most(self, workers):
        return workers - 1

    def __call__(self, view, state):
        return Mean()(view, state)


def test_an_aggregator_need_not_put_its_condition_into_words(cli):
    run = (*RUN, "--aggregator", f"{__name__}:Bare", "--no-baselines", "--byzantine", 0.2)
    assert "it needs" in " ".join(cli(*run).out.split())
    refused = cli(*run, "--set", "aggregator.byzantine=13")
    assert refused.status == 2
    assert "needs fewer Byzantine workers, so at most 12 of 13" in refused.err


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name not in ROBUST])
def test_aggregators_without_f_run_too(quick, name):
    for share in (0.2, 0.6):
        assert run(quick(aggregator=name, byzantine=share, rounds=1)).believed_byzantine is None
