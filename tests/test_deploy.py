"""Trials and enrollment: what is made of a spec, which files fit together, and real processes that all end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noisegate import Compute, Spec
from noisegate.deploy import enroll, layout, members
from noisegate.deploy.attacker import HostileMaker, hostile_worker
from noisegate.deploy.fingerprints import request_fingerprint, server_fingerprint
from noisegate.deploy.init import make_server, make_trial, new_run
from noisegate.deploy.invitation import Invitation
from noisegate.deploy.processes import Children
from noisegate.deploy.status import RecordTail, read_record, read_status, runs
from noisegate.deploy.trial import LocalTrial
from noisegate.deploy.up import free_port, use_port
from noisegate.errors import FederationError, NoisegateError, SpecError, StoreError
from noisegate.federation.certificates import identity_of, make_authority, make_request, read_certificate, sign_request
from noisegate.federation.keys import SigningKey
from noisegate.federation.ledger import Ledger
from noisegate.federation.policy import Policy
from noisegate.federation.roster import Roster
from noisegate.federation.settings import ServerSettings
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.locks import alone
from noisegate.runs.setup import prepare

NOISE = {"rounds": 12, "sigma": 2.5, "sigma_base": 2.5, "epsilon": 4.0, "batch": 32, "rate": 0.5, "evaluate_every": 4}
SPEC = Spec(workers=3, byzantine=0.4, seed=5, **NOISE)
LONGEST = 240
"""Seconds that a trial of these tests may take on a busy machine; it takes about ten."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trial that nobody starts or changes."""
    return make_trial(SPEC, tmp_path_factory.mktemp("trial") / "fed", 7443)


@pytest.fixture
def server(tmp_path):
    """A server for workers on other machines."""
    make_server(replace(SPEC, declared=400), tmp_path / "fed", "0.0.0.0:7443", ["localhost", "127.0.0.1"])
    return tmp_path / "fed" / "server"


def private(path: Path) -> bool:
    return path.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- what a trial is made of


def test_a_trial_deals_what_the_simulator_deals(made):
    setup = prepare(SPEC, Compute(device="cpu", threads=1))
    run, settings = setup.federation, ServerSettings.read(made.server / "federation.toml")
    names = list(Roster.read(made.server / "roster.toml").keys)
    assert names == ["w01", "w02", "w03", "w04", "w05"]
    for row, name in enumerate(names):
        x, y = WorkerFolder.read(made.worker(name)).examples()
        own = run.workers.holdings[row, : run.workers.sizes[row]]
        assert torch.equal(x, run.workers.x[own])
        assert torch.equal(y, run.workers.y[own])
    with np.load(made.server / "auxiliary.npz") as own:
        assert np.array_equal(own["x"], run.server.aux_x.numpy())
        assert np.array_equal(own["y_test"], setup.y_test.numpy())
    assert made.hostile == tuple(name for name, bad in zip(names, run.adversary.byzantine, strict=True) if bad)
    mechanism = run.mechanism
    assert (settings.sigma, settings.batch, settings.declared) == (mechanism.sigma, mechanism.batch, mechanism.declared)
    assert (settings.rate, settings.believed_honest) == (run.server.rate, run.server.believed_honest)
    assert (settings.rounds, settings.evaluate_every, settings.seed) == (12, 4, 5)
    assert LocalTrial.read(made.folder) == made


def test_everything_in_a_trial_belongs_together(made):
    settings = ServerSettings.read(made.server / "federation.toml")
    roster, key = Roster.read(made.server / "roster.toml"), SigningKey.read(made.server / "signing.key")
    assert identity_of(read_certificate(made.server / "server.pem")).key == key.public
    for name, public in roster.keys.items():
        place = WorkerFolder.read(made.worker(name))
        assert place.signing_key().public == public
        place.tls()
        policy = place.policy()
        assert policy.trusts(key.public)
        assert (policy.epsilon, policy.delta) == (settings.epsilon, settings.delta)
        terms = settings.terms(policy.parameters)
        policy.check(terms)
        with pytest.raises(NoisegateError, match="sigma"):
            policy.check(replace(terms, sigma=terms.sigma * 0.99))
        with pytest.raises(NoisegateError, match="batch"):
            policy.check(replace(terms, batch=terms.batch + 1))
        assert place.server == settings.listen


