"""What leaves a worker, and when: agreement, answers, charges, receipts. The server is scripted."""

import asyncio
import dataclasses
import hashlib
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from noisegate.entropy import grid_of
from noisegate.errors import DataError, FederationError, PolicyError, SpecError, StoreError
from noisegate.federation import Ledger, Policy, Terms, Worker
from noisegate.federation.client import WorkerStream
from noisegate.federation.keys import SigningKey
from noisegate.federation.participation import Holder, Participation
from noisegate.federation.wire import Kind, Message, body_of, digest_of, read, say
from noisegate.federation.worker import silent
from noisegate.files import seal
from noisegate.vectors import FlatModel

RUN = "ab" * 32
TERMS = Terms(RUN, "a trial", rounds=20, parameters=22, batch=4, declared=40, sigma=2.0)
FEATURES = 10


class ScriptedServer:
    """Signs terms, models and receipts as a server would, or wrongly."""

    def __init__(self, terms=TERMS):
        self.key, self.other, self.terms = SigningKey.generate(), SigningKey.generate(), terms
        self.run = bytes.fromhex(terms.run)

    def terms_message(self, counter=0, key=None, name="w1", digest=bytes(32), text=None):
        about = {"run": self.run, "counter": counter, "digest": digest}
        return read(say(Kind.TERMS, name, key or self.key, text or self.terms.as_dict(), **about))

    def model(self, round=0, value=0.0, kind=Kind.MODEL, key=None, **changes):
        body = body_of(np.full(self.terms.parameters, value, np.float32))
        message = Message(kind, "all", self.run, round, digest_of(body), body=body)
        return read(dataclasses.replace(message, **changes).signed(key or self.key))

    def receipt(self, upload, counter, key=None):
        message = read(upload)
        receipt = Message(Kind.RECEIPT, "w1", self.run, message.round, digest_of(message.body), counter)
        return read(receipt.signed(key or self.key))


@pytest.fixture
def server():
    return ScriptedServer()


def examples(count=30):
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=rng)
    return x, (x[:, 0] > 0).long()


def holder(server, ledger, **limits):
    policy = Policy(**{"epsilon": 50.0, "delta": 1e-5, "server": (server.key.public.hex(),)} | limits)
    model = FlatModel(nn.Linear(FEATURES, 2))
    return Holder("w1", SigningKey.generate(), policy, ledger, model, examples())


def joined(server, ledger, counter=0, who=None, **limits):
    return Participation(who or holder(server, ledger, **limits), server.terms_message(counter))


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger") as opened:
        yield opened


def test_an_answer_is_signed_charged_and_on_the_public_grid(server, ledger):
    run = joined(server, ledger)
    sent = run.answer(server.model(3))
    message = read(sent)
    assert (message.kind, message.worker, message.round, message.run) == (Kind.UPLOAD, "w1", 3, server.run)
    assert message.digest == server.model(3).digest
    assert message.is_from(run.holder.key.public)
    assert ledger.charge_of(RUN, 3).model == message.digest.hex()
    steps = message.vector().astype(np.float64) / grid_of(run.mechanism.added_noise)
    assert np.array_equal(steps, np.round(steps))
    assert len(set(steps)) > 10


def test_the_upload_is_on_disk_and_charged_before_it_is_handed_out(server, ledger, monkeypatch):
    run = joined(server, ledger)
    order = []
    kept, charge = type(run.outbox).put, Ledger.charge
    monkeypatch.setattr(type(run.outbox), "put", lambda *given: (order.append("outbox"), kept(*given))[1])
    monkeypatch.setattr(Ledger, "charge", lambda *given: (order.append("ledger"), charge(*given))[1])
    run.answer(server.model(0))
    assert order == ["outbox", "ledger"]


def test_the_same_model_again_gets_the_same_bytes_also_after_a_restart(server, tmp_path):
    with Ledger.open(tmp_path / "l") as ledger:
        who = holder(server, ledger)
        sent = joined(server, ledger, who=who).answer(server.model(0))
        assert joined(server, ledger, who=who).answer(server.model(0)) == sent
    with Ledger.open(tmp_path / "l") as ledger:
        again = dataclasses.replace(who, ledger=ledger)
        assert joined(server, ledger, counter=1, who=again).answer(server.model(0)) == sent
        assert ledger.charged(RUN) == 1


def test_another_model_in_a_round_that_was_answered_is_declined(server, ledger):
    run = joined(server, ledger)
    run.answer(server.model(5))
    for model in (server.model(5, value=1.0), server.model(4), server.model(0)):
        answer = read(run.answer(model))
        assert answer.kind == Kind.DECLINE
        assert answer.is_from(run.holder.key.public)
    assert ledger.charged(RUN) == 1


