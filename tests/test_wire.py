"""The wire format: one encoding, every byte signed, and nothing that arrives is believed or raises. docs/wire.md."""

import hashlib
import json
import math
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from noisegate import checks
from noisegate.federation import reception, roster, streams, terms, wire
from noisegate.federation.certificates import make_authority, make_request, sign_request
from noisegate.federation.checkpoint import MOST_WHY
from noisegate.federation.keys import NAME, SigningKey
from noisegate.federation.terms import Terms
from noisegate.federation.wire import HEADER, VECTORS, Kind, Message, body_of, digest_of, read, say

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
RUN = bytes([0x11]) * 32
NUMBERS = struct.pack("<2f", 0.5, -1.25)


def message(kind: Kind = Kind.UPLOAD, **changes) -> Message:
    """One in which no field is what it is unless given."""
    body = NUMBERS if kind in VECTORS else b'{"why":"because"}'
    full = {"worker": "w-1", "run": RUN, "round": 7, "digest": bytes(range(32)), "counter": 3, "body": body}
    return Message(kind, **full | changes)


def written(found: Message) -> bytes:
    """The bytes of a message, put together here a second time."""
    parts = (
        *(b"NGT1", bytes([found.kind]), bytes(3), found.round.to_bytes(8, "little"), found.run, found.digest),
        *(found.worker.encode().ljust(64, b"\0"), found.counter.to_bytes(8, "little")),
        *(len(found.body).to_bytes(8, "little"), found.signature, bytes(found.body)),
    )
    return b"".join(parts)


def packed(*, body: bytes = NUMBERS, **changes) -> bytes:
    """Any bytes with the layout of a message."""
    full = {"magic": b"NGT1", "kind": 4, "round": 7, "run": RUN, "digest": bytes(32), "name": b"w1", "counter": 0}
    full |= {"length": len(body), "signature": bytes(64)} | changes
    return HEADER.pack(*full.values()) + body


# --- what is written can be read, and was signed ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
def test_a_message_comes_back_as_it_was_sent(kind):
    sent = message(kind)
    content = sent.signed(KEY)
    found = read(content)
    assert isinstance(found, Message)
    for each in fields(Message):
        if each.name != "signature":
            assert getattr(found, each.name) == getattr(sent, each.name), each.name
    assert found.is_from(KEY.public)
    assert not found.is_from(OTHER.public)
    assert written(found) == content
    assert found.body.obj is content  # nothing was copied


@pytest.mark.parametrize("kind", Kind)
def test_a_body_may_be_empty(kind):
    found = read(message(kind, body=b"").signed(KEY))
    assert isinstance(found, Message)
    assert found.is_from(KEY.public)
    assert found.text() is None
    assert found.vector().shape == (0,)


def test_the_ends_of_every_range_can_be_sent():
    for changes in (
        {"round": 0, "counter": 0},
        {"round": 2**64 - 1, "counter": 2**64 - 1},
        {"worker": "a"},
        {"worker": "a" * 63},
        {"worker": "0-9"},
        {"kind": Kind.HELLO, "body": b" " * wire.MOST_TEXT},
    ):
        sent = message(**changes)
        found = read(sent.signed(KEY))
        assert isinstance(found, Message)
        assert (found.round, found.counter, found.worker) == (sent.round, sent.counter, sent.worker)


