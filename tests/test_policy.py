"""What a worker allows, what terms may say, who is in a roster, and keys: as if a stranger had written all of it."""

import copy
import hashlib
import json
import math
import os
import pickle
import re
import sys
from dataclasses import fields, replace

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, x25519
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noisegate.checks import MODERATE
from noisegate.errors import PolicyError, SpecError, StoreError
from noisegate.examples import Examples
from noisegate.federation import keys, roster, terms
from noisegate.federation.keys import SigningKey, checked_name, public_key, verify
from noisegate.federation.policy import MOST_HELD, Policy
from noisegate.federation.roster import Roster
from noisegate.federation.terms import Terms
from noisegate.settings import toml
from noisegate.vectors import FlatModel, add_rows
from noisegate.workers import WORKERS, Direct, Normalized, contributions, rounded_sensitivity

KEY = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
LEAST, MOST = MODERATE
POSIX = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")

FOUND = {
    **{"run": "0123456789abcdef" * 4, "title": "a trial", "rounds": 100, "parameters": 1000, "batch": 32},
    **{"declared": 280, "sigma": 1.5, "worker": {"name": "normalized", "momentum": 0.1}},
}
TERMS = Terms.of(FOUND)
ALLOWED = Policy(4.0, 1e-5, (KEY.public.hex(),), sigma=1.5, batch=32, declared=280, parameters=1000)

HOSTILE = [
    *(
        "",
        ".",
        "..",
        "a/b",
        "/",
        "\\",
        "a\\b",
        "../w1",
        "~",
        "a b",
        " a",
        "a ",
        "a\n",
        "a\0",
        "\0",
        "-",
        "-a",
        "a-",
        "A",
    ),
    *(
        "w_1",
        "w.1",
        "\x1b[31m",
        "\u202ew1",
        "w\u0661",
        "ｗ1",
        "é",
        "\ud800",
        "a" * 64,
        "a" * 10_000,
        "$(id)",
        "%s",
        "*",
    ),
    *(None, 1, True, 1.5, b"w1", ["w1"], {"w1": 1}, ()),
]
"""No names: for terminals, file systems, shells and other alphabets."""


def printable(error: pytest.ExceptionInfo) -> str:
    """The message of an error, which must be one line that a terminal can be shown."""
    told = str(error.value)
    assert told.isprintable()
    assert len(told) < 1000
    return told


def made(make, found):
    """What `make` makes of it; None if it is a SpecError with a printable message. Nothing else may be raised."""
    told = "fine"
    try:
        return make(found)
    except SpecError as error:
        told = str(error)
        return None
    finally:
        assert told.isprintable()


# --- a policy against terms ------------------------------------------------------------------------------------------


def test_terms_just_at_every_limit_are_allowed():
    ALLOWED.check(TERMS)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"parameters": 1001}, "at most 1000"),
        ({"batch": 33}, "at most 32"),
        ({"sigma": math.nextafter(1.5, 0)}, "at least 1.5"),
        ({"declared": 279}, "at least 280"),
        ({"parameters": 536_870_855}, "at most 1000"),
        ({"sigma": LEAST}, "at least 1.5"),
        ({"declared": 32}, "at least 280"),
    ],
    ids=str,
)
def test_terms_just_beyond_a_limit_are_refused_and_the_message_says_what_and_why(change, rule):
    with pytest.raises(PolicyError) as error:
        ALLOWED.check(replace(TERMS, **change))
    told = printable(error)
    ((name, value),) = change.items()
    assert told.startswith(f"{name} = {value}:")  # in full: 1000001 is not 1e+06
    assert rule in told
    assert "change the policy" in told


@pytest.mark.parametrize(
    "change", [{"parameters": 1}, {"batch": 1}, {"sigma": MOST}, {"declared": 2**32}, {"rounds": 1_000_000}], ids=str
)
def test_what_asks_for_less_is_allowed(change):
    ALLOWED.check(replace(TERMS, **change))


