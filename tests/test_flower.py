"""noisegate on Flower, in one process: message mode, enrollment, envelopes, and a grid on which no reply raises.

Needs flwr, which has its own environment (`make flower`). benchmarks/flower_processes.py runs the real processes.
"""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip(
        "flwr is not installed here; `make flower` installs it in an environment of its own", allow_module_level=True
    )

from noisegate import stream
from noisegate.data import hold_out, load
from noisegate.errors import FederationError
from noisegate.federation import wire
from noisegate.federation.certificates import Authority, identity_of, make_request, sign_request
from noisegate.federation.keys import SigningKey, write_private
from noisegate.federation.ledger import Ledger
from noisegate.federation.policy import Policy
from noisegate.federation.roster import Roster
from noisegate.federation.settings import ServerSettings
from noisegate.federation.spending import Spending, price
from noisegate.federation.store import read_rounds
from noisegate.federation.worker import Worker
from noisegate.flower import MessageServer, NoisegateStrategy, client_app, make_host
from noisegate.flower.grid import SteadyGrid, packet, part_of
from noisegate.flower.host import NodeEnrollment, node_name, proof_text
from noisegate.flower.launcher import Launcher
from noisegate.flower.letters import read_letter, write_letter
from noisegate.flower.node import Desk
from noisegate.flower.sealing import SealingKey, seal_to, sealing_key
from noisegate.models import build_model

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip

RUN = "ab" * 32
NODES = [1000, 1001, 1002, 1003]


class InProcessGrid(Grid):
    """A grid whose nodes are calls. It writes fields of messages that Flower writes elsewhere.

    twist: (node, reply) -> what arrives in place of the reply; None for nothing, an exception to be raised on pulling.
    """

    def __init__(self, app, folder, nodes=NODES, twist=lambda node, reply: reply):
        self.app, self.twist, self.sent, self._replies, self._n = app, twist, [], {}, 0
        self.contexts = {
            node: Context(
                run_id=1, node_id=node, node_config={"folder": str(folder / f"w{i}")}, state=RecordDict(), run_config={}
            )
            for i, node in enumerate(nodes)
        }

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *given):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message):
        self._n += 1
        message.metadata.__dict__["_message_id"] = name = f"m{self._n}"
        self.sent.append(message)
        node = message.metadata.dst_node_id
        reply = self.twist(node, self.app(message, self.contexts[node]) if self.app else None)
        if isinstance(reply, Message):
            assert reply.metadata.reply_to_message_id == name
        self._replies[name] = reply
        return name

    def pull_messages(self, message_ids):
        found = [self._replies.pop(each) for each in list(message_ids) if self._replies.get(each) is not None]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


@pytest.fixture(autouse=True)
def identity_of_the_sender():
    """Flower's Message asks who sends it; in a ServerApp's process Flower has said so."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture
def federation(tmp_path, digits):
    """A server's folder, its settings, and a ClientApp of four workers."""
    return Federation(tmp_path, digits)


class Federation:
    """Everything of a small run on digits. Worker i has a quarter of the examples."""

    def __init__(self, path, digits, rounds=2, epsilon=50.0):
        self.path, self.digits = path, digits
        self.key = make_host(path / "server", ["127.0.0.1"])
        own, rest = hold_out(digits.y, digits.classes, 2, stream(1, "auxiliary"))
        self.auxiliary = digits.x[own], digits.y[own]
        self.parts = rest.chunk(len(NODES))
        self.policy = Policy(epsilon=epsilon, delta=1e-4, server=(self.key,), declared=280)
        self.settings = ServerSettings(
            run=RUN, rounds=rounds, batch=32, declared=300, sigma=1.0, believed_honest=3, quorum=2, rate=0.5,
            deadline=20.0, least=10.0, gather=2.0, evaluate_every=1, seed=1, folder=path / "server",
        )  # fmt: skip
        self.app = client_app(self.worker)
        for i in range(len(NODES)):
            (path / f"w{i}").mkdir()

    def model(self):
        return build_model("mlp", self.digits.shape, self.digits.classes, stream(1, "weights"))

    def worker(self, context):
        part = self.parts[int(context.node_config["folder"][-1])]
        return Worker(self.model(), (self.digits.x[part], self.digits.y[part]), self.policy)

    def server(self):
        test = self.digits.x_test, self.digits.y_test
        return MessageServer(self.model(), self.auxiliary, self.settings, test=test)

    def grid(self, **given):
        return InProcessGrid(self.app, self.path, **given)

    def lines(self):
        return read_rounds(self.path / "server" / "state" / "rounds.jsonl")

    def charged(self):
        found = []
        for i in range(len(NODES)):
            with Ledger.open(self.path / f"w{i}" / "ledger") as ledger:
                found.append(ledger.charged(RUN))
        return found


