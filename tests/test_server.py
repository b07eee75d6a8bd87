"""The server of a federation over real mutual-TLS streams: what holds whatever workers do, and after every crash."""

import asyncio
import datetime
import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
import safetensors.torch
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from torch import nn

from noisegate.errors import FederationError, SpecError, StoreError
from noisegate.federation import reception as reception_module
from noisegate.federation import serving as serving_module
from noisegate.federation import wire
from noisegate.federation.certificates import make_authority
from noisegate.federation.collect import Sender
from noisegate.federation.connections import MOST_CONNECTIONS, most_connections
from noisegate.federation.keys import SigningKey
from noisegate.federation.logs import BURST, OperatorsLog
from noisegate.federation.metrics import escaped, text_of
from noisegate.federation.reception import Reception
from noisegate.federation.server import Server
from noisegate.federation.serving import ties_of
from noisegate.federation.settings import ServerSettings
from noisegate.federation.store import StateFolder
from noisegate.federation.streams import MESSAGES, ModelLetter, SendGate, Stream
from noisegate.federation.wire import Kind
from noisegate.protocol import Judgement, first_state, judge
from wire_peers import QUICK, Certified, Trial, certified, sends, silence, take_parts

LEARNED = 0.9  # the noise has no seed: 60 runs of these settings all reached 1.0, and the first model has 0.03
LONG = 60.0  # seconds after which a test has failed; all of them take a few


def play(coroutine):
    """Run an async test, bounded in time."""

    async def bounded():
        async with asyncio.timeout(LONG):
            return await coroutine

    return asyncio.run(bounded())


def statuses(record):
    return {name: entry["status"] for name, entry in record["workers"].items()}


async def run_whole(trial, behaviors=None, server=None):
    """A run to its end. (result, what each worker ended with)."""
    async with trial.serving(server) as running:
        ends = asyncio.ensure_future(take_parts(trial, running.port, behaviors))
        try:
            return await running.running, await ends
        finally:
            ends.cancel()


# --- a run ------------------------------------------------------------------------------------------------------


def test_honest_workers_train_a_model_and_everyone_gets_it(tmp_path):
    trial = Trial(tmp_path, workers=4, rounds=40, sigma=0.3, rate=0.5, evaluate_every=10, aggregator="mean")
    result, ends = play(run_whole(trial))
    records = trial.records()
    assert [record["round"] for record in records] == list(range(40))
    assert all(set(statuses(record).values()) == {"used"} for record in records)
    assert [record["round"] for record in records if "accuracy" in record] == [9, 19, 29, 39]
    assert result["accuracy"] == records[-1]["accuracy"] > LEARNED
    assert {entry["counter"] for entry in result["workers"].values()} == {40}
    assert json.loads((trial.state / "result.json").read_text()) == result
    saved = safetensors.torch.load_file(trial.state / "model.safetensors")
    last = torch.cat([value.flatten() for value in (saved[name] for name in trial.model().names)])
    assert {bytes(end.body) for end in ends.values()} == {last.numpy().tobytes()}
    assert all(end.kind == Kind.END and end.is_from(trial.server_key.public) for end in ends.values())
    status = trial.status()
    assert (status["state"], status["round"], status["judged"]) == ("done", 39, 40)


def test_each_model_follows_from_the_uploads_by_the_protocol_alone(tmp_path):
    """The judgement can be played again from what was sent: nothing else reaches the model."""
    trial, sent = Trial(tmp_path, workers=4, rounds=5, aggregator="fortified"), {}

    def keep(peer, model):
        content = peer.upload(model)
        sent[model.round, peer.name] = peer.last
        return content

    server = Server.of(trial.folder)
    play(run_whole(trial, dict.fromkeys(trial.names, sends(keep)), server))
    held = server._judge(4)
    state = first_state(held, server.model.initial())
    for record in trial.records():
        assert wire.digest_of(state.params.numpy().tobytes()).hex() == record["digest"]
        arrived = [sent[record["round"], name] for name in trial.names]
        ties = ties_of(QUICK["seed"], QUICK["run"], record["round"], 4)
        verdict, state = judge(held, state, arrived, ties)
        weights = [record["workers"][name].get("weight", 0.0) for name in trial.names]
        assert weights == verdict.weights.tolist()