@pytest.mark.parametrize("kind", [Kind.UPLOAD, Kind.TERMS])
def test_no_bit_can_be_turned(kind):
    content = message(kind).signed(KEY)
    for place in range(8 * len(content)):
        turned = bytearray(content)
        turned[place // 8] ^= 1 << place % 8
        found = read(bytes(turned))
        assert isinstance(found, str) or not found.is_from(KEY.public), f"bit {place}"


def test_no_field_can_be_changed_and_no_signature_moved():
    found = read(message().signed(KEY))
    changes = {
        "kind": Kind.MODEL,
        "worker": "w-2",
        "run": bytes(32),
        "round": 8,
        "digest": bytes(32),
        "counter": 4,
        "body": NUMBERS[::-1],
        "signature": message(round=8).signed(KEY)[160:224],
    }
    assert set(changes) == {each.name for each in fields(Message)}
    for name, value in changes.items():
        assert not replace(found, **{name: value}).is_from(KEY.public), name
    assert replace(found).is_from(KEY.public)


def test_a_signature_of_the_bare_bytes_does_not_serve():
    content = message().signed(KEY)
    for signed in (content[:160] + content[224:], content[:160], content[:160] + hashlib.sha256(NUMBERS).digest()):
        forged = read(content[:160] + KEY.sign(signed) + content[224:])
        assert isinstance(forged, Message)
        assert not forged.is_from(KEY.public)


def test_a_signature_by_no_key_verifies_under_none():
    found = read(packed())
    assert isinstance(found, Message)
    for public in (KEY.public, bytes(31), b"", bytes([255]) * 32):
        assert not found.is_from(public)


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker": ""},
        {"worker": "a" * 64},  # struct would write it without a zero
        {"worker": "w_1"},
        {"worker": "w1\0"},
        {"run": RUN.hex().encode()},  # struct would cut it
        {"run": b""},
        {"digest": bytes(31)},
        {"signature": bytes(65)},
        {"round": -1},
        {"round": 2**64},
        {"counter": 2**64},
        {"body": bytes(7)},
        {"kind": Kind.HELLO, "body": bytes(wire.MOST_TEXT + 1)},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_what_cannot_be_read_cannot_be_written(wrong):
    with pytest.raises(ValueError, match=r"must|bytes of"):
        message(**wrong)


def test_numbers_are_little_endian_float32():
    assert body_of(np.array([0.5, -1.25])) == NUMBERS == bytes.fromhex("0000003f0000a0bf")
    assert body_of(np.array([[1, 2], [3, 4]]).T[0]) == struct.pack("<2f", 1, 3)
    assert message().vector().tolist() == [0.5, -1.25]
    anything = struct.pack("<3f", math.nan, math.inf, -math.inf)
    assert np.isnan(message(body=anything).vector()[0])
    assert digest_of(NUMBERS) == hashlib.sha256(NUMBERS).digest()


# --- what is read is not believed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.UPLOAD, Kind.HELLO])
def test_nothing_shorter_or_longer_is_a_message(kind):
    content = message(kind).signed(KEY)
    for length in range(len(content)):
        assert isinstance(read(content[:length]), str)
        assert isinstance(read(content[length + 1 :]), str)
    for more in (b"\0", b"\0" * 4, content):
        assert isinstance(read(content + more), str)


@pytest.mark.parametrize(
    "content", [None, "text", 5, [], bytearray(300), memoryview(bytes(300)), object(), ()], ids=str
)
def test_what_is_not_bytes_is_no_message(content):
    assert read(content) == "not bytes"


@pytest.mark.parametrize("length", [0, 4, 7, 9, 12, 2**31, 2**32 + 8, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_stated_length_must_be_the_true_one(length):
    assert "says" in read(packed(length=length))


@pytest.mark.parametrize("kind", [0, 10, 127, 128, 255])
def test_an_unknown_kind_is_refused(kind):
    assert "unknown kind" in read(packed(kind=kind))


@pytest.mark.parametrize("magic", [b"NGT0", b"NGT2", b"ngt1", b"\0\0\0\0", b"PK\3\4"])
def test_another_version_is_refused(magic):
    assert "version" in read(packed(magic=magic))


def test_reserved_bytes_are_zeros():
    content = message().signed(KEY)
    for place in (5, 6, 7):
        for value in (1, 32, 255):
            assert "reserved" in read(content[:place] + bytes([value]) + content[place + 1 :])


@pytest.mark.parametrize(
    "name",
    [
        *(
            b"",
            b"-",
            b"-a",
            b"a-",
            b"A",
            b"w_1",
            b"w 1",
            b"w.1",
            b"..",
            b".",
            b"a/b",
            b"a\\b",
            b"../../etc/passwd",
            b"~",
        ),
        *(b"w1\0x", b"\0w1", b"w1\n", b"w1\r", b"\x1b[31m", b"w1\x7f", b"w\xc3\xa9", b"\xff\xfe", b"\xef\xbc\x91"),
        *(b"a" * 64, b"w1" + b"\0" * 61 + b"x", b"$(id)", b"`id`", b"a;b", b"a'b", b'a"b', b"%s", b"{0}", b"*"),
    ],
)
def test_a_name_that_is_none_is_refused(name):
    assert read(packed(name=name)) == "its worker has no name"


def test_numbers_are_whole_and_texts_are_short():
    for kind in Kind:
        odd, long = packed(kind=kind, body=bytes(6)), packed(kind=kind, body=bytes(wire.MOST_TEXT + 4))
        assert isinstance(read(odd), str if kind in VECTORS else Message)
        assert isinstance(read(long), Message if kind in VECTORS else str)


def check_reading(content: bytes) -> None:
    """A reason in a few printable words, or a message with exactly one encoding and a text that is a dict or None."""
    found = read(content)
    if isinstance(found, str):
        assert found
        assert found.isprintable()
        assert len(found) < 100
        return
    assert written(found) == content
    assert NAME.fullmatch(found.worker)
    assert found.text() is None or type(found.text()) is dict
    if found.kind in VECTORS:
        assert len(found.vector()) == len(found.body) // 4
        assert found.text() is None
    assert found.signed_text() == wire.CONTEXT + content[:160] + hashlib.sha256(content[224:]).digest()
    assert found.is_from(KEY.public) in (True, False)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_can_be_read(content):
    check_reading(content)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_after_the_magic_can_be_read(content):
    check_reading(b"NGT1" + content)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.integers(0, 12),
    name=st.one_of(st.from_regex(NAME, fullmatch=True).map(str.encode), st.binary(max_size=64)),
    round=st.integers(0, 2**64 - 1),
    counter=st.integers(0, 2**64 - 1),
    body=st.one_of(st.binary(max_size=64), st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))),
    signature=st.binary(min_size=64, max_size=64),
    digest=st.binary(min_size=32, max_size=32),
)
def test_any_header_can_be_read(body, **header):
    check_reading(packed(body=body, **header))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(Kind)),
    st.lists(st.tuples(st.integers(0, 240), st.integers(0, 255)), max_size=4),
    st.integers(0, 300),
    st.binary(max_size=9),
)
def test_any_mutation_can_be_read_and_none_verifies(kind, changes, keep, more):
    sent = message(kind).signed(KEY)
    content = bytearray(sent)
    for place, value in changes:
        content[place % len(content)] = value
    changed = bytes(content[:keep]) + more
    check_reading(changed)
    found = read(changed)
    if isinstance(found, Message) and changed != sent:
        assert not found.is_from(KEY.public)