def test_message_mode_trains_and_charges_each_ledger_once_a_round(federation):
    result = NoisegateStrategy(federation.server(), 4).run(federation.grid())
    assert [metrics["used"] + metrics["refused"] for metrics in result.train_metrics_clientapp.values()] == [4, 4]
    assert federation.charged() == [2, 2, 2, 2]
    assert [line["round"] for line in federation.lines()] == [0, 1]
    told = json.loads((federation.path / "server" / "state" / "result.json").read_text())
    assert told["judged"] == 2
    assert {name: each["counter"] for name, each in told["workers"].items()} == {node_name(node): 2 for node in NODES}
    model = result.arrays["parameters"].numpy()
    assert np.isfinite(model).all()
    assert not np.array_equal(model, federation.server().model.initial().numpy())


def test_uploads_are_in_no_message_in_the_clear(federation):
    replies = []
    grid = federation.grid(twist=lambda node, reply: replies.append(reply) or reply)
    NoisegateStrategy(federation.server(), 4).run(grid)
    sealed = [content for reply in replies if (content := part_of(reply, "sealed", 2**24)) is not None]
    assert len(sealed) == 8
    for i in range(len(NODES)):
        with Ledger.open(federation.path / f"w{i}" / "ledger") as ledger:
            pending = ledger.outbox(RUN).pending().message
        assert not any(pending[:100] in content or pending[-100:] in content for content in sealed)
    assert all(set(dict(reply.content)) == {"noisegate"} for reply in replies)


def of_array(array):
    return RecordDict({"noisegate": ArrayRecord({"sealed": array})})


WRONG = [
    lambda reply: RecordDict(),
    lambda reply: RecordDict({"noisegate": MetricRecord({"sealed": 3})}),
    lambda reply: of_array(Array(np.ones((3, 3)))),
    lambda reply: of_array(Array("uint8", (9,), "numpy.ndarray", b"\x80\x04garbage")),  # no file of numpy's
    lambda reply: packet(sealed=os.urandom(500)),
    lambda reply: packet(sealed=b""),
    lambda reply: packet(sealed=bytes(10_000_000)),
    lambda reply: RecordDict({**reply.content, "metrics": MetricRecord({"num-examples": 10**12})}),  # not read
]
"""What one node replies in place of its upload, round after round."""


def test_whatever_one_node_replies_the_run_goes_on(tmp_path, digits):
    federation, wrong = Federation(tmp_path, digits, rounds=len(WRONG)), iter(WRONG)

    def twist(node, reply):
        if node != NODES[0] or part_of(reply, "sealed", 2**24) is None:
            return reply
        return Message(next(wrong)(reply), reply_to=grid.sent[-1])

    grid = federation.grid(twist=twist)
    NoisegateStrategy(federation.server(), 4).run(grid)
    assert len(federation.lines()) == len(WRONG)
    for line in federation.lines():
        words = [line["workers"][node_name(node)]["status"] for node in NODES]
        assert set(words[1:]) <= {"used", "refused"}
        assert words[0] in ({"malformed"} if line["round"] < len(WRONG) - 1 else {"used", "refused"})
        assert all(each.get("weight", 0.0) <= 1.0 for each in line["workers"].values())


def test_errors_damage_and_silence_cost_nobody_else_a_round(federation):
    def twist(node, reply):
        if part_of(reply, "sealed", 2**24) is None:
            return reply
        if node == NODES[0]:
            return Message(Error(8, "ClientApp stopped responding."), reply_to=grid.sent[-1])
        return ValueError("cannot be inflated") if node == NODES[1] else reply

    grid = federation.grid(twist=twist)
    NoisegateStrategy(federation.server(), 4).run(grid)
    for line in federation.lines():
        words = [line["workers"][node_name(node)]["status"] for node in NODES]
        assert words[0] == "missing"
        assert words[1] in ("late", "missing")
        assert set(words[2:]) <= {"used", "refused"}