def test_the_stated_epsilon_pays_for_every_round(made, tmp_path):
    settings = ServerSettings.read(made.server / "federation.toml")
    terms = settings.terms(Policy.read(made.worker("w01") / "policy.toml").parameters)
    with Ledger.open(tmp_path / "ledger") as ledger:
        assert ledger.affordable(terms, settings.epsilon, settings.delta) == settings.rounds


def test_private_keys_are_for_their_owner_alone_and_only_the_trial_knows_who_is_hostile(made):
    keys = list(made.folder.rglob("*.key"))
    assert len(keys) == 1 + 2 + 2 * 5  # the authority, the server's two, two of each worker
    assert all(map(private, keys))
    telling = [made.folder / "trial.toml", made.folder / "spec.toml"]
    for path in made.folder.rglob("*.toml"):
        assert path in telling or "flip" not in path.read_text()
    assert {path.name for path in made.worker(made.hostile[0]).iterdir()} == {
        path.name for path in made.worker("w01").iterdir()
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attack": "inner"}, "nobody sees these before sending their own"),
        ({"attack_start": 0.5, "attack_asleep": "copy"}, "nobody sees these"),
        ({"sampling": "fixed", "accountant": "rdp"}, "poisson alone"),
        ({"sigma": 0.0, "epsilon": None, "aggregator": "mean"}, "without noise"),
        ({"absent": 0.1}, "absent by themselves"),
        ({"worker": "clipped-momentum", "aggregator": "mean"}, "fresh Gaussian noise"),
    ],
)
def test_a_spec_that_no_federation_can_run_is_refused_before_anything_is_made(changes, why, tmp_path):
    with pytest.raises(SpecError, match=why):
        make_trial(replace(SPEC, **changes), tmp_path / "fed", 7443)
    assert not list(tmp_path.iterdir())


def test_a_trial_overwrites_nothing(made, tmp_path):
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(StoreError, match="not empty"):
        make_trial(SPEC, tmp_path, 7443)
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]
    with pytest.raises(StoreError, match="cannot be used"):
        make_trial(SPEC, tmp_path / "own.txt", 7443)


def test_a_damaged_trial_is_told_in_a_sentence(made, tmp_path):
    with pytest.raises(StoreError, match="no trial"):
        LocalTrial.read(tmp_path)
    for content, why in (("x = 1", "attack and hostile"), ('attack = "a"\nhostile = ["w99"]', "no such worker")):
        (tmp_path / "trial.toml").write_text(content)
        with pytest.raises(SpecError, match=why):
            LocalTrial.read(tmp_path)


def test_another_port_changes_one_line_in_each_file(tmp_path):
    trial = make_trial(replace(SPEC, workers=1, byzantine=0.0, aggregator="mean"), tmp_path / "fed", 7443)
    path = trial.server / "federation.toml"
    before = path.read_text().splitlines()
    use_port(trial, 7555)
    after = path.read_text().splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == ['listen = "127.0.0.1:7555"']
    assert WorkerFolder.read(trial.worker("w01")).server == "127.0.0.1:7555"


# ---------------------------------------------------------------- enrollment


def enrolled(server: Path, folder: Path, name: str = "hospital-a") -> Invitation:
    """A worker on another machine, up to the invitation."""
    path = enroll.request(folder, name).path
    return enroll.sign(server, enroll.look_at(server, path), layout.authority_folder(server, None))