# --- JSON ------------------------------------------------------------------------------------------------------------


def text_of(body: bytes):
    return message(Kind.HELLO, body=body).text()


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{", b"null", b"[]", b'"a"', b"1", b"true", b"{}{}", b"{} x", b"\0", b"{'a': 1}", b'{"a": 1,}'),
        *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": [-Infinity]}', b'{"a": 1e999}', b'{"a": -1e999}', b'{"a": 1e309}'),
        *(b'{"a": 1, "a": 2}', b'{"a": 1, "\\u0061": 2}', b'{"a": {"b": 1, "b": 1}}', b'[{"b": 1, "b": 1}]'),
        *(b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\xff"}', b'{"a": "\xc0\xaf"}'),
        *('{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-16-le"), '{"a": 1}'.encode("utf-32")),
        b"\xef\xbb\xbf" + b'{"a": 1}',  # a byte order mark
        b'{"a": ' + b"9" * 5000 + b"}",  # more digits than Python reads
        b'{"a":' * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a": "\n"}',
        b'{"a": 0x10}',
        b'{"a": 01}',
        b'{"a": +1}',
        b'{"a": .5}',
    ],
    ids=lambda body: str(body[:24]),
)
def test_what_is_no_plain_json_object_is_no_text(body):
    assert text_of(body) is None


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"{}", {}),
        (b' {"a" : 1.5e3 }\n', {"a": 1500.0}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": "\U0001f600é"}'.encode(), {"a": "\U0001f600é"}),
        (b'{"a": "\\u0000\\u001b[31m"}', {"a": "\0\x1b[31m"}),
        (b'{"a": ' + b"9" * 4000 + b"}", {"a": int("9" * 4000)}),
        (b'{"a": 1e-999}', {"a": 0.0}),
        (b'{"a": [{"b": 1}, {"b": 1}]}', {"a": [{"b": 1}, {"b": 1}]}),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, bytes) else "",
)
def test_what_is_a_plain_json_object_is_read(body, found):
    assert text_of(body) == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def is_plain(value: object) -> bool:
    """Whether all numbers are finite and all texts can be written."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return not isinstance(value, float) or math.isfinite(value)


@settings(deadline=None)
@given(JSON)
def test_a_json_value_is_read_exactly_if_it_is_a_plain_object(value):
    found = text_of(json.dumps(value).encode())
    assert found == (value if isinstance(value, dict) and is_plain(value) else None)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_what_is_said_is_what_is_heard(text):
    assume(is_plain(text))
    found = read(say(Kind.LEAVE, "w1", KEY, text, run=RUN, round=5))
    assert isinstance(found, Message)
    assert found.text() == text
    assert (found.run, found.round, found.is_from(KEY.public)) == (RUN, 5, True)


def test_nothing_is_said_that_is_no_text():
    for text in ({"a": math.nan}, {"a": math.inf}, {"why": "x" * wire.MOST_TEXT}):
        with pytest.raises(ValueError, match=r"JSON compliant|more than"):
            say(Kind.DECLINE, "w1", KEY, text)


# --- docs/wire.md ----------------------------------------------------------------------------------------------------


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a table below a heading of the page, without the first two lines."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    tables = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[number].splitlines()[2:]]


def test_the_page_has_the_header():
    *rows, body = table("The header")
    codes = {("uint8", 1): "B", ("uint64", 8): "Q", ("zeros", 3): "3x"}
    form, offset = "<", 0
    for at, length, kind, *_ in rows:
        assert int(at) == offset
        form += codes.get((kind, int(length)), f"{length}s")
        offset += int(length)
    assert form == HEADER.format
    assert offset == HEADER.size == int(body[0])
    names = [row[3] for row in rows]
    assert int(rows[names.index("signature")][0]) == wire.SIGNED
    assert f"`{wire.MAGIC.decode()}`" in rows[0][4]
    # The names stand at their places: what is written there is found there.
    sent = message(round=0x1122334455667788, counter=0x99AABBCCDDEEFF00)
    content = sent.signed(KEY)
    values = {"kind": b"\4", "round": sent.round, "run": RUN, "digest": sent.digest, "worker": b"w-1".ljust(64, b"\0")}
    values |= {"counter": sent.counter, "length": len(sent.body)}
    for name, value in values.items():
        at, length = int(rows[names.index(name)][0]), int(rows[names.index(name)][1])
        expected = value.to_bytes(length, "little") if isinstance(value, int) else value
        assert content[at : at + length] == expected, name


def test_the_page_has_the_kinds():
    rows = table("The kinds")
    assert [(int(row[0]), row[1]) for row in rows] == [(kind.value, kind.name) for kind in Kind]
    assert {row[1] for row in rows if "d numbers" in row[-1]} == {kind.name for kind in VECTORS}
    assert {row[1] for row in rows if row[5] == f"`{wire.EVERYONE}`"} == set()
    assert {row[1] for row in rows if row[6] == f"`{wire.EVERYONE}`"} == {"MODEL", "END"}


def test_the_page_has_what_is_signed():
    (_, context, what), (_, header, _), (last, digest, _) = table("What is signed")
    assert re.search("`(.*?)`", what)[1].encode() + b"\0" == wire.CONTEXT
    assert [int(context), int(header), int(digest)] == [len(wire.CONTEXT), wire.SIGNED, 32]
    assert int(last) + int(digest) == len(message().signed_text()) == 209
    assert "over these 209 bytes" in PAGE


def test_the_page_has_the_terms_and_the_limits():
    rows = {row[0]: row for row in table("The kinds", 1)}
    assert list(rows) == [each.name for each in fields(Terms)]
    least, most = checks.MODERATE
    for name, range_of in {
        "title": f"at most {terms.MOST_TITLE} printable characters",
        "rounds": f"1 to {terms.MOST_ROUNDS}",
        "parameters": f"1 to {terms.MOST_PARAMETERS}",
        "declared": f"1 to {terms.MOST_DECLARED}",
        "sigma": f"{least:g} to {most:g}",
    }.items():
        assert rows[name][2] == range_of
    assert f"({least:g} to {most:g})" in rows["worker"][3]
    limits = dict(table("Limits"))
    assert limits["body of HELLO, TERMS, RECEIPT, DECLINE, LEAVE, REFUSAL"] == f"{wire.MOST_TEXT} bytes"
    assert limits["a message to the server"] == f"{HEADER.size} + 4 d + {reception.SLACK} bytes"
    assert limits["workers in a roster"] == str(roster.MOST_WORKERS)
    assert limits["text of a `why` that the server keeps"] == f"{MOST_WHY} characters"
    assert limits["d"].startswith(f"{terms.MOST_PARAMETERS},")
    assert f"more than {streams.MESSAGES} messages in a round" in PAGE
    assert f"within {reception.HELLO_TIME:g} s" in PAGE
    assert HEADER.size + 4 * terms.MOST_PARAMETERS < 2**31 <= HEADER.size + 4 * (terms.MOST_PARAMETERS + 1)


def test_the_page_names_the_method():
    assert f"`{wire.METHOD}`" in PAGE
    assert set(re.findall(r"/noisegate\.v1\.\w+/\w+", PAGE)) == {wire.METHOD}


def test_the_bytes_on_the_page_are_those_of_the_upload():
    block = re.search(r"## An upload in full\n.*?```text\n(.*?)```", PAGE, re.DOTALL)[1]
    lines = [line.split(maxsplit=1) for line in block.splitlines()]
    assert [int(offset) for offset, _ in lines] == list(range(0, 232, 16))
    content = bytes.fromhex("".join(line for _, line in lines))
    model = digest_of(body_of(np.array([1.0, -2.0])))
    assert content == Message(Kind.UPLOAD, "w1", RUN, 7, model, body=NUMBERS).signed(KEY)
    assert KEY.public.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert hashlib.sha256(content).hexdigest() in PAGE


# --- a program that knows docs/wire.md alone -------------------------------------------------------------------------


@pytest.fixture
def plain_worker(tmp_path):
    """A worker's folder, and what a server for it needs: (folder, credentials, signing key)."""
    authority, server_key, own_key = make_authority(), SigningKey.generate(), SigningKey.generate()
    key, request = make_request("server", server_key.public, ["127.0.0.1", "localhost"])
    chain = sign_request(authority, request, server=True)
    credentials = grpc.ssl_server_credentials([(key, chain)], authority.certificate, require_client_auth=True)
    tls, request = make_request("w1", own_key.public)
    (tmp_path / "worker.key").write_bytes(tls)
    (tmp_path / "worker.pem").write_bytes(sign_request(authority, request))
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    (tmp_path / "policy.toml").write_text(f'epsilon = 1\ndelta = 1e-5\nserver = ["{server_key.public.hex()}"]\n')
    own_key.write(tmp_path / "signing.key")
    return tmp_path, credentials, server_key, own_key