@settings(deadline=None)
@given(
    st.integers(1, 2000), st.integers(1, 64), st.integers(64, 600), st.floats(0.5, 3.0), st.integers(1, 2000),
    st.integers(1, 64), st.integers(1, 600), st.floats(0.5, 3.0),
)  # fmt: skip
def test_what_is_allowed_keeps_every_limit(d, batch, declared, sigma, most_d, most_batch, least_declared, least_sigma):
    asked = replace(TERMS, parameters=d, batch=batch, declared=declared, sigma=sigma)
    own = replace(ALLOWED, parameters=most_d, batch=most_batch, declared=least_declared, sigma=least_sigma)
    keeps = d <= most_d and batch <= most_batch and declared >= least_declared and sigma >= least_sigma
    if keeps:
        own.check(asked)
    else:
        with pytest.raises(PolicyError):
            own.check(asked)


def test_only_the_named_servers_are_trusted():
    both = replace(ALLOWED, server=(KEY.public.hex(), OTHER.public.hex()))
    assert ALLOWED.trusts(KEY.public)
    assert not ALLOWED.trusts(OTHER.public)
    assert both.trusts(OTHER.public)
    for key in (b"", bytes(32), KEY.public[:31], KEY.public + b"\0"):
        assert not both.trusts(key)


# --- a policy's file -------------------------------------------------------------------------------------------------

WRITTEN = {"epsilon": 4.0, "delta": 1e-5, "server": [KEY.public.hex()]}


def read_policy(tmp_path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return Policy.read(path)


def as_toml(values: dict) -> str:
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in values.items())


def test_a_policy_is_read_as_it_was_written(tmp_path):
    read = read_policy(tmp_path, as_toml(WRITTEN | {"sigma": 2, "batch": 8, "declared": 50, "parameters": 77}))
    assert read == Policy(4.0, 1e-5, (KEY.public.hex(),), 2.0, 8, 50, 77)
    assert read_policy(tmp_path, as_toml(WRITTEN)) == Policy(4.0, 1e-5, (KEY.public.hex(),))
    assert {each.name for each in fields(Policy)} == {*WRITTEN, "sigma", "batch", "declared", "parameters", "size"}


@pytest.mark.parametrize("key", WRITTEN)
def test_a_policy_without_budget_or_server_is_refused(tmp_path, key):
    with pytest.raises(SpecError, match=rf"{key}: is missing"):
        read_policy(tmp_path, as_toml({name: value for name, value in WRITTEN.items() if name != key}))


@pytest.mark.parametrize("key", ["epsilonn", "Epsilon", "rounds", "\x1b[31m", "", "server.key"])
def test_an_unknown_setting_of_a_policy_is_refused(tmp_path, key):
    with pytest.raises(SpecError, match="unknown") as error:
        read_policy(tmp_path, as_toml(WRITTEN | {key: 1}))
    printable(error)


NO_NUMBER = ["nan", "inf", "-inf", "0", "0.0", "-0.0", "-1", "true", "false", '"1"', "[]", "[1.0]", "{}", "9" * 5000]
NO_COUNT = [*NO_NUMBER, "1.0", "1.5", "1e3", str(2**128)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("epsilon", value) for value in NO_NUMBER),
        *(("delta", value) for value in [*NO_NUMBER, "1", "1.0", "1.5"]),
        *(("sigma", value) for value in [*NO_NUMBER, "1e-7", "1e10"]),
        *((key, value) for key in ("batch", "declared", "parameters") for value in NO_COUNT),
        *(("server", value) for value in ("[]", '""', "1", "[1]", "[[]]", '["x"]', f'"{"0" * 64}"', "{}", "nan")),
        *(("server", f'["{key}"]') for key in ("0" * 64, "A" * 64, "a" * 63, "a" * 65, " " + "a" * 63)),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_value_in_a_policy_is_refused(tmp_path, key, value):
    text = as_toml({name: entry for name, entry in WRITTEN.items() if name != key}) + f"{key} = {value}\n"
    with pytest.raises(SpecError) as error:
        read_policy(tmp_path, text)
    assert key in printable(error) or "digits" in str(error.value)