def test_keys_stay_where_they_were_made_and_one_file_travels_each_way(server, tmp_path):
    folder = tmp_path / "worker"
    path = enroll.request(folder, "hospital-a").path
    assert {each.name for each in folder.iterdir()} == {"request.pem", "worker.key", "signing.key"}
    assert private(folder)
    assert b"PRIVATE" not in path.read_bytes()
    found = enroll.look_at(server, path)
    assert (found.name, found.known) == ("hospital-a", None)
    invitation = enroll.sign(server, found, server.parent / "ca")
    assert "PRIVATE" not in invitation.to_toml().decode()
    assert Roster.read(server / "roster.toml").keys == {"hospital-a": found.key}

    (tmp_path / "hospital-a.invitation.toml").write_bytes(invitation.to_toml())
    enroll.accept(folder, Invitation.read(tmp_path / "hospital-a.invitation.toml"))
    place = WorkerFolder.read(folder)
    assert (place.name, place.server, place.model, place.classes) == ("hospital-a", "localhost:7443", "mlp", 10)
    assert place.signing_key().public == found.key
    assert place.policy().trusts(SigningKey.read(server / "signing.key").public)
    assert place.policy().epsilon == ServerSettings.read(server / "federation.toml").epsilon


def test_an_invitation_is_accepted_only_where_all_of_it_fits(server, tmp_path):
    mine, other = enrolled(server, tmp_path / "a", "a"), enrolled(server, tmp_path / "b", "b")
    with pytest.raises(FederationError, match="not in this folder"):
        enroll.accept(tmp_path / "a", other)
    with pytest.raises(FederationError, match="is for"):
        enroll.accept(tmp_path / "a", replace(mine, name="b"))
    with pytest.raises(FederationError, match="not signed by this authority"):
        enroll.accept(tmp_path / "a", replace(mine, authority=make_other_authority()))
    assert not (tmp_path / "a" / "worker.pem").exists()
    enroll.accept(tmp_path / "a", mine)
    (tmp_path / "a" / "policy.toml").write_text(
        (tmp_path / "a" / "policy.toml").read_text().replace(mine.key, "ab" * 32)
    )
    with pytest.raises(FederationError, match="another server key"):
        enroll.accept(tmp_path / "a", mine)


def make_other_authority() -> str:
    return make_authority().certificate.decode()


def test_a_request_whose_name_or_keys_were_swapped_has_another_fingerprint(server, tmp_path):
    mine = enroll.request(tmp_path / "a", "a")
    key = enroll.look_at(server, mine.path).key
    assert enroll.look_at(server, mine.path).fingerprint() == mine.fingerprint
    (tmp_path / "a" / "request.pem").write_bytes(make_request("a", key)[1])
    assert enroll.request(tmp_path / "a", "a").fingerprint == mine.fingerprint  # of the keys, whatever the file was
    tls = (tmp_path / "a" / "worker.key").read_bytes()
    other = SigningKey.generate().public
    swapped = [make_request("a", key)[1], make_request("b", key, key=tls)[1], make_request("a", other, key=tls)[1]]
    for content in swapped:
        (tmp_path / "swapped.pem").write_bytes(content)
        assert enroll.look_at(server, tmp_path / "swapped.pem").fingerprint() != mine.fingerprint
    assert len({request_fingerprint(content) for content in swapped}) == 3
    renewed = enroll.request(tmp_path / "a", "a", new_keys=True)  # is of the keys that wait
    assert renewed.fingerprint == request_fingerprint(renewed.path.read_bytes()) != mine.fingerprint