@pytest.mark.parametrize("honest", [True, False])
def test_a_client_without_noisegate_is_understood(plain_worker, honest):
    folder, credentials, server_key, own_key = plain_worker
    asked = Terms(RUN.hex(), "a trial", 5, 2, 1, 4, 1.0)
    heard = []

    def join(incoming, context):
        heard.append(read(next(incoming)))
        key = server_key if honest else OTHER
        yield say(Kind.TERMS, "w1", key, asked.as_dict(), run=RUN, round=3, counter=2)
        yield Message(Kind.MODEL, wire.EVERYONE, RUN, 3, digest_of(NUMBERS), body=NUMBERS).signed(key)
        heard.extend(map(read, incoming))

    service, method = wire.METHOD.lstrip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {method: grpc.stream_stream_rpc_method_handler(join)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        (folder / "worker.toml").write_text(f'name = "w1"\nserver = "127.0.0.1:{port}"\n')
        client = ROOT / "examples" / "federation" / "plain_client.py"
        done = subprocess.run(
            [sys.executable, str(client), str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        server.stop(0).wait(10)
    assert heard[0].kind == Kind.HELLO
    assert heard[0].is_from(own_key.public)
    assert heard[0].text() == {"noisegate": "none"}
    if not honest:
        assert done.returncode == 1
        assert "not believed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "next round 3, uploads received 2" in done.stdout
    assert "model of round 3: 2 numbers, digest right: True" in done.stdout
    (declined,) = heard[1:]
    assert declined.is_from(own_key.public)
    assert (declined.kind, declined.worker, declined.run, declined.round) == (Kind.DECLINE, "w1", RUN, 3)
    assert (declined.digest, set(declined.text())) == (digest_of(NUMBERS), {"why"})


def test_the_client_without_noisegate_imports_nothing_of_it():
    source = (ROOT / "examples" / "federation" / "plain_client.py").read_text()
    assert not re.search(r"^\s*(import|from) noisegate", source, re.MULTILINE)
