"""Messages survive the wire whole, however it cuts them; nothing else does."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ProtocolError
from ems.pool.core.changes import CAPACITY
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES
from ems.pool.pages import ClusterWrite
from ems.pool.protocol import coding, limits, messages
from ems.pool.protocol.messages import ChangeRun, Message

U32 = st.integers(0, 2**32 - 1)
TAILS = st.none() | st.builds(
    Tail,
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.integers(1, 9).map(lambda count: bytes(limits.TOKEN_BYTES * count)),
)
KEYS = st.integers(0, 40).flatmap(lambda count: st.binary(min_size=KEY_BYTES * count, max_size=KEY_BYTES * count))
DIRECTORIES = st.sampled_from([0, 2, 3, 4, 7]).map(lambda count: bytes(KEY_BYTES * count))
"""Of six keys: one for each chunk of six, three, two or one, and one more."""
NAMES = st.text(max_size=20)

REQUESTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(messages.Hello, U32, U32, NAMES, U32, st.booleans()),
    st.builds(messages.Open, NAMES, U32),
    st.builds(messages.Attach, U32),
    st.builds(messages.Reserve, U32, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), KEYS),
    st.builds(messages.Commit, U32, st.none() | st.lists(U32, max_size=9)),
    st.builds(messages.Abort, U32),
    st.builds(messages.Lookup, U32, KEYS, st.booleans(), TAILS, local_only=st.booleans()),
    st.builds(messages.Lookup, U32, st.just(bytes(6 * KEY_BYTES)), patience=st.integers(0, 9), directories=DIRECTORIES),
    st.builds(messages.Prefetch, U32, KEYS, st.booleans()),
    st.builds(messages.Announce, U32, KEYS, st.booleans()),
    st.builds(messages.Explain, NAMES, KEYS, st.booleans()),
    st.builds(messages.Commit, U32, cluster_write=st.sampled_from(get_args(ClusterWrite))),
    st.builds(messages.Release, U32),
    st.builds(messages.Stats),
    st.builds(messages.Changes, st.integers(-1, 2**62), st.lists(NAMES, max_size=3)),
    st.builds(messages.Commit, U32, st.just([1, 2]), st.binary(min_size=8, max_size=8)),
    st.builds(
        messages.Corrupt,
        U32,
        st.binary(min_size=2 * KEY_BYTES, max_size=2 * KEY_BYTES),
        st.binary(min_size=2 * REF_BYTES, max_size=2 * REF_BYTES),
    ),
)
ANSWERS: st.SearchStrategy[Any] = st.one_of(
    st.builds(messages.Welcome, U32, NAMES, NAMES, st.booleans(), U32, NAMES, U32),
    st.builds(messages.Opened, U32),
    st.builds(messages.SegmentAttached, U32, U32),
    st.builds(messages.Granted, U32, st.binary(max_size=40), st.binary(max_size=40)),
    st.builds(messages.Hits, U32, U32, U32, st.binary(max_size=40)),
    st.builds(messages.Done, U32),
    st.builds(messages.Figures, st.dictionaries(NAMES, U32 | NAMES | st.lists(U32, max_size=3), max_size=4)),
    st.builds(
        messages.Changed, U32, st.booleans(), st.lists(st.builds(ChangeRun, U32, st.booleans(), KEYS), max_size=3)
    ),
    st.builds(messages.Refused, NAMES, NAMES),
)


def body_of(message: Message) -> bytes:
    frame = coding.encode(message)
    (length,) = struct.unpack(">I", frame[:4])
    assert length == len(frame) - 4
    return frame[4:]


@given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(message: messages.Request) -> None:
    assert coding.decode_request(body_of(message)) == message
    assert coding.encode_request(message) == coding.encode(message)


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        (1, {"local_only": False, "cluster_write": "", "patience": 0, "directories": b""}),
        (2, {"patience": 0, "directories": b""}),
        (3, {}),
    ],
)
@given(message=REQUESTS)
def test_a_reader_of_an_older_version_gets_what_it_knows(
    version: int, newer: dict[str, Any], message: messages.Request
) -> None:
    shorter = {name: newer[name] for name in message.__struct_fields__ if name in newer}
    body = coding.encode_request(message, version)[4:]
    assert len(msgspec.msgpack.decode(body, type=list[Any])) == 1 + len(message.__struct_fields__) - len(shorter)
    assert coding.decode_request(body) == msgspec.structs.replace(message, **shorter)


@given(ANSWERS)
def test_an_answer_arrives_as_it_was_sent(message: messages.Answer) -> None:
    assert coding.decode_answer(body_of(message)) == message


@given(REQUESTS | ANSWERS)
def test_neither_side_takes_the_others_messages(message: Message) -> None:
    decode = coding.decode_answer if type(message) in REQUEST_TYPES else coding.decode_request
    with pytest.raises(ProtocolError):
        decode(body_of(message))


REQUEST_TYPES = set(messages.Request.__args__)


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_and_nothing_else(raw: bytes) -> None:
    for decode in (coding.decode_request, coding.decode_answer):
        try:
            message = decode(raw)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 - a message may also be valid by chance
        else:
            assert decode(body_of(message)) == message


@given(REQUESTS, st.data())
def test_a_message_with_a_bit_flipped_is_another_or_none(message: messages.Request, data: st.DataObject) -> None:
    body = bytearray(body_of(message))
    at = data.draw(st.integers(0, len(body) * 8 - 1))
    body[at // 8] ^= 1 << at % 8
    try:
        other = coding.decode_request(body)
    except ProtocolError:
        return
    assert isinstance(other, Message)


@given(st.recursive(st.none() | U32 | st.binary(max_size=9) | NAMES, lambda x: st.lists(x) | st.dictionaries(NAMES, x)))
def test_well_formed_data_that_is_no_message_is_a_protocol_error(value: object) -> None:
    raw = msgspec.msgpack.encode(value)
    with pytest.raises(ProtocolError):
        coding.decode_request(raw)
    with pytest.raises(ProtocolError):
        coding.decode_answer(raw)


@pytest.mark.parametrize(
    "body",
    [
        b"\x94\xa7Release\x01\x02\x03",
        b"\x92\xa7Release\xa1x",
        b"\x92\xa7Release\xc3",
        b"\x92\xa7Release\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00",
        b"\x91\xa7Release",
        b"\x92\xa7release\x01",
        b"\xc1",
    ],
    ids=["more fields", "text for a number", "bool for a number", "a fraction", "fewer fields", "case", "reserved"],
)
def test_a_message_is_taken_by_the_letter(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        coding.decode_request(body)


def test_limits_hold_on_both_ends() -> None:
    most = limits.MAX_KEYS
    largest = messages.Reserve(2**32, bytes(16), bytes(16 * most))
    assert coding.decode_request(body_of(largest)) == largest
    longest = {position: Tail(bytes(16), bytes(1024)) for position in range(limits.MAX_TAIL_BYTES // 1056)}
    with_tails = messages.Reserve(2**32, bytes(16), bytes(16 * most), longest)
    assert len(coding.encode(with_tails)) < coding.MAX_FRAME
    assert coding.decode_request(body_of(with_tails)) == with_tails
    assert len(coding.encode(messages.Granted(2**32, bytes(most), bytes(REF_BYTES * most)))) < coding.MAX_FRAME
    each_for_itself = messages.Changed(2**62, lost=False, runs=[ChangeRun(2**31, True, bytes(16))] * CAPACITY)
    assert len(coding.encode(each_for_itself)) < coding.MAX_FRAME
    for message in (
        messages.Lookup(1, bytes(16 * (most + 1))),
        messages.Lookup(1, bytes(17)),
        messages.Reserve(1, bytes(16), bytes(16 * (most + 1))),
        messages.Reserve(1, bytes(15), bytes(16)),
        messages.Reserve(1, bytes(16), bytes(16), {1: Tail(bytes(16), bytes(4))}),
        messages.Reserve(1, bytes(16), bytes(16), {-1: Tail(bytes(16), bytes(4))}),
        messages.Reserve(1, bytes(16), bytes(16), {0: Tail(bytes(16), bytes(5))}),
        messages.Commit(1, [0] * (most + 1)),
        messages.Changes(0, [""] * (most + 1)),
    ):
        with pytest.raises(ProtocolError, match=r"(?i)expected"):
            coding.decode_request(body_of(message))
        with pytest.raises(ProtocolError, match=r"(?i)expected"):
            coding.encode_request(message)


def test_the_page_on_the_wire_names_every_field_of_every_message() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "protocol.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for message in (*messages.Request.__args__, *messages.Answer.__args__):
        fields = [field.name for field in msgspec.structs.fields(message)]
        named = re.findall(r"(?:^|, )(\w+)(?=:| = nil)", rows[message.__name__].split("; ")[0])
        assert named == fields, message.__name__
    assert f"| {coding.MAX_GREETING:,}" in page
    assert coding.encode(messages.Release(42)).hex(" ") in " ".join(page.replace("│", " ").split()).lower()
    assert all(f"| `{code}` |" in page for code in coding.REFUSALS)


@pytest.mark.parametrize(
    "message",
    [
        messages.Commit(1, None, b"1234"),
        messages.Commit(1, [1], b"12345"),
        messages.Corrupt(1, b"", b""),
        messages.Corrupt(1, bytes(KEY_BYTES), bytes(REF_BYTES + 1)),
    ],
)
def test_checksums_and_reports_that_do_not_add_up_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=r"bytes of (checksums|keys)"):
        coding.decode_request(body_of(message))


@pytest.mark.parametrize("directories", [1, KEY_BYTES, 5 * KEY_BYTES, 3 * KEY_BYTES + 1])
def test_directories_are_those_of_the_chunks_of_the_keys(directories: int) -> None:
    with pytest.raises(ProtocolError, match="bytes of directories for 6 keys, expected 16 for each chunk"):
        coding.encode_request(messages.Lookup(0, bytes(6 * KEY_BYTES), directories=bytes(directories)))