def test_an_authority_that_was_put_in_on_the_way_back_has_another_fingerprint_or_is_refused(server, tmp_path):
    invitation = enrolled(server, tmp_path / "a", "a")
    fake = make_authority()
    certificate = sign_request(fake, (tmp_path / "a" / "request.pem").read_bytes()).decode()
    forged = replace(invitation, certificate=certificate, authority=fake.certificate.decode())
    assert forged.key == invitation.key
    assert forged.fingerprint() != invitation.fingerprint()
    assert replace(invitation, key="ab" * 32).fingerprint() != invitation.fingerprint()
    for wrong in (replace(forged, authority=invitation.authority), replace(invitation, authority=forged.authority)):
        with pytest.raises(FederationError, match="not signed by this authority"):
            enroll.accept(tmp_path / "a", wrong)
    beside = replace(invitation, authority=invitation.authority + forged.authority)  # TLS would believe both
    with pytest.raises(FederationError, match="holds 2 certificates"):
        beside.fingerprint()
    with pytest.raises(FederationError, match="holds 2 certificates"):
        enroll.accept(tmp_path / "a", beside)
    hidden = forged.authority.replace(" CERTIFICATE", " TRUSTED CERTIFICATE")
    enroll.accept(tmp_path / "a", replace(invitation, authority=invitation.authority + hidden))
    assert (tmp_path / "a" / "ca.pem").read_bytes() == (server / "ca.pem").read_bytes()


def test_a_certificate_for_another_tls_key_or_name_is_refused(server, tmp_path):
    path = enroll.request(tmp_path / "a", "a").path
    key, tls = enroll.look_at(server, path).key, (tmp_path / "a" / "worker.key").read_bytes()
    for name, request, why in (
        ("a", make_request("a", key)[1], "another private key"),
        ("b", make_request("b", key, key=tls)[1], "asked for 'a'"),
    ):
        members.write_roster(server, Roster({}))
        (tmp_path / "swapped.pem").write_bytes(request)
        invitation = enroll.sign(server, enroll.look_at(server, tmp_path / "swapped.pem"), server.parent / "ca")
        assert invitation.name == name
        with pytest.raises(FederationError, match=why):
            enroll.accept(tmp_path / "a", invitation)
    assert not (tmp_path / "a" / "ca.pem").exists()


def test_another_authority_than_the_servers_signs_nothing(server, tmp_path):
    found, fake = enroll.look_at(server, enroll.request(tmp_path / "a", "a").path), make_authority()
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "ca.pem").write_bytes(fake.certificate)
    (tmp_path / "ca" / "ca.key").write_bytes(fake.key)
    (tmp_path / "ca" / "ca.key").chmod(0o600)
    with pytest.raises(FederationError, match="not signed by this authority"):
        enroll.sign(server, found, tmp_path / "ca")
    assert members.read_roster(server).keys == {}


@pytest.mark.parametrize("name", enroll.RESERVED)
def test_no_worker_has_the_name_of_a_file(server, tmp_path, name):
    with pytest.raises(SpecError, match="choose another name"):
        enroll.request(tmp_path / "a", name)
    (tmp_path / "request.pem").write_bytes(make_request(name, SigningKey.generate().public)[1])
    with pytest.raises(SpecError, match="choose another name"):
        enroll.look_at(server, tmp_path / "request.pem")


def test_sign_in_the_servers_folder_finds_the_authority_and_overwrites_nothing(server, tmp_path, cli, monkeypatch):
    requests = {name: str(enroll.request(tmp_path / name, name).path) for name in ("a", "b")}
    monkeypatch.chdir(server)
    before = {path: path.read_bytes() for path in server.iterdir() if path.is_file()}
    for taken in ("federation.toml", "roster.toml", "server.pem"):
        answer = cli("federation", "sign", ".", requests["a"], "--yes", "-o", taken)
        assert (answer.status, "is there already" in answer.err) == (2, True), answer.err
    assert {path: path.read_bytes() for path in before} == before
    assert cli("federation", "sign", ".", requests["a"], "--yes").status == 0
    assert Invitation.read(server / "a.invitation.toml").name == "a"
    assert cli("federation", "sign", ".", requests["a"], "--yes").status == 0  # signed again: its own may go
    answer = cli("federation", "sign", ".", requests["b"], "--yes", "-o", "a.invitation.toml")
    assert (answer.status, "no invitation for b" in answer.err) == (2, True), answer.err
    assert list(Roster.read(server / "roster.toml").keys) == ["a"]