def test_receipts_carry_the_counter_and_come_after_the_checkpoint(tmp_path, monkeypatch):
    trial, written = Trial(tmp_path, workers=2, rounds=3), []
    real = StateFolder.write_checkpoint
    monkeypatch.setattr(
        StateFolder, "write_checkpoint", lambda self, point: (real(self, point), written.append(point.round))[0]
    )
    receipts = {}

    def watch(peer, model):
        receipts[peer.name] = peer.receipts
        assert [each.round for each in peer.receipts] == [each for each in written if each >= 0][: len(peer.receipts)]
        return peer.upload(model)

    play(run_whole(trial, dict.fromkeys(trial.names, sends(watch))))
    for name, each in receipts.items():
        assert [(one.round, one.counter) for one in each] == [(0, 1), (1, 2), (2, 3)]
        assert all(one.worker == name and one.is_from(trial.server_key.public) for one in each)


# --- whatever workers do ----------------------------------------------------------------------------------------


def other_body(size):
    return sends(lambda peer, model: peer.message(model, bytes(size)).signed(peer.who.key))


def lie(**changes):
    return sends(lambda peer, model: peer.upload(model, **changes))


async def killed(peer, model):
    await peer.hang_up()


async def twice(peer, model):
    content = peer.upload(model)
    await peer.send(content)
    await peer.send(content)


async def corrected(peer, model):
    """Garbage first, then the upload: the first valid one counts."""
    await peer.send(b"garbage")
    await peer.send(peer.upload(model))


async def huge(peer, model):
    await peer.send(bytes(2**24))


FAULTS = {
    "nan": (sends(lambda p, m: p.upload(m, torch.full((323,), torch.nan))), "malformed"),
    "infinite": (sends(lambda p, m: p.upload(m, torch.full((323,), 3e38))), "malformed"),
    "short": (other_body(4 * 322), "malformed"),
    "long": (other_body(4 * 324), "malformed"),
    "empty": (other_body(0), "malformed"),
    "no-message": (sends(lambda p, m: b""), "malformed"),
    "garbage": (sends(lambda p, m: os.urandom(3000)), "malformed"),
    "signature": (sends(lambda p, m: p.upload(m)[:-1] + b"\x01"), "forged"),
    "other-name": (lie(worker="honest"), "forged"),
    "old-round": (lie(round=10**6), "late"),
    "other-digest": (lie(digest=bytes(32)), "late"),
    "other-run": (lie(run=bytes(32)), "late"),
    "wrong-kind": (lie(kind=Kind.MODEL), "late"),
    "silent": (silence, "late"),
    "declines": (sends(lambda p, m: p.decline(m, "no \x1b[31mpower")), "missing"),
    "killed": (killed, "missing"),
    "huge": (huge, "missing"),
    "twice": (twice, "used"),
    "corrected": (corrected, "used"),
    "honest": (None, "used"),
}


def named(trial, names):
    """Give a trial's workers other names."""
    trial.names = tuple(names)
    trial.workers = {name: certified(trial.authority, name) for name in names}
    trial.write_roster({name: one.key.public for name, one in trial.workers.items()})
    return trial


def test_each_fault_has_its_status_and_none_reaches_the_model(tmp_path, monkeypatch):
    real = serving_module.Serving.open

    def dirty(*given):
        """The memory of a round is not cleared, so that anything may stand in it."""
        collection = real(*given)
        collection.rows.fill_(7.0)
        return collection

    monkeypatch.setattr(serving_module.Serving, "open", dirty)
    trial = named(Trial(tmp_path, len(FAULTS), rounds=2, aggregator="mean", least=2.0, deadline=2.5), FAULTS)
    behaviors, models = {name: answer for name, (answer, _) in FAULTS.items()}, {}

    def honest(peer, model):
        models[model.round] = model
        return peer.upload(model, torch.ones(323))

    async def honest_later(peer, model):
        if model.round == 0:
            await twice(peer, model) if peer.name == "twice" else await corrected(peer, model)

    behaviors |= {"honest": sends(honest), "twice": honest_later, "corrected": honest_later}

    async def run():
        async with trial.serving() as server:
            peers = asyncio.ensure_future(take_parts(trial, server.port, behaviors))
            result = await server.running
            peers.cancel()
            await asyncio.wait({peers})
            return result

    result = play(run())
    first, second = trial.records()
    assert statuses(first) == {name: status for name, (_, status) in FAULTS.items()}
    assert first["ignored"] == {"stale": 3, "unexpected": 1, "duplicate": 1}
    assert first["workers"]["declines"]["detail"] == "declined: no \\x1b[31mpower"
    assert second["workers"]["killed"]["detail"] == "not connected"
    used = {name for name, entry in first["workers"].items() if "weight" in entry}
    assert used == {"twice", "corrected", "honest"}
    assert all(first["workers"][name]["weight"] == pytest.approx(1 / 3) for name in used)
    assert result["judged"] == 2
    assert result["workers"]["nan"]["counter"] == 2, "it was received, and found to be no numbers"
    assert result["workers"]["short"]["counter"] == 0
    assert second["workers"]["honest"] == {"status": "used", "weight": 1.0}
    after = torch.from_numpy(models[1].vector().copy()) - 0.2  # the rate: the one upload of round 1 is of ones
    saved = safetensors.torch.load_file(trial.state / "model.safetensors")
    last = torch.cat([saved[name].flatten() for name in trial.model().names])
    assert torch.allclose(last, after, atol=1e-6), "the step is that of the one upload that counted"