@pytest.mark.parametrize(
    "change", [{"delta": "x"}, {"delta": None}, {"delta": True}, {"epsilon": True}, {"server": ()}]
)
def test_a_policy_made_in_python_is_checked_too(change):
    with pytest.raises(SpecError):
        replace(ALLOWED, **change)


# --- how many examples a policy is for -------------------------------------------------------------------------------


def test_a_worker_may_hold_twice_what_its_policy_declares_and_no_more():
    ALLOWED.check_data(MOST_HELD * 280)
    ALLOWED.check_data(1)
    with pytest.raises(PolicyError, match=r"declared = 280: .* more than 2 times") as error:
        ALLOWED.check_data(MOST_HELD * 280 + 1)
    assert "561" not in printable(error)  # the true number stays private


def moved(count: int, batch: int) -> float:
    """By how much one example can move a sum of so many in float32, over what the noise of this batch allows for."""
    rng = torch.Generator().manual_seed(0)
    worker, d = Normalized(momentum=0.0), 8
    rows = contributions(worker, 1 + 0.3 * torch.randn(count, d, generator=rng), torch.zeros(count, d))
    one = contributions(worker, torch.randn(1, d, generator=rng), torch.zeros(1, d))

    def total(rows: torch.Tensor) -> torch.Tensor:
        into = torch.zeros(1, d)
        for some in rows.split(128):
            add_rows(into, torch.zeros(len(some), dtype=torch.int64), some)
        return into.double()

    without = total(rows)
    with_one = [total(torch.cat([rows[:at], sign * one, rows[at:]])) for at in (0, count // 2) for sign in (1, -1)]
    return max(float((each - without).norm()) for each in with_one) / rounded_sensitivity(worker, batch)


def test_why_a_worker_may_not_hold_far_more_than_is_declared():
    """A server that declares 1 makes a worker add up all it has, with an allowance for rounding that is for one."""
    assert moved(200_000, 1) > 1.003
    for batch in (1, 64, 1024, 8192):
        assert moved(MOST_HELD * batch, batch) <= 1


# --- terms -----------------------------------------------------------------------------------------------------------


def test_terms_travel_as_json():
    assert TERMS.as_dict() == FOUND
    assert Terms.of(json.loads(json.dumps(TERMS.as_dict()))) == TERMS
    assert Terms.of(FOUND | {"sigma": 2}).sigma == 2.0


LIMITS = {
    "rounds": (1, terms.MOST_ROUNDS),
    "parameters": (1, terms.MOST_PARAMETERS),
    "batch": (1, 280),
    "declared": (32, terms.MOST_DECLARED),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_in_terms_has_a_least_and_a_most(name):
    least, most = LIMITS[name]
    for value in (least, most):
        assert getattr(Terms.of(FOUND | {name: value}), name) == value
    for value in (least - 1, most + 1, 0, -1, 2**63, 2**64, 2**128, 10**4000):
        with pytest.raises(SpecError) as error:
            Terms.of(FOUND | {name: value})
        printable(error)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [True, 1.0, math.nan, math.inf, "1", None, [1], {"a": 1}], ids=str)
def test_a_count_in_terms_is_a_whole_number(name, value):
    with pytest.raises(SpecError, match=f"{name} = "):
        Terms.of(FOUND | {name: value})


def test_the_noise_in_terms_is_a_moderate_number():
    for value in (LEAST, MOST, 1):
        assert Terms.of(FOUND | {"sigma": value}).sigma == value
    wrong = [math.nextafter(LEAST, 0), math.nextafter(MOST, math.inf), 0, 0.0, -0.0, -1.0, 5e-324, math.nan, math.inf]
    for value in [*wrong, -math.inf, True, "1", None, [1.0], 10**400]:
        with pytest.raises(SpecError, match="sigma"):
            Terms.of(FOUND | {"sigma": value})


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"run": run}
            for run in ("", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "٠" * 64, " " * 64, 0, None, ["0"] * 64)
        ),
        *({"title": title} for title in ("a" * 101, "\x1b[31m", "a\n", "\u202e", "\ud800", "\0", 5, None, ["a"])),
        *({"worker": worker} for worker in (None, "normalized", [], ["name"], 5, {})),
    ],
    ids=lambda change: ascii(change)[:30],
)
def test_a_wrong_text_in_terms_is_refused(change):
    with pytest.raises(SpecError) as error:
        Terms.of(FOUND | change)
    printable(error)