def test_a_reply_of_one_worker_does_not_count_as_anothers(federation):
    kept = {}

    def twist(node, reply):
        content = part_of(reply, "sealed", 2**24)
        if content is not None:
            kept[node] = content
        if content is None or node != NODES[1]:
            return reply
        return Message(packet(sealed=kept[NODES[0]]), reply_to=grid.sent[-1])

    grid = federation.grid(twist=twist)
    NoisegateStrategy(federation.server(), 4).run(grid)
    assert {line["workers"][node_name(NODES[1])]["status"] for line in federation.lines()} == {"malformed"}


def test_after_a_crash_a_worker_sends_the_same_bytes_and_the_server_goes_on(federation):
    """The ServerApp dies after a round was sent; Flower's run fails; a new run goes on with the next number."""
    server = federation.server()
    strategy = NoisegateStrategy(server, 4)
    grid = SteadyGrid(federation.grid())
    sent = list(strategy.configure_train(1, None, None, grid))
    opened = []
    for _ in range(2):
        replies = {reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(sent)}
        assert federation.charged() == [1, 1, 1, 1]
        envelopes = [part_of(replies[message.metadata.message_id], "sealed", 2**24) for message in sent]
        each = zip(envelopes, server.now.names, strict=True)
        opened.append([server.sealing.open(envelope, about(server, name)) for envelope, name in each])
    assert opened[0] == opened[1]
    assert all(wire.read(each).kind == wire.Kind.UPLOAD for each in opened[0])
    strategy.close()  # the process dies here
    NoisegateStrategy(federation.server(), 4).run(federation.grid())
    assert [line["round"] for line in federation.lines()] == [1]
    assert federation.charged() == [2, 2, 2, 2]


def about(server, name):
    from noisegate.flower.sealing import about_round

    collection = server.collection
    return about_round(
        wire.Message(wire.Kind.DECLINE, "all", collection.run, collection.round, collection.digest), name
    )


def test_a_worker_whose_budget_is_spent_leaves_and_the_others_go_on(tmp_path, digits):
    federation = Federation(tmp_path, digits, rounds=3)
    terms = federation.server().terms
    two_rounds = price([Spending(terms.cost(2), terms.parameters, terms.rounds)], federation.policy.delta)
    small = replace(federation.policy, epsilon=two_rounds)
    plain_worker = federation.worker
    federation.worker = lambda context: (
        replace(plain_worker(context), policy=small)
        if context.node_config["folder"].endswith("0")
        else plain_worker(context)
    )
    federation.app = client_app(federation.worker)
    NoisegateStrategy(federation.server(), 4).run(federation.grid())
    assert federation.charged() == [2, 3, 3, 3]
    assert federation.lines()[-1]["workers"][node_name(NODES[0])] == {
        "status": "missing",
        "detail": "left: budget spent",
    }


def test_a_server_that_the_policy_does_not_name_gets_nothing(federation):
    """Neither a request nor an upload; and not a word of why."""
    federation.policy = replace(federation.policy, server=("cd" * 32,))
    replies = []
    grid = federation.grid(twist=lambda node, reply: replies.append(reply) or reply)
    with pytest.raises(FederationError, match="0 nodes enrolled"):
        NoisegateStrategy(federation.server(), 4).run(grid)
    assert {part_of(reply, "answer", 1000) for reply in replies} == {b'{"answer": "refused"}'}
    assert not (federation.path / "w0" / "signing.key").exists()


def test_an_exception_of_the_app_is_not_told_to_flower(federation):
    def make(context):
        raise RuntimeError("a secret path")

    grid = InProcessGrid(client_app(make), federation.path)
    letter = write_letter(SigningKey.generate(), "enroll", name="node-1000", server=federation.key)
    grid.push_messages([Message(packet(letter=letter), dst_node_id=NODES[0], message_type="query.enroll")])
    (reply,) = grid.pull_messages(["m1"])
    assert part_of(reply, "answer", 1000) == b'{"answer": "failed"}'