def test_what_is_no_invitation_is_told_in_a_sentence(server, tmp_path):
    whole = enrolled(server, tmp_path / "a", "a").to_toml().decode()
    path = tmp_path / "bad.toml"
    lines = whole.splitlines()
    for content in ("", "x = 1", "\0", whole.replace("rounds = 12", 'rounds = "many"'), "\n".join(lines[:-1])):
        path.write_text(content)
        with pytest.raises(SpecError):
            Invitation.read(path)
    path.write_text(whole.replace(lines[4], f'key = "{"0" * 64}"'))
    with pytest.raises(SpecError, match="anyone can sign"):
        Invitation.read(path)


def test_the_operators_request_is_checked_and_names_stay_with_their_keys(server, tmp_path):
    enrolled(server, tmp_path / "a", "a")
    path = enroll.request(tmp_path / "thief", "a").path
    thief = enroll.look_at(server, path)
    with pytest.raises(FederationError, match="another key"):
        enroll.sign(server, thief, server.parent / "ca")
    assert Roster.read(server / "roster.toml").keys["a"] != thief.key
    enroll.sign(server, thief, server.parent / "ca", replace=True)
    assert Roster.read(server / "roster.toml").keys["a"] == thief.key
    for content in (b"", b"nothing", (server / "server.pem").read_bytes()):
        (tmp_path / "bad.pem").write_bytes(content)
        with pytest.raises(FederationError, match="not a request"):
            enroll.look_at(server, tmp_path / "bad.pem")
    with pytest.raises(StoreError, match="no such file"):
        enroll.look_at(server, tmp_path / "none.pem")