def test_a_flood_is_not_read_and_a_silent_worker_costs_few_deadlines(tmp_path):
    trial = Trial(tmp_path, workers=4, rounds=18, least=0.05, deadline=1.0, aggregator="mean")

    async def flood(peer, model):
        content = peer.upload(model)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                for _ in range(300):
                    await peer.call.write(content)

    async def run():
        async with trial.serving() as server:
            peers = asyncio.ensure_future(take_parts(trial, server.port, {"w0": flood, "w1": silence}))
            await server.running
            peers.cancel()
            await asyncio.wait({peers})

    play(run())
    records = trial.records()
    assert len(records) == 18
    assert all(sum(record["ignored"].values()) <= 2 * MESSAGES for record in records)
    assert sum(record["seconds"]["wait"] > 0.95 for record in records) <= 5, "2 + 4 + 8 rounds do not wait for it"
    honest = [statuses(record)[name] for record in records for name in ("w2", "w3")]
    assert honest.count("used") >= 0.9 * len(honest)


def test_the_real_clock_keeps_the_stated_cap(tmp_path):
    """Everyone is silent in turns; the run still ends within stall + rounds * least, and some overhead."""
    rounds, least, stall = 12, 0.05, 0.5
    trial = Trial(tmp_path, workers=3, rounds=rounds, least=least, deadline=0.4, stall=stall)

    async def in_turns(peer, model):
        if (model.round + int(peer.name[1:])) % 3:
            await asyncio.sleep(0.39)
            await peer.send(peer.upload(model))

    async def run():
        async with trial.serving() as server:
            peers = asyncio.ensure_future(take_parts(trial, server.port, dict.fromkeys(trial.names, in_turns)))
            await server.running
            peers.cancel()
            await asyncio.wait({peers})

    play(run())
    waits = [record["seconds"]["wait"] for record in trial.records()]
    overhead = 0.05 * rounds  # seconds: a loaded machine wakes a little late
    assert sum(waits) <= stall + rounds * least + overhead
    assert len(waits) == rounds


@pytest.mark.parametrize("where", ["params", "aggregator"])
def test_a_step_that_is_not_finite_leaves_the_model_as_it_was(tmp_path, monkeypatch, where):
    """An upload is refused if its length overflows, so that it takes an aggregator of one's own to get there."""
    trial = Trial(tmp_path, workers=2, rounds=2, aggregator="mean")
    bad = {"params": torch.full((323,), torch.inf), "aggregator": {"mean": torch.tensor([torch.nan])}}[where]

    def astray(*given):
        verdict, state = judge(*given)
        return Judgement(verdict, replace(state, **{where: bad}))

    monkeypatch.setattr(serving_module, "judge", astray)
    result, ends = play(run_whole(trial))
    first, second = trial.records()
    assert "not finite" in first["note"]
    assert second["digest"] == first["digest"] == ends["w0"].digest.hex()
    assert result["workers"]["w0"]["counter"] == 2


def test_auxiliary_examples_leave_in_no_message_and_stand_in_no_file(tmp_path):
    trial, seen = Trial(tmp_path, workers=2, rounds=3), []

    async def run():
        async with (
            trial.serving() as server,
            trial.peer("w0", server.port) as one,
            trial.peer("w1", server.port) as two,
        ):
            await asyncio.gather(one.take_part(), two.take_part())
            seen.extend((*one.seen, *two.seen))
            await server.running

    play(run())
    assert {message.kind for message in seen} == {Kind.TERMS, Kind.MODEL, Kind.RECEIPT, Kind.END}
    told = [bytes(message.body) for message in seen]
    told += [path.read_bytes() for path in trial.state.iterdir()]
    secret = [row.numpy().tobytes() for row in (*trial.auxiliary[0], *trial.test[0])]
    assert not any(row in content for row in secret for content in told)
    for message in seen:
        if message.kind == Kind.TERMS:
            assert set(message.text()) == {
                *("run", "title", "rounds", "parameters", "batch", "declared", "sigma", "worker")
            }
    for name in ("log.jsonl", "rounds.jsonl", "status.json"):
        text = (trial.state / name).read_text()
        assert max(map(len, text.split(","))) < 300, "no vector stands there"