def test_a_node_keeps_its_key_and_another_key_is_refused_later(federation):
    NoisegateStrategy(federation.server(), 4).run(federation.grid())
    roster = Roster.read(federation.path / "server" / "roster.toml")
    assert list(roster.keys) == [node_name(node) for node in NODES]
    for i, node in enumerate(NODES):
        own = identity_of((federation.path / f"w{i}" / "worker.pem").read_bytes())
        assert (own.name, own.key) == (node_name(node), roster.keys[own.name])
        assert (federation.path / f"w{i}" / "signing.key").stat().st_mode & 0o077 == 0
    enrollment = NodeEnrollment.of(federation.path / "server", 4)
    for name, signing, message in (
        (node_name(NODES[0]), SigningKey.generate(), "another key"),
        ("node-7", SigningKey.generate(), "not in roster.toml"),
    ):
        _, request = make_request(name, signing.public)
        proof = signing.sign(proof_text(request, enrollment.signing.public))
        with pytest.raises(FederationError, match=message):
            enrollment.admit(NODES[0], request, proof)


def test_with_a_roster_workers_keep_their_names_when_flower_gives_their_nodes_other_ids(federation):
    """As Flower's simulation does in every run."""
    NoisegateStrategy(federation.server(), 4).run(federation.grid())
    federation.settings = replace(federation.settings, run="cd" * 32)
    (federation.path / "server" / "state").rename(federation.path / "old")
    NoisegateStrategy(federation.server(), 4).run(federation.grid(nodes=[7, 8, 9, 10]))
    assert [set(line["workers"]) for line in federation.lines()] == 2 * [{node_name(node) for node in NODES}]


def test_certificates_may_be_signed_elsewhere(federation):
    """Where the server has no authority's key, it signs nothing: workers bring their own certificates and names."""
    authority, keys = Authority.read(federation.path / "server"), {}
    for i in range(len(NODES)):
        folder, signing = federation.path / f"w{i}", SigningKey.generate()
        key, request = make_request(f"hospital-{i}", signing.public)
        signing.write(folder / "signing.key")
        write_private(folder / "worker.key", key)
        (folder / "worker.pem").write_bytes(sign_request(authority, request))
        (folder / "ca.pem").write_bytes(authority.certificate)
        (folder / "worker.toml").write_text(f'name = "hospital-{i}"\nserver = "127.0.0.1:1"\nledger = "ledger"\n')
        keys[f"hospital-{i}"] = signing.public
    (federation.path / "server" / "ca.key").unlink()
    (federation.path / "server" / "roster.toml").write_text(Roster(keys).to_toml())
    before = (federation.path / "w0" / "worker.pem").read_bytes()
    NoisegateStrategy(federation.server(), 4).run(federation.grid())
    assert [set(line["workers"]) for line in federation.lines()] == 2 * [set(keys)]
    assert federation.charged() == [2, 2, 2, 2]
    assert (federation.path / "w0" / "worker.pem").read_bytes() == before


def test_a_request_must_be_signed_by_the_key_that_it_names(federation):
    """A public key is public: naming another worker's gives nothing."""
    enrollment, other = NodeEnrollment.of(federation.path / "server", 4), SigningKey.generate()
    _, request = make_request(node_name(NODES[0]), other.public)
    text = proof_text(request, enrollment.signing.public)
    for proof in (b"", bytes(64), SigningKey.generate().sign(text), other.sign(proof_text(request, other.public))):
        with pytest.raises(FederationError, match="does not hold the key"):
            enrollment.admit(NODES[0], request, proof)
    assert enrollment.admit(NODES[0], request, other.sign(text))[0] == node_name(NODES[0])
    _, stolen = make_request(node_name(NODES[1]), other.public)
    with pytest.raises(FederationError, match="the key of another worker"):
        enrollment.admit(NODES[1], stolen, other.sign(proof_text(stolen, enrollment.signing.public)))
    _, claimed = make_request(node_name(NODES[2]), (third := SigningKey.generate()).public)
    with pytest.raises(FederationError, match="it must be"):
        enrollment.admit(NODES[3], claimed, third.sign(proof_text(claimed, enrollment.signing.public)))


