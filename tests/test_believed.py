"""How many liars a rule reckons with: what is believed, what it admits, what is refused, what is printed (0016)."""

import math

import pytest
import torch

from noisegate import Compute, SpecError
from noisegate.aggregators import AGGREGATORS, Robust
from noisegate.catalog import build
from noisegate.lab.setup import prepare
from test_conformance import honest_uploads, server_view

ROBUST = [name for name in AGGREGATORS if isinstance(build("aggregator", name, AGGREGATORS), Robust)]

# What the papers ask for, written down once more: the smallest n for f liars.
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


@pytest.mark.parametrize("name", ROBUST)
def test_default_is_what_lies_or_what_is_admitted(cli, name):
    """13 workers with 3 liars, then 25 with 15."""
    for share, liars, workers in ((0.2, 3, 13), (0.6, 15, 25)):
        answer = cli("run", "--aggregator", name, "--byzantine", share, "--rounds", 3, "--sigma", 9, "--json")
        assert answer.status == 0, answer.err
        most = build("aggregator", name, AGGREGATORS).most(workers)
        assert answer.json["byzantine_workers"] == liars
        assert answer.json["believed_byzantine"] == min(liars, most)


@pytest.mark.parametrize("name", SMALLEST)
def test_what_is_admitted_is_what_the_paper_asks_for(name):
    rule = build("aggregator", name, AGGREGATORS)
    for workers in range(1, 60):
        f = rule.most(workers)
        assert f < 0 or SMALLEST[name](f) <= workers
        assert SMALLEST[name](max(f, -1) + 1) > workers


@pytest.mark.parametrize("name", ROBUST)
def test_a_device_counts_as_the_host_does(name):
    rule = build("aggregator", name, AGGREGATORS)
    for workers in range(1, 60):
        assert int(torch.as_tensor(rule.most(torch.tensor(workers)))) == rule.most(workers)


@pytest.mark.parametrize("name", ROBUST)
def test_one_more_than_admitted_is_refused_with_a_sentence(cli, name):
    most = build("aggregator", name, AGGREGATORS).most(13)
    run = ("run", "--aggregator", name, "--byzantine", 0.2, "--rounds", 3, "--sigma", 9, "--json")
    fits = cli(*run, "--set", f"aggregator.byzantine={most}")
    assert fits.status == 0, fits.err
    assert fits.json["believed_byzantine"] == most
    answer = cli(*run, "--set", f"aggregator.byzantine={most + 1}")
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert name in answer.err
    assert f"byzantine = {most + 1}" in answer.err
    assert "needs" in answer.err
    assert str(most) in answer.err


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_f_is_a_whole_number(value):
    with pytest.raises(SpecError, match="byzantine"):
        build("aggregator", {"name": "krum", "byzantine": value}, AGGREGATORS)


def test_too_few_workers_for_a_rule_are_refused(quick):
    with pytest.raises(SpecError, match=r"krum.*n >= 2 f"):
        prepare(quick(aggregator="krum", workers=2, byzantine=0.0), Compute(device="cpu"))


def test_gamma_is_a_belief_about_liars_too(quick):
    for gamma, believed in ((0.9, 25 - math.ceil(0.9 * 25)), (0.2, 11)):
        federation = prepare(quick(aggregator="krum", gamma=gamma), Compute(device="cpu")).federation
        assert federation.rule.reckoned(25, federation.believed_honest) == believed


def test_the_table_says_why(cli):
    run = ("run", "--aggregator", "krum", "--rounds", 3, "--sigma", 9, "--no-baselines")
    for more, words in (
        (("--byzantine", 0.2), "as many as there are"),
        (("--byzantine", 0.6), "no more can be"),
        (("--byzantine", 0.6, "--set", "aggregator.byzantine=2"), "as set"),
    ):
        answer = cli(*run, *more, "--out", "-".join(map(str, more)).replace(".", ""))
        line = next(line for line in answer.out.splitlines() if "liars reckoned with" in line)
        assert words in line


@pytest.mark.parametrize("name", ROBUST)
def test_a_malformed_upload_does_not_prove_a_liar_less(name):
    """f stays as long as the rule admits it for those that are left."""
    rule = build("aggregator", name, AGGREGATORS)
    uploads = honest_uploads(1, n=24)
    for malformed in range(24):
        uploads[:malformed] = torch.nan
        view = server_view(uploads, believed=22)
        n, f = rule.counts(view)
        assert n == 24 - malformed
        assert f == max(0, min(rule.reckoned(24, 22), rule.most(n)))


def test_more_cannot_be_kept_than_there_are(quick):
    with pytest.raises(SpecError, match="multi-krum.*keep = 26.*25 workers"):
        prepare(quick(aggregator={"name": "multi-krum", "keep": 26}), Compute(device="cpu"))