# --- who may be here --------------------------------------------------------------------------------------------


async def refused(trial, port, who, name="w0", hello=False):
    """How the server ends the stream of this certificate.

    hello: whether it says hello. One that the server ends in the middle of a write shows INTERNAL at the peer instead.
    """
    async with trial.peer(name, port, who) as peer:
        if hello:
            await peer.send(wire.say(Kind.HELLO, name, who.key, {}))
        while await peer.read() is not None:
            pass
        return await peer.status_code()


def expired(trial):
    """A certificate of yesterday."""
    old, now = trial.workers["w0"], datetime.datetime.now(datetime.UTC)
    found = x509.load_pem_x509_certificate(old.chain)
    authority = serialization.load_pem_private_key(trial.authority.key, None)
    builder = x509.CertificateBuilder(
        found.issuer, found.subject, found.public_key(), 77, now - datetime.timedelta(3), now - datetime.timedelta(1)
    )
    for extension in found.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    chain = builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return Certified("w0", old.key, old.private, chain)


def test_only_certificate_roster_and_key_together_are_let_in(tmp_path):
    trial = Trial(tmp_path, workers=2, quorum=2, rounds=2)
    revoked = certified(trial.authority, "w0", trial.workers["w0"].key)
    serial = x509.load_pem_x509_certificate(revoked.chain).serial_number
    trial.write_roster({name: one.key.public for name, one in trial.workers.items()}, frozenset({serial}))
    strangers = {
        "unregistered": certified(trial.authority, "stranger"),
        "another-key": certified(trial.authority, "w0"),
        "revoked": revoked,
        "expired": expired(trial),
        "another-authority": certified(make_authority(), "w0", trial.workers["w0"].key),
    }

    async def run():
        async with trial.serving() as server:
            codes = {name: await refused(trial, server.port, who, who.name) for name, who in strangers.items()}
            assert trial.status()["connected"] == []
            stolen = Certified("w0", SigningKey.generate(), trial.workers["w0"].private, trial.workers["w0"].chain)
            codes["hello-signature"] = await refused(trial, server.port, stolen, hello=True)
            await take_parts(trial, server.port)  # those who may be here are not disturbed
            await server.running
            return codes

    denied, aborted, unavailable = (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert play(run()) == {
        "unregistered": denied,
        "another-key": denied,
        "revoked": denied,
        "expired": unavailable,
        "another-authority": unavailable,
        "hello-signature": aborted,
    }
    whys = [line["why"] for line in trial.logged() if line["event"] == "refused"]
    assert whys == [
        "not in the roster of this run",
        "the certificate has another key than the roster",
        "the certificate is revoked",
    ]


def test_a_stream_that_does_not_begin_is_dropped_and_half_open_connections_disturb_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(reception_module, "HELLO_TIME", 0.3)
    trial = Trial(tmp_path, workers=2, rounds=2, aggregator="mean")

    async def run():
        async with trial.serving() as server:
            open_ones = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
            try:
                async with trial.peer("w0", server.port) as loris:
                    assert (await loris.read()).kind == Kind.REFUSAL
                    assert await loris.status_code() == grpc.StatusCode.ABORTED
                await take_parts(trial, server.port)
                await server.running
            finally:
                for each in open_ones:
                    each.close()

    play(run())
    assert all(set(statuses(record).values()) == {"used"} for record in trial.records())


def test_the_newest_stream_of_a_worker_takes_the_place_of_the_older(tmp_path):
    trial = Trial(tmp_path, workers=2, quorum=2, rounds=1, aggregator="mean")

    async def run():
        async with trial.serving() as server, trial.peer("w0", server.port) as older:
            await older.hello()
            idle = trial.peer("w0", server.port)
            await idle.dial()
            while not server._serving.reception._arriving:  # one that says nothing comes first
                await asyncio.sleep(0.01)
            async with trial.peer("w0", server.port) as newer:
                await newer.hello()
                assert (await older.next(Kind.REFUSAL)).text() == {"why": "another stream of this worker came"}
                assert await older.read() is None
                async with trial.peer("w1", server.port) as other:
                    other_end = asyncio.ensure_future(other.take_part())
                    model = await newer.next(Kind.MODEL)
                    await newer.send(newer.upload(model))
                    assert (await newer.next(Kind.END)).kind == Kind.END
                    await other_end
                await server.running
            await idle.hang_up()

    play(run())
    assert statuses(trial.records()[0]) == {"w0": "used", "w1": "used"}


def test_streams_of_one_worker_that_come_often_wait_longer_each_time(tmp_path):
    names = ["w0"]
    log = OperatorsLog(lambda line: None)

    async def pauses():
        terms = Trial(tmp_path, 1).settings.terms(323)
        hall = Reception(terms, names, SigningKey.generate(), None, [], log, None)
        return [hall._pause(0) for _ in range(14)]

    found = asyncio.run(pauses())
    assert found[:6] == [0.0] * 6
    assert found[6:9] == [0.2, 0.4, 0.8]
    assert found[-1] == 5.0


def test_a_worker_that_is_removed_or_revoked_is_dropped_and_stays_missing(tmp_path):
    trial = Trial(tmp_path, workers=4, rounds=9, least=0.2, aggregator="mean")
    keys = {name: one.key.public for name, one in trial.workers.items()}
    serial = x509.load_pem_x509_certificate(trial.workers["w1"].chain).serial_number

    async def run():
        async with trial.serving() as server:

            async def edits(peer, model):
                if model.round == 2:
                    without = {name: key for name, key in keys.items() if name != "w0"}
                    trial.write_roster({**without, "new": bytes(range(32))}, frozenset({serial}))
                if model.round == 5:
                    (trial.folder / "roster.toml").write_text("this is no roster")
                await peer.send(peer.upload(model))

            ends = await take_parts(trial, server.port, {"w3": edits})
            await server.running
            return ends

    ends = play(run())
    assert [end is None for end in ends.values()] == [True, True, False, False]
    records = trial.records()
    assert set(statuses(records[0]).values()) == {"used"}
    for record in records[4:]:
        assert statuses(record) == {"w0": "missing", "w1": "missing", "w2": "used", "w3": "used"}
    events = [line["event"] for line in trial.logged()]
    assert events.count("dropped") == 2
    assert "roster not believed" in events
    assert any(line.get("added") == "new" for line in trial.logged())


# --- quorum, leaving, coming back -------------------------------------------------------------------------------


def test_below_quorum_it_pauses_says_so_and_goes_on_when_the_quorum_is_back(tmp_path):
    trial = Trial(tmp_path, workers=2, quorum=2, rounds=3, gather=0.2)

    async def run():
        async with trial.serving() as server:
            async with trial.peer("w0", server.port) as first:
                part = asyncio.ensure_future(first.take_part())
                while trial.status()["state"] != "paused":
                    await asyncio.sleep(0.02)
                assert "quorum of 2" in trial.status()["why"]
                assert not (trial.state / "rounds.log").exists(), "no number is used while it is paused"
                async with trial.peer("w1", server.port) as second:
                    await asyncio.gather(part, second.take_part())
            await server.running

    play(run())
    assert [line["event"] for line in trial.logged() if line["event"] in ("gather", "paused", "collect", "done")] == [
        *("gather", "paused", "collect", "done")
    ]


def test_a_worker_that_leaves_is_missing_and_when_all_have_left_the_run_ends(tmp_path):
    trial = Trial(tmp_path, workers=3, rounds=50, quorum=1)

    async def leaves(peer, model):
        if model.round < int(peer.name[1:]) + 1:
            await peer.send(peer.upload(model))
        else:
            await peer.send(peer.leave(model))

    result, _ = play(run_whole(trial, dict.fromkeys(trial.names, leaves)))
    assert 3 <= result["judged"] <= 5
    assert "3 of 3 workers have left" in result["why"]
    assert trial.records()[1]["workers"]["w0"] == {"status": "missing", "detail": "left: budget spent"}
    assert [entry["counter"] for entry in result["workers"].values()] == [1, 2, 3]


def test_a_worker_that_comes_back_is_told_what_the_server_has_and_gets_the_open_round(tmp_path, monkeypatch):
    monkeypatch.setattr("noisegate.federation.server.STOP_TIME", 0.1)
    trial = Trial(tmp_path, workers=2, quorum=1, rounds=2, deadline=8.0, least=8.0)

    async def run():
        async with trial.serving() as server, trial.peer("w1", server.port) as other:
            waiting = asyncio.ensure_future(other.take_part(silence))
            async with trial.peer("w0", server.port) as peer:
                terms = await peer.hello()
                assert (terms.counter, terms.digest, terms.round) == (0, wire.NOBODY, 0)
                model = await peer.next(Kind.MODEL)
            async with trial.peer("w0", server.port) as peer:
                await peer.hello()
                again = await peer.next(Kind.MODEL)
                assert (again.round, again.digest) == (model.round, model.digest)
                content = peer.upload(again)
                await peer.send(content)
                await other.send(other.upload(other.seen[-1], torch.zeros(323)))
                receipt = await peer.next(Kind.RECEIPT)
                assert receipt.digest == wire.digest_of(wire.read(content).body)
            async with trial.peer("w0", server.port) as peer:
                terms = await peer.hello()
                assert (terms.counter, terms.digest, terms.round) == (1, receipt.digest, 1)
                server.stop()
            waiting.cancel()
            await asyncio.wait({waiting})

    play(run())


# --- crashes ----------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Ends a server in the middle of a step, as kill -9 would."""


STEPS = [
    (StateFolder, "log_round"),
    (serving_module.Serving, "open"),
    (serving_module.Serving, "see"),
    (StateFolder, "put_upload"),
    (StateFolder, "sync_uploads"),
    (serving_module.Serving, "judged"),
    (serving_module.Serving, "step"),
    (StateFolder, "write_checkpoint"),
    (StateFolder, "append_record"),
    (Reception, "acknowledge"),
    (StateFolder, "write_model"),
    (StateFolder, "write_result"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), STEPS)
def test_after_a_crash_at_any_step_it_goes_on_and_loses_at_most_the_round_in_flight(
    tmp_path, monkeypatch, owner, name, after
):
    trial = Trial(tmp_path, workers=2, rounds=4, gather=5.0, aggregator="mean")
    real, calls, models = getattr(owner, name), [], {}
    at = 1 if name in ("write_model", "write_result") else 3

    def crash(*given):
        calls.append(name)
        if len(calls) == at and not after:
            raise Crash
        found = real(*given)
        if len(calls) == at:
            raise Crash
        return found

    def keep(peer, model):
        assert models.setdefault(model.round, model.digest) == model.digest, "one number, two models"
        return peer.upload(model)

    async def run(crashes):
        async with trial.serving() as server:
            peers = asyncio.ensure_future(take_parts(trial, server.port, dict.fromkeys(trial.names, sends(keep))))
            try:
                return await server.running
            except Crash:
                assert crashes
            finally:
                peers.cancel()
                await asyncio.wait({peers})

    monkeypatch.setattr(owner, name, crash)
    assert play(run(True)) is None
    monkeypatch.setattr(owner, name, real)
    judged = [record["round"] for record in trial.records()]
    result = play(run(False))
    log = [json.loads(line)["round"] for line in (trial.state / "rounds.log").read_text().splitlines()]
    assert log == [0, 1, 2, 3], "every number once"
    after_all = [record["round"] for record in trial.records()]
    assert after_all[: len(judged)] == judged
    assert after_all == sorted(set(after_all))
    assert result["judged"] == len(after_all) >= 3
    lost = result["workers"]["w0"]["counter"]
    assert lost == result["judged"], "each judged round has its upload"


def test_a_full_disk_stops_it_before_anything_is_sent_that_was_not_logged(tmp_path, monkeypatch):
    trial, seen = Trial(tmp_path, workers=1, rounds=3), []
    real = StateFolder.log_round

    def full(self, round, digest):
        if round == 1:
            raise StoreError("rounds.log: cannot be written (No space left on device)")
        real(self, round, digest)

    monkeypatch.setattr(StateFolder, "log_round", full)

    async def run():
        async with trial.serving() as server, trial.peer("w0", server.port) as peer:
            part = asyncio.ensure_future(peer.take_part())
            try:
                return await server.running
            finally:
                await asyncio.wait({part})
                seen.extend(message.round for message in peer.seen if message.kind == Kind.MODEL)

    with pytest.raises(StoreError, match="No space"):
        play(run())
    assert seen == [0]
    monkeypatch.undo()
    assert play(run_whole(trial))[0]["judged"] == 3


def test_an_operators_log_that_cannot_be_written_stops_it(tmp_path, monkeypatch):
    trial = Trial(tmp_path, workers=1, rounds=3)

    def full(self, line):
        raise StoreError("log.jsonl: cannot be written (No space left on device)")

    monkeypatch.setattr(StateFolder, "append_log", full)
    with pytest.raises(StoreError, match="No space"):
        play(run_whole(trial))


def test_a_second_server_of_the_same_folder_is_refused(tmp_path):
    trial = Trial(tmp_path, workers=1)

    async def run():
        async with trial.serving():
            with pytest.raises(StoreError, match="two servers cannot share a folder"):
                await Server.of(trial.folder).run()

    play(run())


def test_a_stopped_server_says_so_and_the_next_one_goes_on(tmp_path):
    trial = Trial(tmp_path, workers=2, rounds=6)

    async def run():
        async with trial.serving() as server:
            server.watch = lambda line: server.stop() if line["round"] == 2 else None
            peers = asyncio.ensure_future(take_parts(trial, server.port))
            stopped = await server.running
            await peers
            return stopped

    assert play(run()) is None
    assert [record["round"] for record in trial.records()] == [0, 1, 2]
    assert play(run_whole(trial))[0]["judged"] == 6
    result, ends = play(run_whole(trial))  # a run that is over gives its model to those who missed it
    assert result["judged"] == 6
    assert all(end.kind == Kind.END for end in ends.values())


def test_serve_ends_with_130_on_ctrl_c_and_survives_kill_minus_nine(tmp_path, spawn):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trial = Trial(tmp_path / "server", workers=1, rounds=5, listen=f"127.0.0.1:{port}")

    async def until_model(round):
        """Answer models until that round, and leave it open."""
        while True:
            async with trial.peer("w0", port) as peer:
                try:
                    await peer.hello()
                except (grpc.aio.AioRpcError, AssertionError):
                    await asyncio.sleep(0.1)
                    continue
                while (model := await peer.next(Kind.MODEL)) is not None:
                    if model.round >= round:
                        return model.round
                    await peer.send(peer.upload(model))

    process = spawn("serve", trial.folder)
    assert play(until_model(1)) == 1
    process.kill()
    process.wait(LONG)
    process = spawn("serve", trial.folder)
    assert play(until_model(3)) == 3
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert "state saved" in told
    log = [json.loads(line)["round"] for line in (trial.state / "rounds.log").read_text().splitlines()]
    assert log[:4] == [0, 1, 2, 3]
    assert [record["round"] for record in trial.records()][:2] == [0, 2]


# --- settings, numbers, logs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quorom": 2}, "did you mean 'quorum'"),
        ({"run": "ab"}, "64 hexadecimal digits"),
        ({"least": 9.0}, "at most the deadline"),
        ({"deadline": -1.0}, "deadline"),
        ({"stall": -1.0}, "stall"),
        ({"listen": "nowhere"}, "host:port"),
        ({"listen": "127.0.0.1:99999"}, "host:port"),
        ({"aggregator": "kurm"}, "krum"),
        ({"metrics": 80}, "1024"),
        ({"worker": "signs"}, "worker"),
        ({"rounds": 0}, "rounds"),
        ({"quorum": 0}, "quorum"),
        ({"seed": -1}, "seed"),
        ({"model": "gpt"}, "model"),
        ({"shape": ["6"]}, "shape"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, changes, told):
    trial = Trial(tmp_path, workers=2)
    trial.write_settings(**changes)
    with pytest.raises(SpecError, match=told):
        ServerSettings.read(tmp_path / "federation.toml")


def test_a_setting_that_is_missing_and_numbers_beyond_the_workers_are_named(tmp_path):
    (tmp_path / "federation.toml").write_text("rounds = 3\n")
    with pytest.raises(SpecError, match="run: is missing"):
        ServerSettings.read(tmp_path / "federation.toml")
    trial = Trial(tmp_path / "server", workers=2, quorum=3)
    with pytest.raises(SpecError, match="quorum = 3"):
        play(run_whole(trial))


def test_a_port_that_is_taken_and_keys_that_do_not_belong_together_are_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        trial = Trial(tmp_path / "one", workers=1, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(FederationError, match="cannot be listened on"):
            play(run_whole(trial))
    trial = Trial(tmp_path / "two", workers=1)
    SigningKey.generate().write(trial.folder / "signing.key")
    with pytest.raises(FederationError, match="another Ed25519 key"):
        play(run_whole(trial))


def test_a_module_of_ones_own_is_served(tmp_path):
    trial = Trial(tmp_path, workers=1, rounds=1, quorum=1)
    linear = nn.Linear(6, 3)
    server = Server(linear, trial.auxiliary, trial.settings)

    async def run():
        async with trial.serving(server), trial.peer("w0", server.port) as peer:
            await peer.hello()
            assert peer.terms.parameters == 21
            model = await peer.next(Kind.MODEL)
            assert np.allclose(model.vector()[:18], linear.weight.detach().flatten())
            await peer.send(peer.upload(model, torch.zeros(21)))
            assert (await peer.next(Kind.END)).kind == Kind.END

    play(run())


def test_prometheus_reads_the_numbers(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trial = Trial(tmp_path, workers=2, rounds=2, metrics=port, aggregator="mean")

    async def asked():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        content = await reader.read()
        writer.close()
        await writer.wait_closed()
        return content.decode()

    async def run():
        async with trial.serving() as server:
            lines = []
            server.watch = lines.append

            async def answer(peer, model):
                if model.round == 1 and peer.name == "w0":
                    peer.told = lines.append(await asked())
                await peer.send(peer.upload(model))

            await take_parts(trial, server.port, {"w0": answer})
            await server.running
            return next(line for line in lines if isinstance(line, str))

    head, _, text = play(run()).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 OK")
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert found["noisegate_rounds_judged_total"] == "1"
    assert found["noisegate_connected_workers"] == "2"
    assert found['noisegate_worker_rounds_total{worker="w0",status="used"}'] == "1"
    assert float(found['noisegate_worker_weight_total{worker="w1"}']) == 0.5
    assert "noisegate_stall_left_seconds" in found
    assert escaped('a"b\\c\nd') == r"a\"b\\c\nd"
    assert all(line.startswith(("#", "noisegate_")) for line in text_of_empty().splitlines())


def text_of_empty():
    return text_of(
        {
            **dict.fromkeys(("round", "judged", "rounds", "stall_left"), 0),
            **{"connected": [], "state": "gather", "seconds": None, "accuracy": None, "workers": {}},
        }
    )


def test_peers_cannot_fill_the_disk_with_log_lines():
    lines, now = [], [0.0]
    log = OperatorsLog(lines.append, clock=lambda: now[0])
    for _ in range(10 * BURST):
        log.say_of_peer("refused", why="x" * 10**6)
    assert len(lines) == BURST
    assert max(len(json.dumps(line)) for line in lines) < 1000
    now[0] += 1.0
    log.say_of_peer("refused")
    assert lines[-1]["unwritten"] == 9 * BURST


def test_sends_in_flight_are_bounded_and_a_stuck_one_does_not_keep_others(monkeypatch):
    monkeypatch.setattr("noisegate.federation.streams.SLOW", 0.05)

    async def run():
        gate, flying, most = SendGate(2**24), [0], [0]
        assert gate.turns == 4

        async def send(seconds):
            flying[0] += 1
            most[0] = max(most[0], flying[0])
            try:
                await asyncio.sleep(seconds)
            finally:
                flying[0] -= 1

        loop = asyncio.get_running_loop()
        until, began = loop.time() + 1.0, time.monotonic()
        stuck = [asyncio.ensure_future(gate.send(lambda: send(99), until)) for _ in range(4)]
        await asyncio.sleep(0)
        quick = [gate.send(lambda: send(0.001), until) for _ in range(20)]
        assert all(await asyncio.gather(*quick))
        assert time.monotonic() - began < 0.8
        assert not any(await asyncio.gather(*stuck)), "those streams are of no use"
        assert most[0] <= 2 * gate.turns
        assert flying == [0]

    play(run())


def test_connections_leave_files_for_the_server():
    assert 16 <= most_connections(10) <= MOST_CONNECTIONS
    assert most_connections(10**6) < 10**6 * 4


def test_a_model_that_waits_behind_others_is_not_held_against_its_worker_and_goes_with_its_round():
    async def run():
        gate = SendGate(2**24)
        written, blocked = [], asyncio.Event()

        class Context:
            async def write(self, content):
                written.append(content)
                await blocked.wait()

        letter = ModelLetter(b"model", asyncio.get_running_loop().time() + 5.0)
        streams = [Stream(Context(), Sender(row, f"w{row}", b""), 0, gate) for row in range(gate.turns + 1)]
        tasks = [asyncio.ensure_future(stream._write()) for stream in streams]
        for stream in streams:
            stream.post_model(letter)
        while len(written) < gate.turns:
            await asyncio.sleep(0)
        assert [stream.waits_for_turn(letter) for stream in streams] == [False] * gate.turns + [True]
        for stream in streams:
            stream.withdraw(letter)
        blocked.set()
        await asyncio.sleep(0.05)
        assert len(written) == gate.turns, "its round is over"
        for task in tasks:
            task.cancel()

    play(run())


def test_a_roster_that_changes_right_after_the_start_is_seen(tmp_path):
    async def run():
        trial = Trial(tmp_path, workers=2, quorum=2, gather=0.0)
        async with trial.serving() as server, trial.peer("w0", server.port) as peer:
            await peer.hello()
            trial.write_roster({"w1": trial.workers["w1"].key.public})  # before the server's first look, perhaps
            until = time.monotonic() + 10
            while server._serving.reception.streams and time.monotonic() < until:
                await asyncio.sleep(0.05)
            assert not server._serving.reception.streams

    play(run())


def test_a_connection_without_a_stream_ends(tmp_path, monkeypatch):
    """So that whoever holds connections, and says nothing, does not keep others out."""
    options = []
    build = grpc.aio.server
    monkeypatch.setattr(grpc.aio, "server", lambda **given: (options.extend(given["options"]), build(**given))[1])

    async def run():
        async with Trial(tmp_path, workers=1).serving():
            pass

    play(run())
    assert 0 < dict(options)["grpc.max_connection_idle_ms"] <= 20_000
    assert 0 < dict(options)["grpc.server_handshake_timeout_ms"] <= 10_000