def test_a_charged_round_whose_bytes_are_gone_is_declined_and_never_drawn_again(server, ledger):
    run = joined(server, ledger)
    run.answer(server.model(0))
    os.unlink(run.outbox.folder / "pending.bin")
    assert read(run.answer(server.model(0))).kind == Kind.DECLINE
    assert ledger.charged(RUN) == 1


def test_two_uploads_never_share_noise(server, ledger):
    run = joined(server, ledger)
    first, second = (read(run.answer(server.model(t))).vector() for t in (0, 1))
    assert not np.array_equal(first, second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.9


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": bytes(32)},
        {"run": bytes(32)},
        {"worker": "w1"},
        {"body": b""},
        {"body": bytes(4 * 21)},
        {"kind": Kind.RECEIPT, "body": b""},
    ],
)
def test_what_is_no_model_of_this_run_is_not_believed(server, ledger, changes):
    run = joined(server, ledger)
    with pytest.raises(FederationError, match=r"not believed|does not belong|numbers of its digest"):
        run.answer(server.model(0, **changes))
    assert ledger.charged(RUN) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_is_not_finite_is_not_used(server, ledger, value):
    with pytest.raises(FederationError, match="not finite"):
        joined(server, ledger).answer(server.model(0, value=value))
    assert ledger.charged(RUN) == 0


def test_a_model_with_another_signature_is_not_believed(server, ledger):
    with pytest.raises(FederationError, match="signature"):
        joined(server, ledger).answer(server.model(0, key=server.other))


def test_terms_are_believed_only_from_a_server_that_the_policy_names(server, ledger):
    who = holder(server, ledger)
    with pytest.raises(FederationError, match="policy names"):
        Participation(who, server.terms_message(key=server.other))
    with pytest.raises(FederationError, match="for this worker"):
        Participation(who, server.terms_message(name="w2"))
    with pytest.raises(SpecError, match="missing or unknown"):
        Participation(who, server.terms_message(text={"run": RUN}))
    with pytest.raises(FederationError, match="another run"):
        Participation(who, server.terms_message(text=TERMS.as_dict() | {"run": "cd" * 32}))
    assert ledger.book.runs == {}


@pytest.mark.parametrize(
    ("limits", "named"),
    [({"sigma": 2.1}, "sigma"), ({"batch": 3}, "batch"), ({"declared": 41}, "declared"), ({"parameters": 21}, "param")],
)
def test_the_policy_is_enforced_whatever_the_server_asks(server, ledger, limits, named):
    with pytest.raises(PolicyError, match=named):
        joined(server, ledger, **limits)
    assert ledger.book.runs == {}


def test_a_model_of_another_size_is_refused(ledger):
    server = ScriptedServer(dataclasses.replace(TERMS, parameters=23))
    with pytest.raises(PolicyError, match="another model"):
        joined(server, ledger)


def test_a_worker_leaves_when_its_budget_is_spent_and_not_before(server, ledger):
    limits = {"epsilon": 1.0}
    run = joined(server, ledger, **limits)
    assert 0 < run.allowed < TERMS.rounds
    answers = [read(run.answer(server.model(t))).kind for t in range(run.allowed + 2)]
    assert answers == [Kind.UPLOAD] * run.allowed + [Kind.LEAVE] * 2
    assert ledger.charged(RUN) == run.allowed
    assert ledger.spent(1e-5) <= 1.0
    # Joining again does not give a new budget, nor does another run on the same data.
    assert joined(server, ledger, counter=1, who=run.holder).allowed == run.allowed
    other = ScriptedServer(dataclasses.replace(TERMS, run="cd" * 32))
    other.key = server.key
    assert Participation(run.holder, other.terms_message()).allowed == 0


def test_no_more_rounds_are_answered_than_the_terms_have(server, ledger):
    run = joined(server, ledger)
    assert read(run.answer(server.model(TERMS.rounds))).kind == Kind.LEAVE
    assert run.allowed == TERMS.rounds
    assert ledger.charged(RUN) == 0


def test_the_last_upload_is_what_the_server_acknowledged(server, ledger):
    seen = []

    def make(mechanism, round, params, last):
        seen.append(None if last is None else float(last[0]))
        return torch.full((22,), float(round))

    run = Participation(holder(server, ledger), server.terms_message(), make)
    first = run.answer(server.model(0))
    run.acknowledge(server.receipt(first, counter=1))
    run.answer(server.model(1))  # without a receipt: the server did not get it
    run.answer(server.model(2))
    assert seen == [None, 0.0, 0.0]
    # Whoever joins again learns from the terms which upload the server has.
    digest = digest_of(read(run.outbox.pending().message).body)
    again = Participation(run.holder, server.terms_message(counter=2, digest=digest), make)
    again.answer(server.model(3))
    assert seen[-1] == 2.0