@pytest.mark.parametrize("name", FOUND)
def test_terms_have_exactly_their_names(name):
    with pytest.raises(SpecError, match=name):
        Terms.of({key: value for key, value in FOUND.items() if key != name})
    with pytest.raises(SpecError, match="unknown") as error:
        Terms.of(FOUND | {name.upper() + "\x1b": 1})
    printable(error)


@pytest.mark.parametrize("found", [None, [], "x", 5, math.nan, [FOUND], True])
def test_terms_are_a_table(found):
    with pytest.raises(SpecError, match="must be a table"):
        Terms.of(found)


def test_only_workers_with_fresh_gaussian_noise_can_be_asked_for():
    for name in ("normalized", "clipped"):
        assert Terms.of(FOUND | {"worker": {"name": name}}).bound() == WORKERS[name]()
    for name in set(WORKERS) - {"normalized", "clipped"}:
        with pytest.raises(SpecError, match="needs fresh Gaussian noise; choose normalized or clipped"):
            Terms.of(FOUND | {"worker": {"name": name}})


def test_terms_cannot_name_code(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('loaded')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = (
        "planted:Worker",
        "os:system",
        "a.b:C",
        "noisegate.workers:Normalized",
        "noisegate.workers.clipped:Clipped",
    )
    for name in (*paths, "planted.Worker", ":", "a:", ":b", "builtins:exec", "normalized:", "Normalized"):
        with pytest.raises(SpecError, match="choose from normalized, clipped"):
            Terms.of(FOUND | {"worker": {"name": name}})
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    "worker",
    [
        *(
            {"name": name}
            for name in (None, 5, True, ["normalized"], {"name": "normalized"}, "", "\x1b[31m", "a" * 9999)
        ),
        *({"name": "normalized", "momentum": value} for value in (-0.1, -5e-324, 1.0, 1, 2, math.nan, math.inf, True)),
        *({"name": "normalized", "momentum": value} for value in ("0.1", None, [0.1], {"name": "normalized"}, 10**400)),
        *(
            {"name": "normalized", key: 1}
            for key in ("threshold", "sensitivity", "mechanism", "noisy", "fresh", "self")
        ),
        *({"name": "normalized", key: 1} for key in ("__class__", "", "momentum ", "MARGIN", "publish", "weights")),
        *({"name": "clipped", "threshold": value} for value in (0, -1, 0.0, math.nan, math.inf, True, "1", None, [1])),
        *({"name": "clipped", "threshold": value} for value in (5e-324, 1e-44, 1e-38, 1e38, 1e300, 10**400)),
        *({"name": "clipped", "threshold": math.nextafter(LEAST, 0)}, {"name": "clipped", "carry": 0.9}),
        {"name": "clipped", "threshold": math.nextafter(MOST, math.inf)},
        {"name": "clipped", "worker": {"name": "os:system"}},
        {"momentum": 0.1},
    ],
    ids=lambda worker: ascii(worker)[:50],
)
def test_a_bound_that_is_none_is_refused(worker):
    with pytest.raises(SpecError) as error:
        Terms.of(FOUND | {"worker": worker})
    printable(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**130), 2**130) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