def test_a_renewal_keeps_the_keys_and_new_keys_wait_for_their_certificate(server, tmp_path):
    folder = tmp_path / "a"
    enroll.accept(folder, enrolled(server, folder, "a"))
    before = {name: (folder / name).read_bytes() for name in ("worker.key", "signing.key", "policy.toml", "worker.pem")}
    enroll.accept(folder, enrolled(server, folder, None))
    after = {name: (folder / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["worker.pem"]

    path = enroll.request(folder, new_keys=True).path
    WorkerFolder.read(folder).signing_key()  # the old ones are in use still
    invitation = enroll.sign(server, enroll.look_at(server, path), server.parent / "ca", replace=True)
    enroll.accept(folder, invitation)
    WorkerFolder.read(folder).signing_key()  # belongs to the certificate
    WorkerFolder.read(folder).tls()
    assert (folder / "signing.key").read_bytes() != before["signing.key"]
    assert not list((folder / "next").iterdir())
    with pytest.raises(SpecError, match="no certificate to renew"):
        enroll.request(tmp_path / "empty")


def test_a_revoked_worker_leaves_the_roster_with_all_its_certificates(server, tmp_path):
    for name in ("a", "b"):
        enroll.accept(tmp_path / name, enrolled(server, tmp_path / name, name))
    first = identity_of(read_certificate(tmp_path / "a" / "worker.pem")).serial
    enrolled(server, tmp_path / "a", "a")  # a second certificate
    told = members.revoke(server, server.parent / "ca", "a")
    roster = Roster.read(server / "roster.toml")
    assert list(roster.keys) == ["b"]
    assert first in roster.revoked
    assert len(roster.revoked) == 2
    assert "not in the roster" in told[0]
    serial = identity_of(read_certificate(tmp_path / "b" / "worker.pem")).serial
    members.revoke(server, None, serial=f"{serial:x}")
    roster = Roster.read(server / "roster.toml")
    assert list(roster.keys) == ["b"]
    assert serial in roster.revoked
    with pytest.raises(SpecError, match="is not in the roster"):
        members.revoke(server, server.parent / "ca", "c")
    with pytest.raises(SpecError, match="hexadecimal"):
        members.revoke(server, None, serial="xyz")
    assert "stop the server" in members.revoke(server, server.parent / "ca", "b")[-1]
    assert members.read_roster(server).keys == {}
    enrolled(server, tmp_path / "d", "d")
    assert serial in Roster.read(server / "roster.toml").revoked  # also over an empty roster


def test_a_new_run_has_a_new_id_and_puts_the_old_state_aside(server):
    old = ServerSettings.read(server / "federation.toml")
    (server / "state").mkdir()
    (server / "state" / "result.json").write_text("{}")
    run = new_run(server)
    assert ServerSettings.read(server / "federation.toml") == replace(old, run=run)
    assert run != old.run
    assert not (server / "state").exists()
    assert (server / f"state-{old.run[:12]}" / "result.json").exists()


def test_a_server_alone_must_be_told_what_is_public(tmp_path):
    for spec, hosts, why in (
        (SPEC, ["localhost"], "declared"),
        (replace(SPEC, declared=400, rounds=None), ["localhost"], "rounds"),
        (replace(SPEC, declared=400), [], "host"),
        (replace(SPEC, declared=400), ["not a host"], "host"),
    ):
        with pytest.raises(SpecError, match=why):
            make_server(spec, tmp_path / "fed", "0.0.0.0:7443", hosts)


# ---------------------------------------------------------------- attackers


@pytest.mark.parametrize("attack", ["label-flip", "gradient-ascent", "gaussian", "trojan", "zero", "nan", "on-off"])
def test_an_attacker_makes_the_upload_of_its_attack(attack, made):
    trial = replace(made, spec=replace(SPEC, attack=attack))
    worker, place = hostile_worker(trial, made.hostile[0])
    settings = ServerSettings.read(made.server / "federation.toml")
    with Ledger.open(made.folder.parent / f"ledger-{attack}") as ledger:
        holder = worker.holder(place, ledger)
        make = worker.make(holder)
        assert isinstance(make, HostileMaker)
        params = holder.model.initial()
        mechanism = settings.terms(holder.model.d).mechanism(holder.model, holder.examples)
        upload = make(mechanism, 11, params, None)
        again = make(mechanism, 12, params, upload.nan_to_num())
    assert upload.shape == again.shape == params.shape
    assert upload.dtype == torch.float32
    if attack == "nan":
        assert bool(upload.isnan().all())
    elif attack == "zero":
        assert not upload.any()
    else:
        length = mechanism.noise_std * len(params) ** 0.5
        assert 0.8 * length < float(upload.norm()) < 1.25 * length


def test_only_hostile_workers_attack(made):
    honest = next(name for name in ("w01", "w02", "w03", "w04", "w05") if name not in made.hostile)
    with pytest.raises(SpecError, match="not one of the hostile workers"):
        hostile_worker(made, honest)


# ---------------------------------------------------------------- status


def test_a_status_that_is_damaged_or_absent_is_told(tmp_path):
    (tmp_path / "state").mkdir()
    assert read_status(tmp_path) is None
    whole = {
        "time": 1.0, "state": "collect", "why": "", "title": "t", "round": 3, "rounds": 10, "judged": 4,
        "accuracy": None,
        "workers": {
            "w1": {
                "status": "used", "weight": 0.5, "rounds": dict.fromkeys(
                    ("used", "refused", "malformed", "forged", "late", "missing"), 1),
                "weight_total": 2.0, "k": 0, "left": "", "connected": True,
            }
        },
    }  # fmt: skip
    path = tmp_path / "state" / "status.json"
    path.write_text(json.dumps(whole))
    found = read_status(tmp_path)
    assert (found.round, found.workers["w1"].weight, found.running) == (3, 0.5, False)
    for wrong in (
        "", "[]", "{}", json.dumps({**whole, "round": "x"}), json.dumps({**whole, "workers": []}),
        json.dumps({**whole, "accuracy": "x"}), json.dumps({**whole, "workers": {"\x1b[31m": whole["workers"]["w1"]}}),
        json.dumps({**whole, "workers": {"w1": {}}}), json.dumps({**whole, "why": 3}),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(StoreError):
            read_status(tmp_path)


def test_whether_a_server_runs_is_read_from_its_lock(tmp_path):
    assert not runs(tmp_path)
    with alone(tmp_path / "state"):
        assert runs(tmp_path)
    assert not runs(tmp_path)


def test_a_record_is_read_as_it_grows_and_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "rounds.jsonl"
    tail = RecordTail(path)
    assert tail.more() == []
    line = {"round": 0, "workers": {"w1": {"status": "used", "weight": 0.5}}, "seconds": {"wait": 0.1}}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "round": 1})[:20])
    assert [one["round"] for one in tail.more()] == [0]
    bad = [{"round": 2}, {**line, "workers": {"w1": {"status": "odd"}}}, {**line, "round": -1}, 7]
    path.write_text("".join(json.dumps(one) + "\n" for one in (line, {**line, "round": 1}, *bad)))
    assert [one["round"] for one in tail.more()] == [1]
    found, damaged = read_record(path)
    assert ([one["round"] for one in found], damaged) == ([0, 1], 4)