def test_a_certificate_for_anothers_key_is_not_taken(federation):
    """Whoever carries the messages cannot put another authority or certificate in a worker's folder."""
    desk, server = (
        Desk(federation.path / "w0", federation.policy),
        SigningKey.read(federation.path / "server" / "signing.key"),
    )
    desk.request(write_letter(server, "enroll", name="node-1000", server=federation.key))
    enrollment = NodeEnrollment.of(federation.path / "server", 4)
    signing = SigningKey.generate()
    _, request = make_request("node-1000", signing.public)
    _, certificate = enrollment.admit(1000, request, signing.sign(proof_text(request, server.public)))
    papers = {"authority": enrollment.certificate.decode(), "certificate": certificate.decode()}
    with pytest.raises(FederationError, match="not believed"):
        desk.accept(write_letter(SigningKey.generate(), "join", **papers), "join")
    with pytest.raises(FederationError, match="not believed"):
        desk.accept(write_letter(server, "round", **papers), "join")
    with pytest.raises(FederationError, match="another private key"):
        desk.accept(write_letter(server, "join", **papers), "join")
    assert not (federation.path / "w0" / "ca.pem").exists()


def test_a_node_that_fails_is_asked_again_after_longer_and_longer_pauses(federation):
    clock = [0.0]
    grid = federation.grid(twist=lambda node, reply: ValueError("damaged"))
    launcher = Launcher(
        SteadyGrid(grid), NodeEnrollment.of(federation.path / "server", 4), lambda text: None, lambda: clock[0]
    )
    for _ in range(600):
        launcher.look()
        clock[0] += 1.0
    assert not launcher.enrolled
    assert 4 * 9 < len(grid.sent) < 4 * 20


def test_an_envelope_opens_for_the_server_and_what_it_is_about_alone():
    signing, run = SigningKey.generate(), bytes(32)
    key = SealingKey(signing, run)
    public = sealing_key(key.stated, signing.public, run)
    envelope = seal_to(public, b"upload", b"round 3")
    assert key.open(envelope, b"round 3") == b"upload"
    assert key.open(envelope, b"round 4") is None
    assert SealingKey(signing, run).open(envelope, b"round 3") is None
    assert seal_to(public, b"upload", b"round 3") != envelope
    for wrong in (
        b"",
        envelope[:-1],
        bytes(32) + envelope[32:],
        bytes(len(envelope)),
        envelope[:40] + b"x" + envelope[41:],
    ):
        assert key.open(wrong, b"round 3") is None
    assert sealing_key(key.stated, signing.public, bytes(31) + b"x") is None
    assert sealing_key(key.stated, SigningKey.generate().public, run) is None
    assert sealing_key(key.stated[:-1], signing.public, run) is None
    with pytest.raises(TypeError, match="not sent or saved"):
        copy.copy(key)


def test_a_letter_is_of_its_kind_and_of_its_server():
    signing = SigningKey.generate()
    letter = write_letter(signing, "enroll", name="w")
    assert read_letter(letter, "enroll", [signing.public.hex()]) == {"kind": "enroll", "name": "w"}
    assert read_letter(letter, "join", [signing.public.hex()]) is None
    assert read_letter(letter, "enroll", ["ab" * 32]) is None
    for wrong in (b"", letter[:70], letter[:-1] + b"]", b"\xff" * 200):
        assert read_letter(wrong, "enroll", [signing.public.hex()]) is None


TELEMETRY = """
import noisegate.flower
from flwr.supercore import telemetry
print(telemetry.FLWR_TELEMETRY_ENABLED)
"""


@pytest.mark.parametrize("given", [{}, {"FLWR_TELEMETRY_ENABLED": "1"}])
def test_telemetry_is_off_once_noisegate_is_imported(given, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR")} | given
    env["FLWR_HOME"] = str(tmp_path)
    told = subprocess.run([sys.executable, "-c", TELEMETRY], env=env, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == "0", told.stderr
    late = subprocess.run(
        [sys.executable, "-c", "import flwr\nimport noisegate.flower"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "telemetry on" in late.stderr
    assert late.returncode == 1