VALUES = st.one_of(JSON, st.sampled_from([*FOUND.values(), 1, 0, 2**32, 1e-6, "os:system", "clipped", "normalized"]))
BOUNDS = st.dictionaries(st.sampled_from(["name", "momentum", "threshold", "carry", "x"]), VALUES, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.one_of(JSON, st.dictionaries(st.sampled_from([*FOUND, "x"]), VALUES), st.just({})), BOUNDS)
def test_any_json_is_terms_or_a_spec_error(changes, worker):
    """Everything that is accepted is well-formed: whatever a server sends, nothing else is raised."""
    tried = [changes, FOUND | {"worker": worker}, FOUND | {"worker": FOUND["worker"] | worker}]
    tried += [FOUND | changes] if isinstance(changes, dict) else []
    for found in tried:
        accepted = made(Terms.of, found)
        if accepted is None:
            continue
        assert accepted.worker["name"] in ("normalized", "clipped")
        assert Terms.of(json.loads(json.dumps(accepted.as_dict(), allow_nan=False))) == accepted
        assert 0 < accepted.batch <= accepted.declared <= terms.MOST_DECLARED


# --- what terms promise is what a worker does ------------------------------------------------------------------------

MODEL = FlatModel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
RNG = torch.Generator().manual_seed(1)
X, Y = torch.randn(32, 5, generator=RNG), torch.randint(0, 3, (32,), generator=RNG)
ALMOST_1 = [0.0, 0.1, 0.9, 1 - 1e-6, 1 - 2**-24, 1 - 2**-53]
BOUNDED = [
    *({"name": "normalized", "momentum": momentum} for momentum in ALMOST_1),
    *(
        {"name": "clipped", "threshold": threshold, "momentum": momentum}
        for threshold in (LEAST, 1.0, 1000.0, MOST)
        for momentum in (ALMOST_1[1], ALMOST_1[-1])
    ),
]


@pytest.mark.parametrize("worker", BOUNDED, ids=str)
def test_no_bound_or_momentum_lets_an_example_move_a_sum_by_more_than_the_noise_is_for(worker):
    """Models and last uploads of every size, by both ways to the sums."""
    mechanism = replace(TERMS, parameters=MODEL.d, batch=16, worker=worker).mechanism(MODEL, (X, Y))
    allowed, rng = rounded_sensitivity(mechanism.worker, 16), torch.Generator().manual_seed(2)
    largest = 0.0
    for size in (0.0, 1.0, 1e6):
        for last_size in (0.0, 1e-30, 1e-6, 1.0, 1e9, 1e30):
            params, last = MODEL.initial() * size, torch.randn(1, MODEL.d, generator=rng) * last_size
            for sums in (mechanism.sums, Direct(MODEL)):
                first, both = torch.zeros(1, MODEL.d), torch.zeros(1, MODEL.d)
                sums.add(mechanism.worker, params, Examples.of_one(X[1:17], Y[1:17]), last, first, 1 / 16)
                sums.add(mechanism.worker, params, Examples.of_one(X[:17], Y[:17]), last, both, 1 / 16)
                largest = max(largest, 16 * float((both.double() - first.double()).norm()))
    assert 0.99 * allowed < largest <= allowed