def test_a_receipt_with_a_wrong_signature_changes_nothing(server, ledger):
    run = joined(server, ledger)
    sent = run.answer(server.model(0))
    with pytest.raises(FederationError, match="signature"):
        run.acknowledge(server.receipt(sent, 1, key=server.other))
    assert run.outbox.pending() is not None


def test_a_restored_copy_of_the_ledger_is_noticed(server, ledger):
    run = joined(server, ledger)
    sent = run.answer(server.model(0))
    with pytest.raises(StoreError, match="older copy"):
        run.acknowledge(server.receipt(sent, counter=2))
    with pytest.raises(StoreError, match="older copy"):
        joined(server, ledger, counter=5, who=run.holder)


def test_a_run_never_changes_its_terms(server, ledger):
    run = joined(server, ledger)
    other = ScriptedServer(dataclasses.replace(TERMS, sigma=2.5))
    other.key = server.key
    with pytest.raises(StoreError, match="other terms"):
        Participation(run.holder, other.terms_message())


def test_a_failed_append_sends_nothing(server, ledger, monkeypatch):
    run = joined(server, ledger)
    force = os.fsync

    def full(number):
        if number == ledger._file:
            raise OSError(28, "No space left on device")
        force(number)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError):
        run.answer(server.model(0))
    monkeypatch.undo()
    with pytest.raises(StoreError):  # the ledger is read anew before anything else is answered
        run.answer(server.model(1))


def test_data_are_checked(server):
    x, y = examples()
    policy = Policy(1.0, 1e-5, (server.key.public.hex(),), declared=20)
    for wrong in ((x.double(), y), (x[:0], y[:0]), (x, y[:3]), (x * torch.nan, y)):
        with pytest.raises(DataError, match="data"):
            Worker(nn.Linear(FEATURES, 2), wrong, policy)


def test_a_fingerprint_tells_data_apart(server):
    x, y = examples()
    policy = Policy(1.0, 1e-5, (server.key.public.hex(),), declared=20)
    one, same, other = (Worker(nn.Linear(FEATURES, 2), (a, y), policy).fingerprint() for a in (x, x.clone(), x + 1))
    assert one == same != other


def test_a_worker_that_holds_far_more_than_its_policy_declares_does_not_start(server):
    policy = Policy(1.0, 1e-5, (server.key.public.hex(),), declared=10)
    with pytest.raises(PolicyError, match="declared = 10"):
        Worker(nn.Linear(FEATURES, 2), examples(), policy)


def test_an_upload_that_was_not_the_one_charged_is_never_sent(server, ledger):
    run = joined(server, ledger)
    run.answer(server.model(0))
    other = Message(Kind.UPLOAD, "w1", server.run, 0, server.model(0).digest, body=bytes(88)).signed(run.holder.key)
    mark = dataclasses.replace(run.outbox.pending(), message=other)
    path = run.outbox.folder / "pending.bin"
    head = seal(
        {"entry": 2, "round": 0, "model": mark.model, "upload": hashlib.sha256(other).hexdigest(), "size": len(other)},
        indent=None,
    )
    path.write_bytes(head + other)
    assert read(run.answer(server.model(0))).kind == Kind.DECLINE


def test_a_worker_that_is_canceled_keeps_its_ledger_until_what_it_computes_is_done(server, tmp_path):
    began, may_end, order = threading.Event(), threading.Event(), []

    def slow():
        began.set()
        may_end.wait(10)
        order.append("computed")

    async def run():
        with Ledger.open(tmp_path / "l") as ledger:
            stream = WorkerStream(None, holder(server, ledger), None, silent)
            task = asyncio.ensure_future(stream._in_thread(slow))
            await asyncio.to_thread(began.wait, 10)
            task.cancel()
            await asyncio.sleep(0.05)
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            order.append("closed")

    asyncio.run(run())
    assert order == ["computed", "closed"]


def test_one_call_takes_part_in_one_run(server, ledger):
    who = holder(server, ledger)
    stream = WorkerStream(_Place, who, None, silent)
    stream._stay_with(Participation(who, server.terms_message()))
    stream._stay_with(Participation(who, server.terms_message()))  # the same one, after the stream broke
    other = ScriptedServer(dataclasses.replace(TERMS, run="cd" * 32))
    other.key = server.key
    with pytest.raises(FederationError, match="another run"):
        stream._stay_with(Participation(who, other.terms_message()))


class _Place:
    server = "127.0.0.1:7443"