# ---------------------------------------------------------------- processes


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_process_outlives_its_context(tmp_path):
    with Children(tmp_path) as children:
        children.start("one", ["attacker", str(tmp_path), "w01"])
        assert children.wait(LONGEST)
        assert children.ended("one") == 2
        assert "no trial" in children.last_lines("one")
        children.start("two", ["attacker", str(tmp_path), "w01"])
        assert children.ended("two") is None
    assert children.ended("two") is not None
    assert children.last_lines("none") == ""


STARTER = """
import sys, time
from pathlib import Path
from noisegate.deploy.processes import Children
children = Children(Path(sys.argv[1]))
children.start("worker", ["join", sys.argv[2]])
print(children.processes["worker"].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_processes_end_when_the_one_that_started_them_is_killed(made, tmp_path):
    shutil.copytree(made.worker("w01"), tmp_path / "w01")
    code = [sys.executable, "-c", STARTER, str(tmp_path), str(tmp_path / "w01")]
    parent = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        log, until = tmp_path / "worker.log", time.monotonic() + 40
        while "disconnected" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        assert alive(pid)  # it dials a server that is not there, again and again
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until = time.monotonic() + 20
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def processes_of(folder: Path) -> list[int]:
    """The processes whose arguments name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes() and alive(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


FLAGS = [
    *("--workers", "3", "--byzantine", "0.25", "--rounds", "60", "--batch", "32", "--rate", "0.5"),
    *("--epsilon", "3", "--seed", "5", "--port", "0"),
]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_up_runs_real_processes_goes_on_after_ctrl_c_and_leaves_nothing(tmp_path, cli):
    folder = tmp_path / "fed"
    command = [sys.executable, "-m", "noisegate", "federation", "up", str(folder), *FLAGS]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in first.stderr:
            if "accuracy" in line:
                break
        assert len(processes_of(folder)) >= 5  # itself, the server, and some of its workers
        first.send_signal(signal.SIGINT)
        told = first.stderr.read()
        assert first.wait(LONGEST) == 130
        assert "the same command goes on" in told
    finally:
        first.kill()
        first.wait()
        first.stderr.close()
    assert processes_of(folder) == []
    state = cli("federation", "status", folder, "--json").json
    assert 0 < state["judged"] < 60
    assert state["running"] is False

    answer = cli("federation", "up", folder, *FLAGS, "--json")
    assert answer.status == 0, answer.err
    found = answer.json
    assert processes_of(folder) == []
    assert found["rounds"] >= 60 - 2  # at most the round in flight is lost
    assert found["accuracy"] > 0.4
    (hostile,) = found["hostile"]
    honest = [one["weight"] for name, one in found["workers"].items() if name != hostile]
    assert found["workers"][hostile]["weight"] < min(honest)
    for name, one in found["workers"].items():
        assert 0 < one["epsilon"] <= 3
        with Ledger.open(folder / "workers" / name / "ledger") as ledger:  # and it is free
            assert ledger.charged(ServerSettings.read(folder / "server" / "federation.toml").run) <= 60
    result = json.loads((folder / "server" / "state" / "result.json").read_text())
    assert result["accuracy"] == found["accuracy"]

    other = cli("federation", "up", folder, "--rounds", "70")
    assert (other.status, "rounds: is not what" in other.err) == (2, True), other.err
    assert cli("federation", "up", folder).out.startswith("accuracy")  # it is over: nothing is started
    assert "done" in cli("federation", "status", folder).out
    page = cli("report", folder / "server")
    assert page.status == 0, page.err
    assert f"{hostile} (hostile)" in (folder / "server" / "report.html").read_text()


def test_join_takes_several_workers_in_one_process_and_says_what_is_wrong(made, tmp_path, cli):
    assert "given twice" in cli("join", str(made.worker("w01")), str(made.worker("w01"))).err
    assert cli("join", str(tmp_path)).status == 2
    folder = shutil.copytree(made.worker("w01"), tmp_path / "a")
    for path, why in ((folder / "signing.key", "others may read"), (folder / "worker.key", "others may read")):
        path.chmod(0o644)
        answer = cli("join", str(folder))
        assert (answer.status, why in answer.err) == (2, True), answer.err
        path.chmod(0o600)
    shutil.copy(made.worker("w02") / "worker.pem", folder / "worker.pem")
    assert "they must agree" in cli("join", str(folder)).err
    (folder / "data.npz").write_bytes(b"nothing")
    assert cli("join", str(folder)).status == 2


def test_enrollment_on_the_command_line(server, tmp_path, cli):
    asked = cli("federation", "request", str(tmp_path / "w"), "--name", "hospital-a")
    assert asked.status == 0
    request = tmp_path / "w" / "request.pem"
    shown = request_fingerprint(request.read_bytes())
    assert shown in asked.out
    out = tmp_path / "hospital-a.invitation.toml"
    signed = cli("federation", "sign", str(server), str(request), "-o", str(out), "--yes")
    assert (signed.status, shown in signed.out) == (0, True), signed.err
    accepted = cli("federation", "accept", str(tmp_path / "w"), str(out), "--yes")
    assert accepted.status == 0, accepted.err
    whole = server_fingerprint(SigningKey.read(server / "signing.key").public, (server / "ca.pem").read_bytes())
    assert all(whole in text for text in (signed.out, accepted.out, out.read_text()))
    assert cli("federation", "renew", str(tmp_path / "w")).status == 0
    assert cli("federation", "renew", str(server.parent)).status == 0
    assert "not in the roster" in cli("federation", "revoke", str(server), "hospital-a").out
    assert cli("federation", "revoke", str(server)).status == 2
    assert "run" in cli("federation", "new-run", str(server)).out
    assert "never started" in cli("federation", "status", str(server)).out
    for wrong in (["status", str(tmp_path)], ["sign", str(server), str(out)], ["accept", str(tmp_path / "w"), "no"]):
        answer = cli("federation", *wrong)
        assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err


def test_a_server_alone_on_the_command_line(tmp_path, cli):
    flags = ["--server-only", "--rounds", "5", "--sigma", "2", "--declared", "300", "--workers", "3"]
    answer = cli("federation", "init", str(tmp_path / "fed"), *flags, "--host", "fed.example.org", "--port", "7500")
    assert answer.status == 0, answer.err
    settings = tomllib.loads((tmp_path / "fed" / "server" / "federation.toml").read_text())
    assert (settings["listen"], settings["rounds"], settings["declared"]) == ("0.0.0.0:7500", 5, 300)
    assert "--host" in cli("federation", "init", "--help").out
    again = cli("federation", "init", str(tmp_path / "fed"), *flags, "--host", "fed.example.org")
    assert "there already" in again.err


def test_a_free_port_is_free():
    assert 1024 <= free_port() < 2**16
    if Path("/proc").exists():
        assert os.getpid() in processes_of(Path("pytest"))  # the search for processes finds some