def test_why_a_threshold_must_be_moderate():
    """In float32's smallest numbers a contribution rounds to twice its length. Terms with this bound are refused."""
    threshold, gradient = 1e-43, torch.ones(1, 20_000)
    bound = WORKERS["clipped"]()
    object.__setattr__(bound, "threshold", threshold)  # which it refuses by itself
    sent = contributions(bound, gradient, torch.zeros_like(gradient))
    assert float(sent.double().norm()) > 1.9 * threshold
    with pytest.raises(SpecError, match="threshold"):
        WORKERS["clipped"](threshold=threshold)
    with pytest.raises(SpecError, match="threshold"):
        Terms.of(FOUND | {"worker": {"name": "clipped", "threshold": threshold}})


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2**16), more=st.integers(0, 2**32 - 2**16), sigma=st.floats(LEAST, MOST),
    threshold=st.floats(LEAST, MOST), rounds=st.integers(1, 1000),
)  # fmt: skip
def test_the_noise_is_what_is_priced_whatever_the_terms(batch, more, sigma, threshold, rounds):
    asked = replace(
        TERMS, parameters=MODEL.d, batch=batch, declared=batch + more, sigma=sigma,
        worker={"name": "clipped", "threshold": threshold},
    )  # fmt: skip
    mechanism = replace(MECHANISM, worker=asked.bound(), sampling=type(MECHANISM.sampling)(batch), sigma=sigma)
    assert mechanism.added_noise * batch / threshold >= sigma * (1 - 1e-12)
    info = torch.finfo(torch.float32)
    assert info.smallest_normal < mechanism.added_noise / 4096 < mechanism.added_noise * 10 < info.max
    cost = asked.cost(rounds)
    assert (cost.sigma, cost.batch, cost.declared, cost.rounds) == (sigma, batch, batch + more, rounds)
    assert (cost.sampling, cost.signs, cost.times) == ("poisson", 0, 1)


MECHANISM = replace(TERMS, parameters=MODEL.d).mechanism(MODEL, (X, Y))


def test_a_mechanism_is_that_of_the_terms():
    assert (MECHANISM.batch, MECHANISM.declared, MECHANISM.sigma) == (32, 280, 1.5)
    assert MECHANISM.worker == Normalized(momentum=0.1)
    assert MECHANISM.sampling.name == "poisson"


# --- the roster ------------------------------------------------------------------------------------------------------


def read_roster(tmp_path, text: str) -> Roster:
    path = tmp_path / "roster.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Roster.read(path)


def entry(name: str = "w1", key: str = KEY.public.hex()) -> str:
    return f'[[worker]]\nname = "{name}"\nkey = "{key}"\n'


def test_a_roster_is_read_as_it_was_written(tmp_path):
    own = Roster({"zeta": KEY.public, "a-1": OTHER.public}, frozenset({0, 255, 2**159}))
    read = read_roster(tmp_path, own.to_toml())
    assert read == own
    assert list(read.keys) == ["zeta", "a-1"]  # in their order
    assert read_roster(tmp_path, 'revoked = ["0AfF"]\n' + entry()).revoked == {0xAFF}


