"""Between real processes the protocol is the simulator's: eight workers, three of whom flip their labels."""

import asyncio
import json
import socket
import statistics
import time
from dataclasses import replace

import pytest
import torch

import noisegate
from noisegate import Compute, Spec
from noisegate.deploy.init import make_trial
from noisegate.deploy.processes import Children
from noisegate.federation import Ledger, Server
from noisegate.federation.serving import Serving, ties_of
from noisegate.protocol import first_state, judge

ROUNDS, TIME = 200, 240.0
SPEC = Spec(workers=5, byzantine=0.4, attack="label-flip", rounds=ROUNDS)

NEAR_NOTHING = 0.05
"""A hostile worker's mean weight; an honest one's would be 0.2."""

SIMULATED = 4
"""Runs of the simulator that the band of accuracies comes from."""

WIDER = 4.0
"""Standard deviations of the simulated accuracies by which the federation's may differ from their mean. The deviation
is that of so few runs that it is taken to be at least that of 360 test examples at 80 %, 0.02."""


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A run to its end: (folder, trial, result, what the server judged in each round)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = make_trial(SPEC, tmp_path_factory.mktemp("federation") / "trial", port)
    seen, judged = [], Serving.judged

    def capture(self, round, received):
        copies = [None if gone else row.clone() for row, gone in zip(received.uploads, _missing(received), strict=True)]
        found = judged(self, round, received)
        seen.append((round, copies, found[0].verdict, found[0].state.params.clone()))
        return found

    with pytest.MonkeyPatch.context() as patch, Children(made.folder / "logs") as children:
        patch.setattr(Serving, "judged", capture)
        server = Server.of(made.folder / "server")
        for name in sorted(each.name for each in (made.folder / "workers").iterdir()):
            place = str(made.folder / "workers" / name)
            children.start(name, ["attacker", str(made.folder), name] if name in made.hostile else ["join", place])
        result = asyncio.run(asyncio.wait_for(server.run(), TIME))
        until = time.monotonic() + 30
        while any(children.ended(name) is None for name in children.processes) and time.monotonic() < until:
            time.sleep(0.1)
        ended = {name: children.ended(name) for name in children.processes}
        assert set(ended.values()) == {0}, {name: children.last_lines(name) for name in ended if ended[name] != 0}
    return made, server, result, seen


def _missing(received):
    return [False] * len(received.uploads) if received.missing is None else received.missing.tolist()


def test_attackers_end_with_weight_near_nothing(trial):
    made, _, result, _ = trial
    weights = {name: each["weight"] for name, each in result["workers"].items()}
    assert len(weights) == 8
    assert len(made.hostile) == 3
    assert max(weights[name] for name in made.hostile) < NEAR_NOTHING
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-3)


def test_accuracy_is_within_the_simulators_band(trial):
    _, _, result, _ = trial
    runs = [noisegate.run(replace(SPEC, secret=True), compute=Compute(threads=1)) for _ in range(SIMULATED)]
    simulated = [each.accuracy for each in runs]
    spread = max(statistics.stdev(simulated), 0.02)
    assert abs(result["accuracy"] - statistics.mean(simulated)) < WIDER * spread, simulated


def test_each_ledger_equals_the_rounds_that_were_charged(trial):
    made, server, result, _ = trial
    for name, told in result["workers"].items():
        with Ledger.open(made.folder / "workers" / name / "ledger") as ledger:
            assert ledger.charged(server.terms.run) == ROUNDS
            assert told["counter"] == ROUNDS
            assert ledger.spent(server.settings.delta) <= server.settings.epsilon


def test_verdicts_equal_the_simulators_for_the_same_uploads(trial):
    """`judge` alone, as the simulator's round calls it, on what arrived: the same verdicts, and the same model."""
    _, server, result, seen = trial
    checker = server._judge(len(result["workers"]))
    state = first_state(checker, server.model.initial())
    assert [round for round, *_ in seen] == list(range(ROUNDS))
    for round, uploads, verdict, params in seen:
        ties = ties_of(server.settings.seed, server.terms.run, round, len(uploads))
        found, state = judge(checker, state, uploads, ties)
        assert torch.equal(found.reason, verdict.reason)
        assert torch.equal(found.weights, verdict.weights)
        assert torch.equal(state.params, params)


def test_every_worker_has_one_status_in_every_round(trial):
    made, _, result, seen = trial
    lines = [json.loads(line) for line in (made.folder / "server/state/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(ROUNDS))
    for line, (_, _, verdict, _) in zip(lines, seen, strict=True):
        assert list(line["workers"]) == list(result["workers"])
        for each, kept in zip(line["workers"].values(), verdict.kept.tolist(), strict=True):
            assert (each["status"] == "used") == kept
