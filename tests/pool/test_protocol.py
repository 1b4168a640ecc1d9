"""Messages survive the wire whole, however it cuts them; nothing else does."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import EmsError, NoSpace, PoolRefused, ProtocolError, StaleReference, Unauthorised, VersionMismatch
from ems.pool import protocol
from ems.pool.changes import CAPACITY, Run
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.protocol import FrameReader, Message, Refused

U32 = st.integers(0, 2**32 - 1)
TAILS = st.none() | st.builds(
    Tail,
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.integers(1, 9).map(lambda count: bytes(protocol.TOKEN_BYTES * count)),
)
KEYS = st.integers(0, 40).flatmap(lambda count: st.binary(min_size=KEY_BYTES * count, max_size=KEY_BYTES * count))
NAMES = st.text(max_size=20)

REQUESTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(protocol.Hello, U32, U32, NAMES, U32, st.lists(NAMES, max_size=3)),
    st.builds(protocol.Open, NAMES, U32),
    st.builds(protocol.Attach, U32),
    st.builds(protocol.Reserve, U32, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), KEYS, TAILS),
    st.builds(protocol.Commit, U32, st.none() | st.lists(U32, max_size=9)),
    st.builds(protocol.Abort, U32),
    st.builds(protocol.Lookup, U32, KEYS, st.booleans(), TAILS),
    st.builds(protocol.Release, U32),
    st.builds(protocol.Stats),
    st.builds(protocol.Changes, st.integers(-1, 2**62), st.lists(NAMES, max_size=3)),
)
ANSWERS: st.SearchStrategy[Any] = st.one_of(
    st.builds(protocol.Welcome, U32, NAMES, NAMES, st.booleans(), U32, st.lists(NAMES, max_size=3)),
    st.builds(protocol.Opened, U32),
    st.builds(protocol.SegmentAttached, U32, U32),
    st.builds(protocol.Granted, U32, st.binary(max_size=40), st.binary(max_size=40)),
    st.builds(protocol.Hits, U32, U32, U32, st.binary(max_size=40)),
    st.builds(protocol.Done, U32),
    st.builds(protocol.Figures, st.dictionaries(NAMES, U32 | NAMES | st.lists(U32, max_size=3), max_size=4)),
    st.builds(protocol.Changed, U32, st.booleans(), st.lists(st.builds(Run, U32, st.booleans(), KEYS), max_size=3)),
    st.builds(protocol.Refused, NAMES, NAMES),
)


def body_of(message: Message) -> bytes:
    frame = protocol.encode(message)
    (length,) = struct.unpack(">I", frame[:4])
    assert length == len(frame) - 4
    return frame[4:]


@given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(message: protocol.Request) -> None:
    assert protocol.decode_request(body_of(message)) == message
    assert protocol.encode_request(message) == protocol.encode(message)


@given(ANSWERS)
def test_an_answer_arrives_as_it_was_sent(message: protocol.Answer) -> None:
    assert protocol.decode_answer(body_of(message)) == message


@given(REQUESTS | ANSWERS)
def test_neither_side_takes_the_others_messages(message: Message) -> None:
    decode = protocol.decode_answer if type(message) in REQUEST_TYPES else protocol.decode_request
    with pytest.raises(ProtocolError):
        decode(body_of(message))


REQUEST_TYPES = set(protocol.Request.__args__)


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_and_nothing_else(raw: bytes) -> None:
    for decode in (protocol.decode_request, protocol.decode_answer):
        try:
            message = decode(raw)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 - a message may also be valid by chance
        else:
            assert decode(body_of(message)) == message


@given(REQUESTS, st.data())
def test_a_message_with_a_bit_flipped_is_another_or_none(message: protocol.Request, data: st.DataObject) -> None:
    body = bytearray(body_of(message))
    at = data.draw(st.integers(0, len(body) * 8 - 1))
    body[at // 8] ^= 1 << at % 8
    try:
        other = protocol.decode_request(body)
    except ProtocolError:
        return
    assert isinstance(other, Message)


@given(st.recursive(st.none() | U32 | st.binary(max_size=9) | NAMES, lambda x: st.lists(x) | st.dictionaries(NAMES, x)))
def test_well_formed_data_that_is_no_message_is_a_protocol_error(value: object) -> None:
    raw = msgspec.msgpack.encode(value)
    with pytest.raises(ProtocolError):
        protocol.decode_request(raw)
    with pytest.raises(ProtocolError):
        protocol.decode_answer(raw)


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
        protocol.decode_request(body)


def test_limits_hold_on_both_ends() -> None:
    most = protocol.MAX_KEYS
    largest = protocol.Reserve(2**32, bytes(16), bytes(16 * most))
    assert protocol.decode_request(body_of(largest)) == largest
    assert len(protocol.encode(protocol.Granted(2**32, bytes(most), bytes(20 * most)))) < protocol.MAX_FRAME
    each_for_itself = protocol.Changed(2**62, lost=False, runs=[Run(2**31, True, bytes(16))] * CAPACITY)
    assert len(protocol.encode(each_for_itself)) < protocol.MAX_FRAME
    for message in (
        protocol.Lookup(1, bytes(16 * (most + 1))),
        protocol.Lookup(1, bytes(17)),
        protocol.Reserve(1, bytes(16), bytes(16 * (most + 1))),
        protocol.Reserve(1, bytes(15), bytes(16)),
        protocol.Commit(1, [0] * (most + 1)),
        protocol.Changes(0, [""] * (most + 1)),
    ):
        with pytest.raises(ProtocolError, match="expected"):
            protocol.decode_request(body_of(message))
        with pytest.raises(ProtocolError, match="expected"):
            protocol.encode_request(message)


def test_the_page_on_the_wire_names_every_field_of_every_message() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for message in (*protocol.Request.__args__, *protocol.Answer.__args__):
        fields = [field.name for field in msgspec.structs.fields(message)]
        named = re.findall(r"(?:^|, )(\w+)(?=:| = nil)", rows[message.__name__].split("; ")[0])
        assert named == fields, message.__name__
    for limit in (protocol.MAX_GREETING, protocol.MAX_KEYS, protocol.MAX_TAIL // protocol.TOKEN_BYTES):
        assert f"| {limit:,}" in page
    assert protocol.encode(protocol.Release(42)).hex(" ") in " ".join(page.replace("│", " ").split()).lower()
    assert all(f"| `{code}` |" in page for code in protocol.REFUSALS)


# Frames


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_frames_are_found_wherever_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, found = FrameReader(), []
    for start, end in itertools.pairwise(bounds):
        reader.feed(stream[start:end])
        found += list(reader.frames())
    assert found == bodies


def test_a_stream_in_single_bytes_is_a_stream() -> None:
    reader, found = FrameReader(), []
    for byte in struct.pack(">I", 3) + b"abc" + struct.pack(">I", 0) + struct.pack(">I", 1) + b"d":
        reader.feed(bytes([byte]))
        found += list(reader.frames())
    assert found == [b"abc", b"", b"d"]


def test_a_frame_above_the_limit_is_refused_by_its_first_bytes() -> None:
    reader = FrameReader(limit=10)
    reader.feed(struct.pack(">I", 10) + b"0123456789" + struct.pack(">I", 11))
    frames = reader.frames()
    assert next(frames) == b"0123456789"
    with pytest.raises(ProtocolError, match="a frame of 11 bytes, expected at most 10"):
        next(frames)


# Refusals and versions


@pytest.mark.parametrize(
    "error",
    [ProtocolError, VersionMismatch, Unauthorised, NoSpace, StaleReference, PoolRefused],
    ids=lambda e: e.__name__,
)
def test_a_refusal_is_the_same_error_on_the_other_side(error: type[EmsError]) -> None:
    message = protocol.refusal(error("because of this"))
    with pytest.raises(error, match="because of this") as caught:
        protocol.raise_refusal(message)
    assert type(caught.value) is error


def test_a_refusal_of_a_later_version_is_still_a_refusal() -> None:
    with pytest.raises(PoolRefused, match="quota"):
        protocol.raise_refusal(Refused("quota-of-the-future", "quota"))


@pytest.mark.parametrize(("oldest", "newest", "version"), [(1, 1, 1), (1, 9, 1), (0, 1, 1)])
def test_the_newest_common_version_is_spoken(oldest: int, newest: int, version: int) -> None:
    assert protocol.negotiate(oldest, newest) == version


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (0, 0), (3, 1), (-5, -1)])
def test_without_a_common_version_nothing_is_spoken(oldest: int, newest: int) -> None:
    with pytest.raises(VersionMismatch, match=f"speaks protocol versions {oldest} to {newest}, this node 1 to 1"):
        protocol.negotiate(oldest, newest)