@pytest.mark.parametrize(
    "text",
    [
        *("", "worker = []", "worker = 5", "worker = [1]", "worker = [[]]", '[worker]\nname = "w1"', "revoked = []"),
        *("[[worker]]", '[[worker]]\nname = "w1"', f'[[worker]]\nkey = "{KEY.public.hex()}"', entry() + "role = 1\n"),
        *(entry() + entry(), entry() + entry("w2"), entry() + "[[workers]]\n", "x = 1\n" + entry()),
        *(entry(key=key) for key in ("0" * 64, KEY.public.hex().upper(), KEY.public.hex()[:-1], "")),
        *(f"revoked = {value}\n{entry()}" for value in ('"abc"', "5", '["xyz"]', "[171]", '["0xff"]', '["-1"]')),
        *(f"revoked = {value}\n{entry()}" for value in ('["1_0"]', '[""]', '[["1"]]', '["١"]', '[" 1"]', "nan")),
        *(f"revoked = {value}\n{entry()}" for value in ('["a:b"]', '{ "abc" = 1 }', "[", f'["{"f" * 65}"]')),
        *("\0", "\x1b[31m = 1", entry().replace('"w1"', "1")),
        '[revoked]\nabc = "1"\n' + entry(),
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_a_roster_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(SpecError) as error:
        read_roster(tmp_path, text)
    printable(error)


@pytest.mark.parametrize("name", [*(name for name in HOSTILE if isinstance(name, str)), "all"], ids=ascii)
def test_a_roster_has_no_hostile_names(tmp_path, name):
    with pytest.raises(SpecError) as error:
        read_roster(tmp_path, entry(json.dumps(name)[1:-1]))
    printable(error)


def test_a_roster_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "MOST_WORKERS", 3)
    many = [entry(f"w{i}", hashlib.sha256(bytes([i])).hexdigest()) for i in range(4)]
    assert len(read_roster(tmp_path, "".join(many[:3])).keys) == 3
    with pytest.raises(SpecError, match="has 4 workers; it must have 1 to 3"):
        read_roster(tmp_path, "".join(many))


TOML = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10) | st.just(KEY.public.hex()) | st.just("w1"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "key", "revoked", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["worker", "revoked", "epsilon", "delta", "server", "sigma", "x"]), TOML))
def test_any_table_is_a_roster_a_policy_or_a_spec_error(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(as_toml(values), encoding="utf-8", errors="surrogatepass")
    for kind in (Roster, Policy):
        made(kind.read, path)


# --- names and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_is_none(name):
    with pytest.raises(SpecError, match="must be 1 to 63") as error:
        checked_name(name)
    printable(error)


def test_a_name_is_one():
    for name in ("a", "0", "w1", "hospital-7", "a" * 63, "con", "xn--a"):
        assert checked_name(name) == name
    with pytest.raises(SpecError, match="stands for all workers"):
        checked_name("all")


def test_a_public_key_is_64_digits():
    assert public_key(KEY.public.hex()) == KEY.public
    for wrong in ("", "0" * 63, "G" * 64, KEY.public.hex().upper(), KEY.public.hex() + "\n", KEY.public, None, 5, []):
        with pytest.raises(SpecError, match="64 hexadecimal digits") as error:
            public_key(wrong)
        printable(error)


P = 2**255 - 19
CURVE = -121665 * pow(121666, -1, P) % P


def on_curve(y: int) -> tuple[int, int] | None:
    """The point of Ed25519 with this y and an even x, if there is one (RFC 8032, 5.1.3)."""
    square = (y * y - 1) * pow(CURVE * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if (x * x - square) % P == 0 else x * pow(2, (P - 1) // 4, P) % P
    return None if (x * x - square) % P else (min(x, P - x) if min(x, P - x) % 2 == 0 else max(x, P - x), y % P)


def plus(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    (a, b), (c, d) = one, other
    k = CURVE * a * b * c * d % P
    return (a * d + b * c) * pow(1 + k, -1, P) % P, (b * d + a * c) * pow(1 - k, -1, P) % P


def times(count: int, point: tuple[int, int]) -> tuple[int, int]:
    total = (0, 1)
    for _ in range(count):
        total = plus(total, point)
    return total


def test_the_weak_keys_are_the_points_of_small_order():
    found = set()
    for y in keys.WEAK:
        point = on_curve(y)
        assert point is not None
        assert times(8, point) == (0, 1)
        found.add(point[1])
    assert len(found) == 5  # the 8 points of order 1, 2, 4, 8: pairs of x and -x share a y
    assert {y % P for y in keys.WEAK} == found


def test_under_a_weak_key_anyone_can_sign_so_it_is_refused():
    point = on_curve(4 * pow(5, -1, P) % P)  # the base point
    (x, y), s = times(5, point), 5
    nobody = (y | (x & 1) << 255).to_bytes(32, "little") + s.to_bytes(32, "little")
    anything = [bytes([i]) for i in range(40)]
    identity, zeros = (1).to_bytes(32, "little"), bytes(32)
    assert all(verify(identity, nobody, content) for content in anything)
    assert any(verify(zeros, nobody, content) for content in anything)
    assert not any(verify(KEY.public, nobody, content) for content in anything)
    for y in keys.WEAK:
        for sign in (0, 2**255):
            with pytest.raises(SpecError, match="anyone can sign"):
                public_key((y | sign).to_bytes(32, "little").hex())


def test_a_signature_is_checked_without_an_error_whatever_it_is():
    signature = KEY.sign(b"text")
    assert verify(KEY.public, signature, b"text")
    for public, signed, content in (
        (OTHER.public, signature, b"text"),
        (KEY.public, signature, b"Text"),
        (KEY.public, signature[:63], b"text"),
        (KEY.public, signature + b"\0", b"text"),
        (KEY.public, b"", b"text"),
        (KEY.public[:31], signature, b"text"),
        (b"", signature, b"text"),
        (KEY.public, bytes(64), b"text"),
        (KEY.public, bytes([255]) * 64, b"text"),
        (bytes([255]) * 32, signature, b"text"),
    ):
        assert not verify(public, signed, content)


# --- files of keys ---------------------------------------------------------------------------------------------------


@POSIX
def test_a_key_is_written_for_its_owner_alone_and_read_again(tmp_path):
    path = tmp_path / "signing.key"
    before = os.umask(0)
    try:
        KEY.write(path)
        assert os.umask(0) == 0  # as it was
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["signing.key"]
    assert SigningKey.read(path).public == KEY.public
    assert verify(KEY.public, SigningKey.read(path).sign(b"x"), b"x")
    path.chmod(0o400)
    assert SigningKey.read(path).public == KEY.public


@POSIX
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o666, 0o777, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "signing.key"
    KEY.write(path)
    path.chmod(mode)
    with pytest.raises(StoreError, match=rf"others may read this key \(mode {mode:o}\); chmod 600 it") as error:
        SigningKey.read(path)
    printable(error)


def pem(private, encryption=None) -> bytes:
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption or serialization.NoEncryption()
    )


OWN = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pem(ec.generate_private_key(ec.SECP256R1())), "not an Ed25519 key"),
        (pem(x25519.X25519PrivateKey.generate()), "not an Ed25519 key"),
        (pem(ed448.Ed448PrivateKey.generate()), "not an Ed25519 key"),
        (pem(OWN, serialization.BestAvailableEncryption(b"word")), "not a private key"),
        (pem(OWN).replace(b"MC4CAQAwBQYDK2Vw", b"MC4CAQAwBQYDK2Vz"), "not a private key"),  # of no known algorithm
        (
            OWN.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
            "not a private key",
        ),
        (pem(OWN)[:60], "not a private key"),
        (pem(OWN).replace(b"PRIVATE", b"PIRATES"), "not a private key"),
        (b"", "not a private key"),
        (b"\x1b[31m\xff\0", "not a private key"),
        (b"-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n", "not a private key"),
        (bytes(keys.MOST_PEM + 1), "larger than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_holds_no_ed25519_key_is_refused(tmp_path, content, why):
    path = tmp_path / "signing.key"
    keys.write_private(path, content)
    with pytest.raises(StoreError, match=why) as error:
        SigningKey.read(path)
    assert "MC4CAQ" not in printable(error)


def test_a_key_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no such key"):
        SigningKey.read(tmp_path / "signing.key")
    with pytest.raises(StoreError, match="no such key"):
        SigningKey.read(tmp_path / "no" / "signing.key")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="is not a file"):
        SigningKey.read(tmp_path / "folder")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StoreError, match="is not a file"):  # and does not wait for a writer
            SigningKey.read(tmp_path / "pipe")


def test_a_private_key_shows_itself_to_nobody():
    secret = bytes(range(32)).hex()
    for shown in (repr(KEY), str(KEY), repr(vars(KEY)), f"{KEY}"):
        assert secret not in shown.lower()
        assert not re.search(r"\\x00\\x01\\x02", shown)
    for save in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not sent or saved"):
            save(KEY)
    assert SigningKey.generate().public != SigningKey.generate().public
